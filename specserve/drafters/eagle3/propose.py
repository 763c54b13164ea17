"""The head's side of a step: consume what the target accepted, then run ahead and propose a tree.

It knows the head's layers and their pages, and no target forward.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specserve.drafters.eagle.config import Eagle3Config
from specserve.drafters.eagle.entries import ReadyHead, extend
from specserve.drafters.eagle.model import (
    draft_forward,
    draft_inputs,
    draft_logits,
    draft_states,
)
from specserve.drafters.follow import FIRST_ENTRY, Following, Pending, pending_of, places
from specserve.drafters.grow import best_tokens, grow_tree
from specserve.kernels.attention import attend
from specserve.kernels.gather import take_each
from specserve.models.attention import KV
from specserve.models.cache import Cache, Prefix
from specserve.pytree import pytree
from specserve.speculative.drafter import SlotView
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.tree import DynamicTree, Proposal, Tree


def consume(
    draft: ReadyHead,
    config: Eagle3Config,
    pages: Cache,
    page_table: jax.Array,  # [batch, max_pages], for writing
    read_table: jax.Array,  # [batch, pages], the part that attention reads
    seq_lens: jax.Array,  # [batch], the root's position
    pending: Pending,
) -> tuple[Cache, jax.Array]:  # and the recurrent state at the root [batch, 1, d_model]
    """Consume the pending tokens: write their draft entries, and run the last layer for the last of them only."""
    index, is_valid = places(seq_lens, pending)
    # Write first and attend to the written pages: reading the old ones as well would make XLA copy them.
    pages, top, kv = extend(
        draft,
        config,
        pages,
        page_table,
        read_table,
        pending.token_ids,
        pending.aux_hidden_states,
        index,
        is_valid,
    )
    last = jnp.maximum(pending.count - 1, 0)[:, None]
    root, (k, v) = jax.tree.map(lambda x: take_each(x, last), (top, kv))
    seen = pages.attended(config.num_layers - 1, Prefix(read_table, seq_lens, FIRST_ENTRY))
    see_self = jnp.ones((1, 1, 1), bool)
    return pages, draft_states(draft.params, config, root, lambda q: attend(q, k, v, see_self, seen))


def propose_tree(
    draft: ReadyHead, config: Eagle3Config, state: Following, view: SlotView, tree: Tree
) -> tuple[Following, Proposal]:
    """Consume the pending tokens, then run ahead and propose a tree."""
    pending = pending_of(state, view, tree.depth)
    cache, hidden = consume(draft, config, state.cache, view.page_table, view.read_table, view.seq_lens, pending)
    proposal = propose(draft, config, tree, cache, view.read_table, view.seq_lens, view.root_ids, hidden, view.rows)
    return dataclasses.replace(state, cache=cache), proposal


def propose(
    draft: ReadyHead,
    config: Eagle3Config,
    tree: Tree,
    pages: Cache,
    read_table: jax.Array,  # [batch, pages]
    seq_lens: jax.Array,  # [batch], the root's position
    root_ids: jax.Array,  # [batch]
    hidden: jax.Array,  # [batch, 1, d_model], from `consume`
    rows: SamplerRows,
) -> Proposal:
    """Grow a tree below the root. Nothing is written: the draft's entries of proposed nodes are used in this call
    alone."""
    prefix = Prefix(read_table, seq_lens + 1, FIRST_ENTRY)
    return grow_tree(_Expander(draft, config, pages, prefix, rows), tree, root_ids, _Level.of_root(config, hidden))


@pytree
class _Level:
    """The nodes whose children are drawn next, and the draft's own entries of all nodes that have run so far."""

    hidden: jax.Array  # [batch, k, d_model], the recurrent state of each node, which its children consume
    kv: tuple[KV, ...]  # layer by layer: [batch, seen, kv_head, head_dim]
    sees: jax.Array  # [batch, k, seen], which of those each node's children see: its own, and its ancestors'

    @classmethod
    def of_root(cls, config: Eagle3Config, hidden: jax.Array) -> "_Level":
        """Return the level that is the root alone, [batch, 1, d_model], whose own entry is in the pages."""
        batch = hidden.shape[0]
        empty = jnp.zeros((batch, 0, config.num_kv_heads, config.head_dim), config.dtype)
        return cls(hidden, ((empty, empty),) * config.num_layers, jnp.zeros((batch, 1, 0), bool))


class _Expander:
    """See `grow.Expander`. Every level is one pass of the head."""

    def __init__(self, draft: ReadyHead, config: Eagle3Config, pages: Cache, prefix: Prefix, rows: SamplerRows) -> None:
        self.draft, self.config, self.pages, self.prefix, self.rows = draft, config, pages, prefix, rows

    def candidates(self, level: _Level, depth: int, top_k: int) -> tuple[jax.Array, jax.Array]:
        logits = draft_logits(self.draft.params.output, self.config, level.hidden)
        return best_tokens(self.rows, self.draft.vocab.target_ids, logits, self.prefix.lens + depth - 1, top_k)

    def descend(self, level: _Level, parents: jax.Array, token_ids: jax.Array, depth: int) -> _Level:
        position_ids = jnp.broadcast_to((self.prefix.lens + depth - 1)[:, None], token_ids.shape)
        inputs = draft_inputs(
            self.draft.params,
            self.config,
            self.draft.embedding,
            token_ids,
            take_each(level.hidden, parents),
            position_ids,
        )
        batch, k = token_ids.shape
        own = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
        sees = jnp.concatenate([take_each(level.sees, parents), own], axis=2)
        grown = list(level.kv)

        def see_ancestors(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            above_k, above_v = level.kv[i]
            grown[i] = jnp.concatenate([above_k, k], axis=1), jnp.concatenate([above_v, v], axis=1)
            return attend(q, *grown[i], sees, self.pages.attended(i, self.prefix))

        hidden, _ = draft_forward(self.draft.params, self.config, inputs, see_ancestors)
        return _Level(hidden, tuple(grown), sees)

    def width(self, tree: DynamicTree, depth: int) -> int:
        del depth
        return tree.top_k
