"""The door to weight products: `matmul`. A weight is a plain matrix, or the same matrix cut into blocks for CPUs.

XLA's CPU backend multiplies one row by a matrix at the speed of memory, but two to a dozen rows, which is what a
speculative step verifies, at half of it or less: its kernel strides through wide rows. Contiguous blocks of 64
columns stream: 4 rows through them cost what one row costs through the plain matrix (docs/log). One row, and dozens,
are served as well by the plain matrix, so plain decoding and training keep it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specserve.pytree import pytree

BLOCK_COLUMNS = 64  # measured: 48 and 96 columns are 10% slower, 32 and 128 60%, 16 sixteen times


@pytree
class BlockedMatrix:
    """A [d_in, d_out] matrix as contiguous column blocks."""

    blocks: jax.Array  # [d_out / BLOCK_COLUMNS, d_in, BLOCK_COLUMNS]

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[1], self.blocks.shape[0] * BLOCK_COLUMNS


Weight = jax.Array | BlockedMatrix


def block(weight: jax.Array) -> Weight:
    """Cut a [d_in, d_out] matrix into blocks; a width that is no multiple of the block stays whole."""
    d_in, d_out = weight.shape
    if d_out % BLOCK_COLUMNS:
        return weight
    # on the host: a device transpose would hold a third copy
    blocks = np.asarray(weight).reshape(d_in, -1, BLOCK_COLUMNS).transpose(1, 0, 2)
    return BlockedMatrix(jnp.asarray(np.ascontiguousarray(blocks)))


def matmul(x: jax.Array, weight: Weight) -> jax.Array:  # [..., d_in] @ [d_in, d_out] -> [..., d_out]
    """x @ weight, in x's dtype."""
    if isinstance(weight, BlockedMatrix):
        return _blocked(x, weight)
    return x @ weight


def matmul_float32(x: jax.Array, weight: Weight) -> jax.Array:
    """The same product with a float32 result, for logits."""
    if isinstance(weight, BlockedMatrix):
        return _blocked(x, weight).astype(jnp.float32)
    return jnp.matmul(x, weight, preferred_element_type=jnp.float32)


def _blocked(x: jax.Array, weight: BlockedMatrix) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    # the rows are repeated for each block so that the block dimension is a batch dimension on both sides; with a free
    # dimension there, XLA transposes the weights at every call
    repeated = jnp.broadcast_to(rows, (weight.blocks.shape[0], *rows.shape))
    product = jax.lax.dot_general(repeated, weight.blocks, (((2,), (1,)), ((0,), (0,))))  # [blocks, row, columns]
    return product.transpose(1, 0, 2).reshape(*x.shape[:-1], -1)
