"""An indexer that chooses pools of tokens (GLM-5.3-Flash): each run of so many tokens has one key, a weighted mean of
theirs, and is chosen or not as a whole. A query sees the last tokens, which are no whole pool yet, in any case.

In a tree the tokens of a pool depend on the path, so a new token that ends a pool has that pool's key, and a node sees
the pools that end at its ancestors. Pools that are committed whole are cut out of the sequence.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specserve.models.params import matrix
from specserve.pytree import pytree


@pytree
class IndexPool:
    """The parameters by which tokens share in a pool's key."""

    place: jax.Array  # [pool, index_dim], by the place in the pool
    gate: jax.Array  # [d_model, index_dim]


def index_pool_spec(prefix: str, d_in: int, pool: int, dim: int) -> IndexPool:
    """The parameters as `ParamSpec`s, whole on every device."""
    place = matrix(f"{prefix}.index_kpool_compress_ape", dim, pool, (None, None))
    return IndexPool(
        place=dataclasses.replace(place, shape=(pool, dim), transpose=False),
        gate=matrix(f"{prefix}.index_kpool_compress_gate", d_in, dim, (None, None)),
    )


@pytree
class Pooled:
    """The tokens of some sequences, in order, and the keys of their pools. `length` counts committed and new ones,
    `pools` is the most that they can be."""

    keys: jax.Array  # [batch, pools + m, index_dim]: of committed pools, and of those that end at a new token
    whole: jax.Array  # [batch] int32, the number of pools that are committed
    of_token: jax.Array  # [batch, length] int32, the pool of each token
    of_new: jax.Array  # [batch, m] int32, the pool that ends at each new token; -1: none does


def pooled(
    place: jax.Array,  # [pool, dim], by the place in the pool
    entries: jax.Array,  # [batch, length, 2 * dim]: what is pooled, and what tokens share by
    lens: jax.Array,  # [batch] int32, how many of them are committed; the m new ones follow
    position_ids: jax.Array,  # [batch, m] int32, of the new ones
    mask: jax.Array,  # [batch, m, m] bool, which of these each of them sees
    *,
    overlaps: bool = False,
) -> Pooled:
    """Compute the keys of all pools. Where they overlap, a pool is of its own tokens, by the second half of their
    channels, and of those of the pool before it, by the first."""
    (batch, length, width), pool = entries.shape, place.shape[0]
    m, reach = position_ids.shape[1], 2 * pool if overlaps else pool
    pools, column = -(-length // pool), jnp.arange(m)
    whole = jnp.pad(entries, ((0, 0), (0, pools * pool - length), (0, 0))).reshape(batch, pools, pool, width)
    if overlaps:
        before = jnp.pad(whole, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
        whole = jnp.concatenate([before, whole], axis=2)
    back = position_ids[:, :, None] - position_ids[:, None, :]
    back = jnp.where(mask & (back >= 0), back, reach)  # others are dropped
    # the committed ones lie at their positions
    found = jnp.maximum(position_ids[..., None] - jnp.arange(reach), 0)
    own = jnp.broadcast_to((lens[:, None] + column)[:, None, :], back.shape)
    row = jnp.arange(batch)[:, None, None]
    found = found.at[row, column[:, None], back].set(own, mode="drop")[..., ::-1]
    of_path = jnp.take_along_axis(entries, found.reshape(batch, -1, 1), axis=1, mode="clip")
    of_path = of_path.reshape(batch, m, reach, width)
    of_new = jnp.where((position_ids + 1) % pool == 0, position_ids // pool, -1)
    keys = _key(place, whole, jnp.arange(pools) == 0, overlaps), _key(place, of_path, of_new == 0, overlaps)
    of_token = jnp.broadcast_to(jnp.arange(length) // pool, (batch, length))
    of_token = of_token.at[jnp.arange(batch)[:, None], lens[:, None] + column].set(position_ids // pool, mode="drop")
    return Pooled(jnp.concatenate(keys, axis=1), lens // pool, of_token, of_new)


def _key(
    place: jax.Array, entries: jax.Array, is_first: jax.Array, overlaps: bool
) -> jax.Array:  # [..., reach, 2 * dim], and whether there is none before it -> [..., dim]
    keys, gates = jnp.split(entries, 2, axis=-1)
    if not overlaps:
        logits = gates.astype(jnp.float32) + place.astype(jnp.float32)
    else:
        pool, half = len(place), place.shape[1] // 2

        def own(x: jax.Array) -> jax.Array:  # [..., 2 * pool, dim] -> [..., 2 * pool, half]
            return jnp.concatenate([x[..., :pool, :half], x[..., pool:, half:]], axis=-2)

        logits = own(gates.astype(jnp.float32) + jnp.tile(place.astype(jnp.float32), (2, 1)))
        is_missing = is_first[..., None] & (jnp.arange(2 * pool) < pool)
        keys, logits = own(keys), jnp.where(is_missing[..., None], -jnp.inf, logits)
    return jnp.sum(jax.nn.softmax(logits, axis=-2).astype(keys.dtype) * keys, axis=-2)


def chosen_tokens(
    tokens: Pooled,
    scores: jax.Array,  # [batch, n, pools + m] float32, by `Pooled.keys`
    visible: jax.Array,  # [batch, n, length] bool
    sees_new: jax.Array,  # [batch, n, m] bool
    position_ids: jax.Array,  # [batch, n] int32, of the queries
    num_chosen: int,  # pools
    pool: int,
) -> jax.Array:  # [batch, n, length] bool
    """Return what each query sees: the tokens of the pools of the highest scores, and those of no whole pool. Of equal
    scores the first pool goes first."""
    batch, n, m = sees_new.shape
    pools, at = scores.shape[-1] - m, (jnp.arange(batch)[:, None, None], jnp.arange(n)[:, None])
    own = jnp.where(jnp.arange(pools) < tokens.whole[:, None, None], scores[..., :pools], -jnp.inf)
    # on a query's path at most one token ends each pool
    ending = jnp.where(sees_new & (tokens.of_new >= 0)[:, None], tokens.of_new[:, None], pools)
    own = own.at[*at, ending].set(scores[..., pools:], mode="drop")
    best = jax.lax.top_k(own, min(num_chosen, pools))[1]
    is_chosen = jnp.zeros(own.shape, bool).at[*at, best].set(True) & (own > -jnp.inf)
    of_token = jnp.broadcast_to(tokens.of_token[:, None], visible.shape)
    is_last = of_token == ((position_ids + 1) // pool)[..., None]
    return visible & (is_last | jnp.take_along_axis(is_chosen, jnp.minimum(of_token, pools - 1), axis=-1))
