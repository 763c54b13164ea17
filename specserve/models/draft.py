"""The EAGLE-3 draft head (Li et al. 2025, arXiv 2503.01840), as SGLang and vLLM load it.

Entry t of a sequence consumes (the target's feature at t-1, the token at t). Its output, the recurrent hidden state,
predicts the token at t+1 and stands in for the feature when the draft runs ahead of the target. The functions here
are shared by the training rollout and by serving; who attends to what is the caller's business.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import Weight, matmul_float32
from specserve.models.attention import KV, Attention, attention_spec, project_kv, project_q
from specserve.models.cache import Cache, Pages
from specserve.models.config import DraftConfig
from specserve.models.layers import Mlp, linear, mlp, mlp_spec, rms_norm
from specserve.models.params import embedding_table, matrix, vector
from specserve.models.rope import rope_tables
from specserve.pytree import pytree


@pytree
class DraftParams:
    embedding: jax.Array | None  # [vocab, d_model]; None: the target's is shared
    fc: Weight  # [taps * target_d_model, d_model]
    fc_norms: tuple[jax.Array, ...]  # one [target_d_model] for each tap, or none
    fc_input_norm: jax.Array | None  # [taps * target_d_model]
    input_norm: jax.Array  # [d_model], on the token embedding
    hidden_norm: jax.Array  # [d_model], on the feature or the recurrent state
    attention: Attention
    mlp_norm: jax.Array  # [d_model]
    mlp: Mlp
    norm: jax.Array  # [d_model]
    head: Weight  # [d_model, draft_vocab]


def draft_spec(config: DraftConfig) -> DraftParams:
    """The parameters of a head as `ParamSpec`s with their SGLang names."""
    num_taps = len(config.aux_layers)
    fused = num_taps * config.target_d_model
    norms = tuple(vector(f"fc_norm.{i}.weight", config.target_d_model) for i in range(num_taps))
    embedding = embedding_table("embed_tokens.weight", config.vocab_size, config.d_model)
    return DraftParams(
        embedding=embedding if config.has_embedding else None,
        fc=matrix("fc.weight", fused, config.d_model, (None, "embed")),
        fc_norms=norms if config.fc_norm else (),
        fc_input_norm=vector("input_norm.weight", fused) if config.norm_before_fc else None,
        input_norm=vector("midlayer.input_layernorm.weight", config.d_model),
        hidden_norm=vector("midlayer.hidden_norm.weight", config.d_model),
        attention=attention_spec(config, "midlayer.self_attn", 2 * config.d_model),
        mlp_norm=vector("midlayer.post_attention_layernorm.weight", config.d_model),
        mlp=mlp_spec(config, "midlayer.mlp"),
        norm=vector("norm.weight", config.d_model),
        head=matrix("lm_head.weight", config.d_model, config.draft_vocab_size, ("embed", "vocab")),
    )


def fuse_features(
    params: DraftParams,
    config: DraftConfig,
    aux_hidden_states: jax.Array,  # [batch, n, taps * target_d_model]
) -> jax.Array:  # [batch, n, d_model]
    """The target's tapped states as one feature; applied once, where the target has run."""
    x = aux_hidden_states
    if params.fc_input_norm is not None:
        x = rms_norm(x, params.fc_input_norm, config.norm_eps)
    if params.fc_norms:
        taps = jnp.split(x, len(params.fc_norms), axis=-1)
        normed = [rms_norm(tap, norm, config.norm_eps) for tap, norm in zip(taps, params.fc_norms, strict=True)]
        x = jnp.concatenate(normed, axis=-1)
    return linear(x, params.fc)


@pytree
class DraftInputs:
    """What entries bring to the layer, before anybody attends to anything."""

    x: jax.Array  # [batch, n, 2 * d_model], [embedding_normed | hidden_normed]
    residual: jax.Array  # [batch, n, d_model]
    rope: tuple[jax.Array, jax.Array]


def draft_inputs(
    params: DraftParams,
    config: DraftConfig,
    embedding: jax.Array,  # [vocab, d_model], see `token_embedding`
    token_ids: jax.Array,  # [batch, n] int32
    hidden_states: jax.Array,  # [batch, n, d_model], features or recurrent states
    position_ids: jax.Array,  # [batch, n] int32
) -> DraftInputs:
    token = rms_norm(embedding[token_ids], params.input_norm, config.norm_eps)
    hidden = rms_norm(hidden_states, params.hidden_norm, config.norm_eps)
    return DraftInputs(
        x=jnp.concatenate([token, hidden], axis=-1),
        residual=hidden if config.norm_before_residual else hidden_states,
        rope=rope_tables(config.rope, config.head_dim, position_ids),
    )


def token_embedding(params: DraftParams, target_embedding: jax.Array) -> jax.Array:  # [vocab, d_model]
    return target_embedding if params.embedding is None else params.embedding


def draft_kv(params: DraftParams, config: DraftConfig, inputs: DraftInputs) -> KV:
    """Keys and values of the entries. With one layer they need no attention, so prefill is just this."""
    return project_kv(params.attention, config, inputs.x, inputs.rope)


def draft_layer(
    params: DraftParams,
    config: DraftConfig,
    inputs: DraftInputs,
    attend_to: Callable[[jax.Array], jax.Array],  # q [batch, n, head, head_dim] -> the same shape
) -> jax.Array:  # [batch, n, d_model]
    """The layer for entries that predict: returns the recurrent hidden states (before the final norm unless
    `norm_output`)."""
    out = attend_to(project_q(params.attention, config, inputs.x, inputs.rope))
    x = inputs.residual + linear(out.reshape(*inputs.residual.shape[:2], -1), params.attention.o)
    x = x + mlp(params.mlp, rms_norm(x, params.mlp_norm, config.norm_eps))
    return rms_norm(x, params.norm, config.norm_eps) if config.norm_output else x


def draft_logits(
    params: DraftParams,
    config: DraftConfig,
    hidden_states: jax.Array,  # [..., d_model], what `draft_layer` returned
) -> jax.Array:  # [..., draft_vocab] float32
    if not config.norm_output:
        hidden_states = rms_norm(hidden_states, params.norm, config.norm_eps)
    return matmul_float32(hidden_states, params.head)


def draft_cache(config: DraftConfig, *, num_pages: int, page_size: int) -> Cache:
    """The head's one layer, under the target's page table."""
    pages = Pages.zeros(num_pages, page_size, config.num_kv_heads, config.head_dim, config.dtype)
    return Cache((pages,), num_pages, page_size)
