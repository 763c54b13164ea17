"""The experts' MLPs for the few tokens of a step, on a TPU: one kernel from the rows to their weighted sums.

The grid walks over the chosen experts, and within each over tiles of its hidden channels. The sorted ids of the chosen
experts are known before a tile is asked for (scalar prefetch), so the next tile is copied while one is multiplied.
There are as many steps as the routing needs, a number that is known when the kernel starts. So each chosen expert is
read once, and no other, save one where none was chosen.

All rows are multiplied with every chosen expert, and those that did not choose it are left out of the sum. The matrix
unit takes as long for 8 rows as for 128, and a weight of two bytes that is multiplied with n rows makes n operations to
a byte. That is below what every TPU needs to be busy (240 for v5e, 166 for v5p, 560 for v6e) up to `TPU_ROWS`, for
weights of one byte too. The formulae of bytes and operations are in `grouped`.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specserve.kernels.grouped import TPU_ROWS, ExpertMatrices, Matrix, matrix, scale_block
from specserve.kernels.nibbles import LANES
from specserve.kernels.rowwise import Activation, gated

ROWS = 16  # rows of bfloat16 that fill a register
TILE_BYTES = 4 << 20  # of an expert's three matrices, of which there are two sets at a time: one is copied meanwhile
LEAST_VMEM = 16 << 20  # every TPU lets a kernel use as much


class _Form(NamedTuple):
    """The facts about a matrix that are fixed when a kernel is compiled."""

    block: int  # inputs that share a scale; 0: all of them
    is_turned: bool  # values are [expert, d_out, d_in]


def expert_mlps(
    x: jax.Array,  # [token, d_model]
    expert_ids: jax.Array,  # [token, top_k] int32; the number of experts stands for one that is elsewhere
    weights: jax.Array,  # [token, top_k] float32
    experts: ExpertMatrices,
    activation: Activation,
    *,
    interpret: Any = False,  # or pltpu.InterpretParams
) -> jax.Array:  # [token, d_model]
    """Add up the chosen experts' outputs, weighted, in float32 and return them in x's dtype. At most `TPU_ROWS` tokens.

    Hidden channels are rounded to x's dtype before the second product, and nothing else is. Quantised values are
    widened in the chip's memory, and their scales are applied to float32 products.
    """
    (num_tokens, d_model), (num_experts, d_ff, _) = x.shape, experts.down.shape
    assert num_tokens <= TPU_ROWS, num_tokens
    padding = ((0, -num_tokens % ROWS), (0, 0))
    x_rows, weights = jnp.pad(x, padding), jnp.pad(weights, padding)
    expert_ids = jnp.pad(expert_ids.astype(jnp.int32), padding, constant_values=num_experts)
    chosen, count = _chosen(expert_ids, num_experts, min(num_experts, expert_ids.shape[1] * num_tokens))
    tile = tile_of(experts)
    operands, specs, forms = zip(*_parts(experts, tile), strict=True)
    of_tile = d_model * tile * sum(part.values.dtype.itemsize for part in operands)
    # two sets of tiles, one of them widened and masked, and the rows in and out
    vmem = 2 * of_tile + 2 * 3 * d_model * tile * x.dtype.itemsize + 4 * len(x_rows) * (d_model * 6 + tile * 8)

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    total = pl.pallas_call(
        partial(_kernel, d_ff=d_ff, tile=tile, forms=forms, activation=activation),
        out_shape=jax.ShapeDtypeStruct(x_rows.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(jnp.maximum(count[0], 1), pl.cdiv(d_ff, tile)),  # one step at least, which sets the sum to 0
            in_specs=[whole(x_rows), whole(expert_ids), whole(weights), *specs],
            out_specs=pl.BlockSpec(x_rows.shape, lambda *_: (0, 0)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=max(LEAST_VMEM, vmem)
        ),
        interpret=interpret,
        name="expert_mlps",
    )(chosen, count, x_rows, expert_ids, weights, *operands)
    return total[:num_tokens].astype(x.dtype)


def _chosen(expert_ids: jax.Array, num_experts: int, most: int) -> tuple[jax.Array, jax.Array]:
    """The sorted ids of the experts that any row chose [most], others behind them, and how many were chosen [1]."""
    is_chosen = jnp.zeros(num_experts, bool).at[expert_ids.reshape(-1)].set(True, mode="drop")
    return jnp.argsort(~is_chosen, stable=True)[:most].astype(jnp.int32), is_chosen.sum(dtype=jnp.int32)[None]


def _parts(experts: ExpertMatrices, tile: int) -> Iterator[tuple[Matrix, Matrix, _Form]]:
    """Yield for gate, up and down: the arrays that the kernel takes, the tiles of them that each step has, and their
    `_Form`."""

    def at(cut: int, rows: int, columns: int) -> pl.BlockSpec:  # `cut`: the axis of the tiles, or 0 for none
        def index(i: Any, j: Any, chosen: Any, _count: Any) -> tuple[Any, ...]:
            return chosen[i], j if cut == 1 else 0, j if cut == 2 else 0

        return pl.BlockSpec((None, rows, columns), index)

    for weight, bias, cut in (
        (experts.gate, experts.gate_bias, 2),
        (experts.up, experts.up_bias, 2),
        (experts.down, experts.down_bias, 1),
    ):
        arrays = matrix(weight, None if bias is None else bias[:, None])
        rows, columns = (tile if axis == cut else weight.shape[axis] for axis in (1, 2))
        values, of_values = arrays.values, at(cut, rows, columns)
        is_turned = _is_turned(values)
        if is_turned:
            values, of_values = values.swapaxes(1, 2), at(3 - cut, columns, rows)
        rest = (None if each is None else at(cut & 2, each.shape[1], columns) for each in arrays[1:])
        form = _Form(scale_block(weight), is_turned)
        yield arrays._replace(values=values), Matrix(of_values, *rest), form


def _is_turned(values: jax.Array) -> bool:
    """Return whether XLA lays a matrix [expert, d_in, d_out] out with the inputs as its last axis. On TPUs it does
    where that fills the registers better. A kernel takes arrays whose last axis is last in memory. Such a matrix must
    be turned for it, which costs nothing; otherwise it would be copied at every call."""
    _, d_in, d_out = values.shape
    sublanes = 32 // values.dtype.itemsize

    def filled(rows: int, columns: int) -> int:
        return -(-rows // sublanes) * sublanes * (-(-columns // LANES) * LANES)

    return filled(d_out, d_in) < filled(d_in, d_out)


def tile_of(experts: ExpertMatrices) -> int:
    """The number of hidden channels in a tile: a multiple of `LANES`, or all. A tile of `down` has whole blocks of
    scales, or lies within one. Among those of at most `TILE_BYTES` it is the one that overhangs least, and of these the
    widest."""
    _, d_ff, d_model = experts.down.shape
    weights = experts.gate, experts.up, experts.down
    of_channel = d_model * sum(matrix(weight, None).values.dtype.itemsize for weight in weights)
    block = scale_block(experts.down) or 1
    if d_ff * of_channel <= TILE_BYTES or d_ff <= LANES:
        return d_ff
    most = max(TILE_BYTES // of_channel // LANES, 1) * LANES
    fitting = [tile for tile in range(LANES, most + 1, LANES) if tile % block == 0 or block % tile == 0]
    return min(fitting or [math.lcm(LANES, block)], key=lambda tile: (-(-d_ff // tile) * tile, -tile))


def _kernel(
    chosen: Any,  # [step] int32, prefetched
    count: Any,  # [1] int32, prefetched
    x_ref: Any,  # [row, d_model]
    ids_ref: Any,  # [row, top_k]
    weights_ref: Any,  # [row, top_k]
    gate: Matrix,  # [d_model, tile], or turned, with [block, tile] scales and offsets and [1, tile] biases
    up: Matrix,  # likewise
    down: Matrix,  # [tile, d_model], or turned, with [block, d_model] of all tiles and [1, d_model] biases
    total_ref: Any,  # [row, d_model] float32: the same block at every step
    *,
    d_ff: int,
    tile: int,
    forms: tuple[_Form, ...],  # of gate, up and down
    activation: Activation,
) -> None:
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when((i == 0) & (j == 0))
    def _() -> None:
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(i < count[0])
    def _() -> None:
        x = x_ref[...]
        of_gate = _product(x, gate.values[...], gate, forms[0])
        of_up = _product(x, up.values[...], up, forms[1])
        if gate.bias is not None:
            of_gate += gate.bias[...].astype(jnp.float32)
            of_up += up.bias[...].astype(jnp.float32)
        hidden, values = gated(of_gate, of_up, activation), down.values[...].astype(x.dtype)
        if d_ff % tile:  # the last tile overhangs, and what lies there may be anything
            rest = d_ff - j * tile
            hidden = jnp.where(jax.lax.broadcasted_iota(jnp.int32, hidden.shape, 1) < rest, hidden, 0)
            is_inside = jax.lax.broadcasted_iota(jnp.int32, values.shape, int(forms[2].is_turned)) < rest
            values = jnp.where(is_inside, values, jnp.zeros_like(values))
        y = _product(hidden.astype(x.dtype), values, down, forms[2], j * tile)
        if down.bias is not None:
            y = y + jnp.where(j == 0, down.bias[...].astype(jnp.float32), 0)
        is_own = ids_ref[...] == chosen[i]  # [row, top_k]
        weight = jnp.where(is_own, weights_ref[...], 0).sum(axis=1, keepdims=True)
        has_chosen = is_own.astype(jnp.float32).sum(axis=1, keepdims=True) > 0
        total_ref[...] += jnp.where(has_chosen, weight * y, 0)


def _product(x: jax.Array, values: jax.Array, matrix: Matrix, form: _Form, start: Any = 0) -> jax.Array:
    """Compute x [row, d_in] @ values [d_in, d_out] in float32, times the matrix's scales, plus its offsets. Input 0 is
    the matrix's input `start`, and x and the values of inputs past its last one are 0."""
    values, axis, d_in = values.astype(x.dtype), int(form.is_turned), x.shape[1]

    def dot(x: jax.Array, values: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, values, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)

    def sums(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32).sum(axis=1, keepdims=True)

    y: Any = 0
    if not form.block:
        y = dot(x, values)
        y = y if matrix.scale is None else y * matrix.scale[...]
        return y if matrix.offset is None else y + sums(x) * matrix.offset[...]
    for i, first in enumerate(range(0, d_in, form.block)):
        last = min(first + form.block, d_in)
        row = jnp.minimum(start // form.block + i, matrix.scale.shape[0] - 1)
        part = jax.lax.slice_in_dim(values, first, last, axis=axis)
        y = y + dot(x[:, first:last], part) * matrix.scale[pl.ds(row, 1)]
        if matrix.offset is not None:
            y = y + sums(x[:, first:last]) * matrix.offset[pl.ds(row, 1)]
    return y
