"""P-EAGLE behind the door of drafters (arXiv 2602.01469): an EAGLE-3 network that foresees all of its tokens in one
pass, the further ones through masked slots."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.door import Aims, Costs, Rollout, Rows
from specserve.drafters.eagle.config import Eagle3Config
from specserve.drafters.eagle.drafter import OnEagle
from specserve.drafters.eagle.model import Eagle3Params, draft_logits
from specserve.drafters.follow import Following
from specserve.drafters.peagle import costs, learn, model, propose, start
from specserve.drafters.peagle.config import PEagleConfig
from specserve.drafters.peagle.model import PEagleParams
from specserve.drafters.words import KindName
from specserve.kernels.matmul import Weight
from specserve.models.target import TargetParams
from specserve.speculative.drafter import SlotView, Weights
from specserve.speculative.tree import Proposal, Tree


@dataclass(frozen=True)
class PEagle(OnEagle):
    """See `door.TrainedDrafter`, which says what each of these is for."""

    config: PEagleConfig

    @property
    def name(self) -> KindName:
        return "p-eagle"

    @property
    def network(self) -> Eagle3Config:
        return self.config.network

    def network_params(self, params: PEagleParams) -> Eagle3Params:
        return params.network

    @property
    def max_tree_depth(self) -> int | None:
        return self.config.num_slots

    def with_dtype(self, dtype: str) -> "PEagle":
        return PEagle(dataclasses.replace(self.config, network=dataclasses.replace(self.network, dtype=dtype)))

    def facts(self) -> Mapping[str, Any]:
        shape = dataclasses.asdict(self.network) | {"vocab_size": self.network.draft_vocab_size}
        return shape | {"block_size": self.config.num_slots, "mask_token": self.config.mask_token_id}

    def propose(self, weights: Weights, state: Following, view: SlotView, tree: Tree) -> tuple[Following, Proposal]:
        draft, own = self.ready(weights), weights.draft
        assert own is not None, "a head proposes, and there is none"
        return propose.propose_tree(draft, own.params, self.config, state, view, tree)

    # its parameters

    def spec(self) -> PEagleParams:
        return model.head_spec(self.config)

    def place(self, mesh: Mesh) -> PEagleParams:
        return model.place(self.config, mesh)

    def first_params(self, target: Target, target_ids: np.ndarray, seed: int) -> PEagleParams:
        return start.first_params(self.config, target, target_ids, seed)

    # how it learns

    def num_steps(self, rollout: int) -> int:
        del rollout
        return self.config.num_slots

    def aims(self, rows: Rows, rollout: Rollout) -> Aims:
        del rollout
        return learn.aims(self.config, rows)

    def learn(
        self,
        params: PEagleParams,
        target: TargetParams,
        rows: Rows,
        aux_hidden_states: jax.Array,
        rollout: Rollout,
    ) -> list[jax.Array]:
        return learn.states_of_slots(params, self.config, target, rows, aux_hidden_states, rollout)

    def output(self, params: PEagleParams) -> tuple[jax.Array, Weight]:
        return params.output

    def logits(self, output: tuple[jax.Array, Weight], target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        del target
        return draft_logits(output, self.network, hidden_states)

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        return costs.slot_costs(self.config, rollout, seq_len, mesh)
