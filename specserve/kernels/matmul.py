"""Products with weights: `matmul`. A weight is a plain matrix, a matrix of 8-bit values with scales, or, for serving on
a CPU, a matrix packed for the native kernel or cut into blocks for XLA.

The native kernel (`kernels.native`) streams the panels of a packed matrix at the speed of memory, whatever the number
of rows. It widens bfloat16 and 8-bit values in registers and adds in float32, in an order that does not depend on the
other rows of the call. So a token's row is the same to the bit in a plain step, in a tree and in a prompt.

Where the kernel was not built, XLA multiplies. Its own kernel strides through the rows of a wide matrix. Contiguous
blocks of columns may be faster for few rows, by a factor that differs between processors, so their width is timed where
they run (`serve.programs.layouts`).

Quantised matrices are multiplied in x's dtype, which holds 8-bit values exactly, and scales are applied to the float32
product. Only where scales are by block and rows are many is the plain matrix made first.
"""

import math
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specserve.kernels import native
from specserve.kernels.large_pages import empty_in_large_pages
from specserve.mesh import is_on_one_device, program_platform
from specserve.pytree import pytree, static


@pytree
class BlockedMatrix:
    """A [d_in, d_out] matrix, stored as contiguous blocks of columns."""

    blocks: jax.Array  # [block, d_in, columns]

    @property
    def shape(self) -> tuple[int, int]:
        num_blocks, d_in, columns = self.blocks.shape
        return d_in, num_blocks * columns


@pytree
class PackedMatrix:
    """A [d_in, d_out] matrix, or one for each expert, in the native kernel's layout. Outputs are grouped into panels,
    as many to a panel as the registers hold, and each panel is contiguous (`native/kernels.h` has the order within
    one)."""

    panels: jax.Array  # [..., panel, d_in, width] float32, bfloat16 or int8; d_in is filled up where tiles multiply
    scale: jax.Array | None  # [..., d_in / block rounded up, d_out] float32
    d_in: int = static()
    d_out: int = static()
    block: int = static(default=0)  # inputs that share a scale; 0: all of them

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.panels.shape[:-3], self.d_in, self.d_out


@pytree
class QuantizedMatrix:
    """A [d_in, d_out] matrix, or one for each expert, stored as values times scales. Each output has a scale for every
    `block` inputs. So matrices are joined side by side, and experts or outputs picked, leaf by leaf."""

    values: jax.Array  # [..., d_in, d_out] int8 or float8
    scale: jax.Array  # [..., d_in / block rounded up, d_out] float32
    block: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> "QuantizedMatrix":
        """Pick some experts, or some outputs. An index into the inputs would tear the blocks of scales."""
        return QuantizedMatrix(self.values[index], self.scale[index], self.block)


MOST_BYTES = 2**16  # of int8 weights times digits from -128 to 127 (native/digits_isa.h): half of what 32 bits can hold
Weight = jax.Array | BlockedMatrix | PackedMatrix | QuantizedMatrix
EightBits = Literal["int8", "fp8"]


def block(weight: jax.Array, columns: int) -> Weight:
    """Cut a [d_in, d_out] matrix into blocks of `columns`. A matrix whose width is no multiple of that stays whole."""
    d_in, d_out = weight.shape
    if d_out % columns:
        return weight
    # on the host: a device transpose would hold a third copy
    blocks = np.asarray(weight).reshape(d_in, -1, columns).transpose(1, 0, 2)
    return BlockedMatrix(_in_large_pages(blocks, blocks.shape))


def pack(weight: jax.Array | QuantizedMatrix) -> PackedMatrix:
    """Lay a matrix [..., d_in, d_out] out for the native kernel without changing a value. Float32 values that are all
    bfloat16 numbers, as those of published checkpoints are, are kept in bfloat16, which halves what a product reads.
    Float8 values of quantised matrices are kept in bfloat16 too, and so are int8 ones of more inputs to a scale than
    sums of integers can hold."""
    scale, block_size = None, 0
    if isinstance(weight, QuantizedMatrix):
        values, scale, block_size = np.asarray(weight.values), weight.scale, weight.block
        if values.dtype != np.int8 or min(block_size, values.shape[-2]) > MOST_BYTES:
            values = values.astype(ml_dtypes.bfloat16)
    else:
        values = np.asarray(weight)
        if values.dtype == np.float32 and not _lower_halves(values).any():
            values = values.astype(ml_dtypes.bfloat16)
    *stack, d_in, d_out = values.shape
    width, tile = native.panel_width(values.dtype.itemsize), native.tile_inputs(values.dtype.itemsize)
    num_panels = -(-d_out // width)
    padded = _fill_up(values, -1, num_panels * width)
    lanes = 4 // values.dtype.itemsize  # numbers that share 32 bits
    if tile:
        size = block_size or d_in
        num_blocks = -(-d_in // size)
        blocks = _fill_up(padded, -2, num_blocks * size)
        blocks = blocks.reshape(*stack, num_blocks, size, num_panels * width)
        blocks = _fill_up(blocks, -2, -(-blocks.shape[-2] // tile) * tile)
        inputs = num_blocks * blocks.shape[-2]
        panels = blocks.reshape(*stack, inputs // tile, tile // lanes, lanes, num_panels, width // 16, 16)
        # [..., panel, step, tile, input / lanes, output, lanes]
        panels = np.moveaxis(panels, (-3, -6, -2, -5, -1, -4), (-6, -5, -4, -3, -2, -1))
    else:
        inputs = d_in
        panels = padded.reshape(*stack, d_in, num_panels, lanes, width // lanes)
        panels = np.moveaxis(np.moveaxis(panels, -3, -4), -2, -1)  # [..., panel, d_in, width / lanes, lanes]
    laid_out = _in_large_pages(panels, (*stack, num_panels, inputs, width))
    return PackedMatrix(laid_out, scale, d_in, d_out, block_size)


def _fill_up(values: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The values with zeros after them along an axis, up to this size."""
    if size == values.shape[axis]:
        return values
    padding = [(0, 0)] * values.ndim
    padding[axis] = 0, size - values.shape[axis]
    return np.pad(values, padding)


def _in_large_pages(values: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    """A view's values, laid out one after another, as an array of `shape`."""
    laid_out = empty_in_large_pages(values.shape, values.dtype)
    np.copyto(laid_out, values)
    return jax.device_put(laid_out.reshape(shape), may_alias=True)  # where it lies


def _lower_halves(values: np.ndarray) -> np.ndarray:
    """The lower 16 bits of float32 values, which bfloat16 does not have, as a view without a copy."""
    halves = np.ascontiguousarray(values).view(np.uint16)
    return halves[..., int(sys.byteorder == "big") :: 2]


def quantize(weight: jax.Array, to: EightBits) -> QuantizedMatrix:
    """Round a matrix to 8 bits, symmetrically, with a scale for each output: its largest magnitude becomes the largest
    value.

    In int8 an element is off by half a step at most, 1/254 of its output's largest magnitude. In fp8 (e4m3) it is off
    by at most 1/16 of itself, or by half a subnormal step below 1/28,672 of the largest magnitude.
    """
    dtype, largest = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}[to]
    weight = weight.astype(jnp.float32)
    magnitude = jnp.abs(weight).max(axis=-2, keepdims=True)
    scale = jnp.where(magnitude > 0, magnitude / largest, 1.0)
    values = weight / scale
    if to == "int8":
        values = jnp.round(values)
    return QuantizedMatrix(values.astype(dtype), scale, weight.shape[-2])


def dequantize(weight: jax.Array | QuantizedMatrix, dtype: jnp.dtype) -> jax.Array:
    """Restore the plain matrix, or matrices, for products that `matmul` does not know (experts, absorbed
    projections)."""
    if not isinstance(weight, QuantizedMatrix):
        return weight
    scale = weight.scale
    if scale.shape[-2] > 1:
        scale = jnp.repeat(scale, weight.block, axis=-2)[..., : weight.shape[-2], :]
    return (weight.values.astype(jnp.float32) * scale).astype(dtype)


def matmul(
    x: jax.Array, weight: Weight, add: jax.Array | None = None
) -> jax.Array:  # [..., d_in] @ [d_in, d_out] -> [..., d_out]
    """Compute x @ weight in x's dtype, and add it to `add` [..., d_out] where that is given. With a matrix for each
    expert, each has rows of its own: [expert, ..., d_in] @ [expert, d_in, d_out]."""
    if add is None:
        return _product(x, weight, x.dtype)
    if isinstance(weight, PackedMatrix) and len(weight.shape) == 2 and native.serves(x, add):
        return _packed(x, weight, add)
    return add + _product(x, weight, x.dtype)


def matmul_float32(x: jax.Array, weight: Weight) -> jax.Array:
    """Compute x @ weight with a float32 result, for logits."""
    if isinstance(weight, jax.Array) and weight.ndim == 2 and is_on_one_device() and program_platform() == "cpu":
        return _logits(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[-1])
    return _product(x, weight, jnp.dtype(jnp.float32))


@jax.custom_vjp
def _logits(x: jax.Array, weight: jax.Array) -> jax.Array:  # [row, d_in] @ [d_in, d_out] -> [row, d_out] float32
    """The product on a CPU, whose gradient for the weight takes half of the time that XLA's takes where rows of d_out
    numbers are a multiple of 16 KB apart: XLA reads x by columns there, and here x is transposed before."""
    return jnp.matmul(x, weight, preferred_element_type=jnp.float32)


def _logits_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    return _logits(x, weight), (x, weight)


def _logits_backward(factors: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = factors
    columns = jax.lax.optimization_barrier(x.T)  # else XLA multiplies by x as it lies
    of_x = jax.lax.dot(gradient, weight.T, preferred_element_type=x.dtype)
    return of_x, jax.lax.dot(columns, gradient, preferred_element_type=weight.dtype)


_logits.defvjp(_logits_forward, _logits_backward)


def _product(x: jax.Array, weight: Weight, dtype: jnp.dtype) -> jax.Array:
    if isinstance(weight, PackedMatrix):
        return _packed(x, weight).astype(dtype)
    if isinstance(weight, BlockedMatrix):
        return _blocked(x, weight).astype(dtype)
    if isinstance(weight, QuantizedMatrix):
        return _quantized(x, weight).astype(dtype)
    if x.ndim > 2 and weight.ndim == 2 and is_on_one_device():
        # in training, the gradient of more dimensions than rows and columns has XLA's CPU backend transpose what came
        # before it; on several devices the rows may be cut along more than one of the dimensions
        rows = jnp.matmul(x.reshape(-1, x.shape[-1]), weight, preferred_element_type=dtype)
        return rows.reshape(*x.shape[:-1], weight.shape[-1])
    return jnp.matmul(x, weight, preferred_element_type=dtype)


def matmul_by_expert(x: jax.Array, weight: PackedMatrix, expert_ids: jax.Array) -> jax.Array:
    """Multiply each row by the matrix of its own expert, in x's dtype: x [row, d_in], weight [expert, d_in, d_out]
    and expert_ids [row] int32 -> [row, d_out]. Each matrix that any row needs is read once. The result is 0 where the
    id is not that of an expert."""
    return _multiply_packed(x, weight, expert_ids).astype(x.dtype)


def _packed(x: jax.Array, weight: PackedMatrix, add: jax.Array | None = None) -> jax.Array:  # float32
    expert_ids = jnp.zeros(0, jnp.int32)
    if len(weight.shape) == 3:
        rows_of_each = math.prod(x.shape[1:-1])
        expert_ids = jnp.repeat(jnp.arange(weight.shape[0], dtype=jnp.int32), rows_of_each)
    rows = x.reshape(-1, x.shape[-1])
    return _multiply_packed(rows, weight, expert_ids, add).reshape(*x.shape[:-1], weight.d_out)


def _multiply_packed(
    x: jax.Array, weight: PackedMatrix, expert_ids: jax.Array, add: jax.Array | None = None
) -> jax.Array:  # [row, d_out] float32
    panels = weight.panels.reshape(-1, *weight.panels.shape[-3:])
    scale, rest = native.operand(weight.scale), native.operand(add)
    shape, block = (x.shape[0], weight.d_out), np.int64(weight.block)
    return native.call("specserve_matmul", shape, x.astype(jnp.float32), expert_ids, panels, scale, rest, block=block)


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
