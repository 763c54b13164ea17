"""A drafter of two matrices: the next token follows from a token and from the target's state before the root."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specserve.checkpoints.load import Target
from specserve.drafters.grow import Marginals, best_tokens, grow_tree
from specserve.drafters.interface import Kind, TrainedDrafter
from specserve.drafters.learning import Rollout, Rows, by_position, shift
from specserve.kernels.gather import take_each, take_rows
from specserve.kernels.matmul import matmul_float32
from specserve.models.config import ModelConfig
from specserve.models.layers import linear
from specserve.models.params import init_params, matrix
from specserve.models.target import TargetParams, head_columns
from specserve.pytree import pytree
from specserve.speculative.drafter import After, Committed, Sizes, SlotView, Weights
from specserve.speculative.tree import Proposal, Tree


@dataclass(frozen=True)
class ToyConfig:
    d_model: int
    vocab_size: int
    draft_vocab_size: int
    max_len: int
    aux_layers: tuple[int, ...]
    dtype: str = "float32"


@pytree
class ToyParams:
    fc: Any  # [d_model, d_model], on the target's state
    head: Any  # [d_model, draft_vocab]


def states(params: ToyParams, target: TargetParams, token_ids: jax.Array, before: jax.Array) -> jax.Array:
    """The states after tokens [batch, n], from the target's states [batch, n, d_model]."""
    return jnp.tanh(target.embedding[token_ids].astype(before.dtype) + linear(before, params.fc))


class Nodes(Marginals):
    """See `grow.Expander`. A level is its tokens [batch, k], as in `Marginals`, and candidates follow from them."""

    def __init__(self, weights: Weights, view: SlotView, before: jax.Array) -> None:
        self.weights, self.view, self.before = weights, view, before  # [batch, 1, d_model]

    def candidates(self, level: jax.Array, depth: int, top_k: int) -> tuple[jax.Array, jax.Array]:
        draft, view = self.weights.draft, self.view
        logits = matmul_float32(states(draft.params, self.weights.target, level, self.before), draft.params.head)
        return best_tokens(view.rows, draft.vocab.target_ids, logits, view.seq_lens + depth, top_k)


@dataclass(frozen=True)
class Toy(TrainedDrafter):
    """Its state is the target's state of each slot's last committed token, [slot, d_model]."""

    config: ToyConfig
    name = "toy"

    def init_state(self, target: ModelConfig, sizes: Sizes) -> jax.Array:
        return jnp.zeros((sizes.num_slots, target.d_model), self.dtype)

    def observe(self, weights: Weights, state: Any, view: SlotView, committed: Committed, after: After) -> jax.Array:
        last = take_each(committed.aux_hidden_states, jnp.maximum(committed.count - 1, 0)[:, None])[:, 0]
        return state.at[view.slots].set(last.astype(state.dtype), mode="drop")

    def propose(self, weights: Weights, state: jax.Array, view: SlotView, tree: Tree) -> tuple[jax.Array, Proposal]:
        nodes = Nodes(weights, view, take_rows(state, view.slots)[:, None])
        return state, grow_tree(nodes, tree, view.root_ids, view.root_ids[:, None])

    def spec(self) -> ToyParams:
        fc = matrix("fc.weight", self.d_model, self.d_model, (None, "embed"))
        return ToyParams(fc, matrix("lm_head.weight", self.d_model, self.draft_vocab_size, ("embed", "vocab")))

    def init_params(self, target: Target, target_ids: Any, seed: int) -> ToyParams:
        drawn: ToyParams = init_params(self.spec(), jax.random.key(seed), self.dtype)
        return ToyParams(drawn.fc, head_columns(target.params, jnp.asarray(target_ids)).astype(self.dtype))

    def learn(
        self, params: ToyParams, target: TargetParams, rows: Rows, aux_hidden_states: jax.Array, rollout: Rollout
    ) -> list[jax.Array]:
        each = (shift(rows.token_ids, 1 + step) for step in range(rollout.length))
        return by_position([states(params, target, token_ids, aux_hidden_states) for token_ids in each])

    def output(self, params: ToyParams) -> tuple[jax.Array]:
        return (params.head,)

    def logits(self, output: tuple[jax.Array], target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        return matmul_float32(hidden_states, output[0])


def new_config(settings: Any, target: ModelConfig, draft_vocab_size: int) -> ToyConfig:
    return ToyConfig(target.d_model, target.vocab_size, draft_vocab_size, target.max_len, (target.num_layers - 1,))


TOY = Kind(Toy, new_config)
