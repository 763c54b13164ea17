"""Attention over compressed keys (DeepSeek-V4, section 2.3): one head of keys, which are also the values. A query sees
the tokens of a window one by one, and what is before them as pools of tokens with one key each: all pools, or those
that an indexer chooses, whose pools overlap.

Pages keep of each token what its pools are made of beside its own key, and each step makes the pools anew (`pools`):
right for trees, chunks and shared prefixes, at more memory and time than the design allows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.attention import attend, in_order
from specserve.kernels.matmul import Weight
from specserve.kernels.paged import PagedPrefix
from specserve.kernels.rows import Documents, Unrolled
from specserve.kernels.rowwise import apply_rope, by_head, rms_norm
from specserve.models.config import Compressed, LayerKind, ModelConfig
from specserve.models.context import Context, Tables, by_group, join
from specserve.models.layers import linear, norm_spec
from specserve.models.mixers import indexer
from specserve.models.mixers.pools import Pooled, pooled
from specserve.models.params import ParamSpec, matrix, vector
from specserve.models.rope import rope_tables
from specserve.pytree import pytree


@pytree
class Compressor:
    down: Weight  # [d_model, dim], or twice that where pools overlap
    share: Weight  # like `down`
    place: jax.Array  # [pool, as many] float32
    norm: jax.Array  # [dim]


@pytree
class PoolIndexer:
    """The indexer of pools: queries, the weights of its heads, and keys of its own."""

    q: Weight  # [q_rank, head * index_dim]
    weights: Weight  # [d_model, head]
    compressor: Compressor


@pytree
class CompressedAttention:
    q_down: Weight  # [d_model, q_rank]
    q_norm: jax.Array  # [q_rank]
    q: Weight  # [q_rank, head * head_dim]
    k: Weight  # [d_model, head_dim]
    k_norm: jax.Array  # [head_dim]
    sinks: jax.Array  # [head] float32
    o_down: jax.Array  # [head * head_dim / group, group * o_rank]
    o: Weight  # [group * o_rank, d_model]
    compressor: Compressor | None
    indexer: PoolIndexer | None


def compressed_spec(config: ModelConfig, kind: LayerKind, prefix: str) -> CompressedAttention:
    """The parameters of one layer as `ParamSpec`s, whole on every device."""
    sizes, dim, d_model = config.compressed, config.head_dim, config.d_model
    assert sizes is not None
    all_heads, of_groups = config.num_heads * dim, sizes.num_groups * sizes.o_rank

    def plain(name: str, d_in: int, d_out: int) -> Any:
        return matrix(f"{prefix}.{name}.weight", d_in, d_out, (None, None))

    def compressor(name: str, dim: int) -> Compressor:
        width = 2 * dim if kind.has_indexer else dim
        place: Any = ParamSpec((kind.pool, width), (None, None), f"{prefix}.{name}.ape", is_float32=True)
        return Compressor(
            down=plain(f"{name}.wkv", d_model, width),
            share=plain(f"{name}.wgate", d_model, width),
            place=place,
            norm=norm_spec(f"{prefix}.{name}.norm", dim, is_float32=True),
        )

    own_indexer = None
    if kind.pool and kind.has_indexer:
        own_indexer = PoolIndexer(
            q=plain("indexer.wq_b", sizes.q_rank, sizes.index_heads * sizes.index_dim),
            weights=plain("indexer.weights_proj", d_model, sizes.index_heads),
            compressor=compressor("indexer.compressor", sizes.index_dim),
        )
    return CompressedAttention(
        q_down=plain("wq_a", d_model, sizes.q_rank),
        q_norm=norm_spec(f"{prefix}.q_norm", sizes.q_rank, is_float32=True),
        q=plain("wq_b", sizes.q_rank, all_heads),
        k=plain("wkv", d_model, dim),
        k_norm=norm_spec(f"{prefix}.{config.names.k_norm}", dim, is_float32=True),
        sinks=vector(f"{prefix}.attn_sink", config.num_heads, init="zeros", is_float32=True),
        o_down=plain("wo_a", all_heads // sizes.num_groups, of_groups),
        o=plain("wo_b", of_groups, d_model),
        compressor=compressor("compressor", dim) if kind.pool else None,
        indexer=own_indexer,
    )


def entry_dim(config: ModelConfig, kind: LayerKind) -> int:
    """Return the number of values that pages keep of a token."""
    assert config.compressed is not None
    if not kind.pool:
        return config.head_dim
    return config.head_dim + 2 * (
        2 * (config.head_dim + config.compressed.index_dim) if kind.has_indexer else config.head_dim
    )


def mix(
    params: CompressedAttention,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,  # [batch, n, d_model], normed
    seen: PagedPrefix | None,
    context: Context,
) -> tuple[jax.Array, Any]:  # [batch, n, d_model], and the tokens' entries [batch, n, 1, entry_dim]
    """Compute what the layer adds to the residual stream."""
    sizes, dim, eps = config.compressed, config.head_dim, config.norm_eps
    assert sizes is not None
    tables = context.local_rope if kind.is_local else context.rope
    assert tables is not None
    q_in = rms_norm(linear(x, params.q_down), params.q_norm, eps)
    q = rms_norm(by_head(linear(q_in, params.q), config.num_heads), jnp.ones(dim, jnp.float32), eps)
    q = _turned(sizes, q, tables)
    parts, index = [_turned(sizes, rms_norm(linear(x, params.k), params.k_norm, eps)[:, :, None], tables)], ()
    for own in (params.compressor, params.indexer and params.indexer.compressor):
        if own is not None:
            parts += [linear(x, weight)[:, :, None] for weight in (own.down, own.share)]
    if params.indexer is not None:
        scale = (sizes.index_heads * sizes.index_dim) ** -0.5
        index_q = _turned(sizes, by_head(linear(q_in, params.indexer.q), sizes.index_heads), tables)
        index = index_q, linear(x, params.indexer.weights).astype(jnp.float32) * scale

    def attend_own(context: Context, seen: PagedPrefix | None, *own: jax.Array) -> tuple[jax.Array, Any]:
        q, new, *index = own
        if params.compressor is None:
            keys, _ = join(context.earlier, (new, None))
            found = attend(
                q,
                keys,
                keys,
                context.mask,
                seen,
                scale=dim**-0.5,
                sinks=params.sinks,
                window=kind.window,
                position_ids=context.position_ids,
            )
        else:
            assert context.earlier is None, "pools are made of all new tokens at once"
            found = _over_pools(params, config, q, new, context, seen, tuple(index))
        return found, (new, None)

    out, left = by_group(attend_own, context, seen, q, jnp.concatenate(parts, axis=-1), *index)
    cos, sin = tables
    out = _turned(sizes, out, (cos, -sin)).reshape(*x.shape[:2], sizes.num_groups, -1)
    o_down = params.o_down.reshape(out.shape[-1], sizes.num_groups, -1)
    return linear(jnp.einsum("bngi,igr->bngr", out, o_down).reshape(*x.shape[:2], -1), params.o), left


def _turned(sizes: Compressed, x: jax.Array, tables: Tables) -> jax.Array:
    """Turn the last channels of heads, [batch, n, head, dim], by their position."""
    at = x.shape[-1] - sizes.rope_dim
    return jnp.concatenate([x[..., :at], apply_rope(x[..., at:], tables, is_interleaved=True)], axis=-1)


def _over_pools(
    params: CompressedAttention,
    config: ModelConfig,
    q: jax.Array,  # [batch, n, head, head_dim]
    new: jax.Array,  # [batch, n, 1, entry_dim]
    context: Context,
    seen: PagedPrefix | None,
    index: tuple[jax.Array, ...],
) -> jax.Array:  # [batch, n, head, head_dim]
    sizes, dim, places = config.compressed, config.head_dim, context.position_ids
    assert sizes is not None
    assert params.compressor is not None
    mask = context.mask
    assert not isinstance(mask, Unrolled), "a rollout is of a head's own layers"
    if isinstance(mask, Documents):
        mask = mask.dense()
    (batch, n), lens = q.shape[:2], jnp.zeros(len(q), jnp.int32) if seen is None else seen.lens
    sees = visible = jnp.broadcast_to(mask, (batch, n, n))
    if seen is not None:
        new, _, visible = in_order(new, None, mask, seen)
    entries, length = new[:, :, 0], new.shape[1]
    at = jnp.broadcast_to(jnp.arange(length), (batch, length))
    at = at.at[jnp.arange(batch)[:, None], lens[:, None] + jnp.arange(n)].set(places, mode="drop")
    visible = visible & (places[:, :, None] - at[:, None] < sizes.window)
    width = params.compressor.place.shape[1]
    of_keys = entries[..., dim : dim + 2 * width]
    index_keys = None
    pools, sees_pools = _pools(params.compressor, config, of_keys, lens, places, sees, params.indexer is not None)
    if params.indexer is not None:
        own = params.indexer.compressor
        index_keys, _ = _pools(own, config, entries[..., dim + 2 * width :], lens, places, sees, overlaps=True)
    keys = jnp.concatenate([entries[..., :dim], pools], axis=1)[:, :, None]

    def run(part: tuple[jax.Array, ...]) -> tuple[jax.Array]:  # of some queries
        q, visible, sees, *index = part
        if index_keys is not None:
            most = min(sizes.index_topk, sees.shape[-1])
            sees = indexer.choose(indexer.score(index[0], index[1], index_keys), sees, most)
        mask = jnp.concatenate([visible, sees], axis=-1)
        return (attend(q, keys, keys, mask, scale=dim**-0.5, sinks=params.sinks),)

    most = indexer.SCORES_AT_ONCE // (batch * keys.shape[1] * max(config.num_heads, sizes.index_heads))
    return indexer.some_at_once(run, (q, visible, sees_pools, *index), max(1, most))[0]


def _pools(
    params: Compressor,
    config: ModelConfig,
    entries: jax.Array,  # [batch, length, 2 * width]
    lens: jax.Array,
    places: jax.Array,  # [batch, n]
    sees: jax.Array,  # [batch, n, n] bool
    overlaps: bool,
) -> tuple[jax.Array, jax.Array]:  # [batch, pools + n, dim], and which of them each query sees, [batch, n, pools + n]
    """Return the keys of pools, normed and turned by the position of their first token."""
    sizes, pool = config.compressed, len(params.place)
    assert sizes is not None
    found: Pooled = pooled(params.place, entries, lens, places, sees, overlaps=overlaps)
    (batch, n), pools = places.shape, found.keys.shape[1] - places.shape[1]
    number = jnp.broadcast_to(jnp.arange(pools), (batch, pools))
    number = jnp.concatenate([number, jnp.maximum(found.of_new, 0)], axis=1)
    tables = rope_tables(config.rope, config.head_dim, number * pool)
    keys = _turned(sizes, rms_norm(found.keys, params.norm, config.norm_eps)[:, :, None], tables)[:, :, 0]
    is_whole = jnp.broadcast_to((jnp.arange(pools) < found.whole[:, None])[:, None], (batch, n, pools))
    return keys, jnp.concatenate([is_whole, sees & (found.of_new >= 0)[:, None]], axis=-1)
