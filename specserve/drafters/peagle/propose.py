"""The head's side of a step: one pass that consumes the accepted tokens and predicts the tokens of all slots after
them."""

import dataclasses

import jax
import jax.numpy as jnp

from specserve.drafters.eagle.entries import ReadyHead
from specserve.drafters.eagle.model import draft_entries, draft_logits, draft_states, fuse_features
from specserve.drafters.follow import FIRST_ENTRY, Following, pending_of, places
from specserve.drafters.grow import Marginals, grow_tree
from specserve.drafters.peagle.config import PEagleConfig
from specserve.drafters.peagle.model import PEagleParams, inputs_with_masks
from specserve.kernels.attention import attend
from specserve.kernels.gather import take_each
from specserve.models.cache import Cache, Prefix
from specserve.speculative.drafter import SlotView
from specserve.speculative.tree import Proposal, Tree


def propose_tree(
    draft: ReadyHead, params: PEagleParams, config: PEagleConfig, state: Following, view: SlotView, tree: Tree
) -> tuple[Following, Proposal]:
    """Consume the pending tokens and look ahead in the same pass, then grow a tree of the tokens that the slots
    predict."""
    cache, states = look_ahead(draft, params, config, state, view, tree.depth)
    logits = draft_logits(params.output, config.network, states)
    slots = Marginals(view.rows, draft.vocab, view.seq_lens, logits)
    return dataclasses.replace(state, cache=cache), grow_tree(slots, tree, view.root_ids, view.root_ids[:, None])


def look_ahead(
    draft: ReadyHead, params: PEagleParams, config: PEagleConfig, state: Following, view: SlotView, depth: int
) -> tuple[Cache, jax.Array]:  # and the states of the root and of depth - 1 masked slots [batch, depth, d_model]
    """Write the entries of the pending tokens, and compute the states of the masked slots, whose own entries are used
    in this call alone."""
    network, pages = config.network, state.cache
    pending = pending_of(state, view, depth)
    index, is_valid = places(view.seq_lens, pending)
    known, masked = index.shape[1], jnp.arange(depth - 1, dtype=index.dtype)
    position_ids = jnp.concatenate([index, view.seq_lens[:, None] + 1 + masked], axis=1)
    features = fuse_features(params.network, network, pending.aux_hidden_states)
    inputs = inputs_with_masks(params, config, draft.embedding, pending.token_ids, features, position_ids)

    # pending rows are padded behind their last token, and masked slots stand behind the padding
    is_entry = is_valid & (index >= FIRST_ENTRY)
    is_key = jnp.pad(is_entry, ((0, 0), (0, depth - 1)), constant_values=True)
    offset = jnp.arange(known + depth - 1)
    mask = (offset[:, None] >= offset) & is_key[:, None]
    before = Prefix(view.read_table, index[:, 0], FIRST_ENTRY)
    top, entries = draft_entries(
        params.network, network, inputs, lambda i, q, k, v: attend(q, k, v, mask, pages.attended(i, before))
    )
    # the last layer runs for those that predict: the root, which is the last pending token, and the masked slots
    root = jnp.maximum(pending.count - 1, 0)[:, None]
    ahead = jnp.concatenate([root, jnp.broadcast_to(known + masked, (len(root), depth - 1))], axis=1)
    top, sees = jax.tree.map(lambda x: take_each(x, ahead), (top, mask))
    last = network.num_layers - 1
    states = draft_states(
        params.network, network, top, lambda q: attend(q, *entries[last], sees, pages.attended(last, before))
    )
    # always true, but known only once all layers have read the pages: see `speculative.step._has_run`
    is_kept = is_entry & jnp.isfinite(states[:, :1, 0])
    kept = tuple((k[:, :known], v[:, :known]) for k, v in entries)
    return pages.write(kept, view.page_table, index, is_kept), states
