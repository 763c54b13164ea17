"""Multi-token prediction behind the door of drafters (DeepSeek-V3, arXiv 2412.19437): the layer that a target's own
checkpoint carries after its last one, run again over its own states, one token at a time."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.door import Costs, Rollout, Rows
from specserve.drafters.follow import Following, FollowingDrafter, Tables
from specserve.drafters.mtp import costs, learn, model, propose, start
from specserve.drafters.mtp.config import MtpConfig
from specserve.drafters.mtp.model import MtpParams
from specserve.drafters.mtp.propose import ReadyLayer
from specserve.drafters.unroll import UnrolledDrafter, by_position
from specserve.drafters.words import KindName
from specserve.models.cache import Cache
from specserve.models.target import TargetParams
from specserve.speculative.drafter import Sizes, SlotView, Weights
from specserve.speculative.tree import Proposal, Tree


def ready(weights: Weights) -> ReadyLayer:
    """The layer beside the target that it continues."""
    own = weights.draft
    assert own is not None, "a layer proposes, and there is none"
    return ReadyLayer(own.params, own.vocab, weights.target)


@dataclass(frozen=True)
class Mtp(UnrolledDrafter, FollowingDrafter):
    """See `door.TrainedDrafter`, which says what each of these is for."""

    config: MtpConfig

    @property
    def name(self) -> KindName:
        return "mtp"

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (self.config.num_target_layers - 1,)

    @property
    def dtype(self) -> str:
        return self.config.layer.dtype

    @property
    def d_model(self) -> int:
        return self.config.layer.d_model

    @property
    def max_len(self) -> int:
        return self.config.layer.max_len

    @property
    def vocab_size(self) -> int:
        return self.config.layer.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    def with_dtype(self, dtype: str) -> "Mtp":
        return Mtp(dataclasses.replace(self.config, layer=dataclasses.replace(self.config.layer, dtype=dtype)))

    def facts(self) -> Mapping[str, Any]:
        layer = self.config.layer
        sizes = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads")
        return {name: getattr(layer, name) for name in sizes} | {
            "aux_layers": self.aux_layers,
            "vocab_size": self.draft_vocab_size,
        }

    # in a step

    def empty_cache(self, sizes: Sizes) -> Cache:
        return propose.empty_cache(self.config, num_pages=sizes.num_pages, page_size=sizes.page_size)

    def write(self, weights: Weights, cache: Cache, tables: Tables, *entries: jax.Array) -> Cache:
        return propose.extend(ready(weights), self.config, cache, tables[0], *entries)[0]

    def propose(self, weights: Weights, state: Following, view: SlotView, tree: Tree) -> tuple[Following, Proposal]:
        return propose.propose_tree(ready(weights), self.config, state, view, tree)

    # its parameters

    def spec(self) -> MtpParams:
        return model.draft_spec(self.config)

    def place(self, mesh: Mesh) -> MtpParams:
        return model.place(self.config, mesh)

    def first_params(self, target: Target, target_ids: np.ndarray, seed: int) -> MtpParams:
        return start.first_params(self.config, target, target_ids, seed)

    # how it learns

    def learn(
        self,
        params: MtpParams,
        target: TargetParams,
        rows: Rows,
        aux_hidden_states: jax.Array,
        rollout: Rollout,
    ) -> list[jax.Array]:
        return by_position(learn.rollout_states(params, self.config, target, rows, aux_hidden_states, rollout))

    def output(self, params: MtpParams) -> tuple[Any, ...]:
        return params.output

    def logits(self, output: tuple[Any, ...], target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        return model.draft_logits(output, self.config, target, hidden_states)

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        return costs.rollout_costs(self.config, rollout, seq_len, mesh)
