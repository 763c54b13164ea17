"""Several residual streams side by side (hyper-connections, arXiv 2409.19606) as Qwen3.8-Flash-Next has them: every
block takes a mixture of all streams, weighed channel by channel, and adds its output to each, weighed by one number."""

from collections.abc import Callable

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
    assert config.streams is not None
    width, rank, axes = config.num_streams * config.d_model, config.streams.rank, (None, None)
    return StreamMixer(
        down=matrix(f"{prefix}.input_mix_weight_down.weight", width, rank, axes),
        up=matrix(f"{prefix}.input_mix_weight_up.weight", rank, width, axes),
        inject=optional(injects, matrix(f"{prefix}.block_inject_weight.weight", width, config.num_streams, axes)),
    )


def norm_each(
    config: ModelConfig, x: jax.Array, weight: jax.Array
) -> jax.Array:  # [..., streams * d_model], [streams * d_model]
    """The RMS norm of each stream by itself."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], config.num_streams, -1)
    unit = parts * jax.lax.rsqrt(jnp.mean(parts * parts, axis=-1, keepdims=True) + config.norm_eps)
    return (unit.reshape(x.shape) * (weight.astype(jnp.float32) + float(config.norm_offset))).astype(x.dtype)


def mixed(params: StreamMixer, config: ModelConfig, normed: jax.Array) -> jax.Array:  # [..., streams * d_model]
    """The mean of the normed streams, each channel of each weighed by a sigmoid, [..., d_model]."""
    weight = jax.nn.sigmoid(linear(jax.nn.silu(linear(normed, params.down) / config.num_streams), params.up))
    return jnp.mean((weight * normed).reshape(*normed.shape[:-1], config.num_streams, -1), axis=-2)


def entered(
    params: StreamMixer, config: ModelConfig, x: jax.Array, norm: jax.Array | None
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:  # [..., stream, d_model] -> [..., d_model]
    """Return what a block takes, and a function of what it gives, [..., d_model], that adds it to each stream, weighed
    by twice a sigmoid."""
    assert norm is not None, "each stream has a norm"
    normed = norm_each(config, x.reshape(*x.shape[:-2], -1), norm)

    def behind(out: jax.Array) -> jax.Array:
        assert params.inject is not None, "a mixture to which nothing is added"
        gains = 2 * jax.nn.sigmoid(linear(normed, params.inject) / config.num_streams)
        return x + gains[..., None] * out[..., None, :]

    return mixed(params, config, normed), behind
