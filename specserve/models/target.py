"""The target: one decoder forward for every family, used by training (no pages) and by serving (paged prefix).

It knows no tree and no request: it sees tokens, their positions, who sees whom, and the committed prefix.
"""

import jax
import jax.numpy as jnp

from specserve.kernels.attention import attend
from specserve.kernels.matmul import BlockedMatrix, Weight, matmul_float32
from specserve.models.config import ModelConfig
from specserve.models.kv_pages import KVPages, LayerKV, Prefix
from specserve.models.layers import (
    Attention,
    Mlp,
    attention_spec,
    fuse_attention,
    fuse_mlp,
    linear,
    mlp,
    mlp_spec,
    project_qkv,
    rms_norm,
    rope_tables,
)
from specserve.models.params import embedding_table, matrix, vector
from specserve.pytree import pytree


@pytree
class Layer:
    attention_norm: jax.Array  # [d_model]
    attention: Attention
    mlp_norm: jax.Array  # [d_model]
    mlp: Mlp


@pytree
class TargetParams:
    embedding: jax.Array  # [vocab, d_model]
    layers: tuple[Layer, ...]
    norm: jax.Array  # [d_model]
    head: Weight | None  # [d_model, vocab]; None: the embedding is used (tied)


@pytree
class TargetOutput:
    hidden_states: jax.Array  # [batch, n, d_model], after the final norm
    aux_hidden_states: jax.Array | None  # [batch, n, taps * d_model], the tapped layers' outputs side by side
    kv: tuple[LayerKV, ...]  # this call's own keys and values, layer by layer


def target_spec(config: ModelConfig) -> TargetParams:
    """The parameters of a target as `ParamSpec`s with their Hugging Face names."""
    return TargetParams(
        embedding=embedding_table("model.embed_tokens.weight", config.vocab_size, config.d_model),
        layers=tuple(_layer_spec(config, i) for i in range(config.num_layers)),
        norm=vector("model.norm.weight", config.d_model),
        head=None
        if config.tie_embeddings
        else matrix("lm_head.weight", config.d_model, config.vocab_size, ("embed", "vocab")),
    )


def _layer_spec(config: ModelConfig, i: int) -> Layer:
    prefix = f"model.layers.{i}"
    return Layer(
        attention_norm=vector(f"{prefix}.input_layernorm.weight", config.d_model),
        attention=attention_spec(config, f"{prefix}.self_attn", config.d_model),
        mlp_norm=vector(f"{prefix}.post_attention_layernorm.weight", config.d_model),
        mlp=mlp_spec(config, f"{prefix}.mlp"),
    )


def forward(
    params: TargetParams,
    config: ModelConfig,
    token_ids: jax.Array,  # [batch, n] int32
    position_ids: jax.Array,  # [batch, n] int32
    mask: jax.Array,  # [batch or 1, n, n] bool: who sees whom among the n
    *,
    pages: KVPages | None = None,
    prefix: Prefix | None = None,
    aux_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Run the decoder over n tokens of each sequence, after `prefix` where there is one."""
    assert (pages is None) == (prefix is None), "pages and prefix come together"
    x = params.embedding[token_ids]
    rope = rope_tables(config.rope, config.head_dim, position_ids)
    taps: dict[int, jax.Array] = {}
    kv: list[LayerKV] = []
    for i, layer in enumerate(params.layers):
        normed = rms_norm(x, layer.attention_norm, config.norm_eps)
        q, k, v = project_qkv(layer.attention, config, normed, rope)
        kv.append((k, v))
        seen = pages.layer(i, prefix) if pages is not None and prefix is not None else None
        out = attend(q, k, v, mask, seen).reshape(*x.shape[:2], -1)
        x = x + linear(out, layer.attention.o, layer.attention.o_bias)
        x = x + mlp(layer.mlp, rms_norm(x, layer.mlp_norm, config.norm_eps))
        if i in aux_layers:
            taps[i] = x
    return TargetOutput(
        hidden_states=rms_norm(x, params.norm, config.norm_eps),
        aux_hidden_states=jnp.concatenate([taps[i] for i in aux_layers], axis=-1) if aux_layers else None,
        kv=tuple(kv),
    )


def logits(params: TargetParams, hidden_states: jax.Array) -> jax.Array:  # [..., d_model] -> [..., vocab] float32
    """Next-token logits of normed hidden states."""
    if params.head is None:
        return jnp.einsum("...d,vd->...v", hidden_states, params.embedding, preferred_element_type=jnp.float32)
    return matmul_float32(hidden_states, params.head)


def head_columns(params: TargetParams, token_ids: jax.Array) -> jax.Array:  # [d_model, len(token_ids)]
    """The output head restricted to some tokens: what a draft's head is warm-started from."""
    assert not isinstance(params.head, BlockedMatrix), "blocked parameters are for serving only"
    return params.embedding[token_ids].T if params.head is None else params.head[:, token_ids]


def fuse_for_cpu(params: TargetParams) -> TargetParams:
    """The same target with fewer, wider products, and with a head of its own where it was tied: XLA's CPU backend
    would transpose the embedding at every call."""
    layers = tuple(
        Layer(layer.attention_norm, fuse_attention(layer.attention), layer.mlp_norm, fuse_mlp(layer.mlp))
        for layer in params.layers
    )
    head = params.embedding.T if params.head is None else params.head
    return TargetParams(params.embedding, layers, params.norm, head)
