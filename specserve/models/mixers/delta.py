"""Gated delta-net layers: those of Qwen3-Next and Qwen3.5, and Kimi delta attention as Kimi Linear and Ling 3 have
it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import Weight
from specserve.kernels.recurrence import New, State, convolve, recur
from specserve.kernels.rows import Documents
from specserve.kernels.rowwise import by_head, rms_norm
from specserve.models.config import DeltaSizes, ModelConfig
from specserve.models.layers import linear, norm_spec
from specserve.models.params import ParamSpec, TensorPart, matrix, optional, vector
from specserve.pytree import pytree

NORM_EPS = 1e-6  # of the norm of queries and keys, whatever the config says


@pytree
class DeltaNet:
    q: Weight  # [d_model, k_head * k_dim]
    k: Weight  # [d_model, k_head * k_dim]
    v: Weight  # [d_model, head * v_dim]
    gate_down: Weight | None  # [d_model, gate_rank]; None: gate takes the layer's input
    gate: Weight  # [gate_rank or d_model, head * v_dim], of the output
    beta: Weight  # [d_model, head]
    decay_down: Weight | None  # [d_model, gate_rank]; None: decay takes the layer's input
    decay: Weight  # [d_model, head], or by channel [gate_rank or d_model, head * k_dim]
    conv: tuple[jax.Array, ...]  # each [channel, 1, width]: one for q, k and v side by side, or one for each
    decay_bias: jax.Array  # [head], or [head * k_dim]
    log_rate: jax.Array  # [head], or [1, 1, head, 1] (`has_wide_rates`)
    norm: jax.Array  # [v_dim]
    o: Weight  # [head * v_dim, d_model]


def delta_spec(config: ModelConfig, delta: DeltaSizes, prefix: str) -> DeltaNet:
    if delta.by_channel:
        return _kimi_spec(config, delta, prefix)
    return _qwen_spec(config, delta, prefix)


def _qwen_spec(config: ModelConfig, delta: DeltaSizes, prefix: str) -> DeltaNet:
    """The parameters of Qwen's layers. Checkpoints of Qwen3-Next keep six projections in two tensors, ordered by key
    head. One holds for each key head q, k, and the v and z of the value heads that share it; the other holds the b and
    a of these value heads. Those of Qwen3.5 keep q, k and v side by side, and the others alone."""
    heads, axes = delta.num_v_heads, ("embed", "heads")
    share, v_size = heads // delta.num_k_heads, heads * delta.v_dim
    k_size = delta.num_k_heads * delta.k_dim
    bounds = (0, delta.k_dim, 2 * delta.k_dim, 2 * delta.k_dim + share * delta.v_dim)
    period = bounds[-1] + share * delta.v_dim

    def wide(i: int, size: int) -> Any:
        if not config.names.delta_qkvz:
            start = i * k_size
            part = TensorPart(start, start + size, 2 * k_size + v_size, 2 * k_size + v_size) if i < 3 else None
            name = "in_proj_qkv" if i < 3 else "in_proj_z"
            return matrix(f"{prefix}.{name}.weight", config.d_model, size, axes, part=part)
        part = TensorPart(bounds[i], (*bounds, period)[i + 1], period, delta.num_k_heads * period)
        return matrix(f"{prefix}.{config.names.delta_qkvz}.weight", config.d_model, size, axes, part=part)

    def narrow(i: int) -> Any:
        if not config.names.delta_qkvz:
            return matrix(f"{prefix}.in_proj_{'ba'[i]}.weight", config.d_model, heads, axes)
        part = TensorPart(i * share, (i + 1) * share, 2 * share, 2 * heads)
        return matrix(f"{prefix}.in_proj_ba.weight", config.d_model, heads, axes, part=part)

    return DeltaNet(
        q=wide(0, k_size),
        k=wide(1, k_size),
        v=wide(2, v_size),
        gate_down=None,
        gate=wide(3, v_size),
        beta=narrow(0),
        decay_down=None,
        decay=narrow(1),
        conv=(_conv_spec(f"{prefix}.conv1d", 2 * k_size + v_size, delta.conv_width, None),),
        decay_bias=vector(f"{prefix}.dt_bias", heads, "heads", is_float32=True),
        log_rate=vector(f"{prefix}.A_log", heads, "heads", init="zeros", is_float32=True),
        norm=norm_spec(f"{prefix}.norm", delta.v_dim),
        o=matrix(f"{prefix}.out_proj.weight", v_size, config.d_model, ("heads", "embed")),
    )


def _kimi_spec(config: ModelConfig, delta: DeltaSizes, prefix: str) -> DeltaNet:
    heads, rank = delta.num_v_heads, delta.gate_rank
    k_size, v_size = heads * delta.k_dim, heads * delta.v_dim
    log_rate = vector(f"{prefix}.A_log", heads, "heads", init="zeros", is_float32=True)
    if delta.has_wide_rates:
        log_rate = dataclasses.replace(log_rate, shape=(1, 1, heads, 1), axes=(None, None, "heads", None))

    def project(name: str, size: int, d_in: int = config.d_model) -> Any:
        return matrix(
            f"{prefix}.{name}_proj.weight", d_in, size, ("embed" if d_in == config.d_model else None, "heads")
        )

    def down(name: str) -> Any:
        return optional(rank, matrix(f"{prefix}.{name}_a_proj.weight", config.d_model, rank, ("embed", None)))

    def up(name: str, size: int) -> Any:
        return project(f"{name}_b", size, rank) if rank else project(name, size)

    return DeltaNet(
        q=project("q", k_size),
        k=project("k", k_size),
        v=project("v", v_size),
        gate_down=down("g"),
        gate=up("g", v_size),
        beta=project("b", heads),
        decay_down=down("f"),
        decay=up("f", k_size),
        conv=tuple(
            _conv_spec(f"{prefix}.{name}_conv1d", size, delta.conv_width, "heads")
            for name, size in (("q", k_size), ("k", k_size), ("v", v_size))
        ),
        decay_bias=vector(f"{prefix}.dt_bias", k_size, "heads", is_float32=True),
        log_rate=log_rate,
        norm=norm_spec(f"{prefix}.o_norm", delta.v_dim),
        o=matrix(f"{prefix}.o_proj.weight", v_size, config.d_model, ("heads", "embed")),
    )


def _conv_spec(name: str, size: int, width: int, axis: str | None) -> Any:
    return ParamSpec((size, 1, width), (axis, None, None), f"{name}.weight", is_float32=True)


def init_state(config: ModelConfig, delta: DeltaSizes, batch: int) -> State:
    k_size, v_size = delta.num_k_heads * delta.k_dim, delta.num_v_heads * delta.v_dim
    matrix = jnp.zeros((batch, delta.num_v_heads, delta.k_dim, delta.v_dim), jnp.float32)
    inputs = (jnp.zeros((batch, delta.conv_width - 1, size), config.dtype) for size in (k_size, k_size, v_size))
    return State(matrix, tuple(inputs))


def mix(
    params: DeltaNet,
    config: ModelConfig,
    delta: DeltaSizes,
    x: jax.Array,  # [batch, n, d_model], normed
    seen: State,
    mask: jax.Array | Documents,  # [batch or 1, n, n] bool
) -> tuple[jax.Array, New]:
    """Compute what the layer adds to the residual, [batch, n, d_model], and what the tokens would change in its
    state."""
    inputs = tuple(linear(x, weight) for weight in (params.q, params.k, params.v))
    conv = params.conv
    if len(conv) == 1:
        k_size = delta.num_k_heads * delta.k_dim
        conv = jnp.split(conv[0], (k_size, 2 * k_size))
    q, k, v = (
        by_head(jax.nn.silu(convolve(new, weight, committed, mask)), num_heads)
        for new, weight, committed, num_heads in zip(
            inputs, conv, seen.conv, (delta.num_k_heads, delta.num_k_heads, delta.num_v_heads), strict=True
        )
    )
    q, k = _unit(q) * delta.k_dim**-0.5, _unit(k)
    beta = jax.nn.sigmoid(linear(x, params.beta).astype(jnp.float32))
    raw = linear(x if params.decay_down is None else linear(x, params.decay_down), params.decay)
    log_decay = _log_decay(params, delta, raw.astype(jnp.float32))
    out, u = recur(q, k, v, log_decay, beta, seen.matrix, mask)
    gate = linear(x if params.gate_down is None else linear(x, params.gate_down), params.gate)
    gate = by_head(gate.astype(jnp.float32), delta.num_v_heads)
    activate = jax.nn.sigmoid if delta.by_channel or delta.has_sigmoid_gate else jax.nn.silu
    out = rms_norm(out, params.norm, config.norm_eps) * activate(gate)
    out = out.reshape(*x.shape[:2], -1).astype(x.dtype)
    return linear(out, params.o), New(k, u, log_decay, inputs)


def _log_decay(params: DeltaNet, delta: DeltaSizes, raw: jax.Array) -> jax.Array:  # -> [batch, n, head, 1 or k_dim]
    """The logarithm of each token's decay: -rate * softplus(raw + bias) (arXiv 2412.06464, as in Mamba-2). With a
    `decay_bound` (Ling 3) it is bound * sigmoid(rate * (raw + bias)), which lies between the bound and 0."""
    rate = jnp.exp(params.log_rate.astype(jnp.float32)).reshape(-1, 1)
    raw = by_head(raw + params.decay_bias.astype(jnp.float32), delta.num_v_heads)
    if delta.decay_bound:
        return delta.decay_bound * jax.nn.sigmoid(rate * raw)
    return -rate * jax.nn.softplus(raw)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)
