"""Matrices of numbers of 4 bits as GPUs hold them, two to a byte (`nibbles_gpu` multiplies by them), and as TPUs do,
eight to a word (`nibbles_tpu`). Nothing of Pallas is imported here, for which CPUs need not wait."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from specserve.kernels.panels import FP4_CODES
from specserve.mesh import LOGICAL_TO_MESH, traced_once
from specserve.pytree import pytree, static

Numbers = Literal["int4", "uint4", "fp4"]  # see `panels.four_bits`
Cut = tuple[tuple[str, ...], tuple[str, ...]]  # the axes of a mesh over which inputs and outputs are spread
NOT_CUT: Cut = ((), ())
PLATFORMS = ("gpu", "tpu")  # each has a kernel
MOST_FP4 = 12  # the double of the largest 4-bit float

LEAST = 16  # rows, columns and inputs of a product that tensor cores take
MOST_SPAN = 128  # bytes of an output that are read at once: a line of the cache
LANES, SUBLANES = 128, 8  # the width and the height of a TPU's register
GROUP = 64  # inputs whose codes fill eight rows of words, which are a register of a TPU
MOST_CHUNK = 2048  # inputs
MOST_INDEXED = 2**31  # bytes up to which Triton's compiler indexes rightly; from twice as many on it does again


@pytree
class NibbleMatrix:
    """A [d_in, d_out] matrix, or one for each expert, of numbers of 4 bits times scales, perhaps plus offsets, as
    `multiply` reads it. Of each `span` bytes of an output, the low halves are the codes of the first `span` inputs and
    the high halves those of the next `span`. A weight is (128 + code + zero) * scale in `int4`, code * scale + offset
    in `uint4`, and the double of a 4-bit float times the scale in `fp4`."""

    codes: jax.Array  # [..., d_out, d_in / 2] uint8
    scales: jax.Array  # [..., d_in / block rounded up, d_out] uint32: a bfloat16 scale, and above it a zero or offset
    numbers: Numbers = static()
    span: int = static()
    block: int = static()  # inputs that share a scale
    cut: Cut = static(default=NOT_CUT)

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, d_out, num_bytes = self.codes.shape
        return *stack, 2 * num_bytes, d_out

    def __getitem__(self, index: tuple[slice, Any]) -> "NibbleMatrix":
        """Pick some outputs, of all inputs."""
        picked = dataclasses.replace(self, codes=self.codes[index[1]], scales=self.scales[index])
        return dataclasses.replace(picked, cut=(self.cut[0], ()))

    def axes(self, stack: tuple[Any, ...], inputs: Any, outputs: Any) -> tuple[tuple[Any, ...], ...]:
        """Return the axes of codes and of scales, of a matrix that has these, and an axis of experts perhaps."""
        return (*stack, outputs, inputs), (*stack, inputs if self.scales.shape[-2] > 1 else None, outputs)


@pytree
class WordMatrix:
    """The same matrix as a TPU reads it. Its inputs are cut into chunks, and those into groups of 64, each of which has
    eight rows of words. Of row r the bits from 4 j on are the code of input 16 j + 2 r of the group, and those from
    4 j + 16 on the code of the input after that, for j from 0 to 3: with the other bits masked, a word has two numbers
    of 16 bits, as registers do. Columns and rows of scales fill registers, or XLA would lay the arrays out with another
    axis as their last, and copy them for the kernel at every call."""

    codes: jax.Array  # [..., chunk, input / 8, column] uint32
    scales: jax.Array  # [..., chunk, input / block, column] uint32: as of a `NibbleMatrix`
    numbers: Numbers = static()
    d_out: int = static()  # of a device
    block: int = static()  # inputs of a chunk that share a scale
    cut: Cut = static(default=NOT_CUT)

    @property
    def chunk(self) -> int:
        """The inputs of a chunk."""
        return 8 * self.codes.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, num_chunks, _, width = self.codes.shape
        return *stack, num_chunks * self.chunk, width // round_up(self.d_out, LANES) * self.d_out

    def columns(self) -> np.ndarray:  # [d_out of all devices]
        """Return the place of each output in the arrays."""
        return np.flatnonzero(np.arange(self.codes.shape[-1]) % round_up(self.d_out, LANES) < self.d_out)

    def __getitem__(self, index: tuple[slice, Any]) -> "WordMatrix":
        """Pick some outputs, of all inputs."""
        picked = jnp.asarray(self.columns())[index[1]]
        spare = ((0, 0), (0, 0), (0, -len(picked) % LANES))
        found = jax.tree.map(lambda leaf: jnp.pad(leaf[:, :, picked], spare), self)
        return dataclasses.replace(found, d_out=len(picked), cut=(self.cut[0], ()))

    def axes(self, stack: tuple[Any, ...], inputs: Any, outputs: Any) -> tuple[tuple[Any, ...], ...]:
        """Return the axes of codes and of scales, of a matrix that has these, and an axis of experts perhaps."""
        return ((*stack, inputs, None, outputs),) * 2


def span_of(d_in: int, block: int) -> int:
    """Return the `span` of a matrix, or 0 where the kernel cannot take it: both halves of its tiles must be of one
    block."""
    span = math.gcd(block, d_in // 2, MOST_SPAN) if d_in % 2 == 0 else 0
    return span if span >= LEAST else 0


def chunk_of(d_in: int, block: int) -> int:
    """Return the inputs of a `WordMatrix`'s chunks, or 0 where the kernel cannot take it: sixteen numbers that are
    widened at once must be of one block."""
    sizes = range(GROUP, min(d_in, MOST_CHUNK) + 1, GROUP)
    fits = [size for size in sizes if d_in % size == 0 and (size % block == 0 or block % size == 0)]
    return max(fits, default=0) if block % 16 == 0 and d_in % block == 0 else 0


def pack(
    values: jax.Array,  # [..., d_in, d_out] int8
    scale: jax.Array,  # [..., d_in / block rounded up, d_out]
    offset: jax.Array | None,  # like scale
    block: int,
    platform: str,  # "gpu" or "tpu", whose form it is to have
) -> NibbleMatrix | WordMatrix | None:
    """Return numbers in 4 bits, without changing one, and their scales and offsets in bfloat16; None where they do not
    fit, or where the kernel cannot take the shape that each device has."""
    d_in, own_shape = values.shape[-2], values.sharding.shard_shape(values.shape)
    own = min(block, own_shape[-2])
    is_whole = scale.shape[-2] == 1 or own_shape[-2] in (d_in, own_shape[-2] // block * block)  # of blocks
    is_taken = chunk_of if platform == "tpu" else span_of
    is_indexed = platform == "tpu" or not MOST_INDEXED < math.prod(own_shape) // 2 <= 2 * MOST_INDEXED
    inputs, outputs = _cut(values.sharding, values.ndim)
    is_gathered = not {*inputs, *outputs}.isdisjoint(LOGICAL_TO_MESH["embed"])
    if values.dtype != jnp.int8 or is_gathered or not (is_whole and is_indexed and is_taken(own_shape[-2], own)):
        return None
    place, block = functools.partial(lay_out, platform, values.sharding, block=own), min(block, d_in)
    low, high = _bounds(values, block)
    if (high - low).max() > 15:
        may_be = offset is None and low.min() >= -MOST_FP4 and high.max() <= MOST_FP4  # or a gather of every number
        is_float = may_be and traced_once(_are_fp4)(values)
        return place(values, scale, jnp.zeros_like(scale), numbers="fp4") if is_float else None
    first = jnp.where((low >= 0) & (high < 16), 0, jnp.where((low >= -8) & (high < 8), -8, low))
    values = values - jnp.repeat(first.astype(jnp.int8), block, axis=-2)[..., :d_in, :]
    least = first.astype(jnp.float32)
    if offset is None:
        return place(values, scale, least - 128, numbers="int4")
    return place(values, scale, least * scale + offset, numbers="uint4")


def lay_out(
    platform: str,
    place: Sharding,
    values: jax.Array,
    scale: jax.Array,
    other: jax.Array,
    *,
    block: int,
    numbers: Numbers,
) -> NibbleMatrix | WordMatrix:
    """Lay out int8 values that are codes, or doubles of 4-bit floats, where they are: over a mesh each device its own,
    of whose inputs so many share a scale. `other` is the zeros or the offsets."""
    given = (values, scale, other)
    shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in given)
    return _packing(platform, place, shapes, block, numbers)(*given)


@functools.cache
def _packing(
    platform: str, place: Sharding, shapes: tuple[jax.ShapeDtypeStruct, ...], block: int, numbers: Numbers
) -> Callable[..., NibbleMatrix | WordMatrix]:
    """Return a compiled function for matrices like this; word by word there would be one for every number on the
    way."""
    function: Any = functools.partial(in_words if platform == "tpu" else in_bytes, block=block, numbers=numbers)
    if not isinstance(place, NamedSharding):
        return traced_once(function)
    values, scale, _ = shapes
    *stack, inputs, outputs = *place.spec, *[None] * (values.ndim - len(place.spec))
    of_blocks = PartitionSpec(*stack, inputs if scale.shape[-2] > 1 else None, outputs)
    own = [
        jax.ShapeDtypeStruct(NamedSharding(place.mesh, spec).shard_shape(each.shape), each.dtype)
        for spec, each in zip((place.spec, of_blocks, of_blocks), shapes, strict=True)
    ]
    made = jax.eval_shape(function, *own)
    whole = dataclasses.replace(made, scales=scale) if isinstance(made, NibbleMatrix) else made
    places = [PartitionSpec(*axes) for axes in whole.axes(tuple(stack), inputs, outputs)]
    on_each = jax.shard_map(
        function,
        mesh=place.mesh,
        in_specs=(place.spec, of_blocks, of_blocks),
        out_specs=jax.tree.unflatten(jax.tree.structure(made), places),
        check_vma=False,
    )
    cut = _cut(place, values.ndim)
    return traced_once(lambda *given: dataclasses.replace(on_each(*given), cut=cut))


def _are_fp4(values: jax.Array) -> jax.Array:
    """Return whether int8 numbers are all doubles of 4-bit floats."""
    return (jnp.asarray(FP4_CODES)[values.view(jnp.uint8)] < 16).all()


def _cut(place: Sharding, ndim: int) -> Cut:
    """Return the axes of a mesh over which the inputs and the outputs of a matrix are spread."""
    if not isinstance(place, NamedSharding):
        return NOT_CUT
    entries = (*place.spec, *[None] * (ndim - len(place.spec)))[-2:]
    found = ((entry,) if isinstance(entry, str) else entry or () for entry in entries)
    inputs, outputs = (tuple(name for name in names if place.mesh.shape[name] > 1) for names in found)
    return inputs, outputs


def _bounds(values: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:  # int32, of the shape of a scale
    *stack, d_in, d_out = values.shape
    padded = jnp.pad(values, [(0, 0)] * len(stack) + [(0, -d_in % block), (0, 0)], mode="edge")
    blocks = padded.reshape(*stack, -1, block, d_out)
    return blocks.min(axis=-2).astype(jnp.int32), blocks.max(axis=-2).astype(jnp.int32)


def in_bytes(values: jax.Array, scale: jax.Array, other: jax.Array, block: int, numbers: Numbers) -> NibbleMatrix:
    """Lay out the same for a GPU, on one device."""
    *stack, d_in, d_out = values.shape
    span = span_of(d_in, block)
    pairs = _codes(values, numbers).reshape(*stack, -1, 2, span, d_out)
    codes = (pairs[..., 0, :, :] | pairs[..., 1, :, :] << 4).reshape(*stack, -1, d_out).swapaxes(-1, -2)
    return NibbleMatrix(codes, _side_by_side(scale, other), numbers, span, block)


def in_words(values: jax.Array, scale: jax.Array, other: jax.Array, block: int, numbers: Numbers) -> WordMatrix:
    """Lay out the same for a TPU, on one device."""
    if values.ndim > 2:
        return jax.vmap(functools.partial(in_words, block=block, numbers=numbers))(values, scale, other)
    d_in, d_out = values.shape
    chunk, width = chunk_of(d_in, block), round_up(d_out, LANES)
    values, scale, other = (jnp.pad(each, ((0, 0), (0, width - d_out))) for each in (values, scale, other))
    parts = _codes(values, numbers).reshape(-1, 4, 8, 2, width).transpose(3, 1, 0, 2, 4).reshape(8, -1, width)
    places = jnp.arange(8, dtype=jnp.uint32).reshape(-1, 1, 1) * 4
    words = (parts.astype(jnp.uint32) << places).sum(axis=0, dtype=jnp.uint32)
    scales = jnp.repeat(_side_by_side(scale, other), max(1, block // chunk), axis=0).reshape(d_in // chunk, -1, width)
    scales = jnp.pad(scales, ((0, 0), (0, _rows(scales.shape[1]) - scales.shape[1]), (0, 0)))
    return WordMatrix(words.reshape(-1, chunk // 8, width), scales, numbers, d_out, min(block, chunk))


def word_bytes(d_in: int, d_out: int, block: int) -> int:
    """Return the bytes of a `WordMatrix` on one device."""
    chunk, width = chunk_of(d_in, block), round_up(d_out, LANES)
    return 4 * width * (d_in // 8 + d_in // chunk * _rows(max(1, chunk // block)))


def _rows(num_blocks: int) -> int:
    return num_blocks if num_blocks == 1 else round_up(num_blocks, SUBLANES)


def round_up(number: int, unit: int) -> int:
    """Return the least multiple of `unit` that is at least a number."""
    return -(-number // unit) * unit


def _codes(values: jax.Array, numbers: Numbers) -> jax.Array:  # uint8
    codes = values.view(jnp.uint8)
    return jnp.asarray(FP4_CODES)[codes] if numbers == "fp4" else codes


def _side_by_side(scale: jax.Array, other: jax.Array) -> jax.Array:  # uint32
    pairs = jnp.stack([scale, other], axis=-1).astype(jnp.bfloat16)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint32)


def restore(weight: NibbleMatrix | WordMatrix) -> jax.Array:  # [..., d_in, d_out] float32
    """Return the plain matrix, or matrices: the definition that the kernels are held to."""
    *stack, d_in, d_out = weight.shape
    if stack:
        return jax.vmap(restore)(weight)
    if isinstance(weight, WordMatrix):
        width = weight.codes.shape[-1]
        groups, shifts = weight.codes.reshape(-1, 1, 8, 1, width), jnp.arange(8, dtype=jnp.uint32) * 4
        codes = groups >> shifts.reshape(2, 4).T[:, None, :, None] & 15
        scales = jnp.repeat(weight.scales[:, : weight.chunk // weight.block], weight.block, axis=1)
        found = weights_of(codes.reshape(d_in, width), scales.reshape(d_in, width), weight.numbers)
        return found[:, weight.columns()]
    pairs = weight.codes.T.reshape(-1, 1, weight.span, d_out)
    codes = jnp.concatenate([pairs & 15, pairs >> 4], axis=1).reshape(d_in, d_out)
    of_each = weight.block if len(weight.scales) > 1 else d_in
    return weights_of(codes, jnp.repeat(weight.scales, of_each, axis=0)[:d_in], weight.numbers)


def halves(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the scales, and the zeros or offsets beside them, in float32."""
    lower, upper = scales << 16, (scales >> 16) << 16
    return jax.lax.bitcast_convert_type(lower, jnp.float32), jax.lax.bitcast_convert_type(upper, jnp.float32)


def weights_of(codes: jax.Array, scales: jax.Array, numbers: Numbers) -> jax.Array:
    """Return the weights of codes and their scales, which broadcast, in float32."""
    scale, other = halves(scales)
    code = codes.astype(jnp.int32)
    if numbers == "fp4":  # 1 + fraction / 2 times a power of two, doubled; below it a half, doubled
        exponent, fraction = (code >> 1) & 3, code & 1
        size = jnp.where(exponent > 0, (2 + fraction) << jnp.maximum(exponent - 1, 0), fraction)
        return jnp.where(code > 7, -size, size).astype(jnp.float32) * scale
    if numbers == "int4":
        return (code.astype(jnp.float32) + (128 + other)) * scale
    return code.astype(jnp.float32) * scale + other
