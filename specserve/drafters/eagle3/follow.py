"""What an EAGLE-3 head keeps of the sequences that are served, and how it follows them.

Between steps, for a sequence x[0..L] whose root is x[L]: `pending` holds the last `count` tokens up to the root, each
with the target's aux hidden states before it, and the head has written entries 1..L - count. After a tree, `count` is
what that step emitted; plain steps add one each and run nothing of the head, until there is no more room.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.eagle3.propose import Draft, Pending, consume, extend, propose
from specserve.kernels.gather import take_each, take_rows
from specserve.models.cache import Cache, Pages
from specserve.models.config import ModelConfig
from specserve.pytree import pytree
from specserve.speculative.drafter import Committed, Sizes, SlotView
from specserve.speculative.tree import Proposal, Tree

MIN_PENDING = 8  # tokens that plain steps may leave to the head before it must catch up


@pytree
class Eagle3State:
    pending: Pending  # [slot, max_pending, ...]
    cache: Cache  # the head's layers, under the target's page table
    page_aux: jax.Array  # [page, taps * target_d_model], aux hidden states of each page's last entry


def max_pending(max_depth: int) -> int:
    """Tokens that `pending` holds."""
    return max(MIN_PENDING, max_depth + 1)


def init_state(config: Eagle3Config, target: ModelConfig, sizes: Sizes) -> Eagle3State:
    aux_size, room = len(config.aux_layers) * target.d_model, max_pending(sizes.max_depth)
    return Eagle3State(
        pending=Pending(
            token_ids=jnp.zeros((sizes.num_slots, room), jnp.int32),
            aux_hidden_states=jnp.zeros((sizes.num_slots, room, aux_size), target.dtype),
            count=jnp.zeros(sizes.num_slots, jnp.int32),
        ),
        cache=empty_cache(config, num_pages=sizes.num_pages, page_size=sizes.page_size),
        page_aux=jnp.zeros((sizes.num_pages, aux_size), target.dtype),
    )


def empty_cache(config: Eagle3Config, *, num_pages: int, page_size: int) -> Cache:
    """Pages for the head's layers."""
    layers = tuple(
        Pages.zeros(num_pages, page_size, config.num_kv_heads, config.head_dim, config.dtype)
        for _ in range(config.num_layers)
    )
    return Cache(layers, num_pages, page_size)


def admit(state: Eagle3State, slot: jax.Array, page_row: jax.Array, num_cached: jax.Array) -> Eagle3State:
    """Begin a sequence. The first entry after a hit consumes the aux hidden states before it, which no page contains:
    they were kept with the last page."""
    pending = state.pending
    last_page = page_row[jnp.clip(num_cached // state.cache.page_size - 1, 0)]
    boundary = state.page_aux.at[last_page].get(mode="clip")
    pending = dataclasses.replace(
        pending,
        aux_hidden_states=pending.aux_hidden_states.at[slot, 0].set(boundary),
        count=pending.count.at[slot].set(0),
    )
    return dataclasses.replace(state, pending=pending)


def observe_prompt(
    weights: Draft, config: Eagle3Config, state: Eagle3State, view: SlotView, committed: Committed
) -> Eagle3State:
    """Write the entries of a chunk; the token after it is pending. Entry t consumes the aux hidden states of t - 1, and
    the ones before the chunk were left pending by the chunk before."""
    aux = _aux(committed)
    earlier = take_rows(state.pending.aux_hidden_states, view.slots)[:, :1]
    cache, _, _ = extend(
        weights,
        config,
        state.cache,
        view.page_table,
        view.read_table,
        committed.token_ids,
        jnp.concatenate([earlier, aux[:, :-1]], axis=1),
        committed.index,
        committed.is_kept,
    )
    last = jnp.maximum(committed.count - 1, 0)[:, None]
    return Eagle3State(
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


def observe_plain(state: Eagle3State, view: SlotView, committed: Committed) -> Eagle3State:
    """The token joins those that are pending. Where they are as many as fit the oldest is forgotten: the head will go
    without an entry for it, which costs acceptance and never a token, unless it catches up before."""
    pending = take_rows(state.pending, view.slots)
    room = pending.token_ids.shape[1]
    is_full = pending.count >= room
    place = jnp.minimum(pending.count, room - 1)[:, None] == jnp.arange(room)  # [batch, room]
    token_ids, aux = jax.tree.map(
        lambda x: jnp.where(is_full.reshape(-1, *[1] * (x.ndim - 1)), jnp.roll(x, -1, axis=1), x),
        (pending.token_ids, pending.aux_hidden_states),
    )
    return dataclasses.replace(
        state,
        pending=_put(
            state,
            view,
            jnp.where(place, committed.next_ids, token_ids),
            jnp.where(place[..., None], _aux(committed), aux),
            jnp.minimum(pending.count + 1, room),
        ),
        page_aux=_kept_with_pages(state, view, committed),
    )


def observe_tree(state: Eagle3State, view: SlotView, committed: Committed) -> Eagle3State:
    """What the step has emitted is pending, and nothing else: the head caught up before it proposed."""
    return dataclasses.replace(
        state,
        pending=_put(state, view, committed.next_ids, _aux(committed), committed.count),
        page_aux=_kept_with_pages(state, view, committed),
    )


def catch_up(weights: Draft, config: Eagle3Config, state: Eagle3State, view: SlotView) -> Eagle3State:
    """Write the entries of all that is pending; the root alone stays so."""
    pending = take_rows(state.pending, view.slots)
    cache, _ = consume(weights, config, state.cache, view.page_table, None, view.seq_lens, pending)
    last = jnp.maximum(pending.count - 1, 0)[:, None]
    root = take_each(pending.token_ids, last)
    aux = take_each(pending.aux_hidden_states, last)
    return dataclasses.replace(state, cache=cache, pending=_put(state, view, root, aux, jnp.minimum(pending.count, 1)))


def propose_tree(
    weights: Draft, config: Eagle3Config, state: Eagle3State, view: SlotView, tree: Tree
) -> tuple[Eagle3State, Proposal]:
    """Catch up with what is pending, then run ahead."""
    # no step leaves more pending than a tree's path; the caller has called `catch_up` after others
    pending = take_rows(state.pending, view.slots)
    pending = jax.tree.map(lambda x: x[:, : tree.depth + 1] if x.ndim > 1 else x, pending)
    cache, hidden = consume(weights, config, state.cache, view.page_table, view.read_table, view.seq_lens, pending)
    assert hidden is not None
    proposal = propose(weights, config, tree, cache, view.read_table, view.seq_lens, view.root_ids, hidden, view.rows)
    return dataclasses.replace(state, cache=cache), proposal


def _aux(committed: Committed) -> jax.Array:
    assert committed.aux_hidden_states is not None, "the target was not asked for its taps"
    return committed.aux_hidden_states


def _put(
    state: Eagle3State, view: SlotView, token_ids: jax.Array, aux_hidden_states: jax.Array, count: jax.Array
) -> Pending:
    """The state's pending tokens with those of the step's slots replaced; padded slots are dropped."""
    m = token_ids.shape[1]
    return Pending(
        token_ids=state.pending.token_ids.at[view.slots, :m].set(token_ids, mode="drop"),
        aux_hidden_states=state.pending.aux_hidden_states.at[view.slots, :m].set(aux_hidden_states, mode="drop"),
        count=state.pending.count.at[view.slots].set(count, mode="drop"),
    )


def _kept_with_pages(state: Eagle3State, view: SlotView, committed: Committed) -> jax.Array:
    """`page_aux` with the aux hidden states of every page's last entry among those committed: a later prefix hit goes
    on from there."""
    page_size = state.cache.page_size
    column = committed.index // page_size
    is_boundary = (
        committed.is_kept & (committed.index % page_size == page_size - 1) & (column < view.page_table.shape[1])
    )
    page = take_each(view.page_table, jnp.minimum(column, view.page_table.shape[1] - 1))
    page = jnp.where(is_boundary, page, state.cache.num_pages)
    return state.page_aux.at[page].set(_aux(committed), mode="drop")
