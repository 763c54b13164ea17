"""The layer of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): parameters and forward.

Entry t of a sequence consumes the hidden state that the target has for token t-1, after its final norm, and token t.
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
from specserve.models.params import embedding_table, matrix, optional
from specserve.models.target import Layer, TargetParams, layer_spec, make_context, run_layer
from specserve.pytree import pytree


@pytree
class MtpParams:
    embedding: jax.Array | None  # [vocab, d_model]; None: the target's is shared
    token_norm: jax.Array  # [d_model]
    hidden_norm: jax.Array  # [d_model]
    fc: Weight  # [2 * d_model, d_model]
    layer: Layer
    norm: jax.Array  # [d_model]
    head: Weight | None  # [d_model, draft_vocab]; None: the target's is shared

    @property
    def output(self) -> tuple[Any, ...]:
        """The parameters that make logits of states, see `draft_logits`."""
        if self.head is None:
            return (self.norm,)
        return self.norm, self.head


def draft_spec(config: MtpConfig) -> MtpParams:
    """The parameters as `ParamSpec`s with the names that the target's own checkpoint has for them. It has none for the
    output rows of a part of the tokens, which are called as in an EAGLE-3 head."""
    layer, layout = config.layer, config.layout
    size, vocab = layer.d_model, layer.vocab_size
    output = "lm_head.weight" if config.is_partial else f"{layout.head}.weight"

    def norm(name: str) -> Any:
        return norm_spec(name, size, offset=layer.norm_offset)

    return MtpParams(
        embedding=optional(config.has_embedding, embedding_table(f"{layout.embedding}.weight", vocab, size)),
        token_norm=norm(layout.token_norm),
        hidden_norm=norm(layout.hidden_norm),
        fc=matrix(f"{layout.fc}.weight", 2 * size, size, (None, "embed")),
        layer=layer_spec(layer, 0),
        norm=norm(layout.norm),
        head=optional(config.has_head, matrix(output, size, config.draft_vocab_size, ("embed", "vocab"))),
    )


def taken(config: MtpConfig, target: TargetParams, aux_hidden_states: jax.Array) -> jax.Array:
    """Return the hidden states that entries consume: those that the target's output head takes, from the outputs
    [batch, n, d_model] of its last layer, which are tapped."""
    if config.layout.takes_raw:
        return aux_hidden_states
    return _norm(config, aux_hidden_states, target.norm)


def inputs(
    params: MtpParams,
    config: MtpConfig,
    target: TargetParams,
    token_ids: jax.Array,  # [batch, n] int32
    hidden_states: jax.Array,  # [batch, n, d_model], of the tokens before: from `taken`, or handed on
) -> jax.Array:  # [batch, n, d_model], what the layer takes
    table = target.embedding if params.embedding is None else params.embedding
    token = _norm(config, target_model.embed(table, config.layer, token_ids), params.token_norm)
    hidden = _norm(config, hidden_states, params.hidden_norm)
    both = (hidden, token) if config.layout.hidden_first else (token, hidden)
    return linear(jnp.concatenate(both, axis=-1), params.fc)


def run(
    params: MtpParams,
    config: MtpConfig,
    x: jax.Array,  # [batch, n, d_model], from `inputs`
    position_ids: jax.Array,  # [batch, m] int32
    mask: Mask,
    seen: PagedPrefix | None = None,
    earlier: Any = None,  # the results of the first m - n new entries when they ran, see `Context`
) -> tuple[jax.Array, Any]:  # the states [batch, n, d_model] that make logits, and what the entries leave in the cache
    """Run the layer. Where the states are not used, XLA does not compute them."""
    context = make_context(config.layer, position_ids, mask, earlier)
    x, left, _ = run_layer(params.layer, config.layer, config.layer.kind(0), x, seen, context)
    return x, left


def handed_on(params: MtpParams, config: MtpConfig, states: jax.Array) -> jax.Array:
    """Return the hidden states that the next entries consume in place of the target's."""
    return _norm(config, states, params.norm)


def draft_logits(
    output: tuple[Any, ...],  # `MtpParams.output`
    config: MtpConfig,
    target: TargetParams,
    states: jax.Array,  # [..., d_model], from `run`
) -> jax.Array:  # [..., draft_vocab] float32
    norm, *head = output
    if head:
        target = dataclasses.replace(target, head=head[0])
    return target_model.logits(target, config.layer, _norm(config, states, norm))


def _norm(config: MtpConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    return normed(config.layer, x, weight)
