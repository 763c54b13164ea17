"""Losses between the target's and the draft's next-token distributions: plain functions of one position's logits, in
nats.

Throughout, `p` is the target's distribution over the draft vocabulary as it is, so its sum is the mass that the draft
can propose at all, and q = softmax(logits) is the draft's. Losses of likelihood go by p renormalised, since no draft
can do anything about the rest; those of acceptance go by p itself.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

LossName = Literal["ce", "kl", "tv", "lk", "lk-hybrid", "ce-l1"]
Weighting = Literal["decay", "d-pace"]
Loss = Callable[[jax.Array, jax.Array], jax.Array]  # p, logits [..., draft_vocab] float32 -> [...]
# acceptance and what counts (1 or 0) of each state, [rollout, column] float32 -> what the loss of a state counts
Weigh = Callable[[jax.Array, jax.Array], jax.Array]
SMALLEST = 1e-9  # acceptance and mass are never taken to be less, so that logarithms stay finite
SMOOTHING = 0.5  # of acceptances, so that states behind a bad one still learn


def soft_cross_entropy(p: jax.Array, logits: jax.Array) -> jax.Array:
    """-sum_v p_v log q_v, p renormalised: as in Li et al. 2025 (arXiv 2503.01840)."""
    p = _normalised(p)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(p * logits, axis=-1)


def kl_divergence(p: jax.Array, logits: jax.Array) -> jax.Array:
    """sum_v p_v log(p_v / q_v), p renormalised: the cross-entropy less the target's own entropy, so its gradient is the
    same and a perfect draft has 0."""
    p = _normalised(p)
    return soft_cross_entropy(p, logits) + jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1)


def acceptance(p: jax.Array, logits: jax.Array) -> jax.Array:
    """alpha = sum_v min(p_v, q_v): how often a token drawn from q is accepted (Leviathan et al. 2023, arXiv 2211.17192,
    section 3.2)."""
    return jnp.sum(jnp.minimum(p, jax.nn.softmax(logits, axis=-1)), axis=-1)


def total_variation(p: jax.Array, logits: jax.Array) -> jax.Array:
    """1 - alpha, which is half the L1 distance of the two distributions over the whole vocabulary (DistillSpec, Zhou et
    al. 2024, arXiv 2310.08461)."""
    return 1.0 - acceptance(p, logits)


def log_acceptance(p: jax.Array, logits: jax.Array) -> jax.Array:
    """-log alpha (LK, arXiv 2602.23881)."""
    return -jnp.log(jnp.maximum(acceptance(p, logits), SMALLEST))


def hybrid(p: jax.Array, logits: jax.Array, kl_decay: float) -> jax.Array:
    """w KL + (1 - w) (1 - alpha) with w = exp(-kl_decay alpha), itself not differentiated (LK, arXiv 2602.23881): far
    off, the draft learns from likelihood, whose gradient reaches every token; nearer, from the acceptance itself."""
    distance = total_variation(p, logits)
    weight = jax.lax.stop_gradient(jnp.exp(-kl_decay * (1.0 - distance)))
    return weight * kl_divergence(p, logits) + (1.0 - weight) * distance


def likelihood_and_distance(p: jax.Array, logits: jax.Array) -> jax.Array:
    """0.1 CE + 0.9 L1, the L1 distance being twice the total variation: arXiv 2607.05147, as its published code has
    it."""
    return 0.1 * soft_cross_entropy(p, logits) + 0.9 * 2.0 * total_variation(p, logits)


def expected_length(accepted: jax.Array, weights: jax.Array) -> jax.Array:
    """Weight the states of a block by the number of its tokens that are expected to be accepted (D-PACE, arXiv
    2605.18810, equations 7 and 8). The weights shift to later states as earlier ones are learnt.

    A token is accepted where all before it are, so the expected length is sum_m prod_(i <= m) s_i, and the share of it
    that needs state k is sum_(m >= k) prod_(i <= m) s_i. The paper has s_i = (1 - a) q_i + a with a = 1/2, q_i being
    what the draft gives the one right token. That is the acceptance of a target which always says this token, and
    here the acceptance stands in its place, for any target.
    """
    smoothed = (1.0 - SMOOTHING) * accepted + SMOOTHING
    reached = jnp.cumprod(jnp.where(weights > 0, smoothed, 0.0), axis=0)
    return jnp.flip(jnp.cumsum(jnp.flip(reached, axis=0), axis=0), axis=0)


def make_loss(name: LossName, kl_decay: float) -> Loss:
    """The loss that the setting `train.loss` names."""
    return {
        "ce": soft_cross_entropy,
        "kl": kl_divergence,
        "tv": total_variation,
        "lk": log_acceptance,
        "lk-hybrid": lambda p, logits: hybrid(p, logits, kl_decay),
        "ce-l1": likelihood_and_distance,
    }[name]


def _normalised(p: jax.Array) -> jax.Array:
    return p / jnp.maximum(jnp.sum(p, axis=-1, keepdims=True), SMALLEST)
