"""Arrays as Tunix's models keep them, by hand and without Tunix, as a target's parameters."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specserve.checkpoints.load import load_target
from specserve.checkpoints.nnx import target_params
from specserve.checkpoints.tensors import TensorFolder
from specserve.errors import ConfigError
from specserve.models.target import target_spec

D, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8
PATHS = (
    (r"model\.layers\.(\d+)\.self_attn\.(\w+)_proj\.bias", r"layers.\1.attn.\2_bias"),
    (r"model\.layers\.(\d+)\.self_attn\.(\w+)\.weight", r"layers.\1.attn.\2.w"),
    (r"model\.layers\.(\d+)\.mlp\.(\w+)\.weight", r"layers.\1.mlp.\2.kernel"),
    (r"model\.layers\.(\d+)\.(\w+)\.weight", r"layers.\1.\2.w"),
    (r"model\.embed_tokens\.weight", "embedder.input_embedding"),
    (r"model\.norm\.weight", "final_norm.w"),
    (r"lm_head\.weight", "lm_head.w"),
)
AXES: dict[str, tuple[int, ...]] = {
    "q_proj.w": (D, HEADS, HEAD_DIM), "k_proj.w": (D, KV_HEADS, HEAD_DIM), "v_proj.w": (D, KV_HEADS, HEAD_DIM),
    "o_proj.w": (HEADS, HEAD_DIM, D),
}  # fmt: skip
Q = "layers.1.attn.q_proj.w"


def _path_of(name: str) -> str:
    return next(re.sub(pattern, path, name) for pattern, path in PATHS if re.fullmatch(pattern, name))


def _state(folder: Path) -> dict[str, jax.Array]:
    tensors, found = TensorFolder(folder), {}
    for name in tensors.names():
        path, array = _path_of(name), tensors.read(name)
        if array.ndim == 2 and path != "embedder.input_embedding":
            array = array.T.reshape(AXES.get(".".join(path.split(".")[-2:]), array.T.shape))
        found[path] = jnp.asarray(array)
    return found


def _folder(folder: Path, **changes: Any) -> Path:
    tiny.write_target(folder, tiny.TARGET | {"num_hidden_layers": 2} | changes, seed=3)
    return folder


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "llama", "tie_word_embeddings": True}, {"model_type": "qwen2"}], ids=str
)
def test_a_trainers_arrays_are_the_parameters_of_the_checkpoint(changes: dict[str, Any], tmp_path: Path) -> None:
    target = load_target(_folder(tmp_path, **changes), dtype="float32")
    found = target_params(_state(tmp_path), target_spec(target.config), _path_of)
    jax.tree.map(np.testing.assert_array_equal, found, target.params)


@pytest.mark.parametrize("path", [Q, "layers.0.attn.o_proj.w", "layers.1.mlp.down_proj.kernel"])
def test_a_pair_is_added_to_its_matrix(path: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Whole numbers, so that the sum has no rounding."""
    target = load_target(_folder(tmp_path), dtype="float32")
    state = {name: jnp.round(array * 8) for name, array in _state(tmp_path).items()}
    shape, split = state[path].shape, len(state[path].shape) - 1 if "o_proj" in path else 1
    a, b = (rng.integers(-3, 4, each).astype(np.float32) for each in ((*shape[:split], 4), (4, *shape[split:])))
    spec = target_spec(target.config)
    expected = target_params(state | {path: state[path] + 1.5 * np.tensordot(a, b, 1)}, spec, _path_of)
    found = target_params(
        state | {f"{path}_lora_a": jnp.asarray(a), f"{path}_lora_b": jnp.asarray(b)}, spec, _path_of, 6
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def _pair(*shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    return {f"{Q}_lora_{side}": jnp.ones(shape) for side, shape in zip("ab", shapes, strict=False)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("final_norm.w") is None, r"final_norm\.w is missing, expected \(32,\)"),
        (
            lambda state: state.update({"layers.2.attn.q_proj.w": state[Q]}),
            r"layers\.2\.attn\.q_proj\.w is no parameter",
        ),
        (lambda state: state.update({Q: state[Q][:, :2]}), r"q_proj\.w is \(32, 2, 8\), expected \(32, 32\)"),
        (lambda state: state.update({"lm_head.w": state["lm_head.w"].T}), r"lm_head\.w is \(64, 32\), expected"),
        (lambda state: state.update(_pair((D, 4))), r"q_proj\.w is \(32, 4, 8\), its pair A \(32, 4\) and B missing"),
        (lambda state: state.update(_pair((D, 4), (3, HEADS, HEAD_DIM))), r"its pair A \(32, 4\) and B \(3, 4, 8\)"),
        (lambda state: state.update(_pair((D, 4), (4, HEADS))), r"its pair A \(32, 4\) and B \(4, 4\)"),
        (lambda state: state.update({f"x{Q}_lora_a": state[Q]}), "xlayers.1.attn.q_proj.w is missing, its pair"),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[dict[str, Any]], Any], words: str, tmp_path: Path) -> None:
    target = load_target(_folder(tmp_path), dtype="float32")
    state = _state(tmp_path)
    change(state)
    with pytest.raises(ConfigError, match=words):
        target_params(state, target_spec(target.config), _path_of, 6)
