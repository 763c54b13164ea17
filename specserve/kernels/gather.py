"""The gathers and the scatter of a served step: rows of the state by slot, and entries of each sequence by node. The
step knows the indices of its gathers to be in range. So these leave out what NumPy's rules add, negative indices and a
filling for those out of range, which in a step of a few rows is most of a gather's work and of its compile time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import native

NO_TOKEN = -1  # its embedding is zero, and native products leave out rows of zeros (`only`)


def take_rows(tree: Any, slots: jax.Array) -> Any:
    """Return a state's arrays with only the rows of these slots, [batch] int32. A slot past the last one, which pads a
    batch, gets some other slot's row, so its result must not be used."""
    return jax.tree.map(lambda x: x.at[slots].get(mode="clip", wrap_negative_indices=False), tree)


def take_each(x: jax.Array, index: jax.Array) -> jax.Array:  # [batch, n, ...], [batch, m] -> [batch, m, ...]
    """Return the entries at `index` of each sequence's n entries. Every index must be in [0, n)."""
    row = jnp.arange(x.shape[0], dtype=index.dtype)[:, None]
    return x.at[row, index].get(mode="clip", wrap_negative_indices=False)


def embed(table: jax.Array, token_ids: jax.Array, dtype: Any) -> jax.Array:  # [vocab, d], [...] -> [..., d]
    """Return the rows of tokens in `dtype`, of a table that may have fewer bits. XLA's CPU backend would widen all of a
    table in bfloat16 before it takes rows of it, once for each call of a program; of whole numbers it takes them."""
    if table.dtype == dtype or table.dtype != jnp.bfloat16:
        rows = table[token_ids].astype(dtype)
    else:
        rows = jax.lax.bitcast_convert_type(table, jnp.uint16)[token_ids]
        rows = jax.lax.bitcast_convert_type(rows, table.dtype).astype(dtype)
    return jnp.where((token_ids == NO_TOKEN)[..., None], 0, rows) if native.is_serving() else rows


def only(is_live: jax.Array, token_ids: jax.Array) -> jax.Array:  # [batch, n] each -> [batch, n] int32
    """Return the tokens with NO_TOKEN for those that only fill a batch, a chunk or a tree, where native kernels
    multiply: so these take no time."""
    return jnp.where(is_live, token_ids, NO_TOKEN) if native.is_serving() else token_ids


def put_each(
    x: jax.Array,  # [n, m, size], or [n, size]
    row: jax.Array,  # [batch, k] int32
    place: jax.Array | None,  # [batch, k] int32; None where a row is one vector
    new: jax.Array,  # [batch, k, size]
) -> jax.Array:
    """Return `x` with each new vector at its place of its row. Those that are out of range are dropped, and no two may
    have one place. XLA's scatter on CPUs is a loop of several operations for each vector."""
    if not native.serves(x, new):
        return x.at[row if place is None else (row, place)].set(new, mode="drop")
    place = jnp.zeros_like(row) if place is None else place
    order = jnp.broadcast_to(jnp.arange(row.shape[1], dtype=row.dtype), row.shape)
    result = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    write = jax.ffi.ffi_call("specserve_write", result, input_output_aliases={3: 0})
    return write(order, row, place, x, new, num_keys=np.int64(0))[0]
