"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 network that foresees all of its tokens in one pass, the further ones through
masked slots."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.eagle3.drafter import OnEagle
from specserve.drafters.eagle3.model import (
    Eagle3Params,
    ReadyHead,
    attend_by_window,
    draft_entries,
    draft_states,
    fuse_features,
    stored,
)
from specserve.drafters.follow import FIRST_ENTRY, Following, pending_of, places
from specserve.drafters.grow import Marginals, grow_tree
from specserve.drafters.interface import Kind
from specserve.drafters.learning import Costs, DraftTargets, Rollout, Rows
from specserve.drafters.peagle import rollout as training
from specserve.drafters.peagle import start
from specserve.drafters.peagle.config import PEagleConfig
from specserve.drafters.peagle.model import PEagleParams, head_spec, inputs_with_masks
from specserve.kernels.gather import take_each
from specserve.models.cache import Cache, Prefix
from specserve.models.target import TargetParams
from specserve.speculative.drafter import SlotView, Weights
from specserve.speculative.tree import Proposal, Tree


@dataclass(frozen=True)
class PEagle(OnEagle):
    """See `interface.TrainedDrafter` for the meaning of each member."""

    config: PEagleConfig
    part: ClassVar[str] = "network"

    @property
    def name(self) -> str:
        return "p-eagle"

    def network_params(self, params: PEagleParams) -> Eagle3Params:
        return params.network

    @property
    def max_tree_depth(self) -> int | None:
        return self.config.num_slots

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "block_size": self.config.num_slots, "mask_token": self.config.mask_token_id}

    def propose(self, weights: Weights, state: Following, view: SlotView, tree: Tree) -> tuple[Following, Proposal]:
        draft, own = self.ready(weights), weights.draft
        assert own is not None, "a head proposes, and there is none"
        cache, states = look_ahead(draft, own.params, self.config, state, view, tree.depth)
        logits = self.logits(self.output(own.params), weights.target, states)
        slots = Marginals(view.rows, draft.vocab, view.seq_lens, logits)
        return dataclasses.replace(state, cache=cache), grow_tree(slots, tree, view.root_ids, view.root_ids[:, None])

    def spec(self) -> PEagleParams:
        return head_spec(self.config)

    def init_params(self, target: Target, target_ids: np.ndarray, seed: int) -> PEagleParams:
        return start.initial_params(self.config, target, target_ids, seed)

    def fit_states(self, params: PEagleParams, aux_hidden_states: jax.Array, is_token: jax.Array) -> PEagleParams:
        return start.fit_states(params, self.config, aux_hidden_states, is_token)

    def num_steps(self, rollout: int) -> int:
        return self.config.num_slots

    def draft_targets(self, rows: Rows, rollout: Rollout) -> DraftTargets:
        return training.targets_of_slots(self.config, rows)

    def learn(
        self, params: PEagleParams, target: TargetParams, rows: Rows, aux_hidden_states: jax.Array, rollout: Rollout
    ) -> list[jax.Array]:
        return training.states_of_slots(params, self.config, target, rows, aux_hidden_states, rollout)

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        return training.slot_costs(self.config, self.spec_on(mesh).network, rollout, seq_len, mesh)


# slot d has r^d of the elements, and each element counts as much as any other
PEAGLE = Kind(PEagle, start.new_config, lambda _given: {"train.rollout_decay": training.SHARE})


def look_ahead(
    draft: ReadyHead, params: PEagleParams, config: PEagleConfig, state: Following, view: SlotView, depth: int
) -> tuple[Cache, jax.Array]:  # and the states of the root and of depth - 1 masked slots [batch, depth, d_model]
    """Write the entries of the pending tokens, and compute the states of the masked slots, whose own entries are used
    in this call alone."""
    network, pages = config.network, state.cache
    pending = pending_of(state, view, depth)
    index, is_valid = places(view.seq_lens, pending)
    known, masked = index.shape[1], jnp.arange(depth - 1, dtype=index.dtype)
    # the place before the masked slots is the root's or padding, of which no position matters
    position_ids = jnp.concatenate(
        [index[:, :-1], view.seq_lens[:, None] + jnp.arange(depth, dtype=index.dtype)], axis=1
    )
    features = fuse_features(params.network, network, pending.aux_hidden_states)
    inputs = inputs_with_masks(params, config, draft.embedding, pending.token_ids, features, position_ids)

    # pending rows are padded behind their last token, and masked slots stand behind the padding
    is_entry = is_valid & (index >= FIRST_ENTRY)
    is_key = jnp.pad(is_entry, ((0, 0), (0, depth - 1)), constant_values=True)
    offset = jnp.arange(known + depth - 1)
    mask = (offset[:, None] >= offset) & is_key[:, None]
    before = Prefix(view.read_table, index[:, 0], FIRST_ENTRY)

    def see(i: int, q: jax.Array, k: jax.Array, v: jax.Array, sees: jax.Array = mask) -> jax.Array:
        return attend_by_window(network, i, q, k, v, sees, pages.attended(i, before), position_ids)

    top, entries = draft_entries(params.network, network, inputs, see)
    # the last layer runs for those that predict: the root, which is the last pending token, and the masked slots
    root = jnp.maximum(pending.count - 1, 0)[:, None]
    ahead = jnp.concatenate([root, jnp.broadcast_to(known + masked, (len(root), depth - 1))], axis=1)
    top, sees = jax.tree.map(lambda x: take_each(x, ahead), (top, mask))
    last = network.num_layers - 1
    states = draft_states(params.network, network, top, lambda q: see(last, q, *entries[last], sees))
    # always true, but known only once all layers have read the pages: see `speculative.step._has_run`
    is_kept = is_entry & jnp.isfinite(states[:, :1, 0])
    kept = tuple((k[:, :known], v[:, :known]) for k, v in entries)
    return pages.write(stored(network, kept), view.page_table, index, is_kept), states
