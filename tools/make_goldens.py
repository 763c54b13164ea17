"""Write tests/goldens/*/expected.npz: what transformers' torch models compute for the config.json beside it.

Needs the `oracle` extra. Run from the checkout: `python tools/make_goldens.py [case ...]`. Weights are not stored: they
are drawn from the tensors' names and shapes, by the tool as by the tests (tests/support/seeded.py), which need
no torch.
"""

import json
import re
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors import safe_open

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS / "support"))

import seeded  # noqa: E402  # pyright: ignore[reportMissingImports]

# logits and layers are kept at these positions: the first ones, and about the edges of the windows
KEPT = (0, 1, 2, 3, 8, 11, 12, 13, 15, 16, 17, 24, 31, 32, 47, 63)
SAME_AS = {"kimi_k2": "deepseek_v3"}  # published under a model_type that transformers knows by another name
NOT_AUTOMATIC = ("mistral4",)  # text models that its AutoModelForCausalLM lacks
# text models that transformers has only within a model that sees, whose vision is as small as it can be
SEES = {f"{name}_text": name for name in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "minimax_m3_vl", "glm5_next")}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "fullatt_block_indexes": [],
    "deepstack_visual_indexes": [],
    "num_position_embeddings": 4,
}


def build(folder: Path, seed: int) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """transformers' model of `folder`'s config.json with drawn weights, and the tensors of its checkpoint, under the
    names that transformers saves and loads: the published ones."""
    raw = json.loads((folder / "config.json").read_text())
    raw["model_type"] = SAME_AS.get(raw["model_type"], raw["model_type"])
    auto: Any = transformers.AutoModelForCausalLM
    if raw["model_type"] in NOT_AUTOMATIC:
        auto = getattr(transformers, raw["architectures"][0])
    if raw["model_type"] in SEES:
        auto, vision = transformers.AutoModelForImageTextToText, VISION | {"out_hidden_size": raw["hidden_size"]}
        tied = raw.get("tie_word_embeddings", False)
        name = SEES[raw["model_type"]]
        raw = {"model_type": name, "tie_word_embeddings": tied, "text_config": raw, "vision_config": vision}
        raw |= {"projector_hidden_size": 8}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        (path / "config.json").write_text(json.dumps(raw))
        config = transformers.AutoConfig.from_pretrained(path)
        made = auto._from_config(config) if auto.__name__ in raw.get("architectures", ()) else auto.from_config(config)
        made.save_pretrained(path)
        with safe_open(path / "model.safetensors", framework="numpy") as tensors:
            shapes = {
                _published(name, tensors.keys()): tuple(tensors.get_slice(name).get_shape())
                for name in tensors.keys()  # noqa: SIM118
                if tensors.get_slice(name).get_dtype() != "I64"  # of hashes, which follow from the config
            }
        (path / "config.json").write_text(json.dumps(raw))
        seeded.write_weights(path, shapes, seed)
        loaded: Any = auto.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        model, report = loaded
    problems = {kind: names for kind, names in report.items() if not all("ple_embedding." in name for name in names)}
    if problems:
        raise ValueError(f"{folder.name}: transformers does not load what it saves: {problems}")
    return model.eval(), shapes


def _published(name: str, names: Collection[str]) -> str:
    """transformers saves all of Ling 3's output projections as `dense`; the published linear layers have an `o_proj`,
    which it loads as well. So it does with Kimi Linear's MLPs, which it saves under the name of the experts."""
    name = re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name)
    is_linear = name.replace(".dense.", ".o_norm.") in names
    return name.replace(".attention.dense.", ".attention.o_proj.") if is_linear else name


def compute(model: Any, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # [batch, n]
    """Logits [batch, n, vocab], and the outputs of all layers but the last [layer, batch, n, d_model]."""
    with torch.no_grad():
        out = model(torch.from_numpy(token_ids).long(), output_hidden_states=True, use_cache=False)
    layers, size = torch.stack(out.hidden_states[1:-1]), model.config.get_text_config().hidden_size
    if layers.ndim > 4:  # residual streams side by side, of which taps are the mean, as of those in one row
        layers = layers.flatten(3)
    return out.logits.numpy(), layers.unflatten(-1, (-1, size)).mean(-2).numpy()


def write_expected(folder: Path) -> None:
    model, shapes = build(folder, seed=0)
    token_ids = seeded.tokens(model.config.get_text_config().vocab_size, seed=0)
    logits, layers = compute(model, token_ids[None])
    np.savez_compressed(
        folder / "expected.npz",
        tensors=np.asarray([f"{name} {list(shape)}" for name, shape in sorted(shapes.items())]),
        kept=np.asarray(KEPT, np.int32),
        logits=logits[0, list(KEPT)],
        layers=layers[:, 0, list(KEPT)],
    )


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    chosen = sys.argv[1:] or sorted(path.parent.name for path in TESTS.glob("goldens/*/config.json"))
    for case in chosen:
        write_expected(TESTS / "goldens" / case)
