"""The two gathers of a served step, whose indices the step knows to be sound: rows of the state by slot, and entries of
each sequence by node. They skip what NumPy's rules add to a gather, negative indices and a filling for those out of
range, which in a step of a few rows is most of its work and of its compile time."""

from typing import Any

import jax
import jax.numpy as jnp


def take_rows(tree: Any, slots: jax.Array) -> Any:
    """The rows of a state's arrays for these slots, [batch] int32; of padded ones anything."""
    return jax.tree.map(lambda x: x.at[slots].get(mode="clip", wrap_negative_indices=False), tree)


def take_each(x: jax.Array, index: jax.Array) -> jax.Array:  # [batch, n, ...], [batch, m] -> [batch, m, ...]
    """The m of each sequence's n entries that `index` names, all in [0, n)."""
    row = jnp.arange(x.shape[0], dtype=index.dtype)[:, None]
    return x.at[row, index].get(mode="clip", wrap_negative_indices=False)
