"""The indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): small heads of its own that
score every earlier token for a query, of which attention then sees the best `topk`. Layers without an indexer see what
the last one before them chose (arXiv 2603.12201).

Where a call's keys are no more than that, all are chosen, and nothing is scored. The keys of the indexer lie in the
pages behind a token's latent, so what is committed, shared and given up goes with it. Beyond `topk` tokens the chosen
ones are seen under a mask: the result is that of sparse attention, the time is that of dense attention, and the scores
come on top.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specserve.errors import ConfigError
from specserve.kernels.attention import attend, in_order
from specserve.kernels.matmul import Weight
from specserve.kernels.paged import PagedPrefix
from specserve.kernels.rows import Documents, Unrolled
from specserve.kernels.rowwise import apply_rope, by_head
from specserve.models.config import Latent
from specserve.models.context import Context, Tables
from specserve.models.layers import linear, norm_spec
from specserve.models.mixers.pools import IndexPool, chosen_tokens, index_pool_spec, pooled
from specserve.models.params import matrix, optional, vector
from specserve.pytree import pytree

NORM_EPS = 1e-6
SCORES_AT_ONCE = 2**26  # products of queries with keys, of all heads, that are held at once


@pytree
class Indexer:
    q: Weight  # [q_rank, head * index_dim]
    k: Weight  # [d_model, index_dim]
    k_norm: jax.Array  # [index_dim]
    k_bias: jax.Array  # [index_dim]
    weights: Weight  # [d_model, head] float32
    pool: IndexPool | None  # None: each token has its own key


def indexer_spec(latent: Latent, prefix: str, d_in: int) -> Indexer:
    """The parameters as `ParamSpec`s, whole on every device."""
    dim, heads = latent.index_dim, latent.index_heads
    weights = f"{prefix}.weights_proj.weight"
    return Indexer(
        q=matrix(f"{prefix}.wq_b.weight", latent.q_rank, heads * dim, (None, None)),
        k=matrix(f"{prefix}.wk.weight", d_in, dim, (None, None)),
        k_norm=norm_spec(f"{prefix}.k_norm", dim),
        k_bias=vector(f"{prefix}.k_norm.bias", dim, init="zeros"),
        weights=matrix(weights, d_in, heads, (None, None), is_float32=True),
        pool=optional(latent.index_pool, index_pool_spec(prefix, d_in, latent.index_pool, dim)),
    )


def keys(
    params: Indexer, latent: Latent, x: jax.Array, rope: Tables
) -> jax.Array:  # [batch, n, d_in] -> [batch, n, 1, index_dim]
    """The indexer's keys of tokens, behind a LayerNorm; and behind them what they share in a pool by, if they do."""
    raw = linear(x, params.k).astype(jnp.float32)
    centred = raw - jnp.mean(raw, axis=-1, keepdims=True)
    unit = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + NORM_EPS)
    normed = unit * params.k_norm.astype(jnp.float32) + params.k_bias.astype(jnp.float32)
    turned = _turned(latent, normed.astype(x.dtype)[:, :, None], rope)
    if params.pool is None:
        return turned
    return jnp.concatenate([turned, linear(x, params.pool.gate)[:, :, None]], axis=-1)


def queries(
    params: Indexer, latent: Latent, x: jax.Array, q_in: jax.Array, rope: Tables
) -> tuple[jax.Array, jax.Array]:  # [batch, n, head, index_dim], and the heads' weights [batch, n, head] float32
    """The indexer's queries, from what attention's own are projected from, [batch, n, q_rank]."""
    q = _turned(latent, by_head(linear(q_in, params.q), latent.index_heads), rope)
    weights = linear(x.astype(jnp.float32), params.weights)
    return q, weights * (latent.index_heads * latent.index_dim) ** -0.5


def _turned(latent: Latent, x: jax.Array, rope: Tables) -> jax.Array:
    """Turn the first channels of heads, [batch, n, head, index_dim], by their position."""
    if not latent.rope_dim:
        return x
    turned = apply_rope(x[..., : latent.rope_dim], rope, is_interleaved=latent.index_interleaves)
    return jnp.concatenate([turned, x[..., latent.rope_dim :]], axis=-1)


def attend_to_chosen(
    params: Indexer | None,  # None: of a layer that sees `context.choice`
    latent: Latent,
    q: jax.Array,  # [batch, n, head, cache_dim], of latents
    new: jax.Array,  # [batch, m, 1, entry_dim]: latents, and the indexer's keys behind them
    context: Context,
    seen: PagedPrefix | None,
    index: tuple[jax.Array, ...],  # from `queries`; none in a layer without an indexer
    scale: float,
) -> tuple[jax.Array, jax.Array]:  # [batch, n, head, kv_rank], and its choice
    """Attention over the latents of the tokens that the indexer chooses among committed and new ones. Raises
    ConfigError for a layer of multi-token prediction that is unrolled over longer rows than it sees."""
    mask = context.mask
    if isinstance(mask, Unrolled):
        raise ConfigError(
            f"rows of {new.shape[1]} tokens: a layer with DeepSeek sparse attention learns from rows of at most "
            f"{latent.index_topk} (index_topk); lower train.seq_len"
        )
    if isinstance(mask, Documents):
        mask = mask.dense()
    sees_new = jnp.broadcast_to(mask, (len(q), *mask.shape[1:]))
    if seen is not None:
        new, _, mask = in_order(new, None, mask, seen)
    if params is None:
        assert context.choice is not None, "a layer without an indexer needs another's choice"
        mask = context.choice
    (batch, n, num_heads, _), length = q.shape, new.shape[1]
    most = max(1, SCORES_AT_ONCE // (batch * length * max(num_heads, latent.index_heads)))
    latents, own_keys = new[..., : latent.cache_dim], new[:, :, 0, latent.cache_dim :]
    given, pick = _picking(params, latent, own_keys, context, seen, sees_new)
    visible = jnp.broadcast_to(mask, (batch, n, length))

    def run(part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:  # of some queries
        q, visible, *rest = part
        chosen = pick(visible, *rest) if rest else visible
        return attend(q, latents, latents[..., : latent.kv_rank], chosen, scale=scale), chosen

    return some_at_once(run, (q, visible, *given, *index), most)


def _picking(
    params: Indexer | None,
    latent: Latent,
    keys: jax.Array,  # [batch, length, index_dim], or twice that of pools
    context: Context,
    seen: PagedPrefix | None,
    sees_new: jax.Array,  # [batch, n, m] bool
) -> tuple[tuple[jax.Array, ...], Callable[..., jax.Array]]:
    """Return what choosing takes of each query, [batch, n, ...], and how it chooses among visible tokens, [batch, n,
    length] bool, by that and by what `queries` gives of the same queries."""
    if params is None or params.pool is None:
        return (), lambda visible, q, weights: choose(score(q, weights, keys), visible, latent.index_topk)
    lens = jnp.zeros(len(keys), jnp.int32) if seen is None else seen.lens
    places = context.position_ids
    tokens = pooled(params.pool.place, keys, lens, places, _between_all(sees_new, places))

    def pick(visible: jax.Array, sees: jax.Array, places: jax.Array, q: jax.Array, weights: jax.Array) -> jax.Array:
        scores, num = score(q, weights, tokens.keys), latent.index_topk // latent.index_pool
        return chosen_tokens(tokens, scores, visible, sees, places, num, latent.index_pool)

    return (sees_new, places[:, -sees_new.shape[1] :]), pick


def _between_all(sees: jax.Array, places: jax.Array) -> jax.Array:  # [batch, n, m] bool, [batch, m]
    """Return which of the new tokens each of them sees, [batch, m, m] bool, where the first m - n have run before. Two
    that some query sees are on one path."""
    if sees.shape[1] == sees.shape[2]:
        return sees
    together = jnp.einsum("bqi,bqj->bij", sees.astype(jnp.int32), sees.astype(jnp.int32)) > 0
    return together & (places[:, None, :] <= places[:, :, None])


def some_at_once(
    run: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]], arrays: tuple[jax.Array, ...], most: int
) -> Any:
    """Apply a function to arrays [batch, n, ...], at most so many of the n at once."""
    batch, n = arrays[0].shape[:2]
    if n <= most:
        return run(arrays)
    count = -(-n // most)

    def cut(x: jax.Array) -> Any:  # [batch, n, ...] -> [count, batch, most, ...]
        padded = jnp.pad(x, ((0, 0), (0, count * most - n), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, count, most, *x.shape[2:]), 1, 0)

    def whole(x: jax.Array) -> jax.Array:  # [count, batch, most, ...] -> [batch, n, ...]
        return jnp.moveaxis(x, 0, 1).reshape(batch, count * most, *x.shape[3:])[:, :n]

    return tuple(map(whole, jax.lax.map(run, tuple(map(cut, arrays)))))


def score(
    q: jax.Array,  # [batch, n, head, index_dim]
    weights: jax.Array,  # [batch, n, head] float32
    k: jax.Array,  # [batch, length, index_dim]
) -> jax.Array:  # [batch, n, length] float32
    """Return the scores of keys, the sum over heads of weight * relu(q k) (equation 1)."""
    products = jax.nn.relu(jnp.einsum("bnhd,bld->bnhl", q, k, preferred_element_type=jnp.float32))
    return jnp.einsum("bnh,bnhl->bnl", weights, products)


def choose(
    scores: jax.Array,  # [batch, n, length]
    mask: jax.Array,  # [batch, n, length] bool: the tokens that there are to choose from
    topk: int,
) -> jax.Array:  # [batch, n, length] bool
    """Choose the tokens of the highest scores. Of equal ones the first go first."""
    scores = jnp.where(mask, scores, -jnp.inf)
    best = jax.lax.top_k(scores, topk)[1]
    rows = jnp.arange(len(scores))[:, None, None], jnp.arange(scores.shape[1])[:, None]
    return jnp.zeros_like(mask).at[*rows, best].set(True) & mask
