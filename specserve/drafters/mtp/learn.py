"""The training of a layer of multi-token prediction, by the rollout of `drafters.unroll`, in which it runs again over
its own states as it does when it serves. FastMTP (arXiv 2509.18362) weighs three depths by .51, .31 and .18, which is
`rollout_decay` 0.6."""

import functools

import jax

from specserve.drafters.door import Rollout, Rows, shift
from specserve.drafters.mtp import model
from specserve.drafters.mtp.config import MtpConfig
from specserve.drafters.unroll import computed_again
from specserve.kernels import native
from specserve.kernels.rows import Documents, Unrolled
from specserve.models.attention import KV
from specserve.models.target import TargetParams


def rollout_states(
    params: model.MtpParams,
    config: MtpConfig,
    target: TargetParams,
    rows: Rows,
    aux_hidden_states: jax.Array,  # [batch, seq, d_model]
    rollout: Rollout,
) -> list[jax.Array]:  # length x [batch, seq, d_model], what `draft_logits` takes
    """Compute the layer's states in every rollout step. The state at position t of step k predicts the token after
    token t + 1 + k."""
    run = functools.partial(_one_step, config)
    if rollout.remat:
        run = computed_again(run)
    hidden = model.taken(config, target, aux_hidden_states)
    # of the target only what the layer shares: what is kept for the backward pass is kept for each step
    shared = TargetParams(target.embedding, (), target.norm, None)
    states: list[jax.Array] = []
    kv: list[KV] = []
    for k in range(rollout.length):
        token_ids, position_ids = shift(rows.token_ids, 1 + k), rows.position_ids + 1 + k
        state, own = run(hidden, kv, params, shared, token_ids, position_ids, Documents(rows.document_ids))
        hidden = model.handed_on(params, config, state)
        states.append(state)
        kv = [*kv, own]
    return states


def _one_step(
    config: MtpConfig,
    hidden: jax.Array,  # [batch, seq, d_model], of the target or of the step before
    kv: list[KV],  # of the steps before
    params: model.MtpParams,
    target: TargetParams,
    token_ids: jax.Array,  # [batch, seq] int32
    position_ids: jax.Array,  # [batch, seq] int32
    documents: Documents,
) -> tuple[jax.Array, KV]:
    mask = Unrolled(documents, kv)
    with native.left_out():  # the kernels of a served step have no gradient
        x = model.inputs(params, config, target, token_ids, hidden)
        states, _ = model.run(params, config, x, position_ids, mask)
    assert mask.own is not None, "the layer attended"
    return states, mask.own
