"""DFlash behind the door of drafters (arXiv 2602.06036): one pass over a block of masked slots foresees all of its
tokens at once."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.dflash import costs, learn, model, propose, start
from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.model import DFlashParams, Taught
from specserve.drafters.door import Aims, Costs, Forgetful, Rollout, Rows
from specserve.drafters.words import KindName
from specserve.models.cache import Cache, Pages
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.speculative.drafter import After, Committed, Sizes, SlotView, Weights
from specserve.speculative.tree import Proposal, Tree


@dataclass(frozen=True)
class DFlash(Forgetful):
    """See `door.TrainedDrafter`, which says what each of these is for. Its state is a `Cache`: keys and values of every
    layer, written for each committed token at once, so that it is never behind."""

    config: DFlashConfig

    @property
    def name(self) -> KindName:
        return self.config.name

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def dtype(self) -> str:
        return self.config.backbone.dtype

    @property
    def d_model(self) -> int:
        return self.config.backbone.d_model

    @property
    def max_len(self) -> int:
        return self.config.backbone.max_len

    @property
    def max_tree_depth(self) -> int | None:
        return self.config.num_slots

    @property
    def vocab_size(self) -> int:
        return self.config.backbone.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    def with_dtype(self, dtype: str) -> "DFlash":
        backbone = dataclasses.replace(self.config.backbone, dtype=dtype)
        return DFlash(dataclasses.replace(self.config, backbone=backbone))

    def facts(self) -> Mapping[str, Any]:
        backbone = self.config.backbone
        sizes = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads")
        windows = [backbone.kind(i).window for i in range(backbone.num_layers)]
        return {
            **{name: getattr(backbone, name) for name in sizes},
            "vocab_size": self.config.draft_vocab_size,
            "aux_layers": self.config.aux_layers,
            "block_size": self.config.block_size,
            "window": max(windows),
            "window_layers": tuple(i for i, window in enumerate(windows) if window),
            "causal": "all" if all(self.config.is_causal) else "" if any(self.config.is_causal) else "none",
            "sinks": backbone.has_sinks,
            "rank": self.config.markov_rank or self.config.selector_rank,
        }

    # in a step

    def max_pending(self, max_depth: int) -> int:
        del max_depth
        return 0

    def init_state(self, target: ModelConfig, sizes: Sizes) -> Cache:
        del target
        backbone = self.config.backbone
        layers = tuple(
            Pages.zeros(sizes.num_pages, sizes.page_size, backbone.num_kv_heads, backbone.head_dim, backbone.dtype)
            for _ in range(backbone.num_layers)
        )
        return Cache(layers, sizes.num_pages, sizes.page_size)

    def admit(
        self, state: Cache, slot: jax.Array, page_row: jax.Array, num_cached: jax.Array, promise: jax.Array
    ) -> Cache:
        del slot, page_row, num_cached, promise
        return state

    def observe(self, weights: Weights, state: Cache, view: SlotView, committed: Committed, after: After) -> Cache:
        del after
        assert committed.aux_hidden_states is not None, "the target was not asked for its taps"
        own = weights.draft
        assert own is not None, "a head observes, and there is none"
        entries = model.context_kv(own.params, self.config, committed.aux_hidden_states, committed.index)
        return state.write(entries, view.page_table, committed.index, committed.is_kept)

    def catch_up(self, weights: Weights, state: Cache, view: SlotView) -> Cache:
        del weights, view
        return state

    def propose(self, weights: Weights, state: Cache, view: SlotView, tree: Tree) -> tuple[Cache, Proposal]:
        own = weights.draft
        assert own is not None, "a head proposes, and there is none"
        return state, propose.propose_tree(own, weights.target, self.config, state, view, tree)

    # its parameters

    def spec(self) -> DFlashParams:
        return model.head_spec(self.config)

    def place(self, mesh: Mesh) -> DFlashParams:
        return model.place(self.config, mesh)

    def first_params(self, target: Target, target_ids: np.ndarray, seed: int) -> DFlashParams:
        return start.first_params(self.config, target, target_ids, seed)

    # how it learns

    def num_steps(self, rollout: int) -> int:
        del rollout
        return self.config.num_slots

    def aims(self, rows: Rows, rollout: Rollout) -> Aims:
        return learn.aims(self.config, rows, rollout)

    def learn(
        self,
        params: DFlashParams,
        target: TargetParams,
        rows: Rows,
        aux_hidden_states: jax.Array,
        rollout: Rollout,
    ) -> list[jax.Array]:
        return learn.states_of_blocks(params, self.config, target, rows, aux_hidden_states, rollout)

    def output(self, params: DFlashParams) -> Taught:
        return params.taught

    def logits(self, output: Taught, target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        return model.taught_logits(output, self.config, target, hidden_states)

    def also_learned(
        self, output: Taught, target: TargetParams, hidden_states: jax.Array, logits: jax.Array, p: jax.Array
    ) -> jax.Array | None:
        del target
        return model.taught_beside(output, self.config, hidden_states, logits, p)

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        return costs.block_costs(self.config, rollout, seq_len, mesh)
