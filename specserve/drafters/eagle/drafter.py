"""The common part of the drafters on an EAGLE-3 network, behind the door: their sizes, and how they follow
sequences."""

from typing import Any

import jax

from specserve.drafters.eagle.config import Eagle3Config
from specserve.drafters.eagle.entries import ReadyHead, empty_cache, extend
from specserve.drafters.eagle.model import Eagle3Params, token_embedding
from specserve.drafters.follow import FollowingDrafter, Tables
from specserve.models.cache import Cache
from specserve.speculative.drafter import Sizes, Weights


class OnEagle(FollowingDrafter):
    """The part of `door.TrainedDrafter` that follows from the network alone. Its state is `follow.Following`."""

    @property
    def network(self) -> Eagle3Config:
        """The shape of the network."""
        raise NotImplementedError

    def network_params(self, params: Any) -> Eagle3Params:
        """The network's part of the drafter's parameters."""
        raise NotImplementedError

    def ready(self, weights: Weights) -> ReadyHead:
        """Return the network beside what it shares of the target's."""
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

    def empty_cache(self, sizes: Sizes) -> Cache:
        return empty_cache(self.network, num_pages=sizes.num_pages, page_size=sizes.page_size)

    def write(self, weights: Weights, cache: Cache, tables: Tables, *entries: jax.Array) -> Cache:
        return extend(self.ready(weights), self.network, cache, *tables, *entries)[0]
