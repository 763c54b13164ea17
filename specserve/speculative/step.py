"""The whole step as pure functions over a device-resident slot state: `prefill`, `decode`, `speculate`.

The server jits them over its state, the trainer's evaluation over a small one of its own, so acceptance means the same
in both. A step works on a batch of slots (`slots`, padded with an index past the last one) and returns the new state
and one small result for the host. The invariant between steps, for a slot whose sequence is x[0..L]:

  seq_lens = L           the target has committed entries 0..L-1
  pending                the last `count` tokens up to x[L], the root, with the features before them;
                         the draft has committed entries 1..L - count
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specserve.models import draft as draft_model
from specserve.models import target as target_model
from specserve.models.config import DraftConfig, ModelConfig
from specserve.models.kv_pages import KVPages, Prefix
from specserve.models.target import TargetOutput, TargetParams
from specserve.pytree import pytree
from specserve.speculative.propose import FIRST_ENTRY, Draft, Pending, catch_up, propose
from specserve.speculative.sampling import SamplerRows, sample
from specserve.speculative.tree import Tree, ancestor_mask
from specserve.speculative.verify import verify


@dataclass(frozen=True)
class StepConfig:
    """Everything static about a step."""

    target: ModelConfig
    draft: DraftConfig | None
    max_depth: int  # of any tree that runs on the state; sizes `pending`

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.draft.aux_layers if self.draft else ()


@pytree
class Weights:
    target: TargetParams
    draft: Draft | None


@pytree
class SlotState:
    """Every sequence that is being served, one slot each."""

    page_table: jax.Array  # [slot, max_pages] int32
    seq_lens: jax.Array  # [slot] int32
    pending: Pending  # [slot, max_depth + 1, ...]
    rows: SamplerRows  # [slot]
    pages: KVPages  # the target's
    draft_pages: KVPages | None  # one more layer under the same page table


@pytree
class StepResult:
    """What the host reads after a step; row i belongs to the i-th of the step's slots."""

    token_ids: jax.Array  # [batch, depth + 1] int32
    n_accepted: jax.Array  # [batch] int32; the first n_accepted + 1 tokens are emitted


def init_state(config: StepConfig, *, num_slots: int, num_pages: int, page_size: int, max_pages: int) -> SlotState:
    """An empty state: `max_pages` bounds the pages of one sequence, `num_pages` those of all."""
    target, draft = config.target, config.draft
    width, dtype = (draft.d_model, draft.dtype) if draft else (0, target.dtype)
    m = config.max_depth + 1
    return SlotState(
        page_table=jnp.zeros((num_slots, max_pages), jnp.int32),
        seq_lens=jnp.zeros(num_slots, jnp.int32),
        pending=Pending(
            token_ids=jnp.zeros((num_slots, m), jnp.int32),
            features=jnp.zeros((num_slots, m, width), dtype),
            count=jnp.zeros(num_slots, jnp.int32),
        ),
        rows=SamplerRows.greedy(num_slots),
        pages=KVPages.zeros(
            target.num_layers, num_pages, page_size, target.num_kv_heads, target.head_dim, target.dtype
        ),
        draft_pages=KVPages.zeros(1, num_pages, page_size, draft.num_kv_heads, draft.head_dim, dtype)
        if draft
        else None,
    )


def admit(
    state: SlotState,
    slot: jax.Array,  # [] int32
    page_row: jax.Array,  # [max_pages] int32, allocated pages, then anything out of range
    row: SamplerRows,  # of one sequence, [1]
) -> SlotState:
    """Give a slot to a new sequence."""
    return dataclasses.replace(
        state,
        page_table=state.page_table.at[slot].set(page_row),
        seq_lens=state.seq_lens.at[slot].set(0),
        pending=jax.tree.map(lambda x: x.at[slot].set(0), state.pending),
        rows=jax.tree.map(lambda x, new: x.at[slot].set(new[0]), state.rows, row),
    )


def prefill(
    weights: Weights,
    config: StepConfig,
    state: SlotState,
    slots: jax.Array,  # [batch] int32
    token_ids: jax.Array,  # [batch, n] int32, the next chunk of each prompt, padded at the end
    num_tokens: jax.Array,  # [batch] int32, valid tokens of the chunk
    width: int,  # pages of each sequence that attention reads; all that is committed must lie in them
) -> tuple[SlotState, StepResult]:
    """Run one chunk of each prompt. Where it ends the prompt, the drawn token counts: it is the root."""
    batch, n = token_ids.shape
    now = _gather(state, slots, width)
    offset = jnp.arange(n)
    index = now.seq_lens[:, None] + offset
    is_valid = offset < num_tokens[:, None]
    causal = (offset[:, None] >= offset)[None]
    out = _run_target(weights, config, state, now, token_ids, index, causal)
    last = jnp.maximum(num_tokens - 1, 0)[:, None]
    hidden = jnp.take_along_axis(out.hidden_states, last[..., None], axis=1)
    drawn = sample(now.rows, target_model.logits(weights.target, hidden), now.seq_lens[:, None] + num_tokens[:, None])
    is_valid &= _has_run(drawn)
    state = dataclasses.replace(state, pages=state.pages.write(out.kv, now.page_table, index, is_valid))
    if config.draft and weights.draft:
        assert out.aux_hidden_states is not None
        assert state.draft_pages is not None
        features = draft_model.fuse_features(weights.draft.params, config.draft, out.aux_hidden_states)
        # entry t consumes the feature of t - 1; the one before the chunk was left pending by the chunk before
        before = jnp.concatenate([now.pending.features[:, :1], features[:, :-1]], axis=1)
        inputs = draft_model.draft_inputs(
            weights.draft.params, config.draft, weights.draft.embedding, token_ids, before, index
        )
        kv = draft_model.draft_kv(weights.draft.params, config.draft, inputs)
        state = dataclasses.replace(
            state,
            draft_pages=state.draft_pages.write((kv,), now.page_table, index, is_valid & (index >= FIRST_ENTRY)),
        )
        path = last
        features = jnp.take_along_axis(features, path[..., None], axis=1)
    else:
        features = jnp.zeros((batch, 1, 0), state.pending.features.dtype)
    pending = Pending(token_ids=drawn, features=features, count=jnp.ones(batch, jnp.int32))
    state = _commit(state, slots, now.seq_lens + num_tokens, pending)
    return state, StepResult(token_ids=drawn, n_accepted=jnp.zeros(batch, jnp.int32))


def decode(
    weights: Weights,
    config: StepConfig,
    state: SlotState,
    slots: jax.Array,  # [batch] int32
    width: int,  # pages of each sequence that attention reads; all that is committed must lie in them
) -> tuple[SlotState, StepResult]:
    """Plain decoding: one token for each slot. The program without a draft, and the yardstick of every other one."""
    assert config.draft is None, "plain decoding keeps no features; build its StepConfig without a draft"
    now = _gather(state, slots, width)
    root = now.pending.token_ids[:, :1]
    out = _run_target(weights, config, state, now, root, now.seq_lens[:, None], jnp.ones((1, 1, 1), bool))
    drawn = sample(now.rows, target_model.logits(weights.target, out.hidden_states), now.seq_lens[:, None] + 1)
    is_kept = _has_run(drawn)
    state = dataclasses.replace(state, pages=state.pages.write(out.kv, now.page_table, now.seq_lens[:, None], is_kept))
    count = jnp.ones_like(now.seq_lens)
    state = _commit(state, slots, now.seq_lens + 1, Pending(drawn, now.pending.features[:, :1], count))
    return state, StepResult(token_ids=drawn, n_accepted=jnp.zeros_like(count))


def speculate(
    weights: Weights,
    config: StepConfig,
    tree: Tree,
    state: SlotState,
    slots: jax.Array,  # [batch] int32
    width: int,  # as in `decode`; the root's draft entry must lie in them too
) -> tuple[SlotState, StepResult]:
    """One speculative step: the draft catches up and proposes, the target runs once over the tree, its draws decide,
    and the accepted path is committed."""
    assert config.draft is not None
    assert weights.draft is not None
    assert state.draft_pages is not None
    assert tree.depth <= config.max_depth, f"tree of depth {tree.depth} in a state for {config.max_depth}"
    now = _gather(state, slots, width)
    root_ids = jnp.take_along_axis(now.pending.token_ids, jnp.maximum(now.pending.count - 1, 0)[:, None], axis=1)[:, 0]
    draft_pages, hidden = catch_up(
        weights.draft, config.draft, state.draft_pages, now.page_table, now.read_table, now.seq_lens, now.pending
    )
    proposal = propose(
        weights.draft, config.draft, tree, draft_pages, now.read_table, now.seq_lens, root_ids, hidden, now.rows
    )
    position_ids = now.seq_lens[:, None] + proposal.depths
    mask = ancestor_mask(proposal.parents, tree.depth)
    out = _run_target(weights, config, state, now, proposal.token_ids, position_ids, mask)
    target_ids = sample(now.rows, target_model.logits(weights.target, out.hidden_states), position_ids + 1)
    verdict = verify(proposal, target_ids, tree.depth)

    def along_path(x: jax.Array) -> jax.Array:  # [batch, node, ...] -> [batch, depth + 1, ...]
        return jnp.take_along_axis(x, verdict.path.reshape(*verdict.path.shape, *[1] * (x.ndim - 2)), axis=1)

    step = jnp.arange(tree.depth + 1)
    kv = tuple((along_path(k), along_path(v)) for k, v in out.kv)
    is_kept = step <= verdict.n_accepted[:, None]
    assert out.aux_hidden_states is not None
    features = draft_model.fuse_features(weights.draft.params, config.draft, along_path(out.aux_hidden_states))
    state = dataclasses.replace(
        state,
        pages=state.pages.write(kv, now.page_table, now.seq_lens[:, None] + step, is_kept),
        draft_pages=draft_pages,
    )
    n_emitted = verdict.n_accepted + 1
    state = _commit(state, slots, now.seq_lens + n_emitted, Pending(verdict.token_ids, features, n_emitted))
    return state, StepResult(token_ids=verdict.token_ids, n_accepted=verdict.n_accepted)


@pytree
class _Now:
    """The state's rows of the slots in a step."""

    page_table: jax.Array  # [batch, max_pages], for writing
    read_table: jax.Array  # [batch, width], for attention
    seq_lens: jax.Array
    pending: Pending
    rows: SamplerRows


def _gather(state: SlotState, slots: jax.Array, width: int) -> _Now:
    """A padded slot reads as an empty sequence whose pages are all out of range, so it writes nothing."""
    is_real = slots < state.seq_lens.shape[0]

    def take(x: jax.Array) -> jax.Array:
        return x.at[slots].get(mode="clip")

    table = jnp.where(is_real[:, None], take(state.page_table), state.pages.num_pages)
    return _Now(
        page_table=table,
        read_table=table[:, :width],
        seq_lens=jnp.where(is_real, take(state.seq_lens), 0),
        pending=jax.tree.map(take, state.pending),
        rows=jax.tree.map(take, state.rows),
    )


def _run_target(
    weights: Weights,
    config: StepConfig,
    state: SlotState,
    now: _Now,
    token_ids: jax.Array,
    position_ids: jax.Array,
    mask: jax.Array,
) -> TargetOutput:
    return target_model.forward(
        weights.target,
        config.target,
        token_ids,
        position_ids,
        mask,
        pages=state.pages,
        prefix=Prefix(now.read_table, now.seq_lens),
        aux_layers=config.aux_layers,
    )


def _has_run(drawn: jax.Array) -> jax.Array:
    """True, but only known once the target has run: a write masked by it comes after every read of the pages. Without
    that order XLA keeps the old pages alive by copying the whole cache (docs/log)."""
    return drawn >= 0


def _commit(state: SlotState, slots: jax.Array, seq_lens: jax.Array, pending: Pending) -> SlotState:
    """Write the step's slots back; padded ones are dropped."""
    m = pending.token_ids.shape[1]
    return dataclasses.replace(
        state,
        seq_lens=state.seq_lens.at[slots].set(seq_lens, mode="drop"),
        pending=Pending(
            token_ids=state.pending.token_ids.at[slots, :m].set(pending.token_ids, mode="drop"),
            features=state.pending.features.at[slots, :m].set(pending.features, mode="drop"),
            count=state.pending.count.at[slots].set(pending.count, mode="drop"),
        ),
    )
