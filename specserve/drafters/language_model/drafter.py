"""A language model as the draft of a larger one, the draft model of Leviathan et al. (2023, arXiv 2211.17192): it is
computed as targets are, follows sequences by their tokens alone, and drafts one token at a time.

Between steps, take a sequence x[0..L] whose root is x[L]: it has read x[0..L - count], and their entries are in its
pages. A step reads the rest, the root with it, in one pass. Nodes of a tree are never written: those that are accepted
are read with the next root, at next to no cost where reading weights is what takes time.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specserve.drafters.follow import MIN_PENDING
from specserve.drafters.grow import Level, NodeByNode, grow_tree
from specserve.drafters.interface import Kind, TrainedDrafter
from specserve.errors import ConfigError
from specserve.kernels.gather import take_each, take_rows
from specserve.kernels.rows import Documents
from specserve.models import target as target_model
from specserve.models.cache import Cache, Prefix
from specserve.models.config import ModelConfig
from specserve.models.context import only_live
from specserve.models.sharding import place_whole_heads
from specserve.models.target import TargetParams, target_spec
from specserve.pytree import pytree, static
from specserve.speculative.drafter import After, Committed, DraftWeights, Sizes, SlotView, Weights
from specserve.speculative.tree import Proposal, Tree


@pytree
class Reading:
    """The state of all sequences: the entries of what has been read, and how much has not."""

    cache: Cache  # the model's own layers, under the target's page table
    count: jax.Array  # [slot] int32, the last tokens of each sequence that have not been read, the root among them
    room: int = static()  # as many of them are read at most; older ones stay unread


@dataclass(frozen=True)
class LanguageModel(TrainedDrafter):
    """See `interface.TrainedDrafter` for the meaning of each member. Its parameters are those of a target."""

    config: ModelConfig

    @property
    def name(self) -> str:
        return "language-model"

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def draft_vocab_size(self) -> int:
        return self.config.vocab_size

    def for_length(self, length: int) -> "LanguageModel":
        return LanguageModel(self.config.for_length(length))

    def spec(self) -> TargetParams:
        return target_spec(self.config)

    def place(self, mesh: Mesh) -> TargetParams:
        return place_whole_heads(self.config, self.spec(), mesh)

    def max_pending(self, max_depth: int) -> int:
        return max(MIN_PENDING, max_depth + 1)

    def init_state(self, target: ModelConfig, sizes: Sizes) -> Reading:
        return Reading(
            cache=Cache.zeros(self.config, num_slots=0, **sizes.of_pages),
            count=jnp.zeros(sizes.num_slots, jnp.int32),
            room=self.max_pending(sizes.max_depth),
        )

    def observe(self, weights: Weights, state: Reading, view: SlotView, committed: Committed, after: After) -> Reading:
        """Take note of committed tokens. Only a prompt's chunk is read at once."""
        cache, count = state.cache, committed.count
        if after == "prompt":
            causal = Documents(jnp.zeros((1, committed.token_ids.shape[1]), jnp.int32))
            tables, tokens = (view.page_table, view.read_table), (committed.token_ids, committed.index)
            kept = committed.is_kept, view.live(committed.is_kept)
            cache = self._read(weights, cache, tables, causal, *tokens, *kept, has_states=False)[0]
            count = jnp.ones_like(count)
        elif after == "plain":
            count = take_rows(state.count, view.slots) + 1
        count = state.count.at[view.slots].set(count, mode="drop")
        return dataclasses.replace(state, cache=cache, count=count)

    def catch_up(self, weights: Weights, state: Reading, view: SlotView) -> Reading:
        cache = self._read_pending(weights, state, view, view.page_table, state.room, has_states=False)[0]
        count = jnp.minimum(take_rows(state.count, view.slots), 1)  # a step needs the root's state
        return dataclasses.replace(state, cache=cache, count=state.count.at[view.slots].set(count, mode="drop"))

    def propose(self, weights: Weights, state: Reading, view: SlotView, tree: Tree) -> tuple[Reading, Proposal]:
        cache, states = self._read_pending(weights, state, view, view.read_table, tree.depth + 1, has_states=True)
        last = jnp.clip(take_rows(state.count, view.slots) - 1, 0, tree.depth)[:, None]
        nodes = _Nodes(_own(weights), self.config, cache, view)
        proposal = grow_tree(nodes, tree, view.root_ids, Level.of_root(take_each(states, last)))
        return dataclasses.replace(state, cache=cache), proposal

    def _read_pending(
        self, weights: Weights, state: Reading, view: SlotView, read_table: jax.Array, most: int, *, has_states: bool
    ) -> tuple[Cache, jax.Array]:
        """Read the last `most` tokens at most that have not been read."""
        count = jnp.minimum(take_rows(state.count, view.slots), most)[:, None]
        offset = jnp.arange(most, dtype=jnp.int32)
        index = view.seq_lens[:, None] - count + 1 + offset
        token_ids = take_each(view.history, jnp.clip(index, 0, view.history.shape[1] - 1))
        tables, mask = (view.page_table, read_table), jnp.tri(most, dtype=bool)[None]
        tokens, kept = (token_ids, index), (offset < count, view.live(offset < count))
        return self._read(weights, state.cache, tables, mask, *tokens, *kept, has_states=has_states)

    def _read(
        self,
        weights: Weights,
        cache: Cache,
        tables: tuple[jax.Array, jax.Array],  # of pages [batch, max_pages]: for writing, and the part that is read
        mask: jax.Array | Documents,  # [1, n, n]
        token_ids: jax.Array,  # [batch, n] int32, the target's
        index: jax.Array,  # [batch, n] int32, their places, consecutive
        is_kept: jax.Array,  # [batch, n] bool, the first so many
        is_live: jax.Array,  # [batch, n] bool, see `SlotView.live`
        *,
        has_states: bool,  # False: of the last layer only keys and values are computed
    ) -> tuple[Cache, jax.Array]:
        """Read tokens and write their entries. Returns their states after the final norm too, [batch, n, d_model]."""
        own, last = _own(weights), self.config.num_layers - 1
        prefix, taps = Prefix(tables[1], index[:, 0]), (last - 1,) if last else ()
        ids, seen = only_live(self.config, _read_ids(own, token_ids), mask, is_live)
        out = target_model.forward(
            own.params, self.config, ids, index, seen, cache=cache, prefix=prefix, aux_layers=taps
        )
        before = out.hidden_states if has_states else out.aux_hidden_states
        if before is not None:
            # always true, but known only once the layers have read the pages: see `speculative.step._has_run`
            is_kept = is_kept & jnp.isfinite(before[:, :1, 0])
        return cache.write(out.new, tables[0], index, is_kept), out.hidden_states


class _Nodes(NodeByNode):
    def __init__(self, draft: DraftWeights, config: ModelConfig, cache: Cache, view: SlotView) -> None:
        super().__init__(view, jnp.maximum(draft.vocab.target_ids, 0))
        self.draft, self.config, self.cache = draft, config, cache

    def logits(self, states: jax.Array) -> jax.Array:
        logits = target_model.logits(self.draft.params, self.config, states)
        return jnp.where(self.draft.vocab.target_ids >= 0, logits, -jnp.inf)

    def run(
        self, before: jax.Array, token_ids: jax.Array, position_ids: jax.Array, sees: jax.Array, entries: Any
    ) -> tuple[jax.Array, Any]:
        del before  # a token says all that its own pass needs
        ids, prefix = _read_ids(self.draft, token_ids), Prefix(self.view.read_table, self.view.seq_lens + 1)
        given = {"cache": self.cache, "prefix": prefix, "earlier": entries}
        out = target_model.forward(self.draft.params, self.config, ids, position_ids, sees, **given)
        return out.hidden_states, out.new


def _own(weights: Weights) -> DraftWeights:
    assert weights.draft is not None, "a model proposes, and there is none"
    return weights.draft


def _read_ids(draft: DraftWeights, token_ids: jax.Array) -> jax.Array:
    """Return the model's own ids for tokens of the target."""
    return token_ids if draft.vocab.draft_ids is None else draft.vocab.draft_ids[token_ids]


def new_config(_settings: Any, model: ModelConfig, _draft_vocab_size: int) -> ModelConfig:
    """Return the config of a drafter that is this model. Raises ConfigError where it keeps recurrent states, or keys of
    pools."""
    if model.compressed is not None:
        raise ConfigError(
            f"--draft: the layers of a {model.family} make keys of pools from all new tokens at once, and a draft's "
            "tokens run one after another; give a draft of another family"
        )
    if model.is_recurrent:
        raise ConfigError(
            f"--draft: a {model.family} has layers that keep a recurrent state, which holds no older one to go back to "
            "where a draft is rejected; give a draft whose layers all attend"
        )
    return model


LANGUAGE_MODEL = Kind(LanguageModel, new_config)
