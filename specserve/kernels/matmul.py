"""Products with weights: `matmul`. A weight is a plain matrix, a matrix of 8-bit values with scales, for serving on
a CPU a matrix packed for the native kernel or cut into blocks for XLA, or, for serving on a GPU or a TPU, one of 4-bit
numbers (`nibbles_gpu`, `nibbles_tpu`).

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
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

from specserve.kernels import native, nibbles
from specserve.kernels.large_pages import copied
from specserve.kernels.nibbles import NibbleMatrix, WordMatrix
from specserve.kernels.panels import by_panel, four_bits, in_two_levels, lay_out
from specserve.mesh import fitting_partition, is_on_one_device, program_platform, traced_mesh
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

    panels: jax.Array  # [..., panel, d_in, width], of 4 bits two inputs in a byte; d_in is filled up to whole tiles
    # [..., panel, d_in / block rounded up, width] float16 or float32, or uint8 of two levels (`panels.in_two_levels`)
    scale: jax.Array | None
    offset: jax.Array | None  # like scale
    format: native.Format = static()
    d_in: int = static()
    d_out: int = static()
    block: int = static(default=0)  # inputs that share a scale; 0: all of them

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.panels.shape[:-3], self.d_in, self.d_out


@pytree
class QuantizedMatrix:
    """A [d_in, d_out] matrix, or one for each expert, stored as values times scales, perhaps plus offsets. Each output
    has a scale, and an offset, for every `block` inputs. So matrices are joined side by side, and experts or outputs
    picked, leaf by leaf."""

    values: jax.Array  # [..., d_in, d_out] int8 or float8
    scale: jax.Array  # [..., d_in / block rounded up, d_out] float32
    block: int = static()
    offset: jax.Array | None = None  # like scale

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> "QuantizedMatrix":
        """Pick some experts, or some outputs. An index into the inputs would tear the blocks of scales."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    __iter__ = None  # Python would take `__getitem__`, and JAX knows no index that is too large


@pytree
class AdaptedMatrix:
    """A [d_in, d_out] matrix beside pairs of narrow ones, of which each row has one or none: x @ base + (x @ a) @ b
    (LoRA, Hu et al. 2021, arXiv 2106.09685)."""

    base: "Weight"
    a: "jax.Array | PackedMatrix"  # [pair, d_in, rank]
    b: "jax.Array | PackedMatrix"  # [pair, rank, d_out]
    pair_ids: jax.Array  # int32, shaped as x without its last axis: the pair of each row, or -1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape


MOST_BYTES = 2**16  # of int8 weights times digits from -128 to 127 (native/digits_isa.h): half of what 32 bits can hold
Weight = jax.Array | AdaptedMatrix | BlockedMatrix | NibbleMatrix | PackedMatrix | QuantizedMatrix | WordMatrix
Rounded = Literal["int8", "fp8", "int4"]  # how weights may be rounded when they are loaded
INT4_BLOCK = 32  # inputs that share a scale
_FORMATS: dict[int, native.Format] = {4: "float32", 2: "bfloat16", 1: "int8"}  # by a number's bytes


def block(weight: jax.Array, columns: int) -> Weight:
    """Cut a [d_in, d_out] matrix into blocks of `columns`. A matrix whose width is no multiple of that stays whole."""
    d_in, d_out = weight.shape
    if d_out % columns:
        return weight
    # on the host: a device transpose would hold a third copy
    blocks = np.asarray(weight).reshape(d_in, -1, columns).transpose(1, 0, 2)
    return BlockedMatrix(_in_large_pages(blocks, blocks.shape))


def pack(weight: jax.Array | np.ndarray | QuantizedMatrix, *, narrows: bool = True) -> PackedMatrix:
    """Lay a matrix [..., d_in, d_out] out for the native kernel without changing a value. Float32 values that are all
    bfloat16 numbers, as those of published checkpoints are, are kept in bfloat16, which halves what a product reads;
    unless it `narrows`, they stay as they are, so that the form does not depend on them.
    Int8 values of quantised matrices that fit in 4 bits, block by block, are kept in 4 bits. Float8 ones are kept in
    bfloat16, and so are int8 ones of more inputs to a scale than sums of integers can hold."""
    d_in, d_out = weight.shape[-2:]
    scale = offset = coded = None
    block = 0
    if isinstance(weight, QuantizedMatrix):
        values, scale, block = np.asarray(weight.values), np.asarray(weight.scale), weight.block
        offset = None if weight.offset is None else np.asarray(weight.offset)
        if values.dtype != np.int8 or min(block, d_in) > MOST_BYTES:
            values = values.astype(ml_dtypes.bfloat16)
        elif coded := four_bits(values, block):
            values = coded.codes
            if coded.shift is not None:
                offset = coded.shift * scale + (0 if offset is None else offset)
    else:
        values = narrowed(np.asarray(weight)) if narrows else np.asarray(weight)
    of = coded.format if coded else _FORMATS[values.dtype.itemsize]
    made = lay_out(values, of, block or d_in)
    scale, offset = _in_few_bytes([scale, offset], made.width)
    return PackedMatrix(_in_large_pages(made.panels, made.shape), scale, offset, of, d_in, d_out, block)


def in_nibbles(weight: jax.Array | QuantizedMatrix) -> Weight:
    """Return the same matrix in 4 bits for products on a GPU or a TPU, where it is quantised, its numbers fit in 4 bits
    block by block, and the kernel can take its shape; else as it is."""
    if not isinstance(weight, QuantizedMatrix) or len(weight.shape) != 2:
        return weight
    return nibbles.pack(weight.values, weight.scale, weight.offset, weight.block, program_platform()) or weight


def experts_in_nibbles(weights: Sequence[Any]) -> Sequence[Any]:
    """Return the same for the matrices of a layer's experts [expert, d_in, d_out], all of them or none: each kernel for
    experts takes all in one form."""
    made: list[NibbleMatrix | WordMatrix] = []
    for weight in reversed(weights):  # the last one is the most likely not to fit
        packed = None
        if isinstance(weight, QuantizedMatrix):
            packed = nibbles.pack(weight.values, weight.scale, weight.offset, weight.block, program_platform())
        if packed is None:
            return weights
        made.insert(0, packed)
    return made


def _in_few_bytes(of_blocks: list[np.ndarray | None], width: int) -> list[jax.Array | None]:
    """Scales and offsets panel by panel: in float16 where that holds all of them exactly, as of most files, or else in
    two levels where that is what they are. Of 32 numbers of 4 bits a float32 scale is a fifth of what is read."""
    present = [each for each in of_blocks if each is not None]
    with np.errstate(over="ignore"):
        is_exact = all((each.astype(np.float16).astype(np.float32) == each).all() for each in present)
    if not is_exact:
        found = [in_two_levels(each, width) for each in present]
        if all(each is not None for each in found):
            return [None if each is None else jax.device_put(found.pop(0)) for each in of_blocks]
    dtype = np.float16 if is_exact else np.float32
    return [each if each is None else jax.device_put(by_panel(each.astype(dtype), width)) for each in of_blocks]


def _in_large_pages(values: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    """A view's values, laid out one after another, as an array of `shape`."""
    return jax.device_put(copied(values).reshape(shape), may_alias=True)  # where it lies


def narrowed(values: np.ndarray) -> np.ndarray:
    """Return float32 values in bfloat16 where that holds all of them exactly; else, and others, as they are."""
    if values.dtype == np.float32 and not _lower_halves(values).any():
        return values.astype(ml_dtypes.bfloat16)
    return values


def _lower_halves(values: np.ndarray) -> np.ndarray:
    """The lower 16 bits of float32 values, which bfloat16 does not have, as a view without a copy."""
    halves = np.ascontiguousarray(values).view(np.uint16)
    return halves[..., int(sys.byteorder == "big") :: 2]


def quantize(weight: jax.Array, to: Rounded) -> QuantizedMatrix:
    """Round a matrix [..., d_in, d_out] to 8 bits or 4, symmetrically.

    In 8 bits each output has one scale: its largest magnitude becomes the largest value. In int8 an element is off by
    half a step at most, 1/254 of its output's largest magnitude. In fp8 (e4m3) it is off by at most 1/16 of itself, or
    by half a subnormal step below 1/28,672 of the largest magnitude.

    In int4 each output has a scale and an offset for every 32 inputs (`INT4_BLOCK`), which spread 16 values over what
    lies between the smallest and the largest of them, as llama.cpp's Q4_1 does. An element is off by half a step at
    most, 1/30 of that range, beside what rounding both to float16 moves.
    """
    weight = weight.astype(jnp.float32)
    if to == "int4":
        return _rounded_to_four(weight)
    dtype, largest = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}[to]
    magnitude = jnp.abs(weight).max(axis=-2, keepdims=True)
    scale = jnp.where(magnitude > 0, magnitude / largest, 1.0)
    values = weight / scale
    if to == "int8":
        values = jnp.round(values)
    return QuantizedMatrix(values.astype(dtype), scale, weight.shape[-2])


def _rounded_to_four(weight: jax.Array) -> QuantizedMatrix:
    *stack, d_in, d_out = weight.shape
    padded = jnp.pad(weight, [(0, 0)] * len(stack) + [(0, -d_in % INT4_BLOCK), (0, 0)], mode="edge")
    blocks = padded.reshape(*stack, -1, INT4_BLOCK, d_out)

    def half(x: jax.Array) -> jax.Array:  # of which products read half as many bytes as of float32
        return x.astype(jnp.float16).astype(jnp.float32)

    offset = half(blocks.min(axis=-2, keepdims=True))
    scale = half((blocks.max(axis=-2, keepdims=True) - offset) / 15)
    scale = jnp.where(scale > 0, scale, 1.0)
    values = jnp.clip(jnp.round((blocks - offset) / scale), 0, 15).astype(jnp.int8)
    values = values.reshape(padded.shape)[..., :d_in, :]
    return QuantizedMatrix(values, scale[..., 0, :], INT4_BLOCK, offset[..., 0, :])


def dequantize(weight: jax.Array | NibbleMatrix | QuantizedMatrix | WordMatrix, dtype: jnp.dtype) -> jax.Array:
    """Restore the plain matrix, or matrices, for products that `matmul` does not know (experts, absorbed
    projections)."""
    if isinstance(weight, NibbleMatrix | WordMatrix):
        return nibbles.restore(weight).astype(dtype)
    if not isinstance(weight, QuantizedMatrix):
        return weight

    def of_inputs(of_blocks: jax.Array) -> jax.Array:
        if of_blocks.shape[-2] == 1:
            return of_blocks
        return jnp.repeat(of_blocks, weight.block, axis=-2)[..., : weight.shape[-2], :]

    plain = weight.values.astype(jnp.float32) * of_inputs(weight.scale)
    return (plain if weight.offset is None else plain + of_inputs(weight.offset)).astype(dtype)


def matmul(
    x: jax.Array, weight: Weight, add: jax.Array | None = None
) -> jax.Array:  # [..., d_in] @ [d_in, d_out] -> [..., d_out]
    """Compute x @ weight in x's dtype, and add it to `add` [..., d_out] where that is given. With a matrix for each
    expert, each has rows of its own: [expert, ..., d_in] @ [expert, d_in, d_out]."""
    if isinstance(weight, AdaptedMatrix):
        return _adapted(x, weight, add)
    if add is None:
        return _product(x, weight, x.dtype)
    if isinstance(weight, PackedMatrix) and len(weight.shape) == 2 and native.serves(x, add):
        return _packed(x, weight, add)
    return add + _product(x, weight, x.dtype)


def _adapted(x: jax.Array, weight: AdaptedMatrix, add: jax.Array | None) -> jax.Array:
    """Compute x @ weight and add it to `add`; a row without a pair gets the product of the base, to the bit. On CPUs
    the native kernel multiplies each row by its own pair, in an order that depends on no other row, and reads no pair
    that no row has. Elsewhere all pairs are multiplied by as one matrix, of whose results each row keeps its own."""
    y, pair_ids = matmul(x, weight.base, add), weight.pair_ids
    if isinstance(weight.a, PackedMatrix):
        assert isinstance(weight.b, PackedMatrix)
        ids = pair_ids.reshape(-1)
        narrow = matmul_by_expert(x.reshape(-1, x.shape[-1]), weight.a, ids)
        change = matmul_by_expert(narrow, weight.b, ids).reshape(y.shape)
    else:
        assert not isinstance(weight.b, PackedMatrix)
        narrow = jnp.einsum("...i,pir->...pr", x, weight.a)
        is_own = pair_ids[..., None] == jnp.arange(len(weight.a))
        change = jnp.einsum("...pr,pro->...o", jnp.where(is_own[..., None], narrow, 0), weight.b)
    return jnp.where((pair_ids >= 0)[..., None], y + change, y)


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
    assert not isinstance(weight, AdaptedMatrix), "`matmul` alone knows pairs"
    if isinstance(weight, PackedMatrix):
        return _packed(x, weight).astype(dtype)
    if isinstance(weight, BlockedMatrix):
        return _blocked(x, weight).astype(dtype)
    if isinstance(weight, NibbleMatrix | WordMatrix):
        return _on_each_device(x, weight).astype(dtype)
    if isinstance(weight, QuantizedMatrix):
        return _quantized(x, weight).astype(dtype)
    if x.ndim > 2 and weight.ndim == 2 and is_on_one_device():
        # in training, the gradient of more dimensions than rows and columns has XLA's CPU backend transpose what came
        # before it; on several devices the rows may be cut along more than one of the dimensions
        rows = jnp.matmul(x.reshape(-1, x.shape[-1]), weight, preferred_element_type=dtype)
        return rows.reshape(*x.shape[:-1], weight.shape[-1])
    return jnp.matmul(x, weight, preferred_element_type=dtype)


def _on_each_device(x: jax.Array, weight: NibbleMatrix | WordMatrix) -> jax.Array:  # float32
    """The product in 4 bits, on a mesh that of each device's own rows with its own part of the matrix, since the
    compiler cannot cut a kernel."""

    def multiply(x: jax.Array, weight: NibbleMatrix | WordMatrix) -> jax.Array:
        return _in_four_bits(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)

    mesh = traced_mesh()
    if mesh is None or is_on_one_device():
        return multiply(x, weight)
    inputs, outputs = weight.cut
    rows = fitting_partition(mesh, ("batch", *[None] * (x.ndim - 1)), x.shape)[:-1]

    def own(x: jax.Array, weight: NibbleMatrix | WordMatrix) -> jax.Array:
        y = multiply(x, weight)
        return jax.lax.psum(y, inputs) if inputs else y

    structure = jax.tree.structure(weight)
    of_weight = jax.tree.unflatten(structure, [PartitionSpec(*axes) for axes in weight.axes((), inputs, outputs)])
    in_specs = PartitionSpec(*rows, inputs), of_weight
    return jax.shard_map(own, in_specs=in_specs, out_specs=PartitionSpec(*rows, outputs), check_vma=False)(x, weight)


def _in_four_bits(
    x: jax.Array, weight: NibbleMatrix | WordMatrix, expert_of_block: jax.Array | None = None
) -> jax.Array:  # float32
    """The product by the kernel of the platform whose form the matrix has; elsewhere it is interpreted."""
    if isinstance(weight, NibbleMatrix):
        from specserve.kernels import nibbles_gpu  # Pallas takes a while to import

        return nibbles_gpu.multiply(x, weight, expert_of_block, interpret=program_platform() != "gpu")
    from specserve.kernels import nibbles_tpu

    return nibbles_tpu.multiply(x, weight, expert_of_block, interpret=program_platform() != "tpu")


def matmul_by_block(x: jax.Array, weight: NibbleMatrix | WordMatrix, expert_of_block: jax.Array) -> jax.Array:
    """Multiply blocks of rows by the matrix of their expert: x [block * size, d_in], weight [expert, d_in, d_out] and
    expert_of_block [block] int32, ascending, -> [block * size, d_out] in float32. Where the id is not that of an
    expert, the result may be anything."""
    return _in_four_bits(x, weight, expert_of_block)


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
    absent = native.operand(None)
    rest = (absent if each is None else each for each in (weight.scale, weight.offset, native.operand(add)))
    how = {"block": np.int64(weight.block), "format": np.int64(native.FORMATS.index(weight.format))}
    return native.call(
        "specserve_matmul", (x.shape[0], weight.d_out), x.astype(jnp.float32), expert_ids, panels, *rest, **how
    )


def _quantized(x: jax.Array, weight: QuantizedMatrix) -> jax.Array:  # float32
    *stack, d_in, d_out = weight.shape
    num_blocks = weight.scale.shape[-2]
    rows = x.reshape(*stack, -1, d_in)
    num_rows = rows.shape[-2]
    if num_blocks == 1 and weight.offset is None:
        values = weight.values.astype(x.dtype)
        y = jnp.matmul(rows, values, preferred_element_type=jnp.float32) * weight.scale
    elif num_rows >= weight.block or d_in % weight.block:  # products by block would be larger than the plain matrix
        y = jnp.matmul(rows, dequantize(weight, x.dtype), preferred_element_type=jnp.float32)
    else:
        by_block = rows.reshape(*stack, num_rows, num_blocks, weight.block)
        values = weight.values.reshape(*stack, num_blocks, weight.block, d_out).astype(x.dtype)
        products = jnp.einsum("...rbi,...bio->...rbo", by_block, values, preferred_element_type=jnp.float32)
        y = jnp.einsum("...rbo,...bo->...ro", products, weight.scale)
        if weight.offset is not None:
            sums = by_block.sum(axis=-1, dtype=jnp.float32)
            y += jnp.einsum("...rb,...bo->...ro", sums, weight.offset)
    return y.reshape(*x.shape[:-1], d_out)


def _blocked(x: jax.Array, weight: BlockedMatrix) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    # the rows are repeated for each block so that the block dimension is a batch dimension on both sides; with a free
    # dimension there, XLA transposes the weights at every call
    repeated = jnp.broadcast_to(rows, (weight.blocks.shape[0], *rows.shape))
    product = jax.lax.dot_general(repeated, weight.blocks, (((2,), (1,)), ((0,), (0,))))  # [blocks, row, columns]
    return product.transpose(1, 0, 2).reshape(*x.shape[:-1], -1)
