"""Training-time test (EAGLE-3, section 3.2): the head is unrolled over its own recurrent state, as serving unrolls it.

Slot t of step 0 consumes (feature t, token t + 1) and predicts the target's distribution at t + 1. Slot t of step k
consumes (its own state of step k - 1, token t + 1 + k) and predicts the distribution at t + 1 + k, whose token is
t + 2 + k: so the loss mask moves with the step.
"""

import jax
import jax.numpy as jnp

from specserve.kernels.attention import attend, attend_rollout
from specserve.models.config import DraftConfig
from specserve.models.draft import DraftParams, draft_inputs, draft_kv, draft_layer, draft_logits, fuse_features
from specserve.pytree import pytree
from specserve.train.losses import masked_mean, soft_cross_entropy


@pytree
class Rows:
    """A batch of packed rows."""

    token_ids: jax.Array  # [batch, seq] int32
    loss_mask: jax.Array  # [batch, seq] bool, True where the token is the assistant's
    document_ids: jax.Array  # [batch, seq] int32, 0 is padding
    position_ids: jax.Array  # [batch, seq] int32, restarting with each document


@pytree
class Teacher:
    """What the frozen target says about every slot."""

    probs: jax.Array  # [batch, seq, draft_vocab] float32, renormalised over the draft vocabulary
    best_draft_id: jax.Array  # [batch, seq] int32, the target's best token as a draft row; -1 when it is none


@pytree
class RolloutMetrics:
    """One value per rollout step."""

    loss: jax.Array  # [rollout] float32, nats
    accuracy: (
        jax.Array
    )  # [rollout] float32: how often the draft's best token is the target's, out-of-vocabulary counted


def shift(x: jax.Array, by: int) -> jax.Array:
    """x[t + by] at t along axis 1, zero past the end."""
    return jnp.pad(x[:, by:], [(0, 0), (0, by)] + [(0, 0)] * (x.ndim - 2))


def visible_within_documents(document_ids: jax.Array) -> jax.Array:  # [batch, seq] -> [batch, seq, seq] bool
    """Causal, and never across documents."""
    seq = document_ids.shape[1]
    causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)
    return causal & (document_ids[:, :, None] == document_ids[:, None])


def rollout_states(
    params: DraftParams,
    config: DraftConfig,
    embedding: jax.Array,  # [vocab, d_model]
    rows: Rows,
    aux_hidden_states: jax.Array,  # [batch, seq, taps * target_d_model]
    length: int,
) -> list[jax.Array]:  # length x [batch, seq, d_model], what `draft_logits` takes
    """The recurrent states of every rollout step."""
    mask = visible_within_documents(rows.document_ids)
    hidden = fuse_features(params, config, aux_hidden_states)
    states, kv = [], []
    for step in range(length):
        inputs = draft_inputs(
            params, config, embedding, shift(rows.token_ids, 1 + step), hidden, rows.position_ids + 1 + step
        )
        kv.append(draft_kv(params, config, inputs))

        def attend_to(q: jax.Array, kv: list = list(kv)) -> jax.Array:  # noqa: B006  bound now: the list grows
            (k, v), later = kv[0], kv[1:]
            if not later:
                return attend(q, k, v, mask)
            return attend_rollout(q, k, v, mask, tuple(k for k, _ in later), tuple(v for _, v in later))

        hidden = draft_layer(params, config, inputs, attend_to)
        states.append(hidden)
    return states


def rollout_loss(
    params: DraftParams,
    config: DraftConfig,
    embedding: jax.Array,
    rows: Rows,
    aux_hidden_states: jax.Array,
    teacher: Teacher,
    *,
    length: int,
    decay: float,
) -> tuple[jax.Array, RolloutMetrics]:
    """sum_k decay^k * mean over loss-bearing slots of the soft cross-entropy at step k."""
    losses, accuracies = [], []
    for step, hidden in enumerate(rollout_states(params, config, embedding, rows, aux_hidden_states, length)):
        weights = slot_weights(rows, step)
        best = shift(teacher.best_draft_id + 1, 1 + step) - 1  # past the end: -1, no draft row
        is_known = jnp.where(best >= 0, weights, 0.0)
        loss, hits = _step_loss(params, config, hidden, shift(teacher.probs, 1 + step), best)
        losses.append(masked_mean(loss, is_known))
        accuracies.append(masked_mean(hits, weights))
    total = sum(decay**step * loss for step, loss in enumerate(losses))
    return jnp.asarray(total), RolloutMetrics(jnp.stack(losses), jnp.stack(accuracies))


def slot_weights(rows: Rows, step: int) -> jax.Array:  # [batch, seq] float32
    """1 where the token predicted at rollout step `step` is the assistant's and of the slot's own document."""
    ahead = 2 + step
    same = (shift(rows.document_ids, ahead) == rows.document_ids) & (rows.document_ids > 0)
    return (same & shift(rows.loss_mask, ahead)).astype(jnp.float32)


def _step_loss(
    params: DraftParams, config: DraftConfig, hidden: jax.Array, probs: jax.Array, best: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits = draft_logits(params, config, hidden)
    of_best = jnp.take_along_axis(logits, jnp.maximum(best, 0)[..., None], axis=-1)[..., 0]
    hits = (of_best >= jnp.max(logits, axis=-1)) & (best >= 0)
    return soft_cross_entropy(probs, logits), hits.astype(jnp.float32)
