"""The door to weight products: `matmul`. A weight is a plain matrix, the same matrix cut into blocks for CPUs, or a
matrix of 8-bit values with scales.

XLA's CPU backend multiplies one row by a matrix at the speed of memory, but two to a dozen rows, which is what a
speculative step verifies, at half of it or less: its kernel strides through wide rows. Contiguous blocks of 64
columns stream: 4 rows through them cost what one row costs through the plain matrix (docs/log). One row, and dozens,
are served as well by the plain matrix, so plain decoding and training keep it.

Quantised matrices are multiplied in x's dtype, which holds 8-bit values exactly, and scales are applied to the float32
product; only where scales are by block and rows are many is the plain matrix made first.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specserve.pytree import pytree, static

BLOCK_COLUMNS = 64  # measured: 48 and 96 columns are 10% slower, 32 and 128 60%, 16 sixteen times


@pytree
class BlockedMatrix:
    """A [d_in, d_out] matrix as contiguous column blocks."""

    blocks: jax.Array  # [d_out / BLOCK_COLUMNS, d_in, BLOCK_COLUMNS]

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[1], self.blocks.shape[0] * BLOCK_COLUMNS


@pytree
class QuantizedMatrix:
    """A [d_in, d_out] matrix, or one for each expert: values times scales. Each output has a scale for every `block`
    inputs, so that matrices are put side by side, and experts or outputs picked, leaf by leaf."""

    values: jax.Array  # [..., d_in, d_out] int8 or float8
    scale: jax.Array  # [..., d_in / block rounded up, d_out] float32
    block: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> "QuantizedMatrix":
        """Some experts, or some outputs; inputs stay together."""
        return QuantizedMatrix(self.values[index], self.scale[index], self.block)


Weight = jax.Array | BlockedMatrix | QuantizedMatrix
EightBits = Literal["int8", "fp8"]


def block(weight: jax.Array) -> Weight:
    """Cut a [d_in, d_out] matrix into blocks; a width that is no multiple of the block stays whole."""
    d_in, d_out = weight.shape
    if d_out % BLOCK_COLUMNS:
        return weight
    # on the host: a device transpose would hold a third copy
    blocks = np.asarray(weight).reshape(d_in, -1, BLOCK_COLUMNS).transpose(1, 0, 2)
    return BlockedMatrix(jnp.asarray(np.ascontiguousarray(blocks)))


def quantize(weight: jax.Array, to: EightBits) -> QuantizedMatrix:
    """Each output on its own and symmetrically: the largest magnitude becomes the largest value. An element is off by
    half a step at most, 1/254 of its output's largest magnitude (int8), or by 1/16 of itself (fp8, e4m3; below 1/28,672
    of the largest magnitude: by half a subnormal step)."""
    dtype, largest = (jnp.int8, 127.0) if to == "int8" else (jnp.float8_e4m3fn, 448.0)
    weight = weight.astype(jnp.float32)
    magnitude = jnp.abs(weight).max(axis=-2, keepdims=True)
    scale = jnp.where(magnitude > 0, magnitude / largest, 1.0)
    values = weight / scale
    if to == "int8":
        values = jnp.round(values)
    return QuantizedMatrix(values.astype(dtype), scale, weight.shape[-2])


def dequantize(weight: jax.Array | QuantizedMatrix, dtype: jnp.dtype) -> jax.Array:
    """The plain matrix, or matrices, for products that `matmul` does not know (experts, absorbed projections)."""
    if not isinstance(weight, QuantizedMatrix):
        return weight
    scale = weight.scale
    if scale.shape[-2] > 1:
        scale = jnp.repeat(scale, weight.block, axis=-2)[..., : weight.shape[-2], :]
    return (weight.values.astype(jnp.float32) * scale).astype(dtype)


def matmul(x: jax.Array, weight: Weight) -> jax.Array:  # [..., d_in] @ [d_in, d_out] -> [..., d_out]
    """x @ weight, in x's dtype. Of experts' matrices each has rows of its own: [expert, ..., d_in] @ [expert, d_in,
    d_out]."""
    if isinstance(weight, BlockedMatrix):
        return _blocked(x, weight)
    if isinstance(weight, QuantizedMatrix):
        return _quantized(x, weight).astype(x.dtype)
    return x @ weight


def matmul_float32(x: jax.Array, weight: Weight) -> jax.Array:
    """The same product with a float32 result, for logits."""
    if isinstance(weight, BlockedMatrix):
        return _blocked(x, weight).astype(jnp.float32)
    if isinstance(weight, QuantizedMatrix):
        return _quantized(x, weight)
    return jnp.matmul(x, weight, preferred_element_type=jnp.float32)


def _quantized(x: jax.Array, weight: QuantizedMatrix) -> jax.Array:  # float32
    *stack, d_in, d_out = weight.shape
    num_blocks = weight.scale.shape[-2]
    rows = x.reshape(*stack, -1, d_in)
    num_rows = rows.shape[-2]
    if num_blocks == 1:
        values = weight.values.astype(x.dtype)
        y = jnp.matmul(rows, values, preferred_element_type=jnp.float32) * weight.scale
    elif num_rows >= weight.block or d_in % weight.block:  # products by block would be larger than the plain matrix
        y = jnp.matmul(rows, dequantize(weight, x.dtype), preferred_element_type=jnp.float32)
    else:
        by_block = rows.reshape(*stack, num_rows, num_blocks, weight.block)
        values = weight.values.reshape(*stack, num_blocks, weight.block, d_out).astype(x.dtype)
        products = jnp.einsum("...rbi,...bio->...rbo", by_block, values, preferred_element_type=jnp.float32)
        y = jnp.einsum("...rbo,...bo->...ro", products, weight.scale)
    return y.reshape(*x.shape[:-1], d_out)


def _blocked(x: jax.Array, weight: BlockedMatrix) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    # the rows are repeated for each block so that the block dimension is a batch dimension on both sides; with a free
    # dimension there, XLA transposes the weights at every call
    repeated = jnp.broadcast_to(rows, (weight.blocks.shape[0], *rows.shape))
    product = jax.lax.dot_general(repeated, weight.blocks, (((2,), (1,)), ((0,), (0,))))  # [blocks, row, columns]
    return product.transpose(1, 0, 2).reshape(*x.shape[:-1], -1)
