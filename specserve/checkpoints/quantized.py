"""Weights in 8 bits or fewer as checkpoints keep them, read by slice like any other. The layouts (transformers'
quantizers of these names, and the OCP Microscaling Formats specification v1.0 for the last):

- fp8: `X.weight` float8 [out, in], `X.weight_scale_inv` for each block of 128 outputs and 128 inputs;
- fbgemm_fp8 and compressed-tensors: `X.weight` float8 or int8 [out, in], `X.weight_scale` for each output [out, 1], for
  the whole tensor [1], or for each block;
- fp8 in DeepSeek-V4's own files: the same with `X.scale`, powers of two, and experts of 4 bits: `X.weight` int8 [out,
  in / 2], two 4-bit floats in a byte, the lower half first, and `X.scale` float8_e8m0fnu [out, in / 32];
- mxfp4 (GPT-OSS): `X_blocks` uint8 [expert, out, in / 32, 16], two 4-bit floats in a byte, the lower half first, and
  `X_scales` uint8 [expert, out, in / 32], powers of two.

Every one of them is values times scale; `packed` has those of which several share a word. Scales of activations are not
read: activations keep their precision here.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from specserve.checkpoints.lazy import (
    FLOAT32,
    Index,
    LazyQuantized,
    LazyTensor,
    RestoredEntry,
    as_floats,
    blocks_of,
    fp4_values,
)
from specserve.checkpoints.packed import Storing, open_packed
from specserve.checkpoints.tensors import TensorFolder
from specserve.errors import CheckpointError

FLOATS = frozenset(np.dtype(dtype) for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
EIGHT_BITS = frozenset(np.dtype(dtype) for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8))
POWERS = np.dtype(ml_dtypes.float8_e8m0fnu)  # of two
STORED_BITS = EIGHT_BITS | {
    np.dtype(np.uint8),
    np.dtype(np.int32),
    np.dtype(np.uint32),
}  # of values, and of words of some
UNUSED_SCALES = {  # patterns of tensors -> why weights do not need them
    r".*\.(input_scale|input_scale_ub|input_global_scale|input_zero_point|output_scale|activation_scale)": (
        "scales of activations, which are not quantised here"
    ),
    r".*\.[qkv]_scale": "scales of an 8-bit cache",
}
_FP4_BLOCK = 32
_MADE_OF = re.compile(r"(.+\.weight)_(?:scale|scale_inv|scale_2|global_scale|packed)|(.+\.)(?:qweight|scales)")


PLAIN = Storing()


def read_storing(raw: Mapping[str, Any], where: str) -> Storing:
    """Return how a checkpoint stores its weights, as config.json states. Raises CheckpointError for a quantisation that
    is not read, that makes no sense, or that is stated in two ways."""
    text, found = raw.get("text_config"), dict[str, Storing]()
    for place, config in (("", raw), ("text_config.", text if isinstance(text, Mapping) else {})):
        of_mlx = config.get("quantization") or {}
        is_mlx = isinstance(of_mlx, Mapping) and "group_size" in of_mlx
        for name in ("quantization", "quantization_config", "compression_config"):
            stated, path = config.get(name), place + name
            if not stated or (name == "quantization" and not is_mlx):
                continue
            try:
                # newer converters of MLX state it under both names
                found[path] = _of_mlx(stated, where) if is_mlx and stated == of_mlx else _storing(stated, where)
            except (AttributeError, LookupError, TypeError, ValueError):
                raise CheckpointError(f"{where}: {path} makes no sense: {stated!r:.200}") from None
    if len(set(found.values())) > 1:
        raise CheckpointError(f"{where}: {' and '.join(found)} disagree; keep the one that the weights are in")
    return next(iter(found.values()), PLAIN)


def _of_mlx(stated: Mapping[str, Any], where: str) -> Storing:
    """Read MLX's settings: those of all layers, and beside them those of single ones by their names."""
    if (mode := stated.get("mode", "affine")) != "affine":
        raise CheckpointError(
            f"{where}: MLX's mode {mode!r}; affine can be read. Take the model as it was before it was quantised"
        )
    own = {name: each for name, each in stated.items() if isinstance(each, Mapping)}
    of_all = {name: value for name, value in stated.items() if name not in own}
    others = tuple((name, _of_mlx({**of_all, **each}, where)) for name, each in own.items())
    bits = _bits(stated, where, "mlx", (2, 4, 8))
    return Storing(packing="mlx", bits=bits, group=_group(stated), others=others)


def _storing(stated: Mapping[str, Any], where: str) -> Storing:
    method = stated.get("quant_method", "compressed-tensors" if "config_groups" in stated else None)
    if method in ("fbgemm_fp8", "mxfp4"):
        return PLAIN
    if method == "modelopt" and stated.get("quant_algo") in ("FP8", "NVFP4"):
        return PLAIN
    if method == "fp8":
        return Storing(_pair(stated.get("weight_block_size")))
    if method == "awq" and str(stated.get("version", "gemm")).lower() == "gemm":
        return Storing(packing="awq", bits=_bits(stated, where, method, (4,)), group=_group(stated))
    if method == "gptq":
        packing = stated.get("checkpoint_format")
        layout = str(packing or stated.get("format") or method)
        # other words of `format` name the converter (`auto_round:auto_gptq`)
        if packing in (None, "", "gptq", "gptq_v2") and not re.search("marlin|bitblas", layout):
            bits, step = _bits(stated, where, method, (2, 4, 8)), int(layout != "gptq_v2")
            needed = ("g_idx",) if stated.get("desc_act") is True and _group(stated) else ()
            return Storing(packing="gptq", bits=bits, group=_group(stated), zero_step=step, needed=needed)
    if method != "compressed-tensors":
        more = "".join(
            f", {key} {stated[key]!r}"
            for key in ("version", "checkpoint_format", "format", "quant_algo")
            if key in stated
        )
        raise CheckpointError(
            f"{where}: weights are quantised by {method!r}{more}; fp8, fbgemm_fp8, modelopt (FP8, NVFP4), "
            "compressed-tensors, awq (gemm), gptq (also gptq_v2), mxfp4 and MLX's can be read. Take the model as it "
            "was before it was quantised"
        )
    return _compressed(stated, where)


def _compressed(stated: Mapping[str, Any], where: str) -> Storing:
    if any((stated.get("transform_config") or {}).values()):
        raise CheckpointError(
            f"{where}: transform_config turns activations before they meet weights, which is not read"
        )
    found: dict[Storing, tuple[str, ...]] = {}  # with what all its groups need
    for group in (stated.get("config_groups") or {}).values():
        weights, layout = group.get("weights") or {}, group.get("format") or stated.get("format")
        bits, strategy, symmetric = weights.get("num_bits", 0), weights.get("strategy"), weights.get("symmetric")
        is_packed = layout == "pack-quantized" and bits in (4, 8) and strategy in ("group", "channel")
        is_nvfp4 = layout == "nvfp4-pack-quantized" and bits == 4
        is_plain = bits == 8 and strategy in ("tensor", "channel", "block") and symmetric is not False
        if is_packed:
            needed = ("weight_zero_point",) if symmetric is False else ()
            needed += ("weight_g_idx",) if weights.get("actorder") in ("group", "dynamic", True) else ()
            way = Storing(packing="compressed", bits=bits, group=_group(weights))
            found[way] = tuple(part for part in needed if part in found.get(way, needed))
        elif is_nvfp4 or (is_plain and not str(layout).endswith("pack-quantized")):
            found[Storing(_pair(weights.get("block_structure")) if strategy == "block" else PLAIN.block)] = ()
        else:
            raise CheckpointError(
                f"{where}: compressed-tensors of {bits} bits by {strategy}, {layout}"
                f"{', asymmetric' if symmetric is False else ''}; 8 bits by tensor, channel or block, symmetric and "
                "not packed, pack-quantized of 4 or 8 bits by group or channel and nvfp4-pack-quantized can be read. "
                "Take the model as it was before it was quantised"
            )
    if len(found) > 1:
        raise CheckpointError(
            f"{where}: config_groups of compressed-tensors store their weights in {len(found)} ways; one can be read"
        )
    return next((dataclasses.replace(way, needed=needed) for way, needed in found.items()), PLAIN)


def _group(stated: Mapping[str, Any]) -> int:
    size = stated.get("group_size", stated.get("q_group_size")) or 0
    return max(int(size), 0)  # -1: all inputs


def _bits(stated: Mapping[str, Any], where: str, method: str, allowed: tuple[int, ...]) -> int:
    bits = stated.get("bits", stated.get("w_bit"))
    if type(bits) is not int or bits not in allowed:
        raise CheckpointError(
            f"{where}: {method} of {bits!r} bits; {' or '.join(map(str, allowed))} can be read. Take the model as it "
            "was before it was quantised"
        )
    return bits


def open_weight(
    tensors: TensorFolder, name: str, storing: Storing
) -> tuple[LazyTensor | LazyQuantized, tuple[str, ...]]:
    """Open a weight as it is stored, and the tensors that it is made of. Raises CheckpointError where it is missing,
    or of a dtype that is no float and has no scale."""
    names = tensors.names()
    if f"{name}_blocks" in names and f"{name}_scales" in names:
        return _open_fp4(tensors, name), (f"{name}_blocks", f"{name}_scales")
    if opened := open_packed(tensors, name, storing):
        return opened
    if name not in names:
        raise CheckpointError(f"{name} is missing")
    if matrix := tensors.whole_numbers(name):
        return matrix, (name,)
    values = _as_read(tensors, name)
    shape, dtype = values.shape, values.dtype
    is_table = dtype in ("int32", "int64") and name.endswith(".tid2eid")  # experts of tokens
    if dtype in FLOATS or is_table:
        return values, (name,)
    where = f"{tensors.file(name).name}: {name}"
    if dtype not in EIGHT_BITS or len(shape) != 2:
        raise CheckpointError(f"{where} is {dtype}, expected a float, or a matrix of int8 or float8 with its scale")
    for scale_name in (f"{name}_scale_inv", f"{name}_scale", _bare_scale(name)):
        if scale_name in names:
            if dtype == np.int8 and tensors.dtype(scale_name) == POWERS:
                return _open_fp4_pairs(tensors, name, scale_name), (name, scale_name)
            scale, inputs = _open_scale(tensors, scale_name, shape, storing.block)
            return LazyQuantized(values, scale, inputs), (name, scale_name)
    raise CheckpointError(f"{where} is {dtype}, but there is no {name}_scale_inv and no {name}_scale")


def open_table(tensors: TensorFolder, name: str, storing: Storing) -> tuple[LazyTensor, tuple[str, ...]]:
    """Open a weight that is looked up, as floats, and the tensors that it is made of: as `open_weight`, but whole
    numbers of its own type are restored as they are read, without scales beside them. Raises CheckpointError."""
    if name in tensors.names() and tensors.whole_numbers(name):
        return _as_read(tensors, name), (name,)
    weight, made_of = open_weight(tensors, name, storing)
    return as_floats(weight), made_of


def _as_read(tensors: TensorFolder, name: str) -> LazyTensor:
    return LazyTensor(tensors.shape(name), tensors.dtype(name), partial(tensors.read, name), tensors.is_widened(name))


def _bare_scale(name: str) -> str:
    return f"{name.removesuffix('weight')}scale"


def restored(tensors: TensorFolder, storing: Storing) -> tuple[TensorFolder, list[str]]:
    """Return a folder with its weights of few bits as floats, each under its own name and without the tensors that it
    is made of; and what cannot be read so, a line each, which stays as it is."""
    problems, used = [], {n for n in tensors.names() if any(re.fullmatch(each, n) for each in UNUSED_SCALES)}
    floats: dict[str, RestoredEntry] = {}
    found = filter(None, map(_MADE_OF.fullmatch, tensors.names()))
    for name in sorted({match[1] or f"{match[2]}weight" for match in found}):
        try:
            weight, made_of = open_weight(tensors, name, storing)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        used.update(made_of)
        floats[name] = RestoredEntry(tensors.file(made_of[0]), as_floats(weight))
    return tensors.with_others(used, floats), problems


def _open_scale(
    tensors: TensorFolder, name: str, shape: tuple[int, ...], block: tuple[int, int]
) -> tuple[LazyTensor, int]:  # [out, in_blocks], and the inputs of a block
    num_out, num_in = shape
    stored = tensors.shape(name)
    grid = (-(-num_out // block[0]), -(-num_in // block[1]))
    if math.prod(stored) == 1:
        rows, inputs, grid = num_out, num_in, (1, 1)
    elif stored in ((num_out,), (num_out, 1)):
        rows, inputs, grid = 1, num_in, (num_out, 1)
    elif stored == grid:
        rows, inputs = block
    else:
        raise CheckpointError(
            f"{tensors.file(name).name}: {name} has shape {stored}, expected one scale, ({num_out}, 1) or {grid}"
        )

    def read(index: Index) -> np.ndarray:
        places, blocks = index
        if isinstance(places, slice):
            places = np.arange(places.start, places.stop)
        whole = tensors.read(name).astype(np.float32).reshape(grid)  # a ten-thousandth of its weight
        return whole[places // rows][:, blocks]

    return LazyTensor((num_out, grid[1]), FLOAT32, read), inputs


def _open_fp4(tensors: TensorFolder, name: str) -> LazyQuantized:
    """Open a weight of 4 bits as integers, which are twice its values, and half its scales."""
    stored, scales = tensors.shape(f"{name}_blocks"), tensors.shape(f"{name}_scales")
    is_bytes = all(tensors.dtype(f"{name}_{part}") == np.uint8 for part in ("blocks", "scales"))
    if not is_bytes or stored[-1:] != (_FP4_BLOCK // 2,) or stored[:-1] != scales:
        raise CheckpointError(
            f"{tensors.file(f'{name}_blocks').name}: {name}_blocks has shape {stored} and {name}_scales {scales}; "
            f"expected uint8 [..., {_FP4_BLOCK // 2}] and a scale for each row of it"
        )

    def read_values(index: Index) -> np.ndarray:
        *rest, inputs = index
        blocks = blocks_of(inputs, _FP4_BLOCK)
        pairs = fp4_values(tensors.read(f"{name}_blocks", (*rest, blocks, slice(None))))
        values = pairs.reshape(*pairs.shape[:-2], -1)
        offset = inputs.start - blocks.start * _FP4_BLOCK
        return values[..., offset : offset + inputs.stop - inputs.start]

    def read_scale(index: Index) -> np.ndarray:
        powers = tensors.read(f"{name}_scales", index).view(ml_dtypes.float8_e8m0fnu)
        return powers.astype(np.float32) * np.float32(0.5)

    shape = (*scales[:-1], scales[-1] * _FP4_BLOCK)
    values, scale = LazyTensor(shape, np.dtype(np.int8), read_values), LazyTensor(scales, FLOAT32, read_scale)
    return LazyQuantized(values, scale, _FP4_BLOCK)


def _open_fp4_pairs(tensors: TensorFolder, name: str, scale_name: str) -> LazyQuantized:
    """Open a weight [out, in] of 4 bits whose bytes stand in one row for each output."""
    (num_out, num_pairs), stored = tensors.shape(name), tensors.shape(scale_name)
    blocks = 2 * num_pairs // _FP4_BLOCK
    if 2 * num_pairs % _FP4_BLOCK or stored != (num_out, blocks):
        raise CheckpointError(
            f"{tensors.file(name).name}: {name} has {2 * num_pairs} numbers of 4 bits for each of {num_out} outputs, "
            f"and {scale_name} the shape {stored}; expected a scale for every {_FP4_BLOCK}, ({num_out}, {blocks})"
        )

    def read_values(index: Index) -> np.ndarray:
        places, inputs = index
        pairs = tensors.read(name, (places, slice(inputs.start // 2, -(-inputs.stop // 2)))).view(np.uint8)
        return fp4_values(pairs)[:, inputs.start % 2 :][:, : inputs.stop - inputs.start]

    def read_scale(index: Index) -> np.ndarray:
        return tensors.read(scale_name, index).astype(np.float32) * np.float32(0.5)

    values = LazyTensor((num_out, 2 * num_pairs), np.dtype(np.int8), read_values)
    return LazyQuantized(values, LazyTensor(stored, FLOAT32, read_scale), _FP4_BLOCK)


def _pair(sizes: Any) -> tuple[int, int]:
    if not sizes:
        return PLAIN.block
    rows, inputs = map(int, sizes)
    if min(rows, inputs) < 1:
        raise ValueError(f"a block of {rows} outputs and {inputs} inputs")
    return rows, inputs
