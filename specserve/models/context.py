"""`Context` holds what every layer of one forward gets besides its input."""

import jax

from specserve.kernels.rows import Documents, Unrolled
from specserve.pytree import pytree

Tables = tuple[jax.Array, jax.Array]  # cos, sin: see `models.rope.rope_tables`
# [batch or 1, n, n] bool: who sees whom among the n new tokens, oneself always; packed rows say it by documents
Mask = jax.Array | Documents | Unrolled


@pytree
class Context:
    position_ids: jax.Array  # [batch, n] int32
    mask: Mask
    rope: Tables
    local_rope: Tables | None
