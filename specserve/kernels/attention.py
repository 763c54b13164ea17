"""Attention over arrays: `attend` is the only function to call. It knows masks and pages, and no model.

Queries see two groups of keys in one softmax. The committed prefix of their sequence lies in pages and is visible to
every query. The new keys came with the call (tree nodes, a prefill chunk, a training row), and an n x m mask says which
query sees which of them. The mask therefore never grows with the context. Each group is computed by itself, the prefix
by whatever kernel the backend has (`paged`), and the two are merged by their log-sum-exps; a GPU's kernels do all of
that. Packed training rows, and chunks of prompts, give document ids in place of a mask, and a kernel of their own
computes them where there is one (`rows`).
"""

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import native
from specserve.kernels.block import NEG_INF, NewKeys
from specserve.kernels.paged import PagedPrefix, attend_both, attend_pages, take_pages
from specserve.kernels.pages import as_kept, quantize
from specserve.kernels.rows import Documents, Unrolled, attend_rows
from specserve.kernels.rows import kernel_for as rows_kernel_for


def attend(
    q: jax.Array,  # [batch, n, head, head_dim]
    k: jax.Array,  # [batch, m, kv_head, head_dim]
    v: jax.Array,  # [batch, m, kv_head, v_dim]
    mask: jax.Array | Documents | Unrolled,  # [batch or 1, n, m] bool, True where query n sees new key m
    prefix: PagedPrefix | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,  # [head]
    window: int = 0,
    position_ids: jax.Array | None = None,  # [batch, m] int32, of the new keys; needed for a window
) -> jax.Array:  # [batch, n, head, v_dim]
    """Scaled dot-product attention with grouped heads: head h reads kv_head h // (head / kv_head).

    The softmax runs in float32 over [prefix | new keys]. `scale` is head_dim ** -0.5 unless given. `softcap` bounds the
    scores by cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118, section 2). `sinks` are a logit for each head that
    takes part in the softmax and has no value (GPT-OSS). With a `window` a query sees only the last so many tokens,
    itself included; the last n of the new keys are then the queries' own. A query that sees no key at all returns
    finite values, which callers must treat as padding.
    """
    _, n, num_heads, head_dim = q.shape
    num_kv_heads = v.shape[2]
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads cannot share {num_kv_heads} KV heads"
    if isinstance(mask, Unrolled):
        assert prefix is None, "packed rows follow nothing"
        return mask.attend(q, k, v, scale=scale, softcap=softcap, sinks=sinks, window=window)
    is_native = prefix is not None and native.serves(q, k) and prefix.pages.k.dtype.name in native.STORED
    if prefix is not None and not is_native:  # as later steps will see them
        k, v = as_kept(k, prefix.pages), as_kept(v, prefix.pages)
    if isinstance(mask, Documents):
        if prefix is None:
            return attend_rows(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, window=window)[0]
        if rows_kernel_for(q, v) is not None and not (prefix.pages.is_quantized or prefix.is_exact):
            return _by_kernels(q, k, v, mask, prefix, scale or head_dim**-0.5, softcap, sinks, window, position_ids)
        mask = mask.dense()
    assert mask.shape[-2:] == (n, k.shape[1]), f"mask {mask.shape} for {n} queries and {k.shape[1]} new keys"
    if is_native:
        assert prefix is not None
        return _native(q, k, v, mask, prefix, scale or head_dim**-0.5, softcap, sinks, window, position_ids)
    return _by_products(q, k, v, mask, prefix, scale or head_dim**-0.5, softcap, sinks, window, position_ids)


def attend_committed(
    q: jax.Array,  # [batch, n, head, head_dim]
    prefix: PagedPrefix,
    *,
    scale: float | None = None,
    window: int = 0,
    position_ids: jax.Array | None = None,  # [batch, n] int32, of the queries; needed for a window
) -> jax.Array:  # [batch, n, head, head_dim]
    """Compute what `attend` does of queries that see no new keys. With none committed, what comes is finite and means
    nothing."""
    _, n, num_heads, head_dim = q.shape
    num_kv_heads = prefix.pages.k.shape[1]
    rows = _by_kv_head(q * (scale or head_dim**-0.5), num_kv_heads)
    positions = None
    if window:
        assert position_ids is not None, "a window goes by positions"
        positions = jnp.tile(position_ids, (1, num_heads // num_kv_heads))
    out, _ = attend_pages(rows, prefix, positions, v_dim=head_dim, window=window)
    return _by_head(out.astype(q.dtype), n)


def _by_products(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    prefix: PagedPrefix | None,
    scale: float,
    softcap: float,
    sinks: jax.Array | None,
    window: int,
    position_ids: jax.Array | None,  # [batch, m]
) -> jax.Array:  # [batch, n, head, v_dim]
    """Attention by the backend's kernels, where they take the new keys as well; else by XLA's operations over these,
    merged with what the backend makes of the prefix."""
    batch, n, num_heads, _ = q.shape
    num_kv_heads, v_dim = v.shape[2:]
    group = num_heads // num_kv_heads
    q = _by_kv_head(q * scale, num_kv_heads)
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, group), n, axis=1)
    if window:
        assert position_ids is not None, "a window goes by positions"
        own = position_ids[:, -n:]
        mask &= own[:, :, None] - position_ids[:, None] < window
        position_ids = own
    k_scale = v_scale = None
    if prefix is not None and prefix.pages.is_quantized:  # as later steps will see them
        k, k_scale = quantize(k, prefix.pages.k.dtype)
        is_both = prefix.pages.values_are_keys
        v, v_scale = (k[..., :v_dim], k_scale) if is_both else quantize(v, prefix.pages.k.dtype)
    if prefix is not None and prefix.is_exact:
        k, v, k_scale, v_scale = _in_order(k, v, k_scale, v_scale, prefix)
        mask = _mask_in_order(mask, k.shape[1], prefix, window, position_ids)
        prefix = None
    positions = None
    if prefix is not None:
        positions = jnp.tile(position_ids, (1, group)) if position_ids is not None and window else None
        values = (None, None) if prefix.pages.values_are_keys else (v, v_scale)
        new = NewKeys(k, values[0], mask, k_scale, values[1], sinks)
        both = attend_both(q, new, prefix, positions, v_dim=v_dim, softcap=softcap, window=window)
        if both is not None:
            return both
    products = jnp.einsum("bkrh,bmkh->bkrm", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
    if k_scale is not None:
        products *= k_scale.swapaxes(1, 2)[:, :, None]
    if softcap:
        products = softcap * jnp.tanh(products / softcap)
    scores = jnp.where(mask[:, None, None], products.reshape(batch, num_kv_heads, group, n, -1), NEG_INF)
    scores = scores.reshape(batch, num_kv_heads, group * n, -1)
    if prefix is None:
        out = _sum_values(_softmax(scores, sinks), v, v_scale, q.dtype)
    else:
        old_out, old_lse = attend_pages(q, prefix, positions, v_dim=v_dim, softcap=softcap, window=window)
        share, weights = _merge(old_lse, scores, sinks)
        out = share[..., None] * old_out + _sum_values(weights, v, v_scale, q.dtype)
    return _by_head(out.astype(q.dtype), n)


def _by_kv_head(x: jax.Array, num_kv_heads: int) -> jax.Array:  # [batch, n, head, ...] -> [batch, kv_head, row, ...]
    """Make the query heads of each KV head rows of one product, group by group."""
    batch, n, num_heads, *rest = x.shape
    x = jnp.moveaxis(x.reshape(batch, n, num_kv_heads, num_heads // num_kv_heads, *rest), 1, 3)
    return x.reshape(batch, num_kv_heads, -1, *rest)


def _by_head(x: jax.Array, n: int) -> jax.Array:  # [batch, kv_head, row, ...] -> [batch, n, head, ...]
    """Undo `_by_kv_head`."""
    batch, num_kv_heads, _, *rest = x.shape
    return jnp.moveaxis(x.reshape(batch, num_kv_heads, -1, n, *rest), 3, 1).reshape(batch, n, -1, *rest)


def _by_kernels(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    prefix: PagedPrefix,
    scale: float,
    softcap: float,
    sinks: jax.Array | None,
    window: int,
    position_ids: jax.Array | None,
) -> jax.Array:  # [batch, n, head, v_dim]
    """Attention of chunks that follow a prefix, by one kernel over the chunks and one over the pages: no score goes
    through memory."""
    batch, n, num_heads, _ = q.shape
    num_kv_heads, v_dim = v.shape[2:]
    documents = Documents(jnp.broadcast_to(documents.ids, (batch, n)))
    own, own_lse = attend_rows(q, k, v, documents, scale=scale, softcap=softcap, window=window)
    positions = None
    if window:
        assert position_ids is not None, "a window goes by positions"
        positions = jnp.tile(position_ids[:, -n:], (1, num_heads // num_kv_heads))
    rows = _by_kv_head(q * scale, num_kv_heads)
    old, old_lse = (
        _by_head(x, n) for x in attend_pages(rows, prefix, positions, v_dim=v_dim, softcap=softcap, window=window)
    )
    total = jnp.logaddexp(old_lse, own_lse)
    if sinks is not None:
        total = jnp.logaddexp(total, sinks.astype(jnp.float32))
    old_share, own_share = jnp.exp(old_lse - total)[..., None], jnp.exp(own_lse - total)[..., None]
    return (old_share * old + own_share * own.astype(jnp.float32)).astype(q.dtype)


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
    """Attention by one native call, which reads the pages where they are, and rounds new keys as these are rounded. It
    adds over the keys in the order of the sequence, whichever of them are new, so every prefix is exact."""
    return native.call(
        "specserve_attend",
        (*q.shape[:3], v.shape[-1]),
        q,
        k,
        v,
        mask,
        prefix.pages.k,
        native.operand(prefix.pages.v, prefix.pages.k.dtype.name),
        native.operand(prefix.pages.k_scale),
        native.operand(prefix.pages.v_scale),
        prefix.page_table,
        prefix.lens,
        native.operand(position_ids, "int32"),
        native.operand(sinks),
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


def in_order(
    k: jax.Array,  # [batch, m, kv_head, dim]
    v: jax.Array | None,  # [batch, m, kv_head, v_dim]; None: of pages whose values are their keys' own channels
    mask: jax.Array,  # [batch or 1, n, m] bool
    prefix: PagedPrefix,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [batch, length, kv_head, ...] twice, and [batch, n, length] bool
    """Join committed and new keys into one run of keys, each at its index in the sequence, as numbers of the new ones'
    dtype; and so their values, and their mask."""
    dtype, more, k_scale, v_scale = k.dtype, k.shape[1], None, None
    k, v = as_kept(k, prefix.pages), None if v is None else as_kept(v, prefix.pages)
    if prefix.pages.is_quantized:  # as later steps will see them
        k, k_scale = quantize(k, prefix.pages.k.dtype)
        v, v_scale = (None, k_scale) if v is None else quantize(v, prefix.pages.k.dtype)
    k, v, k_scale, v_scale = _in_order(k, k if v is None else v, k_scale, v_scale, prefix, more)

    def plain(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        return x.astype(dtype) if scale is None else (x.astype(jnp.float32) * scale[..., None]).astype(dtype)

    return plain(k, k_scale), plain(v, v_scale), _mask_in_order(mask, k.shape[1], prefix, 0, None)


def _in_order(
    k: jax.Array,
    v: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    prefix: PagedPrefix,
    more: int = 0,  # indices behind those of the prefix's pages
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Join prefix and new keys into one run of keys, each at its index in the sequence, and so the values and the
    scales of both: [batch, pages * page_size + more, ...]."""
    table, pages = prefix.page_table, prefix.pages
    batch, length = table.shape[0], table.shape[1] * pages.page_size
    row = jnp.arange(batch)[:, None]
    index = prefix.lens[:, None] + jnp.arange(k.shape[1])

    def join(
        old: jax.Array, new: jax.Array
    ) -> jax.Array:  # [page, kv_head, page_size, ...] and [batch, m, kv_head, ...]
        old = take_pages(old, prefix).swapaxes(2, 3).reshape(batch, length, *new.shape[2:])
        old = jnp.pad(old, ((0, 0), (0, more), *[(0, 0)] * (old.ndim - 2)))
        return old.at[row, index].set(new.astype(old.dtype), mode="drop")

    v_dim = v.shape[-1]
    if pages.layout == "joined" and not pages.values_are_keys:
        both = join(pages.k, jnp.concatenate([k, v], axis=-1))
        k, v = both[..., : pages.v_first], both[..., pages.v_first :]
    else:
        k = join(pages.k.swapaxes(2, 3) if pages.layout == "columns" else pages.k, k)
        v = k[..., :v_dim] if pages.v is None else join(pages.v, v)
    if pages.k_scale is None or k_scale is None:
        return k, v, None, None
    k_scale = join(pages.k_scale, k_scale)
    if pages.v_scale is None or v_scale is None:
        return k, v, k_scale, k_scale
    return k, v, k_scale, join(pages.v_scale, v_scale)


def _mask_in_order(
    mask: jax.Array, length: int, prefix: PagedPrefix, window: int, position_ids: jax.Array | None
) -> jax.Array:  # [batch, n, length]
    """The mask of keys that `_in_order` has joined."""
    place = jnp.arange(length) - prefix.lens[:, None]  # among the new keys
    is_new = (place >= 0) & (place < mask.shape[-1])
    new = jnp.take_along_axis(
        jnp.broadcast_to(mask, (len(place), *mask.shape[1:])), jnp.clip(place, 0, mask.shape[-1] - 1)[:, None], axis=2
    )
    old = (place < 0)[:, None] & (jnp.arange(length) >= prefix.first)
    if window:
        assert position_ids is not None
        old &= position_ids[:, :, None] - jnp.arange(length) < window
    return jnp.where(is_new[:, None], new, old)


def _merge(
    old_lse: jax.Array,  # [batch, kv_head, row], of the prefix
    scores: jax.Array,  # [batch, kv_head, row, m] float32, of the new keys, masked
    sinks: jax.Array | None,  # [kv_head, row]
) -> tuple[jax.Array, jax.Array]:
    """Return what each side weighs in one softmax over the prefix, the new keys and the sinks: the share of the
    prefix, [batch, kv_head, row], and the probability of each new key, [batch, kv_head, row, m]."""
    largest = jnp.maximum(old_lse, jnp.max(scores, axis=-1))
    if sinks is not None:
        largest = jnp.maximum(largest, sinks[None])
    share, weights = jnp.exp(old_lse - largest), jnp.exp(scores - largest[..., None])
    total = share + jnp.sum(weights, axis=-1)
    if sinks is not None:
        total += jnp.exp(sinks[None] - largest)
    return share / total, weights / total[..., None]


def _sum_values(weights: jax.Array, v: jax.Array, v_scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Sum values [batch, m, kv_head, v_dim], weighted by their probabilities [batch, kv_head, row, m], in float32."""
    if v_scale is not None:
        weights *= v_scale.swapaxes(1, 2)[:, :, None]
    return jnp.einsum("bkrm,bmkh->bkrh", weights.astype(dtype), v.astype(dtype), preferred_element_type=jnp.float32)
