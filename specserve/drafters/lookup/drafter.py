"""Drafters without a head: they find the last tokens at an earlier place, in the same sequence or in recent answers,
and propose what followed there. A mixed drafter chooses between such a draft and a head's.

Prompt lookup (Saxena 2023) searches the sequence itself, suffix matching (after SuffixDecoding, Oliaro et al. 2024,
arXiv 2411.04975) the answers of finished sequences as well.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specserve.drafters.lookup.search import MATCH_CLASSES, RECALL_LENGTH, RECALL_ROWS, Match, find, match_class
from specserve.drafters.words import ALL_TEXT
from specserve.kernels.gather import put_each, take_each, take_rows
from specserve.models.config import ModelConfig
from specserve.pytree import pytree
from specserve.speculative.drafter import HEAD, After, Committed, Drafter, Sizes, SlotView, Weights, choose
from specserve.speculative.tree import Proposal, Tree, chain_proposal

GAIN_DECAY = 0.9
PRIOR_GAINS = (0.3, 0.8, 2.0)  # accepted tokens per step of a match of each class, before anything is known


@dataclass(frozen=True)
class Lookup(Drafter):
    """A drafter that searches. What is kept of finished answers is its whole state, [RECALL_ROWS, RECALL_LENGTH] int32
    with -1 where there is nothing; it is None where the sequence alone is searched."""

    searches_answers: bool  # finished answers too

    @property
    def remembers(self) -> bool:
        return self.searches_answers

    def init_state(self, target: ModelConfig, sizes: Sizes) -> jax.Array | None:
        return jnp.full((RECALL_ROWS, RECALL_LENGTH), -1, jnp.int32) if self.remembers else None

    def propose(self, weights: Weights, state: Any, view: SlotView, tree: Tree) -> tuple[Any, Proposal]:
        return state, _as_proposal(view, self.find(state, view, tree))

    def find(self, state: Any, view: SlotView, tree: Tree) -> Match:
        """Find the best match of each sequence's end, where the tree's lookup searches."""
        return find(view.history, view.seq_lens, tree.depth, state if tree.lookup == ALL_TEXT else None)

    def remember(self, state: Any, history: jax.Array, start: jax.Array, last: jax.Array, number: jax.Array) -> Any:
        if not self.remembers:
            return state
        index = jnp.maximum(start, last - RECALL_LENGTH) + jnp.arange(RECALL_LENGTH)
        text = history.at[index].get(mode="clip")
        return state.at[number % RECALL_ROWS].set(jnp.where(index <= last, text, -1))

    def forget(self, state: Any) -> Any:
        return jax.tree.map(lambda texts: jnp.full_like(texts, -1), state)


@pytree
class MixedState:
    head: Any
    lookup: Any
    gains: jax.Array  # [slot, 1 + classes] float32, accepted tokens per step of the head and of matches by class


@dataclass(frozen=True)
class Mixed(Drafter):
    """A trained head and a lookup together. For each sequence and step it takes the proposal of the one that has
    brought more so far, of those that the tree's source names. Its weights are the head's."""

    head: Drafter
    lookup: Lookup

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.head.aux_layers

    @property
    def max_tree_depth(self) -> int | None:
        return self.head.max_tree_depth

    @property
    def remembers(self) -> bool:
        return self.lookup.remembers

    def max_pending(self, max_depth: int) -> int:
        return self.head.max_pending(max_depth)

    def init_state(self, target: ModelConfig, sizes: Sizes) -> MixedState:
        return MixedState(
            self.head.init_state(target, sizes),
            self.lookup.init_state(target, sizes),
            jnp.tile(_first_gains(jnp.float32(0)), (sizes.num_slots, 1)),
        )

    def admit(
        self, state: MixedState, slot: jax.Array, page_row: jax.Array, num_cached: jax.Array, promise: jax.Array
    ) -> MixedState:
        head = self.head.admit(state.head, slot, page_row, num_cached, promise)
        return dataclasses.replace(state, head=head, gains=state.gains.at[slot].set(_first_gains(promise)))

    def resume(
        self, state: MixedState, slot: jax.Array, page_row: jax.Array, num_read: jax.Array, promise: jax.Array
    ) -> MixedState:
        return dataclasses.replace(state, head=self.head.resume(state.head, slot, page_row, num_read, promise))

    def observe(
        self, weights: Weights, state: MixedState, view: SlotView, committed: Committed, after: After
    ) -> MixedState:
        head = self.head.observe(weights, state.head, view, committed, after)
        if isinstance(after, str) or not after.lookup:
            return dataclasses.replace(state, head=head)
        gains = update_gains(take_rows(state.gains, view.slots), committed.source, committed.n_accepted)
        gains = put_each(state.gains, view.slots[:, None], None, gains[:, None])
        return dataclasses.replace(state, head=head, gains=gains)

    def catch_up(self, weights: Weights, state: MixedState, view: SlotView) -> MixedState:
        return dataclasses.replace(state, head=self.head.catch_up(weights, state.head, view))

    def propose(self, weights: Weights, state: MixedState, view: SlotView, tree: Tree) -> tuple[MixedState, Proposal]:
        assert tree.uses_head, "lookup alone would leave the head behind: give such a step a drafter without one"
        head, proposal = self.head.propose(weights, state.head, view, tree)
        state = dataclasses.replace(state, head=head)
        if not tree.lookup:
            return state, proposal
        proposal = dataclasses.replace(proposal, scores=None, confidence=None)  # a match has none
        match = self.lookup.find(state.lookup, view, tree)
        is_preferred = prefers_match(take_rows(state.gains, view.slots), match)
        return state, choose(is_preferred, graft(_as_proposal(view, match), proposal), proposal)

    def remember(
        self, state: MixedState, history: jax.Array, start: jax.Array, last: jax.Array, number: jax.Array
    ) -> MixedState:
        lookup = self.lookup.remember(state.lookup, history, start, last, number)
        return dataclasses.replace(state, lookup=lookup)

    def forget(self, state: MixedState) -> MixedState:
        return dataclasses.replace(state, lookup=self.lookup.forget(state.lookup))


def graft(match: Proposal, tree: Proposal) -> Proposal:
    """A chain [batch, 1 + depth] with as much of a tree [batch, 1 + node] beside it as makes the tree's number of
    nodes. A tree lists parents before their children, so any first nodes of it are a tree."""
    depth = match.token_ids.shape[1] - 1
    rest = slice(1, tree.token_ids.shape[1] - depth)
    parents = tree.parents[:, rest]
    return Proposal(
        token_ids=jnp.concatenate([match.token_ids, tree.token_ids[:, rest]], axis=1),
        parents=jnp.concatenate([match.parents, jnp.where(parents > 0, parents + depth, 0)], axis=1),
        depths=jnp.concatenate([match.depths, tree.depths[:, rest]], axis=1),
        source=match.source,
    )


def _as_proposal(view: SlotView, match: Match) -> Proposal:
    return chain_proposal(view.root_ids, match.token_ids, _source(match))


def _source(match: Match) -> jax.Array:  # [batch] int32
    """Return the index of a match's gain. The head's gain comes before those of all classes of matches."""
    return HEAD + 1 + match_class(match.length)


def _first_gains(promise: jax.Array) -> jax.Array:  # [1 + classes] float32
    """Return the accepted tokens per step that are expected of a new sequence: of the head what it promises, and of
    matches the priors."""
    assert len(PRIOR_GAINS) == 1 + len(MATCH_CLASSES)
    return jnp.concatenate([promise[None], jnp.asarray(PRIOR_GAINS, jnp.float32)])


def prefers_match(gains: jax.Array, match: Match) -> jax.Array:  # [batch, 1 + classes] -> [batch] bool
    """Return whether the match promises more accepted tokens than the head."""
    expected = take_each(gains, _source(match)[:, None])[:, 0]
    return (match.length > 0) & (expected > gains[:, HEAD])


def update_gains(gains: jax.Array, source: jax.Array, n_accepted: jax.Array) -> jax.Array:
    """Update the averages (exponential) of the source that proposed in this step."""
    is_source = jnp.arange(gains.shape[1]) == source[:, None]
    moved = GAIN_DECAY * gains + (1 - GAIN_DECAY) * n_accepted[:, None].astype(jnp.float32)
    return jnp.where(is_source, moved, gains)
