"""Attention over arrays: `attend` is the only function to call. It knows masks and pages, and no model.

Queries see two groups of keys in one softmax. The committed prefix of their sequence lies in pages and is visible to
every query. The new keys came with the call (tree nodes, a prefill chunk, a training row), and an n x m mask says which
query sees which of them. The mask therefore never grows with the context. Packed training rows give document ids in
place of a mask (`rows`).
"""

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import native
from specserve.kernels.rows import NEG_INF, Documents, attend_rows
from specserve.pytree import pytree, static


@pytree
class PagedPrefix:
    """One layer's committed keys and values, found through a page table shared by all layers.

    Pages are laid out so that a page's two products, q k and p v, are batched matrix products without a transpose:
    on CPU that is 1.5 to 2.5 times faster than rows of heads (docs/log).
    """

    k_pages: jax.Array  # [page, kv_head, head_dim, page_size]
    v_pages: jax.Array | None  # [page, kv_head, page_size, v_dim]; None: the values are the keys' first channels
    page_table: jax.Array  # [batch, pages] int32; only these are read, so callers cut the table to what is in use
    lens: jax.Array  # [batch] int32, committed entries, at most pages * page_size
    first: int = static(default=0)  # entries before this index are never visible (the draft has no entry 0)
    # Sum over keys in the order of the sequence, new ones in their places after the prefix (they must be consecutive):
    # then a result does not depend on which keys are new. Slower, because the pages are copied together.
    is_exact: bool = static(default=False)


@pytree
class _Rule:
    """How products of queries and keys become scores: the same for prefix and new keys."""

    softcap: float = static()
    window: int = static()
    position_ids: jax.Array | None  # [batch, n] int32
    sinks: jax.Array | None  # [kv_head, row] float32

    def scores(self, products: jax.Array, is_visible: jax.Array) -> jax.Array:
        if self.softcap:
            products = self.softcap * jnp.tanh(products / self.softcap)
        return jnp.where(is_visible, products, NEG_INF)

    def in_window(self, index: jax.Array) -> jax.Array:  # [batch or 1, length] -> [batch, n, length] bool
        assert self.position_ids is not None, "a window goes by positions"
        return self.position_ids[:, :, None] - index[:, None] < self.window


def attend(
    q: jax.Array,  # [batch, n, head, head_dim]
    k: jax.Array,  # [batch, m, kv_head, head_dim]
    v: jax.Array,  # [batch, m, kv_head, v_dim]
    mask: jax.Array | Documents,  # [batch or 1, n, m] bool, True where query n sees new key m
    prefix: PagedPrefix | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,  # [head]
    window: int = 0,
    position_ids: jax.Array | None = None,  # [batch, n] int32, needed for a window; the new keys are the queries' own
) -> jax.Array:  # [batch, n, head, v_dim]
    """Scaled dot-product attention with grouped heads: head h reads kv_head h // (head / kv_head).

    The softmax runs in float32 over [prefix | new keys]. `scale` is head_dim ** -0.5 unless given. `softcap` bounds the
    scores by cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118, section 2). `sinks` are a logit for each head that
    takes part in the softmax and has no value (GPT-OSS). With a `window` a query sees only the last so many tokens,
    itself included. A query that sees no key at all returns finite values, which callers must treat as padding.
    """
    batch, n, num_heads, head_dim = q.shape
    num_kv_heads, v_dim = v.shape[2:]
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads cannot share {num_kv_heads} KV heads"
    if isinstance(mask, Documents):
        assert prefix is None, "packed rows follow nothing"
        return attend_rows(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, window=window)[0]
    assert mask.shape[-2:] == (n, k.shape[1]), f"mask {mask.shape} for {n} queries and {k.shape[1]} new keys"
    if prefix is not None and native.serves(q, k, prefix.k_pages):
        return _native(q, k, v, mask, prefix, scale or head_dim**-0.5, softcap, sinks, window, position_ids)
    # the query heads of a KV head are rows of one product: [batch, kv_head, group * n, head_dim]
    group = num_heads // num_kv_heads
    q = (q * (scale or head_dim**-0.5)).reshape(batch, n, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, num_kv_heads, group * n, head_dim)
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, group), n, axis=1)
    rule = _Rule(softcap, window, position_ids, sinks)
    if window:
        assert position_ids is not None
        mask &= rule.in_window(position_ids)
    if prefix is not None and prefix.is_exact:
        k, v, mask = _in_order(k, v, mask, prefix, rule)
        prefix = None
    products = jnp.einsum("bkrh,bmkh->bkrm", q, k, preferred_element_type=jnp.float32)
    scores = rule.scores(products.reshape(batch, num_kv_heads, group, n, -1), mask[:, None, None])
    scores = scores.reshape(batch, num_kv_heads, group * n, -1)
    if prefix is None:
        out = jnp.einsum("bkrm,bmkh->bkrh", _softmax(scores, sinks).astype(v.dtype), v)
    else:
        out = _merge_paged(q, scores, v, prefix, rule)
    return out.reshape(batch, num_kv_heads, group, n, v_dim).transpose(0, 3, 1, 2, 4).reshape(batch, n, num_heads, -1)


def _native(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    prefix: PagedPrefix,
    scale: float,
    softcap: float,
    sinks: jax.Array | None,
    window: int,
    position_ids: jax.Array | None,
) -> jax.Array:  # [batch, n, head, v_dim]
    """Attention by one native call, which reads the pages where they are. It adds over the keys in the order of the
    sequence, whichever of them are new, so every prefix is exact."""
    return native.call(
        "specserve_attend",
        (*q.shape[:3], v.shape[-1]),
        q,
        k,
        v,
        mask,
        prefix.k_pages,
        jnp.zeros(0, jnp.float32) if prefix.v_pages is None else prefix.v_pages,
        prefix.page_table,
        prefix.lens,
        jnp.zeros(0, jnp.int32) if position_ids is None else position_ids,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        scale=np.float32(scale),
        softcap=np.float32(softcap),
        first=np.int64(prefix.first),
        window=np.int64(window),
    )


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    column = jnp.broadcast_to(sinks[None, :, :, None], (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


def _in_order(
    k: jax.Array, v: jax.Array, mask: jax.Array, prefix: PagedPrefix, rule: _Rule
) -> tuple[jax.Array, jax.Array, jax.Array]:  # keys and values [batch, pages * page_size, ...], and their mask
    """Join prefix and new keys into one run of keys, each at its index in the sequence, and the mask with it."""
    table = prefix.page_table
    num_kv_heads, head_dim, page_size = prefix.k_pages.shape[1:]
    batch, length = table.shape[0], table.shape[1] * page_size
    row = jnp.arange(batch)[:, None]
    index = prefix.lens[:, None] + jnp.arange(k.shape[1])
    old_k = prefix.k_pages.at[table].get(mode="clip").transpose(0, 1, 4, 2, 3)
    k = old_k.reshape(batch, length, num_kv_heads, head_dim).at[row, index].set(k.astype(old_k.dtype), mode="drop")
    if prefix.v_pages is None:
        v = k[..., : v.shape[-1]]
    else:
        old_v = prefix.v_pages.at[table].get(mode="clip").transpose(0, 1, 3, 2, 4)
        v = old_v.reshape(batch, length, num_kv_heads, -1).at[row, index].set(v.astype(old_v.dtype), mode="drop")
    place = jnp.arange(length) - prefix.lens[:, None]  # among the new keys
    is_new = (place >= 0) & (place < mask.shape[-1])
    new = jnp.take_along_axis(
        jnp.broadcast_to(mask, (batch, *mask.shape[1:])), jnp.clip(place, 0, mask.shape[-1] - 1)[:, None], axis=2
    )
    old = (place < 0)[:, None] & (jnp.arange(length) >= prefix.first)
    if rule.window:
        old &= rule.in_window(jnp.arange(length)[None])
    return k, v, jnp.where(is_new[:, None], new, old)


def _merge_paged(
    q: jax.Array,  # [batch, kv_head, row, head_dim], scaled; row = group * n
    scores: jax.Array,  # [batch, kv_head, row, m] float32, of the new keys, masked
    v: jax.Array,  # [batch, m, kv_head, v_dim]
    prefix: PagedPrefix,
    rule: _Rule,
) -> jax.Array:  # [batch, kv_head, row, v_dim]
    """Compute one softmax over prefix and new keys, page by page, so that only the gathered pages are copied."""
    k_pages = prefix.k_pages.at[prefix.page_table].get(mode="clip")  # [batch, page, kv_head, head_dim, page_size]
    batch, width, _, _, page_size = k_pages.shape
    per_page_q = jnp.broadcast_to(q[:, None], (batch, width, *q.shape[1:]))
    paged = jnp.einsum("bpkrh,bpkhs->bpkrs", per_page_q, k_pages, preferred_element_type=jnp.float32)
    index = jnp.arange(width * page_size)
    is_visible = (index >= prefix.first) & (index < prefix.lens[:, None])
    if rule.window:  # then queries differ in what they see: [batch, page, 1, row, page_size]
        seen = is_visible[:, None] & rule.in_window(index[None])
        seen = jnp.tile(seen, (1, q.shape[2] // seen.shape[1], 1))
        is_visible = seen.reshape(batch, -1, width, 1, page_size).transpose(0, 2, 3, 1, 4)
    else:
        is_visible = is_visible.reshape(batch, width, 1, 1, page_size)
    paged = rule.scores(paged, is_visible)
    largest = jnp.maximum(jnp.max(paged, axis=(1, 4)), jnp.max(scores, axis=-1))  # [batch, kv_head, row]
    if rule.sinks is not None:
        largest = jnp.maximum(largest, rule.sinks[None])
    paged = jnp.exp(paged - largest[:, None, ..., None])
    scores = jnp.exp(scores - largest[..., None])
    total = jnp.sum(paged, axis=(1, 4)) + jnp.sum(scores, axis=-1)
    if rule.sinks is not None:
        total += jnp.exp(rule.sinks[None] - largest)
    if prefix.v_pages is None:
        out = jnp.einsum("bpkrs,bpkhs->bpkrh", paged.astype(v.dtype), k_pages[:, :, :, : v.shape[-1]])
    else:
        v_pages = prefix.v_pages.at[prefix.page_table].get(mode="clip")  # [batch, page, kv_head, page_size, v_dim]
        out = jnp.einsum("bpkrs,bpksh->bpkrh", paged.astype(v.dtype), v_pages)
    out = jnp.sum(out, axis=1) + jnp.einsum("bkrm,bmkh->bkrh", scores.astype(v.dtype), v)
    return out / total[..., None].astype(v.dtype)
