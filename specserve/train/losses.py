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

LossName = Literal["ce", "kl", "tv", "lk", "lk-hybrid"]
Loss = Callable[[jax.Array, jax.Array], jax.Array]  # p, logits [..., draft_vocab] float32 -> [...]
SMALLEST = 1e-9  # acceptance and mass are never taken to be less, so that logarithms stay finite


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
    off, the draft learns from likelihood, whose gradient reaches every token; nearer, from what is wanted of it."""
    distance = total_variation(p, logits)
    weight = jax.lax.stop_gradient(jnp.exp(-kl_decay * (1.0 - distance)))
    return weight * kl_divergence(p, logits) + (1.0 - weight) * distance


def make_loss(name: LossName, kl_decay: float) -> Loss:
    """The loss that the setting `train.loss` names."""
    return {
        "ce": soft_cross_entropy,
        "kl": kl_divergence,
        "tv": total_variation,
        "lk": log_acceptance,
        "lk-hybrid": lambda p, logits: hybrid(p, logits, kl_decay),
    }[name]


def _normalised(p: jax.Array) -> jax.Array:
    return p / jnp.maximum(jnp.sum(p, axis=-1, keepdims=True), SMALLEST)
