"""The door to attention: `attend`. Arrays in, arrays out; it knows masks and pages, and no model.

Queries see two groups of keys in one softmax: the committed prefix of their sequence, which lies in pages and is
visible to every query, and the new keys that came with the call (tree nodes, a prefill chunk, a training row), of
which an n x m mask says who sees whom. The mask therefore never grows with the context.
"""

import jax
import jax.numpy as jnp

from specserve.pytree import pytree, static

NEG_INF = -1e30  # finite: a row whose every key is masked (padding) must stay free of NaN


@pytree
class PagedPrefix:
    """One layer's committed keys and values, found through a page table shared by all layers."""

    k_pages: jax.Array  # [page, page_size, kv_head, head_dim]
    v_pages: jax.Array  # [page, page_size, kv_head, head_dim]
    page_table: jax.Array  # [batch, max_pages] int32; entries past the allocated pages may hold anything
    lens: jax.Array  # [batch] int32, committed entries
    first: int = static(0)  # entries before this index are never visible (the draft has no entry 0)


def attend(
    q: jax.Array,  # [batch, n, head, head_dim]
    k: jax.Array,  # [batch, m, kv_head, head_dim]
    v: jax.Array,  # [batch, m, kv_head, head_dim]
    mask: jax.Array,  # [batch or 1, n, m] bool, True where query n sees new key m
    prefix: PagedPrefix | None = None,
) -> jax.Array:  # [batch, n, head, head_dim]
    """Scaled dot-product attention with grouped heads (head h reads kv_head h // (head / kv_head)).

    The softmax runs in float32 over [prefix | new keys]; scale is head_dim ** -0.5. A query that sees no key at all
    returns the mean of its new values, which callers must treat as padding.
    """
    batch, n, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads cannot share {num_kv_heads} KV heads"
    assert mask.shape[-2:] == (n, k.shape[1]), f"mask {mask.shape} for {n} queries and {k.shape[1]} new keys"
    grouped_q = (q * head_dim**-0.5).reshape(batch, n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if prefix is None:
        out = _softmax_attention(grouped_q, k, v, mask)
    else:
        out = _attend_paged(grouped_q, k, v, mask, prefix)
    return out.reshape(batch, n, num_heads, head_dim)


def _softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    scores = jnp.einsum("bnkgh,bmkh->bkgnm", q, k, preferred_element_type=jnp.float32)
    probs = jax.nn.softmax(jnp.where(mask[:, None, None], scores, NEG_INF), axis=-1)
    return jnp.einsum("bkgnm,bmkh->bnkgh", probs.astype(v.dtype), v)


def _attend_paged(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, prefix: PagedPrefix) -> jax.Array:
    """Gather the used pages and attend once. The gather's width follows the longest sequence of the batch: it is
    chosen on the device among powers of two, so that one program serves every length and reads no unused page."""
    page_size = prefix.k_pages.shape[1]
    max_pages = prefix.page_table.shape[1]
    widths = page_widths(max_pages)
    needed = (jnp.max(prefix.lens) + page_size - 1) // page_size
    branch = jnp.searchsorted(jnp.array(widths, jnp.int32), needed.astype(jnp.int32))

    def with_width(width: int):  # noqa: ANN202
        def gathered(operands: tuple) -> jax.Array:
            q, k, v, mask, prefix = operands
            return _attend_gathered(q, k, v, mask, prefix, width)

        return gathered

    return jax.lax.switch(branch, [with_width(width) for width in widths], (q, k, v, mask, prefix))


def page_widths(max_pages: int) -> tuple[int, ...]:
    """The gather widths (in pages) compiled for a table of `max_pages`: powers of two, and the table itself."""
    widths = [4]
    while widths[-1] < max_pages:
        widths.append(widths[-1] * 2)
    return tuple(min(width, max_pages) for width in widths)


def _attend_gathered(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, prefix: PagedPrefix, width: int
) -> jax.Array:
    batch, n = q.shape[:2]
    table = prefix.page_table[:, :width]
    shape = (batch, -1, *k.shape[2:])
    prefix_k = prefix.k_pages.at[table].get(mode="clip").reshape(shape)
    prefix_v = prefix.v_pages.at[table].get(mode="clip").reshape(shape)
    index = jnp.arange(prefix_k.shape[1])
    visible = (index[None] >= prefix.first) & (index[None] < prefix.lens[:, None])
    mask = jnp.broadcast_to(mask, (batch, *mask.shape[1:]))
    visible = jnp.broadcast_to(visible[:, None], (batch, n, visible.shape[1]))
    return _softmax_attention(
        q,
        jnp.concatenate([prefix_k, k], axis=1),
        jnp.concatenate([prefix_v, v], axis=1),
        jnp.concatenate([visible, mask], axis=2),
    )


def attend_rollout(
    q: jax.Array,  # [batch, seq, head, head_dim], queries of rollout step len(steps_k)
    k: jax.Array,  # [batch, seq, kv_head, head_dim], keys of rollout step 0
    v: jax.Array,  # [batch, seq, kv_head, head_dim]
    mask: jax.Array,  # [batch, seq, seq] bool, who sees whom at step 0
    steps_k: tuple[jax.Array, ...],  # one [batch, seq, kv_head, head_dim] for each later step, this one included
    steps_v: tuple[jax.Array, ...],
) -> jax.Array:  # [batch, seq, head, head_dim]
    """Attention of a training-time-test rollout (EAGLE-3, section 3.2): slot t sees the step-0 entries that it saw
    at step 0, and its own entry of each later step: what serving's draft sees after len(steps_k) proposed tokens."""
    batch, seq, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    q = (q * head_dim**-0.5).reshape(batch, seq, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("bnkgh,bmkh->bkgnm", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores, NEG_INF)
    own = [jnp.einsum("bnkgh,bnkh->bkgn", q, step_k, preferred_element_type=jnp.float32) for step_k in steps_k]
    probs = jax.nn.softmax(jnp.concatenate([scores, jnp.stack(own, axis=-1)], axis=-1), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgnm,bmkh->bnkgh", probs[..., :seq], v)
    for i, step_v in enumerate(steps_v):
        out += jnp.einsum("bkgn,bnkh->bnkgh", probs[..., seq + i], step_v)
    return out.reshape(batch, seq, num_heads, head_dim)
