"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). The cache holds one latent for each token,
which all heads share, and never their keys and values.

The same sum has two forms. In the expanded form the keys and values of every head are computed from the latents. In the
absorbed form the matrix that would expand the keys is applied to the queries instead, and the one for the values to the
result. So attention runs over the latents themselves, as one KV head. A paged cache needs the absorbed form. The
expanded one multiplies fewer numbers where nothing is committed and rows are long, as in training.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.attention import attend
from specserve.kernels.matmul import Weight, matmul
from specserve.kernels.paged import PagedPrefix
from specserve.kernels.rowwise import apply_rope, by_head, rms_norm
from specserve.models.config import Latent, LayerKind, ModelConfig
from specserve.models.context import Context, Tables, by_group, join
from specserve.models.layers import linear, norm_spec
from specserve.models.mixers import indexer
from specserve.models.mixers.attention import grown, unturned
from specserve.models.mixers.indexer import Indexer, indexer_spec
from specserve.models.params import TensorPart, matrix, optional, vector
from specserve.pytree import pytree, static


@pytree
class LatentAttention:
    q_down: Weight | None  # [d_model, q_rank]; None: q takes the layer's input
    q_down_bias: jax.Array | None
    q_norm: jax.Array | None  # [q_rank]
    q_nope: Weight  # [q_rank or d_model, head * nope_dim]
    q_rope: Weight | None  # [q_rank or d_model, head * rope_dim]; None: without position
    kv_down: Weight  # [d_model, kv_rank + rope_dim]: the latent, and the key with position that all heads share
    kv_down_bias: jax.Array | None
    kv_norm: jax.Array  # [kv_rank]
    k_up: Weight  # [kv_rank, head * nope_dim]; for serving [head, nope_dim, kv_rank] (`split_by_head`)
    v_up: Weight  # [kv_rank, head * v_dim]; for serving [head, kv_rank, v_dim]
    o: Weight  # [head * v_dim, d_model]
    o_bias: jax.Array | None
    gate: Weight | None  # [d_model, head]
    indexer: Indexer | None
    num_heads: int = static()


def latent_spec(config: ModelConfig, prefix: str, d_in: int) -> LatentAttention:
    """The parameters of one layer's attention as `ParamSpec`s. `config` has the layer's sizes. `d_in` is the width of
    what it takes, see `attention.attention_spec`."""
    latent, d_model, num_heads = config.latent, config.d_model, config.num_heads
    assert latent is not None
    q_in = latent.q_rank or d_in
    q = f"{prefix}.{'q_b_proj' if latent.q_rank else 'q_proj'}.weight"
    q_dim, kv_dim = latent.nope_dim + latent.rope_dim, latent.nope_dim + latent.v_dim
    q_total, kv_total = num_heads * q_dim, num_heads * kv_dim
    nope, rope, rank = latent.nope_dim, latent.rope_dim, latent.kv_rank
    kv_up = f"{prefix}.kv_b_proj.weight"
    q_axes, up_axes = (None if latent.q_rank else "embed", "heads"), (None, "heads")
    has_q_bias = config.qkv_bias and latent.q_rank > 0
    return LatentAttention(
        q_down=optional(latent.q_rank, matrix(f"{prefix}.q_a_proj.weight", d_in, latent.q_rank, ("embed", None))),
        q_down_bias=optional(has_q_bias, vector(f"{prefix}.q_a_proj.bias", latent.q_rank, init="zeros")),
        q_norm=optional(latent.q_rank, norm_spec(f"{prefix}.q_a_layernorm", latent.q_rank)),
        q_nope=matrix(q, q_in, num_heads * nope, q_axes, part=TensorPart(0, nope, q_dim, q_total)),
        q_rope=optional(rope, matrix(q, q_in, num_heads * rope, q_axes, part=TensorPart(nope, q_dim, q_dim, q_total))),
        kv_down=matrix(f"{prefix}.kv_a_proj_with_mqa.weight", d_in, rank + rope, ("embed", None)),
        kv_down_bias=optional(config.qkv_bias, vector(f"{prefix}.kv_a_proj_with_mqa.bias", rank + rope, init="zeros")),
        kv_norm=norm_spec(f"{prefix}.kv_a_layernorm", rank),
        k_up=matrix(kv_up, rank, num_heads * nope, up_axes, part=TensorPart(0, nope, kv_dim, kv_total)),
        v_up=matrix(kv_up, rank, num_heads * latent.v_dim, up_axes, part=TensorPart(nope, kv_dim, kv_dim, kv_total)),
        o=matrix(f"{prefix}.{config.names.o}.weight", num_heads * latent.v_dim, d_model, ("heads", "embed")),
        o_bias=optional(config.o_bias, vector(f"{prefix}.{config.names.o}.bias", d_model, init="zeros")),
        gate=optional(latent.has_gate, matrix(f"{prefix}.g_proj.weight", d_in, num_heads, ("embed", "heads"))),
        indexer=optional(latent.index_heads, indexer_spec(latent, f"{prefix}.indexer", d_in)),
        num_heads=num_heads,
    )


def mix(
    params: LatentAttention,
    config: ModelConfig,  # with the kind's sizes
    kind: LayerKind,
    x: jax.Array,  # [batch, n, d_model], normed
    seen: PagedPrefix | None,
    context: Context,
    add: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, None], Any]:
    """Compute what the layer adds to the residual stream, [batch, n, d_model], summed with `add` where it is given; the
    tokens' latents, [batch, n, 1, entry_dim]; and what its indexer chose, or None (`context.with_choice`)."""
    assert config.latent is not None
    latent, q_in, rope = config.latent, down_queries(params, config, x), context.rope
    if not kind.has_rope:
        rope = unturned(rope)
    q_nope, q_rope = _up_queries(params, config, q_in, rope)
    if kind.has_growth:
        q_nope, q_rope = (grown(q, config, context) for q in (q_nope, q_rope))
    new, index = project_latents(params, config, x, rope), ()
    if latent.index_topk and params.indexer is not None:
        new = jnp.concatenate([new, indexer.keys(params.indexer, latent, x, context.rope)], axis=-1)
        index = indexer.queries(params.indexer, latent, x, q_in, context.rope)

    def attend_own(context: Context, seen: PagedPrefix | None, *own: jax.Array) -> tuple[jax.Array, Any]:
        q_nope, q_rope, new, *index = own
        latents, _ = join(context.earlier, (new, None))
        if chooses(latent, latents.shape[1], seen):
            q = absorb(params, config, q_nope, q_rope)
            given = context, seen, tuple(index), config.attention_scale
            out, choice = indexer.attend_to_chosen(params.indexer, latent, q, latents, *given)
            return release(params, config, out), ((new, None), choice)
        form = expanded if seen is None else absorbed
        return form(params, config, q_nope, q_rope, latents, context, seen), ((new, None), None)

    out, found = by_group(attend_own, context, seen, q_nope, q_rope, new, *index)
    left, choice = zip(*found, strict=True) if context.groups else found
    if params.gate is not None:
        out = out * jax.nn.sigmoid(linear(x, params.gate))[..., None]
    return linear(out.reshape(*x.shape[:2], -1), params.o, params.o_bias, add=add), left, choice


def project_queries(
    params: LatentAttention,
    config: ModelConfig,
    x: jax.Array,  # [batch, n, d_in]
    rope: Tables,
) -> tuple[jax.Array, jax.Array]:  # [batch, n, head, nope_dim], and turned [batch, n, head, rope_dim]
    return _up_queries(params, config, down_queries(params, config, x), rope)


def down_queries(
    params: LatentAttention, config: ModelConfig, x: jax.Array
) -> jax.Array:  # [batch, n, d_in] -> [batch, n, q_rank or d_in]
    """Return what queries are projected from."""
    assert config.latent is not None
    if params.q_down is None:
        return x
    assert params.q_norm is not None
    return rms_norm(linear(x, params.q_down, params.q_down_bias), params.q_norm, config.latent.norm_eps)


def _up_queries(
    params: LatentAttention, config: ModelConfig, q_in: jax.Array, rope: Tables
) -> tuple[jax.Array, jax.Array]:
    q_nope = by_head(linear(q_in, params.q_nope), config.num_heads)
    if params.q_rope is None:
        return q_nope, q_nope[..., :0]
    q_rope = by_head(linear(q_in, params.q_rope), config.num_heads)
    return q_nope, apply_rope(q_rope, rope, is_interleaved=config.rope.is_interleaved)


def project_latents(
    params: LatentAttention,
    config: ModelConfig,
    x: jax.Array,  # [batch, n, d_in]
    rope: Tables,
) -> jax.Array:  # [batch, n, 1, cache_dim]
    assert config.latent is not None
    rank, down = config.latent.kv_rank, linear(x, params.kv_down, params.kv_down_bias)
    compressed = rms_norm(down[..., :rank], params.kv_norm, config.latent.norm_eps)[:, :, None]
    if not config.latent.rope_dim:
        return compressed
    k_rope = apply_rope(down[:, :, None, rank:], rope, is_interleaved=config.rope.is_interleaved)
    return jnp.concatenate([compressed, k_rope], axis=-1)


def expanded(
    params: LatentAttention,
    config: ModelConfig,
    q_nope: jax.Array,  # [batch, n, head, nope_dim]
    q_rope: jax.Array,  # [batch, n, head, rope_dim]
    new: jax.Array,  # [batch, m, 1, entry_dim]
    context: Context,
    _: PagedPrefix | None = None,
) -> jax.Array:  # [batch, n, head, v_dim]
    """Attention over the new tokens alone, in the expanded form."""
    latent = config.latent
    assert latent is not None
    compressed, k_rope = new[..., : latent.kv_rank], new[..., latent.kv_rank : latent.cache_dim]
    k_nope = by_head(matmul(compressed[:, :, 0], params.k_up), config.num_heads)
    v = by_head(matmul(compressed[:, :, 0], params.v_up), config.num_heads)
    k = jnp.concatenate([k_nope, jnp.broadcast_to(k_rope, (*k_nope.shape[:3], k_rope.shape[-1]))], axis=-1)
    q = jnp.concatenate([q_nope, q_rope], axis=-1)
    return attend(q, k, v, context.mask, scale=config.attention_scale)


def absorbed(
    params: LatentAttention,
    config: ModelConfig,
    q_nope: jax.Array,  # as in `expanded`
    q_rope: jax.Array,
    new: jax.Array,
    context: Context,
    seen: PagedPrefix | None,
) -> jax.Array:  # [batch, n, head, v_dim]
    """Attention over committed latents and new ones, in the absorbed form."""
    latent = config.latent
    assert latent is not None
    q, values, scale = absorb(params, config, q_nope, q_rope), new[..., : latent.kv_rank], config.attention_scale
    # of the indexer's keys in the pages attention takes no notice
    q = jnp.pad(q, (*[(0, 0)] * 3, (0, latent.entry_dim - latent.cache_dim)))
    return release(params, config, attend(q, new, values, context.mask, seen, scale=scale))


def chooses(latent: Latent, num_new: int, seen: PagedPrefix | None) -> bool:
    """Return whether there may be more keys than an indexer chooses: it is the shapes that decide."""
    committed = 0 if seen is None else seen.page_table.shape[1] * seen.pages.page_size
    return 0 < latent.whole_length < committed + num_new


def absorb(
    params: LatentAttention, config: ModelConfig, q_nope: jax.Array, q_rope: jax.Array
) -> jax.Array:  # [batch, n, head, cache_dim]
    """Return queries of latents. The latents are their keys, and the first `kv_rank` channels of these their values."""
    return jnp.concatenate([_each_head(q_nope, _split(params, config).k_up), q_rope], axis=-1)


def release(
    params: LatentAttention, config: ModelConfig, out: jax.Array
) -> jax.Array:  # [batch, n, head, kv_rank] -> [batch, n, head, v_dim]
    """Return the values of what attention over latents found."""
    return _each_head(out, _split(params, config).v_up)


def _split(params: LatentAttention, config: ModelConfig) -> LatentAttention:
    return split_by_head(params, config.num_heads) if len(params.k_up.shape) == 2 else params


def split_by_head(params: LatentAttention, num_heads: int) -> LatentAttention:
    """Give `k_up` and `v_up` an axis for heads, as the absorbed form multiplies by them. The values stay the same."""

    def split(weight: Weight) -> jax.Array:  # [kv_rank, head * dim] -> [kv_rank, head, dim]
        assert isinstance(weight, jax.Array)
        return weight.reshape(weight.shape[0], num_heads, -1)

    k_up, v_up = split(params.k_up).transpose(1, 2, 0), split(params.v_up).transpose(1, 0, 2)
    return dataclasses.replace(params, k_up=k_up, v_up=v_up)


def _each_head(x: jax.Array, weight: Weight) -> jax.Array:  # [b, n, head, d_in], [head, d_in, d_out] -> like x
    by_head = matmul(x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1, x.shape[3]), weight)
    return by_head.reshape(x.shape[2], *x.shape[:2], -1).transpose(1, 2, 0, 3)
