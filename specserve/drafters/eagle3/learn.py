"""The training of an EAGLE-3 head, by the rollout of `drafters.unroll`."""

import functools

import jax

from specserve.drafters.door import Rollout, Rows, shift
from specserve.drafters.eagle.config import Eagle3Config
from specserve.drafters.eagle.model import Eagle3Params, draft_forward, draft_inputs, fuse_features
from specserve.drafters.unroll import computed_again
from specserve.kernels.rows import Documents, Unrolled
from specserve.models.attention import KV


def rollout_states(
    params: Eagle3Params,
    config: Eagle3Config,
    embedding: jax.Array,  # [vocab, d_model]
    rows: Rows,
    aux_hidden_states: jax.Array,  # [batch, seq, taps * target_d_model]
    rollout: Rollout,
) -> list[jax.Array]:  # length x [batch, seq, d_model], what `draft_logits` takes
    """Compute the head's hidden states in every rollout step. The state at position t of step k predicts the token
    after token t + 1 + k."""
    run = functools.partial(_one_step, config)
    if rollout.remat:
        run = computed_again(run)
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
        return Unrolled(documents, [entries[i] for entries in kv]).attend(q, k, v)

    return draft_forward(params, config, inputs, attend)
