"""Matrices of numbers of 4 bits as GPUs hold them, two to a byte (`nibbles_gpu` multiplies by them), and as TPUs do,
eight to a word (`nibbles_tpu`). Nothing of Pallas is imported here, for which CPUs need not wait."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specserve.kernels.panels import FP4_CODES
from specserve.mesh import traced_once
from specserve.pytree import pytree, static

Numbers = Literal["int4", "uint4", "fp4"]  # see `panels.four_bits`
PLATFORMS = ("gpu", "tpu")  # each has a kernel
MOST_FP4 = 12  # the double of the largest 4-bit float

LEAST = 16  # rows, columns and inputs of a product that tensor cores take
MOST_SPAN = 128  # bytes of an output that are read at once: a line of the cache
GROUP = 64  # inputs whose codes fill eight rows of words, which are a register of a TPU
MOST_CHUNK = 2048  # inputs


@pytree
class NibbleMatrix:
    """A [d_in, d_out] matrix of numbers of 4 bits times scales, perhaps plus offsets, as `multiply` reads it. Of each
    `span` bytes of an output, the low halves are the codes of the first `span` inputs and the high halves those of the
    next `span`. A weight is (128 + code + zero) * scale in `int4`, code * scale + offset in `uint4`, and the double of
    a 4-bit float times the scale in `fp4`."""

    codes: jax.Array  # [d_out, d_in / 2] uint8
    scales: jax.Array  # [d_in / block rounded up, d_out] uint32: a bfloat16 scale, and above it a zero or an offset
    numbers: Numbers = static()
    span: int = static()
    block: int = static()  # inputs that share a scale

    @property
    def shape(self) -> tuple[int, int]:
        d_out, num_bytes = self.codes.shape
        return 2 * num_bytes, d_out

    def __getitem__(self, index: tuple[slice, Any]) -> "NibbleMatrix":
        """Pick some outputs, of all inputs."""
        return dataclasses.replace(self, codes=self.codes[index[1]], scales=self.scales[index])


@pytree
class WordMatrix:
    """The same matrix as a TPU reads it. Its inputs are cut into chunks, and those into groups of 64, each of which has
    eight rows of words. Of row r the bits from 4 j on are the code of input 16 j + 2 r of the group, and those from
    4 j + 16 on the code of the input after that, for j from 0 to 3: with the other bits masked, a word has two numbers
    of 16 bits, as registers do."""

    codes: jax.Array  # [chunk, input / 8, d_out] uint32
    scales: jax.Array  # [chunk, input / block, d_out] uint32: as of a `NibbleMatrix`
    numbers: Numbers = static()

    @property
    def chunk(self) -> int:
        """The inputs of a chunk."""
        return 8 * self.codes.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes) * self.chunk, self.codes.shape[2]

    def __getitem__(self, index: tuple[slice, Any]) -> "WordMatrix":
        """Pick some outputs, of all inputs."""
        return jax.tree.map(lambda leaf: leaf[:, :, index[1]], self)


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
    values: jax.Array,  # [d_in, d_out] int8
    scale: jax.Array,  # [d_in / block rounded up, d_out]
    offset: jax.Array | None,  # like scale
    block: int,
    platform: str,  # "gpu" or "tpu", whose form it is to have
) -> NibbleMatrix | WordMatrix | None:
    """Return numbers in 4 bits, without changing one, and their scales and offsets in bfloat16; None where they do not
    fit, or where the kernel cannot take the shape."""
    d_in, block = values.shape[0], min(block, values.shape[0])
    # in a program of its own, or there would be a word for every number on the way
    compiled = traced_once(in_words, "block", "numbers")
    is_taken, lay_out = (chunk_of, compiled) if platform == "tpu" else (span_of, in_bytes)
    if values.dtype != jnp.int8 or not is_taken(d_in, block):
        return None
    low, high = _bounds(values, block)
    if (high - low).max() > 15:
        may_be = offset is None and low.min() >= -MOST_FP4 and high.max() <= MOST_FP4  # or a gather of every number
        is_float = may_be and (jnp.asarray(FP4_CODES)[values.view(jnp.uint8)] < 16).all()
        return lay_out(values, scale, jnp.zeros_like(scale), block, "fp4") if is_float else None
    first = jnp.where((low >= 0) & (high < 16), 0, jnp.where((low >= -8) & (high < 8), -8, low))
    values = values - jnp.repeat(first.astype(jnp.int8), block, axis=0)[:d_in]
    least = first.astype(jnp.float32)
    if offset is None:
        return lay_out(values, scale, least - 128, block, "int4")
    return lay_out(values, scale, least * scale + offset, block, "uint4")


def _bounds(values: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:  # [d_in / block rounded up, d_out] int32
    padded = jnp.pad(values, ((0, -len(values) % block), (0, 0)), mode="edge")
    blocks = padded.reshape(-1, block, values.shape[1])
    return blocks.min(axis=1).astype(jnp.int32), blocks.max(axis=1).astype(jnp.int32)


def in_bytes(values: jax.Array, scale: jax.Array, other: jax.Array, block: int, numbers: Numbers) -> NibbleMatrix:
    """Lay out int8 values that are codes, or doubles of 4-bit floats; `other` is the zeros or the offsets."""
    d_in, d_out = values.shape
    span = span_of(d_in, block)
    pairs = _codes(values, numbers).reshape(-1, 2, span, d_out)
    codes = (pairs[:, 0] | pairs[:, 1] << 4).reshape(-1, d_out).T
    return NibbleMatrix(codes, _side_by_side(scale, other), numbers, span, block)


def in_words(values: jax.Array, scale: jax.Array, other: jax.Array, block: int, numbers: Numbers) -> WordMatrix:
    """Lay out the same for a TPU."""
    d_in, d_out = values.shape
    chunk = chunk_of(d_in, block)
    parts = _codes(values, numbers).reshape(-1, 4, 8, 2, d_out).transpose(3, 1, 0, 2, 4).reshape(8, -1, d_out)
    places = jnp.arange(8, dtype=jnp.uint32).reshape(-1, 1, 1) * 4
    words = (parts.astype(jnp.uint32) << places).sum(axis=0, dtype=jnp.uint32)
    scales = jnp.repeat(_side_by_side(scale, other), max(1, block // chunk), axis=0)
    return WordMatrix(words.reshape(-1, chunk // 8, d_out), scales.reshape(d_in // chunk, -1, d_out), numbers)


def _codes(values: jax.Array, numbers: Numbers) -> jax.Array:  # uint8
    codes = values.view(jnp.uint8)
    return jnp.asarray(FP4_CODES)[codes] if numbers == "fp4" else codes


def _side_by_side(scale: jax.Array, other: jax.Array) -> jax.Array:  # uint32
    pairs = jnp.stack([scale, other], axis=-1).astype(jnp.bfloat16)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint32)


def restore(weight: NibbleMatrix | WordMatrix) -> jax.Array:  # [d_in, d_out] float32
    """Return the plain matrix: the definition that the kernels are held to."""
    d_in, d_out = weight.shape
    if isinstance(weight, WordMatrix):
        groups, shifts = weight.codes.reshape(-1, 1, 8, 1, d_out), jnp.arange(8, dtype=jnp.uint32) * 4
        codes = groups >> shifts.reshape(2, 4).T[:, None, :, None] & 15
        scales = jnp.repeat(weight.scales, weight.chunk // weight.scales.shape[1], axis=1)
        return weights_of(codes.reshape(d_in, d_out), scales.reshape(d_in, d_out), weight.numbers)
    pairs = weight.codes.T.reshape(-1, 1, weight.span, d_out)
    codes = jnp.concatenate([pairs & 15, pairs >> 4], axis=1).reshape(d_in, d_out)
    return weights_of(codes, jnp.repeat(weight.scales, weight.block, axis=0)[:d_in], weight.numbers)


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
