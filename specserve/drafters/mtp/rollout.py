"""The training of a layer of multi-token prediction, and its costs. It is the rollout of `drafters.learning`,
in which the layer runs again over its own states as it does when it serves. FastMTP (arXiv 2509.18362) weighs three
depths by .51, .31 and .18, which is `rollout_decay` 0.6."""

import functools

import jax
from jax.sharding import Mesh

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
from specserve.drafters.mtp import model
from specserve.drafters.mtp.config import MtpConfig
from specserve.errors import ConfigError
from specserve.kernels import native
from specserve.kernels import rows as row_kernels
from specserve.kernels.rows import Documents, Unrolled
from specserve.mesh import on_each_device
from specserve.models.mixers.attention import KV
from specserve.models.params import is_matrix, num_params, specs
from specserve.models.target import TargetParams


def rollout_states(
    params: model.MtpParams,
    config: MtpConfig,
    target: TargetParams,
    rows: Rows,
    aux_hidden_states: jax.Array,  # [batch, seq, taps * d_model]
    rollout: Rollout,
) -> list[jax.Array]:  # length x [batch, seq, state_size], what `draft_logits` takes
    """Compute the layer's states in every rollout step (see `learning.unroll`). Raises ConfigError for a layer whose
    keys are values, which is not trained."""
    if config.layer.compressed is not None:
        raise ConfigError(
            f"the layer of multi-token prediction of a {config.layer.family} target is served and not trained; train a "
            "head of another kind (--drafter)"
        )
    hidden = model.taken(config, target, aux_hidden_states)
    # of the target only what the layer shares: what is kept for the backward pass is kept for each step
    shared = TargetParams(target.embedding, (), target.norm, None)
    hand_on = functools.partial(model.handed_on, params, config)
    return unroll(functools.partial(_one_step, config), hidden, (params, shared), rows, rollout, hand_on)


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


def rollout_costs(config: MtpConfig, spec: model.MtpParams, rollout: Rollout, seq_len: int, mesh: Mesh | None) -> Costs:
    """Return the costs of a rollout for each position of a row, by the rules of `train.flops`. `spec` are the
    parameters that a device has."""
    layer = config.layer
    q_dim, kv_dim, num_kv_heads = _attention_dims(config)
    d_ff, again = layer.d_ff, rollout.num_repeats
    has_experts = layer.kind(0).has_experts
    if layer.experts and has_experts:
        d_ff = layer.experts.top_k * layer.experts.d_ff + layer.experts.shared_d_ff
    each = 3 * layer.d_model + kv_dim  # a step's state, its gradient and its shifted copy
    if not rollout.remat:
        # both inputs before and after their norms, joined and multiplied, and the state that is handed on
        each += 7 * layer.d_model + kept_by_layer(layer.d_model, q_dim, d_ff)
    return Costs(
        _flops(config, spec, rollout, seq_len, mesh),
        kept=rollout.length * each,
        workspace=workspace_of_layer(layer.d_model, q_dim, d_ff),
        num_heads=layer.num_heads,
        num_kv_heads=num_kv_heads,
        kv=kv_dim,
        # both outputs, both inputs' gradients, and the embedding
        summed=rollout.length * layer.d_model * (5 + 2 * again),
        routed=rollout.length * layer.d_model * 2 * (2 + again) if has_experts else 0,
        shares_output=not config.has_head,
    )


def _attention_dims(config: MtpConfig) -> tuple[int, int, int]:
    """Return three numbers for a position: the values of its queries, the values of its keys and values together, and
    the heads of these. Latents are expanded."""
    layer, latent = config.layer, config.layer.latent
    if latent is None or layer.kind(0).mixer != "latent":
        kv_heads = layer.of(layer.kind(0)).num_kv_heads
        return layer.num_heads * layer.head_dim, kv_heads * (layer.head_dim + layer.value_dim), kv_heads
    width = latent.nope_dim + latent.rope_dim
    return layer.num_heads * width, layer.num_heads * (width + latent.v_dim), layer.num_heads


def _flops(config: MtpConfig, spec: model.MtpParams, rollout: Rollout, seq_len: int, mesh: Mesh | None) -> Flops:
    layer = config.layer
    q_dim = _attention_dims(config)[0] // layer.num_heads * on_each_device(mesh, "heads", layer.num_heads)
    top_k = layer.experts.top_k if layer.experts else None
    matrices = [leaf for leaf in specs((spec.fc, spec.token_fc, spec.layer)) if is_matrix(leaf)]
    each = num_params(matrices, top_k)
    seen, computed = row_kernels.mean_keys(seq_len, layer.kind(0).window, mesh)
    attention = attention_flops(2 * q_dim, seen, computed, remat=rollout.remat)
    return (Flops(6 * each, (6 + 2 * rollout.num_repeats) * each) + attention) * rollout.length
