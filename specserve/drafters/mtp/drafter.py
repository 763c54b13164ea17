"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): the layer that a target's own checkpoint carries after its
last one, run again over its own states, one token at a time."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.follow import FIRST_ENTRY, Following, FollowingDrafter, Pending, Tables, pending_of, places
from specserve.drafters.grow import Level, NodeByNode, grow_tree
from specserve.drafters.interface import Kind
from specserve.drafters.learning import Costs, Rollout, Rows, by_position
from specserve.drafters.mtp import model, start
from specserve.drafters.mtp.config import MtpConfig
from specserve.drafters.mtp.model import MtpParams
from specserve.drafters.mtp.rollout import rollout_costs, rollout_states
from specserve.drafters.settings import ALL_TOKENS
from specserve.kernels.gather import take_each
from specserve.kernels.paged import PagedPrefix
from specserve.models.cache import Cache, Prefix
from specserve.models.target import TargetParams
from specserve.pytree import pytree
from specserve.speculative.drafter import Sizes, SlotView, Weights
from specserve.speculative.tree import Proposal, Tree
from specserve.speculative.vocab import DraftVocab


@pytree
class ReadyLayer:
    """A layer ready to propose, beside the target whose norm, embedding and head it shares."""

    params: model.MtpParams
    vocab: DraftVocab
    target: TargetParams


def ready(weights: Weights) -> ReadyLayer:
    """Return the layer beside the target that it continues."""
    own = weights.draft
    assert own is not None, "a layer proposes, and there is none"
    return ReadyLayer(own.params, own.vocab, weights.target)


@dataclass(frozen=True)
class Mtp(FollowingDrafter):
    """See `interface.TrainedDrafter` for the meaning of each member."""

    config: MtpConfig
    part: ClassVar[str] = "layer"

    @property
    def name(self) -> str:
        return "mtp"

    def facts(self) -> Mapping[str, Any]:
        sizes = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads")
        return {name: getattr(self.shape, name) for name in sizes} | {
            "aux_layers": self.aux_layers,
            "vocab_size": self.draft_vocab_size,
        }

    def for_length(self, length: int) -> "Mtp":
        return Mtp(dataclasses.replace(self.config, layer=self.config.layer.for_length(length)))

    def empty_cache(self, sizes: Sizes) -> Cache:
        return Cache.zeros(self.config.layer, num_slots=0, **sizes.of_pages)

    def write(self, weights: Weights, cache: Cache, tables: Tables, *entries: jax.Array) -> Cache:
        return extend(ready(weights), self.config, cache, tables[0], *entries)[0]

    def propose(self, weights: Weights, state: Following, view: SlotView, tree: Tree) -> tuple[Following, Proposal]:
        cache, expander, root = at_root(ready(weights), self.config, state, view, tree.depth)
        return dataclasses.replace(state, cache=cache), grow_tree(expander, tree, view.root_ids, root)

    def spec(self) -> MtpParams:
        return model.draft_spec(self.config)

    def init_params(self, target: Target, target_ids: np.ndarray, seed: int) -> MtpParams:
        return start.initial_params(self.config, target, target_ids, seed)

    def is_trained(self, target: Target) -> bool:
        return start.is_trained(self.config, target)

    def scale_output(self, params: MtpParams, scale: jax.Array) -> MtpParams:
        offset = 1.0 if self.config.layer.norm_offset else 0.0
        norm = (params.norm + offset) * scale.astype(params.norm.dtype) - offset
        return dataclasses.replace(params, norm=norm)

    def learn(
        self, params: MtpParams, target: TargetParams, rows: Rows, aux_hidden_states: jax.Array, rollout: Rollout
    ) -> list[jax.Array]:
        return by_position(rollout_states(params, self.config, target, rows, aux_hidden_states, rollout))

    def logits(self, output: tuple[Any, ...], target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        return model.draft_logits(output, self.config, target, hidden_states)

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        return rollout_costs(self.config, self.spec_on(mesh), rollout, seq_len, mesh)


SUITS = {"draft.vocab_size": ALL_TOKENS, "train.rollout": 3, "train.rollout_decay": 0.6}
MTP = Kind(Mtp, start.new_config, lambda _given: SUITS)


def extend(
    draft: ReadyLayer,
    config: MtpConfig,
    pages: Cache,
    page_table: jax.Array,  # [batch, max_pages], for writing
    token_ids: jax.Array,  # [batch, n]
    aux_hidden_states: jax.Array,  # [batch, n, d_model], of the position before each token
    index: jax.Array,  # [batch, n], of the entries, consecutive
    is_valid: jax.Array,  # [batch, n] bool, the first so many
) -> tuple[Cache, jax.Array]:  # and what the entries bring to the layer [batch, n, d_model]
    """Write the entries of tokens whose hidden states are known. An entry in the pages depends on its own input alone,
    so nothing attends here, and the layer's output is not computed."""
    hidden = model.taken(config, draft.target, aux_hidden_states)
    x = model.inputs(draft.params, config, draft.target, token_ids, hidden)
    see_self = jnp.eye(x.shape[1], dtype=bool)[None]
    seen = pages.attended(0, Prefix(page_table, index[:, 0], FIRST_ENTRY))
    _, left = model.run(draft.params, config, x, index, see_self, seen)
    return pages.write((left,), page_table, index, is_valid & (index >= FIRST_ENTRY)), x


def consume(
    draft: ReadyLayer,
    config: MtpConfig,
    pages: Cache,
    page_table: jax.Array,  # [batch, max_pages], for writing
    seq_lens: jax.Array,  # [batch], the root's position
    pending: Pending,
) -> tuple[Cache, jax.Array]:  # and what the root brings to the layer [batch, 1, d_model]
    """Consume the pending tokens: write their entries."""
    index, is_valid = places(seq_lens, pending)
    pages, x = extend(draft, config, pages, page_table, pending.token_ids, pending.aux_hidden_states, index, is_valid)
    return pages, take_each(x, jnp.maximum(pending.count - 1, 0)[:, None])


def at_root(
    draft: ReadyLayer, config: MtpConfig, state: Following, view: SlotView, depth: int
) -> tuple[Cache, "_Nodes", Level]:
    """Consume what is pending before a tree of this depth, and run the layer for the root."""
    # Write first and attend to the written pages: reading the old ones as well would make XLA copy them.
    cache, root = consume(draft, config, state.cache, view.page_table, view.seq_lens, pending_of(state, view, depth))
    # the root sees the entries before its own, which is in the pages too, and brings its own
    see_self = jnp.ones((1, 1, 1), bool)
    seen = cache.attended(0, Prefix(view.read_table, view.seq_lens, FIRST_ENTRY))
    states, _ = model.run(draft.params, config, root, view.seq_lens[:, None], see_self, seen)
    seen = cache.attended(0, Prefix(view.read_table, view.seq_lens + 1, FIRST_ENTRY))
    return cache, _Nodes(draft, config, seen, view), Level.of_root(states)


class _Nodes(NodeByNode):
    def __init__(self, draft: ReadyLayer, config: MtpConfig, seen: PagedPrefix, view: SlotView) -> None:
        super().__init__(view, draft.vocab.target_ids)
        self.draft, self.config, self.seen = draft, config, seen

    def logits(self, states: jax.Array) -> jax.Array:
        return model.draft_logits(self.draft.params.output, self.config, self.draft.target, states)

    def run(
        self, before: jax.Array, token_ids: jax.Array, position_ids: jax.Array, sees: jax.Array, entries: Any
    ) -> tuple[jax.Array, Any]:
        params, config = self.draft.params, self.config
        hidden = model.handed_on(params, config, before)
        x = model.inputs(params, config, self.draft.target, token_ids, hidden)
        return model.run(params, config, x, position_ids, sees, self.seen, entries)
