"""The whole step as pure functions over a device-resident slot state (`slot_state`): `prefill`, `decode`, `speculate`.

The server jits them over its state, the trainer's evaluation over a small one of its own, so acceptance means the same
in both. A step works on a batch of slots (`slots`, padded with an index past the last one) and returns the new state
and one small result for the host. `mixed` makes a step of some slots and a prefill of others with one run of the
target.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels import native
from specserve.kernels.gather import take_each
from specserve.kernels.rows import Documents
from specserve.models import target as target_model
from specserve.models.cache import Prefix
from specserve.models.context import apart, only_live, side_by_side
from specserve.models.target import TargetOutput, TargetParams, TokenGroup
from specserve.speculative import sampling
from specserve.speculative.drafter import After, Committed, Weights
from specserve.speculative.sampling import Nodes, Scores
from specserve.speculative.slot_state import (
    Now,
    PromptChunks,
    SlotState,
    StepConfig,
    StepResult,
    Unread,
    emit,
    gather,
)
from specserve.speculative.tree import Proposal, Tree, ancestor_mask, pad_chain
from specserve.speculative.verify import verify, verify_chain

SCORED_AT_ONCE = 16  # positions of a prompt; divides every chunk


@dataclass(frozen=True)
class _Work:
    """The tokens of some slots that the target runs over, and what is made of its outputs."""

    tokens: TokenGroup
    adapter_ids: jax.Array | None  # [batch] int32, of the target's adapters
    sampled: jax.Array | None  # [batch, 1] int32, the token of each row whose logits are wanted; None: all
    # with the outputs and these logits: write what is to stay to the state
    finish: Callable[[SlotState, TargetOutput, jax.Array], tuple[SlotState, StepResult]]


def _run(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    works: Sequence[_Work],
    also: tuple[int, ...] = (),  # layers whose outputs are wanted beside the drafter's
) -> tuple[SlotState, list[StepResult]]:
    """Run the target once over the tokens of all works, whose slots are different ones."""
    outs = target_model.forward_groups(
        _adapted(weights, [(work.tokens, work.adapter_ids) for work in works]),
        config.target,
        [work.tokens for work in works],
        cache=state.cache,
        aux_layers=config.aux_layers + also,
    )
    sampled = [
        out.hidden_states if work.sampled is None else take_each(out.hidden_states, work.sampled)
        for work, out in zip(works, outs, strict=True)
    ]
    logits = target_model.logits(weights.target, config.target, side_by_side(sampled))
    results = []
    each = apart(logits, [hidden.shape[:2] for hidden in sampled])
    for work, out, own in zip(works, outs, each, strict=True):
        state, result = work.finish(state, out, own)
        results.append(result)
    return state, results


def _adapted(weights: Weights, groups: Sequence[tuple[TokenGroup, jax.Array | None]]) -> TargetParams:
    """Return the target's parameters by which every token runs through the adapter of its slot, of which each group of
    tokens has the ids ([batch] int32)."""
    if weights.adapters is None:
        return weights.target
    from specserve.models.adapters import adapted  # no other server needs it

    ids = []
    for tokens, adapter_ids in groups:
        assert adapter_ids is not None, "adapters in a state without places for them"
        ids.append(jnp.broadcast_to(adapter_ids[:, None], tokens.token_ids.shape))
    return adapted(weights.target, weights.adapters, side_by_side(ids))


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
    prompt's tokens was, and the hidden states of the layers that the config keeps."""
    work = _prompts(config, weights, state, prompts, allowed, chunk, width, is_scored=is_scored)
    state, [result] = _run(config, weights, state, [work], config.kept_layers if is_scored else ())
    return state, result


def _prompts(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    prompts: PromptChunks,
    allowed: jax.Array | None,
    chunk: int,
    width: int,
    *,
    is_scored: bool = False,
) -> _Work:
    slots, num_tokens = prompts.slots, prompts.num_tokens
    now = gather(state, slots, width)
    offset = jnp.arange(chunk)
    index = now.seq_lens[:, None] + offset
    token_ids = state.history.at[slots[:, None], index].get(mode="clip")
    last = jnp.maximum(num_tokens - 1, 0)[:, None]
    end = now.seq_lens + num_tokens
    nodes = _single_nodes(state, now, end - 1)

    def finish(state: SlotState, out: TargetOutput, logits: jax.Array) -> tuple[SlotState, StepResult]:
        drawn = sampling.draw(now.rows, now.tokens, nodes, logits, end[:, None], allowed)
        none = jnp.zeros_like(num_tokens)
        aux, kept = out.aux_hidden_states, None
        if is_scored and config.kept_layers:
            assert aux is not None
            aux, kept = jnp.split(aux, [len(config.aux_layers) * config.target.d_model], axis=-1)
        committed = Committed(
            index=index,
            token_ids=token_ids,
            next_ids=jnp.where(offset == last, drawn, jnp.roll(token_ids, -1, axis=1)),
            aux_hidden_states=aux,
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
        if kept is not None:
            result = dataclasses.replace(result, hidden_states=jnp.concatenate([kept, out.hidden_states], axis=-1))
        return emit(state, slots, end, drawn, prompts.is_last[:, None]), result

    causal: Any = Documents(jnp.zeros((1, chunk), jnp.int32))
    if config.target.is_recurrent:  # to whose layers documents are texts that follow nothing
        causal = causal.dense()
    is_live = now.view.live(offset < num_tokens[:, None])
    tokens = _tokens(config, token_ids, is_live, index, causal, _prefix(config, now))
    return _Work(tokens, now.adapter_ids, last, finish)


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
    state, [result] = _run(config, weights, state, [_plain(config, weights, state, slots, allowed, width)])
    return state, result


def _plain(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    slots: jax.Array,
    allowed: jax.Array | None,
    width: int,
) -> _Work:
    now = gather(state, slots, width)
    nodes = _single_nodes(state, now, now.seq_lens)
    index = now.seq_lens[:, None]

    def finish(state: SlotState, out: TargetOutput, logits: jax.Array) -> tuple[SlotState, StepResult]:
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
        state = emit(state, slots, now.seq_lens + 1, drawn, jnp.ones_like(committed.is_kept))
        return state, _result(now, logits, drawn, none, none)

    is_live, see_self = now.view.live(jnp.ones((1, 1), bool)), jnp.ones((1, 1, 1), bool)
    tokens = _tokens(config, nodes.token_ids, is_live, index, see_self, _prefix(config, now))
    return _Work(tokens, now.adapter_ids, None, finish)


@native.serving
def mixed(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    slots: jax.Array,  # [batch] int32, whose sequences take a step
    prompts: PromptChunks,  # of other slots
    *,
    tree: Tree | None,  # None: a plain step
    chunk: int,
    width: int,  # of both, as in `decode`
) -> tuple[SlotState, tuple[StepResult, StepResult]]:
    """Make a step of some slots and prefill a chunk of others' prompts, and read the target's weights once for both.
    Returns the result of each. Nothing of it differs from `decode` or `speculate` followed by `prefill`, but by
    rounding."""
    if tree is None:
        step = _plain(config, weights, state, slots, None, width)
    else:
        state, proposal = propose_tree(config, weights, state, slots, tree=tree, width=width, has_confidence=True)
        step = _verification(config, weights, state, slots, proposal, None, tree, width)
    works = [step, _prompts(config, weights, state, prompts, None, chunk, width)]
    state, [of_step, of_prompts] = _run(config, weights, state, works)
    return state, (of_step, of_prompts)


@native.serving
def catch_up(config: StepConfig, weights: Weights, state: SlotState, slots: jax.Array) -> SlotState:
    """Let the drafter consume what plain steps have emitted."""
    assert config.drafter is not None, "there is nobody to catch up"
    view = gather(state, slots, width=1).view
    return dataclasses.replace(state, draft=config.drafter.catch_up(weights, state.draft, view))


@native.serving
def read(
    config: StepConfig, weights: Weights, state: SlotState, unread: Unread, *, chunk: int, width: int
) -> SlotState:
    """Let the drafter read committed tokens that the target has run without it, `chunk` at most. The target runs over
    them once more for the hidden states that the drafter wants, and writes nothing."""
    assert config.drafter is not None, "there is nobody to read"
    slots, start = unread.slot[None], unread.start[None]
    page_row = state.page_table[unread.slot]
    draft = config.drafter.resume(state.draft, unread.slot, page_row, unread.start, unread.promise)
    now = gather(state, slots, width)
    index = start[:, None] + jnp.arange(chunk)
    token_ids, next_ids = (state.history.at[slots[:, None], each].get(mode="clip") for each in (index, index + 1))
    aux = None
    if config.aux_layers:
        causal, before = Documents(jnp.zeros((1, chunk), jnp.int32)), Prefix(now.view.read_table, start, slots=slots)
        is_live = now.view.live(index < now.seq_lens[:, None])
        tokens = _tokens(config, token_ids, is_live, index, causal, before)
        params = _adapted(weights, [(tokens, now.adapter_ids)])
        taps = config.aux_layers
        [out] = target_model.forward_groups(params, config.target, [tokens], cache=state.cache, aux_layers=taps)
        aux = out.aux_hidden_states
    count, none = jnp.clip(now.seq_lens - start, 0, chunk), jnp.zeros_like(start)
    committed = Committed(
        index=index,
        token_ids=token_ids,
        next_ids=next_ids,
        aux_hidden_states=aux,
        is_kept=index < now.seq_lens[:, None],
        count=count,
        n_accepted=none,
        source=none,
    )
    view = dataclasses.replace(now.view, seq_lens=start)
    return dataclasses.replace(state, draft=config.drafter.observe(weights, draft, view, committed, "prompt"))


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
    view = gather(state, slots, width).view
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
    work = _verification(config, weights, state, slots, proposal, allowed, tree, width)
    state, [result] = _run(config, weights, state, [work])
    return state, result


def _verification(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    slots: jax.Array,
    proposal: Proposal,
    allowed: jax.Array | None,
    tree: Tree,
    width: int,
) -> _Work:
    now = gather(state, slots, width)
    depth = config.verified_depth or tree.depth
    position_ids = now.seq_lens[:, None] + proposal.depths
    is_chain = tree.top_k == 1
    mask = jnp.tri(depth + 1, dtype=bool)[None] if is_chain else ancestor_mask(proposal.parents, depth)
    nodes = Nodes(proposal.token_ids, proposal.parents, proposal.depths, mask, _recent(state, now, now.seq_lens))

    def finish(state: SlotState, out: TargetOutput, logits: jax.Array) -> tuple[SlotState, StepResult]:
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
        state = emit(state, slots, now.seq_lens + 1, verdict.token_ids, committed.is_kept)
        result = _result(now, accepted(logits), verdict.token_ids, verdict.n_accepted, proposal.source)
        parents = None if is_chain else proposal.parents
        proposed = {"node_ids": proposal.token_ids, "parents": parents, "confidence": proposal.confidence}
        return state, dataclasses.replace(result, **proposed)

    is_live = now.view.live(proposal.depths <= now.rows.max_depth[:, None])
    tokens = _tokens(config, proposal.token_ids, is_live, position_ids, mask, _prefix(config, now))
    return _Work(tokens, now.adapter_ids, None, finish)


def remember(
    config: StepConfig,
    draft: Any,  # `SlotState.draft`
    history: jax.Array,  # `SlotState.history`
    answer: jax.Array,  # [4] int32: slot, start, last, number
) -> Any:
    """Let the drafter keep the `number`-th finished answer: the history of a slot from `start` to `last`, both
    included. Returns the drafter's state alone: a call takes time for each array of it."""
    assert config.drafter is not None, "there is nobody to remember it"
    slot, start, last, number = answer
    return config.drafter.remember(draft, history[slot], start, last, number)


def _commit(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    now: Now,
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


def _tokens(
    config: StepConfig,
    token_ids: jax.Array,  # [batch, n] int32
    is_live: jax.Array,  # [batch, n] bool
    position_ids: jax.Array,  # [batch, n] int32
    mask: jax.Array | Documents,  # [batch or 1, n, n]
    prefix: Prefix,
) -> TokenGroup:
    """The tokens that run through the target, the live ones where native kernels do."""
    token_ids, seen = only_live(config.target, token_ids, mask, is_live)
    return TokenGroup(token_ids, position_ids, seen, prefix)


def _prefix(config: StepConfig, now: Now) -> Prefix:
    return Prefix(now.view.read_table, now.seq_lens, is_exact=config.verified_depth > 0, slots=now.slots)


def _recent(state: SlotState, now: Now, last: jax.Array) -> jax.Array:
    """The answer's tokens at index `last` ([batch]) of the history and before it, newest first; -1 where it has
    none."""
    index = last[:, None] - jnp.arange(sampling.MAX_BAD_TOKENS - 1)
    token_ids = state.history.at[now.slots[:, None], jnp.clip(index, 0)].get(mode="clip")
    return jnp.where(index >= now.rows.output_start[:, None], token_ids, -1)


def _single_nodes(state: SlotState, now: Now, last: jax.Array) -> Nodes:
    """The one node of a sequence in a step without a tree: the token at index `last`, [batch]."""
    token_ids = state.history.at[now.slots, last].get(mode="clip")[:, None]
    zeros = jnp.zeros_like(token_ids)
    return Nodes(token_ids, zeros, zeros, jnp.ones((1, 1, 1), bool), _recent(state, now, last))


def _result(now: Now, logits: jax.Array, token_ids: jax.Array, n_accepted: jax.Array, source: jax.Array) -> StepResult:
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
