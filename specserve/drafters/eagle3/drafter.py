"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a small transformer over the target's hidden states that runs ahead over
its own, one token at a time. `OnEagle` is the part of a drafter that follows from the network alone."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.eagle3 import start
from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.eagle3.model import (
    Eagle3Params,
    Output,
    ReadyHead,
    attend_by_window,
    draft_forward,
    draft_inputs,
    draft_logits,
    draft_spec,
    draft_states,
    empty_cache,
    extend,
    token_embedding,
)
from specserve.drafters.eagle3.rollout import rollout_costs, rollout_states
from specserve.drafters.follow import FIRST_ENTRY, Following, FollowingDrafter, Pending, Tables, pending_of, places
from specserve.drafters.grow import best_tokens, grow_tree
from specserve.drafters.interface import Kind
from specserve.drafters.layers import facts_of, windows_of
from specserve.drafters.learning import Costs, Rollout, Rows, by_position
from specserve.errors import ConfigError
from specserve.kernels.gather import take_each
from specserve.models.cache import Cache, Prefix
from specserve.models.mixers.attention import KV
from specserve.models.target import TargetParams
from specserve.pytree import pytree
from specserve.speculative.drafter import Sizes, SlotView, Weights
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.tree import DynamicTree, Proposal, Tree


class OnEagle(FollowingDrafter):
    """A drafter on an EAGLE-3 network. Its state is `follow.Following`."""

    @property
    def shape(self) -> Eagle3Config:
        return super().shape

    def facts(self) -> Mapping[str, Any]:
        own = ("aux_layers", "norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")
        return {
            **facts_of(self.shape),
            "vocab_size": self.draft_vocab_size,
            "qk_norm": bool(self.shape.qk_norm),
            **{name: getattr(self.shape, name) for name in own},
        }

    def network_params(self, params: Any) -> Eagle3Params:
        """Return the network's part of the drafter's parameters."""
        raise NotImplementedError

    def ready(self, weights: Weights) -> ReadyHead:
        """Return the network beside what it shares of the target's."""
        own = weights.draft
        assert own is not None, "a head proposes, and there is none"
        return ReadyHead(self.network_params(own.params), own.vocab, weights.target)

    def empty_cache(self, sizes: Sizes) -> Cache:
        return empty_cache(self.shape, **sizes.of_pages)

    def write(self, weights: Weights, cache: Cache, tables: Tables, *entries: jax.Array) -> Cache:
        return extend(self.ready(weights), self.shape, cache, tables, *entries)[0]

    def scale_output(self, params: Any, scale: jax.Array) -> Any:
        network = self.network_params(params)
        network = dataclasses.replace(network, norm=network.norm * scale.astype(network.norm.dtype))
        return dataclasses.replace(params, **{self.part: network}) if self.part else network

    def logits(self, output: Output, target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        return draft_logits(output, self.shape, hidden_states, target)


@dataclass(frozen=True)
class Eagle3(OnEagle):
    """See `interface.TrainedDrafter` for the meaning of each member."""

    config: Eagle3Config

    @property
    def name(self) -> str:
        return "eagle3"

    def network_params(self, params: Eagle3Params) -> Eagle3Params:
        return params

    def propose(self, weights: Weights, state: Following, view: SlotView, tree: Tree) -> tuple[Following, Proposal]:
        draft, pending = self.ready(weights), pending_of(state, view, tree.depth)
        tables = view.page_table, view.read_table
        cache, hidden = consume(draft, self.config, state.cache, tables, view.seq_lens, pending)
        prefix = Prefix(view.read_table, view.seq_lens + 1, FIRST_ENTRY)
        proposal = propose(draft, self.config, tree, cache, prefix, view.root_ids, hidden, view.rows)
        return dataclasses.replace(state, cache=cache), proposal

    def spec(self) -> Eagle3Params:
        return draft_spec(self.config)

    def num_steps(self, rollout: int) -> int:
        if short := [window for window in windows_of(self.config) if 0 < window < rollout]:
            raise ConfigError(
                f"a rollout of {rollout} steps leaves the window of {short[0]} tokens; give a longer draft.window, or "
                "a shorter train.rollout"
            )
        return rollout

    def init_params(self, target: Target, target_ids: np.ndarray, seed: int) -> Eagle3Params:
        return start.initial_params(self.config, target, target_ids, seed)

    def fit_states(self, params: Eagle3Params, aux_hidden_states: jax.Array, is_token: jax.Array) -> Eagle3Params:
        return start.fit_states(params, self.config, aux_hidden_states, is_token)

    def learn(
        self, params: Eagle3Params, target: TargetParams, rows: Rows, aux_hidden_states: jax.Array, rollout: Rollout
    ) -> list[jax.Array]:
        embedding = token_embedding(params, target.embedding)
        return by_position(rollout_states(params, self.config, embedding, rows, aux_hidden_states, rollout))

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        return rollout_costs(self.config, self.spec_on(mesh), rollout, seq_len, mesh)


EAGLE3 = Kind(Eagle3, start.new_config)


def consume(
    draft: ReadyHead,
    config: Eagle3Config,
    pages: Cache,
    tables: Tables,
    seq_lens: jax.Array,  # [batch], the root's position
    pending: Pending,
) -> tuple[Cache, jax.Array]:  # and the recurrent state at the root [batch, 1, d_model]
    """Consume the pending tokens: write their draft entries, and run the last layer for the last of them only."""
    final = config.num_layers - 1
    index, is_valid = places(seq_lens, pending)
    # Write first and attend to the written pages: reading the old ones as well would make XLA copy them.
    entries = pending.token_ids, pending.aux_hidden_states, index, is_valid
    pages, top, kv = extend(draft, config, pages, tables, *entries)
    last = jnp.maximum(pending.count - 1, 0)[:, None]
    root, (k, v) = jax.tree.map(lambda x: take_each(x, last), (top, kv))
    seen = pages.attended(final, Prefix(tables[1], seq_lens, FIRST_ENTRY))
    see_self, at_root = jnp.ones((1, 1, 1), bool), seq_lens[:, None]

    def see(q: jax.Array) -> jax.Array:
        return attend_by_window(config, final, q, k, v, see_self, seen, at_root)

    return pages, draft_states(draft.params, config, root, see)


def propose(
    draft: ReadyHead,
    config: Eagle3Config,
    tree: Tree,
    pages: Cache,
    prefix: Prefix,  # the head's entries up to the root's own
    root_ids: jax.Array,  # [batch]
    hidden: jax.Array,  # [batch, 1, d_model], from `consume`
    rows: SamplerRows,
) -> Proposal:
    """Grow a tree below the root. Nothing is written: the draft's entries of proposed nodes are used in this call
    alone."""
    return grow_tree(_Expander(draft, config, pages, prefix, rows), tree, root_ids, _Level.of_root(config, hidden))


@pytree
class _Level:
    """The nodes whose children are drawn next, and the draft's own entries of all nodes that have run so far."""

    hidden: jax.Array  # [batch, k, d_model], the recurrent state of each node, which its children consume
    kv: tuple[KV, ...]  # layer by layer: [batch, seen, kv_head, head_dim]
    position_ids: jax.Array  # [batch, seen] int32, of those entries
    sees: jax.Array  # [batch, k, seen], which of those each node's children see: its own, and its ancestors'

    @classmethod
    def of_root(cls, config: Eagle3Config, hidden: jax.Array) -> "_Level":
        """Return the level that is the root alone, [batch, 1, d_model], whose own entry is in the pages."""
        batch = hidden.shape[0]
        num_heads, *widths = config.entry_dims
        k, v = (jnp.zeros((batch, 0, num_heads, width), config.dtype) for width in widths)
        none = jnp.zeros((batch, 0), jnp.int32)
        return cls(hidden, ((k, v),) * config.num_layers, none, jnp.zeros((batch, 1, 0), bool))


class _Expander:
    """See `grow.Expander`. Every level is one pass of the head."""

    def __init__(self, draft: ReadyHead, config: Eagle3Config, pages: Cache, prefix: Prefix, rows: SamplerRows) -> None:
        self.draft, self.config, self.pages, self.prefix, self.rows = draft, config, pages, prefix, rows

    def candidates(self, level: _Level, depth: int, top_k: int) -> tuple[jax.Array, jax.Array]:
        logits = draft_logits(self.draft.params.output, self.config, level.hidden, self.draft.target)
        return best_tokens(self.rows, self.draft.vocab.target_ids, logits, self.prefix.lens + depth - 1, top_k)

    def descend(self, level: _Level, parents: jax.Array, token_ids: jax.Array, depth: int) -> _Level:
        position_ids = jnp.broadcast_to((self.prefix.lens + depth - 1)[:, None], token_ids.shape)
        inputs = draft_inputs(
            self.draft.params,
            self.config,
            self.draft.embedding,
            token_ids,
            take_each(level.hidden, parents),
            position_ids,
        )
        batch, k = token_ids.shape
        own = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
        sees = jnp.concatenate([take_each(level.sees, parents), own], axis=2)
        positions = jnp.concatenate([level.position_ids, position_ids], axis=1)
        grown = list(level.kv)

        def see_ancestors(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            above_k, above_v = level.kv[i]
            grown[i] = jnp.concatenate([above_k, k], axis=1), jnp.concatenate([above_v, v], axis=1)
            seen = self.pages.attended(i, self.prefix)
            return attend_by_window(self.config, i, q, *grown[i], sees, seen, positions)

        hidden, _ = draft_forward(self.draft.params, self.config, inputs, see_ancestors)
        return _Level(hidden, tuple(grown), positions, sees)

    def width(self, tree: DynamicTree, depth: int) -> int:
        return tree.top_k
