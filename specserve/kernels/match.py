"""The search for a sequence's last tokens in texts, on the device."""

import jax
import jax.numpy as jnp

from specserve.kernels import native


def longest_match(
    text: jax.Array,  # [batch or 1, row, length] int32, of which all rows are searched for each sequence; -1: nothing
    suffix: jax.Array,  # [batch, n] int32, the newest first, -2 where there is none
    ends: jax.Array,  # [batch or 1, row] int32: a match ends before this place of its row
) -> tuple[jax.Array, jax.Array]:  # two of [batch] int32
    """Find where the longest part of the suffix's newest tokens stands with a token after it, and of equally long ones
    the last. Return its length, 0 for none, and the index of its last token, rows counted one after another."""
    batch, n = suffix.shape
    size = text.shape[1] * text.shape[2]
    if native.is_serving():
        out = jax.ShapeDtypeStruct((batch,), jnp.int32)
        length, index = jax.ffi.ffi_call("specserve_longest_match", (out, out))(text, suffix, ends)
        return length, index
    # one copy with room before the first token: each comparison then reads a slice of it
    padded = jnp.pad(text, ((0, 0), (0, 0), (n - 1, 1)), constant_values=-1)

    def moved(by: int) -> jax.Array:  # the token so many places on, at every place
        return padded[..., n - 1 + by : n - 1 + by + text.shape[2]]

    agree = (jnp.arange(text.shape[2]) < ends[..., None]) & (moved(1) >= 0)
    lengths = jnp.zeros((batch, *text.shape[1:]), jnp.int32)
    for i in range(n):
        agree = agree & (moved(-i) == suffix[:, None, i : i + 1])
        lengths += agree.astype(jnp.int32)
    lengths = lengths.reshape(batch, size)
    best = jnp.max(lengths, axis=1)
    index = jnp.where(lengths == best[:, None], jnp.arange(size, dtype=jnp.int32), 0)
    return best, jnp.max(index, axis=1)
