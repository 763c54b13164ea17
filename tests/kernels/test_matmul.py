"""A blocked matrix multiplies like the matrix that was cut, a quantised one like its values times its scales."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rounding import UNIT, assert_within, of_product

from specserve.kernels import native, reference
from specserve.kernels.matmul import (
    AdaptedMatrix,
    BlockedMatrix,
    QuantizedMatrix,
    Rounded,
    block,
    dequantize,
    matmul,
    matmul_float32,
    pack,
    quantize,
)

COLUMNS = 16


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("rows", [(1,), (2, 3), (2, 1, 9)])
def test_blocked_product_matches_reference_and_the_plain_product(
    rng: np.random.Generator, num_blocks: int, rows: tuple[int, ...]
) -> None:
    weight = rng.standard_normal((24, num_blocks * COLUMNS)).astype(np.float32)
    x = rng.standard_normal((*rows, 24)).astype(np.float32)
    blocked = block(jnp.asarray(weight), COLUMNS)
    assert isinstance(blocked, BlockedMatrix)
    assert blocked.shape == weight.shape
    for product in (matmul, matmul_float32):
        got = product(jnp.asarray(x), blocked)
        assert_within(got, reference.matmul(x, blocked), of_product(x, weight))
        assert_within(got, product(jnp.asarray(x), jnp.asarray(weight)), of_product(x, weight))


def test_a_width_that_is_no_multiple_stays_whole() -> None:
    weight = jnp.ones((4, COLUMNS + 1))
    assert block(weight, COLUMNS) is weight


def test_logits_of_bfloat16_are_accumulated_in_float32(rng: np.random.Generator) -> None:
    weight = jnp.asarray(rng.standard_normal((512, 8)), jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((3, 512)), jnp.bfloat16)
    out = matmul_float32(x, weight)
    assert out.dtype == jnp.float32
    assert_within(out, np.asarray(x, np.float32) @ np.asarray(weight, np.float32), of_product(x, weight))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_logits_is_that_of_the_product(rng: np.random.Generator, dtype: str) -> None:
    x, weight = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((2, 3, 24), (24, 40)))
    of_logits = jnp.asarray(rng.standard_normal((2, 3, 40)), jnp.float32)
    _, pull_back = jax.vjp(matmul_float32, x, weight)
    of_x, of_weight = pull_back(of_logits)
    assert (of_x.dtype, of_weight.dtype) == (x.dtype, weight.dtype)
    rows, plain, gradient = (np.asarray(each, np.float32) for each in (x.reshape(6, 24), weight, of_logits))
    gradient = gradient.reshape(6, 40)
    off = 1.0 if dtype == "float32" else 2.0**16  # of which bfloat16 has so many bits less
    assert_within(of_x.reshape(6, 24), gradient @ plain.T, off * of_product(gradient, plain.T))
    assert_within(of_weight, rows.T @ gradient, off * of_product(rows.T, gradient))


@pytest.mark.parametrize("num_experts", [(), (3,)], ids=["one", "experts"])
def test_a_weight_that_is_no_array_is_not_iterated_over(num_experts: tuple[int, ...]) -> None:
    """Its leaves share scales, or lie in another order: it has no rows to give, and never as many as a loop takes."""
    plain = jnp.ones((*num_experts, 32, COLUMNS * 2))
    quantized = quantize(plain, "int8")
    weights: list[Any] = [quantized, *([] if num_experts else [block(plain, COLUMNS)])]
    weights += [pack(plain), pack(quantized)] if native.is_available() else []
    for weight in weights:
        assert not isinstance(weight, jax.Array)
        with pytest.raises(TypeError, match="not iterable"):
            iter(weight)


def _quantized(rng: np.random.Generator, d_in: int, block: int, dtype: type) -> QuantizedMatrix:
    values = rng.integers(-100, 100, (d_in, 12)).astype(np.float32).astype(dtype)
    scale = rng.uniform(0.001, 0.01, (-(-d_in // block), 12)).astype(np.float32)
    return QuantizedMatrix(jnp.asarray(values), jnp.asarray(scale), block)


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("block", [32, 8, 16, 12])  # one scale for each output; blocks; blocks that do not divide 32
@pytest.mark.parametrize("rows", [(1,), (2, 3), (2, 1, 9)])
def test_quantized_product_matches_reference(
    rng: np.random.Generator, rows: tuple[int, ...], block: int, dtype: type
) -> None:
    weight = _quantized(rng, 32, block, dtype)
    x = rng.standard_normal((*rows, 32)).astype(np.float32)
    plain = dequantize(weight, jnp.float32)
    for got in (matmul(jnp.asarray(x), weight), matmul_float32(jnp.asarray(x), weight), x @ plain):
        assert_within(got, reference.matmul(x, weight), of_product(x, plain))


@pytest.mark.parametrize("block", [32, 8])
@pytest.mark.parametrize("num_rows", [3, 20])
def test_experts_multiply_each_their_own_rows(rng: np.random.Generator, num_rows: int, block: int) -> None:
    experts = [_quantized(rng, 32, block, np.int8) for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts)
    x = jnp.asarray(rng.standard_normal((3, num_rows, 32)), jnp.float32)
    expected = np.stack([matmul(rows, expert) for rows, expert in zip(x, experts, strict=True)])
    plain = dequantize(stacked, jnp.float32)
    bound = of_product(x, plain)
    assert_within(matmul(x, stacked), expected, bound)
    assert_within(x @ plain, expected, bound)
    assert len(stacked) == 3
    assert_within(matmul(x[1], stacked[1]), expected[1], bound[1])
    ids = jnp.asarray([2, 0])
    assert_within(matmul(x[ids], stacked[ids]), expected[ids], bound[ids])


def test_products_of_bfloat16_rows_are_scaled_in_float32(rng: np.random.Generator) -> None:
    """8-bit values are bfloat16 values, so the product differs from float32's in the rounding of x alone."""
    weight = _quantized(rng, 512, 512, np.int8)
    x = jnp.asarray(rng.standard_normal((3, 512)), jnp.bfloat16)
    expected = reference.matmul(np.asarray(x, np.float32), weight)
    assert_within(matmul_float32(x, weight), expected, of_product(x, dequantize(weight, jnp.float32)))
    assert matmul(x, weight).dtype == jnp.bfloat16


@pytest.mark.parametrize("to", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("shape", [(40, 24), (3, 40, 24)])
def test_quantized_elements_keep_their_bound(rng: np.random.Generator, to: Rounded, shape: tuple[int, ...]) -> None:
    weight = rng.standard_normal(shape).astype(np.float32) * np.exp(rng.standard_normal(shape[-1]) * 3)
    weight[..., 5] = 0
    quantized = quantize(jnp.asarray(weight, jnp.float32), to)
    largest = np.abs(weight).max(-2, keepdims=True)
    if to == "int4":  # half a step, and the roundings of scale and offset to float16
        scale, offset = (
            np.repeat(np.asarray(each), 32, axis=-2)[..., :40, :] for each in (quantized.scale, quantized.offset)
        )
        step = scale / 2 + 2.0**-11 * (15 * scale + np.abs(offset)) + 2.0**-24
    else:
        step = {"int8": largest / 254, "fp8": np.maximum(np.abs(weight) / 16, largest / 448 / 1024)}[to]
    error = np.abs(np.asarray(dequantize(quantized, jnp.float32)) - weight)
    assert (error <= step + 4 * UNIT * np.abs(weight)).all()  # the weight, its scale, their ratio, their product
    assert error.max() > 0
    assert quantized.values.dtype.itemsize == 1


def test_outputs_side_by_side_and_picked_are_quantized_leaf_by_leaf(rng: np.random.Generator) -> None:
    """What fuses projections and warm-starts a draft's head."""
    left, right = (_quantized(rng, 32, 8, np.int8) for _ in range(2))
    x = jnp.asarray(rng.standard_normal((3, 32)), jnp.float32)
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), left, right)
    expected = np.concatenate([matmul(x, left), matmul(x, right)], axis=-1)
    bound = of_product(x, dequantize(both, jnp.float32))
    assert_within(matmul(x, both), expected, bound)
    ids = jnp.asarray([5, 0, 20])
    assert_within(matmul(x, both[:, ids]), expected[:, ids], bound[:, ids])


@pytest.mark.parametrize(
    "is_packed", [False, pytest.param(True, marks=pytest.mark.skipif(not native.is_available(), reason="not built"))]
)
@pytest.mark.parametrize("has_add", [False, True])
def test_a_row_is_multiplied_by_its_own_pair(rng: np.random.Generator, is_packed: bool, has_add: bool) -> None:
    """A row without a pair is that of the base to the bit, whatever numbers the pairs have. Packed, no row's bits
    depend on how many rows there are or on whose pairs they have."""
    base, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((24, 40), (2, 24, 4), (2, 4, 40)))
    x, add = (rng.standard_normal((2, 9, width)).astype(np.float32) for width in (24, 40))
    ids = np.array([-1, 0, 1, 0, -1, 1, 1, 0, -1], np.int32)[None].repeat(2, axis=0)
    plain = pack(base) if is_packed else jnp.asarray(base)
    product = jax.jit(lambda x, weight, add: matmul(x, weight, add if has_add else None))

    def multiply(x: np.ndarray, ids: np.ndarray, add: np.ndarray, *pairs: np.ndarray) -> np.ndarray:
        own = [pack(each, narrows=False) if is_packed else jnp.asarray(each) for each in pairs or (a, b)]
        weight = AdaptedMatrix(plain, *own, jnp.asarray(ids))
        assert weight.shape == base.shape
        return np.asarray(product(jnp.asarray(x), weight, jnp.asarray(add)))

    got = multiply(x, ids, add)
    for row in np.ndindex(ids.shape):
        factors = (a[ids[row]], b[ids[row]]) if ids[row] >= 0 else (np.zeros((24, 1)), np.zeros((1, 40)))
        expected = x[row] @ (base + factors[0].astype(np.float64) @ factors[1]) + (add[row] if has_add else 0)
        bound = of_product(np.abs(x[row][None]), np.abs(base) + np.abs(factors[0]) @ np.abs(factors[1]))[0]
        assert_within(got[row], expected, 4 * bound + UNIT * np.abs(add[row]))
        if is_packed:
            alone = multiply(x[row][None, None], ids[row][None, None], add[row][None, None])
            assert alone.tobytes() == got[row].tobytes()
    without = multiply(x, np.full_like(ids, -1), add, np.full_like(a, np.nan), np.full_like(b, np.nan))
    assert without.tobytes() == np.asarray(product(jnp.asarray(x), plain, jnp.asarray(add))).tobytes()
    assert got[ids < 0].tobytes() == without[ids < 0].tobytes()
