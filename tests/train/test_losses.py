"""The losses equal their formulas in float64, and are least where the draft is the target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import assert_same, tolerance
from scipy.special import log_softmax

from specserve.checkpoints.load import Target
from specserve.mesh import made_for
from specserve.speculative.vocab import DraftVocab
from specserve.train.chunked_loss import HiddenStates
from specserve.train.losses import LossName, acceptance, make_loss

NAMES: tuple[LossName, ...] = ("ce", "kl", "tv", "lk", "lk-hybrid", "ce-l1")


def _pair(rng: np.random.Generator, mass: float) -> tuple[np.ndarray, np.ndarray]:
    p = rng.dirichlet(np.ones(9), 4) * mass  # the rest is out of the draft vocabulary
    return p.astype(np.float32), rng.standard_normal((4, 9)).astype(np.float32) * 3


@pytest.mark.parametrize("mass", [1.0, 0.6])
@pytest.mark.parametrize("name", NAMES)
def test_losses_equal_numpy(rng: np.random.Generator, name: LossName, mass: float) -> None:
    p, logits = _pair(rng, mass)
    log_q = log_softmax(logits.astype(np.float64), axis=-1)
    inside = p.astype(np.float64) / p.sum(-1, keepdims=True)
    alpha = np.minimum(p, np.exp(log_q)).sum(-1)
    kl = (inside * (np.log(inside) - log_q)).sum(-1)
    weight = np.exp(-2.5 * alpha)
    expected = {
        "ce": -(inside * log_q).sum(-1),
        "kl": kl,
        # half the L1 distance over the whole vocabulary, where the draft has nothing outside its own
        "tv": (np.abs(p - np.exp(log_q)).sum(-1) + 1 - p.sum(-1)) / 2,
        "lk": -np.log(alpha),
        "lk-hybrid": weight * kl + (1 - weight) * (1 - alpha),
        "ce-l1": 0.1 * -(inside * log_q).sum(-1) + 0.9 * (np.abs(p - np.exp(log_q)).sum(-1) + 1 - p.sum(-1)),
    }[name]
    args = make_loss(name, 2.5), jnp.asarray(p), jnp.asarray(logits)
    assert_same(args[0](*args[1:]), expected, tolerance(*args))


@pytest.mark.parametrize("name", NAMES)
def test_a_perfect_draft_has_the_least_loss(rng: np.random.Generator, name: LossName) -> None:
    p, other = _pair(rng, 1.0)
    loss = make_loss(name, 2.5)
    best = loss(jnp.asarray(p), jnp.log(jnp.asarray(p)))
    assert (best < loss(jnp.asarray(p), jnp.asarray(other))).all()
    if not name.startswith("ce"):  # the least of a cross-entropy is the target's own entropy
        args = jnp.asarray(p), jnp.log(jnp.asarray(p))
        assert (np.abs(best) <= tolerance(loss, *args)).all()
    gradient = jax.grad(lambda logits: loss(jnp.asarray(p), logits).sum())(jnp.asarray(other))
    assert np.isfinite(np.asarray(gradient)).all()
    assert np.abs(np.asarray(gradient)).max() > 1e-3


def test_no_mass_in_the_draft_vocabulary_is_finite(rng: np.random.Generator) -> None:
    _, logits = _pair(rng, 1.0)
    nothing = jnp.zeros(logits.shape)
    for name in NAMES:
        value, gradient = jax.value_and_grad(lambda x, n=name: make_loss(n, 2.5)(nothing, x).sum())(jnp.asarray(logits))
        assert np.isfinite(value)
        assert np.isfinite(np.asarray(gradient)).all()
    np.testing.assert_array_equal(acceptance(nothing, jnp.asarray(logits)), 0)


def test_a_tpu_takes_the_drafts_logits_by_a_product_of_their_own(rng: np.random.Generator, tiny_target: Target) -> None:
    """They are those that others pick out of all logits, and so is the best token, drafted or not."""
    params, config = tiny_target.params, tiny_target.config
    hidden = jnp.asarray(rng.standard_normal((40, config.d_model)), jnp.float32)
    vocab = DraftVocab(jnp.asarray(np.sort(rng.choice(config.vocab_size, config.vocab_size // 2, replace=False))))

    def compared(hidden: jax.Array) -> tuple[jax.Array, ...]:
        return HiddenStates(hidden).compared(params, config, vocab)

    expected, error = compared(hidden), tolerance(compared, hidden)
    with made_for("tpu"):
        found = compared(hidden)
    assert_same(found[:2], expected[:2], error[:2])
    np.testing.assert_array_equal(found[2], expected[2])
    assert {-1} < {*np.asarray(found[2]).tolist()}
