"""Losses between the target's and the draft's next-token distributions: plain functions of logits."""

import jax
import jax.numpy as jnp


def soft_cross_entropy(
    teacher_probs: jax.Array,  # [..., draft_vocab] float32
    logits: jax.Array,  # [..., draft_vocab] float32
) -> jax.Array:  # [...]
    """-sum_v p_v log q_v, in nats: the loss of EAGLE-3 (arXiv 2503.01840)."""
    return jax.nn.logsumexp(logits, axis=-1) * jnp.sum(teacher_probs, axis=-1) - jnp.sum(
        teacher_probs * logits, axis=-1
    )


def masked_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean over the slots with weight; 0 when there are none."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1.0)
