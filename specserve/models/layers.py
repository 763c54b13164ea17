"""The building blocks that target and draft share: norms, rotary embedding, attention projections, the gated MLP.

Spec functions return the same dataclasses as the parameters, with `ParamSpec` leaves.
"""

import math

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import Weight, matmul
from specserve.models.config import DraftConfig, ModelConfig, Rope
from specserve.models.params import matrix, vector
from specserve.pytree import pytree


@pytree
class Attention:
    q: Weight  # [d_in, head * head_dim]
    k: Weight  # [d_in, kv_head * head_dim]
    v: Weight  # [d_in, kv_head * head_dim]
    o: Weight  # [head * head_dim, d_model]
    q_bias: jax.Array | None
    k_bias: jax.Array | None
    v_bias: jax.Array | None
    o_bias: jax.Array | None
    q_norm: jax.Array | None  # [head_dim]
    k_norm: jax.Array | None  # [head_dim]


@pytree
class Mlp:
    gate: Weight  # [d_model, d_ff]
    up: Weight  # [d_model, d_ff]
    down: Weight  # [d_ff, d_model]
    gate_bias: jax.Array | None
    up_bias: jax.Array | None
    down_bias: jax.Array | None


def attention_spec(config: ModelConfig | DraftConfig, prefix: str, d_in: int) -> Attention:
    """`d_in` is the width of the projections' input: d_model in a target, twice that in a draft."""
    flags = config if isinstance(config, ModelConfig) else None
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    has_bias = flags is not None and flags.qkv_bias
    has_norm = flags is not None and flags.qk_norm
    return Attention(
        q=matrix(f"{prefix}.q_proj.weight", d_in, q_size, ("embed", "heads")),
        k=matrix(f"{prefix}.k_proj.weight", d_in, kv_size, ("embed", "kv_heads")),
        v=matrix(f"{prefix}.v_proj.weight", d_in, kv_size, ("embed", "kv_heads")),
        o=matrix(f"{prefix}.o_proj.weight", q_size, config.d_model, ("heads", "embed")),
        q_bias=vector(f"{prefix}.q_proj.bias", q_size, "heads", init="zeros") if has_bias else None,
        k_bias=vector(f"{prefix}.k_proj.bias", kv_size, "kv_heads", init="zeros") if has_bias else None,
        v_bias=vector(f"{prefix}.v_proj.bias", kv_size, "kv_heads", init="zeros") if has_bias else None,
        o_bias=vector(f"{prefix}.o_proj.bias", config.d_model, init="zeros") if flags and flags.o_bias else None,
        q_norm=vector(f"{prefix}.q_norm.weight", config.head_dim) if has_norm else None,
        k_norm=vector(f"{prefix}.k_norm.weight", config.head_dim) if has_norm else None,
    )


def mlp_spec(config: ModelConfig | DraftConfig, prefix: str) -> Mlp:
    has_bias = isinstance(config, ModelConfig) and config.mlp_bias
    return Mlp(
        gate=matrix(f"{prefix}.gate_proj.weight", config.d_model, config.d_ff, ("embed", "mlp")),
        up=matrix(f"{prefix}.up_proj.weight", config.d_model, config.d_ff, ("embed", "mlp")),
        down=matrix(f"{prefix}.down_proj.weight", config.d_ff, config.d_model, ("mlp", "embed")),
        gate_bias=vector(f"{prefix}.gate_proj.bias", config.d_ff, "mlp", init="zeros") if has_bias else None,
        up_bias=vector(f"{prefix}.up_proj.bias", config.d_ff, "mlp", init="zeros") if has_bias else None,
        down_bias=vector(f"{prefix}.down_proj.bias", config.d_model, init="zeros") if has_bias else None,
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def linear(x: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """x [..., d_in] @ weight [d_in, d_out] (+ bias [d_out])."""
    y = matmul(x, weight)
    return y if bias is None else y + bias


def mlp(params: Mlp, x: jax.Array) -> jax.Array:  # [..., d_model] -> [..., d_model]
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    gated = jax.nn.silu(linear(x, params.gate, params.gate_bias)) * linear(x, params.up, params.up_bias)
    return linear(gated, params.down, params.down_bias)


def rope_tables(
    rope: Rope,
    head_dim: int,
    position_ids: jax.Array,  # [batch, seq] int32
) -> tuple[jax.Array, jax.Array]:  # cos, sin: [batch, seq, 1, head_dim // 2] float32
    """Rotary angles. `llama3` scales low frequencies as Llama 3.1 does (transformers' modeling_rope_utils)."""
    frequencies = rope.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / frequencies
        span = rope.high_freq_factor - rope.low_freq_factor
        smooth = jnp.clip((rope.original_max_len / wavelength - rope.low_freq_factor) / span, 0.0, 1.0)
        frequencies = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    angles = position_ids.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: jax.Array,  # [batch, seq, head, head_dim]
    tables: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Rotate the two halves of each head against each other (the Hugging Face convention), in float32."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def project_q(
    params: Attention,
    config: ModelConfig | DraftConfig,
    x: jax.Array,  # [batch, n, d_in]
    rope: tuple[jax.Array, jax.Array],
) -> jax.Array:  # [batch, n, head, head_dim]
    q = linear(x, params.q, params.q_bias).reshape(*x.shape[:2], config.num_heads, config.head_dim)
    if params.q_norm is not None:
        q = rms_norm(q, params.q_norm, config.norm_eps)
    return apply_rope(q, rope)


def project_kv(
    params: Attention,
    config: ModelConfig | DraftConfig,
    x: jax.Array,  # [batch, n, d_in]
    rope: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:  # k, v: [batch, n, kv_head, head_dim]
    shape = (*x.shape[:2], config.num_kv_heads, config.head_dim)
    k = linear(x, params.k, params.k_bias).reshape(shape)
    v = linear(x, params.v, params.v_bias).reshape(shape)
    if params.k_norm is not None:
        k = rms_norm(k, params.k_norm, config.norm_eps)
    return apply_rope(k, rope), v
