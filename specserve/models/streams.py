"""Several residual streams side by side (hyper-connections, arXiv 2409.19606) as Qwen3.8-Flash-Next has them: every
block takes a mixture of all streams, weighed channel by channel, and adds its output to each, weighed by one number."""

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import Weight
from specserve.models.config import ModelConfig
from specserve.models.layers import linear
from specserve.models.params import matrix, optional
from specserve.pytree import pytree


@pytree
class StreamMixer:
    down: Weight  # [streams * d_model, rank]
    up: Weight  # [rank, streams * d_model]
    inject: Weight | None  # [streams * d_model, streams]; None: nothing is added again


def stream_mixer_spec(config: ModelConfig, prefix: str, *, injects: bool = True) -> StreamMixer:
    """The parameters as `ParamSpec`s, whole on every device. The norm before them is the layer's own."""
    width, axes = config.streams * config.d_model, (None, None)
    return StreamMixer(
        down=matrix(f"{prefix}.input_mix_weight_down.weight", width, config.stream_rank, axes),
        up=matrix(f"{prefix}.input_mix_weight_up.weight", config.stream_rank, width, axes),
        inject=optional(injects, matrix(f"{prefix}.block_inject_weight.weight", width, config.streams, axes)),
    )


def norm_each(
    config: ModelConfig, x: jax.Array, weight: jax.Array
) -> jax.Array:  # [..., streams * d_model], [streams * d_model]
    """The RMS norm of each stream by itself."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], config.streams, -1)
    unit = parts * jax.lax.rsqrt(jnp.mean(parts * parts, axis=-1, keepdims=True) + config.norm_eps)
    return (unit.reshape(x.shape) * (weight.astype(jnp.float32) + float(config.norm_offset))).astype(x.dtype)


def mixed(params: StreamMixer, config: ModelConfig, normed: jax.Array) -> jax.Array:  # [..., streams * d_model]
    """The mean of the normed streams, each channel of each weighed by a sigmoid, [..., d_model]."""
    weight = jax.nn.sigmoid(linear(jax.nn.silu(linear(normed, params.down) / config.streams), params.up))
    return mean(config, weight * normed)


def mean(config: ModelConfig, x: jax.Array) -> jax.Array:  # [..., streams * d_model] -> [..., d_model]
    """The mean of the streams, by which a draft sees them."""
    return x if config.streams == 1 else jnp.mean(x.reshape(*x.shape[:-1], config.streams, -1), axis=-2)


def injected(
    params: StreamMixer,
    config: ModelConfig,
    x: jax.Array,  # [..., streams * d_model]
    normed: jax.Array,  # the same, normed
    out: jax.Array,  # [..., d_model], of the block
) -> jax.Array:  # [..., streams * d_model]
    """Add a block's output to each stream, weighed by twice a sigmoid."""
    assert params.inject is not None, "a mixture to which nothing is added"
    gains = 2 * jax.nn.sigmoid(linear(normed, params.inject) / config.streams)
    return x + (gains[..., None] * out[..., None, :]).reshape(x.shape)
