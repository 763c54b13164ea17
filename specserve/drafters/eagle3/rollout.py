"""The training rollout of an EAGLE-3 head (see `drafters.learning`), and its costs."""

import functools

import jax
from jax.sharding import Mesh

from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.eagle3.model import Eagle3Params, draft_forward, draft_inputs, fuse_features
from specserve.drafters.layers import windows_of
from specserve.drafters.learning import (
    Costs,
    Flops,
    Rollout,
    Rows,
    attention_flops,
    kept_by_layer,
    unroll,
    workspace_of_layer,
)
from specserve.kernels import rows as row_kernels
from specserve.kernels.rows import Documents, Unrolled
from specserve.mesh import on_each_device
from specserve.models.mixers.attention import KV
from specserve.models.params import is_matrix, num_params, specs


def rollout_states(
    params: Eagle3Params,
    config: Eagle3Config,
    embedding: jax.Array,  # [vocab, d_model]
    rows: Rows,
    aux_hidden_states: jax.Array,  # [batch, seq, taps * target_d_model]
    rollout: Rollout,
) -> list[jax.Array]:  # length x [batch, seq, d_model], what `draft_logits` takes
    """Compute the head's hidden states in every rollout step (see `learning.unroll`)."""
    features = fuse_features(params, config, aux_hidden_states)
    return unroll(functools.partial(_one_step, config), features, (params, embedding), rows, rollout)


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
        window, scale = config.kind(i).window, config.attention_scale or None
        return Unrolled(documents, [entries[i] for entries in kv]).attend(q, k, v, window=window, scale=scale)

    return draft_forward(params, config, inputs, attend)


def rollout_costs(config: Eagle3Config, spec: Eagle3Params, rollout: Rollout, seq_len: int, mesh: Mesh | None) -> Costs:
    """Return the costs of a rollout for each position of a row, by the rules of `train.flops`. `spec` are the
    parameters that a device has."""
    num_kv_heads, width, _ = config.entry_dims
    heads, kv = config.num_heads * width, 2 * num_kv_heads * width
    again = rollout.num_repeats
    each = 3 * config.d_model + config.num_layers * kv  # a step's state, its gradient and its shifted copy
    if not rollout.remat:
        each += 2 * config.d_model + config.num_layers * kept_by_layer(config.d_model, heads, config.d_ff)
    return Costs(
        _flops(config, spec, rollout, seq_len, mesh),
        kept=rollout.length * each,
        workspace=workspace_of_layer(config.d_model, heads, config.d_ff),
        num_heads=config.num_heads,
        num_kv_heads=num_kv_heads,
        shares_output=not config.has_own_head,
        kv=config.num_layers * kv,
        # of a layer both outputs, and both inputs' gradients, the first one of twice the width; and the embedding
        summed=rollout.length * config.d_model * ((4 + again) * config.num_layers + 2 + again),
    )


def _flops(config: Eagle3Config, spec: Eagle3Params, rollout: Rollout, seq_len: int, mesh: Mesh | None) -> Flops:
    layers = num_params([leaf for leaf in specs(spec.layers) if is_matrix(leaf)])
    # the product that only makes the step's own output is not computed again, unless a norm follows it
    again = layers
    if not config.norm_output:
        again -= num_params(spec.layers[-1].mlp.down)
    num_heads = on_each_device(mesh, "heads", config.num_heads)
    of_step = Flops(6 * layers, 6 * layers + 2 * again * rollout.num_repeats)
    for window in windows_of(config):
        seen, computed = row_kernels.mean_keys(seq_len, window, mesh)
        of_step += attention_flops(num_heads * 2 * config.entry_dims[1], seen, computed, remat=rollout.remat)
    return fusing_flops(spec, 0) + of_step * rollout.length


def fusing_flops(spec: Eagle3Params, num_repeats: int) -> Flops:
    """Return the operations of fusing a position's features, forward and backward. The features themselves are frozen:
    only where a norm learns before the product, the gradient of its input is needed."""
    fc, times = num_params(spec.fc), 4
    if spec.fc_norms or spec.fc_input_norm is not None:
        times = 6
    return Flops(times * fc, (times + 2 * num_repeats) * fc)
