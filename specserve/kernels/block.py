"""One block of attention: the keys that came with a call (`NewKeys`), and attention to keys whose scores are all in
memory at once (`attend_seen`)."""

from typing import Any

import jax
import jax.numpy as jnp

from specserve.pytree import pytree

NEG_INF = -1e30  # finite: a position that sees nothing must stay free of NaN


@pytree
class NewKeys:
    """The keys and values that came with a call, and which query sees which of them. In a kernel the fields are
    references to arrays of these shapes."""

    k: Any  # [batch, m, kv_head, head_dim], 8-bit numbers where they have scales
    v: Any  # [batch, m, kv_head, v_dim]; None: the values are the keys' first channels
    mask: Any  # [batch or 1, n, m] bool, True where query n sees key m
    k_scale: Any = None  # [batch, m, kv_head] float32; None: plain numbers
    v_scale: Any = None
    sinks: Any = None  # [kv_head, row] float32, logits without a value; a row is a query of a head, head by head


def attend_seen(
    q: jax.Array,  # [batch, kv_head, group, n, head_dim], scaled
    k: jax.Array,  # [batch, m, kv_head, head_dim]
    v: jax.Array,  # [batch, m, kv_head, v_dim]
    is_seen: jax.Array,  # [batch, n, m] bool
    sinks: jax.Array | None,  # [kv_head, group] float32
    *,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:  # [batch, kv_head, group, n, v_dim], and each softmax's log-sum-exp
    """Compute one block of attention, with all of its scores in memory at once. The log-sum-exp of a query that sees
    nothing is about `NEG_INF`, and its values are finite."""
    batch, num_kv_heads, group, n, head_dim = q.shape
    # the queries of all heads that share keys are rows of one product
    rows = q.reshape(batch, num_kv_heads, group * n, head_dim)
    scores = jnp.einsum("bkrh,bmkh->bkrm", rows, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, num_kv_heads, group, n, -1)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(is_seen[:, None, None], scores, NEG_INF)
    largest = jnp.max(scores, axis=-1)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks[:, :, None])
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.exp(scores - largest[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total += jnp.exp(sinks[:, :, None] - largest)
    weights = weights.astype(v.dtype).reshape(batch, num_kv_heads, group * n, -1)
    out = jnp.einsum("bkrm,bmkh->bkrh", weights, v).reshape(batch, num_kv_heads, group, n, -1)
    return out / total[..., None].astype(v.dtype), largest + jnp.log(total)
