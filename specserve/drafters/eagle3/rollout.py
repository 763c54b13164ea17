"""The training rollout of an EAGLE-3 head (see `drafters.learning`), and its costs."""

import functools

import jax
from jax.sharding import Mesh

from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.eagle3.model import Eagle3Params, draft_forward, draft_inputs, fuse_features
from specserve.drafters.learning import (
    Costs,
    Flops,
    Rollout,
    Rows,
    attention_flops,
    computed_again,
    kept_by_layer,
    shift,
    workspace_of_layer,
)
from specserve.kernels import rows as row_kernels
from specserve.kernels.rows import Documents, Unrolled
from specserve.mesh import on_each_device
from specserve.models.attention import KV
from specserve.models.params import is_matrix, num_params, specs


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


def rollout_costs(config: Eagle3Config, spec: Eagle3Params, rollout: Rollout, seq_len: int, mesh: Mesh | None) -> Costs:
    """Return the costs of a rollout for each position of a row, by the rules of `train.flops`. `spec` are the
    parameters that a device has."""
    heads, kv = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    again = 1 if rollout.remat else 0
    each = 3 * config.d_model + config.num_layers * kv  # a step's state, its gradient and its shifted copy
    if not rollout.remat:
        each += 2 * config.d_model + config.num_layers * kept_by_layer(config.d_model, heads, config.d_ff)
    return Costs(
        _flops(config, spec, rollout, seq_len, mesh),
        kept=rollout.length * each,
        workspace=workspace_of_layer(config.d_model, heads, config.d_ff),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        kv=config.num_layers * kv,
        # of a layer both outputs, and both inputs' gradients, the first one of twice the width; and the embedding
        summed=rollout.length * config.d_model * ((4 + again) * config.num_layers + 2 + again),
    )


def _flops(config: Eagle3Config, spec: Eagle3Params, rollout: Rollout, seq_len: int, mesh: Mesh | None) -> Flops:
    fc = num_params(spec.fc)
    needs_input_gradient = bool(spec.fc_norms) or spec.fc_input_norm is not None
    once = (6.0 if needs_input_gradient else 4.0) * fc  # the features themselves are frozen
    layers = num_params([leaf for leaf in specs(spec.layers) if is_matrix(leaf)])
    # the product that only makes the step's own output is not computed again, unless a norm follows it
    again = 0.0 if not rollout.remat else layers - (0 if config.norm_output else num_params(spec.layers[-1].mlp.down))
    num_heads = on_each_device(mesh, "heads", config.num_heads)
    width = config.num_layers * num_heads * 2 * config.head_dim
    seen, computed = row_kernels.mean_keys(seq_len, 0, mesh)
    attention = attention_flops(width, seen, computed, remat=rollout.remat)
    return Flops(once, once) + (Flops(6 * layers, 6 * layers + 2 * again) + attention) * rollout.length
