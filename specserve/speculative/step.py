"""The whole step as pure functions over a device-resident slot state: `prefill`, `decode`, `speculate`.

The server jits them over its state, the trainer's evaluation over a small one of its own, so acceptance means the same
in both. A step works on a batch of slots (`slots`, padded with an index past the last one) and returns the new state
and one small result for the host. The invariant between steps, for a slot whose sequence is x[0..L]:

  history                x[0..L]; x[L] is the root, emitted and not yet consumed by the target
  seq_lens = L           the target has committed entries 0..L-1
  pending                the last `count` tokens up to the root, each with the aux hidden states before it;
                         the draft has committed entries 1..L - count
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specserve.kernels import native
from specserve.models import draft as draft_model
from specserve.models import target as target_model
from specserve.models.cache import Cache, Prefix
from specserve.models.config import DraftConfig, ModelConfig
from specserve.models.target import TargetOutput, TargetParams
from specserve.pytree import pytree
from specserve.speculative import lookup, sampling
from specserve.speculative.propose import Draft, Pending, catch_up, extend, propose
from specserve.speculative.sampling import Logprobs, Nodes, SamplerRows, TokenRows
from specserve.speculative.tree import Proposal, Tree, ancestor_mask, chain_proposal, pad_chain
from specserve.speculative.verify import verify

PENDING = 8  # tokens that plain steps may leave to the draft before it must catch up


@dataclass(frozen=True)
class StepConfig:
    """Everything static about a step."""

    target: ModelConfig
    draft: DraftConfig | None
    max_depth: int  # of any tree that runs on the state; sizes `pending`
    is_coupled: bool = True  # the draft ranks with the target's noise; off only to measure what that brings
    verified_depth: int = 0  # every step verifies a chain of this length, in one exact order of sums; 0: what it must

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.draft.aux_layers if self.draft else ()

    @property
    def max_pending(self) -> int:
        """Tokens that `pending` holds."""
        return max(PENDING, self.max_depth + 1)


@pytree
class Weights:
    target: TargetParams
    draft: Draft | None


@pytree
class SlotState:
    """Every sequence that is being served, one slot each, and what finished ones left behind."""

    page_table: jax.Array  # [slot, max_pages] int32
    seq_lens: jax.Array  # [slot] int32
    history: jax.Array  # [slot, max_pages * page_size] int32
    rows: SamplerRows  # [slot]
    tokens: TokenRows  # [slot]
    pending: Pending | None  # [slot, max_pending, ...]; None without a head
    gains: jax.Array  # [slot, 1 + classes] float32, accepted tokens per step by source, see `lookup`
    recall: jax.Array  # [RECALL_ROWS, RECALL_LENGTH] int32, recent answers
    cache: Cache  # the target's
    draft_cache: Cache | None  # the head's layers, under the same page table
    page_aux: jax.Array | None  # [page, taps * d_model], aux hidden states of each page's last entry


@pytree
class StepResult:
    """What the host reads after a step; row i belongs to the i-th of the step's slots."""

    counts: jax.Array  # [batch, 2 + depth + 1] int32: draft tokens accepted, the source of the proposal, the tokens
    logprobs: Logprobs  # of the tokens


@pytree
class Admission:
    """A new sequence: what its slot starts with."""

    page_row: jax.Array  # [max_pages] int32, allocated pages, then anything out of range
    history: jax.Array  # [max_pages * page_size] int32, the prompt (and the answer so far, after a preemption)
    num_cached: jax.Array  # [] int32, entries that are in its pages already, whole pages
    rows: SamplerRows  # [1]
    tokens: TokenRows  # [1]
    gains: jax.Array  # [1 + classes] float32


def init_state(config: StepConfig, *, num_slots: int, num_pages: int, page_size: int, max_pages: int) -> SlotState:
    """An empty state: `max_pages` bounds the pages of one sequence, `num_pages` those of all."""
    target, draft = config.target, config.draft
    aux_size = len(config.aux_layers) * target.d_model
    m = config.max_pending
    return SlotState(
        page_table=jnp.full((num_slots, max_pages), num_pages, jnp.int32),
        seq_lens=jnp.zeros(num_slots, jnp.int32),
        history=jnp.zeros((num_slots, max_pages * page_size), jnp.int32),
        rows=SamplerRows.greedy(num_slots),
        tokens=TokenRows.zeros(num_slots, target.vocab_size),
        pending=Pending(
            token_ids=jnp.zeros((num_slots, m), jnp.int32),
            aux_hidden_states=jnp.zeros((num_slots, m, aux_size), target.dtype),
            count=jnp.zeros(num_slots, jnp.int32),
        )
        if draft
        else None,
        gains=lookup.initial_gains(num_slots),
        recall=jnp.full((lookup.RECALL_ROWS, lookup.RECALL_LENGTH), -1, jnp.int32),
        cache=Cache.zeros(target, num_slots=num_slots, num_pages=num_pages, page_size=page_size),
        draft_cache=draft_model.draft_cache(draft, num_pages=num_pages, page_size=page_size) if draft else None,
        page_aux=jnp.zeros((num_pages, aux_size), target.dtype) if draft else None,
    )


def admit(state: SlotState, slot: jax.Array, new: Admission) -> SlotState:
    """Give a slot ([] int32) to a sequence. Where its prefix is cached, the draft goes on from the aux hidden states
    that were kept with the last page, so acceptance on a hit equals acceptance on a miss."""
    pending = state.pending
    if pending is not None and state.page_aux is not None:
        page_size = state.cache.page_size
        last_page = new.page_row[jnp.clip(new.num_cached // page_size - 1, 0)]
        boundary = state.page_aux.at[last_page].get(mode="clip")
        pending = dataclasses.replace(
            pending,
            aux_hidden_states=pending.aux_hidden_states.at[slot, 0].set(boundary),
            count=pending.count.at[slot].set(0),
        )

    def put(rows: jax.Array, row: jax.Array) -> jax.Array:
        return rows.at[slot].set(row[0])

    return dataclasses.replace(
        state,
        page_table=state.page_table.at[slot].set(new.page_row),
        seq_lens=state.seq_lens.at[slot].set(new.num_cached),
        history=state.history.at[slot].set(new.history),
        rows=jax.tree.map(put, state.rows, new.rows),
        tokens=jax.tree.map(put, state.tokens, new.tokens),
        gains=state.gains.at[slot].set(new.gains),
        pending=pending,
        cache=state.cache.reset(slot),
    )


@native.serving
def prefill(
    weights: Weights,
    config: StepConfig,
    state: SlotState,
    slots: jax.Array,  # [batch] int32
    num_tokens: jax.Array,  # [batch] int32, how many of the next `chunk` tokens of the history to run
    is_last: jax.Array,  # [batch] bool, whether they end the prompt: then the drawn token counts, it is the root
    chunk: int,
    width: int,  # pages of each sequence that attention reads; all that is committed must lie in them
    allowed: jax.Array | None = None,  # [batch, 1, bytes] uint8, see `sampling.constrain`
) -> tuple[SlotState, StepResult]:
    """Run one chunk of each prompt."""
    batch = slots.shape[0]
    now = _gather(state, slots, width)
    offset = jnp.arange(chunk)
    index = now.seq_lens[:, None] + offset
    token_ids = state.history.at[slots[:, None], index].get(mode="clip")
    is_valid = offset < num_tokens[:, None]
    causal = (offset[:, None] >= offset)[None]
    out = _run_target(weights, config, state, now, token_ids, index, causal)
    last = jnp.maximum(num_tokens - 1, 0)[:, None]
    hidden = jnp.take_along_axis(out.hidden_states, last[..., None], axis=1)
    logits = target_model.logits(weights.target, config.target, hidden)
    end = now.seq_lens + num_tokens
    nodes = _single_nodes(state, now, slots, end - 1)
    drawn = _draw(now, nodes, logits, end[:, None], allowed)
    is_valid &= _has_run(drawn)
    state = dataclasses.replace(state, cache=state.cache.write(out.new, now.page_table, index, is_valid, slots))
    if config.draft:
        assert weights.draft is not None
        assert out.aux_hidden_states is not None
        assert now.pending is not None
        assert state.draft_cache is not None
        # entry t consumes the feature of t - 1; the one before the chunk was left pending by the chunk before
        before = jnp.concatenate([now.pending.aux_hidden_states[:, :1], out.aux_hidden_states[:, :-1]], axis=1)
        draft_cache, _, _ = extend(
            weights.draft,
            config.draft,
            state.draft_cache,
            now.page_table,
            now.read_table,
            token_ids,
            before,
            index,
            is_valid,
        )
        aux = jnp.take_along_axis(out.aux_hidden_states, last[..., None], axis=1)
        state = dataclasses.replace(
            _write_aux(state, now, index, out.aux_hidden_states, is_valid),
            draft_cache=draft_cache,
            pending=_put_pending(state, slots, drawn, aux, jnp.ones(batch, jnp.int32)),
        )
    state = _emit(state, slots, end, drawn, is_last[:, None])
    return state, _result(now, logits, drawn, jnp.zeros(batch, jnp.int32))


@native.serving
def decode(
    weights: Weights,
    config: StepConfig,
    state: SlotState,
    slots: jax.Array,  # [batch] int32
    width: int,  # pages of each sequence that attention reads; all that is committed must lie in them
    allowed: jax.Array | None = None,  # [batch, 1, bytes] uint8, see `sampling.constrain`
) -> tuple[SlotState, StepResult]:
    """Plain decoding: one token for each slot. With a head, the token joins those that the draft has yet to consume.
    Where they are as many as fit (`StepConfig.max_pending`), the oldest is forgotten: the draft will go without an
    entry for it, which costs acceptance and never a token, unless `consume` runs before."""
    now = _gather(state, slots, width)
    nodes = _single_nodes(state, now, slots, now.seq_lens)
    index = now.seq_lens[:, None]
    out = _run_target(weights, config, state, now, nodes.token_ids, index, jnp.ones((1, 1, 1), bool))
    logits = target_model.logits(weights.target, config.target, out.hidden_states)
    drawn = _draw(now, nodes, logits, index + 1, allowed)
    is_kept = _has_run(drawn)
    state = dataclasses.replace(state, cache=state.cache.write(out.new, now.page_table, index, is_kept, slots))
    if now.pending is not None:
        assert state.pending is not None
        assert out.aux_hidden_states is not None
        room = config.max_pending
        is_full = now.pending.count >= room
        place = jnp.minimum(now.pending.count, room - 1)[:, None] == jnp.arange(room)  # [batch, room]
        kept = jax.tree.map(
            lambda x: jnp.where(is_full.reshape(-1, *[1] * (x.ndim - 1)), jnp.roll(x, -1, axis=1), x),
            (now.pending.token_ids, now.pending.aux_hidden_states),
        )
        state = dataclasses.replace(
            _write_aux(state, now, index, out.aux_hidden_states, is_kept),
            pending=_put_pending(
                state,
                slots,
                jnp.where(place, drawn, kept[0]),
                jnp.where(place[..., None], out.aux_hidden_states, kept[1]),
                jnp.minimum(now.pending.count + 1, room),
            ),
        )
    state = _emit(state, slots, now.seq_lens + 1, drawn, jnp.ones_like(is_kept))
    return state, _result(now, logits, drawn, jnp.zeros_like(now.seq_lens))


@native.serving
def consume(weights: Weights, config: StepConfig, state: SlotState, slots: jax.Array) -> SlotState:
    """Let the draft catch up with what plain steps have emitted; the root alone stays pending."""
    assert config.draft is not None
    assert weights.draft is not None
    assert state.draft_cache is not None
    now = _gather(state, slots, width=1)
    assert now.pending is not None
    draft_cache, _ = catch_up(
        weights.draft, config.draft, state.draft_cache, now.page_table, None, now.seq_lens, now.pending
    )
    last = jnp.maximum(now.pending.count - 1, 0)[:, None]
    root = jnp.take_along_axis(now.pending.token_ids, last, axis=1)
    aux = jnp.take_along_axis(now.pending.aux_hidden_states, last[..., None], axis=1)
    pending = _put_pending(state, slots, root, aux, jnp.minimum(now.pending.count, 1))
    return dataclasses.replace(state, draft_cache=draft_cache, pending=pending)


def speculate(
    weights: Weights,
    config: StepConfig,
    tree: Tree,
    state: SlotState,
    slots: jax.Array,  # [batch] int32
    width: int,  # as in `decode`; the root's draft entry must lie in them too
) -> tuple[SlotState, StepResult]:
    """One speculative step: a tree is proposed, the target runs once over it, its draws decide, and the accepted path
    is committed."""
    state, proposal = propose_tree(weights, config, tree, state, slots, width)
    return verify_tree(weights, config, tree, state, slots, proposal, width)


@native.serving
def propose_tree(
    weights: Weights, config: StepConfig, tree: Tree, state: SlotState, slots: jax.Array, width: int
) -> tuple[SlotState, Proposal]:
    """The first half of a step. Steps with constrained sequences run it alone, because the host must say which tokens
    may follow each proposed node (`sampling.constrain`)."""
    assert tree.depth <= config.max_depth, f"tree of depth {tree.depth} in a state for {config.max_depth}"
    now = _gather(state, slots, width)
    root_ids = state.history.at[slots, now.seq_lens].get(mode="clip")
    proposal = None
    if tree.uses_head:
        assert config.draft is not None
        assert weights.draft is not None
        assert state.draft_cache is not None
        assert now.pending is not None
        # no step leaves more pending than a tree's path; the caller has called `consume` after others
        pending = jax.tree.map(lambda x: x[:, : tree.depth + 1] if x.ndim > 1 else x, now.pending)
        draft_cache, hidden = catch_up(
            weights.draft, config.draft, state.draft_cache, now.page_table, now.read_table, now.seq_lens, pending
        )
        assert hidden is not None
        state = dataclasses.replace(state, draft_cache=draft_cache)
        rows = now.rows if config.is_coupled else dataclasses.replace(now.rows, temperature=now.rows.temperature * 0)
        proposal = propose(
            weights.draft, config.draft, tree, draft_cache, now.read_table, now.seq_lens, root_ids, hidden, rows
        )
    if tree.uses_lookup:
        history = state.history.at[slots].get(mode="clip")
        recall = state.recall if tree.uses_recall else None
        match = lookup.find(history, now.seq_lens, tree.depth, recall)
        matched = chain_proposal(root_ids, match.token_ids, lookup.match_class(match.length))
        if proposal is None:
            proposal = matched
        else:
            is_match = lookup.prefers_match(state.gains.at[slots].get(mode="clip"), match)
            proposal = jax.tree.map(
                lambda a, b: jnp.where(is_match.reshape(-1, *[1] * (a.ndim - 1)), a, b), matched, proposal
            )
    assert proposal is not None, "a tree is proposed by a head or by lookup"
    return state, pad_chain(proposal, config.verified_depth) if config.verified_depth else proposal


@native.serving
def verify_tree(
    weights: Weights,
    config: StepConfig,
    tree: Tree,
    state: SlotState,
    slots: jax.Array,
    proposal: Proposal,
    width: int,
    allowed: jax.Array | None = None,  # [batch, node, bytes] uint8, see `sampling.constrain`
) -> tuple[SlotState, StepResult]:
    """The second half: the target's own draw after every node, and what follows from them."""
    now = _gather(state, slots, width)
    depth = config.verified_depth or tree.depth
    position_ids = now.seq_lens[:, None] + proposal.depths
    mask = ancestor_mask(proposal.parents, depth)
    out = _run_target(weights, config, state, now, proposal.token_ids, position_ids, mask)
    logits = target_model.logits(weights.target, config.target, out.hidden_states)
    nodes = Nodes(proposal.token_ids, proposal.parents, proposal.depths, mask, _recent(state, now, slots, now.seq_lens))
    target_ids = _draw(now, nodes, logits, position_ids + 1, allowed)
    verdict = verify(proposal, target_ids, depth, jnp.minimum(now.rows.max_depth, tree.depth))

    def along_path(x: jax.Array) -> jax.Array:  # [batch, node, ...] -> [batch, depth + 1, ...]
        return jnp.take_along_axis(x, verdict.path.reshape(*verdict.path.shape, *[1] * (x.ndim - 2)), axis=1)

    step = jnp.arange(depth + 1)
    new = jax.tree.map(along_path, out.new)
    is_kept = step <= verdict.n_accepted[:, None]
    index = now.seq_lens[:, None] + step
    state = dataclasses.replace(state, cache=state.cache.write(new, now.page_table, index, is_kept, slots))
    n_emitted = verdict.n_accepted + 1
    if config.draft:
        assert out.aux_hidden_states is not None
        aux = along_path(out.aux_hidden_states)
        state = _write_aux(state, now, index, aux, is_kept)
        assert tree.uses_head, "lookup alone would leave the head behind: give such a step a config without one"
        state = dataclasses.replace(state, pending=_put_pending(state, slots, verdict.token_ids, aux, n_emitted))
    if tree.uses_head and tree.uses_lookup:
        gains = lookup.update_gains(state.gains.at[slots].get(mode="clip"), proposal.source, verdict.n_accepted)
        state = dataclasses.replace(state, gains=state.gains.at[slots].set(gains, mode="drop"))
    state = _emit(state, slots, now.seq_lens + 1, verdict.token_ids, is_kept)
    path_logits = along_path(logits)
    return state, _result(now, path_logits, verdict.token_ids, verdict.n_accepted, proposal.source)


def remember(state: SlotState, slot: jax.Array, start: jax.Array, row: jax.Array) -> SlotState:
    """Keep the history of a slot from `start` on (an answer, at most RECALL_LENGTH tokens) as row `row` of `recall`.
    All three are [] int32."""
    index = start + jnp.arange(lookup.RECALL_LENGTH)
    text = state.history.at[slot, index].get(mode="clip")
    text = jnp.where(index <= state.seq_lens[slot], text, -1)
    return dataclasses.replace(state, recall=state.recall.at[row].set(text))


@pytree
class _Now:
    """The state's rows of the slots in a step."""

    page_table: jax.Array  # [batch, max_pages], for writing
    read_table: jax.Array  # [batch, width], for attention
    slots: jax.Array  # [batch]
    seq_lens: jax.Array
    pending: Pending | None
    rows: SamplerRows
    tokens: TokenRows


def _gather(state: SlotState, slots: jax.Array, width: int) -> _Now:
    """A padded slot reads as an empty sequence whose pages are all out of range, so it writes nothing."""
    is_real = slots < state.seq_lens.shape[0]

    def take(x: jax.Array) -> jax.Array:
        return x.at[slots].get(mode="clip")

    table = jnp.where(is_real[:, None], take(state.page_table), state.cache.num_pages)
    return _Now(
        page_table=table,
        read_table=table[:, :width],
        slots=slots,
        seq_lens=jnp.where(is_real, take(state.seq_lens), 0),
        pending=jax.tree.map(take, state.pending),
        rows=jax.tree.map(take, state.rows),
        tokens=jax.tree.map(take, state.tokens),
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
        cache=state.cache,
        prefix=Prefix(now.read_table, now.seq_lens, is_exact=config.verified_depth > 0, slots=now.slots),
        aux_layers=config.aux_layers,
    )


def _recent(state: SlotState, now: _Now, slots: jax.Array, last: jax.Array) -> jax.Array:
    """The answer's tokens at `last` ([batch], an index of the history) and before it, newest first; -1 elsewhere."""
    index = last[:, None] - jnp.arange(sampling.MAX_BAD_TOKENS - 1)
    token_ids = state.history.at[slots[:, None], jnp.clip(index, 0)].get(mode="clip")
    return jnp.where(index >= now.rows.output_start[:, None], token_ids, -1)


def _single_nodes(state: SlotState, now: _Now, slots: jax.Array, last: jax.Array) -> Nodes:
    """The one node of a sequence that is not speculated on: the token at index `last`, [batch]."""
    token_ids = state.history.at[slots, last].get(mode="clip")[:, None]
    zeros = jnp.zeros_like(token_ids)
    return Nodes(token_ids, zeros, zeros, jnp.ones((1, 1, 1), bool), _recent(state, now, slots, last))


def _draw(
    now: _Now, nodes: Nodes, logits: jax.Array, position_ids: jax.Array, allowed: jax.Array | None
) -> jax.Array:  # [batch, node] int32
    constrained = sampling.constrain(now.rows, now.tokens, nodes, logits, position_ids, allowed)
    return sampling.sample(now.rows, constrained, position_ids)


def _result(
    now: _Now, logits: jax.Array, token_ids: jax.Array, n_accepted: jax.Array, source: jax.Array | None = None
) -> StepResult:
    source = jnp.zeros_like(n_accepted) if source is None else source
    counts = jnp.concatenate([n_accepted[:, None], source[:, None], token_ids], axis=1)
    return StepResult(counts, sampling.logprobs(now.rows, logits, token_ids))


def _has_run(drawn: jax.Array) -> jax.Array:
    """True, but only known once the target has run: a write masked by it comes after every read of the pages. Without
    that order XLA keeps the old pages alive by copying the whole cache (docs/log)."""
    return drawn >= 0


def _emit(
    state: SlotState,
    slots: jax.Array,
    start: jax.Array,  # [batch] int32, index of the first token
    token_ids: jax.Array,  # [batch, n] int32
    is_emitted: jax.Array,  # [batch, n] bool
) -> SlotState:
    """The sequences have grown: history, ledger, and all of it but the last token is committed."""
    index = start[:, None] + jnp.arange(token_ids.shape[1])
    is_emitted = jnp.broadcast_to(is_emitted, index.shape)
    column = jnp.where(is_emitted, index, state.history.shape[1])
    row = jnp.broadcast_to(slots[:, None], index.shape)
    entry = jnp.where(is_emitted, sampling.EMITTED, 0)
    # the tokens of a chunk before the last are in the history; where nothing is emitted, `start` are committed
    seq_lens = start + jnp.maximum(jnp.sum(is_emitted, axis=1) - 1, 0)
    return dataclasses.replace(
        state,
        seq_lens=state.seq_lens.at[slots].set(seq_lens, mode="drop"),
        history=state.history.at[row, column].set(token_ids, mode="drop"),
        tokens=dataclasses.replace(state.tokens, ledger=state.tokens.ledger.at[row, token_ids].add(entry, mode="drop")),
    )


def _put_pending(
    state: SlotState, slots: jax.Array, token_ids: jax.Array, aux_hidden_states: jax.Array, count: jax.Array
) -> Pending:
    """The state's pending tokens with those of the step's slots replaced; padded slots are dropped."""
    assert state.pending is not None
    m = token_ids.shape[1]
    return Pending(
        token_ids=state.pending.token_ids.at[slots, :m].set(token_ids, mode="drop"),
        aux_hidden_states=state.pending.aux_hidden_states.at[slots, :m].set(aux_hidden_states, mode="drop"),
        count=state.pending.count.at[slots].set(count, mode="drop"),
    )


def _write_aux(
    state: SlotState,
    now: _Now,
    index: jax.Array,  # [batch, n] int32
    aux_hidden_states: jax.Array,  # [batch, n, taps * d_model]
    is_kept: jax.Array,  # [batch, n] bool
) -> SlotState:
    """Keep the aux hidden states of every page's last entry: a later prefix hit goes on from there."""
    assert state.page_aux is not None
    page_size = state.cache.page_size
    column = index // page_size
    is_boundary = is_kept & (index % page_size == page_size - 1) & (column < now.page_table.shape[1])
    page = jnp.take_along_axis(now.page_table, jnp.minimum(column, now.page_table.shape[1] - 1), axis=1)
    page = jnp.where(is_boundary, page, state.cache.num_pages)
    return dataclasses.replace(state, page_aux=state.page_aux.at[page].set(aux_hidden_states, mode="drop"))
