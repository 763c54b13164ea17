"""The DFlash head (arXiv 2602.06036): parameters and forward.

A committed token leaves keys and values in every layer, made of the target's hidden states at its position and of
nothing else: no layer runs for it. A block is the root, which is its anchor, and masked slots after it. Its layers see
the committed tokens before the anchor and the block itself, and slot k predicts which token stands k places after the
anchor. The caller decides what attends to what, so that training and serving share these functions.

DFlash2 has short causal convolutions around the sublayers of a block. A slot's input to attention and to the MLP, and
what these make of it, is mixed with that of the slots just before it in its block. The kernel is a fixed one for each
channel plus one that the slot's normed state gives for each group of channels. At the start of a block there is nothing
before: zeros.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.joint import (
    Domino,
    Heads,
    JointOutput,
    Markov,
    Selector,
    corrected,
    domino_spec,
    joint_loss,
    markov_spec,
    selector_spec,
)
from specserve.kernels.gather import embed
from specserve.kernels.matmul import Weight, matmul_float32
from specserve.kernels.rowwise import rms_norm
from specserve.models.layers import Mlp, linear, mlp, normed
from specserve.models.mixers.attention import KV, Attention, project_kv, project_qkv
from specserve.models.params import ParamSpec, embedding_table, matrix, optional, vector
from specserve.models.rope import rope_tables
from specserve.models.target import Layer, TargetParams, capped, head_logits, layer_spec
from specserve.pytree import pytree


@pytree
class Conv:
    base: jax.Array  # [2, taps, d_model]: of what goes into the sublayer, and of what comes out
    kernel: Weight  # [d_model, 2 * taps * groups], to what a slot adds to both


@pytree
class Convs:
    """The convolutions of one layer."""

    attention: Conv
    mlp: Conv


def conv_spec(config: DFlashConfig, layer: int) -> Convs:
    """The parameters of a layer's convolutions as `ParamSpec`s."""
    width, taps = config.backbone.d_model, config.conv_taps

    def spec(name: str) -> Conv:
        prefix = f"layers.{layer}.{name}_conv"
        # untyped as every leaf of a spec tree is
        base: jax.Array = ParamSpec((2, taps, width), (None, None, "embed"), f"{prefix}.base_kernel")  # pyright: ignore
        outputs = 2 * taps * (width // config.conv_group)
        return Conv(base, matrix(f"{prefix}.kernel_projection.weight", width, outputs, ("embed", None)))

    return Convs(spec("attention"), spec("mlp"))


def kernels(conv: Conv, config: DFlashConfig, normed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute from the slots' normed states [batch, n, d_model] the kernels for what goes into a sublayer and for what
    comes out, each [batch, n, taps, d_model]."""
    batch, n, width = normed.shape
    groups = width // config.conv_group
    own = linear(normed, conv.kernel).reshape(batch, n, 2, config.conv_taps, groups)
    both = conv.base.astype(own.dtype) + jnp.repeat(own, config.conv_group, axis=-1)
    return both[:, :, 0], both[:, :, 1]


def convolve(
    config: DFlashConfig,
    x: jax.Array,  # [batch, n, d_model], blocks one after the other
    kernel: jax.Array,  # [batch, n, taps, d_model]
) -> jax.Array:
    """Sum the slots up to `taps - 1` places before each, within its block."""
    place = jnp.arange(x.shape[1]) % config.block_size
    out = x * kernel[:, :, 0]
    for tap in range(1, config.conv_taps):
        before = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]]
        out += jnp.where((place >= tap)[:, None], before, 0) * kernel[:, :, tap]
    return out


@pytree
class DFlashParams:
    embedding: jax.Array | None  # [vocab, d_model]; None: the target's is shared
    fc: Weight  # [taps * d_model, d_model]
    hidden_norm: jax.Array  # [d_model], on the fused hidden states
    layers: tuple[Layer, ...]
    norm: jax.Array  # [d_model]
    head: Weight | None  # [d_model, draft_vocab]; None: the target's is shared
    convs: tuple[Convs, ...] = ()  # of each layer
    markov: Markov | None = None
    selector: Selector | None = None
    domino: Domino | None = None

    @property
    def heads(self) -> Heads | None:
        """The heads that make slots depend on each other, of which there is one kind at most."""
        return self.markov or self.selector or self.domino

    @property
    def output(self) -> tuple[jax.Array, Weight | None]:
        """The parameters that make logits of states, see `block_logits`."""
        return self.norm, self.head

    @property
    def learned_output(self) -> "Output":
        """The parameters that make logits of the states that training has, see `output_logits`."""
        return *self.output, JointOutput.of(self.heads)


def head_spec(config: DFlashConfig) -> DFlashParams:
    """The parameters of a head as `ParamSpec`s with their published names."""
    backbone = config.backbone
    embedding = embedding_table("embed_tokens.weight", backbone.vocab_size, backbone.d_model)
    head = matrix("lm_head.weight", backbone.d_model, config.draft_vocab_size, ("embed", "vocab"))
    return DFlashParams(
        embedding=optional(config.has_embedding, embedding),
        fc=matrix("fc.weight", len(config.aux_layers) * backbone.d_model, backbone.d_model, (None, "embed")),
        hidden_norm=vector("hidden_norm.weight", backbone.d_model),
        layers=tuple(layer_spec(backbone, i) for i in range(backbone.num_layers)),
        norm=vector("norm.weight", backbone.d_model),
        head=optional(config.has_head, head),
        convs=tuple(conv_spec(config, i) for i in range(backbone.num_layers)) if config.conv_taps else (),
        markov=optional(config.markov_rank, markov_spec(config)),
        selector=optional(config.selector_rank, selector_spec(config)),
        domino=optional(config.gru_width, domino_spec(config)),
    )


def context_kv(
    params: DFlashParams,
    config: DFlashConfig,
    aux_hidden_states: jax.Array,  # [batch, n, taps * d_model]
    position_ids: jax.Array,  # [batch, n] int32
) -> tuple[KV, ...]:  # layer by layer, each [batch, n, kv_head, head_dim]
    """Compute the keys and values of tokens whose hidden states are known."""
    backbone = config.backbone
    context = rms_norm(linear(aux_hidden_states, params.fc), params.hidden_norm, backbone.norm_eps)
    rope = rope_tables(backbone.rope, backbone.head_dim, position_ids)
    return tuple(project_kv(_attention(layer), backbone, context, rope) for layer in params.layers)


def token_table(params: DFlashParams, target: TargetParams) -> jax.Array:  # [vocab, d_model]
    return target.embedding if params.embedding is None else params.embedding


def block_inputs(
    params: DFlashParams,
    config: DFlashConfig,
    target: TargetParams,
    anchors: jax.Array,  # [..., 1] int32, the tokens that the blocks begin with
    length: int,  # slots, the anchor's among them
) -> jax.Array:  # [..., length, d_model]
    """Return the anchor's embedding, and that of the mask in all further slots."""
    table = token_table(params, target)
    masks = jnp.full((*anchors.shape[:-1], length - 1), config.mask_token_id, anchors.dtype)
    rows = embed(table, jnp.concatenate([anchors, masks], axis=-1), jnp.dtype(config.backbone.dtype))
    return rows * jnp.asarray(config.embedding_scale, rows.dtype)


# (layer, q [batch, n, head, head_dim], and the slots' own k and v [batch, n, kv_head, head_dim]) -> like q
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


def block_states(
    params: DFlashParams,
    config: DFlashConfig,
    x: jax.Array,  # [batch, n, d_model], from `block_inputs`
    position_ids: jax.Array,  # [batch, n] int32
    attend: Attend,
) -> jax.Array:  # [batch, n, d_model], before the final norm
    """Run the layers over blocks."""
    backbone = config.backbone
    rope = rope_tables(backbone.rope, backbone.head_dim, position_ids)

    def attended(i: int, taken: jax.Array, add: jax.Array | None = None) -> jax.Array:
        attention = _attention(params.layers[i])
        out = attend(i, *project_qkv(attention, backbone, taken, rope))
        return linear(out.reshape(*taken.shape[:2], -1), attention.o, attention.o_bias, add=add)

    for i, layer in enumerate(params.layers):
        assert isinstance(layer.mlp, Mlp), "a head has no experts"
        assert layer.attention_norm is not None
        assert layer.mlp_norm is not None
        taken = rms_norm(x, layer.attention_norm, backbone.norm_eps)
        if params.convs:
            x = _convolved_layer(params.convs[i], config, layer, x, taken, lambda y, i=i: attended(i, y))
            continue
        if not backbone.out_norms:
            x = attended(i, taken, add=x)
            x = mlp(layer.mlp, rms_norm(x, layer.mlp_norm, backbone.norm_eps), backbone.activation, add=x)
            continue
        x += normed(backbone, attended(i, taken), layer.attention_out_norm)
        found = mlp(layer.mlp, rms_norm(x, layer.mlp_norm, backbone.norm_eps), backbone.activation)
        x += normed(backbone, found, layer.mlp_out_norm)
        if layer.scale is not None:
            x *= layer.scale.astype(x.dtype)
    return x


def _convolved_layer(
    convs: Convs, config: DFlashConfig, layer: Layer, x: jax.Array, normed: jax.Array, attended: Any
) -> jax.Array:
    """Run a layer whose sublayers' inputs and outputs are convolved."""
    backbone = config.backbone
    assert isinstance(layer.mlp, Mlp), "a head has no experts"
    before, after = kernels(convs.attention, config, normed)
    x += convolve(config, attended(convolve(config, normed, before)), after)
    assert layer.mlp_norm is not None
    normed = rms_norm(x, layer.mlp_norm, backbone.norm_eps)
    before, after = kernels(convs.mlp, config, normed)
    return x + convolve(config, mlp(layer.mlp, convolve(config, normed, before), backbone.activation), after)


def block_logits(
    output: tuple[jax.Array, Weight | None],  # final norm and head
    config: DFlashConfig,
    target: TargetParams,
    states: jax.Array,  # [..., d_model], what `block_states` returned
) -> jax.Array:  # [..., draft_vocab] float32
    norm, head = output
    states = rms_norm(states, norm, config.backbone.norm_eps)
    out = head_logits(target, states) if head is None else matmul_float32(states, head)
    return capped(config.backbone, out * config.output_scale)


Output = tuple[jax.Array, Weight | None, JointOutput]


def output_logits(
    output: Output,
    config: DFlashConfig,
    target: TargetParams,
    states: jax.Array,  # [..., d_model], and beside joint heads more (`joint.with_features`)
) -> jax.Array:  # [..., draft_vocab] float32
    norm, head, joint = output
    width = config.backbone.d_model
    logits = block_logits((norm, head), config, target, states[..., :width])
    if joint.bias is None:
        return logits
    normed, more = rms_norm(states[..., :width], norm, config.backbone.norm_eps), states[..., width:]
    if joint.down is None:
        return corrected(joint.bias, None, logits, more[..., -config.markov_rank :], normed)
    is_corrected = more[..., -1:] > 0
    return jnp.where(is_corrected, corrected(joint.bias, joint.down, logits, more[..., :-1], normed), logits)


def joint_auxiliary(
    output: Output, config: DFlashConfig, states: jax.Array, logits: jax.Array, p: jax.Array
) -> jax.Array | None:
    """Return the loss of joint heads (`joint.joint_loss`), or None where none of them learns that way."""
    norm, _, joint = output
    if joint.confidence is None and joint.successor is None:
        return None
    width = config.backbone.d_model
    normed = rms_norm(states[..., :width], norm, config.backbone.norm_eps)
    given = states[..., width : width + (config.markov_rank or config.selector_rank)]
    return joint_loss(joint, config, normed, given, logits, p)


def _attention(layer: Layer) -> Attention:
    assert isinstance(layer.attention, Attention), "a head's layers attend"
    return layer.attention
