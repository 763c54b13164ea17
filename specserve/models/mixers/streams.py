"""Residual streams side by side (manifold-constrained hyper-connections, arXiv 2512.24880): a block takes a weighted
sum of the streams, and its output goes to each of them with a weight. The streams themselves are mixed by a matrix
whose rows and columns sum to 1. All weights depend on the streams, token by token. `channel_streams` has the other
kind, which `entered` and `last` know too.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import matmul_float32
from specserve.models.config import ModelConfig, Streams
from specserve.models.layers import normed
from specserve.models.mixers import channel_streams
from specserve.models.mixers.channel_streams import StreamMixer, stream_mixer_spec
from specserve.models.params import matrix, vector
from specserve.pytree import pytree


@pytree
class StreamMix:
    """The parameters of one block, all float32."""

    weights: jax.Array  # [stream * d_model, (2 + stream) * stream]: to take, to give, and to mix
    base: jax.Array  # [(2 + stream) * stream]
    scale: jax.Array  # [3], of the three kinds


def block_streams_spec(
    config: ModelConfig, prefix: str, block: Literal["attn", "mlp"]
) -> StreamMix | StreamMixer | None:
    """The parameters as `ParamSpec`s, whole on every device, or None of a model without streams."""
    if config.streams is None:
        return None
    if config.streams.is_by_channel:
        return stream_mixer_spec(config, f"{prefix}.{block}_hyper_connection")
    prefix = f"{prefix}.hc_{'attn' if block == 'attn' else 'ffn'}"
    num = config.streams.num
    size = (2 + num) * num
    return StreamMix(
        weights=matrix(f"{prefix}_fn", num * config.d_model, size, (None, None), is_float32=True),
        base=vector(f"{prefix}_base", size, init="zeros", is_float32=True),
        scale=vector(f"{prefix}_scale", 3, is_float32=True),
    )


def spread(config: ModelConfig, x: jax.Array) -> jax.Array:  # [..., d_model] -> [..., stream, d_model]
    """Make the streams that the first layer takes, which are all the same. A model without streams keeps x."""
    if config.streams is None:
        return x
    return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], config.streams.num, x.shape[-1]))


def last_streams_spec(config: ModelConfig, prefix: str = "") -> StreamMix | StreamMixer | None:
    """The parameters of the last sum, which takes and neither gives nor mixes, or None where it is the mean. `prefix`
    is that of their names, where they are not the target's own."""
    if config.streams is not None and config.streams.is_by_channel:
        return stream_mixer_spec(config, prefix or "model.hyper_connection_mixer", injects=False)
    if config.streams is None or not config.streams.has_head:
        return None
    num, prefix = config.streams.num, prefix or "model.hc_head.hc"
    return StreamMix(
        weights=matrix(f"{prefix}_fn", num * config.d_model, num, (None, None), is_float32=True),
        base=vector(f"{prefix}_base", num, init="zeros", is_float32=True),
        scale=vector(f"{prefix}_scale", 1, is_float32=True),
    )


def last(
    params: StreamMix | StreamMixer | None, config: ModelConfig, x: jax.Array, norm: jax.Array | None
) -> jax.Array:  # [..., d_model], or [..., stream, d_model] -> [..., d_model]
    """Return what the output head takes, normed."""
    if isinstance(params, StreamMixer):
        return channel_streams.entered(params, config, x, norm)[0]
    if params is None:
        return normed(config, merged(config, x), norm)
    assert config.streams is not None
    take = _raw(params, config, x) * params.scale + params.base
    return normed(config, _taken(take, config.streams, x), norm)


def merged(config: ModelConfig, x: jax.Array) -> jax.Array:  # [..., stream, d_model] -> [..., d_model]
    """Return the mean of the streams, which a head takes. A model without streams keeps x."""
    return x if config.streams is None else jnp.mean(x, axis=-2)


def entered(
    params: StreamMix | StreamMixer | None, config: ModelConfig, x: jax.Array, norm: jax.Array | None
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:  # [..., stream, d_model] -> [..., d_model]
    """Return what a block takes, normed, and a function of what it gives, [..., d_model], that returns the streams
    behind it."""
    assert config.streams is not None
    assert params is not None
    if isinstance(params, StreamMixer):
        return channel_streams.entered(params, config, x, norm)
    num, raw = config.streams.num, _raw(params, config, x)
    take, give, mix = (
        part * params.scale[i] + params.base[at]
        for i, (at, part) in enumerate(
            (slice(start, stop), raw[..., start:stop])
            for start, stop in ((0, num), (num, 2 * num), (2 * num, (2 + num) * num))
        )
    )
    mixed = balanced(mix.reshape(*mix.shape[:-1], num, num), config.streams)

    def left(out: jax.Array) -> jax.Array:
        given = (2 * jax.nn.sigmoid(give)).astype(x.dtype)[..., None] * out[..., None, :]
        return given + jnp.sum(mixed.astype(x.dtype)[..., None] * x[..., :, None, :], axis=-3)

    return normed(config, _taken(take, config.streams, x), norm), left


def _raw(params: StreamMix, config: ModelConfig, x: jax.Array) -> jax.Array:
    flat = x.astype(jnp.float32).reshape(*x.shape[:-2], -1)
    flat = flat * jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + config.norm_eps)
    return matmul_float32(flat, params.weights)


def _taken(take: jax.Array, streams: Streams, x: jax.Array) -> jax.Array:
    return jnp.sum((jax.nn.sigmoid(take) + streams.eps)[..., None] * x.astype(jnp.float32), axis=-2).astype(x.dtype)


def balanced(logits: jax.Array, streams: Streams) -> jax.Array:  # [..., stream, stream] float32
    """Return a positive matrix whose columns sum to 1, and its rows nearly so: the softmax of each row, after so many
    steps of Sinkhorn and Knopp. It is a loop of the trace, since a loop of the program would cut a GPU's graph."""
    mix = jax.nn.softmax(logits, axis=-1) + streams.eps
    mix = mix / (mix.sum(-2, keepdims=True) + streams.eps)
    for _ in range(streams.steps - 1):
        mix = mix / (mix.sum(-1, keepdims=True) + streams.eps)
        mix = mix / (mix.sum(-2, keepdims=True) + streams.eps)
    return mix
