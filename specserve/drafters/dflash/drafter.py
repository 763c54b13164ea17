"""DFlash (arXiv 2602.06036): one pass over a block of masked slots below the root foresees all of its tokens at once.
DSpark, DFlash2 and Domino are the same with heads that make slots depend on each other (`joint`)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.dflash import model, start
from specserve.drafters.dflash import rollout as training
from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.joint import JointSlots
from specserve.drafters.dflash.model import DFlashParams, Output, block_inputs, block_logits, block_states, token_table
from specserve.drafters.grow import Marginals, grow_tree
from specserve.drafters.interface import Kind, TrainedDrafter
from specserve.drafters.layers import facts_of, windows_of
from specserve.drafters.learning import Costs, DraftTargets, Rollout, Rows
from specserve.kernels.attention import attend
from specserve.kernels.rowwise import rms_norm
from specserve.models.cache import Cache, Pages, Prefix
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.speculative.drafter import After, Committed, DraftWeights, Sizes, SlotView, Weights
from specserve.speculative.tree import Proposal, Tree


@dataclass(frozen=True)
class DFlash(TrainedDrafter):
    """See `interface.TrainedDrafter` for the meaning of each member. Its state is a `Cache`: keys and values of every
    layer, written for each committed token at once, so that it is never behind."""

    config: DFlashConfig
    part: ClassVar[str] = "backbone"

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def max_tree_depth(self) -> int | None:
        return self.config.num_slots

    def facts(self) -> Mapping[str, Any]:
        return {
            **facts_of(self.config.backbone),
            "vocab_size": self.config.draft_vocab_size,
            "aux_layers": self.config.aux_layers,
            "block_size": self.config.block_size,
            "causal": "all" if all(self.config.is_causal) else "" if any(self.config.is_causal) else "none",
            "sinks": self.config.backbone.has_sinks,
            "rank": self.config.markov_rank or self.config.selector_rank or self.config.correction_rank,
            "markov": self.config.markov_type,
        }

    def init_state(self, target: ModelConfig, sizes: Sizes) -> Cache:
        backbone = self.config.backbone

        def layer(_: int, pages: int) -> Pages:
            return Pages.zeros(pages, sizes.page_size, backbone.num_kv_heads, backbone.head_dim, backbone.dtype)

        return Cache.of_layers(layer, windows_of(backbone), **sizes.of_pages)

    def observe(self, weights: Weights, state: Cache, view: SlotView, committed: Committed, after: After) -> Cache:
        assert committed.aux_hidden_states is not None, "the target was not asked for its taps"
        own = weights.draft
        assert own is not None, "a head observes, and there is none"
        entries = model.context_kv(own.params, self.config, committed.aux_hidden_states, committed.index)
        return state.write(entries, view.page_table, committed.index, committed.is_kept)

    def propose(self, weights: Weights, state: Cache, view: SlotView, tree: Tree) -> tuple[Cache, Proposal]:
        """Grow a tree below each root. Nothing is written: the keys and values of a block are used in this call
        alone."""
        draft, config = weights.draft, self.config
        assert draft is not None, "a head proposes, and there is none"
        states = run_block(draft, weights.target, config, state, view, tree.depth)
        logits = block_logits(draft.params.output, config, weights.target, states)
        heads = draft.params.heads
        if heads is None:
            slots = Marginals(view.rows, draft.vocab, view.seq_lens, logits)
            return state, grow_tree(slots, tree, view.root_ids, view.root_ids[:, None])
        normed = rms_norm(states, draft.params.norm, config.backbone.norm_eps)
        table = token_table(draft.params, weights.target)
        joint = JointSlots(heads, config, view.rows, draft.vocab, view.seq_lens, logits, normed, table)
        proposal = grow_tree(joint, tree, view.root_ids, joint.root(view.root_ids))
        return state, dataclasses.replace(proposal, confidence=joint.confidence)

    def spec(self) -> DFlashParams:
        return model.head_spec(self.config)

    def init_params(self, target: Target, target_ids: np.ndarray, seed: int) -> DFlashParams:
        return start.initial_params(self.config, target, target_ids, seed)

    def scale_output(self, params: DFlashParams, scale: jax.Array) -> DFlashParams:
        return dataclasses.replace(params, norm=params.norm * scale.astype(params.norm.dtype))

    def num_steps(self, rollout: int) -> int:
        return self.config.num_slots

    def draft_targets(self, rows: Rows, rollout: Rollout) -> DraftTargets:
        return training.targets_of_blocks(self.config, rows, rollout)

    def learn(
        self, params: DFlashParams, target: TargetParams, rows: Rows, aux_hidden_states: jax.Array, rollout: Rollout
    ) -> list[jax.Array]:
        return training.states_of_blocks(params, self.config, target, rows, aux_hidden_states, rollout)

    def output(self, params: DFlashParams) -> Output:
        return params.learned_output

    def logits(self, output: Output, target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        return model.output_logits(output, self.config, target, hidden_states)

    def auxiliary_loss(
        self, output: Output, target: TargetParams, hidden_states: jax.Array, logits: jax.Array, p: jax.Array
    ) -> jax.Array | None:
        return model.joint_auxiliary(output, self.config, hidden_states, logits, p)

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        return training.block_costs(self.config, self.spec_on(mesh), rollout, seq_len, mesh)


DFLASH, DSPARK, DFLASH2, DOMINO = (
    Kind(DFlash, partial(start.new_config, kind), partial(start.suits, kind))
    for kind in ("dflash", "dspark", "dflash2", "domino")
)


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
            scale=backbone.attention_scale or None,
            sinks=attention.sinks,
            window=backbone.kind(i).window,
            position_ids=position_ids,
        )

    x = block_inputs(draft.params, config, target, view.root_ids[:, None], length)
    return block_states(draft.params, config, x, position_ids, see_block)[
        :, config.first_slot : config.first_slot + depth
    ]
