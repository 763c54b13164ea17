"""Gemma 4's assistant: a small model that drafts one token after the other, and keeps nothing of a sequence but the
target's state of its last committed token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specserve.drafters.gemma_assistant import model
from specserve.drafters.gemma_assistant.config import AssistantConfig
from specserve.drafters.gemma_assistant.model import AssistantParams
from specserve.drafters.grow import best_tokens, grow_tree
from specserve.drafters.interface import Kind, TrainedDrafter
from specserve.errors import ConfigError
from specserve.kernels.gather import take_each, take_rows
from specserve.models.cache import Prefix
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.speculative.drafter import After, Committed, Sizes, SlotView, Weights
from specserve.speculative.tree import DynamicTree, Proposal, Tree


@dataclass(frozen=True)
class Assistant(TrainedDrafter):
    """See `interface.TrainedDrafter` for the meaning of each member."""

    config: AssistantConfig
    part: ClassVar[str] = "layers"

    @property
    def name(self) -> str:
        return "gemma4-assistant"

    def facts(self) -> Mapping[str, Any]:
        sizes = ("num_layers", "d_model", "d_ff", "num_heads")
        found = {name: getattr(self.shape, name) for name in sizes}
        return found | {"aux_layers": self.aux_layers, "vocab_size": self.draft_vocab_size}

    def init_state(self, target: ModelConfig, sizes: Sizes) -> jax.Array:  # [slot, target_d_model]
        return jnp.zeros((sizes.num_slots, target.d_model), target.dtype)

    def observe(self, weights: Weights, state: jax.Array, view: SlotView, committed: Committed, after: After) -> Any:
        assert committed.aux_hidden_states is not None, "the target was not asked for its taps"
        last = take_each(committed.aux_hidden_states, jnp.maximum(committed.count - 1, 0)[:, None])[:, 0]
        return state.at[view.slots].set(last.astype(state.dtype), mode="drop")

    def propose(self, weights: Weights, state: jax.Array, view: SlotView, tree: Tree) -> tuple[jax.Array, Proposal]:
        before = model.target_state(self.config, weights.target, take_rows(state, view.slots))[:, None]
        nodes = _Nodes(self.config, weights, view)
        return state, grow_tree(nodes, tree, view.root_ids, nodes.run(view.root_ids[:, None], before))

    def spec(self) -> AssistantParams:
        return model.assistant_spec(self.config)

    def output(self, params: AssistantParams) -> tuple[jax.Array]:
        return (params.embedding,)

    def logits(self, output: tuple[jax.Array], target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        raise NotImplementedError("assistants are not trained")


class _Nodes:
    """See `grow.Expander`. Every level is one pass of the assistant, [batch, k, d_model]."""

    def __init__(self, config: AssistantConfig, weights: Weights, view: SlotView) -> None:
        assert weights.draft is not None, "an assistant proposes, and there is none"
        self.config, self.weights, self.view = config, weights, view
        self.params: AssistantParams = weights.draft.params
        self.prefix = Prefix(view.read_table, view.seq_lens)

    def run(self, token_ids: jax.Array, states: jax.Array) -> jax.Array:
        cache = self.view.cache
        assert cache is not None, "an assistant reads the target's cache"
        return model.run(self.params, self.config, self.weights.target, cache, self.prefix, token_ids, states)

    def candidates(self, level: jax.Array, depth: int, top_k: int) -> tuple[jax.Array, jax.Array]:
        assert self.weights.draft is not None
        logits, view = model.assistant_logits(self.params, self.config, level), self.view
        return best_tokens(view.rows, self.weights.draft.vocab.target_ids, logits, view.seq_lens + depth, top_k)

    def descend(self, level: jax.Array, parents: jax.Array, token_ids: jax.Array, depth: int) -> jax.Array:
        return self.run(token_ids, model.handed_on(self.params, take_each(level, parents)))

    def width(self, tree: DynamicTree, depth: int) -> int:
        return tree.top_k


def _new_config(*_given: Any) -> AssistantConfig:
    raise ConfigError("an assistant is not trained here; give a published one (--draft), or train another kind")


ASSISTANT = Kind(Assistant, _new_config)
