"""EAGLE-3 behind the door of drafters (Li et al. 2025, arXiv 2503.01840): a small transformer over the target's hidden
states that runs ahead over its own, one token at a time."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.door import Costs, Rollout, Rows
from specserve.drafters.eagle3 import costs, follow, model, start, unroll
from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.eagle3.follow import Eagle3State
from specserve.drafters.eagle3.model import Eagle3Params
from specserve.drafters.eagle3.propose import Draft
from specserve.kernels.matmul import Weight
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.speculative.drafter import After, Committed, Sizes, SlotView
from specserve.speculative.tree import Proposal, Tree
from specserve.speculative.vocab import DraftVocab


@dataclass(frozen=True)
class Eagle3:
    """See `door.TrainedDrafter`, which says what each of these is for."""

    config: Eagle3Config
    name = "eagle3"
    remembers = False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def dtype(self) -> str:
        return self.config.dtype

    @property
    def d_model(self) -> int:
        return self.config.d_model

    @property
    def max_len(self) -> int:
        return self.config.max_len

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    def with_dtype(self, dtype: str) -> "Eagle3":
        return Eagle3(dataclasses.replace(self.config, dtype=dtype))

    def facts(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self.config) | {"vocab_size": self.config.draft_vocab_size}

    # in a step

    def max_pending(self, max_depth: int) -> int:
        return follow.max_pending(max_depth)

    def init_state(self, target: ModelConfig, sizes: Sizes) -> Eagle3State:
        return follow.init_state(self.config, target, sizes)

    def admit(
        self,
        state: Eagle3State,
        slot: jax.Array,
        page_row: jax.Array,
        num_cached: jax.Array,
        promise: jax.Array,
    ) -> Eagle3State:
        del promise
        return follow.admit(state, slot, page_row, num_cached)

    def observe(
        self, weights: Draft, state: Eagle3State, view: SlotView, committed: Committed, after: After
    ) -> Eagle3State:
        if after == "prompt":
            return follow.observe_prompt(weights, self.config, state, view, committed)
        if after == "plain":
            return follow.observe_plain(state, view, committed)
        return follow.observe_tree(state, view, committed)

    def catch_up(self, weights: Draft, state: Eagle3State, view: SlotView) -> Eagle3State:
        return follow.catch_up(weights, self.config, state, view)

    def propose(self, weights: Draft, state: Eagle3State, view: SlotView, tree: Tree) -> tuple[Eagle3State, Proposal]:
        return follow.propose_tree(weights, self.config, state, view, tree)

    def remember(
        self, state: Eagle3State, history: jax.Array, start: jax.Array, last: jax.Array, number: jax.Array
    ) -> Eagle3State:
        del history, start, last, number
        return state

    def forget(self, state: Eagle3State) -> Eagle3State:
        return state

    # its parameters

    def spec(self) -> Eagle3Params:
        return model.draft_spec(self.config)

    def place(self, mesh: Mesh) -> Eagle3Params:
        return model.place(self.config, mesh)

    def first_params(self, target: Target, target_ids: np.ndarray, seed: int) -> Eagle3Params:
        return start.first_params(self.config, target, target_ids, seed)

    def weights(self, params: Eagle3Params, target: TargetParams, target_ids: jax.Array) -> Draft:
        return Draft(params, DraftVocab(target_ids), model.token_embedding(params, target.embedding))

    # how it learns

    def loss_weights(self, rows: Rows, length: int) -> jax.Array:
        return unroll.all_weights(rows, length)

    def learn(
        self,
        params: Eagle3Params,
        target: TargetParams,
        rows: Rows,
        aux_hidden_states: jax.Array,
        rollout: Rollout,
    ) -> list[jax.Array]:
        embedding = model.token_embedding(params, target.embedding)
        states = unroll.rollout_states(params, self.config, embedding, rows, aux_hidden_states, rollout)
        return unroll.by_position(states)

    def output(self, params: Eagle3Params) -> tuple[jax.Array, Weight]:
        return params.output

    def logits(self, output: tuple[jax.Array, Weight], hidden_states: jax.Array) -> jax.Array:
        return model.draft_logits(output, self.config, hidden_states)

    def costs(self, rollout: Rollout, seq_len: int) -> Costs:
        return costs.rollout_costs(self.config, rollout, seq_len)
