"""Products with weights of 4 bits on a TPU: a Mosaic kernel that reads them as they are stored, eight to a word, and
widens them in registers.

A step with few rows takes as long as its weights take to be read, if no more than some three instructions of the vector
unit are spent on two of them. A scale and an offset for each weight would take more, on TPUs before v6e many more,
which have no arithmetic in bfloat16. So for few rows the codes themselves are multiplied: put behind the exponent of 16
a code is the bfloat16 number 16 + code. The sums of each block of inputs are scaled then, which are fewer than weights
by a factor of 32 or more:

    x @ w = sum over blocks b of  scale_b * (x_b @ (16 + codes_b)) + rest_b * sum(x_b),  rest_b = offset_b - 16 scale_b

The matrix unit takes 128 inputs at once. Where blocks are smaller, each row comes once for each block of a run, with
zeros in the others' place. From a certain number of rows on that costs more than widening whole weights, which then
are shared by many rows: `code * scale + offset` in bfloat16, as a matrix that is restored would have them.

Bytes read: d_in * d_out / 2, and a scale and an offset of 16 bits each for each output and block of inputs;
2 * rows * d_in * d_out operations, for few rows times the blocks of a run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specserve.kernels.nibbles import GROUP, SUBLANES, Numbers, WordMatrix, halves, round_up
from specserve.mesh import traced_once

FEW = 32  # rows up to which sums of blocks are scaled, in place of weights
ROWS = 256  # of a program, at most
COLUMNS = 512  # of a program, at most: outputs
INPUTS = 4096  # of a program: what it fetches is a megabyte or less, and there are many
DEPTH = 128  # inputs that the matrix unit multiplies at once
_SIXTEEN = 0x41804180  # two bfloat16 numbers of 16, whose last bits but three are worth 1, 2, 4 and 8


def multiply(
    x: jax.Array, weight: WordMatrix, expert_of_block: jax.Array | None = None, *, interpret: Any = False
) -> jax.Array:
    """Compute x [row, d_in] @ weight -> [row, d_out] in float32. In float32 weights are not rounded; in bfloat16 they
    are, but where rows are few. With a matrix for each expert, rows lie in equal blocks, of a power of two from 8 to
    64, and expert_of_block [block] int32 has the expert of each. Blocks without one are behind the others, and nothing
    is written there."""
    return traced_once(_multiply, "interpret")(x, weight, expert_of_block, interpret=interpret)


def _multiply(x: jax.Array, weight: WordMatrix, expert_of_block: jax.Array | None, *, interpret: Any) -> jax.Array:
    num_rows, (*stack, num_chunks, _, d_out) = x.shape[0], weight.codes.shape
    chunk, num_blocks = weight.chunk, weight.scales.shape[-2]  # and of some that only fill registers
    rows_of_each = num_rows if expert_of_block is None else num_rows // len(expert_of_block)
    by_block = rows_of_each <= FEW or x.dtype != jnp.bfloat16
    row_tile = round_up(min(rows_of_each, FEW if by_block else ROWS), SUBLANES if by_block else 2 * SUBLANES)
    columns = min(COLUMNS if d_out >= 8 * COLUMNS else COLUMNS // 2, d_out)
    per_step = max(1, min(num_chunks, INPUTS // chunk))
    x = jnp.pad(x, ((0, -num_rows % row_tile), (0, 0))).reshape(-1, num_chunks, chunk).swapaxes(0, 1)
    num_tiles: Any = x.shape[1] // row_tile
    known = []  # before a program begins: its expert
    if expert_of_block is not None:
        known = [jnp.repeat(expert_of_block, rows_of_each // row_tile)]
        num_tiles = jnp.maximum((known[0] < stack[0]).sum(dtype=jnp.int32), 1)
        known[0] = jnp.minimum(known[0], stack[0] - 1)

    def of_rows(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec(sizes, lambda row, _column, step, *_: (step, row, 0))

    def of_columns(*sizes: int) -> pl.BlockSpec:
        def at(row: Any, column: Any, step: Any, *known: Any) -> tuple[Any, ...]:
            return *(ids[row] for ids in known), step, 0, column

        return pl.BlockSpec((*(None for _ in stack), *sizes), at)

    operands = [x, weight.codes, weight.scales]
    specs = [
        of_rows(per_step, row_tile, chunk),
        of_columns(per_step, chunk // GROUP * SUBLANES, columns),
        of_columns(per_step, num_blocks, columns),
    ]
    scratch = [pltpu.VMEM((chunk // 2, columns), jnp.uint32)]
    if by_block:
        sums = x.astype(jnp.float32).reshape(num_chunks, -1, chunk // weight.block, weight.block).sum(axis=-1)
        operands.append(jnp.pad(sums, ((0, 0), (0, 0), (0, num_blocks - sums.shape[-1]))))
        specs.append(of_rows(per_step, row_tile, num_blocks))
        scratch.append(pltpu.VMEM((num_blocks, columns), jnp.float32))
    else:
        scratch += [pltpu.VMEM((num_blocks, columns), jnp.uint32)] * 2
    kernel = partial(
        _by_block if by_block else _by_weight, numbers=weight.numbers, block=weight.block, num_chunks=num_chunks
    )
    each = "arbitrary" if known else "parallel"  # how many blocks have an expert is not known before
    found = pl.pallas_call(
        lambda *refs: kernel(*refs[len(known) :]),
        out_shape=jax.ShapeDtypeStruct((x.shape[1], d_out), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(known),
            grid=(num_tiles, pl.cdiv(d_out, columns), pl.cdiv(num_chunks, per_step)),
            in_specs=specs,
            out_specs=pl.BlockSpec((row_tile, columns), lambda row, column, _step, *_: (row, column)),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=(each, each, "arbitrary")),
        interpret=interpret,
        name="multiply_words",
    )(*known, *operands)
    return found[:num_rows, : weight.d_out]


def _by_block(
    x_ref: Any,  # [chunk, row, input]
    codes_ref: Any,  # [chunk, word, column] uint32
    scales_ref: Any,  # [chunk, block, column] uint32
    sums_ref: Any,  # [chunk, row, block] float32: of x
    out_ref: Any,  # [row, column] float32
    numbers_ref: Any,  # [input / 2, column] uint32: two bfloat16 numbers each
    scale_ref: Any,  # [block, column] float32
    *,
    numbers: Numbers,
    block: int,
    num_chunks: int,
) -> None:
    """Add the products of a program's chunks, whose blocks are scaled."""
    _, rows, chunk = x_ref.shape
    num_blocks = chunk // block
    per_run = max(1, DEPTH // block)  # blocks that are multiplied at once

    def add(i: jax.Array) -> None:
        scale, other = halves(scales_ref[i])
        scale_ref[...] = scale
        if numbers == "fp4":
            total = jnp.zeros_like(out_ref)
        else:
            rest = (other + (128 - 16)) * scale if numbers == "int4" else other - 16 * scale
            total = _product(sums_ref[i], rest)
        _store_numbers(codes_ref[i], numbers_ref, numbers)
        for first in range(0, num_blocks, per_run):
            count = min(per_run, num_blocks - first)
            inputs = slice(first * block, (first + count) * block)
            weights = pltpu.bitcast(numbers_ref[inputs.start // 2 : inputs.stop // 2], jnp.bfloat16)
            found = _product(_apart(x_ref[i, :, inputs], block), weights)
            for b in range(count):
                total += found[b * rows : (b + 1) * rows] * scale_ref[first + b : first + b + 1]
        out_ref[...] += total

    _for_each_chunk(add, out_ref, x_ref.shape[0], num_chunks)


def _apart(x: jax.Array, block: int) -> jax.Array:  # [row, input] -> [block * row, input]
    """Repeat the rows for each block of inputs, with zeros for the inputs of the others."""
    count = x.shape[1] // block
    if count == 1:
        return x
    wide = x.astype(jnp.float32)
    place = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 1)
    own = [jnp.where((place >= b * block) & (place < (b + 1) * block), wide, 0) for b in range(count)]
    return jnp.concatenate(own).astype(x.dtype)


def _by_weight(
    x_ref: Any,  # [chunk, row, input] bfloat16
    codes_ref: Any,  # [chunk, word, column] uint32
    scales_ref: Any,  # [chunk, block, column] uint32
    out_ref: Any,  # [row, column] float32
    weights_ref: Any,  # [input / 2, column] uint32: two bfloat16 weights each
    scale_ref: Any,  # [block, column] uint32: a bfloat16 scale twice
    other_ref: Any,  # [block, column] uint32
    *,
    numbers: Numbers,
    block: int,
    num_chunks: int,
) -> None:
    """Add the products of a program's chunks, whose weights are widened for all rows."""

    def add(i: jax.Array) -> None:
        pairs = scales_ref[i]
        scale_ref[...] = (pairs & 0xFFFF) | (pairs << 16)
        other_ref[...] = (pairs & jnp.uint32(0xFFFF0000)) | (pairs >> 16)

        def widen(found: jax.Array, first: int) -> jax.Array:
            b = first // block
            scale, other = (_twice(ref[b : b + 1], found.shape) for ref in (scale_ref, other_ref))
            if numbers == "fp4":
                return found * scale
            if numbers == "int4":
                return (found + (other + (128 - 16))) * scale
            return (found - 16) * scale + other

        _store_numbers(codes_ref[i], weights_ref, numbers, widen)
        out_ref[...] += _product(x_ref[i], pltpu.bitcast(weights_ref[...], jnp.bfloat16))

    _for_each_chunk(add, out_ref, x_ref.shape[0], num_chunks)


def _for_each_chunk(add: Any, out_ref: Any, per_step: int, num_chunks: int) -> None:
    """Begin with zeros in the first program of an output, and `add` each chunk that there is of this one's."""
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    jax.lax.fori_loop(0, jnp.minimum(per_step, num_chunks - step * per_step), lambda i, _: add(i), None)


def _store_numbers(
    words: jax.Array,  # [word, column] uint32
    to_ref: Any,  # [input / 2, column] uint32
    numbers: Numbers,
    change: Callable[[jax.Array, int], jax.Array] = lambda found, _first: found,
) -> None:
    """Widen codes to bfloat16 numbers, 16 + code or the double of a 4-bit float. Sixteen inputs at a time are stored,
    two to a word, after a `change` that is given the first of them."""
    for group in range(words.shape[0] // SUBLANES):
        own = words[group * SUBLANES : (group + 1) * SUBLANES]
        for quarter in range(GROUP // 16):
            found = _float4s(own, quarter) if numbers == "fp4" else _integers(own, quarter)
            first = group * GROUP + quarter * 16
            changed = pltpu.bitcast(change(pltpu.bitcast(found, jnp.bfloat16), first), jnp.uint32)
            to_ref[first // 2 : first // 2 + SUBLANES] = changed


def _integers(words: jax.Array, quarter: int) -> jax.Array:
    """Return 16 + code in bfloat16 of the codes of a quarter, two to a word."""
    codes = words << 3 if quarter == 0 else words >> (4 * quarter - 3)
    return (codes & 0x00780078) | jnp.uint32(_SIXTEEN)


def _float4s(words: jax.Array, quarter: int) -> jax.Array:
    """Return the doubles of 4-bit floats in the same form. A magnitude put behind the exponent of 1 is p = 1, 1.5, 2,
    3, 4, 6, 8 or 12; only the first two should be 0 and 1, and min(p, 2 p - 2) makes them so."""
    sizes = (words << 6 if quarter == 0 else words << 2 if quarter == 1 else words >> (4 * quarter - 6)) & 0x01C001C0
    signs = (words << (12 - 4 * quarter)) & jnp.uint32(0x80008000)
    p = pltpu.bitcast(sizes + jnp.uint32(0x3F803F80), jnp.bfloat16)
    return pltpu.bitcast(p + jnp.minimum(p - 2, 0), jnp.uint32) | signs


def _twice(pairs: jax.Array, shape: tuple[int, ...]) -> jax.Array:  # [1, column] uint32 -> [16, column] bfloat16
    return pltpu.bitcast(jnp.broadcast_to(pairs, (shape[0] // 2, shape[1])), jnp.bfloat16)


def _product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """The product in float32; in float32 no factor is rounded either."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(
        x, weights.astype(x.dtype), dims, precision=precision, preferred_element_type=jnp.float32
    )
