"""Native products are those of XLA, within what rounding explains, and a row of a result does not depend, to the bit,
on the rows beside it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import rounding
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.kernels import native
from specserve.kernels.check import SHARE_A_UNIT
from specserve.kernels.matmul import (
    MOST_BYTES,
    PackedMatrix,
    QuantizedMatrix,
    dequantize,
    matmul,
    matmul_by_expert,
    pack,
)
from specserve.kernels.panels import FP4_DOUBLES, by_panel

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason=native.describe()),
    pytest.mark.usefixtures("each_instruction_set"),
]


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _weight(rng: np.random.Generator, kind: str, d_in: int, d_out: int) -> jax.Array | QuantizedMatrix:
    values = _normal(rng, d_in, d_out)
    if kind == "float32":
        return jnp.asarray(values)
    if kind == "bfloat16":
        return jnp.asarray(values.astype(ml_dtypes.bfloat16).astype(np.float32))
    block = BLOCKS.get(kind, d_in)
    scale = rng.uniform(0.001, 0.01, (-(-d_in // block), d_out)).astype(np.float32)
    if "two levels" in kind:
        scale = _two_levels(rng, scale.shape)
    offset = _normal(rng, *scale.shape) * np.float32(0.05) if "offset" in kind else None
    if offset is not None:
        offset = jnp.asarray(_two_levels(rng, scale.shape) if "two levels" in kind else offset)
    if "4" in kind:
        codes = rng.integers(0, 16, (d_in, d_out))
        middle = 0 if kind.startswith("uint4") else 8
        zeros = rng.integers(1, 17, scale.shape) if "zeros" in kind else np.full(scale.shape, middle)
        zeros = np.repeat(zeros, block, axis=0)[:d_in]
        whole = (FP4_DOUBLES[codes] if kind == "fp4" else codes - zeros).astype(np.int8)
        return QuantizedMatrix(jnp.asarray(whole), jnp.asarray(scale), block, offset)
    dtype = np.int8 if "int8" in kind else ml_dtypes.float8_e4m3fn
    whole = (values * 40).clip(-127, 127).astype(dtype)
    whole[:2] = np.array([[-100], [100]]).astype(dtype)[: len(whole)]  # no 4 bits hold both
    return QuantizedMatrix(jnp.asarray(whole), jnp.asarray(scale), block, offset)


def _two_levels(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Scales as of Q4_K and Q6_K: of eight blocks a float16 number times whole ones of 7 bits, or of 8 with a sign,
    whose largest is then -128. Some are all zero, of some the largest common factor is more than float16 holds."""
    factors = rng.uniform(1e-5, 1e-4, (-(-shape[0] // 8), shape[1])).astype(np.float16)
    whole = rng.integers(-64, 64, shape)
    whole[::8, 2::5] = -128
    whole[:8, ::5] = 0
    whole[:, 1::5] = rng.integers(-3, 4, whole[:, 1::5].shape) * 21
    return np.repeat(factors.astype(np.float32), 8, axis=0)[: shape[0]] * whole.astype(np.float32)


BLOCKS = {
    "int8 in blocks": 7,
    "int8, offset": 16,
    "int4 in blocks": 32,
    "int4, zeros": 16,
    "int4, offset": 40,
    "uint4, offset": 32,
    "fp4": 16,
    "int4 in blocks of 128": 128,
    "uint4, offset, blocks of 64": 64,
    "uint4, offset, two levels": 32,
    "int8, two levels": 16,
}
KINDS = ["float32", "bfloat16", "int8", *BLOCKS, "int4"]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from([*KINDS, "fp8"]),
    rows=st.integers(1, 130),
    d_in=st.sampled_from([1, 5, 33, 512, 2100]),
    d_out=st.sampled_from([1, 63, 64, 65, 200]),
)
def test_a_packed_product_is_x_times_w(seed: int, kind: str, rows: int, d_in: int, d_out: int) -> None:
    rng = np.random.default_rng(seed)
    weight, x = _weight(rng, kind, d_in, d_out), _normal(rng, rows, d_in)
    packed = pack(weight)
    assert packed.shape == (d_in, d_out)
    if d_in > 32:  # of fewer numbers some fit in fewer bits
        assert packed.format == {"fp8": "bfloat16"}.get(kind, kind.split(",")[0].split(" ")[0])
    residual, chosen = _normal(rng, rows, d_out), {0, rows // 2, rows - 1}

    @jax.jit
    def run(x: jax.Array, packed: Any, weight: Any) -> Any:
        alone = {row: matmul(x[row : row + 1], packed)[0] for row in chosen}
        added = native.serving(matmul)(x, packed, residual)
        return matmul(x, packed), alone, added, dequantize(weight, jnp.dtype("float32"))

    got, alone, added, plain = jax.device_get(run(x, packed, weight))
    block = 0 if packed.format in ("float32", "bfloat16") else packed.block
    parts = rounding.magnitudes(weight) if packed.format in ("int4", "uint4") or "offset" in kind else plain
    rounding.assert_within(got, x.astype(np.float64) @ plain.astype(np.float64), rounding.of_product(x, parts, block))
    assert all((alone[row] == got[row]).all() for row in chosen), "a row depends on its neighbours"
    assert (added == residual + got).all(), "a sum is more than the product and a sum"


@pytest.mark.parametrize("kind", ["uint4, offset, two levels", "int8, two levels"])
def test_scales_of_two_levels_are_those_of_one(rng: np.random.Generator, kind: str) -> None:
    """To the bit what float32 scales give, in 10 bits of each block. 18 blocks are no whole super-blocks."""
    weight = _weight(rng, kind, 18 * BLOCKS[kind], 70)
    packed = pack(weight)
    width = native.panel_width(packed.format, packed.block)
    assert packed.scale.shape[-4:] == (-(-70 // width), 3, 10, width)
    scale, offset = (
        None if each is None else jnp.asarray(by_panel(np.asarray(each), width))
        for each in (weight.scale, weight.offset)
    )
    plain = dataclasses.replace(packed, scale=scale, offset=offset)
    for rows in (1, 3, 60):
        x = jnp.asarray(_normal(rng, rows, packed.d_in))
        assert (np.asarray(matmul(x, packed)) == np.asarray(matmul(x, plain))).all(), f"{rows} rows"


@pytest.mark.parametrize("at", [(0, 2), (17, 69)])
def test_one_scale_that_is_no_product_keeps_float32(rng: np.random.Generator, at: tuple[int, int]) -> None:
    weight = _weight(rng, "uint4, offset, two levels", 18 * 32, 70)
    scale = np.array(weight.scale)
    scale[at] *= 1 + 2**-20
    assert pack(dataclasses.replace(weight, scale=jnp.asarray(scale))).scale.dtype == jnp.float32


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4 in blocks", "uint4, offset"])
def test_outputs_do_not_depend_on_how_threads_share_them(rng: np.random.Generator, kind: str) -> None:
    """A product so wide that all threads take part, again and again of other rows: its last outputs are those of a
    product of them alone."""
    weight = _weight(rng, kind, 256, 20_000)
    last = weight[:, -64:]
    wide, narrow = pack(weight), pack(last)
    for rows in (1, 4, 1, 3, 60):
        x = jnp.asarray(_normal(rng, rows, 256))
        assert (np.asarray(matmul(x, wide))[:, -64:] == np.asarray(matmul(x, narrow))).all(), f"{rows} rows"


@pytest.mark.parametrize("largest", [1e34, 1.99, 1e-30, 0.0])
def test_a_product_of_any_magnitude(rng: np.random.Generator, largest: float) -> None:
    """Where integers stand for activations, the largest of a row decides what they are multiples of."""
    weight = QuantizedMatrix(jnp.asarray(rng.integers(-127, 128, (70, 9)), jnp.int8), jnp.full((1, 9), 1e-4), 70)
    x = _normal(rng, 7, 70)
    x *= np.float32(largest) / np.abs(x).max(axis=1, keepdims=True)
    plain = np.asarray(dequantize(weight, jnp.dtype("float32")))
    bound = rounding.of_product(x, plain, 70)
    rounding.assert_within(matmul(jnp.asarray(x), pack(weight)), x.astype(np.float64) @ plain.astype(np.float64), bound)


def test_a_large_number_costs_precision_only_near_it(rng: np.random.Generator) -> None:
    """Activations have outliers. What others of the row are rounded to is as if these were not there, or as fine."""
    d_in, x = 1024, _normal(rng, 3, 1024)
    weight = QuantizedMatrix(jnp.asarray(rng.integers(-127, 128, (d_in, 9)), jnp.int8), jnp.full((1, 9), 1e-4), d_in)
    weight = dataclasses.replace(weight, values=weight.values.at[:SHARE_A_UNIT].set(0))
    plain = np.asarray(dequantize(weight, jnp.dtype("float32")))
    bound = rounding.of_product(x, plain, d_in)
    x[:, 5] = 2**7 * np.abs(x).max()
    rounding.assert_within(matmul(jnp.asarray(x), pack(weight)), x.astype(np.float64) @ plain, bound)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_row_that_is_not_finite_is_seen_and_harms_no_other(rng: np.random.Generator, kind: str, value: float) -> None:
    packed, x = pack(_weight(rng, kind, 40, 70)), _normal(rng, 6, 40)
    expected = np.asarray(matmul(jnp.asarray(x), packed))
    x[2, 11] = value
    got = np.asarray(matmul(jnp.asarray(x), packed))
    assert not np.isfinite(got[2]).any()
    assert (np.delete(got, 2, 0) == np.delete(expected, 2, 0)).all()


@pytest.mark.parametrize("kind", ["bfloat16", *BLOCKS])
def test_each_row_meets_its_own_experts_matrix(rng: np.random.Generator, kind: str) -> None:
    experts = [_weight(rng, kind, 40, 70) for _ in range(5)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts)
    packed = pack(stacked)
    x = _normal(rng, 90, 40)
    expert_ids = rng.integers(0, 6, 90).astype(np.int32)  # 5 is none of them
    expert_ids[expert_ids == 3] = 2  # nobody asks for 3
    got = np.asarray(jax.jit(matmul_by_expert)(x, packed, expert_ids))
    for row, expert in enumerate(expert_ids):
        expected = 0 * got[row] if expert == 5 else np.asarray(matmul(x[row : row + 1], pack(experts[expert])))[0]
        assert (got[row] == expected).all(), f"row {row} of expert {expert}"
    each = np.asarray(matmul(jnp.asarray(x.reshape(5, 18, 40)), packed))  # a stack multiplies a stack
    assert (each[4] == np.asarray(matmul(x[72:], pack(experts[4])))).all()


def test_packing_rounds_nothing() -> None:
    """One value that is no bfloat16 number keeps the whole matrix in float32."""
    weight = np.ones((8, 8), np.float32)
    assert pack(jnp.asarray(weight)).panels.dtype == jnp.bfloat16
    weight[3, 3] = 1 + 2**-20
    packed = pack(jnp.asarray(weight))
    assert packed.panels.dtype == jnp.float32
    assert isinstance(packed, PackedMatrix)
    assert (np.asarray(matmul(jnp.eye(8), packed)) == weight).all()


@pytest.mark.parametrize("d_in", [MOST_BYTES, 2 * MOST_BYTES + 1])
def test_sums_of_bytes_have_room(d_in: int) -> None:
    """Of the largest numbers of one sign; beyond, the same values are multiplied as wider numbers."""
    values = np.full((d_in, 1), -128, np.int8)
    values[0] = 127  # no 4 bits hold both
    packed = pack(QuantizedMatrix(jnp.asarray(values), jnp.ones((1, 1)), d_in))
    x, plain = np.full((1, d_in), 255 / 256, np.float32), values.astype(np.float64)
    assert packed.panels.dtype == (jnp.int8 if d_in <= MOST_BYTES else jnp.bfloat16)
    rounding.assert_within(
        matmul(jnp.asarray(x), packed), x.astype(np.float64) @ plain, rounding.of_product(x, plain, d_in)
    )
