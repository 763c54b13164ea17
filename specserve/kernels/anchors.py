"""Attention of blocks that stand at anchors of packed training rows (`attend_anchors`).

A head that drafts several tokens in one pass learns at some positions of a row, its anchors. The queries of an anchor
see a run of the row's own entries, and beside them entries that belong to the anchor alone. No array has anchors times
entries of a whole row: chunks of anchors are computed one after the other, and again in the backward pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import rows
from specserve.kernels.block import NEG_INF, attend_seen
from specserve.kernels.rows import part_length
from specserve.mesh import num_parts, on_each_device, over_parts, partition, traced_mesh
from specserve.pytree import pytree


@pytree
class Anchors:
    """The places of blocks in their rows, and the entries of the row that they see: first, first + 1, ..., stop - 1.
    All three are indices in the row. A block sees no entry where `stop` is at most `first`.

    A block drafter's anchor at index a of a document that begins at f has first f and stop a, since the hidden state of
    its own position is not known yet. Where it is known, stop is a + 1.
    """

    first: jax.Array  # [batch, anchor] int32
    stop: jax.Array  # [batch, anchor] int32
    index: jax.Array  # [batch, anchor] int32, where slot 0 stands and slot s stands s further; windows go by it


def attend_anchors(
    q: jax.Array,  # [batch, anchor, slot, head, head_dim]
    k: jax.Array,  # [batch, seq, kv_head, head_dim], the row's entries
    v: jax.Array,  # [batch, seq, kv_head, v_dim]
    anchors: Anchors,
    own_k: jax.Array,  # [batch, anchor, own, kv_head, head_dim], the entries of each anchor
    own_v: jax.Array,  # [batch, anchor, own, kv_head, v_dim]
    own_mask: np.ndarray,  # [slot, own] bool, True where a slot sees an entry of its own anchor
    *,
    scale: float | None = None,
    sinks: jax.Array | None = None,  # [head]
    window: int = 0,
) -> jax.Array:  # [batch, anchor, slot, head, v_dim]
    """Scaled dot-product attention with grouped heads, in one softmax over the row's entries and the anchor's own, as
    `attention.attend` computes it over pages and new keys.

    Each slot must see an entry of its own. With a `window` a slot sees the row's entries that are fewer than so many
    places before it; `own_mask` decides about the own entries. Sinks and scale are those of `attention.attend`. The
    own entries join the softmax by log-sum-exp (Milakov and Gimelshein 2018, arXiv 1805.02867), so that the row's are
    never copied beside them. Over a mesh that cuts the sequence, each device computes its part of the anchors and
    gathers the row's entries.
    """
    num_anchors, num_heads, head_dim = q.shape[1], *q.shape[3:]
    num_kv_heads = k.shape[2]
    assert own_mask.shape == (q.shape[2], own_k.shape[2]), f"mask {own_mask.shape} for {q.shape[2]} slots"
    assert own_mask.any(axis=1).all(), "a slot sees none of its anchor's entries"
    q = (q * (scale or head_dim**-0.5)).reshape(*q.shape[:3], num_kv_heads, num_heads // num_kv_heads, head_dim)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
    block = jax.checkpoint(functools.partial(_block, own_mask=own_mask, window=window))
    by_anchor = (q, anchors, own_k, own_v)
    parts = num_parts(traced_mesh(), "sequence")
    if parts == 1:
        out = _by_chunk(block, by_anchor, k, v, sinks)
    else:
        cut = ("sequence",)
        of_anchors, whole = partition((None, "sequence"), cut), partition((), cut)
        run = over_parts(functools.partial(_by_chunk, block), cut, (of_anchors, whole, whole, whole), of_anchors)
        out = run(_filled_up(by_anchor, parts), k, v, sinks)[:, :num_anchors]
    return out.reshape(*out.shape[:3], num_heads, -1)


def _by_chunk(
    block: Any, by_anchor: Any, k: jax.Array, v: jax.Array, sinks: jax.Array | None
) -> jax.Array:  # [batch, anchor, slot, kv_head, group, v_dim]
    """Compute as many anchors at once as `rows.SCORES_AT_ONCE` allows."""
    batch, num_anchors, slots, num_kv_heads, group, _ = by_anchor[0].shape
    mesh = traced_mesh()
    num_heads = on_each_device(mesh, "kv_heads", num_kv_heads) * group
    of_anchor = on_each_device(mesh, "batch", batch) * num_heads * slots * k.shape[1]
    fitting = max(1, rows.SCORES_AT_ONCE // of_anchor)
    if fitting >= num_anchors:
        return block(by_anchor, k, v, sinks)
    length = part_length(num_anchors, fitting)

    def cut(x: jax.Array) -> jax.Array:  # [chunk, batch, length, ...]
        return jnp.moveaxis(x.reshape(batch, -1, length, *x.shape[2:]), 1, 0)

    chunks = jax.tree.map(cut, _filled_up(by_anchor, length))
    out = jnp.moveaxis(jax.lax.map(lambda chunk: block(chunk, k, v, sinks), chunks), 0, 1)
    return out.reshape(batch, -1, *out.shape[3:])[:, :num_anchors]


def _filled_up(by_anchor: Any, length: int) -> Any:
    """Pad arrays [batch, anchor, ...] with anchors that see nothing of the row, until `length` divides their number."""

    def fill(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, -x.shape[1] % length)] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(fill, by_anchor)


def _block(
    by_anchor: tuple[jax.Array, Anchors, jax.Array, jax.Array],
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,  # [kv_head, group] float32
    *,
    own_mask: np.ndarray,
    window: int,
) -> jax.Array:
    q, anchors, own_k, own_v = by_anchor
    batch, n, slots, num_kv_heads, group, head_dim = q.shape
    entry = jnp.arange(k.shape[1])
    is_seen = (entry >= anchors.first[..., None]) & (entry < anchors.stop[..., None])
    is_seen = jnp.broadcast_to(is_seen[:, :, None], (batch, n, slots, len(entry)))
    if window:
        of_slot = anchors.index[..., None] + jnp.arange(slots)
        is_seen &= of_slot[..., None] - entry < window
    by_head = q.transpose(0, 3, 4, 1, 2, 5).reshape(batch, num_kv_heads, group, n * slots, head_dim)
    out, lse = attend_seen(by_head, k, v, is_seen.reshape(batch, n * slots, -1), sinks)
    own = jnp.einsum("bnskgh,bnokh->bkgnso", q, own_k, preferred_element_type=jnp.float32)
    scores = [lse.reshape(batch, num_kv_heads, group, n, slots, 1), jnp.where(own_mask, own, NEG_INF)]
    shares = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(v.dtype)
    out = shares[..., :1] * out.reshape(batch, num_kv_heads, group, n, slots, -1)
    out += jnp.einsum("bkgnso,bnokh->bkgnsh", shares[..., 1:], own_v)
    return out.transpose(0, 3, 4, 1, 2, 5)
