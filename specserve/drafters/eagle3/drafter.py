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
from specserve.drafters.eagle import model, start
from specserve.drafters.eagle.config import Eagle3Config
from specserve.drafters.eagle.drafter import OnEagle
from specserve.drafters.eagle.model import Eagle3Params
from specserve.drafters.eagle3 import costs, learn, propose
from specserve.drafters.follow import Following
from specserve.drafters.unroll import UnrolledDrafter, by_position
from specserve.drafters.words import KindName
from specserve.kernels.matmul import Weight
from specserve.models.target import TargetParams
from specserve.speculative.drafter import SlotView, Weights
from specserve.speculative.tree import Proposal, Tree


@dataclass(frozen=True)
class Eagle3(UnrolledDrafter, OnEagle):
    """See `door.TrainedDrafter`, which says what each of these is for."""

    config: Eagle3Config

    @property
    def name(self) -> KindName:
        return "eagle3"

    @property
    def network(self) -> Eagle3Config:
        return self.config

    def network_params(self, params: Eagle3Params) -> Eagle3Params:
        return params

    def with_dtype(self, dtype: str) -> "Eagle3":
        return Eagle3(dataclasses.replace(self.config, dtype=dtype))

    def facts(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self.config) | {"vocab_size": self.config.draft_vocab_size}

    def propose(self, weights: Weights, state: Following, view: SlotView, tree: Tree) -> tuple[Following, Proposal]:
        return propose.propose_tree(self.ready(weights), self.config, state, view, tree)

    # its parameters

    def spec(self) -> Eagle3Params:
        return model.draft_spec(self.config)

    def place(self, mesh: Mesh) -> Eagle3Params:
        return model.place(self.config, mesh)

    def first_params(self, target: Target, target_ids: np.ndarray, seed: int) -> Eagle3Params:
        return start.first_params(self.config, target, target_ids, seed)

    # how it learns

    def learn(
        self,
        params: Eagle3Params,
        target: TargetParams,
        rows: Rows,
        aux_hidden_states: jax.Array,
        rollout: Rollout,
    ) -> list[jax.Array]:
        embedding = model.token_embedding(params, target.embedding)
        states = learn.rollout_states(params, self.config, embedding, rows, aux_hidden_states, rollout)
        return by_position(states)

    def output(self, params: Eagle3Params) -> tuple[jax.Array, Weight]:
        return params.output

    def logits(self, output: tuple[jax.Array, Weight], target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        del target
        return model.draft_logits(output, self.config, hidden_states)

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        return costs.rollout_costs(self.config, rollout, seq_len, mesh)
