"""Heads whose files have int8, FP8 or NVFP4: every kind reads exactly the numbers that they stand for, keeps them where
that is asked for, is examined and imported as any other, and a damaged one is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file
from same_head import assert_same_head

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import TensorFolder, write_json, write_tensors
from specserve.drafters.interface import Head
from specserve.errors import CheckpointError
from specserve.interop import doctor
from specserve.interop.convert import import_head
from specserve.interop.head import load_head, save_head
from specserve.kernels.matmul import QuantizedMatrix, dequantize

Tensors = dict[str, np.ndarray]
BLOCK = {"num_layers": 1, "aux_layers": (0, 2, 4), "block_size": 4, "num_heads": 4}
MARKOV = {"markov_rank": 16, "confidence": "state and token", "foresees_anchor": True}
HEADS: dict[str, Callable[[Any], Head]] = {
    "eagle3": lambda config: tiny.random_head(config, seed=1),
    "p-eagle": lambda config: tiny.random_masked_head(config, seed=1),
    "dspark": lambda config: tiny.random_joint_head(config, 1, MARKOV, **BLOCK),
}
# whole numbers have one zero
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": layout}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def _int8(rng: np.random.Generator, value: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scale = (np.abs(value).max(1, keepdims=True) / 127).astype(np.float32)
    values = np.rint(value / scale).astype(np.int8)
    return {"weight": values, "weight_scale": scale}, values.astype(np.float32) * scale


def _fp8(rng: np.random.Generator, value: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scale = np.float32(np.abs(value).max() / 448)
    values = (value / scale).astype(ml_dtypes.float8_e4m3fn)
    one = np.ones((), np.float32)
    return {"weight": values, "weight_scale": one * scale, "input_scale": one}, values.astype(np.float32) * scale


def _fp4(rng: np.random.Generator, value: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random bytes and scales of the value's shape, and the numbers before the last scale."""
    outputs, inputs = value.shape
    values = rng.integers(0, 256, (outputs, inputs // 2), dtype=np.uint8)
    scale = rng.uniform(0.5, 2, (outputs, inputs // 16)).astype(ml_dtypes.float8_e4m3fn)
    numbers = E2M1[np.stack([values & 15, values >> 4], axis=-1).reshape(outputs, inputs)]
    return values, scale, numbers


def _modelopt(rng: np.random.Generator, value: np.ndarray) -> tuple[Tensors, np.ndarray]:
    values, scale, numbers = _fp4(rng, value)
    whole = np.float32(0.03)
    stored = {"weight": values, "weight_scale": scale, "weight_scale_2": whole.reshape(())}
    return stored, numbers * np.repeat(scale.astype(np.float32) * whole, 16, axis=1)


def _packed(rng: np.random.Generator, value: np.ndarray) -> tuple[Tensors, np.ndarray]:
    values, scale, numbers = _fp4(rng, value)
    whole = np.float32(40)
    stored = {"weight_packed": values, "weight_scale": scale, "weight_global_scale": whole.reshape(1)}
    return stored, numbers * np.repeat(scale.astype(np.float32) / whole, 16, axis=1)


LAYOUTS = {
    "int8": (_int8, _compressed("int-quantized", num_bits=8, strategy="channel", symmetric=True)),
    "fp8": (_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nvfp4": (_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4-packed": (_packed, _compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group")),
}


def _rewrite(folder: Path, whole: Path, layout: str) -> None:
    """Store the matrices of a head in few bits, and in another folder the floats that these stand for."""
    store, stated = LAYOUTS[layout]
    rng, given = np.random.default_rng(5), load_file(folder / "model.safetensors")
    few, floats = dict(given), dict(given)
    chosen = [name for name in given if name.endswith(("_proj.weight", "w2.weight")) or name == "lm_head.weight"]
    for name in chosen:
        tensors, floats[name] = store(rng, few.pop(name))
        few |= {f"{name.removesuffix('weight')}{part}": value for part, value in tensors.items()}
    raw = json.loads((folder / "config.json").read_text())
    whole.mkdir()
    for to, tensors, more in ((folder, few, {"quantization_config": stated}), (whole, floats, {})):
        write_tensors(to / "model.safetensors", tensors)
        write_json(to / "config.json", raw | more)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_of_few_bits_is_the_numbers_that_they_stand_for(
    kind: str, layout: str, tiny_target: Target, tmp_path: Path
) -> None:
    few, whole = tmp_path / "few", tmp_path / "whole"
    save_head(few, HEADS[kind](tiny_target.config), tiny_target, dtype="float32", notes={})
    _rewrite(few, whole, layout)
    expected = load_head(whole, tiny_target, dtype="float32")
    assert_same_head(load_head(few, tiny_target, dtype="float32"), expected)
    assert doctor.examine(few, tiny_target).findings == []
    import_head(few, tmp_path / "imported", tiny_target, target_name="tiny")
    assert_same_head(load_head(tmp_path / "imported", tiny_target, dtype="float32"), expected)

    kept = load_head(few, tiny_target, dtype="float32", quantization="stored")
    is_matrix = {"is_leaf": lambda leaf: isinstance(leaf, QuantizedMatrix)}
    matrices = [leaf for leaf in jax.tree.leaves(kept.params, **is_matrix) if isinstance(leaf, QuantizedMatrix)]
    assert len(matrices) >= 8  # of a layer's sublayers and of the output: all that rows are multiplied by
    floats = jax.tree.map(lambda leaf: dequantize(leaf, jnp.dtype("float32")), kept.params, **is_matrix)
    jax.tree.map(np.testing.assert_array_equal, floats, expected.params)


def test_a_damaged_one_is_refused_in_one_line(tiny_target: Target, tmp_path: Path) -> None:
    save_head(tmp_path / "few", HEADS["eagle3"](tiny_target.config), tiny_target, dtype="float32", notes={})
    _rewrite(tmp_path / "few", tmp_path / "whole", "nvfp4")
    stored = TensorFolder(tmp_path / "few")
    given = {name: stored.read(name) for name in stored.names()}
    scale = "midlayer.mlp.up_proj.weight_scale"
    for damaged, said in (
        ({k: v for k, v in given.items() if k != scale}, f"is packed, and {scale} is missing"),
        (given | {scale: given[scale][:, :1]}, rf"{scale} is float8_e4m3fn \[48, 1\], expected"),
        (given | {f"{scale}_2": np.zeros((), np.float32)}, f"{scale}_2 is \\[0.0\\], expected one scale"),
    ):
        write_tensors(tmp_path / "few" / "model.safetensors", damaged)
        with pytest.raises(CheckpointError, match=said) as refused:
            load_head(tmp_path / "few", tiny_target, dtype="float32")
        assert "\n" not in str(refused.value)
        found = [each for each in doctor.examine(tmp_path / "few", tiny_target).errors if each.code == "quantization"]
        assert len(found) == 1
