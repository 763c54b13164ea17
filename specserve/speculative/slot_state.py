"""The state of every sequence that is being served, on the device, and what a step returns of it.

The invariant between steps, for a slot whose sequence is x[0..L]:

  history                x[0..L]; x[L] is the root, emitted and not yet consumed by the target
  seq_lens = L           the target has committed entries 0..L-1
  draft                  what the drafter keeps, see `drafter`
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.gather import take_rows
from specserve.kernels.pages import share_out
from specserve.mesh import keep_along
from specserve.models.cache import Cache, WindowSizes
from specserve.models.config import ModelConfig
from specserve.pytree import pytree
from specserve.speculative import sampling
from specserve.speculative.drafter import Drafter, Sizes, SlotView
from specserve.speculative.sampling import Logprobs, SamplerRows, Scores, TokenRows


@dataclass(frozen=True)
class StepConfig:
    """The configuration of a step: everything that is known when it is compiled."""

    target: ModelConfig
    drafter: Drafter | None  # None: plain decoding
    max_depth: int  # of any tree that runs on the state
    is_coupled: bool = True  # the draft ranks with the target's noise; off only to measure what that brings
    kept_layers: tuple[int, ...] = ()  # those behind which a scored prompt's residual stream is returned
    kept_states: int = 0  # recurrent states of prefixes that the state has room for beside those of its slots
    verified_depth: int = 0  # every step verifies a chain of this length, in one exact order of sums; 0: what it must
    has_adapters: bool = False  # each slot may have an adapter of the target

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.drafter.aux_layers if self.drafter else ()

    @property
    def max_pending(self) -> int:
        """Return how many committed tokens may be pending, which means not consumed by the drafter yet. 0 means that
        it is never behind."""
        return self.drafter.max_pending(self.max_depth) if self.drafter else 0


@pytree
class SlotState:
    """The state of every sequence that is being served, one slot each, and what the drafter keeps of finished ones."""

    page_table: jax.Array  # [slot, max_pages] int32
    seq_lens: jax.Array  # [slot] int32
    history: jax.Array  # [slot, max_pages * page_size] int32
    rows: SamplerRows  # [slot]
    tokens: TokenRows  # [slot]
    cache: Cache  # the target's
    draft: Any | None  # the drafter's, by slot and by page; None without one
    adapter_ids: jax.Array | None = None  # [slot] int32, -1: none; None: no slot may have an adapter


@pytree
class StepResult:
    """The result of a step, on the device or read to the host, in arrays of NumPy. Row i belongs to the i-th of the
    step's slots."""

    # [batch, 2 + depth + 1] int32: draft tokens accepted, the source of the proposal, the tokens; results of several
    # steps have an axis of them before all others
    counts: Any
    logprobs: Logprobs | None  # of the tokens; read where they were asked for
    prompt: Scores | None = None  # [batch, chunk], of the token after each of a scored prompt
    # [batch, chunk, (layers + 1) * d_model] of a scored prompt: behind the kept layers, and what the logits are made of
    hidden_states: Any = None
    node_ids: jax.Array | None = None  # [batch, node] int32, the proposed tokens and the root; None without a tree
    parents: jax.Array | None = None  # [batch, node] int32, of the nodes; None of a chain, where they are known
    confidence: jax.Array | None = None  # [batch, depth] float32, see `tree.Proposal`; None where the draft gives none

    @property
    def n_accepted(self) -> Any:  # [..., batch] int32, as `counts`
        return self.counts[..., 0]

    @property
    def token_ids(self) -> Any:  # [..., batch, depth + 1] int32
        return self.counts[..., 2:]

    def emitted(self, row: int) -> list[int]:
        """Return the tokens that the step adds to a sequence, once it is read: the accepted ones and the bonus
        token."""
        return self.counts[row, 2 : self.counts[row, 0] + 3].tolist()


@pytree
class Admission:
    """The arrays that a slot is filled with when a sequence is admitted to it."""

    page_row: jax.Array  # [max_pages] int32, allocated pages, then anything out of range
    history: jax.Array  # [max_pages * page_size] int32, the prompt (and the answer so far, after a preemption)
    num_cached: jax.Array  # [] int32, entries that are in its pages already, whole pages
    rows: SamplerRows  # [1]
    tokens: TokenRows  # [1]
    promise: jax.Array  # [] float32, accepted tokens per step that the drafter's head promises
    kept: jax.Array | None = None  # [] int32, the place of the recurrent state behind the cached entries; -1: zeros
    adapter_id: jax.Array | None = None  # [] int32, see `SlotState`


@pytree
class PromptChunks:
    """The next tokens of prompts, that a prefill runs."""

    slots: jax.Array  # [batch] int32
    num_tokens: jax.Array  # [batch] int32, how many of the next `chunk` tokens of the history to run
    is_last: jax.Array  # [batch] bool, whether they end the prompt: then the drawn token counts, it is the root


@pytree
class Unread:
    """The committed tokens of a sequence that the drafter has not read, from a whole number of pages on. What it has
    of the sequence before them is in the pages."""

    slot: jax.Array  # [] int32
    start: jax.Array  # [] int32, index of the first one
    promise: jax.Array  # [] float32, as of `Admission`


def init_state(
    config: StepConfig,
    *,
    num_slots: int,
    num_pages: int,
    page_size: int,
    max_pages: int,
    num_ranks: int = 1,
    windows: WindowSizes = (),
) -> SlotState:
    """Make an empty state. `max_pages` bounds the pages of one sequence, `num_pages` those of all. With `num_ranks` the
    mesh shares the pages out over so many data ranks (`kernels.pages`), and every batch of slots must be cut like
    them. Layers with one of these `windows` have pages of their own (`Cache.of_layers`)."""
    sizes = Sizes(num_slots, num_pages, page_size, max_pages, config.max_depth, num_ranks, windows)
    state = SlotState(
        page_table=jnp.full((num_slots, max_pages), num_pages, jnp.int32),
        seq_lens=jnp.zeros(num_slots, jnp.int32),
        history=jnp.zeros((num_slots, max_pages * page_size), jnp.int32),
        rows=SamplerRows.greedy(num_slots),
        tokens=TokenRows.zeros(num_slots, config.target.vocab_size),
        cache=Cache.zeros(
            config.target,
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            num_kept=config.kept_states,
            windows=windows,
            num_ranks=num_ranks,
        ),
        draft=config.drafter.init_state(config.target, sizes) if config.drafter else None,
        adapter_ids=jnp.full(num_slots, -1, jnp.int32) if config.has_adapters else None,
    )
    return share_out(state, num_ranks)


def admit(config: StepConfig, state: SlotState, slot: jax.Array, new: Admission) -> SlotState:
    """Give a slot ([] int32) to a new sequence."""

    def put(rows: jax.Array, row: jax.Array) -> jax.Array:
        return rows.at[slot].set(row[0])

    draft = state.draft
    if config.drafter:
        draft = config.drafter.admit(draft, slot, new.page_row, new.num_cached, new.promise)
    return SlotState(
        page_table=state.page_table.at[slot].set(new.page_row),
        seq_lens=state.seq_lens.at[slot].set(new.num_cached),
        history=state.history.at[slot].set(new.history),
        rows=jax.tree.map(put, state.rows, new.rows),
        tokens=jax.tree.map(put, state.tokens, new.tokens),
        cache=state.cache.reset(slot, new.kept),
        draft=draft,
        adapter_ids=None if state.adapter_ids is None else state.adapter_ids.at[slot].set(new.adapter_id),
    )


def keep(_config: StepConfig, state: SlotState, slot: jax.Array, place: jax.Array) -> SlotState:
    """Copy the recurrent state of a slot to a place, both [] int32, from which `admit` takes it."""
    return dataclasses.replace(state, cache=state.cache.keep(slot, place))


@pytree
class PageTables:
    """The parts of the state that say which pages a sequence has."""

    pages: jax.Array  # `SlotState.page_table`
    windows: tuple[dict[int, jax.Array], ...]  # `window_pages` of the target's cache, and of the drafter's

    @classmethod
    def of(cls, state: SlotState) -> "PageTables":
        caches = jax.tree.leaves((state.cache, state.draft), is_leaf=_is_cache)
        return cls(state.page_table, tuple(cache.window_pages for cache in caches if _is_cache(cache)))

    def put_into(self, state: SlotState) -> SlotState:
        """Return the state with these in place of its own."""
        windows = iter(self.windows)

        def with_own(leaf: Any) -> Any:
            return dataclasses.replace(leaf, window_pages=next(windows)) if _is_cache(leaf) else leaf

        cache, draft = jax.tree.map(with_own, (state.cache, state.draft), is_leaf=_is_cache)
        return dataclasses.replace(state, page_table=self.pages, cache=cache, draft=draft)


def _is_cache(leaf: Any) -> bool:
    return isinstance(leaf, Cache)


def extend(_config: StepConfig, tables: PageTables, entries: jax.Array) -> PageTables:
    """Give sequences pages. `entries` [3 + windows, n] int32: slot, column and page, and the page's window pages, by
    the windows' sizes. A slot past the last one stands for none, and a window page below 0 for the one that is
    there."""
    slots, columns, pages, *own = entries
    new = dict(zip(sorted(tables.windows[0]), own, strict=True))  # every window is one of the target's

    def put(window: int, known: jax.Array) -> jax.Array:
        place = jnp.where(new[window] >= 0, pages, len(known))
        return known.at[place].set(new[window], mode="drop")

    windows = tuple({window: put(window, known) for window, known in each.items()} for each in tables.windows)
    return PageTables(tables.pages.at[slots, columns].set(pages, mode="drop"), windows)


@pytree
class Now:
    """The parts of the state that a step reads for its slots."""

    view: SlotView
    tokens: TokenRows
    adapter_ids: jax.Array | None  # [batch] int32

    @property
    def slots(self) -> jax.Array:
        return self.view.slots

    @property
    def seq_lens(self) -> jax.Array:
        return self.view.seq_lens

    @property
    def rows(self) -> SamplerRows:
        return self.view.rows


def gather(state: SlotState, slots: jax.Array, width: int) -> Now:
    is_real = slots < state.seq_lens.shape[0]
    table = jnp.where(is_real[:, None], take_rows(state.page_table, slots), state.cache.num_pages)
    seq_lens = jnp.where(is_real, take_rows(state.seq_lens, slots), 0)
    view = SlotView(
        slots=slots,
        page_table=table,
        read_table=table[:, :width],
        seq_lens=seq_lens,
        root_ids=state.history.at[slots, seq_lens].get(mode="clip"),
        history=take_rows(state.history, slots),
        rows=take_rows(state.rows, slots),
        cache=state.cache,
        num_slots=len(state.seq_lens),
    )
    adapter_ids = None
    if state.adapter_ids is not None:
        adapter_ids = jnp.where(is_real, take_rows(state.adapter_ids, slots), -1)
    return Now(view, take_rows(state.tokens, slots), adapter_ids)


def emit(
    state: SlotState,
    slots: jax.Array,
    start: jax.Array,  # [batch] int32, index of the first token
    token_ids: jax.Array,  # [batch, n] int32
    is_emitted: jax.Array,  # [batch, n] bool
) -> SlotState:
    """Add emitted tokens to the history and to `TokenRows.seen`, and set `seq_lens`, so that all but the last token
    counts as committed."""
    index = start[:, None] + jnp.arange(token_ids.shape[1])
    is_emitted = jnp.broadcast_to(is_emitted, index.shape)
    column = jnp.where(is_emitted, index, state.history.shape[1])
    row = jnp.broadcast_to(slots[:, None], index.shape)
    entry = jnp.where(is_emitted, sampling.EMITTED, 0)
    # the tokens of a chunk before the last are in the history; where nothing is emitted, `start` are committed
    seq_lens = start + jnp.maximum(jnp.sum(is_emitted, axis=1) - 1, 0)
    seen = keep_along(state.tokens.seen.at[row, token_ids].add(entry, mode="drop"), None, "vocab")  # as logits are
    return dataclasses.replace(
        state,
        seq_lens=state.seq_lens.at[slots].set(seq_lens, mode="drop"),
        history=state.history.at[row, column].set(token_ids, mode="drop"),
        tokens=dataclasses.replace(state.tokens, seen=seen),
    )
