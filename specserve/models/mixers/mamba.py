"""Mamba-2 layers (Dao and Gu 2024, arXiv 2405.21060) as Nemotron-H has them: a recurrence that decays by one number for
each head, whose writes and reads groups of heads share."""

from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import Weight
from specserve.kernels.recurrence import New, State, convolve, recur
from specserve.kernels.rows import Documents
from specserve.kernels.rowwise import by_head, rms_norm
from specserve.models.config import MambaSizes, ModelConfig
from specserve.models.layers import linear
from specserve.models.params import ParamSpec, TensorPart, matrix, optional, vector
from specserve.pytree import pytree


@pytree
class Mamba:
    gate: Weight  # [d_model, head * head_dim], of the output
    v: Weight  # [d_model, head * head_dim]: x of the paper
    k: Weight  # [d_model, group * state_dim]: B
    q: Weight  # [d_model, group * state_dim]: C
    decay: Weight  # [d_model, head]: the time steps
    conv: jax.Array  # [channel of v, k and q, 1, width]
    conv_bias: jax.Array | None  # [channel]
    decay_bias: jax.Array  # [head]
    log_rate: jax.Array  # [head]
    skip: jax.Array  # [head]: D, the share of v that an output has beside the state's
    norm: jax.Array  # [head * head_dim], over each group of heads
    o: Weight  # [head * head_dim, d_model]


def mamba_spec(config: ModelConfig, sizes: MambaSizes, prefix: str) -> Mamba:
    """The parameters as `ParamSpec`s. One tensor holds all projections of the input, side by side."""
    d_model, axes, heads = config.d_model, ("embed", "heads"), sizes.num_heads
    widths = (sizes.v_size, sizes.v_size, sizes.k_size, sizes.k_size, heads)
    total, channels = sum(widths), sizes.v_size + 2 * sizes.k_size

    def project(i: int) -> Any:
        start = sum(widths[:i])
        part = TensorPart(start, start + widths[i], total, total)
        return matrix(f"{prefix}.in_proj.weight", d_model, widths[i], axes, part=part)

    gate, v, k, q, decay = map(project, range(5))
    conv: Any = ParamSpec((channels, 1, sizes.conv_width), (None, None, None), f"{prefix}.conv1d.weight")
    return Mamba(
        gate=gate,
        v=v,
        k=k,
        q=q,
        decay=decay,
        conv=conv,
        conv_bias=optional(sizes.has_conv_bias, vector(f"{prefix}.conv1d.bias", channels, init="zeros")),
        decay_bias=vector(f"{prefix}.dt_bias", heads, "heads", is_float32=True),
        log_rate=vector(f"{prefix}.A_log", heads, "heads", init="zeros", is_float32=True),
        skip=vector(f"{prefix}.D", heads, "heads", is_float32=True),
        norm=vector(f"{prefix}.norm.weight", sizes.v_size, "heads"),
        o=matrix(f"{prefix}.out_proj.weight", sizes.v_size, d_model, ("heads", "embed")),
    )


def init_state(config: ModelConfig, sizes: MambaSizes, batch: int) -> State:
    """Make the state of sequences that have no token yet."""
    written = jnp.zeros((batch, sizes.num_heads, sizes.state_dim, sizes.head_dim), jnp.float32)
    widths = (sizes.v_size, sizes.k_size, sizes.k_size)
    return State(written, tuple(jnp.zeros((batch, sizes.conv_width - 1, size), config.dtype) for size in widths))


def mix(
    params: Mamba,
    config: ModelConfig,
    sizes: MambaSizes,
    x: jax.Array,  # [batch, n, d_model], normed
    seen: State,
    mask: jax.Array | Documents,  # [batch or 1, n, n] bool
) -> tuple[jax.Array, New]:
    """Compute what the layer adds to the residual, [batch, n, d_model], and what the tokens would change in its
    state (section 7 of the paper): a time step scales what is written, and the logarithm of the decay."""
    inputs = tuple(linear(x, weight) for weight in (params.v, params.k, params.q))
    ends = (sizes.v_size, sizes.v_size + sizes.k_size)
    biases = (None,) * 3 if params.conv_bias is None else jnp.split(params.conv_bias, ends)
    heads = (sizes.num_heads, sizes.num_groups, sizes.num_groups)
    v, k, q = (
        by_head(_convolved(new, weight, bias, committed, mask), count)
        for new, weight, bias, committed, count in zip(
            inputs, jnp.split(params.conv, ends), biases, seen.conv, heads, strict=True
        )
    )
    step = jax.nn.softplus(linear(x, params.decay).astype(jnp.float32) + params.decay_bias.astype(jnp.float32))
    log_decay = (-jnp.exp(params.log_rate.astype(jnp.float32)) * step)[..., None]
    out, u = recur(q, k, v * step[..., None], log_decay, None, seen.matrix, mask)
    out = out + params.skip.astype(jnp.float32)[:, None] * v
    groups = (*x.shape[:2], sizes.num_groups, -1)
    out = out.reshape(groups) * jax.nn.silu(linear(x, params.gate).astype(jnp.float32)).reshape(groups)
    out = rms_norm(out, params.norm.reshape(groups[2:]), config.norm_eps)
    return linear(out.reshape(*x.shape[:2], -1).astype(x.dtype), params.o), New(k, u, log_decay, inputs)


def _convolved(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, seen: jax.Array, mask: jax.Array | Documents
) -> jax.Array:
    out = convolve(x, weight, seen, mask)
    return jax.nn.silu(out if bias is None else out + bias.astype(jnp.float32))
