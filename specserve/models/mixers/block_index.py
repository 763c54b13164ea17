"""The indexer of MiniMax sparse attention (arXiv 2606.13392): small heads of its own, one for each KV head, score every
earlier token for a query; a block of tokens has the score of its best one, and the KV head's queries see the tokens of
the best `top` blocks. The last `local` blocks are always among them.

Blocks are cut by position. The one key that the indexer has of a token lies in the pages behind the token's own keys, a
share behind each KV head's, so what is committed, shared and given up goes with it, and a mesh cuts it with them. Where
a call's keys are no more than `top` blocks hold, all are chosen, and nothing is scored. Beyond that the chosen ones are
seen under a mask: the result is that of sparse attention, the time is that of dense attention, and the scores come on
top.
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
from specserve.models.config import BlockIndex, ModelConfig
from specserve.models.context import Mask
from specserve.models.layers import norm_spec
from specserve.models.mixers.indexer import SCORES_AT_ONCE, some_at_once
from specserve.models.params import TensorPart, matrix
from specserve.pytree import pytree

# means of keys [batch, n, block, dim], the positions of the blocks' first tokens [1, block] -> normed and turned ones
Finish = Callable[[jax.Array, jax.Array], jax.Array]


@pytree
class BlockIndexer:
    q: Weight  # [d_model, head * dim]
    k: Weight  # [d_model, dim]
    q_norm: jax.Array  # [dim]
    k_norm: jax.Array  # [dim]


def block_indexer_spec(config: ModelConfig, index: BlockIndex, prefix: str, d_in: int) -> BlockIndexer:
    """The parameters as `ParamSpec`s, whole on every device."""
    offset, q_size = config.norm_offset, index.num_heads * index.dim
    if index.pools_keys:
        both, total = f"{prefix}.indexer.index_qk_proj.weight", q_size + index.dim
        parts = (TensorPart(start, stop, total, total) for start, stop in ((0, q_size), (q_size, total)))
        return BlockIndexer(
            q=matrix(both, d_in, q_size, (None, None), part=next(parts)),
            k=matrix(both, d_in, index.dim, (None, None), part=next(parts)),
            q_norm=norm_spec(f"{prefix}.indexer.q_layernorm", index.dim, offset=offset),
            k_norm=norm_spec(f"{prefix}.indexer.k_layernorm", index.dim, offset=offset),
        )
    return BlockIndexer(
        q=matrix(f"{prefix}.index_q_proj.weight", d_in, q_size, (None, None)),
        k=matrix(f"{prefix}.index_k_proj.weight", d_in, index.dim, (None, None)),
        q_norm=norm_spec(f"{prefix}.index_q_norm", index.dim, offset=offset),
        k_norm=norm_spec(f"{prefix}.index_k_norm", index.dim, offset=offset),
    )


def with_share(k: jax.Array, key: jax.Array) -> jax.Array:  # [batch, n, kv_head, head_dim], [batch, n, 1, dim]
    """Return heads' keys as the cache has them, with shares of the indexer's key behind (`ModelConfig.key_dim`)."""
    num_kv_heads = k.shape[2]
    share = -(-key.shape[-1] // num_kv_heads)
    padded = jnp.pad(key[:, :, 0], ((0, 0), (0, 0), (0, share * num_kv_heads - key.shape[-1])))
    return jnp.concatenate([k, padded.reshape(*k.shape[:3], share).astype(k.dtype)], axis=-1)


def chooses(index: BlockIndex | None, k: jax.Array, seen: PagedPrefix | None) -> bool:
    """Return whether there may be more keys than the indexer chooses: it is the shapes that decide."""
    committed = 0 if seen is None else seen.page_table.shape[1] * seen.pages.page_size
    return index is not None and 0 < index.reach < committed + k.shape[1]


def attend_to_chosen(
    index: BlockIndex,
    q: jax.Array,  # [batch, n, head, head_dim]
    k: jax.Array,  # [batch, m, kv_head, key_dim]: `with_share`
    v: jax.Array,  # [batch, m, kv_head, v_dim]
    mask: Mask,  # [batch or 1, n, m] bool
    seen: PagedPrefix | None,
    index_q: jax.Array,  # [batch, n, index head, dim]
    position_ids: jax.Array,  # [batch, m] int32, of the new keys, the queries' own being the last n
    scale: float,
    finish: Finish,
) -> jax.Array:  # [batch, n, head, v_dim]
    """Attention over the tokens of the blocks that the indexer chooses among committed and new ones. Raises ConfigError
    for a layer of multi-token prediction that is unrolled over longer rows than it sees."""
    if isinstance(mask, Unrolled):
        raise ConfigError(
            f"rows of {k.shape[1]} tokens: a layer with MiniMax sparse attention learns from rows of at most "
            f"{index.reach} (index_topk_blocks * index_block_size); lower train.seq_len"
        )
    mask = mask.dense() if isinstance(mask, Documents) else mask
    (batch, n, _, head_dim), positions = q.shape, position_ids
    if seen is not None:
        new = seen.lens[:, None] + jnp.arange(k.shape[1])
        k, v, mask = in_order(k, v, mask, seen)
        places = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[:2])
        positions = places.at[jnp.arange(batch)[:, None], new].set(position_ids, mode="drop")
    length, num_kv_heads = k.shape[1:3]
    mask = jnp.broadcast_to(mask, (batch, n, length))
    keys = k[..., head_dim:].reshape(batch, length, -1)[..., : index.dim]

    def fold(x: jax.Array) -> jax.Array:  # [batch, n, kv_head * group, ...] -> [batch * kv_head, n, group, ...]
        x = x.reshape(*x.shape[:2], num_kv_heads, -1, x.shape[-1])
        return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:])

    own_keys, values = fold(k[..., :head_dim]), fold(v)

    def run(part: tuple[jax.Array, ...]) -> tuple[jax.Array]:  # of some queries
        q, index_q, mask, at = part
        if index.pools_keys:
            chosen = choose_by_means(index, index_q, keys, mask, positions, at, finish)
        else:
            chosen = choose(index, index_q, keys, mask, positions, at)
        chosen = jnp.repeat(chosen, num_kv_heads // chosen.shape[1], axis=1).reshape(-1, *chosen.shape[2:])
        out = attend(fold(q), own_keys, values, chosen, scale=scale)
        out = out.reshape(batch, num_kv_heads, *out.shape[1:])
        return (jnp.moveaxis(out, 1, 2).reshape(*q.shape[:3], -1),)

    parts: tuple[Any, ...] = (q, index_q, mask, position_ids[:, -n:])
    width = max(q.shape[2], index.num_heads, 2 * index.dim if index.pools_keys else 0)
    return some_at_once(run, parts, max(1, SCORES_AT_ONCE // (batch * length * width)))[0]


def choose(
    index: BlockIndex,
    q: jax.Array,  # [batch, n, head, dim]
    k: jax.Array,  # [batch, length, dim]
    mask: jax.Array,  # [batch, n, length] bool: the tokens that there are to choose from
    positions: jax.Array,  # [batch, length] int32, less than length
    own: jax.Array,  # [batch, n] int32, the queries'
) -> jax.Array:  # [batch, head, n, length] bool
    """Choose the tokens of the blocks whose best token scores highest. Of equal blocks the first go first."""
    scores = jnp.einsum("bnhd,bld->blhn", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.moveaxis(mask, 2, 1)[:, :, None], scores, -jnp.inf)
    block, count = positions // index.size, -(-k.shape[1] // index.size)
    of_block = jax.vmap(lambda each, ids: jax.ops.segment_max(each, ids, count))(scores, block)
    of_block = jnp.moveaxis(of_block, 1, -1)  # [batch, head, n, block]
    back = (own // index.size)[:, None, :, None] - jnp.arange(count)
    of_block = jnp.where((back >= 0) & (back < index.local), jnp.inf, of_block)
    best = jax.lax.top_k(of_block, min(index.top, count))[1]
    is_best = (best[..., None] == jnp.arange(count)).any(-2)
    chosen = jnp.take_along_axis(is_best, jnp.broadcast_to(block[:, None, None], (*is_best.shape[:3], k.shape[1])), -1)
    return chosen & mask[:, None]


def choose_by_means(
    index: BlockIndex,
    q: jax.Array,  # as in `choose`
    k: jax.Array,  # [batch, length, dim], neither normed nor turned
    mask: jax.Array,
    positions: jax.Array,
    own: jax.Array,
    finish: Finish,
) -> jax.Array:  # [batch, 1, n, length] bool
    """Choose for all heads together the tokens of the whole blocks whose mean keys score highest, sum over heads of
    relu(q k), and those of the last block where it is not whole (Qwen3.8-Flash-Next). Blocks are of a query's own path:
    where branches of a tree part within one, each has its own mean."""
    block, count = positions // index.size, -(-k.shape[1] // index.size)
    visible = jnp.where(mask[..., None], k.astype(jnp.float32)[:, None], 0.0)
    sums = jax.vmap(lambda each, ids: jax.ops.segment_sum(each, ids, count))(jnp.moveaxis(visible, 2, 1), block)
    means = (jnp.moveaxis(sums, 1, 2) / index.size).astype(k.dtype)
    keys = finish(means, jnp.arange(count, dtype=jnp.int32)[None] * index.size)
    products = jax.nn.relu(jnp.einsum("bnhd,bncd->bnhc", q, keys, preferred_element_type=jnp.float32))
    whole = ((own + 1) // index.size)[..., None]  # blocks of a query
    scores = jnp.where(jnp.arange(count) < whole, products.sum(2), -jnp.inf)
    best = jax.lax.top_k(scores, min(index.top, count))[1]
    is_best = (best[..., None] == jnp.arange(count)).any(-2) & (jnp.arange(count) < whole)
    chosen = jnp.take_along_axis(is_best, jnp.broadcast_to(block[:, None], (*is_best.shape[:2], k.shape[1])), -1)
    return ((chosen | (block[:, None] >= whole)) & mask)[:, None]
