"""Products with 4-bit weights on GPUs and TPUs: interpreted on any machine, and run where there is one (`-m gpu`,
`-m tpu`)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from rounding import assert_within, of_product

from specserve.kernels import nibbles, nibbles_gpu, nibbles_tpu
from specserve.kernels.matmul import (
    QuantizedMatrix,
    dequantize,
    experts_in_nibbles,
    in_nibbles,
    matmul_float32,
    quantize,
)
from specserve.kernels.nibbles import NibbleMatrix, WordMatrix
from specserve.kernels.panels import FP4_DOUBLES
from specserve.mesh import made_for, make_mesh, on_mesh, sharding

OFF = 2.0**-8  # the largest share of a number that rounding to bfloat16 moves it by
FLOAT32 = jnp.dtype("float32")


class Shape(NamedTuple):
    kind: str
    block: int
    num_blocks: int
    num_rows: int
    d_out: int
    has_offset: bool = False


SHAPES = [
    Shape("codes", 32, 14, 3, 70, True),  # neither rows nor columns fill their tiles, and parts are of 2 and 3 steps
    Shape("signed", 128, 4, 17, 128),
    Shape("zeros", 64, 5, 16, 40),  # both halves of a tile are of one block
    Shape("doubles", 16, 12, 1, 64),
    Shape("zeros", 32, 40, 70, 130, True),  # outputs are the rows of the product
    Shape("signed", 384, 1, 5, 130),
]
ON_TPU = [
    *SHAPES,
    Shape("codes", 32, 162, 9, 300, True),  # programs of 2 chunks, and of 1, of 1,728 inputs; the last columns are few
    Shape("signed", 2048, 2, 1, 40),  # a block is two chunks
    Shape("codes", 48, 12, 33, 60, True),  # runs of 96 inputs
    Shape("doubles", 32, 18, 40, 130),
    Shape("signed", 64, 16, 300, 8),  # two programs of rows
]
RUNS = [pytest.param(True, id="interpreted"), pytest.param(False, marks=pytest.mark.gpu, id="compiled")]
UNSET = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="uninitialized")


def drawn(rng: np.random.Generator, at: Shape) -> QuantizedMatrix:
    """A matrix whose numbers fit in 4 bits: as they are, behind a zero of each block, or as doubles of 4-bit floats."""
    of_blocks = at.num_blocks, at.d_out
    low = {"signed": -8, "codes": 0, "zeros": rng.integers(-15, 1, (at.num_blocks, 1, at.d_out)), "doubles": 0}[at.kind]
    values = low + rng.integers(0, 16, (at.num_blocks, at.block, at.d_out))
    values = FP4_DOUBLES[values] if at.kind == "doubles" else values.astype(np.int8)
    scale = rng.uniform(0.5, 1, of_blocks).astype(np.float16).astype(np.float32)
    offset = jnp.asarray(rng.standard_normal(of_blocks), jnp.float32) if at.has_offset else None
    return QuantizedMatrix(jnp.asarray(values.reshape(-1, at.d_out)), jnp.asarray(scale), at.block, offset)


@pytest.mark.parametrize("interpret", RUNS)
@pytest.mark.parametrize("at", SHAPES, ids=str)
def test_a_product_is_that_of_the_plain_matrix_and_a_row_the_same_beside_others(at: Shape, interpret: bool) -> None:
    rng = np.random.default_rng(0)
    weight = drawn(rng, at)
    packed = in_nibbles(weight)
    assert isinstance(packed, NibbleMatrix)
    assert packed.shape == weight.shape
    assert 2 * packed.codes.nbytes == weight.values.nbytes
    # a code is at most 15, and so far from the number that an offset is moved by; both factors are rounded once
    scale, offset = (
        np.abs(np.asarray(each)) for each in (weight.scale, 0.0 if weight.offset is None else weight.offset)
    )
    of_input = np.repeat((30 * scale + offset), at.block, axis=0) + np.abs(np.asarray(dequantize(weight, FLOAT32)))
    assert_within(dequantize(packed, FLOAT32), dequantize(weight, FLOAT32), OFF * of_input)
    for dtype in ("bfloat16", "float32"):  # in which a weight is rounded once
        x, others = (jnp.asarray(rng.standard_normal((at.num_rows, weight.shape[0])), dtype) for _ in range(2))
        got = nibbles_gpu.multiply(x, packed, interpret=interpret)
        wide, plain = (np.asarray(each, np.float32) for each in (x, dequantize(packed, jnp.dtype(dtype))))
        assert_within(got, wide @ plain, of_product(wide, plain), dtype)
        beside = nibbles_gpu.multiply(others.at[0].set(x[0]), packed, interpret=interpret)
        assert (np.asarray(beside)[0] == np.asarray(got)[0]).all()


@pytest.mark.parametrize(
    ("at", "interpret"),
    [
        *(pytest.param(at, True, id=f"{at}-interpreted") for at in ON_TPU),
        *(pytest.param(at, UNSET, id=f"{at}-checked") for at in ON_TPU[::4]),  # memory begins as NaN
        *(pytest.param(at, False, id=f"{at}-compiled", marks=pytest.mark.tpu) for at in ON_TPU),
    ],
)
def test_a_tpu_multiplies_by_the_same_matrix(at: Shape, interpret: Any) -> None:
    """For few rows, and in float32, no weight is rounded, but sums of blocks are scaled, each code 16 more than itself;
    for many rows weights of bfloat16 are rounded twice at most."""
    rng = np.random.default_rng(0)
    weight = drawn(rng, at)
    with made_for("tpu"):
        packed = in_nibbles(weight)
    assert isinstance(packed, WordMatrix)
    assert packed.shape == weight.shape
    assert 8 * packed.codes.size == len(weight.values) * -(-at.d_out // 128) * 128  # of words
    assert packed.codes.nbytes + packed.scales.nbytes == nibbles.word_bytes(*weight.shape, at.block)  # type: ignore[call-arg]
    plain, in_bytes = dequantize(packed, FLOAT32), in_nibbles(weight)
    if isinstance(in_bytes, NibbleMatrix):
        assert (plain == dequantize(in_bytes, FLOAT32)).all()
    some = np.array([at.d_out - 1, 0])
    assert (dequantize(packed[:, some], FLOAT32) == plain[:, some]).all()
    scale, other = (np.abs(np.repeat(each, at.block, axis=0)) for each in nibbles.halves(nibbles_scales(packed, at)))
    summed = 47 * scale + other * (scale if packed.numbers == "int4" else 1)
    for dtype in ("bfloat16", "float32"):
        x, others = (jnp.asarray(rng.standard_normal((at.num_rows, weight.shape[0])), dtype) for _ in range(2))
        got = nibbles_tpu.multiply(x, packed, interpret=interpret)
        wide = np.asarray(x, np.float32)
        bound = 2 * of_product(wide, summed)
        if dtype == "bfloat16" and at.num_rows > nibbles_tpu.FEW:
            bound += OFF * np.abs(wide) @ (15 * scale + np.abs(plain))
        assert_within(got, wide @ np.asarray(plain), bound, dtype)
        beside = nibbles_tpu.multiply(others.at[0].set(x[0]), packed, interpret=interpret)
        assert (np.asarray(beside)[0] == np.asarray(got)[0]).all()


@pytest.mark.parametrize("size", [16, 64])  # a TPU widens whole weights for the latter
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("at", SHAPES)
def test_blocks_of_rows_are_multiplied_by_the_matrix_of_their_expert(at: Shape, platform: str, size: int) -> None:
    """As by that matrix alone; a block without an expert gets nothing."""
    rng = np.random.default_rng(0)
    drawn_ = [drawn(rng, at) for _ in range(3)]
    weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn_)
    with made_for(platform):
        (packed,), alone = experts_in_nibbles([weights]), [in_nibbles(each) for each in drawn_]
    if not isinstance(packed, NibbleMatrix | WordMatrix):
        assert platform == "tpu"
        assert alone[0] is drawn_[0]
        return
    assert (dequantize(packed, FLOAT32) == jnp.stack([dequantize(each, FLOAT32) for each in alone])).all()
    multiply = nibbles_gpu.multiply if platform == "gpu" else nibbles_tpu.multiply
    experts = jnp.asarray([0, 2, 2, 3], jnp.int32)
    for dtype in ("bfloat16", "float32"):
        x = jnp.asarray(rng.standard_normal((4 * size, weights.shape[1])), dtype)
        interpret: Any = True if platform == "gpu" or size > nibbles_tpu.FEW else UNSET
        got = np.asarray(multiply(x, packed, experts, interpret=interpret)).reshape(4, size, -1)
        for rows, block, expert in zip(got[:3], x.reshape(4, size, -1), (0, 2, 2), strict=False):
            expected = np.asarray(multiply(block, alone[expert], interpret=interpret))
            # the compiler may add up in another order; on a TPU codes up to 15, zeros up to 143 and 16 are added up
            scale, offset = (
                0 if each is None else np.asarray(each) for each in (drawn_[expert].scale, drawn_[expert].offset)
            )
            added = np.repeat(174 * scale + np.abs(offset), at.block, axis=0)
            assert_within(rows, expected, 2 * of_product(np.asarray(block, np.float32), added), dtype)


@pytest.mark.parametrize("cut", ["inputs", "outputs", "nothing"])
@pytest.mark.parametrize("axes", [{"tensor": 4}, {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_each_device_of_a_mesh_multiplies_by_its_own_part(platform: str, axes: dict[str, int], cut: str) -> None:
    rng, mesh = np.random.default_rng(0), make_mesh(**axes)
    weight = drawn(rng, Shape("codes", 32, 16, 12, 64, True))
    names = {"inputs": ("heads", None), "outputs": (None, "mlp"), "nothing": (None, None)}[cut]
    with made_for(platform):
        packed = in_nibbles(jax.device_put(weight, sharding(mesh, names)))
        alone = in_nibbles(weight)
    assert isinstance(packed, NibbleMatrix | WordMatrix)
    parts = 1 if cut == "nothing" else axes["tensor"]
    assert packed.codes.addressable_shards[0].data.size * parts == packed.codes.size
    plain = dequantize(alone, FLOAT32)
    assert (dequantize(packed, FLOAT32) == plain).all()
    x = jnp.asarray(rng.standard_normal((4, 3, weight.shape[0])), jnp.float32)
    got = jax.jit(on_mesh(mesh, matmul_float32))(x, packed)
    # as in `test_a_tpu_multiplies_by_the_same_matrix`: sums of codes are scaled, each 16 more than itself
    added = np.repeat(np.asarray(47 * weight.scale + np.abs(weight.offset)), weight.block, axis=0)
    assert_within(got, np.asarray(x, np.float64) @ np.asarray(plain, np.float64), 2 * of_product(x, added))
    some = np.array([63, 0, 5])
    assert (dequantize(packed[:, some], FLOAT32) == plain[:, some]).all()
    got = jax.jit(on_mesh(mesh, lambda x, weight: matmul_float32(x, weight[:, some])))(x, packed)
    assert_within(
        got, np.asarray(x, np.float64) @ np.asarray(plain[:, some], np.float64), 2 * of_product(x, added[:, some])
    )


def test_a_matrix_that_devices_gather_stays_in_8_bits(rng: np.random.Generator) -> None:
    """And one whose groups are cut in two."""
    weight = quantize(jnp.asarray(rng.standard_normal((192, 64)), jnp.float32), "int4")
    for axes, names in (({"fsdp": 2}, ("embed", "mlp")), ({"tensor": 4}, ("mlp", "embed"))):
        place = sharding(make_mesh(**axes), names)
        spread = dataclasses.replace(weight, values=jax.device_put(weight.values, place))
        assert in_nibbles(spread) is spread


def nibbles_scales(weight: WordMatrix, at: Shape) -> jax.Array:
    """Its scales as they were given, one for each block."""
    every = weight.scales[:, : weight.chunk // weight.block, : at.d_out].reshape(-1, at.d_out)
    return every[:: len(every) // at.num_blocks]


def executed(asm: str, operands: list[int]) -> list[int]:
    """The registers $0 and $1 after the inline instructions, by their description in the PTX manual; `operands` are $2
    and on."""
    registers = {f"${i + 2}": value for i, value in enumerate(operands)}

    def halves(value: int) -> np.ndarray:
        return np.array([value & 0xFFFF, value >> 16], np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)

    for line in asm.splitlines():
        name, _, rest = line.strip("{};").partition(" ")
        if not name or name == ".reg":
            continue
        to, *names = rest.split(", ")
        a, b, c, d = [registers[each] if each in registers else int(each, 0) for each in names] + [0] * (4 - len(names))
        if name.endswith("bf16x2"):
            result = halves(a) * halves(b) + (halves(c) if name.startswith("fma") else 0)
            low, high = result.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
            registers[to] = int(low) | int(high) << 16
        elif name == "prmt.b32":
            registers[to] = sum((((a | b << 32) >> 8 * (c >> 4 * i & 7)) & 255) << 8 * i for i in range(4))
        elif name == "lop3.b32" and d == 0xEA:
            registers[to] = a & b | c
        else:
            results = {"mov.b32": a, "and.b32": a & b, "shr.u32": a >> min(b, 32), "shl.b32": a << min(b, 32)}
            registers[to] = results[name] & 0xFFFFFFFF
    return [registers["$0"], registers["$1"]]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("numbers", ["int4", "uint4", "fp4"])
def test_the_inline_instructions_make_the_weights_of_every_byte(
    rng: np.random.Generator, numbers: Any, half: int
) -> None:
    """No interpreter of JAX knows them, so they are executed here, each weight with a scale of its own: which of them
    are of one output is the compiler's choice."""
    for pairs in np.arange(256, dtype=np.uint8).reshape(-1, 4):
        others = -128.0 - rng.integers(0, 16, 4) if numbers == "int4" else rng.standard_normal(4)
        scales = np.stack([rng.uniform(1e-3, 1, 4), others], axis=-1).astype(ml_dtypes.bfloat16).view(np.uint32)[:, 0]
        codes = pairs >> 4 if half else pairs & 15
        expected = nibbles.weights_of(jnp.asarray(codes), jnp.asarray(scales), numbers).astype(jnp.bfloat16)
        found = executed(nibbles_gpu._asm(numbers, half), [int(pairs.view(np.uint32)[0]), *map(int, scales)])
        got = np.array(found, np.uint32).view(ml_dtypes.bfloat16)
        assert (got.astype(np.float32) == np.asarray(expected, np.float32)).all(), (pairs, got, expected)


def test_what_does_not_fit_stays_in_8_bits(rng: np.random.Generator) -> None:
    """Numbers too far apart, an odd number of inputs, blocks too small, and experts that are taken one by one."""
    wide = quantize(jnp.asarray(rng.standard_normal((64, 16)), jnp.float32), "int8")
    fits = quantize(jnp.asarray(rng.standard_normal((64, 16)), jnp.float32), "int4")
    odd = QuantizedMatrix(jnp.zeros((33, 16), jnp.int8), jnp.ones((2, 16)), 32)
    small = QuantizedMatrix(jnp.zeros((64, 16), jnp.int8), jnp.ones((8, 16)), 8)
    experts = jax.tree.map(lambda leaf: leaf[None], fits)
    for weight in (wide, odd, small, experts):
        assert in_nibbles(weight) is weight
    assert isinstance(in_nibbles(fits), NibbleMatrix)
