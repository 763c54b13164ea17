"""Packed checkpoints: every layout against its definition, written here value by value; dequantised and kept, whole and
spread, of ragged sizes; and against the package that writes three of them (`-m oracle`)."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import spread
import tiny

from specserve import mesh
from specserve.checkpoints.form import has_few_bits
from specserve.checkpoints.load import QUANTIZATIONS, load_params, load_target
from specserve.checkpoints.quantized import Storing, read_storing
from specserve.checkpoints.tensors import TensorFolder, write_tensors
from specserve.errors import CheckpointError
from specserve.kernels import native
from specserve.kernels.matmul import QuantizedMatrix, dequantize, pack
from specserve.kernels.panels import FOUR_BIT_FORMATS
from specserve.models.params import ParamSpec, TensorPart, embedding_table, matrix

Tensors = dict[str, np.ndarray]
D_IN, D_OUT, GROUP = 48, 24, 16
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SPEC = {"o": matrix("o.weight", D_IN, D_OUT, ("heads", "embed"))}
PICKED = {"o": matrix("o.weight", D_IN, 16, ("embed", "heads"), part=TensorPart(1, 5, 6, D_OUT))}


def _words(values: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Pack whole numbers [row, n] along their rows; place `order[i]` of each word's share stands in its i-th bits."""
    each = 32 // bits
    words = np.zeros((len(values), -(-values.shape[1] // each)), np.uint32)
    for row, line in enumerate(values):
        for column in range(len(line)):
            word, place = divmod(column, each)
            shift = (order or list(range(each))).index(place)
            words[row, word] |= np.uint32(int(line[column]) << (bits * shift))
    return words.view(np.int32)


def _numbers(rng: np.random.Generator, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole numbers [out, in], zeros and scales [out, group]."""
    most, groups = 1 << bits, D_IN // GROUP
    q = rng.integers(0, most, (D_OUT, D_IN))
    return q, rng.integers(0, most, (D_OUT, groups)), rng.uniform(0.01, 0.1, (D_OUT, groups)).astype(np.float16)


def _meant(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: np.ndarray | None = None) -> np.ndarray:
    group_of = np.arange(D_IN) // GROUP if group_of is None else group_of
    meant = np.zeros((D_OUT, D_IN), np.float32)
    for row in range(D_OUT):
        for column in range(D_IN):
            group = group_of[column]
            meant[row, column] = np.float32(q[row, column] - zeros[row, group]) * np.float32(scales[row, group])
    return meant


Made = tuple[dict[str, Any], Tensors, np.ndarray]  # quantization_config, tensors, what they mean [out, in]


def _awq(rng: np.random.Generator) -> Made:
    q, zeros, scales = _numbers(rng, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {"o.qweight": _words(q.T, 4, order), "o.qzeros": _words(zeros.T, 4, order), "o.scales": scales.T}
    return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, tensors, _meant(q, zeros, scales)


def _gptq(rng: np.random.Generator, bits: int = 4, *, second: str = "", is_by_activation: bool = False) -> Made:
    q, zeros, scales = _numbers(rng, bits)
    order = rng.permutation(D_IN) // GROUP if is_by_activation else np.arange(D_IN) // GROUP
    qzeros = _words(zeros.T, bits)
    if not second:  # 1 is taken from each by taking it from whole words, where a zero of 0 borrows from the next
        qzeros = (qzeros.view(np.uint32) - np.uint32(sum(1 << shift for shift in range(0, 32, bits)))).view(np.int32)
    tensors = {
        "o.qweight": _words(q, bits).T,
        "o.qzeros": qzeros,
        "o.scales": scales.T,
        "o.g_idx": order.astype(np.int32),
    }
    stated: dict[str, Any] = {"quant_method": "gptq", "bits": bits} | ({second: "gptq_v2"} if second else {})
    stated |= {"group_size": GROUP, "desc_act": True} if is_by_activation else {}
    return stated, tensors, _meant(q, zeros, scales, order)


def _compressed(rng: np.random.Generator, bits: int = 4, *, is_symmetric: bool = True, num_in: int = D_IN) -> Made:
    q, zeros, scales = _numbers(rng, bits)
    if is_symmetric:
        zeros[:] = 1 << (bits - 1)
    tensors = {
        "o.weight_packed": _words(q[:, :num_in], bits),
        "o.weight_scale": scales.astype(ml_dtypes.bfloat16),
        "o.weight_shape": np.array([D_OUT, num_in]),
    }
    if not is_symmetric:
        tensors["o.weight_zero_point"] = _words(zeros.T, bits).T
    weights = {"num_bits": bits, "strategy": "group", "group_size": GROUP, "symmetric": is_symmetric}
    stated = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    return stated, tensors, _meant(q, zeros, scales.astype(ml_dtypes.bfloat16))


def _mlx(rng: np.random.Generator, bits: int, *, is_alone: bool = False) -> Made:
    q, _, scales = _numbers(rng, bits)
    biases = rng.standard_normal(scales.shape).astype(np.float16)
    meant = _meant(q, np.zeros_like(q), scales) + np.repeat(biases, GROUP, axis=1).astype(np.float32)
    stated: dict[str, Any] = {"bits": bits, "group_size": GROUP}
    if is_alone:  # among layers of other settings, as routers among experts
        stated = {"bits": 12 - bits, "group_size": 2 * GROUP, "o": stated, "p": False}
    return stated, {"o.weight": _words(q, bits).view(np.uint32), "o.scales": scales, "o.biases": biases}, meant


def _nvfp4(rng: np.random.Generator, *, is_compressed: bool) -> Made:
    codes = rng.integers(0, 16, (D_OUT, D_IN)).astype(np.uint8)
    codes[0, :32] = np.repeat(np.arange(16), 2)
    scales = rng.uniform(1, 400, (D_OUT, D_IN // 16)).astype(ml_dtypes.float8_e4m3fn)
    whole, by_block = np.float32(300.7 if is_compressed else 1 / 300.7), scales.astype(np.float32)
    by_block = by_block / whole if is_compressed else by_block * whole
    meant = FLOAT4[codes] * np.repeat(by_block, 16, axis=1)
    stored = codes[:, ::2] | codes[:, 1::2] << 4
    if is_compressed:
        weights = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
        groups = {"group_0": {"weights": weights, "format": "nvfp4-pack-quantized"}}
        tensors = {"o.weight_packed": stored, "o.weight_scale": scales, "o.weight_global_scale": whole[None]}
        tensors["o.input_global_scale"] = np.ones(1, np.float32)
        return {"quant_method": "compressed-tensors", "config_groups": groups}, tensors, meant
    tensors = {"o.weight": stored, "o.weight_scale": scales, "o.weight_scale_2": whole[None][0]}
    return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors, meant


def _stated(made: Made, **more: Any) -> Made:
    return made[0] | more, *made[1:]


def _beside(made: Made, **other: Any) -> Made:
    """The same beside a group of other layers, which is stated otherwise in this."""
    weights = made[0]["config_groups"]["group_0"]["weights"]
    return _stated(made, config_groups={"group_0": {"weights": weights}, "group_1": {"weights": weights | other}})


LAYOUTS: dict[str, Callable[[np.random.Generator], Made]] = {
    "awq": _awq,
    "gptq": _gptq,
    "gptq of 2 bits": lambda rng: _gptq(rng, 2),
    "gptq of 8 bits": lambda rng: _gptq(rng, 8),
    "gptq_v2": lambda rng: _gptq(rng, second="checkpoint_format"),
    "gptq_v2 by its other key": lambda rng: _gptq(rng, second="format"),
    "gptq by AutoRound": lambda rng: _stated(_gptq(rng), format="auto_round:auto_gptq"),
    "gptq of no format": lambda rng: _stated(_gptq(rng), checkpoint_format=None, format=None),
    "gptq_v2 beside null": lambda rng: _stated(_gptq(rng, second="format"), checkpoint_format=None),
    "gptq by activation": lambda rng: _gptq(rng, is_by_activation=True),
    "compressed": _compressed,
    "compressed of 8 bits": lambda rng: _compressed(rng, 8),
    "compressed with zeros": lambda rng: _compressed(rng, is_symmetric=False),
    "compressed, others with zeros": lambda rng: _beside(_compressed(rng), symmetric=False, actorder="group"),
    "compressed with zeros, others without": lambda rng: _beside(_compressed(rng, is_symmetric=False), symmetric=True),
    "compressed with zeros by activation, others in order": lambda rng: _beside(
        _compressed(rng, is_symmetric=False), actorder="group"
    ),
    "compressed without transforms": lambda rng: _stated(_compressed(rng), transform_config={"config_groups": {}}),
    "mlx": lambda rng: _mlx(rng, 4),
    "mlx of 8 bits": lambda rng: _mlx(rng, 8),
    "mlx of 8 bits among others": lambda rng: _mlx(rng, 8, is_alone=True),
    "mlx among others": lambda rng: _mlx(rng, 4, is_alone=True),
    "nvfp4 of compressed-tensors": lambda rng: _nvfp4(rng, is_compressed=True),
    "nvfp4 of ModelOpt": lambda rng: _nvfp4(rng, is_compressed=False),
}
WIDENED = {
    "gptq of 8 bits",
    "gptq by activation",
    "mlx of 8 bits",
    "mlx of 8 bits among others",
}  # are no numbers of 8 bits times scales


def _storing(stated: dict[str, Any], layout: str) -> Storing:
    return read_storing({"quantization" if layout.startswith("mlx") else "quantization_config": stated}, "config.json")


def _load(folder: Path, tensors: Tensors, spec: Any = SPEC, **options: Any) -> Any:
    write_tensors(folder / "model.safetensors", tensors)
    return load_params(spec, TensorFolder(folder), "float32", **options)["o"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_weight_means_what_its_layout_says(tmp_path: Path, rng: np.random.Generator, layout: str) -> None:
    stated, tensors, meant = LAYOUTS[layout](rng)
    storing = _storing(stated, layout)
    np.testing.assert_array_equal(_load(tmp_path, tensors, storing=storing), meant.T)
    kept = _load(tmp_path, tensors, storing=storing, quantization="stored")
    assert isinstance(kept, QuantizedMatrix) == (layout not in WIDENED)
    if isinstance(kept, QuantizedMatrix):
        assert kept.values.dtype == np.int8
        if native.is_available():
            assert (pack(kept).format in FOUR_BIT_FORMATS) == ("8 bits" not in layout)
        kept = dequantize(kept, jnp.dtype("float32"))
    np.testing.assert_array_equal(kept, meant.T)


@pytest.mark.parametrize("quantization", ["none", "stored"])
def test_experts_of_which_one_is_in_order_by_chance(
    tmp_path: Path, rng: np.random.Generator, quantization: str
) -> None:
    """As one that calibration never met may be, among others that are by activation."""
    tensors, meant = {}, []
    for expert in range(3):
        stated, own, means = _gptq(rng, is_by_activation=expert != 1)
        tensors |= {f"{expert}.{name}": each for name, each in own.items()}
        meant.append(means.T)
    spec = {"o": ParamSpec((3, D_IN, D_OUT), ("experts", "embed", "mlp"), "{e}.o.weight", transpose=True)}
    storing = _storing(stated | {"desc_act": True, "group_size": GROUP}, "gptq")
    found = _load(tmp_path, tensors, spec, storing=storing, quantization=quantization)
    np.testing.assert_array_equal(found, np.stack(meant))


@pytest.mark.parametrize("quantization", ["none", "stored"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slice_of_it_is_that_of_the_whole(
    tmp_path: Path, rng: np.random.Generator, layout: str, quantization: str
) -> None:
    """On devices whose slices begin within words and groups, and of outputs that are picked."""
    stated, tensors, meant = LAYOUTS[layout](rng)
    options: dict[str, Any] = {"storing": _storing(stated, layout), "quantization": quantization}
    picked = _load(tmp_path, tensors, PICKED, **options)
    places = PICKED["o"].part.places(np.arange(16))
    devices = mesh.make_mesh(tensor=4)
    for spec, expected in ((PICKED, meant[places]), (SPEC, meant)):
        spread = _load(tmp_path, tensors, spec, shardings={"o": mesh.sharding(devices, spec["o"].axes)}, **options)
        for got in (spread, picked) if spec is PICKED else (spread,):
            got = dequantize(got, jnp.dtype("float32")) if isinstance(got, QuantizedMatrix) else got
            np.testing.assert_array_equal(got, expected.T)


def test_a_table_in_few_bits_is_looked_up_as_floats(tmp_path: Path, rng: np.random.Generator) -> None:
    """As MLX stores embeddings; its converters give the same settings under two names."""
    _, tensors, meant = _mlx(rng, 4)
    stated = {"bits": 4, "group_size": GROUP}
    storing = read_storing({"quantization": stated, "quantization_config": stated}, "config.json")
    spec = {"embedding": embedding_table("o.weight", D_OUT, D_IN)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    for quantization in QUANTIZATIONS:
        how = {"storing": storing, "quantization": quantization}
        np.testing.assert_array_equal(load_params(spec, TensorFolder(tmp_path), "float32", **how)["embedding"], meant)


def test_a_packed_target_is_the_widened_one(tmp_path: Path, rng: np.random.Generator) -> None:
    """Of a folder, by its config.json, which an editor has begun with a byte order mark."""
    folders = tmp_path / "packed", tmp_path / "widened"
    raw = tiny.TARGET | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 8}}
    for folder in folders:
        folder.mkdir()
        tiny.write_target(folder, tiny.TARGET, seed=0)
    stored = TensorFolder(folders[0])
    packed, widened = ({name: stored.read(name) for name in stored.names()} for _ in folders)
    for name in [name for name in packed if name.endswith("_proj.weight")]:
        out, num_in = packed.pop(name).shape
        q, zeros = rng.integers(0, 16, (out, num_in)), rng.integers(1, 16, (out, num_in // 8))
        scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
        base = name.removesuffix("weight")
        packed |= {
            f"{base}qweight": _words(q, 4).T,
            f"{base}qzeros": _words((zeros - 1).T, 4),
            f"{base}scales": scales.T,
            f"{base}bias": np.zeros(out, np.float16),  # AutoGPTQ writes such ones
        }
        widened[name] = (q - np.repeat(zeros, 8, 1)) * np.repeat(scales, 8, 1).astype(np.float32)
    for folder, tensors in zip(folders, (packed, widened), strict=True):
        write_tensors(folder / "model.safetensors", tensors)
    (folders[0] / "config.json").write_text(json.dumps(raw), "utf-8-sig")
    one, other = (load_target(folder, dtype="float32").params for folder in folders)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    packed[f"{base}bias"][1] = 1
    write_tensors(folders[0] / "model.safetensors", packed)
    with pytest.raises(CheckpointError, match=f"{re.escape(base)}bias is not part of this architecture"):
        load_target(folders[0], dtype="float32")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_that_mlx_keeps_in_one_tensor_are_those_of_the_checkpoint(
    tmp_path: Path, rng: np.random.Generator, family: str
) -> None:
    """Beside a router of other bits, and in MLX's own names of the matrices, which are one family's names of all; with
    bits of one expert's matrix that are stated apart."""
    folders = tmp_path / "packed", tmp_path / "widened"
    raw = spread.MODELS["experts"] | {"num_hidden_layers": 1, "num_experts": 2}
    if family == "mixtral":
        raw |= {"model_type": family, "num_local_experts": 2, "architectures": ["MixtralForCausalLM"]}
    stated: dict[str, Any] = {"bits": 4, "group_size": 8}
    for folder in folders:
        folder.mkdir()
        tiny.write_target(folder, raw, seed=0)
    stored = TensorFolder(folders[0])
    packed, widened = ({name: stored.read(name) for name in stored.names()} for _ in folders)
    stacked: dict[str, list[np.ndarray]] = {}
    for name in sorted(name for name in packed if ".mlp." in name or ".block_sparse_moe." in name):
        is_router, base = ".gate." in name, name.removesuffix(".weight")
        mlx = re.sub(r"experts\.\d+", "switch_mlp", base)
        for own, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            mlx = mlx.replace(f".{own}", f".{theirs}")
        bits = 8 if is_router or "down" in mlx else 4
        out, num_in = packed.pop(name).shape
        q = rng.integers(0, 1 << bits, (out, num_in))
        scales, biases = rng.uniform(0.01, 0.02, (2, out, num_in // 8)).astype(np.float16)
        widened[name] = q * np.repeat(scales, 8, 1).astype(np.float32) + np.repeat(biases, 8, 1).astype(np.float32)
        parts = {"weight": _words(q, bits).view(np.uint32), "scales": scales, "biases": biases}
        if bits == 8:
            stated[mlx] = {"bits": 8, "group_size": 8}
        for part, value in parts.items():
            if is_router:
                packed[f"{base}.{part}"] = value
            else:
                stacked.setdefault(f"{mlx}.{part}", []).append(value)
    packed |= {name: np.stack(values) for name, values in stacked.items()}
    for folder, tensors in zip(folders, (packed, widened), strict=True):
        write_tensors(folder / "model.safetensors", tensors)
    (folders[0] / "config.json").write_text(json.dumps(raw | {"quantization": stated}))
    one, other = (load_target(folder, dtype="float32").params for folder in folders)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    load_target(folders[0], dtype="float32", quantization="stored")
    assert [has_few_bits(folder) for folder in folders] == [True, False]


def test_inputs_that_fill_no_word_are_cut(tmp_path: Path, rng: np.random.Generator) -> None:
    stated, tensors, meant = _compressed(rng, num_in=D_IN - 3)
    spec = {"o": matrix("o.weight", D_IN - 3, D_OUT, ("heads", "mlp"))}
    got = _load(tmp_path, tensors, spec, storing=_storing(stated, "compressed"))
    np.testing.assert_array_equal(got, meant[:, : D_IN - 3].T)


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ("awq", {"o.qzeros": None}, "o.weight is packed, and o.qzeros is missing"),
        ("awq", {"o.scales": np.ones((3, 5), np.float16)}, r"o.scales is float16 \[3, 5\], expected \[groups, out\]"),
        ("gptq", {"o.qweight": np.ones((6, D_OUT), np.int16)}, r"o.qweight is int16 \[6, 24\], expected"),
        ("gptq", {"o.g_idx": np.full(D_IN, 9, np.int32)}, "o.g_idx names groups from 9 to 9 of 3"),
        ("compressed", {"o.weight_shape": np.array([D_OUT, 99])}, r"o.weight_shape says \[24, 99\], which"),
        ("gptq", {"o.qweight": np.ones((0, D_OUT), np.int32), "o.g_idx": None}, "3 groups of 1 inputs do not cover 0"),
        ("gptq by activation", {"o.g_idx": None}, "o.g_idx is missing"),
        ("compressed with zeros", {"o.weight_zero_point": None}, "o.weight_zero_point is missing"),
        (
            "compressed with zeros by activation, others in order",
            {"o.weight_zero_point": None},
            "o.weight_zero_point is missing",
        ),
        ("mlx", {"o.biases": None}, "o.biases is missing"),
        ("nvfp4 of ModelOpt", {"o.weight_scale": np.ones((D_OUT, 2), ml_dtypes.float8_e4m3fn)}, r"\[24, 2\], expected"),
        ("nvfp4 of ModelOpt", {"o.weight_scale_2": np.float32(np.nan)}, r"o.weight_scale_2 is \[nan\], expected one"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, rng: np.random.Generator, layout: str, changes: dict[str, Any], words: str
) -> None:
    stated, tensors, _ = LAYOUTS[layout](rng)
    tensors = {name: value for name, value in (tensors | changes).items() if value is not None}
    with pytest.raises(CheckpointError, match=words):
        _load(tmp_path, tensors, storing=_storing(stated, layout))


@pytest.mark.oracle
@pytest.mark.parametrize(
    "layout", ["compressed", "compressed of 8 bits", "compressed with zeros", "nvfp4 of compressed-tensors"]
)
def test_compressed_tensors_reads_the_same(rng: np.random.Generator, layout: str) -> None:
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    stated, tensors, meant = LAYOUTS[layout](rng)
    packed = torch.tensor(tensors["o.weight_packed"])
    scales = torch.tensor(tensors["o.weight_scale"].astype(np.float32))
    if layout.startswith("nvfp4"):
        values = unpack_fp4_from_uint8(packed, D_OUT, D_IN, dtype=torch.float32)
        scales = scales / torch.tensor(tensors["o.weight_global_scale"])
    else:
        bits = _storing(stated, layout).bits
        values = unpack_from_int32(packed, bits, torch.Size([D_OUT, D_IN])).float()
        if "o.weight_zero_point" in tensors:
            words = torch.tensor(tensors["o.weight_zero_point"])
            zeros = unpack_from_int32(words, bits, torch.Size([D_OUT, D_IN // GROUP]), packed_dim=0)
            values -= zeros.float().repeat_interleave(GROUP, 1)
    np.testing.assert_array_equal((values * scales.repeat_interleave(GROUP, 1)).numpy(), meant)
