"""A blocked matrix multiplies like the matrix that was cut."""

import jax.numpy as jnp
import numpy as np
import pytest

from specserve.kernels import reference
from specserve.kernels.matmul import BLOCK_COLUMNS, BlockedMatrix, block, matmul, matmul_float32


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("rows", [(1,), (2, 3), (2, 1, 9)])
def test_blocked_product_matches_reference_and_the_plain_product(
    rng: np.random.Generator, num_blocks: int, rows: tuple[int, ...]
) -> None:
    weight = rng.standard_normal((24, num_blocks * BLOCK_COLUMNS)).astype(np.float32)
    x = rng.standard_normal((*rows, 24)).astype(np.float32)
    blocked = block(jnp.asarray(weight))
    assert isinstance(blocked, BlockedMatrix)
    assert blocked.shape == weight.shape
    for product in (matmul, matmul_float32):
        got = product(jnp.asarray(x), blocked)
        np.testing.assert_allclose(got, reference.matmul(x, blocked), atol=1e-5)
        np.testing.assert_allclose(got, product(jnp.asarray(x), jnp.asarray(weight)), atol=1e-5)


def test_a_width_that_is_no_multiple_stays_whole() -> None:
    weight = jnp.ones((4, BLOCK_COLUMNS + 1))
    assert block(weight) is weight


def test_logits_of_bfloat16_are_accumulated_in_float32(rng: np.random.Generator) -> None:
    weight = jnp.asarray(rng.standard_normal((512, 8)), jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((3, 512)), jnp.bfloat16)
    out = matmul_float32(x, weight)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, np.asarray(x, np.float32) @ np.asarray(weight, np.float32), atol=1e-3)
