"""The whole step as pure functions over a device-resident slot state: `prefill`, `decode`, `speculate`.

The server jits them over its state, the trainer's evaluation over a small one of its own, so acceptance means the same
in both. A step works on a batch of slots (`slots`, padded with an index past the last one) and returns the new state
and one small result for the host. The invariant between steps, for a slot whose sequence is x[0..L]:

  history                x[0..L]; x[L] is the root, emitted and not yet consumed by the target
  seq_lens = L           the target has committed entries 0..L-1
  draft                  what the drafter keeps, see `drafter`
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels import native
from specserve.kernels.gather import take_each, take_rows
from specserve.kernels.pages import share_out
from specserve.models import target as target_model
from specserve.models.cache import Cache, Prefix
from specserve.models.config import ModelConfig
from specserve.models.target import TargetOutput
from specserve.pytree import pytree
from specserve.speculative import sampling
from specserve.speculative.drafter import After, Committed, Drafter, Sizes, SlotView, Weights
from specserve.speculative.sampling import Logprobs, Nodes, SamplerRows, Scores, TokenRows
from specserve.speculative.tree import Proposal, Tree, ancestor_mask, pad_chain
from specserve.speculative.verify import verify, verify_chain

SCORED_AT_ONCE = 16  # positions of a prompt; divides every chunk


@dataclass(frozen=True)
class StepConfig:
    """The configuration of a step: everything that is known when it is compiled."""

    target: ModelConfig
    drafter: Drafter | None  # None: plain decoding
    max_depth: int  # of any tree that runs on the state
    is_coupled: bool = True  # the draft ranks with the target's noise; off only to measure what that brings
    verified_depth: int = 0  # every step verifies a chain of this length, in one exact order of sums; 0: what it must

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


@pytree
class StepResult:
    """The result of a step, on the device or read to the host, in arrays of NumPy. Row i belongs to the i-th of the
    step's slots."""

    counts: Any  # [batch, 2 + depth + 1] int32: draft tokens accepted, the source of the proposal, the tokens
    logprobs: Logprobs | None  # of the tokens; read where they were asked for
    prompt: Scores | None = None  # [batch, chunk], of the token after each of a scored prompt
    node_ids: jax.Array | None = None  # [batch, node] int32, the proposed tokens and the root; None without a tree
    parents: jax.Array | None = None  # [batch, node] int32, of the nodes; None of a chain, where they are known
    confidence: jax.Array | None = None  # [batch, depth] float32, see `tree.Proposal`; None where the draft gives none

    @property
    def n_accepted(self) -> Any:  # [batch] int32
        return self.counts[:, 0]

    @property
    def token_ids(self) -> Any:  # [batch, depth + 1] int32
        return self.counts[:, 2:]

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


@pytree
class PromptChunks:
    """The next tokens of prompts, that a prefill runs."""

    slots: jax.Array  # [batch] int32
    num_tokens: jax.Array  # [batch] int32, how many of the next `chunk` tokens of the history to run
    is_last: jax.Array  # [batch] bool, whether they end the prompt: then the drawn token counts, it is the root


def init_state(
    config: StepConfig, *, num_slots: int, num_pages: int, page_size: int, max_pages: int, num_ranks: int = 1
) -> SlotState:
    """Make an empty state. `max_pages` bounds the pages of one sequence, `num_pages` those of all. With `num_ranks` the
    mesh shares the pages out over so many data ranks (`kernels.pages`), and every batch of slots must be cut like
    them."""
    sizes = Sizes(num_slots, num_pages, page_size, max_pages, config.max_depth)
    state = SlotState(
        page_table=jnp.full((num_slots, max_pages), num_pages, jnp.int32),
        seq_lens=jnp.zeros(num_slots, jnp.int32),
        history=jnp.zeros((num_slots, max_pages * page_size), jnp.int32),
        rows=SamplerRows.greedy(num_slots),
        tokens=TokenRows.zeros(num_slots, config.target.vocab_size),
        cache=Cache.zeros(config.target, num_slots=num_slots, num_pages=num_pages, page_size=page_size),
        draft=config.drafter.init_state(config.target, sizes) if config.drafter else None,
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
        cache=state.cache.reset(slot),
        draft=draft,
    )


@native.serving
def prefill(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    prompts: PromptChunks,
    allowed: jax.Array | None = None,  # [batch, 1, bytes] uint8, see `sampling.constrain`
    *,
    chunk: int,
    width: int,  # pages of each sequence that attention reads; all that is committed must lie in them
    is_scored: bool = False,
) -> tuple[SlotState, StepResult]:
    """Run one chunk of each prompt, and draw the token after it. With `is_scored`, also return how likely each of the
    prompt's tokens was."""
    slots, num_tokens = prompts.slots, prompts.num_tokens
    now = _gather(state, slots, width)
    offset = jnp.arange(chunk)
    index = now.seq_lens[:, None] + offset
    token_ids = state.history.at[slots[:, None], index].get(mode="clip")
    causal = (offset[:, None] >= offset)[None]
    out = _run_target(config, weights, state, now, token_ids, index, causal)
    last = jnp.maximum(num_tokens - 1, 0)[:, None]
    hidden = take_each(out.hidden_states, last)
    logits = target_model.logits(weights.target, config.target, hidden)
    end = now.seq_lens + num_tokens
    nodes = _single_nodes(state, now, end - 1)
    drawn = sampling.draw(now.rows, now.tokens, nodes, logits, end[:, None], allowed)
    none = jnp.zeros_like(num_tokens)
    committed = Committed(
        index=index,
        token_ids=token_ids,
        next_ids=jnp.where(offset == last, drawn, jnp.roll(token_ids, -1, axis=1)),
        aux_hidden_states=out.aux_hidden_states,
        is_kept=(offset < num_tokens[:, None]) & _has_run(drawn),
        count=num_tokens,
        n_accepted=none,
        source=none,
    )
    state = _commit(config, weights, state, now, out.new, committed, "prompt")
    result = _result(now, logits, drawn, none, none)
    if is_scored:
        next_ids = state.history.at[slots[:, None], index + 1].get(mode="clip")
        result = dataclasses.replace(result, prompt=_score(config, weights, out.hidden_states, next_ids))
    return _emit(state, slots, end, drawn, prompts.is_last[:, None]), result


@native.serving
def decode(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    slots: jax.Array,  # [batch] int32
    allowed: jax.Array | None = None,  # [batch or 1, 1, bytes] uint8, see `sampling.constrain`
    *,
    width: int,  # pages of each sequence that attention reads; all that is committed must lie in them
) -> tuple[SlotState, StepResult]:
    """Run one plain decoding step: draw one token for each slot, and let the drafter observe it."""
    now = _gather(state, slots, width)
    nodes = _single_nodes(state, now, now.seq_lens)
    index = now.seq_lens[:, None]
    out = _run_target(config, weights, state, now, nodes.token_ids, index, jnp.ones((1, 1, 1), bool))
    logits = target_model.logits(weights.target, config.target, out.hidden_states)
    drawn = sampling.draw(now.rows, now.tokens, nodes, logits, index + 1, allowed)
    none = jnp.zeros_like(now.seq_lens)
    committed = Committed(
        index=index,
        token_ids=nodes.token_ids,
        next_ids=drawn,
        aux_hidden_states=out.aux_hidden_states,
        is_kept=_has_run(drawn),
        count=jnp.ones_like(now.seq_lens),
        n_accepted=none,
        source=none,
    )
    state = _commit(config, weights, state, now, out.new, committed, "plain")
    state = _emit(state, slots, now.seq_lens + 1, drawn, jnp.ones_like(committed.is_kept))
    return state, _result(now, logits, drawn, none, none)


@native.serving
def catch_up(config: StepConfig, weights: Weights, state: SlotState, slots: jax.Array) -> SlotState:
    """Let the drafter consume what plain steps have emitted."""
    assert config.drafter is not None, "there is nobody to catch up"
    view = _gather(state, slots, width=1).view
    return dataclasses.replace(state, draft=config.drafter.catch_up(weights, state.draft, view))


def speculate(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    slots: jax.Array,  # [batch] int32
    *,
    tree: Tree,
    width: int,  # as in `decode`; the root's draft entry must lie in them too
) -> tuple[SlotState, StepResult]:
    """Run one speculative step. The drafter proposes a tree, the target runs once over it, its draws decide, and the
    accepted path is committed."""
    state, proposal = propose_tree(config, weights, state, slots, tree=tree, width=width, has_confidence=True)
    return verify_tree(config, weights, state, slots, proposal, tree=tree, width=width)


@native.serving
def propose_tree(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    slots: jax.Array,
    *,
    tree: Tree,
    width: int,
    has_confidence: bool = False,  # keep `Proposal.confidence`
) -> tuple[SlotState, Proposal]:
    """Run the first half of a speculative step: propose a tree. Steps with constrained sequences run it alone, because
    the host must say which tokens may follow each proposed node (`sampling.constrain`)."""
    assert tree.depth <= config.max_depth, f"tree of depth {tree.depth} in a state for {config.max_depth}"
    assert config.drafter is not None, "a tree is proposed by a drafter"
    view = _gather(state, slots, width).view
    if not config.is_coupled:
        view = dataclasses.replace(view, rows=dataclasses.replace(view.rows, temperature=view.rows.temperature * 0))
    draft, proposal = config.drafter.propose(weights, state.draft, view, tree)
    state = dataclasses.replace(state, draft=draft)
    proposal = dataclasses.replace(proposal, scores=None)
    if not has_confidence:
        proposal = dataclasses.replace(proposal, confidence=None)
    return state, pad_chain(proposal, config.verified_depth) if config.verified_depth else proposal


@native.serving
def verify_tree(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    slots: jax.Array,
    proposal: Proposal,
    allowed: jax.Array | None = None,  # [batch, node, bytes] uint8, see `sampling.constrain`
    *,
    tree: Tree,
    width: int,
) -> tuple[SlotState, StepResult]:
    """Run the second half of a speculative step: draw the target's own token after every node, and commit the accepted
    path."""
    now = _gather(state, slots, width)
    depth = config.verified_depth or tree.depth
    position_ids = now.seq_lens[:, None] + proposal.depths
    is_chain = tree.top_k == 1
    mask = jnp.tri(depth + 1, dtype=bool)[None] if is_chain else ancestor_mask(proposal.parents, depth)
    out = _run_target(config, weights, state, now, proposal.token_ids, position_ids, mask)
    logits = target_model.logits(weights.target, config.target, out.hidden_states)
    nodes = Nodes(proposal.token_ids, proposal.parents, proposal.depths, mask, _recent(state, now, now.seq_lens))
    target_ids = sampling.draw(now.rows, now.tokens, nodes, logits, position_ids + 1, allowed)
    max_depth = jnp.minimum(now.rows.max_depth, tree.depth)
    if is_chain:
        verdict = verify_chain(proposal, target_ids, max_depth)
    else:
        verdict = verify(proposal, target_ids, depth, max_depth)

    def accepted(x: jax.Array) -> jax.Array:  # [batch, node, ...] -> [batch, depth + 1, ...]
        return x if verdict.path is None else take_each(x, verdict.path)

    step = jnp.arange(depth + 1)
    committed = Committed(
        index=now.seq_lens[:, None] + step,
        token_ids=accepted(proposal.token_ids),
        next_ids=verdict.token_ids,
        aux_hidden_states=None if out.aux_hidden_states is None else accepted(out.aux_hidden_states),
        is_kept=step <= verdict.n_accepted[:, None],
        count=verdict.n_accepted + 1,
        n_accepted=verdict.n_accepted,
        source=proposal.source,
    )
    state = _commit(config, weights, state, now, out.new, committed, tree, verdict.path)
    state = _emit(state, slots, now.seq_lens + 1, verdict.token_ids, committed.is_kept)
    result = _result(now, accepted(logits), verdict.token_ids, verdict.n_accepted, proposal.source)
    parents = None if is_chain else proposal.parents
    proposed = {"node_ids": proposal.token_ids, "parents": parents, "confidence": proposal.confidence}
    return state, dataclasses.replace(result, **proposed)


def remember(
    config: StepConfig, state: SlotState, slot: jax.Array, start: jax.Array, last: jax.Array, number: jax.Array
) -> SlotState:
    """Let the drafter keep the `number`-th finished answer: the history of a slot from `start` to `last`, both
    included. All four are [] int32."""
    assert config.drafter is not None, "there is nobody to remember it"
    draft = config.drafter.remember(state.draft, state.history[slot], start, last, number)
    return dataclasses.replace(state, draft=draft)


@pytree
class _Now:
    """The parts of the state that a step reads for its slots."""

    view: SlotView
    tokens: TokenRows

    @property
    def slots(self) -> jax.Array:
        return self.view.slots

    @property
    def seq_lens(self) -> jax.Array:
        return self.view.seq_lens

    @property
    def rows(self) -> SamplerRows:
        return self.view.rows


def _gather(state: SlotState, slots: jax.Array, width: int) -> _Now:
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
    )
    return _Now(view, take_rows(state.tokens, slots))


def _commit(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    now: _Now,
    new: Any,  # the entries that the target's layers leave behind, of [batch, n] tokens
    committed: Committed,
    after: After,
    path: jax.Array | None = None,  # [batch, m] int32, which of the n tokens those committed are; None: all
) -> SlotState:
    """Write the kept entries to the target's cache, and let the drafter observe it."""
    cache = state.cache.write(new, now.view.page_table, committed.index, committed.is_kept, now.slots, path)
    draft = state.draft
    if config.drafter:
        draft = config.drafter.observe(weights, draft, now.view, committed, after)
    return dataclasses.replace(state, cache=cache, draft=draft)


def _run_target(
    config: StepConfig,
    weights: Weights,
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
        prefix=Prefix(now.view.read_table, now.seq_lens, is_exact=config.verified_depth > 0, slots=now.slots),
        aux_layers=config.aux_layers,
    )


def _recent(state: SlotState, now: _Now, last: jax.Array) -> jax.Array:
    """The answer's tokens at index `last` ([batch]) of the history and before it, newest first; -1 where it has
    none."""
    index = last[:, None] - jnp.arange(sampling.MAX_BAD_TOKENS - 1)
    token_ids = state.history.at[now.slots[:, None], jnp.clip(index, 0)].get(mode="clip")
    return jnp.where(index >= now.rows.output_start[:, None], token_ids, -1)


def _single_nodes(state: SlotState, now: _Now, last: jax.Array) -> Nodes:
    """The one node of a sequence in a step without a tree: the token at index `last`, [batch]."""
    token_ids = state.history.at[now.slots, last].get(mode="clip")[:, None]
    zeros = jnp.zeros_like(token_ids)
    return Nodes(token_ids, zeros, zeros, jnp.ones((1, 1, 1), bool), _recent(state, now, last))


def _result(now: _Now, logits: jax.Array, token_ids: jax.Array, n_accepted: jax.Array, source: jax.Array) -> StepResult:
    counts = jnp.concatenate([n_accepted[:, None], source[:, None], token_ids], axis=1)
    return StepResult(counts, sampling.logprobs(now.rows, logits, token_ids))


def _score(
    config: StepConfig,
    weights: Weights,
    hidden_states: jax.Array,  # [batch, chunk, d_model]
    next_ids: jax.Array,  # [batch, chunk] int32
) -> Scores:
    """Scores of the tokens after each position, a few positions at a time: logits of a whole chunk would be larger
    than anything else."""
    batch, chunk = next_ids.shape
    size = min(chunk, SCORED_AT_ONCE)

    def in_blocks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch, chunk // size, size, *x.shape[2:]), 1, 0)

    def score(block: tuple[jax.Array, jax.Array]) -> Scores:
        return sampling.score(target_model.logits(weights.target, config.target, block[0]), block[1])

    scores = jax.lax.map(score, (in_blocks(hidden_states), in_blocks(next_ids)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, chunk, *x.shape[3:]), scores)


def _has_run(drawn: jax.Array) -> jax.Array:
    """Return True everywhere, as a value that is known only once the target has run: it is computed from the drawn
    token, and NOTHING is the least that is drawn. A write that it masks comes after every read of the pages. Without
    that order XLA keeps the old pages alive by copying the whole cache (docs/log)."""
    return drawn >= sampling.NOTHING


def _emit(
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
    return dataclasses.replace(
        state,
        seq_lens=state.seq_lens.at[slots].set(seq_lens, mode="drop"),
        history=state.history.at[row, column].set(token_ids, mode="drop"),
        tokens=dataclasses.replace(state.tokens, seen=state.tokens.seen.at[row, token_ids].add(entry, mode="drop")),
    )
