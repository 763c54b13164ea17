"""Weights in 8 bits or fewer as checkpoints keep them, read by slice like any other. The layouts (transformers'
quantizers of these names, and the OCP Microscaling Formats specification v1.0 for the last):

- fp8: `X.weight` float8 [out, in], `X.weight_scale_inv` for each block of 128 outputs and 128 inputs;
- fbgemm_fp8 and compressed-tensors: `X.weight` float8 or int8 [out, in], `X.weight_scale` for each output [out, 1], for
  the whole tensor [1], or for each block;
- mxfp4 (GPT-OSS): `X_blocks` uint8 [expert, out, in / 32, 16], two 4-bit floats in a byte, the lower half first, and
  `X_scales` uint8 [expert, out, in / 32], powers of two.

Every one of them is values times scale. Scales of activations are not read: activations keep their precision here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from specserve.checkpoints.tensors import Index, TensorFolder
from specserve.errors import CheckpointError

FLOATS = frozenset(np.dtype(dtype) for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
EIGHT_BITS = frozenset(np.dtype(dtype) for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8))
DEFAULT_BLOCK = (128, 128)  # outputs, inputs
UNUSED_SCALES = {  # patterns of tensors -> why weights do not need them
    r".*\.(input_scale|input_scale_ub|activation_scale)": "scales of activations, which are not quantised here",
    r".*\.[qkv]_scale": "scales of an 8-bit cache",
}
_FLOAT32 = np.dtype(np.float32)
_FP4_BLOCK = 32
_FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # so they are integers
_FP4_PAIRS = np.stack([_FP4_DOUBLED[np.arange(256) & 15], _FP4_DOUBLED[np.arange(256) >> 4]], axis=1)  # [byte, 2]


@dataclass(frozen=True)
class LazyTensor:
    """A value that is read by slice: a tensor of a file, or what is computed from some."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]  # whole indices: one for each axis

    @property
    def layout(self) -> object:
        return None  # plain


@dataclass(frozen=True)
class LazyQuantized:
    """A stored matrix of 8 bits or fewer: values, and one scale for each output and `block` inputs."""

    values: LazyTensor  # [..., out, in] of 8 bits
    scale: LazyTensor  # [..., out, in_blocks] float32
    block: int

    @property
    def layout(self) -> object:
        """The layout; matrices of one layout can be stacked."""
        return self.values.dtype, self.scale.shape, self.block


def stored_block(raw: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Return how many outputs and inputs of a weight share a scale where scales are by block, as config.json states.
    Raises CheckpointError for a quantisation that is not read."""
    stated = raw.get("quantization_config") or raw.get("compression_config") or {}
    method = stated.get("quant_method")
    if "config_groups" in stated:
        method = stated.get("quant_method", "compressed-tensors")
    if not stated or method in ("fbgemm_fp8", "mxfp4"):
        return DEFAULT_BLOCK
    if method == "fp8":
        return _pair(stated.get("weight_block_size"))
    if method != "compressed-tensors":
        raise CheckpointError(
            f"{where}: weights are quantised by {method!r}; fp8, fbgemm_fp8, compressed-tensors of 8 bits and mxfp4 "
            "can be read. Take the model as it was before it was quantised"
        )
    block = DEFAULT_BLOCK
    for group in (stated.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        layout = group.get("format") or stated.get("format")
        kind = (weights.get("num_bits"), weights.get("strategy"), layout, weights.get("symmetric", True))
        if kind[0] != 8 or kind[1] not in ("tensor", "channel", "block") or layout == "pack-quantized" or not kind[3]:
            raise CheckpointError(
                f"{where}: compressed-tensors of {kind[0]} bits by {kind[1]}, {layout}"
                f"{'' if kind[3] else ', asymmetric'}; 8 bits by tensor, channel or block, symmetric and not packed, "
                "can be read. Take the model as it was before it was quantised"
            )
        if kind[1] == "block":
            block = _pair(weights.get("block_structure"))
    return block


def open_weight(
    tensors: TensorFolder, name: str, block: tuple[int, int]
) -> tuple[LazyTensor | LazyQuantized, tuple[str, ...]]:
    """Open a weight as it is stored, and the tensors that it is made of. Raises CheckpointError where it is missing,
    or of a dtype that is no float and has no scale."""
    names = tensors.names()
    if f"{name}_blocks" in names and f"{name}_scales" in names:
        return _open_fp4(tensors, name), (f"{name}_blocks", f"{name}_scales")
    if name not in names:
        raise CheckpointError(f"{name} is missing")
    shape, dtype = tensors.shape(name), tensors.dtype(name)
    values = LazyTensor(shape, dtype, partial(tensors.read, name))
    if dtype in FLOATS:
        return values, (name,)
    where = f"{tensors.file(name).name}: {name}"
    if dtype not in EIGHT_BITS or len(shape) != 2:
        raise CheckpointError(f"{where} is {dtype}, expected a float, or a matrix of int8 or float8 with its scale")
    for scale_name in (f"{name}_scale_inv", f"{name}_scale"):
        if scale_name in names:
            scale, inputs = _open_scale(tensors, scale_name, shape, block)
            return LazyQuantized(values, scale, inputs), (name, scale_name)
    raise CheckpointError(f"{where} is {dtype}, but there is no {name}_scale_inv and no {name}_scale")


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

    return LazyTensor((num_out, grid[1]), _FLOAT32, read), inputs


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
        blocks = _blocks(inputs, _FP4_BLOCK)
        pairs = _FP4_PAIRS[tensors.read(f"{name}_blocks", (*rest, blocks, slice(None)))]
        values = pairs.reshape(*pairs.shape[:-3], -1)
        offset = inputs.start - blocks.start * _FP4_BLOCK
        return values[..., offset : offset + inputs.stop - inputs.start]

    def read_scale(index: Index) -> np.ndarray:
        powers = tensors.read(f"{name}_scales", index).view(ml_dtypes.float8_e8m0fnu)
        return powers.astype(np.float32) * np.float32(0.5)

    shape = (*scales[:-1], scales[-1] * _FP4_BLOCK)
    values, scale = LazyTensor(shape, np.dtype(np.int8), read_values), LazyTensor(scales, _FLOAT32, read_scale)
    return LazyQuantized(values, scale, _FP4_BLOCK)


def _blocks(inputs: slice, block: int) -> slice:
    """The blocks that some inputs lie in."""
    return slice(inputs.start // block, -(-inputs.stop // block))


def _pair(sizes: Any) -> tuple[int, int]:
    if not sizes:
        return DEFAULT_BLOCK
    return int(sizes[0]), int(sizes[1])
