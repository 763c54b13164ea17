"""Attention within packed rows on TPUs: Pallas kernels, forward and backward, lowered through Mosaic.

No score leaves the chip (Dao et al. 2022, arXiv 2205.14135). The backward pass is two kernels, as on GPUs (`rows_gpu`
has what they compute, and the FLOPs). A row sees the keys from its first one up to itself, and first keys never fall
along a row of documents. So a tile of queries needs one run of tiles of keys, and a tile of keys one run of tiles of
queries. Grids have room for the longest run. Past the end of its own a program names the tile that it has, so nothing
is fetched or computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specserve.kernels.block import NEG_INF

TILES = (512, 256, 128)  # queries and keys of a tile; the largest that divides a row
MOST_CHANNELS = 512  # of a head
_LANES = 128


def takes(q: jax.Array, v: jax.Array) -> bool:
    """Return whether the kernel can take rows of this length, and heads of these sizes."""
    return _tile(q.shape[1]) > 0 and max(q.shape[3], v.shape[3]) <= MOST_CHANNELS


def _tile(seq: int) -> int:
    """Return the size of tiles for rows of a length; 0 where no size divides it."""
    return next((size for size in TILES if seq % size == 0), 0)


def attend(
    q: jax.Array,  # [batch, seq, head, head_dim], scaled
    k: jax.Array,  # [batch, seq, kv_head, head_dim]
    v: jax.Array,  # [batch, seq, kv_head, v_dim]
    firsts: jax.Array,  # [batch, seq] int32, the first key that each query sees, never falling along a row
    sinks: jax.Array | None,  # [head] float32
    *,
    softcap: float = 0.0,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # [batch, seq, head, v_dim] like v, and [batch, head, seq] float32
    """Attend from every query to the keys from its first one up to itself; the results are softmax and log-sum-exp."""
    (batch, seq, num_heads, head_dim), (num_kv_heads, v_dim) = q.shape, v.shape[2:]
    group, tile = num_heads // num_kv_heads, _tile(seq)
    num_tiles = seq // tile
    begins = firsts[:, ::tile] // tile

    def of_query(b: Any, head: Any, i: Any, _j: Any, _begins: Any) -> tuple[Any, ...]:
        return b, head, i, 0

    def of_key(b: Any, head: Any, i: Any, j: Any, begins: Any) -> tuple[Any, ...]:
        return b, jax.lax.div(head, jnp.int32(group)), jnp.minimum(begins[b, i] + j, i), 0

    arrays = [q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), firsts[:, :, None]]
    specs = [
        pl.BlockSpec((None, None, tile, head_dim), of_query),
        pl.BlockSpec((None, None, tile, head_dim), of_key),
        pl.BlockSpec((None, None, tile, v_dim), of_key),
        pl.BlockSpec((None, tile, 1), lambda b, _head, i, _j, _begins: (b, i, 0)),
    ]
    if sinks is not None:
        arrays.append(sinks)
        specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    out, lse = pl.pallas_call(
        functools.partial(_attend, softcap=softcap, has_sinks=sinks is not None),
        out_shape=(
            jax.ShapeDtypeStruct((batch, num_heads, seq, v_dim), v.dtype),
            jax.ShapeDtypeStruct((batch, num_heads, 1, seq), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, num_heads, num_tiles, num_tiles),
            in_specs=specs,
            out_specs=(
                pl.BlockSpec((None, None, tile, v_dim), of_query),
                pl.BlockSpec((None, None, 1, tile), lambda b, head, i, _j, _begins: (b, head, 0, i)),
            ),
            scratch_shapes=[
                pltpu.VMEM((tile, _LANES), jnp.float32),
                pltpu.VMEM((tile, _LANES), jnp.float32),
                pltpu.VMEM((tile, v_dim), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="attend_rows",
    )(begins, *arrays)
    return out.swapaxes(1, 2), lse[:, :, 0]


def _attend(
    begins_ref: Any,  # [batch, tile] int32, the first tile of keys that a tile of queries sees
    q_ref: Any,  # [query, head_dim]
    k_ref: Any,  # [key, head_dim]
    v_ref: Any,  # [key, v_dim]
    firsts_ref: Any,  # [query, 1]
    *refs: Any,
    softcap: float,
    has_sinks: bool,
) -> None:
    """Add one tile of keys to what a tile of queries has found, and write that after the last one."""
    out_ref, lse_ref, largest_ref, total_ref, values_ref = refs[has_sinks:]
    b, head, i, j = (pl.program_id(axis) for axis in range(4))
    size, number = q_ref.shape[0], begins_ref[b, i] + j

    @pl.when(j == 0)
    def _() -> None:
        values_ref[...] = jnp.zeros_like(values_ref)
        largest_ref[...] = jnp.full_like(largest_ref, refs[0][head] if has_sinks else NEG_INF)
        total_ref[...] = jnp.full_like(total_ref, 1.0 if has_sinks else 0.0)

    @pl.when(number <= i)
    def _() -> None:
        scores = jax.lax.dot_general(
            q_ref[...], k_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        keys = number * size + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        rows = i * size + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        is_seen = (firsts_ref[...] <= keys) & (keys <= rows)
        scores = jnp.where(is_seen, scores, NEG_INF)
        largest = largest_ref[:, :1]
        now = jnp.maximum(largest, jnp.max(scores, axis=1, keepdims=True))
        weights, decay = jnp.where(is_seen, jnp.exp(scores - now), 0.0), jnp.exp(largest - now)
        largest_ref[...] = jnp.broadcast_to(now, largest_ref.shape)
        total = total_ref[:, :1] * decay + jnp.sum(weights, axis=1, keepdims=True)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        own = jnp.dot(weights.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
        values_ref[...] = values_ref[...] * decay + own

    @pl.when(number == i)
    def _() -> None:
        out_ref[...] = (values_ref[...] / total_ref[:, :1]).astype(out_ref.dtype)
        lse_ref[...] = (largest_ref[...] + jnp.log(total_ref[...])).T[:1]


def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    firsts: jax.Array,
    lse: jax.Array,  # [batch, head, seq] float32, of `attend`
    d_out: jax.Array,  # [batch, seq, head, v_dim], the cotangent of the softmax
    delta: jax.Array,  # [batch, head, seq] float32: d_out . out, less the cotangent of the log-sum-exp
    *,
    softcap: float = 0.0,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the cotangents of q, k and v of `attend`. Scores are computed with a row for each key, so that what
    belongs to queries lies along lanes."""
    (batch, seq, num_heads, _), num_kv_heads = q.shape, k.shape[2]
    group, tile = num_heads // num_kv_heads, _tile(seq)
    num_tiles = seq // tile
    begins = firsts[:, ::tile] // tile
    lasts = jnp.arange(1, num_tiles + 1, dtype=jnp.int32) * tile - 1  # key of each tile
    # the tile of the last query that sees any of a tile's keys
    ends = (jnp.sum(firsts[:, :, None] <= lasts, axis=1, dtype=jnp.int32) - 1) // tile
    arrays = [x.swapaxes(1, 2) for x in (q, d_out, k, v)] + [firsts[:, None], lse[:, :, None], delta[:, :, None]]

    def of_own(_b: Any, head: Any, i: Any, _j: Any, _bounds: Any) -> tuple[Any, Any]:
        return head, i

    def of_seen(b: Any, head: Any, i: Any, j: Any, bounds: Any) -> tuple[Any, Any]:
        return jax.lax.div(head, jnp.int32(group)), jnp.minimum(bounds[b, i] + j, i)

    def of_seeing(b: Any, head: Any, t: Any, j: Any, bounds: Any) -> tuple[Any, Any]:
        which, turn = _turn(j, num_tiles)
        return head * group + which, jnp.minimum(t + turn, bounds[b, t])

    call = functools.partial(_call, arrays, softcap=softcap, interpret=interpret)
    (d_q,) = call(_of_queries, begins, (of_own, of_seen), (batch, num_heads, num_tiles, num_tiles))
    d_k, d_v = call(_of_keys, ends, (of_seeing, of_own), (batch, num_kv_heads, num_tiles, group * num_tiles))
    return d_q.swapaxes(1, 2), d_k.swapaxes(1, 2), d_v.swapaxes(1, 2)


def _call(
    arrays: list[jax.Array],  # of queries, their cotangents, keys, values, first keys, log-sum-exps, deltas
    kernel: Any,
    bounds: jax.Array,  # [batch, tile] int32
    where: tuple[Any, Any],  # the head and the tile of a program's queries, and of its keys
    grid: tuple[int, ...],
    *,
    softcap: float,
    interpret: Any,
) -> Any:
    """Call a kernel of the backward pass."""
    of_query, of_key = where
    q, _, k, v, *_ = arrays
    head_dim, v_dim, tile = q.shape[3], v.shape[3], q.shape[2] // grid[2]

    def block(width: int, of: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, tile, width), lambda b, *at: (b, *of(b, *at), 0))

    def row(b: Any, *at: Any) -> tuple[Any, ...]:
        head, i = of_query(b, *at)
        return b, head, 0, i

    numbers = pl.BlockSpec((None, None, 1, tile), row)
    firsts = pl.BlockSpec((None, 1, tile), lambda b, *at: (b, 0, of_query(b, *at)[1]))
    heads = [block(head_dim, of_query), block(v_dim, of_query), block(head_dim, of_key), block(v_dim, of_key)]
    outs = [(q, head_dim, of_query)] if kernel is _of_queries else [(k, head_dim, of_key), (v, v_dim, of_key)]
    return pl.pallas_call(
        functools.partial(kernel, softcap=softcap),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x, *_ in outs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[*heads, firsts, numbers, numbers],
            out_specs=tuple(block(width, of) for _, width, of in outs),
            scratch_shapes=[pltpu.VMEM((tile, width), jnp.float32) for _, width, _ in outs],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="attend_rows_dq" if kernel is _of_queries else "attend_rows_dkv",
    )(bounds, *arrays)


def _turn(j: Any, num_tiles: Any) -> tuple[Any, Any]:
    """The query head of a group and the number of its tile that a turn of `_of_keys` is for."""
    number = jnp.asarray(num_tiles, jnp.int32)
    return jax.lax.div(j, number), jax.lax.rem(j, number)


def _of_queries(
    begins_ref: Any,  # [batch, tile] int32, the first tile of keys that a tile of queries sees
    q_ref: Any,
    d_out_ref: Any,
    k_ref: Any,
    v_ref: Any,
    firsts_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    d_q_ref: Any,
    total_ref: Any,
    *,
    softcap: float,
) -> None:
    """Add what one tile of keys gives to the cotangent of a tile of queries."""
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    number = begins_ref[b, i] + j

    @pl.when(j == 0)
    def _() -> None:
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(number <= i)
    def _() -> None:
        given = q_ref[...], d_out_ref[...], k_ref[...], v_ref[...], firsts_ref[...], lse_ref[...], delta_ref[...]
        _, d_scores = _backward(*given, i, number, softcap)
        total_ref[...] += _product(d_scores.astype(k_ref.dtype), k_ref[...], 0, 0)

    @pl.when(number == i)
    def _() -> None:
        d_q_ref[...] = total_ref[...].astype(d_q_ref.dtype)


def _of_keys(
    ends_ref: Any,  # [batch, tile] int32, the last tile of queries that see a tile of keys
    q_ref: Any,
    d_out_ref: Any,
    k_ref: Any,
    v_ref: Any,
    firsts_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    d_k_ref: Any,
    d_v_ref: Any,
    d_key_ref: Any,
    d_value_ref: Any,
    *,
    softcap: float,
) -> None:
    """Add what one tile of queries of one head gives to the cotangents of a tile of keys and values."""
    b, t, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    _, turn = _turn(j, pl.num_programs(2))

    @pl.when(j == 0)
    def _() -> None:
        d_key_ref[...] = jnp.zeros_like(d_key_ref)
        d_value_ref[...] = jnp.zeros_like(d_value_ref)

    @pl.when(t + turn <= ends_ref[b, t])
    def _() -> None:
        given = q_ref[...], d_out_ref[...], k_ref[...], v_ref[...], firsts_ref[...], lse_ref[...], delta_ref[...]
        weights, d_scores = _backward(*given, t + turn, t, softcap)
        d_value_ref[...] += _product(weights.astype(d_out_ref.dtype), d_out_ref[...], 1, 0)
        d_key_ref[...] += _product(d_scores.astype(q_ref.dtype), q_ref[...], 1, 0)

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        d_k_ref[...] = d_key_ref[...].astype(d_k_ref.dtype)
        d_v_ref[...] = d_value_ref[...].astype(d_v_ref.dtype)


def _backward(
    q: jax.Array,  # [query, head_dim]
    d_out: jax.Array,  # [query, v_dim]
    k: jax.Array,  # [key, head_dim]
    v: jax.Array,  # [key, v_dim]
    firsts: jax.Array,  # [1, query]
    lse: jax.Array,  # [1, query]
    delta: jax.Array,  # [1, query]
    i: jax.Array,
    number: jax.Array,
    softcap: float,
) -> tuple[jax.Array, jax.Array]:  # [key, query] float32
    """Return the probabilities of tile i of queries and this tile of keys, and the cotangents of their products."""
    scores = _product(k, q, 1, 1)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    keys = number * k.shape[0] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    rows = i * q.shape[0] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    is_seen = (firsts <= keys) & (keys <= rows)
    weights = jnp.where(is_seen, jnp.exp(scores - lse), 0.0)
    d_scores = weights * (_product(v, d_out, 1, 1) - delta)
    if softcap:
        d_scores *= 1.0 - (scores / softcap) * (scores / softcap)
    return weights, d_scores


def _product(x: jax.Array, y: jax.Array, of_x: int, of_y: int) -> jax.Array:
    """The product of two matrices along these axes, in float32."""
    return jax.lax.dot_general(x, y, (((of_x,), (of_y,)), ((), ())), preferred_element_type=jnp.float32)
