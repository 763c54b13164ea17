"""Attention within packed rows on NVIDIA GPUs: Pallas kernels, forward and backward, lowered through Triton.

No score leaves the chip (Dao et al. 2022, arXiv 2205.14135). The backward pass is two kernels, each of which owns what
it adds up, so sums have one order. A row sees the keys from its first one up to itself, and first keys never fall along
a row of documents. So a tile of queries needs one run of tiles of keys, and a tile of keys one run of tiles of queries:
no work is done for documents that do not see each other.

FLOPs, for each query and head: 2 * seen * (head_dim + v_dim) forward; backward 2 * seen * (3 * head_dim + 2 * v_dim) +
2 * seen * (head_dim + v_dim), since both kernels compute the scores again. `seen` are the keys of the tiles between.
Bytes: each array once for each tile on the other side.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specserve.kernels.block import NEG_INF

MOST_CHANNELS = 256  # of a head: tiles of more do not fit a multiprocessor's memory
_MIN_TILE = 16  # Triton's products take no less


@dataclass(frozen=True)
class Tile:
    """The sizes of one program's tiles."""

    rows: int  # queries
    keys: int
    num_warps: int
    num_stages: int


def _tile(channels: int, *, is_backward: bool) -> Tile:
    """Return tiles whose sums stay in registers."""
    if channels <= 64:
        return Tile(64, 64, 4, 2) if is_backward else Tile(128, 64, 4, 3)
    if channels <= 128:
        return Tile(64, 64, 8, 2) if is_backward else Tile(128, 64, 8, 3)
    return Tile(32, 32, 8, 1) if is_backward else Tile(64, 32, 8, 2)


def takes(q: jax.Array, v: jax.Array) -> bool:
    """Return whether the kernels can take heads of these sizes."""
    return max(q.shape[3], v.shape[3]) <= MOST_CHANNELS


def attend(
    q: jax.Array,  # [batch, seq, head, head_dim], scaled
    k: jax.Array,  # [batch, seq, kv_head, head_dim]
    v: jax.Array,  # [batch, seq, kv_head, v_dim]
    firsts: jax.Array,  # [batch, seq] int32, the first key that each query sees, never falling along a row
    sinks: jax.Array | None,  # [head] float32
    *,
    softcap: float = 0.0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # [batch, seq, head, v_dim] like v, and [batch, head, seq] float32
    """Attend from every query to the keys from its first one up to itself; the results are softmax and log-sum-exp."""
    batch, seq, num_heads, _ = q.shape
    tile = _tile(max(q.shape[3], v.shape[3]), is_backward=False)
    shapes = ((batch, seq, num_heads, v.shape[3]), v.dtype), ((batch, num_heads, seq), jnp.float32)
    kernel = functools.partial(_attend, tile=tile, softcap=softcap)
    arrays = (q, k, v, firsts, sinks)
    return _call(kernel, "attend_rows", arrays, shapes, (pl.cdiv(seq, tile.rows), num_heads, batch), tile, interpret)


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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the cotangents of q, k and v of `attend`."""
    batch, seq, num_heads, _ = q.shape
    num_kv_heads = k.shape[2]
    tile = _tile(max(q.shape[3], v.shape[3]), is_backward=True)
    num_tiles = pl.cdiv(seq, tile.keys)
    lasts = jnp.minimum(jnp.arange(1, num_tiles + 1, dtype=jnp.int32) * tile.keys, seq) - 1  # key of each tile
    # queries behind the last one that sees any of the tile's keys
    ends = jax.vmap(lambda row: jnp.searchsorted(row, lasts, side="right", method="compare_all"))(firsts)
    arrays = (q, k, v, firsts, lse, d_out, delta)
    options = {"tile": tile, "softcap": softcap}
    rest = (num_heads, batch), tile, interpret

    def call(kernel: Any, name: str, given: tuple[Any, ...], like: tuple[jax.Array, ...], grid: tuple[int, ...]) -> Any:
        shapes = tuple((each.shape, each.dtype) for each in like)
        return _call(functools.partial(kernel, **options), name, given, shapes, grid, *rest[1:])

    (d_q,) = call(_of_queries, "attend_rows_dq", arrays, (q,), (pl.cdiv(seq, tile.rows), *rest[0]))
    given = (*arrays, ends.astype(jnp.int32))
    d_k, d_v = call(_of_keys, "attend_rows_dkv", given, (k, v), (num_tiles, num_kv_heads, batch))
    return d_q, d_k, d_v


def _call(
    kernel: Any,
    name: str,
    arrays: tuple[Any, ...],
    shapes: tuple[tuple[tuple[int, ...], Any], ...],
    grid: tuple[int, ...],
    tile: Tile,
    interpret: bool,
) -> Any:
    return pl.pallas_call(
        kernel,
        out_shape=tuple(jax.ShapeDtypeStruct(*each) for each in shapes),
        grid=grid,
        in_specs=[None if array is None else pl.BlockSpec() for array in arrays],
        out_specs=tuple(pl.BlockSpec() for _ in shapes),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name=name,
    )(*arrays)


# all arrays are whole, in global memory


def _attend(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    firsts_ref: Any,
    sinks_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    tile: Tile,
    softcap: float,
) -> None:
    """Attend from one tile of queries of one head."""
    head, b, seq = pl.program_id(1), pl.program_id(2), q_ref.shape[1]
    kv_head = head // (q_ref.shape[2] // k_ref.shape[2])
    rows = pl.program_id(0) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
    query, firsts = _load(q_ref, b, rows, head), _numbers(firsts_ref, (b,), rows, seq, seq)

    def add(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, values = carry
        keys = i * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
        scores = _capped(_product(query, _load(k_ref, b, keys, kv_head), 1, 1), softcap)
        is_seen = (firsts[:, None] <= keys[None]) & (keys[None] <= rows[:, None])
        scores = jnp.where(is_seen, scores, NEG_INF)
        now = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights, decay = jnp.where(is_seen, jnp.exp(scores - now[:, None]), 0.0), jnp.exp(largest - now)
        own = _product(weights.astype(v_ref.dtype), _load(v_ref, b, keys, kv_head), 1, 0)
        return now, total * decay + jnp.sum(weights, axis=1), values * decay[:, None] + own

    largest, total = jnp.full(tile.rows, NEG_INF, jnp.float32), jnp.zeros(tile.rows, jnp.float32)
    if sinks_ref is not None:
        largest, total = jnp.full(tile.rows, sinks_ref[head], jnp.float32), jnp.ones(tile.rows, jnp.float32)
    nothing = jnp.zeros((tile.rows, _padded(v_ref.shape[3])), jnp.float32)
    end = pl.cdiv(_end(pl.program_id(0), tile.rows, seq), tile.keys)
    largest, total, values = jax.lax.fori_loop(
        jax.lax.div(jnp.min(firsts), jnp.int32(tile.keys)), end, add, (largest, total, nothing)
    )
    total = jnp.where(total > 0, total, 1.0)  # rows past the last one see nothing
    _store(out_ref, b, rows, head, (values / total[:, None]).astype(out_ref.dtype))
    plgpu.store(lse_ref.at[b, head, rows], largest + jnp.log(total), mask=rows < seq)


def _of_queries(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    firsts_ref: Any,
    lse_ref: Any,
    d_out_ref: Any,
    delta_ref: Any,
    d_q_ref: Any,
    *,
    tile: Tile,
    softcap: float,
) -> None:
    """Compute the cotangent of one tile of queries of one head."""
    head, b, seq = pl.program_id(1), pl.program_id(2), q_ref.shape[1]
    kv_head = head // (q_ref.shape[2] // k_ref.shape[2])
    rows = pl.program_id(0) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
    query, d_out = _load(q_ref, b, rows, head), _load(d_out_ref, b, rows, head)
    firsts = _numbers(firsts_ref, (b,), rows, seq, seq)
    lse, delta = (_numbers(ref, (b, head), rows, seq, 0.0)[:, None] for ref in (lse_ref, delta_ref))

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        keys = i * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
        key = _load(k_ref, b, keys, kv_head)
        is_seen = (firsts[:, None] <= keys[None]) & (keys[None] <= rows[:, None])
        d_weights = _product(d_out, _load(v_ref, b, keys, kv_head), 1, 1)
        _, d_scores = _backward(_product(query, key, 1, 1), d_weights, lse, delta, is_seen, softcap)
        return total + _product(d_scores.astype(key.dtype), key, 1, 0)

    begin = jax.lax.div(jnp.min(firsts), jnp.int32(tile.keys))
    end = pl.cdiv(_end(pl.program_id(0), tile.rows, seq), tile.keys)
    nothing = jnp.zeros((tile.rows, _padded(q_ref.shape[3])), jnp.float32)
    _store(d_q_ref, b, rows, head, jax.lax.fori_loop(begin, end, add, nothing).astype(d_q_ref.dtype))


def _of_keys(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    firsts_ref: Any,
    lse_ref: Any,
    d_out_ref: Any,
    delta_ref: Any,
    ends_ref: Any,  # [batch, tile] int32
    d_k_ref: Any,
    d_v_ref: Any,
    *,
    tile: Tile,
    softcap: float,
) -> None:
    """Compute the cotangents of one tile of keys and values of one KV head, by all query heads that share it."""
    number, kv_head, b, seq = pl.program_id(0), pl.program_id(1), pl.program_id(2), q_ref.shape[1]
    group = q_ref.shape[2] // k_ref.shape[2]
    keys = number * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
    key, value = _load(k_ref, b, keys, kv_head), _load(v_ref, b, keys, kv_head)
    begin = jax.lax.div(number * tile.keys, jnp.int32(tile.rows))
    num_tiles = pl.cdiv(ends_ref[b, number], tile.rows) - begin  # of queries; at least the one with the keys' own

    def add(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_key, d_value = carry
        head = kv_head * group + jax.lax.div(i, num_tiles)
        rows = (begin + jax.lax.rem(i, num_tiles)) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
        query, d_out = _load(q_ref, b, rows, head), _load(d_out_ref, b, rows, head)
        firsts = _numbers(firsts_ref, (b,), rows, seq, seq)
        lse, delta = (_numbers(ref, (b, head), rows, seq, 0.0)[None] for ref in (lse_ref, delta_ref))
        is_seen = (firsts[None] <= keys[:, None]) & (keys[:, None] <= rows[None])
        d_weights = _product(value, d_out, 1, 1)
        weights, d_scores = _backward(_product(key, query, 1, 1), d_weights, lse, delta, is_seen, softcap)
        d_key += _product(d_scores.astype(query.dtype), query, 1, 0)
        return d_key, d_value + _product(weights.astype(d_out.dtype), d_out, 1, 0)

    nothing = tuple(jnp.zeros((tile.keys, _padded(ref.shape[3])), jnp.float32) for ref in (k_ref, v_ref))
    d_key, d_value = jax.lax.fori_loop(0, group * num_tiles, add, nothing)
    _store(d_k_ref, b, keys, kv_head, d_key.astype(d_k_ref.dtype))
    _store(d_v_ref, b, keys, kv_head, d_value.astype(d_v_ref.dtype))


def _backward(
    products: jax.Array, d_weights: jax.Array, lse: jax.Array, delta: jax.Array, is_seen: jax.Array, softcap: float
) -> tuple[jax.Array, jax.Array]:
    """Return the probabilities of a tile, and the cotangents of its products of queries with keys."""
    scores = _capped(products, softcap)
    weights = jnp.where(is_seen, jnp.exp(scores - lse), 0.0)
    d_scores = weights * (d_weights - delta)
    if softcap:
        d_scores *= 1.0 - (scores / softcap) * (scores / softcap)
    return weights, d_scores


def _capped(scores: jax.Array, softcap: float) -> jax.Array:
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


def _end(number: jax.Array, size: int, seq: int) -> jax.Array:
    """The number of keys up to a tile's last query."""
    return jnp.minimum((number + 1) * size, seq)


def _padded(channels: int) -> int:
    return max(_MIN_TILE, pl.next_power_of_2(channels))


def _place(ref: Any, b: jax.Array, rows: jax.Array, head: jax.Array) -> tuple[Any, jax.Array]:
    """The channels of some rows of a head, and which of them are there."""
    channels = jnp.arange(_padded(ref.shape[3]), dtype=jnp.int32)
    is_there = (rows < ref.shape[1])[:, None] & (channels < ref.shape[3])[None]
    return ref.at[b, rows[:, None], head, channels[None]], is_there


def _load(ref: Any, b: jax.Array, rows: jax.Array, head: jax.Array) -> jax.Array:  # [row, channel]
    place, is_there = _place(ref, b, rows, head)
    return plgpu.load(place, mask=is_there, other=jnp.zeros((), ref.dtype))


def _store(ref: Any, b: jax.Array, rows: jax.Array, head: jax.Array, values: jax.Array) -> None:
    place, is_there = _place(ref, b, rows, head)
    plgpu.store(place, values, mask=is_there)


def _numbers(ref: Any, where: tuple[jax.Array, ...], rows: jax.Array, seq: int, other: float) -> jax.Array:  # [row]
    return plgpu.load(ref.at[(*where, rows)], mask=rows < seq, other=jnp.asarray(other, ref.dtype))


def _product(x: jax.Array, y: jax.Array, of_x: int, of_y: int) -> jax.Array:
    """The product of two matrices along these axes, in float32."""
    return jax.lax.dot_general(x, y, (((of_x,), (of_y,)), ((), ())), preferred_element_type=jnp.float32)
