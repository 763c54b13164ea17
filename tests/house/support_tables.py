"""docs/support.md: which model family runs, is compiled or is measured on which device, with which weights.

What is of a family follows from its cases (`parity`, `bailing`), and what is of a device from the parts that the family
is made of. `python tests/house/test_docs.py` writes it.
"""

import json
from typing import Any, get_args

import bailing
from parity import RAWS

from specserve.checkpoints.load import Quantization
from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.models.config import LayerKind, ModelConfig
from specserve.models.families import FAMILIES, model_config

ORDER = ("untested", "compiled", "runs", "measured")  # a family does the least of what its parts do
PARTS: dict[str, tuple[str, str, str]] = {  # of a layer: on CPUs, on GPUs, on TPUs
    "attention": ("runs", "compiled", "compiled"),
    "windows": ("runs", "compiled", "compiled"),
    "latent attention": ("runs", "compiled", "compiled"),
    "experts": ("runs", "compiled", "compiled"),
    "delta-net": ("runs", "untested", "compiled"),
    "lightning attention": ("runs", "untested", "untested"),
}
MIXERS = {
    "attention": "attention",
    "latent": "latent attention",
    "delta": "delta-net",
    "lightning": "lightning attention",
}
EXPERTS_ALONE = "experts: compiled; other products: XLA's, untested"
WEIGHTS: dict[str, tuple[str, str, str, str]] = {  # --quantization: what it reads and makes, on CPUs, GPUs, TPUs
    "none": (
        "float32, float16 and bfloat16 as they are; FP8, INT8, MXFP4, NVFP4, AWQ, GPTQ, compressed-tensors', MLX's and "
        "GGUF's layouts become floats",
        *("measured (bfloat16, float32)", "compiled", "compiled"),
    ),
    "stored": (
        "those layouts stay in 8 bits, with their scales, 4 bits as INT8 with a scale for each group, exactly; "
        "act-order, 8-bit GPTQ, MLX's, and GGUF's but Q8_0, Q5_0 and Q4_0 become floats",
        *("runs", EXPERTS_ALONE, EXPERTS_ALONE),
    ),
    "int8": ("rounded to INT8 at load, with a scale for each output", "measured", EXPERTS_ALONE, EXPERTS_ALONE),
    "fp8": ("rounded to FP8 (e4m3) at load, with a scale for each output", "runs", EXPERTS_ALONE, EXPERTS_ALONE),
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
        parts = {part for config in configs for i in range(config.num_layers) for part in _parts(config.kind(i))}
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


def _parts(kind: LayerKind) -> set[str]:
    found = {MIXERS[kind.mixer]}
    if kind.window:
        found.add("windows")
    if kind.has_experts:
        found.add("experts")
    return found
