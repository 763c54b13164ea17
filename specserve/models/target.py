"""The target: one decoder forward for every family, used by training (no cache) and by serving (paged prefix).

It knows no tree and no request. It gets tokens, their positions, a mask of which tokens see each other, and the
committed prefix.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import gather
from specserve.kernels.matmul import AdaptedMatrix, BlockedMatrix, PackedMatrix, Weight, dequantize, matmul_float32
from specserve.kernels.rows import Unrolled
from specserve.models.cache import Cache, Prefix
from specserve.models.config import RECURRENT, LayerKind, ModelConfig
from specserve.models.context import Context, Mask, apart, joined, side_by_side, with_choice
from specserve.models.layer_inputs import (
    LayerInput,
    LayerInputs,
    layer_input_spec,
    layer_inputs,
    layer_inputs_spec,
    with_input,
)
from specserve.models.layers import Mlp, mlp, mlp_spec, norm_spec, normed
from specserve.models.mixers import attention, compressed, latent, recurrent
from specserve.models.mixers.attention import KV, Attention, attention_spec
from specserve.models.mixers.channel_streams import StreamMixer
from specserve.models.mixers.compressed import CompressedAttention, compressed_spec
from specserve.models.mixers.hashed import HashedLayer, add_hashed, hashed_layer_spec
from specserve.models.mixers.latent import LatentAttention, latent_spec
from specserve.models.mixers.recurrent import Recurrent
from specserve.models.mixers.streams import (
    StreamMix,
    block_streams_spec,
    entered,
    last,
    last_streams_spec,
    merged,
    spread,
)
from specserve.models.moe import Moe, moe, moe_spec
from specserve.models.params import embedding_table, matrix, optional, vector
from specserve.models.rope import rope_tables
from specserve.models.stacked import Stack, each_layer
from specserve.pytree import pytree

Mixer = Attention | LatentAttention | CompressedAttention | Recurrent


@pytree
class Layer:
    attention_norm: jax.Array | None  # [d_model]
    attention: Mixer | None
    attention_out_norm: jax.Array | None  # [d_model]
    mlp_norm: jax.Array | None  # [d_model]
    mlp: Mlp | Moe | None
    mlp_out_norm: jax.Array | None  # [d_model]
    own_input: LayerInput | None = None
    attention_streams: StreamMix | StreamMixer | None = None
    mlp_streams: StreamMix | StreamMixer | None = None
    hashed: HashedLayer | None = None
    scale: jax.Array | None = None  # [1], of the layer's output


@pytree
class TargetParams:
    embedding: jax.Array  # [vocab, d_model]
    layers: tuple[Layer | Stack, ...]  # stacks where only rows are run over (`stacked.stack_layers`)
    norm: jax.Array  # [d_model], or of all streams
    head: Weight | None  # [d_model, vocab]; None: the embedding is used (tied)
    layer_inputs: LayerInputs | None = None
    streams: StreamMix | StreamMixer | None = None  # before the final norm, or after it


@pytree
class TargetOutput:
    hidden_states: jax.Array  # [batch, n, d_model], after the final norm
    # [batch, n, taps * d_model], the tapped layers' outputs side by side. Of several streams a tap is their mean; the
    # taps from the number of layers on are the streams behind the last one.
    aux_hidden_states: jax.Array | None
    # the entries of this call's tokens for the cache, layer by layer, None of those that see another's; none of stacks
    new: tuple[Any, ...]


def target_spec(config: ModelConfig, *, has_own_head: bool = False) -> TargetParams:
    """The parameters of a target as `ParamSpec`s with their Hugging Face names. With `has_own_head` a tied output head
    is a matrix beside the embedding, as `with_own_head` makes one."""
    names = config.names
    head = names.embedding if config.tie_embeddings else names.head
    return TargetParams(
        embedding=embedding_table(names.embedding, config.vocab_size, config.d_model),
        layers=tuple(layer_spec(config, i) for i in range(config.num_layers)),
        norm=_norm_spec(config, names.norm.removesuffix(".weight")),
        head=optional(
            has_own_head or not config.tie_embeddings,
            matrix(head, config.d_model, config.vocab_size, ("embed", "vocab")),
        ),
        layer_inputs=optional(config.layer_input_dim, layer_inputs_spec(config)),
        streams=last_streams_spec(config),
    )


def layer_spec(config: ModelConfig, i: int) -> Layer:
    names, kind = config.names, config.kind(i)
    prefix, config, has_mixer = names.layer.format(i=i), config.of(kind), kind.mixer != "none"
    norms_itself = kind.has_experts and config.experts is not None and config.experts.has_norms
    has_mlp_norm = kind.has_mlp and config.in_norms and not config.is_parallel and not norms_itself

    def norm(name: str) -> Any:
        return _norm_spec(config, f"{prefix}.{name}")

    return Layer(
        attention_norm=optional(has_mixer and config.in_norms, norm(names.attention_norm)),
        attention=_mixer_spec(config, kind, prefix) if has_mixer else None,
        attention_out_norm=optional(has_mixer and config.out_norms, norm(names.attention_out_norm)),
        mlp_norm=optional(has_mlp_norm, norm(names.mlp_norm)),
        mlp=_mlp_spec(config, kind, prefix),
        mlp_out_norm=optional(kind.has_mlp and config.out_norms, norm(names.mlp_out_norm)),
        own_input=optional(config.layer_input_dim, layer_input_spec(config, prefix)),
        hashed=None if kind.hashed is None else hashed_layer_spec(config, kind.hashed, f"{prefix}.ple"),
        scale=optional(config.has_layer_scale, vector(f"{prefix}.layer_scalar", 1)),
        attention_streams=block_streams_spec(config, prefix, "attn"),
        mlp_streams=block_streams_spec(config, prefix, "mlp"),
    )


def _norm_spec(config: ModelConfig, name: str) -> Any:
    width = config.d_model
    if config.streams is not None and config.streams.is_by_channel:  # of all streams
        width *= config.num_streams
    return norm_spec(name, width, offset=config.norm_offset, is_float32=config.has_float32_norms)


def _mlp_spec(config: ModelConfig, kind: LayerKind, prefix: str) -> Mlp | Moe | None:
    if not kind.has_mlp:
        return None
    if kind.has_experts:
        return moe_spec(config, prefix)
    names = config.names
    return mlp_spec(config, f"{prefix}.{names.mlp}", fused=names.gate_up, has_bias=config.mlp_bias)


def _mixer_spec(config: ModelConfig, kind: LayerKind, prefix: str) -> Mixer:
    if kind.mixer in RECURRENT:
        return recurrent.spec(config, kind, f"{prefix}.{config.names.linear_attention}")
    if kind.mixer == "latent":
        where = f"{prefix}.{config.names.attention}"
        return latent_spec(config, where, config.d_model)
    if kind.mixer == "compressed":
        return compressed_spec(config, kind, f"{prefix}.{config.names.attention}")
    return attention_spec(config, f"{prefix}.{config.names.attention}", config.d_model, kind)


@dataclass(frozen=True)
class TokenGroup:
    """A group of tokens that run through the target: n new ones of each of some sequences."""

    token_ids: jax.Array  # [batch, n] int32
    position_ids: jax.Array  # [batch, n] int32
    mask: Mask  # [batch or 1, n, n] bool: which of the n tokens each of them sees
    prefix: Prefix | None = None  # the committed entries that they follow
    # entries that m - n tokens before them left in each layer when these ran: places and mask are of all m then
    earlier: tuple[Any, ...] | None = None


def forward(
    params: TargetParams,
    config: ModelConfig,
    token_ids: jax.Array,  # [batch, n] int32
    position_ids: jax.Array,  # [batch, n] int32
    mask: Mask,  # [batch or 1, n, n] bool: which of the n tokens each of them sees
    *,
    cache: Cache | None = None,
    prefix: Prefix | None = None,
    aux_layers: tuple[int, ...] = (),
    earlier: tuple[Any, ...] | None = None,
) -> TargetOutput:
    """Run the decoder over n tokens of each sequence, which follow `prefix` where there is one, and `earlier` ones (see
    `TokenGroup`)."""
    group = TokenGroup(token_ids, position_ids, mask, prefix, earlier)
    [out] = forward_groups(params, config, [group], cache=cache, aux_layers=aux_layers)
    return out


def forward_groups(
    params: TargetParams,
    config: ModelConfig,
    groups: Sequence[TokenGroup],
    *,
    cache: Cache | None = None,
    aux_layers: tuple[int, ...] = (),
) -> list[TargetOutput]:
    """Run the decoder over groups of tokens, of any shapes, side by side: weights are read once for all of them. A
    target with recurrent layers takes one group."""
    assert len(groups) == 1 or not config.is_recurrent, "recurrent layers run over one group"
    assert len(groups) == 1 or not any(group.earlier for group in groups), "a group that goes on runs alone"
    assert all((cache is None) == (group.prefix is None) for group in groups), "cache and prefix come together"
    shapes = [group.token_ids.shape for group in groups]
    token_ids = side_by_side([group.token_ids for group in groups])
    x = embed(params.embedding, config, token_ids)
    inputs = layer_inputs(params.layer_inputs, config, token_ids, x)
    x = spread(config, x)
    context = joined(
        [make_context(config, group.position_ids, group.mask, group.earlier, group.token_ids) for group in groups]
    )
    taps: dict[int, jax.Array] = {}
    shared: dict[int, Any] = {}  # keys and values of layers that later ones see too
    new, i = list[Any](), 0  # by layer, then by group
    for part in params.layers:
        if isinstance(part, Stack) and cache is None:
            x, found, context = _run_stack(part, config, i, x, context, aux_layers, inputs, shared)
            taps |= found
            i += part.num_layers
            continue
        for layer in each_layer((part,)):
            kind = config.kind(i)
            of = i if kind.kv_from is None else kind.kv_from
            seen = [cache.layer(of, group.prefix) if cache and group.prefix else None for group in groups]
            if groups[0].earlier is not None:
                context = dataclasses.replace(context, earlier=groups[0].earlier[of])
            at = seen if len(groups) > 1 else seen[0]
            x, left, choice = run_layer(layer, config, kind, x, at, context, inputs[i], shared.get(of))
            context = with_choice(context, choice)
            if i in config.shared_layers:
                shared[i] = left
            if kind.kv_from is not None:
                left = None
            new.append(left if len(groups) > 1 and left is not None else (left,) * len(groups))
            if i in aux_layers:
                taps[i] = merged(config, x)
            i += 1
    taps |= {i + s: x[..., s, :] for s in range(config.num_streams) if i + s in aux_layers}
    hidden_states = apart(last(params.streams, config, x, params.norm), shapes)
    aux = [apart(taps[i], shapes) for i in aux_layers]  # by tap, then by group
    return [
        TargetOutput(
            hidden_states=own,
            aux_hidden_states=jnp.concatenate([tap[i] for tap in aux], axis=-1) if aux else None,
            new=tuple(left[i] for left in new),
        )
        for i, own in enumerate(hidden_states)
    ]


def _run_stack(
    stack: Stack,
    config: ModelConfig,
    first: int,
    x: jax.Array,
    context: Context,
    aux_layers: tuple[int, ...],
    inputs: list[jax.Array | None],
    shared: dict[int, Any],
) -> tuple[jax.Array, dict[int, jax.Array], Context]:  # [batch, n, d_model], of the stack's own taps the same
    """Loop over the turns of a stack whose first layer has this number. A layer that may be a tap writes its output to
    the tap's slot, or to the last one, which is for no tap: so no output of another layer stays, and there is no
    branch. Keys and values that later layers see go to `shared`. They are those of the last layer of its kind, and so
    of the last turn."""
    taps = [i for i in dict.fromkeys(aux_layers) if first <= i < first + stack.num_layers]
    period, slots = len(stack.layers), np.full(stack.num_layers, len(taps), np.int32)
    slots[[i - first for i in taps]] = np.arange(len(taps))
    tapped = {(i - first) % period for i in taps}
    rates = [np.float32(config.kind(first + i).slope_scale) for i in range(stack.num_layers)]
    starts = range(first, first + stack.num_layers, period)  # of the turns
    kept = {i - starts[-1]: i for i in config.shared_layers if starts[-1] <= i < starts[-1] + period}

    def turn(carry: tuple[Any, ...], own: tuple[Any, ...]) -> tuple[Any, None]:
        x, found, left, choice = carry
        own_context = with_choice(context, choice)
        for place, (layer, slot, rate, given) in enumerate(zip(*own, strict=True)):
            kind: Any = dataclasses.replace(config.kind(first + place), slope_scale=rate)
            given = given, shared.get(kind.kv_from)
            x, own_left, chosen = run_layer(layer, config, kind, x, None, own_context, *given)
            own_context, choice = with_choice(own_context, chosen), choice if chosen is None else chosen
            if place in kept:
                left = left | {place: own_left}
            if place in tapped:
                found = jax.lax.dynamic_update_index_in_dim(found, merged(config, x), slot, 0)
        return (x, found, left, choice), None

    def no_keys(place: int) -> KV:
        own = config.of(config.kind(first + place))
        zeros = jnp.zeros((*x.shape[:2], own.num_kv_heads, own.head_dim), x.dtype)
        return zeros, zeros

    choice = context.choice
    if choice is None and config.latent and latent.chooses(config.latent, x.shape[1], None):
        choice = jnp.zeros((*x.shape[:2], x.shape[1]), bool)
    found = jnp.zeros((len(taps) + 1 if taps else 0, *x.shape[:2], config.d_model), x.dtype)
    begin = x, found, {place: no_keys(place) for place in kept}, choice
    by_turn = jax.tree.map(lambda *turns: jnp.stack(turns), *(inputs[at : at + period] for at in starts))
    of_turns = (stack.layers, slots.reshape(-1, period), np.reshape(rates, (-1, period)), by_turn)
    (x, found, left, choice), _ = jax.lax.scan(turn, begin, of_turns)
    shared |= {kept[place]: own for place, own in left.items()}
    return x, {i: found[slot] for slot, i in enumerate(taps)}, with_choice(context, choice)


def embed(table: jax.Array, config: ModelConfig, token_ids: jax.Array) -> jax.Array:  # [vocab, d_model], [...]
    """The embeddings of tokens as the first layer takes them, [..., d_model]. The table may have fewer bits than the
    model computes in (`models.served`)."""
    x = gather.embed(table, token_ids, jnp.dtype(config.dtype))
    return x if config.embedding_scale == 1.0 else x * jnp.asarray(config.embedding_scale, x.dtype)


def make_context(
    config: ModelConfig, position_ids: jax.Array, mask: Mask, earlier: Any = None, token_ids: jax.Array | None = None
) -> Context:
    """Make what every layer gets besides its input, for tokens at these positions, [batch, m], of which the first have
    run before where they left `earlier` (see `Context`)."""
    own = position_ids[:, jax.tree.leaves(earlier)[0].shape[1] :] if earlier is not None else position_ids
    return Context(
        position_ids=position_ids,
        mask=mask,
        rope=rope_tables(config.rope, config.head_dim, own),
        local_rope=rope_tables(config.local_rope, config.head_dim, own) if config.local_rope else None,
        earlier=earlier,
        token_ids=token_ids if config.hashed or any(kind.is_hashed for kind in config.layers) else None,
    )


def run_layer(
    params: Layer,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,  # [batch, n, d_model], or of all streams
    seen: Any,
    context: Context,
    given: jax.Array | None = None,  # [batch, n, layer_input_dim], of `layer_inputs`
    shared: Any = None,  # the new keys and values of the layer that `kind.kv_from` names
) -> tuple[jax.Array, Any, Any]:
    """Compute one layer's output; what its tokens would leave in the cache; and what its indexer chose, or None."""
    config = config.of(kind)
    if config.streams is not None:
        return _run_in_streams(params, config, kind, x, seen, context)

    def scaled(x: jax.Array) -> jax.Array:
        return x if config.residual_scale == 1.0 else x * jnp.asarray(config.residual_scale, x.dtype)

    # where nothing comes between, the last product of a block adds to the residual stream itself
    adds_itself = not config.out_norms and config.residual_scale == 1.0
    add = x if adds_itself else None
    taken, left, choice = normed(config, x, params.attention_norm), None, None
    if params.attention is not None:
        out, left, choice = _mix(params.attention, config, kind, taken, seen, context, add, shared)
        x = out if add is not None else x + scaled(normed(config, out, params.attention_out_norm))
    if not config.is_parallel:
        taken = normed(config, x, params.mlp_norm)
    block = params.mlp
    if block is not None:
        add = x if adds_itself and not isinstance(block, Moe) else None
        out = _mlp(block, config, taken, context, add)
        x = out if add is not None else x + scaled(normed(config, out, params.mlp_out_norm))
    if params.own_input is not None:
        assert given is not None
        x = with_input(params.own_input, config, x, given)
    return x if params.scale is None else x * params.scale.astype(x.dtype), left, choice


def _run_in_streams(
    params: Layer, config: ModelConfig, kind: LayerKind, x: jax.Array, seen: Any, context: Context
) -> tuple[jax.Array, Any, Any]:  # the streams [batch, n, stream, d_model], and as `run_layer`
    assert params.attention is not None
    assert params.mlp is not None
    new: tuple[jax.Array, ...] = ()
    if params.hashed is not None:
        x, seen, new = _with_hashed(params.hashed, config, kind, x, seen, context)
        kind = dataclasses.replace(kind, hashed=None)
    taken, behind = entered(params.attention_streams, config, x, params.attention_norm)
    out, left, choice = _mix(params.attention, config, kind, taken, seen, context, None, None)
    if new:
        left = dataclasses.replace(left, conv=(*left.conv, *new))
    taken, after = entered(params.mlp_streams, config, behind(out), params.mlp_norm)
    return after(_mlp(params.mlp, config, taken, context)), left, choice


def _with_hashed(
    params: HashedLayer, config: ModelConfig, kind: LayerKind, x: jax.Array, seen: Any, context: Context
) -> tuple[jax.Array, Any, tuple[jax.Array, ...]]:
    """Return the streams with the embeddings of the last tokens, the state that the mixer takes, and what its own state
    gets beside."""
    assert kind.hashed is not None
    assert context.token_ids is not None
    assert not isinstance(context.mask, Unrolled), "a rollout is of layers that attend"
    *convolved, inputs, numbers = (recurrent.init_state(config, kind, len(x)) if seen is None else seen).conv
    flat, given = x.reshape(*x.shape[:-2], -1), (context.token_ids, (inputs, numbers), context.mask)
    flat, new = add_hashed(params, config, kind.hashed, flat, *given)
    return flat.reshape(x.shape), None if seen is None else recurrent.State(seen.matrix, tuple(convolved)), new


def _mlp(
    block: Mlp | Moe, config: ModelConfig, x: jax.Array, context: Context, add: jax.Array | None = None
) -> jax.Array:
    if isinstance(block, Moe):
        return moe(block, config, x, token_ids=context.token_ids)
    return mlp(block, x, config.activation, add=add)


def _mix(
    params: Mixer,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,
    seen: Any,
    context: Context,
    add: jax.Array | None,
    shared: Any,
) -> tuple[jax.Array, Any, Any]:
    if isinstance(params, Attention):
        return *attention.mix(params, config.of(kind), kind, x, seen, context, add, shared), None
    if isinstance(params, LatentAttention):
        return latent.mix(params, config, kind, x, seen, context, add)
    if isinstance(params, CompressedAttention):
        assert add is None, "streams add"
        return *compressed.mix(params, config, kind, x, seen, context), None
    out, left = recurrent.mix(params, config, kind, x, seen, context)
    return out if add is None else add + out, left, None


def logits(params: TargetParams, config: ModelConfig, hidden_states: jax.Array) -> jax.Array:
    """Compute the next-token logits of normed hidden states: [..., d_model] -> [..., vocab] float32."""
    return _scaled(config, head_logits(params, hidden_states))


def logits_of(params: TargetParams, config: ModelConfig, hidden_states: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Compute the logits of some tokens by a product of their own: [..., d_model] -> [..., len(token_ids)] float32."""
    return _scaled(config, matmul_float32(hidden_states, head_columns(params, token_ids)))


def _scaled(config: ModelConfig, logits: jax.Array) -> jax.Array:
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    return capped(config, logits)


def capped(config: ModelConfig, logits: jax.Array) -> jax.Array:  # [..., vocab]
    """Return the logits within the config's cap, if it has one."""
    return config.logit_softcap * jnp.tanh(logits / config.logit_softcap) if config.logit_softcap else logits


def head_logits(params: TargetParams, hidden_states: jax.Array) -> jax.Array:  # [..., vocab] float32
    """Multiply normed hidden states [..., d_model] by the output head, which may be the embedding."""
    if params.head is None:
        return jnp.einsum("...d,vd->...v", hidden_states, params.embedding, preferred_element_type=jnp.float32)
    return matmul_float32(hidden_states, params.head)


def head_columns(params: TargetParams, token_ids: jax.Array) -> jax.Array:  # [d_model, len(token_ids)]
    """The columns of the output head for some tokens, with which a draft's head begins training."""
    head = params.head
    if head is None:
        return params.embedding[token_ids].T
    assert not isinstance(head, AdaptedMatrix | BlockedMatrix | PackedMatrix), "such parameters are for serving"
    return dequantize(head[:, token_ids], params.embedding.dtype)


def whole_norm(params: TargetParams, config: ModelConfig) -> jax.Array:  # [d_model]
    """The final norm with which a draft's own begins training: such that the target's output head makes the target's
    logits of it, with no offset or scale beside it."""
    if isinstance(params.streams, StreamMixer):  # the head takes a mixture, which no norm makes
        return jnp.ones(config.d_model, params.norm.dtype)
    norm = params.norm + (1.0 if config.norm_offset else 0.0)
    return jnp.array(norm) if config.logit_scale == 1.0 else norm * config.logit_scale


def with_own_head(params: TargetParams) -> TargetParams:
    """The same target with an output head that is a matrix of its own, also where it is tied: XLA's CPU backend would
    transpose the embedding at every call, and only a matrix may have few bits."""
    if params.head is not None:
        return params
    return dataclasses.replace(params, head=jax.device_put(np.asarray(params.embedding).T))
