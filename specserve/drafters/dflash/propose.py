"""The head's side of a step: one pass over a block below the root, and a tree of the tokens that its slots predict."""

import dataclasses

import jax
import jax.numpy as jnp

from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.joint import JointSlots
from specserve.drafters.dflash.model import block_inputs, block_logits, block_states
from specserve.drafters.grow import Marginals, grow_tree
from specserve.kernels.attention import attend
from specserve.kernels.rowwise import rms_norm
from specserve.models.cache import Cache, Prefix
from specserve.models.target import TargetParams
from specserve.speculative.drafter import DraftWeights, SlotView
from specserve.speculative.tree import Proposal, Tree


def propose_tree(
    draft: DraftWeights, target: TargetParams, config: DFlashConfig, pages: Cache, view: SlotView, tree: Tree
) -> Proposal:
    """Grow a tree below each root. Nothing is written: the keys and values of a block are used in this call alone."""
    states = run_block(draft, target, config, pages, view, tree.depth)
    logits = block_logits(draft.params.output, config, target, states)
    heads = draft.params.markov or draft.params.selector
    roots = view.root_ids[:, None]
    if heads is None:
        return grow_tree(Marginals(view.rows, draft.vocab, view.seq_lens, logits), tree, view.root_ids, roots)
    normed = rms_norm(states, draft.params.norm, config.backbone.norm_eps)
    slots = JointSlots(heads, config, view.rows, draft.vocab, view.seq_lens, logits, normed)
    proposal = grow_tree(slots, tree, view.root_ids, roots)
    return dataclasses.replace(proposal, confidence=slots.confidence)


def run_block(
    draft: DraftWeights, target: TargetParams, config: DFlashConfig, pages: Cache, view: SlotView, depth: int
) -> jax.Array:  # [batch, depth, d_model]
    """Compute the states of the slots that predict the first `depth` tokens after the root. Slots that see the whole
    block need all of it to be there, as in training."""
    length = depth + config.first_slot if all(config.is_causal) else config.block_size
    offset = jnp.arange(length, dtype=jnp.int32)
    position_ids = view.seq_lens[:, None] + offset
    prefix = Prefix(view.read_table, view.seq_lens)
    backbone = config.backbone

    def see_block(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = offset[:, None] >= offset if config.is_causal[i] else jnp.ones((length, length), bool)
        attention = draft.params.layers[i].attention
        return attend(
            q,
            k,
            v,
            mask[None],
            pages.attended(i, prefix),
            sinks=attention.sinks,
            window=backbone.kind(i).window,
            position_ids=position_ids,
        )

    x = block_inputs(draft.params, config, target, view.root_ids[:, None], length)
    return block_states(draft.params, config, x, position_ids, see_block)[
        :, config.first_slot : config.first_slot + depth
    ]
