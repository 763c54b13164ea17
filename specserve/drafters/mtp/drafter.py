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
from specserve.drafters import follow, unroll
from specserve.drafters.door import Aims, Costs, Rollout, Rows
from specserve.drafters.follow import Following
from specserve.drafters.mtp import costs, learn, model, propose, start
from specserve.drafters.mtp.config import MtpConfig
from specserve.drafters.mtp.model import MtpParams
from specserve.drafters.mtp.propose import ReadyLayer
from specserve.drafters.words import KindName
from specserve.models.cache import Cache
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.speculative.drafter import After, Committed, Sizes, SlotView, Weights
from specserve.speculative.tree import Proposal, Tree


def ready(weights: Weights) -> ReadyLayer:
    """The layer beside the target that it continues."""
    own = weights.draft
    assert own is not None, "a layer proposes, and there is none"
    return ReadyLayer(own.params, own.vocab, weights.target)


@dataclass(frozen=True)
class Mtp:
    """See `door.TrainedDrafter`, which says what each of these is for."""

    config: MtpConfig
    remembers = False

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
    def max_tree_depth(self) -> int | None:
        return None

    @property
    def vocab_size(self) -> int:
        return self.config.layer.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.config.layer.vocab_size

    def with_dtype(self, dtype: str) -> "Mtp":
        return Mtp(dataclasses.replace(self.config, layer=dataclasses.replace(self.config.layer, dtype=dtype)))

    def facts(self) -> Mapping[str, Any]:
        layer = self.config.layer
        sizes = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads")
        return {name: getattr(layer, name) for name in sizes} | {"aux_layers": self.aux_layers}

    # in a step

    def max_pending(self, max_depth: int) -> int:
        return follow.max_pending(max_depth)

    def init_state(self, target: ModelConfig, sizes: Sizes) -> Following:
        cache = propose.empty_cache(self.config, num_pages=sizes.num_pages, page_size=sizes.page_size)
        return follow.init_state(cache, len(self.aux_layers), target, sizes)

    def admit(
        self, state: Following, slot: jax.Array, page_row: jax.Array, num_cached: jax.Array, promise: jax.Array
    ) -> Following:
        del promise
        return follow.admit(state, slot, page_row, num_cached)

    def observe(
        self, weights: Weights, state: Following, view: SlotView, committed: Committed, after: After
    ) -> Following:
        def extend(token_ids: jax.Array, aux: jax.Array, index: jax.Array, is_valid: jax.Array) -> Cache:
            table = view.page_table
            return propose.extend(ready(weights), self.config, state.cache, table, token_ids, aux, index, is_valid)[0]

        return follow.observe(state, view, committed, after, extend)

    def catch_up(self, weights: Weights, state: Following, view: SlotView) -> Following:
        pending = follow.pending_of(state, view)
        cache, _ = propose.consume(ready(weights), self.config, state.cache, view.page_table, view.seq_lens, pending)
        return follow.caught_up(state, view, cache)

    def propose(self, weights: Weights, state: Following, view: SlotView, tree: Tree) -> tuple[Following, Proposal]:
        return propose.propose_tree(ready(weights), self.config, state, view, tree)

    def remember(
        self, state: Following, history: jax.Array, start: jax.Array, last: jax.Array, number: jax.Array
    ) -> Following:
        del history, start, last, number
        return state

    def forget(self, state: Following) -> Following:
        return state

    # its parameters

    def spec(self) -> MtpParams:
        return model.draft_spec(self.config)

    def place(self, mesh: Mesh) -> MtpParams:
        return model.place(self.config, mesh)

    def first_params(self, target: Target, target_ids: np.ndarray, seed: int) -> MtpParams:
        del target_ids
        return start.first_params(self.config, target, seed)

    # how it learns

    def num_steps(self, rollout: int) -> int:
        return rollout

    def aims(self, rows: Rows, rollout: Rollout) -> Aims:
        return Aims(unroll.all_weights(rows, rollout.length))

    def learn(
        self,
        params: MtpParams,
        target: TargetParams,
        rows: Rows,
        aux_hidden_states: jax.Array,
        rollout: Rollout,
    ) -> list[jax.Array]:
        return unroll.by_position(learn.rollout_states(params, self.config, target, rows, aux_hidden_states, rollout))

    def output(self, params: MtpParams) -> tuple[Any, ...]:
        return params.output

    def logits(self, output: tuple[Any, ...], target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        return model.draft_logits(output, self.config, target, hidden_states)

    def also_learned(
        self, output: Any, target: TargetParams, hidden_states: jax.Array, logits: jax.Array, p: jax.Array
    ) -> None:
        del output, target, hidden_states, logits, p

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        return costs.rollout_costs(self.config, rollout, seq_len, mesh)
