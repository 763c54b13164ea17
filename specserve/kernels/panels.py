"""The order of a packed matrix's numbers in memory, as `native/kernels.h` states it. Numbers of 4 bits are found among
those of 8, and scales of two levels among those of float32."""

from typing import NamedTuple

import numpy as np

from specserve.kernels import native

FOUR_BIT_FORMATS: tuple[native.Format, ...] = ("int4", "uint4", "fp4")
# The doubles of the 4-bit floats (e2m1) by their codes; the code of minus zero is left out.
FP4_DOUBLES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
FP4_CODES = np.full(256, 255, np.uint8)  # by the byte of a double; 255: no double
FP4_CODES[FP4_DOUBLES[::-1].view(np.uint8)] = np.arange(16, dtype=np.uint8)[::-1]
_MIDDLE = 8  # the code of zero
_TOGETHER = 8  # blocks whose scales of two levels share a factor
_LEAST, _LARGEST = -128, 127  # of the numbers that are multiplied by it
_LANE_INPUTS = 8  # of codes, in 32 bits of an output


class FourBits(NamedTuple):
    """Whole numbers as codes of 4 bits, one in a byte. In the format `int4` a number is code - 8 + shift, in `uint4` it
    is its own code."""

    codes: np.ndarray  # [..., d_in, d_out] uint8
    format: native.Format
    shift: np.ndarray | None  # [..., block, d_out] float32; None: zero everywhere


class LaidOut(NamedTuple):
    """A matrix's panels as a view; copied in its order and reshaped, they are what the kernel reads."""

    panels: np.ndarray
    shape: tuple[int, ...]  # [..., panel, d_in, width]
    width: int


def four_bits(values: np.ndarray, block: int) -> FourBits | None:
    """Return int8 values [..., d_in, d_out] as codes of 4 bits, where every block of inputs of an output spans at most
    16 numbers that follow each other, or all of them are doubles of 4-bit floats; else None. Codes of inputs that share
    a lane must be of one block."""
    d_in = values.shape[-2]
    if block < d_in and block % _LANE_INPUTS:
        return None
    first = values.reshape(-1, d_in, values.shape[-1])[:1, :block, :64]
    if np.ptp(first.astype(np.int16), axis=-2).max(initial=0) > 15 and not _are_doubles(first):
        return None  # most matrices of 8 bits show it here
    starts = np.arange(0, d_in, block)
    low, high = (f.reduceat(values, starts, axis=-2).astype(np.int16) for f in (np.minimum, np.maximum))
    if (high - low).max(initial=0) > 15:
        return FourBits(FP4_CODES[values.view(np.uint8)], "fp4", None) if _are_doubles(values) else None
    if low.min(initial=0) >= 0 and 7 < high.max(initial=0) < 16:
        return FourBits(values.view(np.uint8), "uint4", None)
    shift = np.where((low >= -_MIDDLE) & (high < _MIDDLE), 0, low + _MIDDLE)
    codes = values + np.int8(_MIDDLE)
    if not shift.any():
        return FourBits(codes.view(np.uint8), "int4", None)
    codes -= np.repeat(shift.astype(np.int8), block, axis=-2)[..., :d_in, :]
    return FourBits(codes.view(np.uint8), "int4", shift.astype(np.float32))


def _are_doubles(values: np.ndarray) -> bool:
    return bool((FP4_CODES[values.view(np.uint8)] < 16).all())


def lay_out(values: np.ndarray, format: native.Format, block: int) -> LaidOut:
    """Arrange a matrix [..., d_in, d_out] with a scale for each `block` inputs; numbers of 4 bits come as codes."""
    *stack, d_in, d_out = values.shape
    block = min(block, d_in)
    width, tile = native.panel_width(format, block), native.tile_inputs(format, block)
    num_panels, is_coded = -(-d_out // width), format in FOUR_BIT_FORMATS
    lanes = _LANE_INPUTS if is_coded else 4 // values.dtype.itemsize  # numbers that share 32 bits
    padded = _fill_up(values, -1, num_panels * width)
    if tile:
        num_blocks = -(-d_in // block)
        blocks = _fill_up(padded, -2, num_blocks * block).reshape(*stack, num_blocks, block, num_panels * width)
        blocks = _fill_up(blocks, -2, -(-block // tile) * tile)
        inputs = num_blocks * blocks.shape[-2]
        panels = blocks.reshape(*stack, inputs // tile, tile // lanes, lanes, num_panels, width // 16, 16)
        # [..., panel, step, tile, input / lanes, output, lanes]
        panels = np.moveaxis(panels, (-3, -6, -2, -5, -1, -4), (-6, -5, -4, -3, -2, -1))
        if is_coded:
            panels = panels[..., :4] | panels[..., 4:] << 4
    else:
        inputs = d_in
        panels = padded.reshape(*stack, d_in, num_panels, lanes, width // lanes)
        panels = np.moveaxis(np.moveaxis(panels, -3, -4), -2, -1)  # [..., panel, d_in, width / lanes, lanes]
    return LaidOut(panels, (*stack, num_panels, inputs // 2 if is_coded else inputs, width), width)


def by_panel(of_outputs: np.ndarray, width: int) -> np.ndarray:
    """Return numbers of each block and output [..., block, d_out] panel by panel: [..., panel, block, width]."""
    d_out = of_outputs.shape[-1]
    padded = _fill_up(of_outputs, -1, -(-d_out // width) * width)
    return np.ascontiguousarray(np.moveaxis(padded.reshape(*padded.shape[:-1], -1, width), -2, -3))


def in_two_levels(of_blocks: np.ndarray, width: int) -> np.ndarray | None:
    """Return float32 scales or offsets [..., block, d_out] panel by panel as float16 factors of `_TOGETHER` blocks and
    bytes that are multiplied by them, where that is exactly what they are, as in llama.cpp's K-quants. Else None.

    The result is [..., panel, super-block, 2 + blocks, width] uint8."""
    *stack, num_blocks, d_out = of_blocks.shape
    if _as_products(of_blocks.reshape(-1, num_blocks, d_out)[:1, :_TOGETHER, :64]) is None:
        return None  # most scales show it here
    num_super = -(-num_blocks // _TOGETHER)
    found = _as_products(_fill_up(of_blocks, -2, num_super * _TOGETHER).reshape(*stack, num_super, _TOGETHER, d_out))
    if found is None:
        return None
    factors, numbers = (_fill_up(each, -1, -(-d_out // width) * width) for each in found)
    factors, numbers = (each.reshape(*each.shape[:-1], -1, width) for each in (factors, numbers))
    halves = np.moveaxis(factors, -2, -4)[..., 0, :]  # [..., panel, super-block, width]
    as_bytes = np.ascontiguousarray(halves).view(np.uint8).reshape(*halves.shape[:-1], 2, width)
    return np.concatenate([as_bytes, np.moveaxis(numbers, -2, -4).view(np.uint8)], axis=-2)


def _as_products(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Scales [..., block, d_out] as float16 factors [..., 1, d_out] times int8 numbers [..., block, d_out], or None. A
    factor is the greatest common divisor, or a part of it where float16 does not hold that."""
    with np.errstate(over="ignore"):
        units = scales * 2.0**24  # float16 numbers are multiples of 2^-24
    if not (np.abs(units) < 2.0**62).all() or (units != np.rint(units)).any():
        return None
    whole = units.astype(np.int64)
    divisor = np.maximum(np.gcd.reduce(whole, axis=-2, keepdims=True), 1)
    numbers = whole // divisor
    least, largest = numbers.min(axis=-2, keepdims=True), numbers.max(axis=-2, keepdims=True)
    if least.min(initial=0) < _LEAST or largest.max(initial=0) > _LARGEST:
        return None
    parts = np.ones_like(divisor)
    left = np.nonzero(~_are_halves(divisor))
    for count in range(2, -_LEAST + 1):
        rest = divisor[left] // count
        fits = (least[left] * count >= _LEAST) & (largest[left] * count <= _LARGEST)
        fits &= (rest * count == divisor[left]) & _are_halves(rest)
        parts[tuple(axis[fits] for axis in left)] = count
        left = tuple(axis[~fits] for axis in left)
    if left[0].size:
        return None
    return (divisor // parts * 2.0**-24).astype(np.float16), (numbers * parts).astype(np.int8)


def _are_halves(units: np.ndarray) -> np.ndarray:
    """Return whether float16 holds these multiples of 2^-24."""
    numbers = units * 2.0**-24
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16) == numbers


def _fill_up(values: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The values with zeros after them along an axis, up to this size."""
    if size == values.shape[axis]:
        return values
    padding = [(0, 0)] * values.ndim
    padding[axis] = 0, size - values.shape[axis]
    return np.pad(values, padding)
