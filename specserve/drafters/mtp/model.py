"""The layer of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): parameters and forward.

Entry t of a sequence consumes the hidden state that the target has for token t-1, after its final norm, and token t.
Where the layer has the target's residual streams (DeepSeek-V4, Qwen3.8-Flash-Next), that state is all of the streams
as they are, and so is the one that it hands on.
The layer itself is an ordinary decoder layer of the target's own kind, latents and experts included. Its output
predicts the token at t+1 and, normed, stands in for the target's hidden state when the draft runs ahead. So do Qwen3-
Next and MiMo; of DeepSeek's layer SGLang hands the normed state on and vLLM the other, which differ by a factor for
each channel. The caller decides what attends to what, so that training and serving share these functions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specserve.drafters.mtp.config import MtpConfig
from specserve.kernels.matmul import Weight
from specserve.kernels.paged import PagedPrefix
from specserve.models import target as target_model
from specserve.models.context import Mask
from specserve.models.layers import linear, norm_spec, normed
from specserve.models.mixers.channel_streams import StreamMixer
from specserve.models.mixers.streams import StreamMix, last, last_streams_spec
from specserve.models.params import embedding_table, matrix, optional
from specserve.models.target import Layer, TargetParams, layer_spec, make_context, run_layer
from specserve.pytree import pytree


@pytree
class MtpParams:
    embedding: jax.Array | None  # [vocab, d_model]; None: the target's is shared
    token_norm: jax.Array  # [d_model]
    hidden_norm: jax.Array  # [d_model]
    fc: Weight  # [2 * d_model, d_model], or [d_model, d_model] beside `token_fc`
    token_fc: Weight | None  # [d_model, d_model]
    layer: Layer
    norm: jax.Array  # [d_model], or as the mixture takes it
    mixture: StreamMix | StreamMixer | None  # of several streams
    head: Weight | None  # [d_model, draft_vocab]; None: the target's is shared

    @property
    def output(self) -> tuple[Any, ...]:
        """The parameters that make logits of states, see `draft_logits`."""
        return self.norm, self.mixture, self.head


def draft_spec(config: MtpConfig) -> MtpParams:
    """The parameters as `ParamSpec`s with the names that the target's own checkpoint has for them. It has none for the
    output rows of a part of the tokens, which are called as in an EAGLE-3 head."""
    layer, layout = config.layer, config.layout
    size, vocab = layer.d_model, layer.vocab_size
    output = "lm_head.weight" if config.is_partial else f"{layout.head}.weight"

    def norm(name: str, size: int = size) -> Any:
        return norm_spec(name, size, offset=layer.norm_offset, is_float32=layer.has_float32_norms)

    by_channel = layer.streams is not None and layer.streams.is_by_channel
    of_all = config.state_size if by_channel else size
    token_fc = matrix(f"{layout.token_fc}.weight", size, size, (None, "embed"))
    return MtpParams(
        embedding=optional(config.has_embedding, embedding_table(f"{layout.embedding}.weight", vocab, size)),
        token_norm=norm(layout.token_norm),
        hidden_norm=norm(layout.hidden_norm, of_all),
        fc=matrix(f"{layout.fc}.weight", size if layout.token_fc else 2 * size, size, (None, "embed")),
        token_fc=optional(layout.token_fc, token_fc),
        layer=layer_spec(layer, 0),
        norm=norm(layout.norm, of_all),
        mixture=last_streams_spec(layer, layout.mixture),
        head=optional(config.has_head, matrix(output, size, config.draft_vocab_size, ("embed", "vocab"))),
    )


def taken(config: MtpConfig, target: TargetParams, aux_hidden_states: jax.Array) -> jax.Array:
    """Return the hidden states that entries consume: those that the target's output head takes, from the outputs
    [batch, n, d_model] of its last layer, which are tapped; or the streams behind it, [batch, n, state_size]."""
    if config.layout.takes_raw or config.layer.streams is not None:
        return aux_hidden_states
    return _norm(config, aux_hidden_states, target.norm)


def inputs(
    params: MtpParams,
    config: MtpConfig,
    target: TargetParams,
    token_ids: jax.Array,  # [batch, n] int32
    hidden_states: jax.Array,  # [batch, n, state_size], of the tokens before: from `taken`, or handed on
) -> jax.Array:  # [batch, n, state_size], what the layer takes
    table = target.embedding if params.embedding is None else params.embedding
    token = _norm(config, target_model.embed(table, config.layer, token_ids), params.token_norm)
    if params.token_fc is not None:
        # the norm is of one stream, or of all together
        by_norm = hidden_states.reshape(*hidden_states.shape[:2], -1, params.hidden_norm.shape[0])
        hidden = _norm(config, by_norm, params.hidden_norm).reshape(*by_norm.shape[:2], -1, token.shape[-1])
        both = linear(token, params.token_fc)[:, :, None] + linear(hidden, params.fc)
        return both.reshape(hidden_states.shape)
    hidden = _norm(config, hidden_states, params.hidden_norm)
    both = (hidden, token) if config.layout.hidden_first else (token, hidden)
    return linear(jnp.concatenate(both, axis=-1), params.fc)


def run(
    params: MtpParams,
    config: MtpConfig,
    x: jax.Array,  # [batch, n, state_size], from `inputs`
    position_ids: jax.Array,  # [batch, m] int32
    mask: Mask,
    seen: PagedPrefix | None = None,
    earlier: Any = None,  # the results of the first m - n new entries when they ran, see `Context`
) -> tuple[jax.Array, Any]:  # the states [batch, n, state_size] that make logits; what the entries leave in the cache
    """Run the layer. Where the states are not used, XLA does not compute them."""
    context, shape = make_context(config.layer, position_ids, mask, earlier), x.shape
    x, left, _ = run_layer(params.layer, config.layer, config.layer.kind(0), _apart(config, x), seen, context)
    return x.reshape(shape), left


def handed_on(params: MtpParams, config: MtpConfig, states: jax.Array) -> jax.Array:
    """Return the hidden states that the next entries consume in place of the target's."""
    return states if params.mixture is not None else _norm(config, states, params.norm)


def draft_logits(
    output: tuple[Any, ...],  # `MtpParams.output`
    config: MtpConfig,
    target: TargetParams,
    states: jax.Array,  # [..., state_size], from `run`
) -> jax.Array:  # [..., draft_vocab] float32
    norm, mixture, head = output
    if head is not None:
        target = dataclasses.replace(target, head=head)
    return target_model.logits(target, config.layer, last(mixture, config.layer, _apart(config, states), norm))


def _apart(config: MtpConfig, x: jax.Array) -> jax.Array:  # [..., state_size] -> [..., stream, d_model]
    """Return states by stream. Those of a layer without streams stay as they are."""
    return x if config.layer.streams is None else x.reshape(*x.shape[:-1], -1, config.layer.d_model)


def _norm(config: MtpConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    return normed(config.layer, x, weight)
