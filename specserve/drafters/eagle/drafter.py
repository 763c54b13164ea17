"""What the drafters on an EAGLE-3 network are alike in behind the door: their sizes, and how they follow sequences."""

from typing import Any

import jax

from specserve.drafters import follow
from specserve.drafters.eagle.config import Eagle3Config
from specserve.drafters.eagle.entries import ReadyHead, empty_cache, extend
from specserve.drafters.eagle.model import Eagle3Params, token_embedding
from specserve.drafters.follow import Following
from specserve.models.cache import Cache
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.speculative.drafter import After, Committed, Sizes, SlotView, Weights


class OnEagle:
    """The part of `door.TrainedDrafter` that follows from the network alone. Its state is `follow.Following`."""

    remembers = False

    @property
    def network(self) -> Eagle3Config:
        """The shape of the network."""
        raise NotImplementedError

    def network_params(self, params: Any) -> Eagle3Params:
        """The network's part of the drafter's parameters."""
        raise NotImplementedError

    def ready(self, weights: Weights) -> ReadyHead:
        """The network beside what it shares of the target's."""
        own = weights.draft
        assert own is not None, "a head proposes, and there is none"
        params = self.network_params(own.params)
        return ReadyHead(params, own.vocab, token_embedding(params, weights.target.embedding))

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.network.aux_layers

    @property
    def dtype(self) -> str:
        return self.network.dtype

    @property
    def d_model(self) -> int:
        return self.network.d_model

    @property
    def max_len(self) -> int:
        return self.network.max_len

    @property
    def vocab_size(self) -> int:
        return self.network.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.network.draft_vocab_size

    def max_pending(self, max_depth: int) -> int:
        return follow.max_pending(max_depth)

    def init_state(self, target: ModelConfig, sizes: Sizes) -> Following:
        cache = empty_cache(self.network, num_pages=sizes.num_pages, page_size=sizes.page_size)
        return follow.init_state(cache, len(self.aux_layers), target, sizes)

    def admit(
        self,
        state: Following,
        slot: jax.Array,
        page_row: jax.Array,
        num_cached: jax.Array,
        promise: jax.Array,
    ) -> Following:
        del promise
        return follow.admit(state, slot, page_row, num_cached)

    def observe(
        self, weights: Weights, state: Following, view: SlotView, committed: Committed, after: After
    ) -> Following:
        def write(token_ids: jax.Array, aux: jax.Array, index: jax.Array, is_valid: jax.Array) -> Cache:
            tables = view.page_table, view.read_table
            return extend(self.ready(weights), self.network, state.cache, *tables, token_ids, aux, index, is_valid)[0]

        return follow.observe(state, view, committed, after, write)

    def catch_up(self, weights: Weights, state: Following, view: SlotView) -> Following:
        pending = follow.pending_of(state, view)
        index, is_valid = follow.places(view.seq_lens, pending)
        cache, *_ = extend(
            self.ready(weights),
            self.network,
            state.cache,
            view.page_table,
            view.page_table,
            pending.token_ids,
            pending.aux_hidden_states,
            index,
            is_valid,
        )
        return follow.caught_up(state, view, cache)

    def remember(
        self, state: Following, history: jax.Array, start: jax.Array, last: jax.Array, number: jax.Array
    ) -> Following:
        del history, start, last, number
        return state

    def forget(self, state: Following) -> Following:
        return state

    def also_learned(
        self, output: Any, target: TargetParams, hidden_states: jax.Array, logits: jax.Array, p: jax.Array
    ) -> None:
        del output, target, hidden_states, logits, p
