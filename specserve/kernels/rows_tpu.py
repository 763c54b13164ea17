"""Attention within packed rows on TPUs: a Pallas kernel, lowered through Mosaic. It has no backward pass of its own.

No score leaves the chip (Dao et al. 2022, arXiv 2205.14135). A row sees the keys from its first one up to itself, and
first keys never fall along a row of documents. So a tile of queries needs one run of tiles of keys. The grid has room
for the longest run; past the end of its own a program names the tile that it has, so nothing is fetched or computed.

FLOPs, for each query and head: 2 * seen * (head_dim + v_dim); `seen` are the keys of the tiles between.
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
