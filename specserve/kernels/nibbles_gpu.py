"""Products with weights of 4 bits on a GPU: a Triton kernel that reads them as they are stored, two to a byte, and
widens them in registers.

A step with few rows takes as long as its weights take to be read. So the kernel is made to keep many reads in flight:
each program has a tile of outputs and a part of the inputs, the parts are as many as fill the GPU, and XLA adds their
float32 results in a fixed order. Bytes read: d_in * d_out / 2, and a scale, perhaps an offset, for each output and
block of inputs; 2 * rows * d_in * d_out operations, with rows rounded up to 16 at least.

The low halves of a tile's bytes are the numbers of so many inputs that follow each other, and the high halves those of
as many next to them. So one read serves two products, each of inputs that share a scale, and nothing is shuffled. A
number is widened by bits alone: behind the exponent of 128 it stands for 128 more than itself in bfloat16, and one
subtraction for two numbers, which is exact, takes that away. A conversion of an integer would take four times as long
as there is for it.

Scales and offsets are kept in bfloat16, and so is a number times its scale plus its offset, which one more instruction
for two numbers makes. They are off by 2^-9 each, a fifteenth of what rounding to 4 bits moves. Applied to the float32
products of blocks of 32 inputs instead, they would take half of all instructions, of which there are five for a number
where memory is to stay the limit. A row's result has the same bits whatever the other rows are.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specserve.kernels.panels import FP4_CODES
from specserve.mesh import traced_once
from specserve.pytree import pytree, static

Numbers = Literal["int4", "uint4", "fp4"]  # see `panels.four_bits`

LEAST = 16  # rows, columns and inputs of a product that tensor cores take
MOST_SPAN = 128  # bytes of an output that are read at once: a line of the cache
COLUMNS = 128  # outputs of a program
ROWS = 128  # of a program, at most
MANY = 64  # rows from which on a product is computed with outputs as rows: Hopper's multiplies such registers in place
PROGRAMS = 396  # keep the 132 multiprocessors of an H100 busy, with three programs each
WARPS = 4  # of a program: each has 32 outputs, for which it loads the rows once
PENDING_BYTES = 2**15  # of codes, asked for by a program and not there yet


def _asm(numbers: Numbers, half: int) -> str:
    """Return the instructions that widen the low halves of four bytes ($2) to bfloat16 (0), or their high halves (1),
    by the scale and what goes with it of each ($3 to $6, of which the first stands for all)."""
    lines = ["{", ".reg .b32 bits, sign, scale, other, first, second;", "prmt.b32 scale, $3, $3, 0x1010;"]
    lines += ["prmt.b32 other, $3, $3, 0x3232;"] * (numbers != "fp4")
    first, second = {
        "uint4": ("0xC300C300", "0x3F803F80"),  # -128 and 1
        "int4": ("0x3F803F80", "0"),  # 1
        "fp4": ("0x7F007F00", "0x80008000"),  # 2^127 and minus zero
    }[numbers]
    lines += [f"mov.b32 first, {first};", f"mov.b32 second, {second};"]
    for i, bytes_ in enumerate(("0x4140", "0x4342")):
        lines.append(f"prmt.b32 bits, $2, 0, {bytes_};")  # two bytes in the halves of a register
        if numbers == "fp4":  # a magnitude is the lowest bits of the exponent and the highest of the fraction
            lines += [f"shl.b32 sign, bits, {12 - 4 * half};", "and.b32 sign, sign, 0x80008000;"]
            lines += [f"shl.b32 bits, bits, {6 - 4 * half};", "lop3.b32 bits, bits, 0x01C001C0, sign, 0xEA;"]
            lines += ["fma.rn.bf16x2 bits, bits, first, second;", f"fma.rn.bf16x2 ${i}, bits, scale, second;"]
            continue
        lines += ["shr.u32 bits, bits, 4;"] * half
        lines.append("lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;")  # (x & 15) | 128.0
        if numbers == "uint4":
            lines += ["fma.rn.bf16x2 bits, bits, second, first;", f"fma.rn.bf16x2 ${i}, bits, scale, other;"]
        else:
            lines += ["fma.rn.bf16x2 bits, bits, first, other;", f"mul.rn.bf16x2 ${i}, bits, scale;"]
    return "\n".join([*lines, "}"])


@pytree
class NibbleMatrix:
    """A [d_in, d_out] matrix of numbers of 4 bits times scales, perhaps plus offsets, as `multiply` reads it. Of each
    `span` bytes of an output, the low halves are the codes of the first `span` inputs and the high halves those of the
    next `span`. A weight is (128 + code + zero) * scale in `int4`, code * scale + offset in `uint4`, and the double of
    a 4-bit float times the scale in `fp4`."""

    codes: jax.Array  # [d_out, d_in / 2] uint8
    scales: jax.Array  # [d_in / block rounded up, d_out] uint32: a bfloat16 scale, and above it a zero or an offset
    numbers: Numbers = static()
    span: int = static()
    block: int = static()  # inputs that share a scale

    @property
    def shape(self) -> tuple[int, int]:
        d_out, num_bytes = self.codes.shape
        return 2 * num_bytes, d_out

    def __getitem__(self, index: tuple[slice, Any]) -> "NibbleMatrix":
        """Pick some outputs, of all inputs."""
        return dataclasses.replace(self, codes=self.codes[index[1]], scales=self.scales[index])


def span_of(d_in: int, block: int) -> int:
    """Return the `span` of a matrix, or 0 where the kernel cannot take it: both halves of its tiles must be of one
    block."""
    span = math.gcd(block, d_in // 2, MOST_SPAN) if d_in % 2 == 0 else 0
    return span if span >= LEAST else 0


def pack(
    values: jax.Array,  # [d_in, d_out] int8
    scale: jax.Array,  # [d_in / block rounded up, d_out]
    offset: jax.Array | None,  # like scale
    block: int,
) -> NibbleMatrix | None:
    """Return numbers in 4 bits, without changing one, and their scales and offsets in bfloat16; None where they do not
    fit, or where the kernel cannot take the shape."""
    d_in, block = values.shape[0], min(block, values.shape[0])
    if values.dtype != jnp.int8 or not span_of(d_in, block):
        return None
    low, high = _bounds(values, block)
    if (high - low).max() > 15:
        is_float = offset is None and (jnp.asarray(FP4_CODES)[values.view(jnp.uint8)] < 16).all()
        return lay_out(values, scale, jnp.zeros_like(scale), block, "fp4") if is_float else None
    first = jnp.where((low >= 0) & (high < 16), 0, jnp.where((low >= -8) & (high < 8), -8, low))
    values = values - jnp.repeat(first.astype(jnp.int8), block, axis=0)[:d_in]
    least = first.astype(jnp.float32)
    if offset is None:
        return lay_out(values, scale, least - 128, block, "int4")
    return lay_out(values, scale, least * scale + offset, block, "uint4")


def _bounds(values: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:  # [d_in / block rounded up, d_out] int32
    padded = jnp.pad(values, ((0, -len(values) % block), (0, 0)), mode="edge")
    blocks = padded.reshape(-1, block, values.shape[1])
    return blocks.min(axis=1).astype(jnp.int32), blocks.max(axis=1).astype(jnp.int32)


def lay_out(values: jax.Array, scale: jax.Array, other: jax.Array, block: int, numbers: Numbers) -> NibbleMatrix:
    """Lay out int8 values that are codes, or doubles of 4-bit floats; `other` is the zeros or the offsets."""
    d_in, d_out = values.shape
    span, codes = span_of(d_in, block), values.view(jnp.uint8)
    if numbers == "fp4":
        codes = jnp.asarray(FP4_CODES)[codes]
    halves = codes.reshape(-1, 2, span, d_out)
    codes = (halves[:, 0] | halves[:, 1] << 4).reshape(-1, d_out).T
    pairs = jnp.stack([scale, other], axis=-1).astype(jnp.bfloat16)
    return NibbleMatrix(codes, jax.lax.bitcast_convert_type(pairs, jnp.uint32), numbers, span, block)


def restore(weight: NibbleMatrix) -> jax.Array:  # [d_in, d_out] float32
    """Return the plain matrix: the definition that the kernel is held to."""
    d_in, d_out = weight.shape
    pairs = weight.codes.T.reshape(-1, 1, weight.span, d_out)
    codes = jnp.concatenate([pairs & 15, pairs >> 4], axis=1).reshape(d_in, d_out)
    return _weights(codes, jnp.repeat(weight.scales, weight.block, axis=0)[:d_in], weight.numbers)


def _weights(codes: jax.Array, scales: jax.Array, numbers: Numbers) -> jax.Array:
    """Return the weights of codes and their scales, which broadcast, in float32."""
    scale, other = (jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in (scales << 16, (scales >> 16) << 16))
    code = codes.astype(jnp.int32)
    if numbers == "fp4":  # 1 + fraction / 2 times a power of two, doubled; below it a half, doubled
        exponent, fraction = (code >> 1) & 3, code & 1
        size = jnp.where(exponent > 0, (2 + fraction) << jnp.maximum(exponent - 1, 0), fraction)
        return jnp.where(code > 7, -size, size).astype(jnp.float32) * scale
    if numbers == "int4":
        return (code.astype(jnp.float32) + (128 + other)) * scale
    return code.astype(jnp.float32) * scale + other


def multiply(x: jax.Array, weight: NibbleMatrix, *, interpret: bool = False) -> jax.Array:
    """Compute x [row, d_in] @ weight -> [row, d_out] in float32: products in x's dtype, which holds the numbers
    exactly."""
    return traced_once(_multiply, "interpret")(x, weight, interpret=interpret)


def _multiply(x: jax.Array, weight: NibbleMatrix, *, interpret: bool) -> jax.Array:
    (num_rows, d_in), d_out = x.shape, weight.shape[1]
    row_tile = min(ROWS, max(LEAST, pl.next_power_of_2(num_rows)))
    tiles = pl.cdiv(num_rows, row_tile), pl.cdiv(d_out, COLUMNS)
    num_steps = d_in // (2 * weight.span)
    parts = _parts(num_rows, d_in, num_steps, math.prod(tiles))
    stages = min(6, 1 + PENDING_BYTES // (COLUMNS * weight.span))
    kernel = partial(
        _kernel,
        row_tile=row_tile,
        numbers=weight.numbers,
        span=weight.span,
        block=weight.block,
        num_steps=num_steps,
        uses_asm=not interpret,
    )
    found = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts, num_rows, d_out), jnp.float32),
        grid=(*tiles, parts),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=stages),
        interpret=interpret,
        name="multiply_nibbles",
    )(x, weight.codes, weight.scales)
    return found.sum(axis=0)


def _parts(num_rows: int, d_in: int, num_steps: int, num_tiles: int) -> int:
    """Return into how many parts the inputs are cut: as many as fill a GPU, but no less than two steps each, and no
    more than make four times the traffic of the weights' bytes."""
    return max(1, min(PROGRAMS // num_tiles, num_steps // 2, d_in // (16 * num_rows)))


def _kernel(
    x_ref: Any,  # [row, d_in]
    codes_ref: Any,  # [d_out, d_in / 2] uint8
    scales_ref: Any,  # [block, d_out] uint32
    out_ref: Any,  # [part, row, d_out] float32
    *,
    row_tile: int,
    numbers: Numbers,
    span: int,
    block: int,
    num_steps: int,
    uses_asm: bool,
) -> None:
    """Multiply a tile of rows by a tile of outputs, over one part of the inputs."""
    num_parts, num_rows, d_out = out_ref.shape
    part = pl.program_id(2)
    rows, columns = _Tile(pl.program_id(0), row_tile, num_rows), _Tile(pl.program_id(1), COLUMNS, d_out)
    first = part * num_steps // num_parts
    is_turned = row_tile >= MANY

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        step = first + i
        pairs = columns.load_rows(codes_ref, step * span, span)
        for half in (0, 1):
            start = (2 * step + half) * span
            scales = columns.load(scales_ref, jax.lax.div(start, block))[:, None]
            x = rows.load_rows(x_ref, start, span)
            if uses_asm and x.dtype == jnp.bfloat16:
                weights = _widen(pairs, jnp.broadcast_to(scales, pairs.shape), half, numbers)
            else:
                weights = _weights((pairs >> 4) if half else (pairs & 15), scales, numbers).astype(x.dtype)
            total += _product(*((weights, x) if is_turned else (x, weights)))
        return total

    count = (part + 1) * num_steps // num_parts - first
    shape = (COLUMNS, row_tile) if is_turned else (row_tile, COLUMNS)
    total = jax.lax.fori_loop(0, count, add, jnp.zeros(shape, jnp.float32))
    is_there = None if rows.is_whole and columns.is_whole else rows.mask[:, None] & columns.mask[None]
    triton.store(out_ref.at[part, rows.places, columns.places], total.T if is_turned else total, mask=is_there)


class _Tile:
    """So many places of an axis, of which the last tile may have fewer."""

    def __init__(self, index: jax.Array, size: int, of: int) -> None:
        self.size, self.is_whole = size, of % size == 0
        self.places, self.mask = pl.ds(index * size, size), index * size + jnp.arange(size) < of

    def load(self, ref: Any, at: jax.Array) -> jax.Array:  # of [n, of]: [size]
        mask = {} if self.is_whole else {"mask": self.mask, "other": 0}
        return triton.load(ref.at[at, self.places], **mask)

    def load_rows(self, ref: Any, start: jax.Array, count: int) -> jax.Array:  # of [of, n]: [size, count]
        mask = {} if self.is_whole else {"mask": jnp.broadcast_to(self.mask[:, None], (self.size, count)), "other": 0}
        return triton.load(ref.at[self.places, pl.ds(start, count)], **mask)


def _widen(pairs: jax.Array, scales: jax.Array, half: int, numbers: Numbers) -> jax.Array:
    """Return the weights of the low halves of bytes (0), or those of the high halves, in bfloat16."""
    return triton.elementwise_inline_asm(
        _asm(numbers, half),
        args=[pairs, scales],
        constraints="=&r,=&r,r,r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(pairs.shape, jnp.bfloat16)],
    )[0]


def _product(x: jax.Array, other: jax.Array) -> jax.Array:  # [m, input], [n, input] -> [m, n] float32
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, other, dims, precision=precision, preferred_element_type=jnp.float32)
