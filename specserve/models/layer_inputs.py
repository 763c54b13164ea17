"""An input that each layer has beside the residual stream, made of the token alone (Gemma 4's per-layer inputs)."""

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import Weight
from specserve.kernels.rowwise import gated, rms_norm
from specserve.models.config import ModelConfig
from specserve.models.layers import linear, norm_spec
from specserve.models.params import embedding_table, matrix
from specserve.pytree import pytree


@pytree
class LayerInputs:
    """The parameters that make the inputs of all layers."""

    table: jax.Array  # [token, layer * layer_input_dim]
    inputs: Weight  # [d_model, layer * layer_input_dim]
    norm: jax.Array  # [layer_input_dim]


@pytree
class LayerInput:
    """The parameters by which a layer takes its own."""

    gate: Weight  # [d_model, layer_input_dim]
    o: Weight  # [layer_input_dim, d_model]
    norm: jax.Array  # [d_model]


def layer_inputs_spec(config: ModelConfig) -> LayerInputs:
    size = config.num_layers * config.layer_input_dim
    return LayerInputs(
        table=embedding_table("model.embed_tokens_per_layer.weight", config.layer_input_vocab, size),
        inputs=matrix("model.per_layer_model_projection.weight", config.d_model, size, ("embed", None)),
        norm=norm_spec("model.per_layer_projection_norm", config.layer_input_dim),
    )


def layer_input_spec(config: ModelConfig, prefix: str) -> LayerInput:
    dim = config.layer_input_dim
    return LayerInput(
        gate=matrix(f"{prefix}.per_layer_input_gate.weight", config.d_model, dim, ("embed", None)),
        o=matrix(f"{prefix}.per_layer_projection.weight", dim, config.d_model, (None, "embed")),
        norm=norm_spec(f"{prefix}.post_per_layer_input_norm", config.d_model, offset=config.norm_offset),
    )


def layer_inputs(
    params: LayerInputs | None,
    config: ModelConfig,
    token_ids: jax.Array,  # [batch, n]
    x: jax.Array,  # [batch, n, d_model], what the first layer takes
) -> list[jax.Array | None]:  # layer by layer, [batch, n, layer_input_dim]
    """The inputs of all layers: the sum, divided by sqrt(2), of a token's embedding for a layer and of a normed
    projection of what the first layer takes. Without parameters they are None."""
    if params is None:
        return [None] * config.num_layers
    dim = config.layer_input_dim
    of_token = params.table[token_ids] * jnp.asarray(dim**0.5, params.table.dtype)
    projected = (linear(x, params.inputs) * config.d_model**-0.5).reshape(*x.shape[:2], config.num_layers, dim)
    both = (rms_norm(projected, params.norm, config.norm_eps) + of_token.reshape(projected.shape)) * 2**-0.5
    return [both[..., i, :] for i in range(config.num_layers)]


def with_input(params: LayerInput, config: ModelConfig, x: jax.Array, given: jax.Array) -> jax.Array:
    """Add to the residual stream, [batch, n, d_model], what a layer makes of its own input, [batch, n,
    layer_input_dim], behind a gate by the stream."""
    out = linear(gated(linear(x, params.gate), given, config.activation), params.o)
    return x + rms_norm(out, params.norm, config.norm_eps, offset=config.norm_offset)
