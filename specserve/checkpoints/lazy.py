"""Weights that are read by slice when they are put on a device, as they are or as whole numbers with scales."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Of each axis a slice with start and stop, of a weight's outputs also an array of places. Nothing: all of it.
Index = tuple[Any, ...]
FLOAT32 = np.dtype(np.float32)
_FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # so they are integers
_FP4_PAIRS = np.stack([_FP4_DOUBLED[np.arange(256) & 15], _FP4_DOUBLED[np.arange(256) >> 4]], axis=1)  # [byte, 2]


@dataclass(frozen=True)
class LazyTensor:
    """A value that is read by slice: a tensor of a file, or what is computed from some."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]  # whole indices: one for each axis
    is_widened: bool = False  # computed from numbers of fewer bits

    @property
    def layout(self) -> object:
        return None  # plain


@dataclass(frozen=True)
class LazyQuantized:
    """A stored matrix of 8 bits or fewer: values, and one scale, perhaps an offset, for each output and `block`
    inputs."""

    values: LazyTensor  # [..., out, in] of 8 bits
    scale: LazyTensor  # [..., out, in_blocks] float32
    block: int
    offset: LazyTensor | None = None  # like scale

    @property
    def layout(self) -> object:
        """The layout; matrices of one layout can be stacked."""
        return self.values.dtype, self.scale.shape, self.block, self.offset is None


@dataclass(frozen=True)
class RestoredEntry:
    """A weight that is computed from what is stored, of few bits for instance, as float32 numbers."""

    file: Path
    weight: LazyTensor
    dtype = FLOAT32

    @property
    def is_widened(self) -> bool:
        return self.weight.is_widened

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def whole_numbers(self) -> None:
        return None

    def read(self, index: Index = ()) -> np.ndarray:
        return self.weight.read(index or tuple(slice(0, size) for size in self.shape))


def as_floats(weight: LazyTensor | LazyQuantized) -> LazyTensor:
    """Return a weight as the float32 numbers that it stands for, as `kernels.matmul.dequantize` computes them."""
    if isinstance(weight, LazyTensor):
        return weight

    def read(index: Index) -> np.ndarray:
        *rest, inputs = index
        blocks = blocks_of(inputs, weight.block)
        of_input = np.arange(inputs.start, inputs.stop) // weight.block - blocks.start
        value = weight.values.read(index).astype(np.float32) * weight.scale.read((*rest, blocks))[..., of_input]
        return value if weight.offset is None else value + weight.offset.read((*rest, blocks))[..., of_input]

    return LazyTensor(weight.values.shape, FLOAT32, read, is_widened=True)


def blocks_of(inputs: slice, block: int) -> slice:
    """Return the blocks that some inputs lie in."""
    return slice(inputs.start // block, -(-inputs.stop // block))


def fp4_values(pairs: np.ndarray) -> np.ndarray:  # [..., n] uint8 -> [..., 2 n] int8
    """Return the doubles of 4-bit floats (e2m1), of which each byte holds two, the first in its lower half."""
    return _FP4_PAIRS[pairs].reshape(*pairs.shape[:-1], -1)
