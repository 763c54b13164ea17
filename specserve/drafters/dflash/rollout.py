"""The training of a DFlash head, and its costs: blocks at anchors of a packed row, all in one pass.

Serving fills a block below the root of a step, over the committed tokens before it. Training does the same at many
places of a row at once. Such a place is an anchor. Its context is the row's entries before it in its document, and the
block's slots predict the tokens after it, which the row has. Anchors are drawn anew at every step, uniformly over the
places of a row that are followed by a token which bears loss.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.drafters.dflash import joint
from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.model import DFlashParams, block_inputs, block_states, context_kv, token_table
from specserve.drafters.learning import (
    Costs,
    DraftTargets,
    Flops,
    Rollout,
    Rows,
    kept_by_layer,
    shift,
    workspace_of_layer,
)
from specserve.kernels import rows as row_kernels
from specserve.kernels.anchors import Anchors, attend_anchors
from specserve.kernels.rows import Documents, part_length
from specserve.kernels.rowwise import rms_norm
from specserve.mesh import on_each_device, traced_mesh
from specserve.models.mixers.attention import KV, Attention
from specserve.models.params import is_matrix, num_params, specs
from specserve.models.target import TargetParams
from specserve.pytree import pytree

SLOTS_AT_ONCE = 1 << 13  # of all anchors and rows that a device has, where blocks are computed again backward


@pytree
class TrainingBlocks:
    """The blocks of a batch of rows."""

    index: jax.Array  # [batch, anchor] int32, of their anchors in the rows
    is_real: jax.Array  # [batch, anchor] bool; a row may have fewer places for anchors than there are to be


def num_anchors(config: DFlashConfig, rollout: Rollout, seq_len: int) -> int:
    """Return the number of anchors in a row. Where the settings do not say, the slots of all blocks are as many as the
    row's tokens, so that the head's logits cost as much as those of one rollout step of another head."""
    return min(rollout.anchors or -(-seq_len // config.num_slots), seq_len)


def choose_blocks(config: DFlashConfig, rows: Rows, rollout: Rollout) -> TrainingBlocks:
    """Draw the anchors of each row by its seed, uniformly and each at most once. The first token of a document cannot
    be an anchor, because serving has at least one committed token."""
    assert rows.seeds is not None, "anchors are drawn at random, and rows have no seeds"
    is_same = (shift(rows.document_ids, 1) == rows.document_ids) & (rows.document_ids > 0)
    is_possible = is_same & shift(rows.loss_mask, 1) & (rows.position_ids > 0)
    number = num_anchors(config, rollout, rows.token_ids.shape[1])

    def of_row(seed: jax.Array, is_possible: jax.Array) -> TrainingBlocks:
        lot = jax.random.uniform(jax.random.key(seed), is_possible.shape)
        drawn, index = jax.lax.top_k(jnp.where(is_possible, lot, -1.0), number)
        return TrainingBlocks(index, drawn >= 0)

    return jax.vmap(of_row)(rows.seeds, is_possible)


def targets_of_blocks(config: DFlashConfig, rows: Rows, rollout: Rollout) -> DraftTargets:
    """Return what the slots of each block predict. Slot k predicts the token k places after the anchor, as the target
    does at the position before that token. The slot learns as long as the tokens up to there bear loss and are of one
    document."""
    blocks = choose_blocks(config, rows, rollout)
    ahead = blocks.index + jnp.arange(1, config.num_slots + 1)[:, None, None]  # [slot, batch, anchor]
    take = jax.vmap(_take, (None, 0))
    is_same = take(rows.document_ids, ahead) == _take(rows.document_ids, blocks.index)
    is_learned = jnp.cumprod(take(rows.loss_mask, ahead) & is_same & blocks.is_real, axis=0)
    return DraftTargets(is_learned.astype(jnp.float32), jnp.minimum(ahead - 1, rows.token_ids.shape[1] - 1))


def states_of_blocks(
    params: DFlashParams,
    config: DFlashConfig,
    target: TargetParams,
    rows: Rows,
    aux_hidden_states: jax.Array,  # [batch, seq, taps * d_model]
    rollout: Rollout,
) -> list[jax.Array]:  # slot x [batch, anchor, d_model]
    """Compute the states of all slots after the anchors, as `drafter.run_block` has them in serving. Beside joint
    heads each state is followed by what these make of the tokens before its slot (`joint.with_features`)."""
    blocks = choose_blocks(config, rows, rollout)
    context = context_kv(params, config, aux_hidden_states, rows.position_ids)
    index = jnp.arange(rows.token_ids.shape[1], dtype=jnp.int32)
    firsts = index + 1 - Documents(rows.document_ids).depths()
    anchors = Anchors(_take(firsts, blocks.index), blocks.index, blocks.index)
    of_anchors = anchors, _take(rows.token_ids, blocks.index), _take(rows.position_ids, blocks.index)
    run = functools.partial(_run_blocks, config, target)
    if rollout.remat:
        states = _in_chunks(run, config, params, context, of_anchors)
    else:
        states = run(params, context, *of_anchors)
    by_slot = [states[:, :, slot] for slot in range(config.num_slots)]
    heads, table = params.heads, joint.of_previous(params.heads, token_table(params, target))
    if heads is None or table is None:
        return by_slot
    # the position that foretells a token is that of the token before; in training it is the row's own
    at = targets_of_blocks(config, rows, rollout).positions
    assert at is not None, "blocks stand at positions"
    given = [table[_take(rows.token_ids, each)].astype(states.dtype) for each in at]
    normed = [rms_norm(state, params.norm, config.backbone.norm_eps) for state in by_slot]
    return joint.with_features(heads, config, by_slot, normed, given)


def _run_blocks(
    config: DFlashConfig,
    target: TargetParams,
    params: DFlashParams,
    context: tuple[KV, ...],  # layer by layer, each [batch, seq, kv_head, head_dim]
    anchors: Anchors,
    token_ids: jax.Array,  # [batch, anchor] int32
    position_ids: jax.Array,  # [batch, anchor] int32
) -> jax.Array:  # [batch, anchor, slot, d_model]
    batch, number = token_ids.shape
    offset = jnp.arange(config.block_size, dtype=jnp.int32)
    x = block_inputs(params, config, target, token_ids[..., None], config.block_size)

    def apart(x: jax.Array) -> jax.Array:
        return x.reshape(batch, number, config.block_size, *x.shape[2:])

    def joined(x: jax.Array) -> jax.Array:
        return x.reshape(batch, number * config.block_size, *x.shape[3:])

    def see_block(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        attention = params.layers[i].attention
        assert isinstance(attention, Attention), "a head's layers attend"
        out = attend_anchors(
            apart(q),
            *context[i],
            anchors,
            apart(k),
            apart(v),
            block_mask(config, i),
            scale=config.backbone.attention_scale or None,
            sinks=attention.sinks,
            window=config.backbone.kind(i).window,
        )
        return joined(out)

    states = block_states(params, config, joined(x), joined(position_ids[..., None] + offset), see_block)
    return apart(states)[:, :, config.first_slot :]


def block_mask(config: DFlashConfig, layer: int) -> np.ndarray:  # [slot, slot] bool
    """Return which slots of its block a slot sees."""
    offset, window = np.arange(config.block_size), config.backbone.kind(layer).window
    distance = offset[:, None] - offset
    is_seen = np.ones_like(distance, bool)
    if config.is_causal[layer]:
        is_seen &= distance >= 0
    if window:
        is_seen &= distance < window
    return is_seen


def _in_chunks(
    run: Any, config: DFlashConfig, params: DFlashParams, context: tuple[KV, ...], of_anchors: Any
) -> jax.Array:  # [batch, anchor, slot, d_model]
    """Run the anchors chunk by chunk, and again in the backward pass, so that the layers' activations of one chunk
    alone are in memory at once."""
    batch, number = of_anchors[1].shape
    rows = on_each_device(traced_mesh(), "batch", batch)
    length = part_length(number, max(1, SLOTS_AT_ONCE // (rows * config.block_size)))

    def cut(x: jax.Array) -> jax.Array:  # [batch, anchor, ...] -> [chunk, batch, length, ...]
        x = jnp.pad(x, ((0, 0), (0, -number % length)))
        return jnp.moveaxis(x.reshape(batch, -1, length), 1, 0)

    again = jax.checkpoint(run)
    states = jax.lax.map(lambda chunk: again(params, context, *chunk), jax.tree.map(cut, of_anchors))
    states = jnp.moveaxis(states, 0, 1)
    return states.reshape(batch, -1, *states.shape[3:])[:, :number]


def _take(x: jax.Array, index: jax.Array) -> jax.Array:  # [batch, seq], [batch, n] -> [batch, n]
    """Take entries of rows; indices past the ends give 0."""
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)


def block_costs(config: DFlashConfig, spec: DFlashParams, rollout: Rollout, seq_len: int, mesh: Mesh | None) -> Costs:
    """Return the costs for each position of a row, by the rules of `train.flops`. `spec` are the parameters that a
    device has."""
    backbone = config.backbone
    again = rollout.num_repeats
    anchors = num_anchors(config, rollout, seq_len) / seq_len
    slots = anchors * config.block_size  # computed for each position of the row
    heads, kv = backbone.num_heads * backbone.head_dim, 2 * backbone.num_kv_heads * backbone.head_dim
    context = 2 * backbone.d_model + 2 * backbone.num_layers * kv  # the fused states; keys and values, their gradients
    of_slot = backbone.num_layers * (kept_by_layer(backbone.d_model, heads, backbone.d_ff) + kv)
    states = 3 * anchors * config.num_slots * backbone.d_model  # of all slots together, their gradients, those stacked
    return Costs(
        _flops(config, spec, rollout, seq_len, slots, mesh),
        kept=round(context + states + (0 if rollout.remat else slots * of_slot)),
        workspace=round(slots * (workspace_of_layer(backbone.d_model, heads, backbone.d_ff) + kv)),
        num_heads=backbone.num_heads,
        num_kv_heads=backbone.num_kv_heads,
        states=anchors,
        kv=backbone.num_layers * kv,
        # of a layer both outputs, both inputs' gradients, and that of the context; and the embedding
        summed=backbone.d_model * (slots * ((4 + again) * backbone.num_layers + 1) + backbone.num_layers),
        shares_output=not config.has_head,
        has_one_teacher=False,
    )


def _flops(
    config: DFlashConfig, spec: DFlashParams, rollout: Rollout, seq_len: int, slots: float, mesh: Mesh | None
) -> Flops:
    backbone, again = config.backbone, rollout.num_repeats
    total = Flops(1, 1) * (4.0 * num_params(spec.fc))  # the features themselves are frozen
    if spec.heads is not None:  # products for each state, beside that of the output head
        products = [leaf for leaf in specs(spec.heads) if is_matrix(leaf)]
        total += Flops(6, 6) * (num_params(products) * slots * config.num_slots / config.block_size)
    width = 2 * on_each_device(mesh, "heads", backbone.num_heads) * backbone.head_dim
    for i, layer in enumerate(spec.layers):
        assert isinstance(layer.attention, Attention), "a head's layers attend"
        total += Flops(1, 1) * (6.0 * num_params([layer.attention.k, layer.attention.v]))  # of the context
        matrices = num_params([leaf for leaf in specs(layer) if is_matrix(leaf)])
        total += Flops(6, 6 + 2 * again) * (matrices * slots)
        # an anchor sees what is before it, by its window; of a chunk of anchors all of the row is computed. A chunk is
        # computed again from queries and keys, and its backward pass has four products
        of_block = block_mask(config, i).mean() * config.block_size
        seen = row_kernels.mean_keys(seq_len, backbone.kind(i).window)[0] - 1 + of_block
        total += Flops(3 * seen, (4 + again) * (seq_len + config.block_size)) * (2 * width * slots)
    return total
