"""The optimisers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import muon

from specserve.train.optimizer import NEWTON_SCHULZ, make_optimizer
from specserve.train.settings import TrainSettings


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_with_its_iterations_one_by_one_is_muon(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    """As optax has it by default, with its iterations unrolled, over several steps."""
    settings = TrainSettings(optimizer="muon", muon_lr=1.0, clip=1e9)
    ours, theirs = make_optimizer(settings), muon(1.0, adam_b2=0.95)
    params = {"matrix": jnp.asarray(rng.standard_normal(shape), jnp.float32)}
    states = [each.init(params) for each in (ours, theirs)]
    # every iteration multiplies what rounding left by the coefficients, whose magnitudes sum up to 10, and adds sums
    # of as many terms as the matrix is wide; a singular value ends near 1, so this is also relative to the entries
    error = len(NEWTON_SCHULZ) * max(shape) * 10 * np.finfo(np.float32).eps
    for _ in range(3):
        gradient = {"matrix": jnp.asarray(rng.standard_normal(shape), jnp.float32)}
        found = []
        for i, optimizer in enumerate((ours, theirs)):
            with jax.numpy_dtype_promotion("standard"):  # strict promotion is for our own code
                updates, states[i] = jax.jit(optimizer.update)(gradient, states[i], params)
            found.append(np.asarray(optax.tree.get(updates, "matrix")))
        np.testing.assert_allclose(found[0], found[1], rtol=0, atol=error)
        singular = np.linalg.svd(found[0], compute_uv=False) / max(1.0, (shape[1] / shape[0]) ** 0.5)
        np.testing.assert_allclose(singular, 0.9, atol=0.4)  # orthogonal, as far as five iterations make it
