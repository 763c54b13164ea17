"""Checkpoints of 8 and 4 bits: every layout against its description in NumPy, dequantised and kept, whole and spread;
and targets that are quantised at load, within a stated bound."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from experts import FORMS
from rounding import assert_same, assert_within, of_product, tolerance
from safetensors.numpy import load_file

from specserve import mesh
from specserve.checkpoints.load import Target, in_few_bits, load_params, load_target
from specserve.checkpoints.quantized import Storing, read_storing
from specserve.checkpoints.sound import check_weights
from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.checkpoints.tensors import TensorFolder, write_tensors
from specserve.errors import CheckpointError
from specserve.kernels.matmul import QuantizedMatrix, Rounded, dequantize, matmul, quantize
from specserve.kernels.nibbles import NibbleMatrix, WordMatrix
from specserve.models import moe, served
from specserve.models.config import ModelConfig
from specserve.models.params import ParamSpec, TensorPart, is_product, matrix, vector
from specserve.models.sharding import total_bytes
from specserve.models.target import TargetParams, forward, logits, target_spec, with_own_head
from specserve.plan.work import target_held

Tensors = dict[str, np.ndarray]
D_IN, D_OUT = 20, 24
SPEC = {"norm": vector("norm", D_IN), "o": matrix("o.weight", D_IN, D_OUT, ("heads", "mlp"))}
FP8, INT8 = ml_dtypes.float8_e4m3fn, np.int8


def quantize_params(params: TargetParams, to: Rounded) -> TargetParams:
    """The plain twin of loading with a quantization: every matrix that rows are multiplied by, once all are there."""
    quantized = jax.jit(quantize, static_argnames="to")
    return jax.tree_util.tree_map_with_path(lambda path, x: quantized(x, to) if is_product(path) else x, params)


def _eight_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.integers(-100, 100, shape).astype(np.float32).astype(dtype)


def _scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.001, 0.01, shape).astype(np.float32)


def _load(folder: Path, tensors: Tensors, spec: Any = SPEC, **options: Any) -> Any:
    write_tensors(folder / "model.safetensors", tensors)
    return load_params(spec, TensorFolder(folder), "float32", **options)


@pytest.mark.parametrize("dtype", [FP8, ml_dtypes.float8_e5m2, INT8])
@pytest.mark.parametrize(
    ("suffix", "shape", "block"),
    [
        ("_scale_inv", (3, 3), (8, 8)),  # DeepSeek's, here of 8; 20 inputs are no multiple
        ("_scale_inv", (3, 5), (8, 4)),
        ("_scale", (5, 2), (5, 10)),  # compressed-tensors by block; 24 outputs are no multiple
        ("_scale", (D_OUT, 1), (128, 128)),  # fbgemm's, and compressed-tensors by channel
        ("_scale", (D_OUT,), (128, 128)),
        ("_scale", (1,), (128, 128)),  # compressed-tensors by tensor
        ("_scale", (), (128, 128)),
        ("_scale_inv", (1, 1), (128, 128)),
    ],
)
def test_a_weight_is_its_values_times_its_scales(
    tmp_path: Path, rng: np.random.Generator, dtype: Any, suffix: str, shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    values, scale = _eight_bits(rng, (D_OUT, D_IN), dtype), _scales(rng, *shape)
    norm = rng.standard_normal(D_IN).astype(np.float32)
    tensors = {"o.weight": values, f"o.weight{suffix}": scale, "norm": norm, "o.input_scale": np.ones(1, np.float32)}
    expected = np.zeros((D_IN, D_OUT), np.float32)
    for row in range(D_OUT):
        for column in range(D_IN):
            where = scale.reshape(-1)
            if scale.size == D_OUT:
                factor = where[row]
            elif scale.size == 1:
                factor = where[0]
            else:
                factor = scale[row // block[0], column // block[1]]
            expected[column, row] = np.float32(values[row, column]) * factor
    dense = _load(tmp_path, tensors, storing=Storing(block))
    np.testing.assert_array_equal(dense["o"], expected)
    np.testing.assert_array_equal(dense["norm"], norm)
    kept = _load(tmp_path, tensors, storing=Storing(block), quantization="stored")
    assert isinstance(kept["o"], QuantizedMatrix)
    assert kept["o"].values.dtype == dtype
    np.testing.assert_array_equal(dequantize(kept["o"], jnp.dtype("float32")), expected)
    assert kept["norm"].dtype == np.float32


def test_kept_and_dequantised_weights_multiply_alike(tmp_path: Path, rng: np.random.Generator) -> None:
    spec = {"o": matrix("o.weight", 256, 384, ("heads", "mlp"))}
    values = _eight_bits(rng, (384, 256), FP8)
    for name, shape in (("_scale_inv", (3, 2)), ("_scale", (384, 1))):
        tensors = {"o.weight": values, f"o.weight{name}": _scales(rng, *shape)}
        kept, dense = (_load(tmp_path, tensors, spec, quantization=how)["o"] for how in ("stored", "none"))
        x = jnp.asarray(rng.standard_normal((3, 256)), jnp.float32)
        assert_within(matmul(x, kept), matmul(x, dense), of_product(x, dense))


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def _fp4(rng: np.random.Generator, *rows: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks, scales, and what they mean: [..., out, in]."""
    blocks = rng.integers(0, 256, (*rows, groups, 16), dtype=np.uint8)
    scales = rng.integers(118, 131, (*rows, groups), dtype=np.uint8)
    meant = np.zeros((*rows, groups, 32), np.float32)
    for place, byte in np.ndenumerate(blocks):
        power = 2.0 ** (int(scales[place[:-1]]) - 127)
        meant[(*place[:-1], 2 * place[-1])] = E2M1[byte & 15] * power
        meant[(*place[:-1], 2 * place[-1] + 1)] = E2M1[byte >> 4] * power
    return blocks, scales, meant.reshape(*rows, -1)


FP4_SPEC = {  # of GPT-OSS: gate and up in alternate outputs
    "gate": ParamSpec((3, 64, 5), ("experts", "embed", "mlp"), "experts.gate_up", part=TensorPart(0, 1, 2, 10)),
    "up": ParamSpec((3, 64, 5), ("experts", "embed", "mlp"), "experts.gate_up", part=TensorPart(1, 2, 2, 10)),
    "down": ParamSpec((3, 32, 64), ("experts", "mlp", "embed"), "experts.down"),
}


def test_mxfp4_means_what_its_table_says(tmp_path: Path, rng: np.random.Generator) -> None:
    gate_up, down = _fp4(rng, 3, 10, groups=2), _fp4(rng, 3, 64, groups=1)
    gate_up[0][0, 0, 0] = np.arange(16) * 16 + np.arange(16)[::-1]  # every value, in either half of a byte
    tensors = {
        "experts.gate_up_blocks": gate_up[0],
        "experts.gate_up_scales": gate_up[1],
        "experts.down_blocks": down[0],
        "experts.down_scales": down[1],
    }
    halves = np.stack([np.arange(16)[::-1], np.arange(16)], axis=1).reshape(-1)
    gate_up[2][0, 0, :32] = np.array(E2M1, np.float32)[halves] * 2.0 ** (int(gate_up[1][0, 0, 0]) - 127)
    expected = {
        "gate": gate_up[2][:, ::2].swapaxes(1, 2),
        "up": gate_up[2][:, 1::2].swapaxes(1, 2),
        "down": down[2].swapaxes(1, 2),
    }
    dense = _load(tmp_path, tensors, FP4_SPEC)
    kept = _load(tmp_path, tensors, FP4_SPEC, quantization="stored")
    for name, value in expected.items():
        np.testing.assert_array_equal(dense[name], value)
        np.testing.assert_array_equal(dequantize(kept[name], jnp.dtype("float32")), value)
        assert kept[name].values.dtype == np.int8


def test_fp4_with_other_scales_than_it_needs_is_refused(tmp_path: Path) -> None:
    values, scale = np.ones((4, 16), np.int8), np.ones((4, 2), np.float32).astype(ml_dtypes.float8_e8m0fnu)
    spec = {"o": matrix("o.weight", 32, 4, ("heads", "mlp"))}
    with pytest.raises(CheckpointError, match=r"o\.scale the shape \(4, 2\); expected .*\(4, 1\)"):
        _load(tmp_path, {"o.weight": values, "o.scale": scale}, spec)


@pytest.mark.parametrize("quantization", ["none", "stored", "int8"])
@pytest.mark.parametrize(("tensor", "expert"), [(4, 1), (2, 2)])
def test_a_spread_load_is_the_whole_one(
    tmp_path: Path, rng: np.random.Generator, quantization: str, tensor: int, expert: int
) -> None:
    """Blocks that a device's slice begins or ends within, experts of 4 and of 8 bits, outputs that are picked."""
    blocks, scales, _ = _fp4(rng, 4, 8, groups=2)
    spec = {
        "o": matrix("o.weight", D_IN, D_OUT, ("heads", "embed")),
        "q": matrix("q.weight", D_IN, 16, ("embed", "heads"), part=TensorPart(1, 5, 6, D_OUT)),
        "up": ParamSpec((4, D_IN, D_OUT), ("experts", "embed", "mlp"), "{e}.up", transpose=True),
        "down": ParamSpec((4, 64, 8), ("experts", "mlp", "embed"), "down"),
    }
    tensors: Tensors = {"down_blocks": blocks, "down_scales": scales}
    for name in ("o.weight", "q.weight", *(f"{e}.up" for e in range(4))):
        tensors |= {name: _eight_bits(rng, (D_OUT, D_IN), FP8), f"{name}_scale_inv": _scales(rng, 4, 3)}
    options: dict[str, Any] = {"storing": Storing((7, 8)), "quantization": quantization}
    whole = _load(tmp_path, tensors, spec, **options)
    devices = mesh.make_mesh(tensor=tensor, expert=expert)
    shardings = {name: mesh.sharding(devices, each.axes) for name, each in spec.items()}
    spread = _load(tmp_path, tensors, spec, shardings=shardings, **options)
    for name in spec:
        for one, other in zip(jax.tree.leaves(whole[name]), jax.tree.leaves(spread[name]), strict=True):
            np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))
        values = spread[name] if quantization == "none" else spread[name].values
        assert values.sharding == shardings[name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"o.weight_scale": None}, "o.weight is float8_e4m3fn, but there is no o.weight_scale_inv and no"),
        (
            {"o.weight_scale": np.ones((2, 2), np.float32)},
            r"has shape \(2, 2\), expected one scale, \(24, 1\) or \(1, 1\)",
        ),
        (
            {"o.weight": np.ones((D_IN, D_OUT), FP8), "o.weight_scale": np.ones(1)},
            r"shape \(20, 24\), config.json says",
        ),
        ({"o.weight": np.ones((D_OUT, D_IN), np.uint8)}, "o.weight is uint8, expected a float, or a matrix of int8"),
        ({"norm": np.ones(D_IN, np.int8)}, "norm is int8, expected a float"),
        ({"o.weight_zero_point": np.ones((D_OUT, 1), np.int8)}, "o.weight_zero_point is not part of"),
    ],
)
def test_quantised_tensors_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    tensors = {
        "o.weight": np.ones((D_OUT, D_IN), FP8),
        "o.weight_scale": np.ones((D_OUT, 1), np.float32),
        "norm": np.ones(D_IN, np.float32),
    } | changes
    with pytest.raises(CheckpointError, match=words):
        _load(tmp_path, {name: value for name, value in tensors.items() if value is not None})


def test_quantised_weights_that_are_no_numbers_are_named(tmp_path: Path, rng: np.random.Generator) -> None:
    spec = {"up": ParamSpec((3, D_IN, D_OUT), ("experts", "embed", "mlp"), "{e}.up", transpose=True)}
    tensors = {f"{e}.up": _eight_bits(rng, (D_OUT, D_IN), FP8) for e in range(3)}
    tensors |= {f"{e}.up_scale": _scales(rng, D_OUT, 1) for e in range(3)}
    check_weights(_load(tmp_path, tensors, spec, quantization="stored"), spec, "here")
    tensors["1.up"].view(np.uint8)[3, 2] = 0x7F  # e4m3's not-a-number
    tensors["2.up_scale"][5] = np.inf
    for how in ("stored", "none"):
        with pytest.raises(CheckpointError, match=r"infinite: 1\.up; 2\.up; "):
            check_weights(_load(tmp_path, tensors, spec, quantization=how), spec, "here")


def test_experts_that_are_stored_in_different_ways_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    spec = {"up": ParamSpec((2, D_IN, D_OUT), ("experts", "embed", "mlp"), "{e}.up", transpose=True)}
    tensors = {f"{e}.up": _eight_bits(rng, (D_OUT, D_IN), FP8) for e in range(2)}
    tensors |= {"0.up_scale": _scales(rng, D_OUT, 1), "1.up_scale": _scales(rng, 1)}
    _load(tmp_path, tensors, spec)  # one scale for all outputs is one for each
    tensors["1.up"] = tensors["1.up"].astype(np.float32)
    del tensors["1.up_scale"]
    with pytest.raises(CheckpointError, match=r"\{e\}\.up is not stored alike for every expert"):
        _load(tmp_path, tensors, spec)


def _compressed(**weights: Any) -> dict[str, Any]:
    kind = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": kind | weights}}}


def test_the_blocks_of_scales_are_as_config_json_says() -> None:
    for stated, block in (
        (None, (128, 128)),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, (64, 32)),
        ({"quant_method": "fp8", "weight_block_size": None}, (128, 128)),
        ({"quant_method": "fbgemm_fp8"}, (128, 128)),
        ({"quant_method": "mxfp4"}, (128, 128)),
        (_compressed(), (128, 128)),
        (_compressed(strategy="block", block_structure=[16, 8]), (16, 8)),
    ):
        assert read_storing({"quantization_config": stated}, "config.json").block == block
        assert read_storing({"text_config": {"quantization_config": stated}}, "config.json").block == block


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "quantised by 'awq', version 'marlin'"),
        ({"quant_method": "awq", "bits": 4.0}, "awq of 4.0 bits; 4 can be read"),
        ({"quant_method": "awq", "bits": 8}, "awq of 8 bits; 4 can be read"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits; 2 or 4 or 8 can"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'gptq', checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v3"}, "'gptq', checkpoint_format 'gptq_v3'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'modelopt', quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'"),
        ({"bits": 4}, "quantised by None"),
        (_compressed(num_bits=4), "of 4 bits by channel"),
        (
            _compressed(num_bits=3, strategy="group") | {"format": "pack-quantized"},
            "of 3 bits by group, pack-quantized",
        ),
        (_compressed(strategy="group"), "of 8 bits by group"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "'gptq', format 'marlin'"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": None, "format": "bitblas"},
            "'gptq', checkpoint_format None, format 'bitblas'",
        ),
        (_compressed() | {"transform_config": "hadamard"}, "quantization_config makes no sense: .*hadamard"),
        (
            _compressed() | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "transform_config turns",
        ),
        (_compressed(symmetric=False), "asymmetric"),
        (_compressed(strategy="tensor_group") | {"format": "pack-quantized"}, "8 bits by tensor_group, pack-quantized"),
        ("fp8", "quantization_config makes no sense: 'fp8'"),
        (_compressed() | {"config_groups": {"group_0": "W8A8"}}, "quantization_config makes no sense: .*W8A8"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"makes no sense: .*\[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"makes no sense: .*\[0, 128\]"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "wide"}, "makes no sense: .*wide"),
    ],
)
def test_quantisations_that_are_not_read_are_refused_by_name(stated: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_storing({"quantization_config": stated}, "config.json")


def test_ways_that_disagree_and_modes_that_are_not_read_are_refused_by_name() -> None:
    one, other, of_mlx = (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"bits": 4, "group_size": 64},
    )
    for raw, words in (
        (
            {"quantization_config": one, "text_config": {"quantization_config": other}},
            "quantization_config and text_config.quantization_config disagree",
        ),
        ({"quantization_config": one, "compression_config": other}, "and compression_config disagree"),
        ({"quantization": of_mlx, "quantization_config": one}, "quantization and quantization_config disagree"),
        ({"quantization": of_mlx | {"mode": "mxfp4"}}, "MLX's mode 'mxfp4'"),
        ({"quantization": of_mlx | {"mlp.gate": {"bits": 6}}}, "mlx of 6 bits"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_storing(raw, "config.json")
    assert read_storing({"quantization_config": one, "text_config": {"quantization_config": one}}, "config.json")


def _is_quantized(node: Any) -> bool:
    return isinstance(node, NibbleMatrix | QuantizedMatrix | WordMatrix)


def _plain(node: Any) -> Any:
    return dequantize(node, jnp.dtype("float32"))


def _spacing(weight: QuantizedMatrix) -> jax.Array:
    """How far the numbers that an 8-bit weight can be lie apart, at each weight."""
    if weight.values.dtype == jnp.int8:
        apart = np.ones(weight.values.shape, np.float32)
    else:  # float8_e4m3fn has three bits after the first one, down to 2^-9
        exponents = np.frexp(np.abs(np.asarray(weight.values, np.float32)))[1] - 1
        apart = np.exp2(np.maximum(exponents - 3, -9)).astype(np.float32)
    return _plain(dataclasses.replace(weight, values=jnp.asarray(apart)))


def _root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


@pytest.mark.parametrize("to", ["int8", "fp8", "int4"])
def test_a_target_quantised_at_load_keeps_its_bound(pydoc_target: Target, to: Rounded) -> None:
    pydoc_target = dataclasses.replace(pydoc_target, params=with_own_head(pydoc_target.params))
    quantized = load_target(BUNDLED_FOLDER, dtype="float32", quantization=to)
    again = quantize_params(pydoc_target.params, to)
    for one, other in zip(jax.tree.leaves(quantized.params), jax.tree.leaves(again), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))
    kept = {
        jax.tree_util.keystr(path[-1:], simple=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(quantized.params, is_leaf=_is_quantized)
        if not _is_quantized(leaf)
    }
    assert kept == {"embedding", "attention_norm", "mlp_norm", "norm", "q_norm", "k_norm"}

    token_ids = np.random.default_rng(1).integers(0, pydoc_target.config.vocab_size, 64)
    exact = tiny.target_logits(pydoc_target, token_ids)
    off = tiny.target_logits(quantized, token_ids) - exact
    # rounding to the nearest is noise, independent and uniform within half of the spacing (Widrow 1956)
    moved = [_moved(pydoc_target, quantized, seed, token_ids) - exact for seed in range(2)]
    # 64 tokens are so many draws of the noise's size, whose root mean square is known to 1 / sqrt(2 * 64): 5 deviations
    assert _root_mean_square(off) < 1.5 * _root_mean_square(np.stack(moved))
    assert np.abs(off).max() < 1.5 * max(np.abs(each).max() for each in moved)


def _moved(target: Target, quantized: Target, seed: int, token_ids: np.ndarray) -> np.ndarray:
    """The logits of a target whose weights are moved at random, as far as rounding may move them."""
    rng = np.random.default_rng(seed)

    def move(rounded: Any, exact: Any) -> Any:
        if not _is_quantized(rounded):
            return exact
        noise = rng.random(exact.shape, np.float32) - np.float32(0.5)
        return exact + jnp.asarray(noise) * _spacing(rounded)

    params = jax.tree.map(move, quantized.params, target.params, is_leaf=_is_quantized)
    return tiny.target_logits(dataclasses.replace(target, params=params), token_ids)


@functools.partial(jax.jit, static_argnames="config", compiler_options={"xla_backend_optimization_level": 0})
def _logits(params: TargetParams, config: ModelConfig, token_ids: jax.Array) -> jax.Array:
    n = token_ids.shape[1]
    out = forward(params, config, token_ids, jnp.arange(n, dtype=jnp.int32)[None], tiny.causal(n))
    return logits(params, config, out.hidden_states)


@pytest.mark.parametrize("to", ["int8", "fp8", "int4"])
def test_a_tied_head_has_few_bits_as_an_untied_one_has(tmp_path: Path, to: Rounded) -> None:
    """On one CPU, which reads it as a matrix of its own: where it serves, is trained against, and drafts for another
    target. A check of the weights knows it, and a plan counts it."""
    folders = [tmp_path / "tied", tmp_path / "untied"]
    for folder in folders:
        folder.mkdir()
        tiny.write_target(folder, tiny.TARGET | {"tie_word_embeddings": folder.name == "tied"}, seed=0)
    tensors = load_file(folders[0] / "model.safetensors")
    tiny.write_tensors(
        folders[1] / "model.safetensors", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
    load = functools.partial(load_target, dtype="float32", quantization=to)
    tied, untied = (load(folder, is_served=True, is_checked=True) for folder in folders)
    jax.tree.map(np.testing.assert_array_equal, tied.params, untied.params)
    jax.tree.map(np.testing.assert_array_equal, load(folders[0]).params, tied.params)
    floats = load(folders[0], quantization="none").params
    assert floats.head is None
    jax.tree.map(np.testing.assert_array_equal, in_few_bits(floats, to), tied.params)
    check_weights(tied.params, target_spec(tied.config), "here")
    held = {each: total_bytes(target_held(tied.config, None, to, each)) for each in ("cpu", "gpu", "tpu")}
    assert held["cpu"] == sum(leaf.nbytes for leaf in jax.tree.leaves(tied.params))
    spread = load(folders[0], mesh=mesh.make_mesh(tensor=2)).params
    for platform in ("gpu", "tpu"):
        with mesh.made_for(platform):
            elsewhere = load(folders[0], is_served=to != "int4").params
        assert spread.head is elsewhere.head is None
        assert held[platform] == sum(leaf.nbytes for leaf in jax.tree.leaves(elsewhere))


STACKED = {"model_type": "gpt_oss", "num_local_experts": 4, "intermediate_size": 64}  # in one tensor
APART = [{"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": size} for size in (64, 32, 48)]


@pytest.mark.parametrize("experts", [{}, *APART, STACKED], ids=str)
@pytest.mark.parametrize(("platform", "form", "unit"), [("gpu", NibbleMatrix, 32), ("tpu", WordMatrix, 64)])
def test_an_accelerator_that_serves_keeps_matrices_of_4_bits_in_4(
    tmp_path: Path, platform: str, form: type, unit: int, experts: dict[str, Any]
) -> None:
    """What rows are multiplied by, and nothing where it is trained with or lies on another device. Of a layer's experts
    it is all matrices or none."""
    wide = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    wide |= {"num_experts_per_tok": 2, "norm_topk_prob": True}
    tiny.write_target(tmp_path, tiny.TARGET | wide | experts, seed=0)
    load = functools.partial(load_target, tmp_path, dtype="float32", quantization="int4", is_checked=True)
    with mesh.made_for(platform):
        served, trained = load(is_served=True).params, load().params
    there = load(is_served=True).params
    assert jax.tree.structure(there) == jax.tree.structure(trained)
    leaves, structure = jax.tree_util.tree_flatten_with_path(trained, is_leaf=_is_quantized)
    for (path, eight), four in zip(leaves, structure.flatten_up_to(served), strict=True):
        inputs = experts.get("moe_intermediate_size", 64) if len(eight.shape) == 3 else eight.shape[0]
        fits = is_product(path) and inputs % unit == 0  # in halves of 16 inputs, or in groups of 64
        assert isinstance(four, form) == fits, path
        if fits:
            # scale and offset are rounded to bfloat16; an offset is off from the weight by 15 steps at most
            step = jnp.repeat(eight.scale, eight.block, axis=-2)
            assert_within(_plain(four), _plain(eight), 2.0**-8 * (30 * step + jnp.abs(_plain(eight))))
    o, ids = served.layers[0].attention.o, jnp.asarray([3, 1])
    x = jnp.linspace(-1, 1, 3 * o.shape[0]).reshape(3, -1)
    assert_within(matmul(x, o), x @ _plain(o), of_product(x, _plain(o)))
    assert_within(_plain(o[:, ids]), _plain(o)[:, ids], 0)


def test_projections_that_are_stored_in_several_ways_stay_apart(tmp_path: Path) -> None:
    """As files of mixed types have them: values and one half of the MLP in other blocks, with offsets or without."""
    tiny.write_target(tmp_path, tiny.TARGET, seed=0)
    target = load_target(tmp_path, dtype="float32")

    def mixed(layer: Any) -> Any:
        q, k, gate = (quantize(each, "int8") for each in (layer.attention.q, layer.attention.k, layer.mlp.gate))
        v, up = quantize(layer.attention.v, "int4"), layer.mlp.up
        attention = dataclasses.replace(layer.attention, q=q, k=k, v=v)
        return dataclasses.replace(layer, attention=attention, mlp=dataclasses.replace(layer.mlp, gate=gate, up=up))

    params = dataclasses.replace(target.params, layers=tuple(map(mixed, target.params.layers)))
    token_ids = jnp.arange(12, dtype=jnp.int32)[None]
    run = functools.partial(_logits, config=target.config, token_ids=token_ids)
    assert_same(run(served.fuse_for_cpu(params)), run(params), tolerance(run, params))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_experts_takes_quantised_weights(rng: np.random.Generator, form: moe.Form) -> None:
    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    plain = moe.Moe(
        router=draw(16, 4),
        router_bias=None,
        correction=None,
        gate=draw(4, 16, 8),
        up=draw(4, 16, 8),
        down=draw(4, 8, 16),
        gate_bias=draw(4, 8),
        up_bias=draw(4, 8),
        down_bias=draw(4, 16),
        shared=None,
        shared_gate=None,
    )
    params = quantize_params(plain, "int8")
    assert isinstance(params.down, QuantizedMatrix)
    dense = jax.tree.map(_plain, params, is_leaf=_is_quantized)
    x, expert_ids = draw(6, 16), jnp.asarray(rng.permuted(np.tile(np.arange(4), (6, 1)), axis=1)[:, :2])

    def run(params: moe.Moe, x: jax.Array) -> jax.Array:
        return form(params, "silu", x, expert_ids, jnp.full((6, 2), 0.5))

    assert_same(run(params, x), run(dense, x), tolerance(jax.jit(run), dense, x))
