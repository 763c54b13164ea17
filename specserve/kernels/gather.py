"""The two gathers of a served step: rows of the state by slot, and entries of each sequence by node. The step knows
its indices to be in range. So these gathers leave out what NumPy's rules add, negative indices and a filling for those
out of range, which in a step of a few rows is most of a gather's work and of its compile time."""

from typing import Any

import jax
import jax.numpy as jnp


def take_rows(tree: Any, slots: jax.Array) -> Any:
    """Return a state's arrays with only the rows of these slots, [batch] int32. A slot past the last one, which pads a
    batch, gets some other slot's row, so its result must not be used."""
    return jax.tree.map(lambda x: x.at[slots].get(mode="clip", wrap_negative_indices=False), tree)


def take_each(x: jax.Array, index: jax.Array) -> jax.Array:  # [batch, n, ...], [batch, m] -> [batch, m, ...]
    """Return the entries at `index` of each sequence's n entries. Every index must be in [0, n)."""
    row = jnp.arange(x.shape[0], dtype=index.dtype)[:, None]
    return x.at[row, index].get(mode="clip", wrap_negative_indices=False)
