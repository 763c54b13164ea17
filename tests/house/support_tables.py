"""docs/support.md: which model family runs, is compiled or is measured on which device, with which weights, and which
published heads.

What is of a family follows from its cases (`parity`, `bailing`), and what is of a device from the parts that the family
is made of. What is of a head follows from its reader and its writer. `python tests/house/test_docs.py` writes it.
"""

import dataclasses
import json
from typing import Any, get_args

import bailing
import tiny
from parity import RAWS, TESTS

from specserve.checkpoints.load import Quantization
from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.layers import windowed
from specserve.drafters.registry import KINDS, WHOLE, DraftSettings, load_kind
from specserve.interop.assistant import CLASSES as ASSISTANT_CLASSES
from specserve.interop.dflash.dialects import ARCHITECTURES as BLOCK_CLASSES
from specserve.interop.eagle3.dialects import KEYS as EAGLE3_KEYS
from specserve.interop.findings import Dialect
from specserve.interop.formats import FORMATS, format_for, format_named
from specserve.interop.mtp.files import ARCHITECTURES as MTP_CLASSES
from specserve.interop.peagle.files import OWN as PEAGLE_CLASSES
from specserve.models.config import LayerKind, ModelConfig
from specserve.models.families.table import FAMILIES, model_config

ORDER = ("untested", "compiled", "runs", "measured")  # a family does the least of what its parts do
PARTS: dict[str, tuple[str, str, str]] = {  # of a layer: on CPUs, on GPUs, on TPUs
    "attention": ("runs", "compiled", "compiled"),
    "windows": ("runs", "compiled", "compiled"),
    "heads of two widths": ("runs", "untested", "untested"),
    "latent attention": ("runs", "compiled", "compiled"),
    "chosen blocks": ("runs", "untested", "untested"),
    "compressed attention": ("runs", "untested", "untested"),
    "experts": ("runs", "compiled", "compiled"),
    "several streams": ("runs", "untested", "untested"),
    "delta-net": ("runs", "untested", "compiled"),
    "lightning attention": ("runs", "untested", "untested"),
    "Mamba-2": ("runs", "untested", "untested"),
    "short convolutions": ("runs", "untested", "untested"),
}
MIXERS = {
    "attention": "attention",
    "latent": "latent attention",
    "compressed": "compressed attention",
    "delta": "delta-net",
    "lightning": "lightning attention",
    "mamba": "Mamba-2",
    "conv": "short convolutions",
}
EXPERTS_ALONE = "experts: compiled; other products: XLA's, untested"
WEIGHTS: dict[str, tuple[str, str, str, str]] = {  # --quantization: what it reads and makes, on CPUs, GPUs, TPUs
    "none": (
        "float32, float16 and bfloat16 as they are; FP8, INT8, MXFP4, NVFP4, AWQ, GPTQ, compressed-tensors', MLX's and "
        "GGUF's layouts become floats",
        *("measured (bfloat16, float32)", "compiled", "compiled"),
    ),
    "stored": (
        "those layouts stay in 8 bits, with their scales and offsets, and in native kernels what fits in 4 bits in 4, "
        "exactly, on GPUs and TPUs with scales and offsets in bfloat16; act-order, 8-bit GPTQ, MLX and "
        "compressed-tensors with zeros, and GGUF's IQ1 to IQ3, TQ1 and TQ2 become floats; how `serve` holds them on "
        "one CPU with native kernels where nothing else is asked",
        *("measured (GGUF)", "compiled", "compiled"),
    ),
    "int8": ("rounded to INT8 at load, with a scale for each output", "measured", EXPERTS_ALONE, EXPERTS_ALONE),
    "int4": (
        "rounded to 4 bits at load, with a scale and an offset for every 32 inputs of an output; where no "
        "kernel of ours takes a matrix, the numbers take 8 bits",
        *("measured", "compiled", "compiled"),
    ),
    "fp8": ("rounded to FP8 (e4m3) at load, with a scale for each output", "runs", EXPERTS_ALONE, EXPERTS_ALONE),
}

EARLY = "speculators in its early days"
HEADS: dict[str, dict[str, str]] = {  # by kind: the classes that a config.json may name, and their writers
    "eagle3": {
        "LlamaForCausalLMEagle3": "specserve, SpecForge, SpecJAX, EAGLE, AngelSlim, Model-Optimizer",
        "Eagle3DraftModel": "speculators",
        "Eagle3Speculator": EARLY,
        "Eagle3LlamaForCausalLM": "for vLLM",
        "Eagle3Qwen3ForCausalLM": "for vLLM",
        "Eagle3Qwen2_5vlForCausalLM": "for vLLM",
        "Eagle3Qwen3vlForCausalLM": "for vLLM",
        "Qwen3Eagle3Model": "DeepSpec",
        "Gemma4Eagle3Model": "DeepSpec",
        "Eagle3DeepseekV2ForCausalLM": "specserve, Model-Optimizer, TorchSpec",
        "Eagle3DeepseekV3ForCausalLM": "for vLLM",
    },
    "p-eagle": {
        "PEagleDraftModel": "specserve, speculators, SpecForge",
        "PEagleSpeculator": EARLY,
        "LlamaForCausalLMPeagle": "for vLLM",
        "PeagleLlamaForCausalLM": "for vLLM",
        "PeagleQwen3ForCausalLM": "for vLLM",
    },
    "dflash": {"DFlashDraftModel": "specserve, z-lab, speculators, SpecForge", "DFlashSpeculator": EARLY},
    "dspark": {
        "Qwen3DSparkModel": "specserve, DeepSpec",
        "DSparkDraftModel": "speculators, SpecForge",
        "DSparkSpeculator": EARLY,
        "Gemma4DSparkModel": "DeepSpec",
    },
    "dflash2": {"DFlash2DraftModel": "specserve, z-lab, speculators"},
    "domino": {"DominoDraftModel": "specserve, SpecForge"},
    "gemma4-assistant": dict.fromkeys(sorted(ASSISTANT_CLASSES), "Google"),
    "mtp": {
        **dict.fromkeys(sorted(MTP_CLASSES - {"MTPDraftModel"}), "the target's checkpoint, specserve"),
        "MTPDraftModel": "speculators",
    },
}
CLASSES: dict[str, frozenset[str]] = {  # that are read
    "eagle3": EAGLE3_KEYS.classes,
    "p-eagle": PEAGLE_CLASSES,
    **{kind: frozenset(names) for kind, names in BLOCK_CLASSES.items()},
    "mtp": MTP_CLASSES,
    "gemma4-assistant": ASSISTANT_CLASSES,
}
# beside packages, of the same tensors: test_dense_twin.py and test_joint_slots.py in tests/drafters, and test_mtp.py
TWINS: dict[str, str] = {
    **dict.fromkeys((*EAGLE3_KEYS.classes, *PEAGLE_CLASSES, *BLOCK_CLASSES["domino"], "Gemma4DSparkModel"), "NumPy"),
    **dict.fromkeys(("DeepSeekMTPModel", "Glm4MoeMTPModel", "MTPModel", "MTPDraftModel"), "transformers"),
    **dict.fromkeys(ASSISTANT_CLASSES, "transformers"),
    **dict.fromkeys(("Qwen3NextMTP", "Qwen3_5MTP", "Qwen3_5MoeMTP", "MiMoMTPModel"), "transformers"),
    **dict.fromkeys(("DeepSeekV4MTPModel", "Qwen4ExpMTP"), "transformers"),
}
SERVED_ALONE = ("DeepSeekV4MTPModel",)  # and not trained
OF_SPECULATORS = ("MTPDraftModel", "Qwen3NextMTP")  # layers that it has a layout for, beside a Qwen3's
OPTIONS: dict[str, dict[str, Any]] = {
    "several layers": {"num_layers": 2},
    "windows": {"layers": windowed((8,))},
    "norms of queries and keys": {"qk_norm": "head"},
    "biases of attention": {"qkv_bias": True, "o_bias": True},
    "biases of the MLP": {"mlp_bias": True},
    "GELU by tanh": {"activation": "gelu_tanh"},
    "GELU by erf": {"activation": "gelu_erf"},
    "latent attention": tiny.LATENTS,
    "the layers of a Gemma 4": tiny.GEMMA,
    "another width than the target's": {"d_model": 16, "has_embedding": True},
    "`norm_output`, `fc_norm`": {"norm_output": True, "fc_norm": True},
    "the target's output head": {"has_own_head": False},
}


def families() -> str:
    """Return the table of families, one row a `model_type`."""
    cases: dict[str, list[ModelConfig]] = {family: [] for family in FAMILIES}
    for raw in (*RAWS.values(), *bailing.CASES.values()):
        cases[raw["model_type"]].append(model_config(raw, dtype="float32"))
    by_transformers = {raw["model_type"] for raw in RAWS.values()}
    by_numpy = {raw["model_type"] for raw in bailing.CASES.values()}
    bundled = json.loads((BUNDLED_FOLDER / "config.json").read_text())["model_type"]
    rows = ["| `model_type` | made of | equals | CPU | GPU | TPU | `--deterministic` |", "|" + "---|" * 7]
    for family, configs in cases.items():
        parts = {
            part for config in configs for i in range(config.num_layers) for part in _parts(config, config.kind(i))
        }
        devices = [min((PARTS[part][i] for part in parts), key=ORDER.index) for i in range(3)]
        devices[0] = "measured" if family == bundled else "runs"  # figures are of the bundled target alone
        equals = [name for name, of in (("transformers", by_transformers), ("NumPy", by_numpy)) if family in of]
        kept = "no" if any(config.is_recurrent for config in configs) else "yes"
        made_of = ", ".join(part for part in PARTS if part in parts)
        rows.append(f"| `{family}` | {made_of} | {', '.join(equals)} | {' | '.join(devices)} | {kept} |")
    return "\n".join(rows) + "\n"


def weights() -> str:
    """Return the table of weights formats, one row an option of `--quantization`."""
    rows: list[Any] = [f"| `{how}` | {' | '.join(WEIGHTS[how])} |" for how in get_args(Quantization)]
    return "\n".join(["| `--quantization` | weights | CPU | GPU | TPU |", "|---|---|---|---|---|", *rows]) + "\n"


def heads() -> str:
    """Return the table of published heads, one row a class that a config.json may name."""
    saved = _saved_by()
    kinds = FORMATS.keys() - {WHOLE}  # a language model, whose classes are those of targets
    assert HEADS.keys() == kinds, f"{sorted(HEADS.keys() ^ kinds)} are read or listed, and not both"
    rows = ["| kind | class | written by | loads | equals | trains | exports to |", "|" + "---|" * 7]
    for kind, classes in HEADS.items():
        own = CLASSES[kind]
        assert own == classes.keys(), f"{kind}: {sorted(own ^ classes.keys())} are read or listed, and not both"
        for name, writer in classes.items():
            masks = {"mask_token_id": 1} if kind == "p-eagle" else {}
            assert format_named({"architectures": [name], **masks}) is format_for(kind), f"{name} is not read as {kind}"
            equals = ", ".join([*saved.get(name, ()), *([TWINS[name]] if name in TWINS else ())]) or "not by itself"
            if not KINDS[kind].is_trained:
                rows.append(f"| `{kind}` | `{name}` | {writer} | yes | {equals} | no | none |")
                continue
            drafter = _drafter(kind, is_gemma=name.startswith("Gemma4"))
            exports = [name for name in get_args(Dialect) if not format_for(kind).unknown_to(name, drafter)]
            engines = ", ".join(exports) or "none"
            if kind == "mtp" and name not in OF_SPECULATORS:
                engines = engines.replace("speculators, ", "")
            trains = "no" if name in SERVED_ALONE else f"`--drafter {kind}`"
            rows.append(f"| `{kind}` | `{name}` | {writer} | yes | {equals} | {trains} | {engines} |")
    return "\n".join(rows) + "\n"


def head_options() -> str:
    """Return the table of options of an EAGLE-3 head, by the engines that compute them."""
    rows: list[Any] = [f"| option | specserve | {' | '.join(get_args(Dialect))} |", "|" + "---|" * 6]
    for option, changes in OPTIONS.items():
        drafter = _drafter("eagle3").with_shape(**changes)
        plain = _drafter("eagle3")
        cells = []
        for dialect in get_args(Dialect):
            known = format_for("eagle3").unknown_to(dialect, plain)
            more = [what for what in format_for("eagle3").unknown_to(dialect, drafter) if what not in known]
            cells.append("no" if more else "yes")
        rows.append(f"| {option} | yes | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _drafter(kind: str, *, is_gemma: bool = False) -> TrainedDrafter:
    """A drafter of the kind, of its own shape beside the tests' tiny target, or with the layers of a Gemma 4."""
    target = model_config(tiny.TARGET, dtype="float32")
    found = load_kind(kind).new(DraftSettings(), target, target.vocab_size)
    if not is_gemma:
        return found
    config: Any = found.config
    norm = {"has_value_norm": True}
    if kind == "eagle3":
        return dataclasses.replace(found, config=dataclasses.replace(config, **norm))  # type: ignore[type-var]
    own = dataclasses.replace(config, backbone=dataclasses.replace(config.backbone, **norm))
    return dataclasses.replace(found, config=own)  # type: ignore[type-var]


def _saved_by() -> dict[str, list[str]]:
    """The packages whose own forward the tests compare heads of each class with."""
    found: dict[str, set[str]] = {}
    for path in (TESTS / "goldens").glob("*/*/config.json"):
        package = "dflash" if path.parent.name.startswith("dflash-") else "speculators"
        for name in json.loads(path.read_text())["architectures"]:
            found.setdefault(name, set()).add(f"`{package}`")
    return {name: sorted(packages) for name, packages in found.items()}


def _parts(config: ModelConfig, kind: LayerKind) -> set[str]:
    found = {MIXERS[kind.mixer]} if kind.mixer in MIXERS else set()
    if kind.window:
        found.add("windows")
    if kind.head_dim:
        found.add("heads of two widths")
    if kind.has_experts:
        found.add("experts")
    if kind.mixer == "attention" and config.of(kind).block_index:
        found.add("chosen blocks")
    if config.streams is not None:
        found.add("several streams")
    return found
