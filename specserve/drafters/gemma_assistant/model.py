"""Gemma 4's assistant, as transformers has it (`Gemma4AssistantForCausalLM`): parameters and forward.

It has no keys and values. All its queries read those that the target's last layer of the same kind, with or without a
window, has of committed tokens. Every token of a draft stands where the root does. What it goes on from are the token's
embedding by the target and a state as wide as the target's: of the root the target's own, after the final norm, of the
token before it; of later tokens the assistant's, projected.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specserve.drafters.gemma_assistant.config import AssistantConfig
from specserve.kernels.gather import embed
from specserve.kernels.matmul import Weight
from specserve.kernels.rowwise import rms_norm
from specserve.models.cache import Cache, Prefix
from specserve.models.layers import linear, norm_spec
from specserve.models.params import embedding_table, matrix, optional, vector
from specserve.models.target import Layer, TargetParams, layer_spec, make_context, run_layer
from specserve.pytree import pytree

ORDERING = "masked_embedding.token_ordering"


@pytree
class AssistantParams:
    embedding: jax.Array  # [vocab, d_model], the output head
    fc: Weight  # [2 * target_d_model, d_model]
    layers: tuple[Layer, ...]
    norm: jax.Array  # [d_model]
    up: Weight  # [d_model, target_d_model], to the state that is handed on
    centroids: Weight | None  # [d_model, cluster]
    ordering: jax.Array | None  # [vocab] float32, the tokens, cluster by cluster


def assistant_spec(config: AssistantConfig) -> AssistantParams:
    """The parameters of an assistant as `ParamSpec`s with their published names."""
    layers, width = config.layers, config.target_d_model
    clusters = matrix("masked_embedding.centroids.weight", layers.d_model, config.num_centroids, ("embed", None))
    ordering = vector(ORDERING, layers.vocab_size, is_float32=True)
    return AssistantParams(
        embedding=embedding_table("model.embed_tokens.weight", layers.vocab_size, layers.d_model),
        fc=matrix("pre_projection.weight", 2 * width, layers.d_model, (None, "embed")),
        layers=tuple(layer_spec(layers, i) for i in range(layers.num_layers)),
        norm=norm_spec("model.norm", layers.d_model),
        up=matrix("post_projection.weight", layers.d_model, width, ("embed", None)),
        centroids=optional(config.num_centroids, clusters),
        ordering=optional(config.num_centroids, ordering),
    )


def target_state(config: AssistantConfig, target: TargetParams, last: jax.Array) -> jax.Array:
    """Return the output of the target's last layer, [..., target_d_model], after the final norm."""
    return rms_norm(last, target.norm, config.target_norm_eps)


def run(
    params: AssistantParams,
    config: AssistantConfig,
    target: TargetParams,
    cache: Cache,  # the target's
    prefix: Prefix,
    token_ids: jax.Array,  # [batch, n] int32
    states: jax.Array,  # [batch, n, target_d_model]
) -> jax.Array:  # [batch, n, d_model], after the final norm
    """Run the assistant for tokens at the root's place, none of which sees another."""
    layers, shape = config.layers, token_ids.shape
    table: Any = target.embedding
    token = embed(table, token_ids, jnp.dtype(layers.dtype))
    token *= jnp.asarray(config.target_embedding_scale, token.dtype)
    x = linear(jnp.concatenate([token, states.astype(token.dtype)], axis=-1).astype(layers.dtype), params.fc)
    places = jnp.broadcast_to(prefix.lens[:, None], shape)
    context = make_context(layers, places, jnp.zeros((1, shape[1], shape[1]), bool))
    for i, layer in enumerate(params.layers):
        kind = layers.kind(i)
        assert kind.kv_from is not None, "a layer of an assistant sees the keys of its target"
        x, *_ = run_layer(layer, layers, kind, x, cache.attended(kind.kv_from, prefix), context)
    return rms_norm(x, params.norm, layers.norm_eps)


def handed_on(params: AssistantParams, states: jax.Array) -> jax.Array:  # [..., d_model] -> [..., target_d_model]
    return linear(states, params.up)


def assistant_logits(
    params: AssistantParams,
    config: AssistantConfig,
    states: jax.Array,  # [batch, n, d_model], from `run`
) -> jax.Array:  # [batch, n, vocab] float32
    """The logits of normed states. With clusters those of other tokens than the best clusters' are -inf."""
    if params.centroids is None:
        return jnp.einsum("bnd,vd->bnv", states, params.embedding, preferred_element_type=jnp.float32)
    assert params.ordering is not None
    chosen = jax.lax.top_k(linear(states, params.centroids), config.num_chosen)[1]  # [batch, n, cluster]
    clusters = params.ordering.astype(jnp.int32).reshape(config.num_centroids, -1)
    token_ids = clusters[chosen].reshape(*chosen.shape[:2], -1)
    found = jnp.einsum("bnd,bncd->bnc", states, params.embedding[token_ids], preferred_element_type=jnp.float32)
    rows = jnp.arange(len(states))[:, None, None], jnp.arange(states.shape[1])[:, None]
    everywhere = jnp.full((*states.shape[:2], config.layers.vocab_size), -jnp.inf, jnp.float32)
    return everywhere.at[*rows, token_ids].set(found)
