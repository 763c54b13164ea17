"""What every layer of one forward sees besides its input."""

import jax

from specserve.pytree import pytree

Tables = tuple[jax.Array, jax.Array]  # cos, sin: see `models.rope.rope_tables`


@pytree
class Context:
    position_ids: jax.Array  # [batch, n] int32
    mask: jax.Array  # [batch or 1, n, n] bool: who sees whom among the n new tokens, oneself always
    rope: Tables
    local_rope: Tables | None
