"""The experts' MLPs on a GPU, for any number of tokens: two Triton kernels over blocks of rows that share an expert.

On a TPU one kernel does all, because its steps follow each other and add to one sum. A GPU's programs run side by side:
a single kernel would add hundreds of partial sums atomically, in an order that changes from run to run, or use a few
processors only. So the first kernel makes the hidden channels (gate, up and activation), the second the outputs. What
lies between them is n top_k d_ff numbers, next to an expert's 3 d_model d_ff weights nothing. Every program has one
tile of one block: the blocks of a step's few rows times the tiles of their experts' matrices keep all processors busy.

An expert whose rows fill one block has each of its matrices read once, and one that no row chose is not read. The
blocks of an expert with more rows are neighbours in the grid, so that they meet its tiles in the cache. The formulae of
bytes and operations are in `grouped`.

`jax.lax.ragged_dot` is no base for this: XLA's GPU compiler expands it into a dense product with a masked copy of the
rows for each expert, expert / top_k times the work in a [pair, expert, d_model] array.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specserve.kernels.grouped import (
    ExpertMatrices,
    Matrices,
    Matrix,
    into_blocks,
    matrix,
    rows_per_block,
    scale_block,
)
from specserve.kernels.matmul import QuantizedMatrix
from specserve.kernels.nibbles import MOST_INDEXED
from specserve.kernels.rowwise import Activation, gated

LEAST = 16  # rows, columns and inputs of a product that tensor cores take
COLUMNS = 64  # of a tile
INPUTS = 64  # multiplied at a time by a program


def serves(experts: ExpertMatrices) -> bool:
    """Return whether the kernels can multiply with these matrices: blocks of scales must be made of whole tiles. The
    compiler indexes bytes with 32 bits where there are between 2 and 4 GiB of them, and would read the wrong ones."""

    def can_read(weight: Matrices) -> bool:
        is_misread = isinstance(weight, QuantizedMatrix) and MOST_INDEXED < weight.values.size <= 2 * MOST_INDEXED
        return scale_block(weight) % LEAST == 0 and not is_misread

    return all(can_read(weight) for weight in (experts.gate, experts.up, experts.down))


def expert_mlps(
    x: jax.Array,  # [token, d_model]
    expert_ids: jax.Array,  # [token, top_k] int32; the number of experts stands for one that is elsewhere
    weights: jax.Array,  # [token, top_k] float32
    experts: ExpertMatrices,
    activation: Activation,
    *,
    interpret: bool = False,
) -> jax.Array:  # [token, d_model]
    """Add up the chosen experts' outputs, weighted, in float32 and return them in x's dtype.

    Hidden channels are rounded to x's dtype before the second product, and nothing else is. Quantised values are
    widened in registers, and their scales are applied to float32 products.
    """
    num_experts, d_ff, d_model = experts.down.shape
    num_tokens, top_k = expert_ids.shape
    size = rows_per_block(expert_ids.size, num_experts, LEAST)
    blocks = into_blocks(expert_ids, num_experts, size)
    places = blocks.pair_of_slot, blocks.expert_of_block

    def call(name: str, kernel: Any, width: int, out: jax.ShapeDtypeStruct, *operands: Any) -> jax.Array:
        return pl.pallas_call(
            kernel,
            out_shape=out,
            grid=(len(blocks.expert_of_block), pl.cdiv(width, COLUMNS)),
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
            interpret=interpret,
            name=name,
        )(*places, *operands)

    gate, up = matrix(experts.gate, experts.gate_bias), matrix(experts.up, experts.up_bias)
    kernel = partial(
        _hidden_kernel, top_k=top_k, blocks=(scale_block(experts.gate), scale_block(experts.up)), activation=activation
    )
    of_place = jax.ShapeDtypeStruct((len(blocks.pair_of_slot), d_ff), x.dtype)
    hidden = call("experts_hidden", kernel, d_ff, of_place, x, gate, up)

    kernel = partial(_outputs_kernel, size=size, block=scale_block(experts.down))
    of_pair = jax.ShapeDtypeStruct((expert_ids.size, d_model), jnp.float32)
    down = matrix(experts.down, experts.down_bias)
    y = call("experts_outputs", kernel, d_model, of_pair, hidden, down, weights.reshape(-1))
    # nothing was written for a pair whose expert is elsewhere
    y = jnp.where((expert_ids < num_experts)[:, :, None], y.reshape(num_tokens, top_k, d_model), 0)
    return y.sum(axis=1).astype(x.dtype)


def _hidden_kernel(
    pairs_ref: Any,  # [place] int32
    experts_ref: Any,  # [block] int32
    x_ref: Any,  # [token, d_model]
    gate: Matrix,
    up: Matrix,
    hidden_ref: Any,  # [place, d_ff]
    *,
    top_k: int,
    blocks: tuple[int, int],
    activation: Activation,
) -> None:
    """Compute a tile of the hidden channels of a block of rows."""
    size = len(pairs_ref) // len(experts_ref)
    first, column = pl.program_id(0) * size, pl.program_id(1) * COLUMNS
    expert = experts_ref[pl.program_id(0)]

    @pl.when(expert < len(gate.values))
    def _() -> None:
        rows = pairs_ref[pl.ds(first, size)] // top_k  # of an empty place: the number of tokens
        has_row = rows < x_ref.shape[0]

        def take(start: jax.Array, count: int) -> jax.Array:
            inputs = start + jnp.arange(count)[None]
            mask = has_row[:, None] & (inputs < x_ref.shape[1])
            return triton.load(x_ref.at[rows[:, None], inputs], mask=mask, other=0)

        of_gate, of_up = _products(take, size, (gate, up), blocks, expert, column, x_ref.dtype)
        hidden = gated(of_gate, of_up, activation).astype(hidden_ref.dtype)
        mask = jnp.broadcast_to((_columns(column) < hidden_ref.shape[1])[None], hidden.shape)
        triton.store(hidden_ref.at[pl.ds(first, size), pl.ds(column, COLUMNS)], hidden, mask=mask)


def _outputs_kernel(
    pairs_ref: Any,  # [place] int32
    experts_ref: Any,  # [block] int32
    hidden_ref: Any,  # [place, d_ff]
    down: Matrix,
    weights_ref: Any,  # [pair] float32
    out_ref: Any,  # [pair, d_model] float32
    *,
    size: int,
    block: int,
) -> None:
    """Compute a tile of the weighted outputs of a block of rows, and write each row to the place of its pair."""
    first, column = pl.program_id(0) * size, pl.program_id(1) * COLUMNS
    expert = experts_ref[pl.program_id(0)]

    @pl.when(expert < len(down.values))
    def _() -> None:
        pairs = pairs_ref[pl.ds(first, size)]
        has_pair = pairs < out_ref.shape[0]

        def take(start: jax.Array, count: int) -> jax.Array:
            mask = jnp.broadcast_to(start + jnp.arange(count)[None] < hidden_ref.shape[1], (size, count))
            return triton.load(hidden_ref.at[pl.ds(first, size), pl.ds(start, count)], mask=mask, other=0)

        (total,) = _products(take, size, (down,), (block,), expert, column, hidden_ref.dtype)
        weight = triton.load(weights_ref.at[pairs], mask=has_pair, other=0)
        columns = _columns(column)[None]
        mask = has_pair[:, None] & (columns < out_ref.shape[1])
        triton.store(out_ref.at[pairs[:, None], columns], weight[:, None] * total, mask=mask)


def _products(
    take: Callable[[jax.Array, int], jax.Array],  # so many inputs of the rows, from the first on: [row, input]
    num_rows: int,
    matrices: tuple[Matrix, ...],
    blocks: tuple[int, ...],
    expert: jax.Array,
    column: jax.Array,
    dtype: jnp.dtype,
) -> tuple[jax.Array, ...]:  # [row, COLUMNS] float32 for each matrix
    """Multiply a block of rows with a tile of columns of each matrix, and add its bias."""
    _, d_in, d_out = matrices[0].values.shape
    step = math.gcd(INPUTS, *(block for block in blocks if block))
    columns = pl.ds(column, COLUMNS)
    is_column = _columns(column) < d_out
    is_whole = d_in % step == 0 and d_out % COLUMNS == 0

    def row(ref: Any, *at: Any) -> jax.Array:  # [1, COLUMNS] float32
        return triton.load(ref.at[*at, columns], mask=is_column, other=0)[None].astype(jnp.float32)

    def add(k: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = k * step
        x = take(start, step)
        mask = None if is_whole else (start + jnp.arange(step) < d_in)[:, None] & is_column[None]
        sums = []
        for total, (values, scale, offset, _), block in zip(totals, matrices, blocks, strict=True):
            tile = triton.load(values.at[expert, pl.ds(start, step), columns], mask=mask).astype(dtype)
            if mask is not None:
                tile = jnp.where(mask, tile, jnp.zeros_like(tile))
            product = jnp.dot(x, tile, preferred_element_type=jnp.float32)
            total += product * row(scale, expert, start // block) if block else product
            if offset is not None:
                of_block = start // block if block else jnp.zeros((), jnp.int32)
                total += x.astype(jnp.float32).sum(axis=1, keepdims=True) * row(offset, expert, of_block)
            sums.append(total)
        return tuple(sums)

    zeros = tuple(jnp.zeros((num_rows, COLUMNS), jnp.float32) for _ in matrices)
    totals = jax.lax.fori_loop(0, pl.cdiv(d_in, step), add, zeros)
    outs = []
    for total, (_, scale, _, bias), block in zip(totals, matrices, blocks, strict=True):
        y = total if scale is None or block else total * row(scale, expert, jnp.zeros((), jnp.int32))
        outs.append(y if bias is None else y + row(bias, expert))
    return tuple(outs)


def _columns(first: jax.Array) -> jax.Array:  # [COLUMNS]
    return first + jnp.arange(COLUMNS)
