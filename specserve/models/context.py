"""`Context` holds what every layer of one forward gets besides its input."""

from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.rows import Documents, Unrolled
from specserve.pytree import pytree

Tables = tuple[jax.Array, jax.Array]  # cos, sin: see `models.rope.rope_tables`
# [batch or 1, n, m] bool: which of the m new tokens each of the last n sees, which run now. Each sees itself. Packed
# rows give documents instead.
Mask = jax.Array | Documents | Unrolled


@pytree
class Context:
    position_ids: jax.Array  # [batch, m] int32, of the new tokens
    mask: Mask
    rope: Tables
    local_rope: Tables | None
    earlier: Any = None  # the entries that the first m - n left when they ran, [batch, m - n, ...]; None: all run now


def join(earlier: Any, own: Any) -> Any:
    """Return what all new tokens leave, [batch, m, ...], where those that run now leave `own`, [batch, n, ...]."""
    if earlier is None:
        return own
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), earlier, own)
