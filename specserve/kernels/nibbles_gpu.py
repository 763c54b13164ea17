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

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specserve.kernels.nibbles import LEAST, NibbleMatrix, Numbers, weights_of
from specserve.mesh import traced_once

COLUMNS = 128  # outputs of a program
ROWS = 128  # of a program, at most
MANY = 64  # rows from which on a product is computed with outputs as rows: Hopper's multiplies such registers in place
PROGRAMS = 396  # keep the 132 multiprocessors of an H100 busy, with three programs each
WARPS = 4  # of a program: each has 32 outputs, for which it loads the rows once; twice as many from MANY rows on,
# where four warps multiply 64 outputs together
PENDING_BYTES = 2**15  # of codes, asked for by a program and not there yet
SHARED_BYTES = 96 * 2**10  # of a program's memory on the chip: GPUs without more have 99 KiB


def _asm(numbers: Numbers, half: int) -> str:
    """Return the instructions that widen the low halves of four bytes ($2) to bfloat16 (0), or their high halves (1),
    by the scale and what goes with it of each ($3 to $6). Where weights are the left factor of a product, two of the
    four are of another output: multiprocessors hold rows that are eight apart side by side."""
    lines = ["{", ".reg .b32 bits, sign, scale, other, first, second;"]
    first, second = {
        "uint4": ("0xC300C300", "0x3F803F80"),  # -128 and 1
        "int4": ("0x3F803F80", "0x80008000"),  # 1 and minus zero
        "fp4": ("0x7F007F00", "0x80008000"),  # 2^127 and minus zero
    }[numbers]
    lines += [f"mov.b32 first, {first};", f"mov.b32 second, {second};"]
    for i, bytes_ in enumerate(("0x4140", "0x4342")):
        lines.append(f"prmt.b32 bits, $2, 0, {bytes_};")  # two bytes in the halves of a register
        lines.append(f"prmt.b32 scale, ${2 * i + 3}, ${2 * i + 4}, 0x5410;")
        lines += [f"prmt.b32 other, ${2 * i + 3}, ${2 * i + 4}, 0x7632;"] * (numbers != "fp4")
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
            lines += ["fma.rn.bf16x2 bits, bits, first, other;", f"fma.rn.bf16x2 ${i}, bits, scale, second;"]
    return "\n".join([*lines, "}"])


def multiply(
    x: jax.Array, weight: NibbleMatrix, expert_of_block: jax.Array | None = None, *, interpret: bool = False
) -> jax.Array:
    """Compute x [row, d_in] @ weight -> [row, d_out] in float32: products in x's dtype, which holds the numbers
    exactly. With a matrix for each expert, rows lie in equal blocks, of 16 to `ROWS` and a power of two, and
    expert_of_block [block] int32 has the expert of each; where that is none, nothing is written."""
    return traced_once(_multiply, "interpret")(x, weight, expert_of_block, interpret=interpret)


def _multiply(x: jax.Array, weight: NibbleMatrix, expert_of_block: jax.Array | None, *, interpret: bool) -> jax.Array:
    (num_rows, d_in), d_out = x.shape, weight.shape[-1]
    if expert_of_block is None:
        row_tile = min(ROWS, max(LEAST, pl.next_power_of_2(num_rows)))
    else:
        row_tile = num_rows // len(expert_of_block)
    tiles = pl.cdiv(num_rows, row_tile), pl.cdiv(d_out, COLUMNS)
    num_steps = d_in // (2 * weight.span)
    parts = _parts(row_tile if expert_of_block is not None else num_rows, d_in, num_steps, math.prod(tiles))
    of_stage = (COLUMNS + 2 * row_tile * x.dtype.itemsize) * weight.span  # codes, and x of both halves
    stages = min(6, 1 + PENDING_BYTES // (COLUMNS * weight.span), 1 + SHARED_BYTES // of_stage)
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
        compiler_params=triton.CompilerParams(num_warps=WARPS * (1 + (row_tile >= MANY)), num_stages=stages),
        interpret=interpret,
        name="multiply_nibbles",
    )(*([] if expert_of_block is None else [expert_of_block]), x, weight.codes, weight.scales)
    return found.sum(axis=0)


def _parts(num_rows: int, d_in: int, num_steps: int, num_tiles: int) -> int:
    """Return into how many parts the inputs are cut: as many as fill a GPU, but no less than two steps each, and no
    more than make four times the traffic of the weights' bytes."""
    return max(1, min(PROGRAMS // num_tiles, num_steps // 2, d_in // (16 * num_rows)))


def _kernel(*refs: Any, **how: Any) -> None:
    """Multiply a tile of rows by a tile of outputs, over one part of the inputs, with the matrix of the tile's expert
    where there is one for each."""
    tile = tuple(map(pl.program_id, range(3)))
    if len(refs) == len(("x", "codes", "scales", "out")):
        _multiply_tile(tile, (), *refs, **how)
        return
    experts_ref, x_ref, codes_ref, *rest = refs
    expert = experts_ref[tile[0]]

    @pl.when(expert < len(codes_ref))
    def _() -> None:
        _multiply_tile(tile, (expert,), x_ref, codes_ref, *rest, **how)


def _multiply_tile(
    tile: tuple[jax.Array, ...],  # of rows, of outputs, and the part
    of: tuple[jax.Array, ...],  # the index of the expert, or nothing
    x_ref: Any,  # [row, d_in]
    codes_ref: Any,  # [*of, d_out, d_in / 2] uint8
    scales_ref: Any,  # [*of, block, d_out] uint32
    out_ref: Any,  # [part, row, d_out] float32
    *,
    row_tile: int,
    numbers: Numbers,
    span: int,
    block: int,
    num_steps: int,
    uses_asm: bool,
) -> None:
    num_parts, num_rows, d_out = out_ref.shape
    part = tile[2]
    rows, columns = _Tile(tile[0], row_tile, num_rows), _Tile(tile[1], COLUMNS, d_out)
    first = part * num_steps // num_parts
    is_turned = row_tile >= MANY

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        step = first + i
        pairs = columns.load_rows(codes_ref, step * span, span, of)
        for half in (0, 1):
            start = (2 * step + half) * span
            scales = columns.load(scales_ref, *of, jax.lax.div(start, block))[:, None]
            x = rows.load_rows(x_ref, start, span)
            if uses_asm and x.dtype == jnp.bfloat16:
                weights = _widen(pairs, jnp.broadcast_to(scales, pairs.shape), half, numbers)
            else:
                weights = weights_of((pairs >> 4) if half else (pairs & 15), scales, numbers).astype(x.dtype)
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

    def load(self, ref: Any, *at: jax.Array) -> jax.Array:  # of [..., of]: [size]
        mask = {} if self.is_whole else {"mask": self.mask, "other": 0}
        return triton.load(ref.at[*at, self.places], **mask)

    def load_rows(
        self, ref: Any, start: jax.Array, count: int, at: tuple[jax.Array, ...] = ()
    ) -> jax.Array:  # of [*at, of, n]: [size, count]
        mask = {} if self.is_whole else {"mask": jnp.broadcast_to(self.mask[:, None], (self.size, count)), "other": 0}
        return triton.load(ref.at[*at, self.places, pl.ds(start, count)], **mask)


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
