"""Lightning attention layers of Ling-linear and Ring-linear 2.x (arXiv 2510.19338): linear attention whose heads forget
at fixed rates."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels.matmul import Weight
from specserve.kernels.recurrence import New, State, recur
from specserve.kernels.rows import Unrolled
from specserve.kernels.rowwise import apply_rope, by_head, rms_norm
from specserve.models.config import Lightning, ModelConfig
from specserve.models.context import Context
from specserve.models.layers import linear, norm_spec
from specserve.models.params import TensorPart, matrix, optional, vector
from specserve.pytree import pytree


@pytree
class LightningAttention:
    q: Weight  # [d_model, head * head_dim]
    k: Weight  # [d_model, head * head_dim]
    v: Weight  # [d_model, head * head_dim]
    q_bias: jax.Array | None
    k_bias: jax.Array | None
    v_bias: jax.Array | None
    q_norm: jax.Array | None  # [head_dim]
    k_norm: jax.Array | None  # [head_dim]
    gate: Weight  # [d_model, head * head_dim]
    norm: jax.Array  # [head * head_dim]
    o: Weight  # [head * head_dim, d_model]
    o_bias: jax.Array | None


def lightning_spec(config: ModelConfig, lightning: Lightning, prefix: str) -> LightningAttention:
    names, d_model, size = config.names, config.d_model, lightning.num_heads * lightning.head_dim
    parts = [TensorPart(i * size, (i + 1) * size, 3 * size, 3 * size) for i in range(3)]
    qkv = f"{prefix}.{names.qkv}"
    q, k, v = (matrix(f"{qkv}.weight", d_model, size, ("embed", "heads"), part=part) for part in parts)
    q_bias, k_bias, v_bias = (
        optional(config.qkv_bias, vector(f"{qkv}.bias", size, "heads", init="zeros", part=part)) for part in parts
    )

    def head_norm(name: str) -> Any:
        return optional(lightning.has_qk_norm, norm_spec(f"{prefix}.{name}", lightning.head_dim))

    return LightningAttention(
        q=q,
        k=k,
        v=v,
        q_bias=q_bias,
        k_bias=k_bias,
        v_bias=v_bias,
        q_norm=head_norm(names.q_norm),
        k_norm=head_norm(names.k_norm),
        gate=matrix(f"{prefix}.g_proj.weight", d_model, size, ("embed", "heads")),
        norm=vector(f"{prefix}.g_norm.weight", size, "heads"),
        o=matrix(f"{prefix}.{names.o}.weight", size, d_model, ("heads", "embed")),
        o_bias=optional(config.o_bias, vector(f"{prefix}.{names.o}.bias", d_model, init="zeros")),
    )


def init_state(lightning: Lightning, batch: int) -> State:
    return State(jnp.zeros((batch, lightning.num_heads, lightning.head_dim, lightning.head_dim), jnp.float32), ())


def mix(
    params: LightningAttention,
    config: ModelConfig,
    lightning: Lightning,
    slope_scale: float,
    x: jax.Array,  # [batch, n, d_model], normed
    seen: State,
    context: Context,
) -> tuple[jax.Array, New]:
    """Compute what the layer adds to the residual, [batch, n, d_model], and what the tokens would change in its
    state."""

    def heads(weight: Weight, bias: jax.Array | None, norm: jax.Array | None = None) -> jax.Array:
        states = by_head(linear(x, weight, bias), lightning.num_heads)
        return states if norm is None else rms_norm(states, norm, config.norm_eps)

    tables = context.local_rope or context.rope  # beside latent layers, which turn another width, its own
    q = apply_rope(heads(params.q, params.q_bias, params.q_norm), tables).astype(jnp.float32)
    k = apply_rope(heads(params.k, params.k_bias, params.k_norm), tables).astype(jnp.float32)
    v = heads(params.v, params.v_bias).astype(jnp.float32)
    decay = jnp.asarray(-slope_scale * slopes(lightning.num_heads), jnp.float32)
    log_decay = jnp.broadcast_to(decay[:, None], (*x.shape[:2], lightning.num_heads, 1))
    assert not isinstance(context.mask, Unrolled)
    out, u = recur(q * lightning.head_dim**-0.5, k, v, log_decay, None, seen.matrix, context.mask)
    groups = (lightning.num_norm_groups, -1)
    out = rms_norm(out.reshape(*x.shape[:2], *groups), params.norm.reshape(groups), config.norm_eps)
    out = out.reshape(*x.shape[:2], -1) * jax.nn.sigmoid(linear(x, params.gate).astype(jnp.float32))
    return linear(out.astype(x.dtype), params.o, params.o_bias), New(k, u, log_decay, ())


def slopes(num_heads: int) -> np.ndarray:  # [head]
    """The rates at which heads forget are ALiBi's (Press et al. 2021, arXiv 2108.12409, section 3). Head i of n,
    counted from 1, has 2 ** (-8 i / n) where n is a power of two. Other numbers take the largest power of two below,
    and then every second slope of twice that many heads."""
    whole = 2 ** math.floor(math.log2(num_heads))

    def powers(n: int) -> np.ndarray:
        return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

    return np.concatenate([powers(whole), powers(2 * whole)[::2][: num_heads - whole]])
