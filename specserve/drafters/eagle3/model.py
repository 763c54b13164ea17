"""The EAGLE-3 draft head (Li et al. 2025, arXiv 2503.01840), as SGLang and vLLM load it.

Entry t of a sequence consumes (the target's feature at t-1, the token at t). Its output, the recurrent hidden state,
predicts the token at t+1 and stands in for the feature when the draft runs ahead of the target. The functions here
are shared by the training rollout and by serving; the caller decides what attends to what.

Of tokens whose hidden states are known the layers below the last run, since those above consume their outputs; the last
one runs only for entries that predict.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.follow import FIRST_ENTRY, Tables
from specserve.drafters.layers import windows_of
from specserve.kernels.attention import attend
from specserve.kernels.matmul import Weight, matmul_float32
from specserve.kernels.paged import PagedPrefix
from specserve.kernels.rowwise import rms_norm
from specserve.models.cache import Cache, Pages, Prefix
from specserve.models.layers import Mlp, linear, mlp, mlp_spec, normed
from specserve.models.mixers.attention import KV, Attention, attention_spec, project_kv, project_q
from specserve.models.mixers.latent import (
    LatentAttention,
    absorb,
    latent_spec,
    project_latents,
    project_queries,
    release,
)
from specserve.models.params import embedding_table, matrix, optional, vector
from specserve.models.rope import rope_tables
from specserve.models.target import TargetParams, capped, embed, head_logits
from specserve.pytree import pytree
from specserve.speculative.vocab import DraftVocab


@pytree
class DraftLayer:
    """The first layer attends with [embedding_normed | hidden_normed]; those above it are ordinary pre-norm decoder
    layers on its residual stream, as SGLang, vLLM and speculators have them."""

    input_norm: jax.Array  # [d_model], on the token embedding in the first layer, on the stream in the others
    attention: Attention | LatentAttention
    mlp_norm: jax.Array  # [d_model]
    mlp: Mlp
    # those of Gemma 4's layers alone
    attention_out_norm: jax.Array | None = None  # [d_model], on what attention adds to the stream
    mlp_out_norm: jax.Array | None = None  # [d_model], on what the MLP adds
    scale: jax.Array | None = None  # [1], of the layer's output


Output = tuple[jax.Array, Weight | None]  # the final norm, and the head; None: the target's


@pytree
class Eagle3Params:
    embedding: jax.Array | None  # [vocab, d_model]; None: the target's is shared
    fc: Weight  # [taps * target_d_model, d_model]
    fc_norms: tuple[jax.Array, ...]  # one [target_d_model] for each tap, or none
    fc_input_norm: jax.Array | None  # [taps * target_d_model]
    hidden_norm: jax.Array  # [d_model], on the feature or the recurrent state
    layers: tuple[DraftLayer, ...]
    norm: jax.Array  # [d_model]
    head: Weight | None  # [d_model, draft_vocab]; None: the target's is shared

    @property
    def output(self) -> Output:
        """The parameters that make logits of states, see `draft_logits`."""
        return self.norm, self.head


def draft_spec(config: Eagle3Config) -> Eagle3Params:
    """The parameters of a head as `ParamSpec`s with their SGLang names."""
    num_taps = len(config.aux_layers)
    fused = num_taps * config.target_d_model
    norms = tuple(vector(f"fc_norm.{i}.weight", config.target_d_model) for i in range(num_taps))
    embedding = embedding_table("embed_tokens.weight", config.vocab_size, config.d_model)
    head = matrix("lm_head.weight", config.d_model, config.draft_vocab_size, ("embed", "vocab"))
    return Eagle3Params(
        embedding=optional(config.has_embedding, embedding),
        fc=matrix("fc.weight", fused, config.d_model, (None, "embed")),
        fc_norms=norms if config.fc_norm else (),
        fc_input_norm=vector("input_norm.weight", fused) if config.norm_before_fc else None,
        hidden_norm=vector("midlayer.hidden_norm.weight", config.d_model),
        layers=tuple(_layer_spec(config, i) for i in range(config.num_layers)),
        norm=vector("norm.weight", config.d_model),
        head=optional(config.has_own_head, head),
    )


def _layer_spec(config: Eagle3Config, i: int) -> DraftLayer:
    prefix, d_in = (f"layers.{i}", config.d_model) if i else ("midlayer", 2 * config.d_model)
    names, at = config.names, f"{prefix}.self_attn"

    def norm(name: str) -> Any:
        return vector(f"{prefix}.{name}.weight", config.d_model)

    return DraftLayer(
        input_norm=norm("hidden_norm" if i else "input_layernorm"),
        attention=latent_spec(config, at, d_in) if config.latent else attention_spec(config, at, d_in, config.kind(i)),
        mlp_norm=norm(names.mlp_norm),
        mlp=mlp_spec(config, f"{prefix}.mlp", has_bias=config.mlp_bias),
        attention_out_norm=optional(config.out_norms, norm(names.attention_out_norm)),
        mlp_out_norm=optional(config.out_norms, norm(names.mlp_out_norm)),
        scale=optional(config.has_layer_scale, vector(f"{prefix}.layer_scalar", 1)),
    )


def fuse_features(
    params: Eagle3Params,
    config: Eagle3Config,
    aux_hidden_states: jax.Array,  # [batch, n, taps * target_d_model]
) -> jax.Array:  # [batch, n, d_model]
    """Fuse the target's tapped states into one feature. It is done once, where the target has run."""
    x = aux_hidden_states
    if params.fc_input_norm is not None:
        x = rms_norm(x, params.fc_input_norm, config.norm_eps)
    if params.fc_norms:
        taps = jnp.split(x, len(params.fc_norms), axis=-1)
        normed = [rms_norm(tap, norm, config.norm_eps) for tap, norm in zip(taps, params.fc_norms, strict=True)]
        x = jnp.concatenate(normed, axis=-1)
    return linear(x, params.fc)


@pytree
class DraftInputs:
    """The inputs of one layer, for some entries of the draft's sequence."""

    x: jax.Array  # [batch, n, d_in], normed; [embedding_normed | hidden_normed] at the first layer
    residual: jax.Array  # [batch, n, d_model]
    rope: tuple[jax.Array, jax.Array]


def draft_inputs(
    params: Eagle3Params,
    config: Eagle3Config,
    embedding: jax.Array,  # [vocab, d_model], see `token_embedding`
    token_ids: jax.Array,  # [batch, n] int32
    hidden_states: jax.Array,  # [batch, n, d_model], features or recurrent states
    position_ids: jax.Array,  # [batch, n] int32
) -> DraftInputs:
    """Compute the inputs of the first layer for some entries, before anything attends."""
    token = rms_norm(embed(embedding, config, token_ids), params.layers[0].input_norm, config.norm_eps)
    hidden = rms_norm(hidden_states, params.hidden_norm, config.norm_eps)
    return DraftInputs(
        x=jnp.concatenate([token, hidden], axis=-1),
        residual=hidden if config.norm_before_residual else hidden_states,
        rope=rope_tables(config.rope, config.head_dim, position_ids),
    )


def token_embedding(params: Eagle3Params, target_embedding: jax.Array) -> jax.Array:  # [vocab, d_model]
    return target_embedding if params.embedding is None else params.embedding


# (layer, q [batch, n, head, head_dim], and the entries' own k and v [batch, n, kv_head, head_dim]) -> like q
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


def attend_by_window(
    config: Eagle3Config,
    layer: int,
    q: jax.Array,  # [batch, n, head, head_dim]
    k: jax.Array,  # [batch, m, kv_head, head_dim]
    v: jax.Array,
    mask: jax.Array,  # [batch or 1, n, m] bool
    seen: PagedPrefix,
    position_ids: jax.Array,  # [batch, m] int32, of the entries in k; the last n of them are the queries' own
) -> jax.Array:  # [batch, n, head, head_dim]
    """Attend in a layer of the head, no further back than its window reaches (`attention.attend`)."""
    window, scale = config.kind(layer).window, config.attention_scale or None
    return attend(q, k, v, mask, seen, scale=scale, window=window, position_ids=position_ids)


def draft_entries(
    params: Eagle3Params, config: Eagle3Config, inputs: DraftInputs, attend: Attend
) -> tuple[DraftInputs, tuple[KV, ...]]:
    """Compute the keys and values of the entries in every layer, and the entries' inputs to the last layer. That layer
    need run only for entries that predict. Of a head with a single layer nothing runs here, and `attend` is never
    called."""
    entries = []
    for i, layer in enumerate(params.layers):
        k, v = _entry(layer, config, inputs)
        entries.append((k, v))
        if i + 1 < config.num_layers:
            q = _query(layer, config, inputs)
            x = _leave(layer, config, inputs.residual, attend(i, q, k, v))
            inputs = DraftInputs(rms_norm(x, params.layers[i + 1].input_norm, config.norm_eps), x, inputs.rope)
    return inputs, tuple(entries)


def draft_states(
    params: Eagle3Params,
    config: Eagle3Config,
    inputs: DraftInputs,  # of entries that predict, to the last layer
    attend_to: Callable[[jax.Array], jax.Array],  # q [batch, n, head, head_dim] -> the same shape
) -> jax.Array:  # [batch, n, d_model]
    """Run the last layer, and return the recurrent hidden states (before the final norm unless `norm_output`)."""
    layer = params.layers[-1]
    out = attend_to(_query(layer, config, inputs))
    x = _leave(layer, config, inputs.residual, out)
    return rms_norm(x, params.norm, config.norm_eps) if config.norm_output else x


def draft_forward(
    params: Eagle3Params, config: Eagle3Config, inputs: DraftInputs, attend: Attend
) -> tuple[jax.Array, tuple[KV, ...]]:
    """Run all layers for entries that all predict. Returns their recurrent hidden states [batch, n, d_model], and
    their keys and values in every layer."""
    inputs, entries = draft_entries(params, config, inputs, attend)
    last = config.num_layers - 1
    return draft_states(params, config, inputs, lambda q: attend(last, q, *entries[last])), entries


def _entry(layer: DraftLayer, config: Eagle3Config, inputs: DraftInputs) -> KV:
    if isinstance(layer.attention, LatentAttention):
        assert config.latent is not None
        latents = project_latents(layer.attention, config, inputs.x, inputs.rope)
        return latents, latents[..., : config.latent.kv_rank]
    return project_kv(layer.attention, config, inputs.x, inputs.rope)


def _query(layer: DraftLayer, config: Eagle3Config, inputs: DraftInputs) -> jax.Array:
    if isinstance(layer.attention, LatentAttention):
        return absorb(layer.attention, config, *project_queries(layer.attention, config, inputs.x, inputs.rope))
    return project_q(layer.attention, config, inputs.x, inputs.rope)


def _leave(
    layer: DraftLayer,
    config: Eagle3Config,
    residual: jax.Array,  # [batch, n, d_model]
    out: jax.Array,  # [batch, n, head, head_dim], what attention found
) -> jax.Array:  # [batch, n, d_model], the residual stream after the layer
    if isinstance(layer.attention, LatentAttention):
        out = release(layer.attention, config, out)
    flat = out.reshape(*residual.shape[:2], -1)
    if not config.out_norms:
        x = linear(flat, layer.attention.o, layer.attention.o_bias, add=residual)
        return mlp(layer.mlp, rms_norm(x, layer.mlp_norm, config.norm_eps), config.activation, add=x)
    x = residual + normed(config, linear(flat, layer.attention.o, layer.attention.o_bias), layer.attention_out_norm)
    found = mlp(layer.mlp, rms_norm(x, layer.mlp_norm, config.norm_eps), config.activation)
    x += normed(config, found, layer.mlp_out_norm)
    return x if layer.scale is None else x * layer.scale.astype(x.dtype)


def draft_logits(
    output: Output,
    config: Eagle3Config,
    hidden_states: jax.Array,  # [..., d_model], what `draft_states` returned
    target: TargetParams | None = None,  # of a head that shares its output rows
) -> jax.Array:  # [..., draft_vocab] float32
    norm, head = output
    if not config.norm_output:
        hidden_states = rms_norm(hidden_states, norm, config.norm_eps)
    if head is not None:
        return capped(config, matmul_float32(hidden_states, head))
    assert target is not None, "a head without output rows shares the target's"
    return capped(config, head_logits(target, hidden_states))


# the entries of tokens whose hidden states are known: what the network keeps of a sequence


@pytree
class ReadyHead:
    """A head ready to propose."""

    params: Eagle3Params
    vocab: DraftVocab
    target: TargetParams

    @property
    def embedding(self) -> jax.Array:  # [vocab, d_model]
        return token_embedding(self.params, self.target.embedding)


def empty_cache(config: Eagle3Config, *, page_size: int, **sizes: Any) -> Cache:
    """Make empty pages for the head's layers, as `Cache.of_layers` does."""
    num_heads, width, _ = config.entry_dims

    def layer(_: int, pages: int) -> Pages:
        return Pages.zeros(pages, page_size, num_heads, width, config.dtype, has_values=config.latent is None)

    return Cache.of_layers(layer, windows_of(config), page_size=page_size, **sizes)


def stored(config: Eagle3Config, entries: tuple[KV, ...]) -> tuple[Any, ...]:
    """Return the entries as pages take them (`Cache.write`): latents have no values of their own."""
    return entries if config.latent is None else tuple((k, None) for k, _ in entries)


def extend(
    draft: ReadyHead,
    config: Eagle3Config,
    pages: Cache,
    tables: Tables,
    token_ids: jax.Array,  # [batch, n]
    aux_hidden_states: jax.Array,  # [batch, n, taps * target_d_model], of the position before each token
    index: jax.Array,  # [batch, n], of the entries, consecutive
    is_valid: jax.Array,  # [batch, n] bool, the first so many
) -> tuple[Cache, DraftInputs, KV]:  # the inputs of the entries to the last layer, and their keys and values there
    """Write the draft's entries of tokens whose features are known. The layers below the last run for all of them,
    the last for none: a head of one layer attends to nothing here."""
    features = fuse_features(draft.params, config, aux_hidden_states)
    inputs = draft_inputs(draft.params, config, draft.embedding, token_ids, features, index)
    is_entry = index >= FIRST_ENTRY
    offset = jnp.arange(token_ids.shape[1])
    mask = (offset[:, None] >= offset) & is_entry[:, None]
    page_table, read_table = tables
    before = Prefix(read_table, index[:, 0], FIRST_ENTRY)

    def see(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_by_window(config, i, q, k, v, mask, pages.attended(i, before), index)

    top, entries = draft_entries(draft.params, config, inputs, see)
    is_kept = is_valid & is_entry
    if config.num_layers > 1:
        # always true, but known only once the lower layers have run: see `speculative.step._has_run`
        is_kept &= jnp.isfinite(top.residual[..., 0])
    return pages.write(stored(config, entries), page_table, index, is_kept), top, entries[-1]
