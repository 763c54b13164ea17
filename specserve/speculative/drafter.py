"""The interface between a step and a drafter, which proposes the step's tree.

A drafter is static, like a config: it is hashable, and compared when a program is compiled. Its arrays are elsewhere:
its parameters in `Weights.draft`, its state of the sequences in `SlotState.draft`. Each method takes both and returns
the new state. Which pytrees they are is up to the drafter. `specserve.drafters` has a folder for each kind.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specserve.models.cache import Cache, WindowSizes
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.pytree import pytree, static
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.tree import Proposal, Tree
from specserve.speculative.vocab import DraftVocab

HEAD = 0  # `Proposal.source` of what a trained head proposes; other drafters number theirs from 1


@dataclass(frozen=True)
class Sizes:
    """The sizes of the arrays that hold the state of all slots."""

    num_slots: int
    num_pages: int  # of all sequences together
    page_size: int  # tokens
    max_pages: int  # of one sequence
    max_depth: int  # of any tree that runs on the state
    num_ranks: int = 1  # data ranks
    windows: WindowSizes = ()  # see `Cache.of_layers`

    @property
    def of_pages(self) -> dict[str, Any]:
        """The sizes of a cache of pages, as `Cache.of_layers` takes them."""
        names = "num_pages", "page_size", "windows", "num_ranks"
        return {name: getattr(self, name) for name in names}


@pytree
class SlotView:
    """The state's rows for the slots in a step. A padded slot reads as an empty sequence whose pages are out of range;
    what is written to its index in `slots` must be dropped."""

    slots: jax.Array  # [batch] int32, past the last slot where padded
    page_table: jax.Array  # [batch, max_pages] int32, for writing
    read_table: jax.Array  # [batch, width] int32, the part that attention reads
    seq_lens: jax.Array  # [batch] int32, index of the root
    root_ids: jax.Array  # [batch] int32, the last emitted token, which the target has not consumed yet
    history: jax.Array  # [batch, max_pages * page_size] int32, the sequence up to the root
    rows: SamplerRows  # [batch]
    cache: Cache | None = None  # the target's, of all sequences, as the step found it
    num_slots: int | None = static(default=None)  # of the state; None: every slot has a sequence

    def live(self, is_valid: jax.Array) -> jax.Array:
        """Return which tokens of each slot are computed ([batch, n] bool): of a sequence those that are valid
        ([batch or 1, n] bool); of the slot past the last one, which pads batches, none; and all of the next one, which
        stands for a sequence where steps are timed."""
        is_valid = jnp.broadcast_to(is_valid, (len(self.slots), is_valid.shape[1]))
        if self.num_slots is None:
            return is_valid
        slots = self.slots[:, None]
        return jnp.where(slots < self.num_slots, is_valid, slots > self.num_slots)


@pytree
class Committed:
    """The tokens that a step has added to the target's cache: for each sequence, the first `count` of n consecutive
    positions."""

    index: jax.Array  # [batch, n] int32, the places
    token_ids: jax.Array  # [batch, n] int32, the tokens there
    next_ids: jax.Array  # [batch, n] int32, the token that follows each; the one after the last is the new root
    aux_hidden_states: jax.Array | None  # [batch, n, taps * d_model], of the tapped layers; None without taps
    is_kept: jax.Array  # [batch, n] bool, the first `count`; known only once the target has run, see `step._has_run`
    count: jax.Array  # [batch] int32
    n_accepted: jax.Array  # [batch] int32, proposed tokens among the emitted ones
    source: jax.Array  # [batch] int32, which drafter proposed


@pytree
class DraftWeights:
    """A head as a step takes it."""

    params: Any  # the drafter's own
    vocab: DraftVocab  # the tokens that it can propose


@pytree
class Weights:
    """The parameters of a step. A drafter sees those of the target too, of which heads share the embedding or the
    output head."""

    target: TargetParams
    draft: DraftWeights | None  # None: no head proposes
    adapters: Any | None = None  # of the target, as `models.adapters.Adapters`; None: rows are the target's alone


After = Literal["prompt", "plain"] | Tree  # committed tokens are a chunk, a plain step's token, or a path of a tree


class Drafter:
    """A drafter proposes trees. Nothing that it does can change a token, because every proposal is verified.

    A kind overrides what it needs. A drafter that overrides nothing but `propose` reads no hidden states of the target,
    has no state, and is never behind.
    """

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers (0-based) whose outputs `observe` gets."""
        return ()

    @property
    def max_tree_depth(self) -> int | None:
        """The depth that its trees can have at most. None means no limit."""
        return None

    @property
    def remembers(self) -> bool:
        """Return whether `remember` must be called when an answer is finished."""
        return False

    def max_pending(self, max_depth: int) -> int:
        """Return how many committed tokens may be pending, which means not consumed by the drafter yet, where trees
        are at most `max_depth` deep. Plain steps may go on without `catch_up` until there are as many. 0 means that
        the drafter is never behind. A growing sequence's last so many entries are not shared with other sequences."""
        return 0

    def init_state(self, target: ModelConfig, sizes: Sizes) -> Any:
        """Make the drafter's empty state: a pytree of arrays by slot, by page, or in a `Cache` under the target's page
        table."""
        return None

    def admit(
        self,
        state: Any,
        slot: jax.Array,  # [] int32
        page_row: jax.Array,  # [max_pages] int32
        num_cached: jax.Array,  # [] int32, entries that are in its pages already, whole pages
        promise: jax.Array,  # [] float32, accepted tokens per step that its head promises
    ) -> Any:
        """Begin a sequence in a slot. Where its prefix is cached, the pages hold what this drafter wrote for it.
        Anything else that it needs to go on from there it must have stored by page, so that acceptance after a hit is
        that of a miss."""
        return state

    def resume(self, state: Any, slot: jax.Array, page_row: jax.Array, num_read: jax.Array, promise: jax.Array) -> Any:
        """Go on in a sequence that the drafter has left: `observe` gets what it was not shown, as chunks of a prompt.
        What it has read is in the pages, as for `admit`, whose arguments these are."""
        return self.admit(state, slot, page_row, num_read, promise)

    def observe(self, weights: Weights, state: Any, view: SlotView, committed: Committed, after: After) -> Any:
        """Take note of committed tokens: a chunk of a prompt, the token of a plain step, or the accepted path of the
        tree that the drafter proposed in this step. `view` shows the state before the step."""
        return state

    def catch_up(self, weights: Weights, state: Any, view: SlotView) -> Any:
        """Consume all tokens that plain steps have left pending."""
        return state

    def propose(self, weights: Weights, state: Any, view: SlotView, tree: Tree) -> tuple[Any, Proposal]:
        """Propose a tree below each root. Pending tokens, at most `tree.depth` + 1, are consumed first."""
        raise NotImplementedError

    def remember(self, state: Any, history: jax.Array, start: jax.Array, last: jax.Array, number: jax.Array) -> Any:
        """Keep the `number`-th finished answer: tokens `start` to `last` of `history` [length]. `start`, `last` and
        `number` are [] int32."""
        return state

    def forget(self, state: Any) -> Any:
        """Return the state without any answer that `remember` has kept."""
        return state


def choose(condition: jax.Array, chosen: Any, other: Any) -> Any:
    """Select row by row: the pytree `chosen` where `condition` [batch] holds, else `other`."""
    return jax.tree.map(lambda a, b: jnp.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b), chosen, other)
