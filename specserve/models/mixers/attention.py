"""Grouped-query attention layers, used by targets and by draft heads: their parameters and their forward."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.attention import attend, attend_committed
from specserve.kernels.matmul import Weight
from specserve.kernels.paged import PagedPrefix
from specserve.kernels.rowwise import as_heads, by_head, rms_norm, split_as_heads
from specserve.mesh import program_platform
from specserve.models.config import BlockIndex, LayerKind, ModelConfig
from specserve.models.context import Context, Tables, by_group, join, together
from specserve.models.layers import are_alike, linear, norm_spec, side_by_side
from specserve.models.mixers.block_index import BlockIndexer, attend_to_chosen, block_indexer_spec, chooses, with_share
from specserve.models.params import TensorPart, matrix, optional, vector
from specserve.models.rope import rope_tables
from specserve.pytree import pytree

MANY_ROWS = 512  # of prompts

KV = tuple[jax.Array, jax.Array]  # keys, values: [batch, n, kv_head, head_dim]


@pytree
class Attention:
    q: Weight  # [d_in, head * head_dim]; with k and v None it holds all three side by side (`fuse_attention`)
    k: Weight | None  # [d_in, kv_head * head_dim]
    v: Weight | None  # [d_in, kv_head * v_dim]
    o: Weight  # [head * v_dim, d_model]
    q_bias: jax.Array | None
    k_bias: jax.Array | None
    v_bias: jax.Array | None
    o_bias: jax.Array | None
    q_norm: jax.Array | None  # [head_dim], or [head * head_dim]
    k_norm: jax.Array | None  # [head_dim], or [kv_head * head_dim]
    gate: Weight | None  # [d_in, head * v_dim]
    gate_bias: jax.Array | None
    sinks: jax.Array | None  # [head]
    indexer: BlockIndexer | None = None


def attention_spec(config: ModelConfig, prefix: str, d_in: int, kind: LayerKind = LayerKind()) -> Attention:
    """The parameters of one attention layer of this kind as `ParamSpec`s. `config` has the kind's sizes. `d_in` is the
    width of the projections' input: d_model in a target, twice that in the first layer of a draft head."""
    names, has_gate = config.names, config.has_attention_gate
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    head_dim, v_dim, times = config.head_dim, config.value_dim, config.kv_repeats
    v_size, out_size, stored = config.num_kv_heads * v_dim, config.num_heads * v_dim, kv_size // times
    assert v_dim == head_dim or not (names.qkv or has_gate), "one tensor of heads of two widths"
    if names.qkv:
        total = q_size + 2 * stored
        q, k, v = [f"{prefix}.{names.qkv}"] * 3
        q_part = TensorPart(0, q_size, total, total)
        k_part, v_part = (
            TensorPart(start, start + stored, total, total, head_dim, times) for start in (q_size, q_size + stored)
        )
    else:
        q, k, v = (f"{prefix}.{name}_proj" for name in "qkv")
        # with a gate, each head has its query and then its gate in one tensor
        q_part = optional(has_gate, TensorPart(0, head_dim, 2 * head_dim, 2 * q_size))
        k_part, v_part = (
            optional(times > 1, TensorPart(0, size // times, size // times, size // times, width, times))
            for size, width in ((kv_size, head_dim), (v_size, v_dim))
        )
    gate_part = TensorPart(head_dim, 2 * head_dim, 2 * head_dim, 2 * q_size)
    has_bias, offset, qk_norm = config.qkv_bias, config.norm_offset, config.qk_norm
    has_keys, index = kind.kv_from is None, config.block_index
    has_values = has_keys and not kind.values_are_keys
    q_norm_size, k_norm_size = q_size, kv_size
    if qk_norm == "head":
        q_norm_size = k_norm_size = head_dim
    return Attention(
        q=matrix(f"{q}.weight", d_in, q_size, ("embed", "heads"), part=q_part),
        k=optional(has_keys, matrix(f"{k}.weight", d_in, kv_size, ("embed", "kv_heads"), part=k_part)),
        v=optional(has_values, matrix(f"{v}.weight", d_in, v_size, ("embed", "kv_heads"), part=v_part)),
        o=matrix(f"{prefix}.{names.o}.weight", out_size, config.d_model, ("heads", "embed")),
        q_bias=optional(has_bias, vector(f"{q}.bias", q_size, "heads", init="zeros", part=q_part)),
        k_bias=optional(has_bias and has_keys, vector(f"{k}.bias", kv_size, "kv_heads", init="zeros", part=k_part)),
        v_bias=optional(has_bias and has_values, vector(f"{v}.bias", v_size, "kv_heads", init="zeros", part=v_part)),
        o_bias=optional(config.o_bias, vector(f"{prefix}.{names.o}.bias", config.d_model, init="zeros")),
        q_norm=optional(qk_norm, norm_spec(f"{prefix}.{names.q_norm}", q_norm_size, offset=offset)),
        k_norm=optional(qk_norm and has_keys, norm_spec(f"{prefix}.{names.k_norm}", k_norm_size, offset=offset)),
        gate=optional(has_gate, matrix(f"{q}.weight", d_in, q_size, ("embed", "heads"), part=gate_part)),
        gate_bias=optional(has_gate and has_bias, vector(f"{q}.bias", q_size, "heads", init="zeros", part=gate_part)),
        sinks=optional(config.has_sinks, vector(f"{prefix}.{names.sinks}", config.num_heads, "heads", init="zeros")),
        indexer=block_indexer_spec(config, index, prefix, d_in) if index else None,
    )


def has_equal_heads(params: Attention) -> bool:
    """Return whether values have as many channels as keys."""
    return params.k is not None and params.v is not None and params.k.shape == params.v.shape


def fuse_attention(params: Attention) -> Attention:
    """Join the projections of q, k and v into one matrix, and their biases into one vector. It is only for layers that
    project all three from the same tokens (`project_qkv`), to heads of one width; others stay as they are, and so do
    matrices that are stored in several ways."""
    if not (has_equal_heads(params) and are_alike(params.q, params.k, params.v)):
        return params
    return dataclasses.replace(
        params,
        q=side_by_side(params.q, params.k, params.v),
        k=None,
        v=None,
        q_bias=side_by_side(params.q_bias, params.k_bias, params.v_bias),
        k_bias=None,
        v_bias=None,
    )


def mix(
    params: Attention,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,  # [batch, n, d_model], normed
    seen: PagedPrefix | None,
    context: Context,
    add: jax.Array | None = None,
    shared: Any = None,  # the own keys and values of the layer that it shares them with, as that layer returned them
) -> tuple[jax.Array, KV | None]:
    """Compute what the layer adds to the residual stream, [batch, n, d_model], summed with `add` where it is given; and
    the tokens' own keys and values."""
    if kind.kv_from is not None and shared is None:  # of another model: committed ones alone
        assert seen is not None, "a layer without keys of its own needs another's"
        tables = context.local_rope if kind.is_local else context.rope
        assert tables is not None, "a local layer without local rotary embeddings"
        q, scale = project_q(params, config, x, tables), config.attention_scale or None
        out = attend_committed(q, seen, scale=scale, window=kind.window, position_ids=context.position_ids)
        return linear(out.reshape(*x.shape[:2], -1), params.o, params.o_bias, add=add), None
    *own, v = _turned_qkv(params, config, kind, x, context, shared)
    if index := config.block_index if config.key_dim > config.head_dim else None:
        own = _with_index(params, config, index, x, context, *own)
    if seen is not None and x.shape[0] * x.shape[1] >= MANY_ROWS and program_platform() == "gpu":
        # else XLA keeps each layer's product whole, from which it takes the values again when they are written
        v = jax.lax.optimization_barrier(v)

    def attend_own(context: Context, seen: PagedPrefix | None, *own: jax.Array) -> tuple[jax.Array, KV]:
        q, k, *index_q, v = own
        keys, values = join(context.earlier, (k, v))
        scale = config.attention_scale or config.head_dim**-0.5
        if index is not None and chooses(index, keys, seen):
            keys_values, finish = (keys, values, context.mask, seen), functools.partial(_index_keys, params, config)
            out = attend_to_chosen(index, q, *keys_values, index_q[0], context.position_ids, scale, finish)
            return out.reshape(*q.shape[:2], -1), (k, v)
        if index is not None:  # of the indexer's key in the pages attention takes no notice
            q = jnp.pad(q, (*[(0, 0)] * 3, (0, config.key_dim - config.head_dim)))
        out = attend(
            q,
            keys,
            values,
            context.mask,
            seen,
            scale=scale,
            softcap=config.attention_softcap,
            sinks=params.sinks,
            window=kind.window,
            position_ids=context.position_ids,
        )
        return out.reshape(*q.shape[:2], -1), (k, v)

    out, left = by_group(attend_own, context, seen, *own, v)
    if params.gate is not None:
        out = out * jax.nn.sigmoid(linear(x, params.gate, params.gate_bias))
    return linear(out, params.o, params.o_bias, add=add), left


def _with_index(
    params: Attention,
    config: ModelConfig,
    index: BlockIndex,
    x: jax.Array,
    context: Context,
    q: jax.Array,
    k: jax.Array,
) -> list[jax.Array]:
    """Return queries, keys as the cache has them, and the indexer's queries."""
    assert params.indexer is not None, "an indexer without parameters"
    key = linear(x, params.indexer.k)
    key = (
        key[:, :, None] if index.pools_keys else as_heads(key, 1, params.indexer.k_norm, context.rope, **_rules(config))
    )
    index_q = linear(x, params.indexer.q)
    index_q = as_heads(index_q, index.num_heads, params.indexer.q_norm, context.rope, **_rules(config))
    return [q, with_share(k, key), index_q]


def _index_keys(params: Attention, config: ModelConfig, means: jax.Array, first: jax.Array) -> jax.Array:
    """Norm and turn the means of the indexer's keys (`block_index.Finish`)."""
    assert params.indexer is not None
    tables, flat = rope_tables(config.rope, config.head_dim, first), means.reshape(-1, *means.shape[2:])
    return as_heads(flat, 1, params.indexer.k_norm, tables, **_rules(config))[:, :, 0].reshape(means.shape)


def _turned_qkv(
    params: Attention, config: ModelConfig, kind: LayerKind, x: jax.Array, context: Context, shared: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys and values as `project_qkv`, by the rules of this layer and of its family."""
    tables = context.local_rope if kind.is_local else context.rope
    assert tables is not None, "a local layer without local rotary embeddings"
    if not kind.has_rope:
        tables = unturned(tables)
    if kind.kv_from is not None:
        assert shared is not None, "a layer without keys of its own needs another's"
        return project_q(params, config, x, tables), *together(context, shared)
    if not config.norms_turned:
        q, k, v = project_qkv(params, config, x, tables)
    else:
        q, k, v = project_qkv(dataclasses.replace(params, q_norm=None, k_norm=None), config, x, tables)
        assert params.q_norm is not None
        assert params.k_norm is not None
        q, k = rms_norm(q, params.q_norm, config.norm_eps), rms_norm(k, params.k_norm, config.norm_eps)
    if config.has_unit_norms and kind.has_rope:
        unit = jnp.ones(config.head_dim, jnp.float32)
        q, k = rms_norm(q, unit, config.norm_eps), rms_norm(k, unit, config.norm_eps)
    if kind.has_growth:
        q = grown(q, config, context)
    return q, k, v if config.value_scale == 1.0 else v * jnp.asarray(config.value_scale, v.dtype)


def unturned(tables: Tables) -> Tables:
    """Return the tables of a turn by no angle."""
    return jnp.ones_like(tables[0]), jnp.zeros_like(tables[1])


def grown(q: jax.Array, config: ModelConfig, context: Context) -> jax.Array:  # [batch, n, head, dim]
    """Return queries that grow with the logarithm of their position (Llama 4)."""
    positions = context.position_ids[:, -q.shape[1] :] + config.query_shift
    spans = (positions // config.query_span).astype(jnp.float32)
    return q * (1 + config.query_growth * jnp.log1p(spans))[..., None, None].astype(q.dtype)


def project_qkv(
    params: Attention,
    config: ModelConfig,
    x: jax.Array,  # [batch, n, d_in]
    rope: Tables,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # q [batch, n, head, head_dim], k and v [batch, n, kv_head, head_dim]
    if params.k is not None:
        return project_q(params, config, x, rope), *project_kv(params, config, x, rope)
    q, k, v = split_as_heads(
        linear(x, params.q, params.q_bias),
        (config.num_heads, config.num_kv_heads, config.head_dim),
        (params.q_norm, params.k_norm),
        rope,
        **_rules(config),
    )
    return q, k, _values(config, v)


def project_q(
    params: Attention,
    config: ModelConfig,
    x: jax.Array,  # [batch, n, d_in]
    rope: Tables,
) -> jax.Array:  # [batch, n, head, head_dim]
    return as_heads(linear(x, params.q, params.q_bias), config.num_heads, params.q_norm, rope, **_rules(config))


def project_kv(
    params: Attention,
    config: ModelConfig,
    x: jax.Array,  # [batch, n, d_in]
    rope: Tables,
) -> KV:
    assert params.k is not None, "fused projections come together: use project_qkv"
    keys = linear(x, params.k, params.k_bias)
    values = keys if params.v is None else linear(x, params.v, params.v_bias)
    k = as_heads(keys, config.num_kv_heads, params.k_norm, rope, **_rules(config))
    return k, _values(config, by_head(values, config.num_kv_heads))


def _values(config: ModelConfig, v: jax.Array) -> jax.Array:  # [batch, n, kv_head, head_dim]
    if not config.has_value_norm:
        return v
    return rms_norm(v, jnp.ones(config.head_dim, jnp.float32), config.norm_eps)


def _rules(config: ModelConfig) -> dict[str, Any]:
    """Return how queries and keys are normed and rotated, as keyword arguments for the kernels."""
    return {
        "eps": config.norm_eps,
        "offset": config.norm_offset,
        "is_interleaved": config.rope.is_interleaved,
    }
