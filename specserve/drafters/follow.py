"""The state by which a drafter that runs ahead over states of its own follows the sequences that are served.

Its entry of a token is computed from two things: that token, and the target's aux hidden states of the position
before. Between steps, take a sequence x[0..L] whose root is x[L]. Then `pending` holds the last `count` tokens up to
the root, each with the aux hidden states before it, and the drafter has written entries 1..L - count. After a tree,
`count` is the number of tokens that this step emitted. Plain steps add one each and run nothing of the drafter, until
there is no more room.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specserve.drafters.interface import TrainedDrafter
from specserve.kernels import native
from specserve.kernels.gather import only, put_each, take_each, take_rows
from specserve.kernels.pages import PageRows
from specserve.models.cache import Cache
from specserve.models.config import ModelConfig
from specserve.pytree import pytree
from specserve.speculative.drafter import After, Committed, Sizes, SlotView, Weights

FIRST_ENTRY = 1  # entry 0 has no aux hidden states to consume; it is never visible
Tables = tuple[jax.Array, jax.Array]  # of pages [batch, max_pages]: for writing, and the part that is read
MIN_PENDING = 8  # tokens that plain steps may leave to the drafter before it must catch up


@pytree
class Pending:
    """Accepted tokens that the drafter has not consumed yet, oldest first; the last valid one is the root."""

    token_ids: jax.Array  # [batch, m] int32
    aux_hidden_states: jax.Array  # [batch, m, taps * target_d_model], of the position before each token
    count: jax.Array  # [batch] int32, valid entries


@pytree
class Following:
    """The state of all sequences."""

    # [slot, max_pending, ...], rings: the i-th token that the drafter has not consumed lies at i % max_pending, and
    # `count` counts all of them, also those that later ones have overwritten. See `pending_of`.
    pending: Pending
    cache: Cache  # the drafter's layers, under the target's page table
    page_aux: PageRows  # [page, taps * target_d_model], aux hidden states of each page's last entry


class FollowingDrafter(TrainedDrafter):
    """A drafter whose state is `Following`: a kind gives the pages of its layers, and writes its entries in them."""

    def empty_cache(self, sizes: Sizes) -> Cache:
        """Make empty pages for the drafter's layers."""
        raise NotImplementedError

    def write(self, weights: Weights, cache: Cache, tables: Tables, *entries: jax.Array) -> Cache:
        """Return the pages with the drafter's entries of known tokens. `entries` are the token ids [batch, n], the aux
        hidden states before each [batch, n, taps * target_d_model], the index of each entry [batch, n], and whether it
        is valid [batch, n] bool."""
        raise NotImplementedError

    def max_pending(self, max_depth: int) -> int:
        return max(MIN_PENDING, max_depth + 1)

    def init_state(self, target: ModelConfig, sizes: Sizes) -> Following:
        aux_size, room = len(self.aux_layers) * target.d_model, self.max_pending(sizes.max_depth)
        return Following(
            pending=Pending(
                token_ids=jnp.zeros((sizes.num_slots, room), jnp.int32),
                aux_hidden_states=jnp.zeros((sizes.num_slots, room, aux_size), target.dtype),
                count=jnp.zeros(sizes.num_slots, jnp.int32),
            ),
            cache=self.empty_cache(sizes),
            page_aux=PageRows(jnp.zeros((sizes.num_pages, aux_size), target.dtype)),
        )

    def admit(
        self, state: Following, slot: jax.Array, page_row: jax.Array, num_cached: jax.Array, promise: jax.Array
    ) -> Following:
        """Begin a sequence. The first entry after a prefix hit consumes the aux hidden states of the position before
        it. No page contains these, so they were kept with the last page."""
        pending = state.pending
        last_page = page_row[jnp.clip(num_cached // state.cache.page_size - 1, 0)]
        boundary = state.page_aux.row(last_page)
        pending = dataclasses.replace(
            pending,
            aux_hidden_states=pending.aux_hidden_states.at[slot, 0].set(boundary),
            count=pending.count.at[slot].set(0),
        )
        return dataclasses.replace(state, pending=pending)

    def observe(
        self, weights: Weights, state: Following, view: SlotView, committed: Committed, after: After
    ) -> Following:
        """Take note of committed tokens. Only a prompt's chunk is written at once."""
        if after == "prompt":
            tables = view.page_table, view.read_table
            extend = functools.partial(self.write, weights, state.cache, tables)
            return _observe_prompt(state, view, committed, extend)
        if after == "plain":
            return _observe_plain(state, view, committed)
        # the emitted tokens are pending, and nothing else: the drafter caught up before it proposed
        return dataclasses.replace(
            state,
            pending=_put(state, view, committed.next_ids, _aux(committed), committed.count),
            page_aux=_kept_with_pages(state, view, committed),
        )

    def catch_up(self, weights: Weights, state: Following, view: SlotView) -> Following:
        pending, tables = pending_of(state, view), (view.page_table, view.page_table)
        index, is_valid = places(view.seq_lens, pending)
        cache = self.write(weights, state.cache, tables, pending.token_ids, pending.aux_hidden_states, index, is_valid)
        last = jnp.maximum(pending.count - 1, 0)[:, None]
        root, aux = take_each(pending.token_ids, last), take_each(pending.aux_hidden_states, last)
        count = jnp.minimum(pending.count, 1)
        return dataclasses.replace(state, cache=cache, pending=_put(state, view, root, aux, count))


def _observe_prompt(state: Following, view: SlotView, committed: Committed, extend: Callable[..., Cache]) -> Following:
    """Write the entries of a chunk; the token after it is pending. Entry t consumes the aux hidden states of t - 1, and
    the ones before the chunk were left pending by the chunk before."""
    aux = _aux(committed)
    earlier = take_rows(state.pending.aux_hidden_states, view.slots)[:, :1]
    before = jnp.concatenate([earlier, aux[:, :-1]], axis=1)
    entries = _only(view.live(committed.is_kept), committed.token_ids, before)
    cache = extend(*entries, committed.index, committed.is_kept)
    last = jnp.maximum(committed.count - 1, 0)[:, None]
    return Following(
        pending=_put(
            state,
            view,
            take_each(committed.next_ids, last),
            take_each(aux, last),
            jnp.ones_like(committed.count),
        ),
        cache=cache,
        page_aux=_kept_with_pages(state, view, committed),
    )


def _observe_plain(state: Following, view: SlotView, committed: Committed) -> Following:
    """Add the token of a plain step to the pending ones. Where there is no room the oldest is dropped, unless
    the drafter catches up before. It then has no entry for that token, which costs acceptance and never changes
    a token."""
    pending, count = state.pending, take_rows(state.pending.count, view.slots)
    place = view.slots[:, None], (count % pending.token_ids.shape[1])[:, None]
    return dataclasses.replace(
        state,
        pending=Pending(
            token_ids=pending.token_ids.at[place].set(committed.next_ids, mode="drop"),
            aux_hidden_states=put_each(pending.aux_hidden_states, *place, _aux(committed)),
            count=pending.count.at[view.slots].set(count + 1, mode="drop"),
        ),
        page_aux=_kept_with_pages(state, view, committed),
    )


def pending_of(state: Following, view: SlotView, depth: int | None = None) -> Pending:
    """The pending tokens of the step's slots. Before a tree of this depth they are no more than a path of it: no step
    leaves more, and the caller has called `catch_up` after others."""
    pending, count = state.pending, take_rows(state.pending.count, view.slots)
    room = pending.token_ids.shape[1]
    first = jnp.maximum(count - room, 0)[:, None]
    place = view.slots[:, None], (first + jnp.arange(room if depth is None else depth + 1)) % room
    count = jnp.minimum(count, room)
    token_ids, aux = _only(
        view.live(jnp.arange(place[1].shape[1]) < count[:, None]),
        pending.token_ids.at[place].get(mode="clip", wrap_negative_indices=False),
        pending.aux_hidden_states.at[place].get(mode="clip", wrap_negative_indices=False),
    )
    return Pending(token_ids, aux, count)


def places(seq_lens: jax.Array, pending: Pending) -> tuple[jax.Array, jax.Array]:
    """The index of the entry of each pending token, and whether it is one, both [batch, m]."""
    offset = jnp.arange(pending.token_ids.shape[1])
    return seq_lens[:, None] - pending.count[:, None] + 1 + offset, offset < pending.count[:, None]


def _only(is_live: jax.Array, token_ids: jax.Array, aux: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return tokens [batch, n] and the aux hidden states before each, of which native kernels leave out all others."""
    if not native.is_serving():
        return token_ids, aux
    return only(is_live, token_ids), jnp.where(is_live[..., None], aux, 0)


def _aux(committed: Committed) -> jax.Array:
    assert committed.aux_hidden_states is not None, "the target was not asked for its taps"
    return committed.aux_hidden_states


def _put(
    state: Following, view: SlotView, token_ids: jax.Array, aux_hidden_states: jax.Array, count: jax.Array
) -> Pending:
    """Return the state with the pending tokens of the step's slots replaced. Padded slots are dropped."""
    m, pending = token_ids.shape[1], state.pending
    place = jnp.broadcast_to(view.slots[:, None], token_ids.shape), jnp.broadcast_to(jnp.arange(m), token_ids.shape)
    return Pending(
        token_ids=pending.token_ids.at[view.slots, :m].set(token_ids, mode="drop"),
        aux_hidden_states=put_each(pending.aux_hidden_states, *place, aux_hidden_states),
        count=pending.count.at[view.slots].set(count, mode="drop"),
    )


def _kept_with_pages(state: Following, view: SlotView, committed: Committed) -> PageRows:
    """Return `page_aux` with the aux hidden states of the last entry of every page that has just been committed, from
    which a later prefix hit goes on."""
    page_size = state.cache.page_size
    column = committed.index // page_size
    is_boundary = (
        committed.is_kept & (committed.index % page_size == page_size - 1) & (column < view.page_table.shape[1])
    )
    page = take_each(view.page_table, jnp.minimum(column, view.page_table.shape[1] - 1))
    page = jnp.where(is_boundary, page, state.cache.num_pages)
    return state.page_aux.put(page, _aux(committed))
