"""Training-time test (EAGLE-3, section 3.2): the head is trained on its own outputs, as it runs when it serves.

Serving drafts several tokens ahead. Only the first draft token is predicted from the target's feature; every later one
is predicted from the head's own hidden state of the draft token before. Training repeats that: step 0 runs the head
over all positions of a row with the target's features, and step k runs it again with its own hidden states of step
k - 1.

At position t of step k the head reads token t + 1 + k and predicts the token after it, t + 2 + k. So with every step
the tokens that are read, the distributions that are predicted and the loss mask move by one.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from specserve.drafters.door import Rollout, Rows, shift
from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.eagle3.model import Eagle3Params, draft_forward, draft_inputs, fuse_features
from specserve.kernels.rows import Documents, attend_rollout
from specserve.models.attention import KV

Result = TypeVar("Result")


def rollout_states(
    params: Eagle3Params,
    config: Eagle3Config,
    embedding: jax.Array,  # [vocab, d_model]
    rows: Rows,
    aux_hidden_states: jax.Array,  # [batch, seq, taps * target_d_model]
    rollout: Rollout,
) -> list[jax.Array]:  # length x [batch, seq, d_model], what `draft_logits` takes
    """The head's hidden states in every rollout step. Position t of step k has the state that predicts what follows
    token t + 1 + k."""
    run = functools.partial(_one_step, config)
    if rollout.remat:
        run = _computed_again(run)
    hidden = fuse_features(params, config, aux_hidden_states)
    states: list[jax.Array] = []
    kv: list[tuple[KV, ...]] = []
    for k in range(rollout.length):
        token_ids, position_ids = shift(rows.token_ids, 1 + k), rows.position_ids + 1 + k
        hidden, own = run(hidden, kv, params, embedding, token_ids, position_ids, Documents(rows.document_ids))
        states.append(hidden)
        kv = [*kv, own]
    return states


def _one_step(
    config: Eagle3Config,
    hidden: jax.Array,  # [batch, seq, d_model], features or the states of the step before
    kv: list[tuple[KV, ...]],  # of the steps before, layer by layer
    params: Eagle3Params,
    embedding: jax.Array,
    token_ids: jax.Array,  # [batch, seq] int32
    position_ids: jax.Array,  # [batch, seq] int32
    documents: Documents,
) -> tuple[jax.Array, tuple[KV, ...]]:
    inputs = draft_inputs(params, config, embedding, token_ids, hidden, position_ids)

    def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        (first_k, first_v), *later = [*(entries[i] for entries in kv), (k, v)]
        return attend_rollout(q, first_k, first_v, documents, tuple(k for k, _ in later), tuple(v for _, v in later))

    return draft_forward(params, config, inputs, attend)


def _computed_again(step: Callable[..., Result]) -> Callable[..., Result]:
    """The step, of which nothing is kept for the backward pass but its arguments.

    `jax.checkpoint` says the same, by barriers that XLA's CPU compiler drops before it schedules: there all steps were
    computed again at once, and lived side by side. So the state that a step begins with waits for the cotangents of
    its end, by a sum that changes nothing.
    """

    @jax.custom_vjp
    def run(*arguments: Any) -> Any:
        return step(*arguments)

    def forward(*arguments: Any) -> tuple[Any, Any]:
        return step(*arguments), arguments

    def backward(arguments: Any, cotangents: Any) -> Any:
        (hidden, *rest), cotangents = jax.lax.optimization_barrier((arguments, cotangents))
        nothing = sum(0.0 * jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(cotangents))
        hidden += jnp.asarray(nothing, hidden.dtype)
        return jax.vjp(step, hidden, *rest)[1](cotangents)

    run.defvjp(forward, backward)
    return run


def by_position(states: list[jax.Array]) -> list[jax.Array]:
    """The states moved to the token whose successor they predict: that of position t in step k to position t + 1 + k.
    What all steps say about one token then lies at one position."""
    return [shift(state, -1 - k) for k, state in enumerate(states)]


def loss_positions(rows: Rows, step: int) -> jax.Array:  # [batch, seq] float32
    """Where a rollout step learns: 1 at position t if the token that is predicted there, t + 2 + step, belongs to the
    assistant and to the same document, else 0."""
    ahead = 2 + step
    same = (shift(rows.document_ids, ahead) == rows.document_ids) & (rows.document_ids > 0)
    return (same & shift(rows.loss_mask, ahead)).astype(jnp.float32)


def all_weights(rows: Rows, length: int) -> jax.Array:  # [rollout, batch, seq] float32
    """The weights of all steps, moved as `by_position` moves the states."""
    return jnp.stack(by_position([loss_positions(rows, step) for step in range(length)]))
