"""The delivery of tokens: what the steps emit becomes deltas for the listeners of sequences, and sequences end."""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable

import numpy as np

from specserve.drafters.words import ALL_TEXT
from specserve.errors import RequestError
from specserve.serve.engine.scheduler import Scheduler
from specserve.serve.engine.sequence import Sequence
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import (
    Delta,
    DraftTree,
    FinishReason,
    PromptToken,
    Request,
    SpeculationStats,
    TokenLogprobs,
)
from specserve.speculative.drafter import HEAD
from specserve.speculative.sampling import NOTHING
from specserve.speculative.slot_state import StepResult
from specserve.speculative.tree import Tree

logger = logging.getLogger(__name__)


class Delivery:
    """Hands the tokens of steps to the listeners of their sequences, and ends the sequences that are over. `on_end` is
    called as each ends."""

    def __init__(self, runner: Runner, scheduler: Scheduler, on_end: Callable[[Request], None]) -> None:
        self._runner, self._scheduler, self._on_end = runner, scheduler, on_end
        self.is_notifying = False  # a sequence has ended, and its listener is being called

    def use(self, runner: Runner) -> None:
        """Go on with another runner."""
        self._runner = runner

    def guard(self, sequence: Sequence, call: Callable[[], None]) -> None:
        """Run one request's own code; a fault there ends that request alone."""
        try:
            call()
        except RequestError as error:
            self.deliver(sequence, Delta(finish_reason=FinishReason.ERROR, error=str(error), is_refused=True))
        except Exception as error:
            logger.exception("%r: its own code failed; ending it", sequence.request.request_id)
            self.deliver(sequence, Delta(finish_reason=FinishReason.ERROR, error=f"{type(error).__name__}: {error}"))

    def emit(
        self, sequence: Sequence, tree: Tree | None, result: StepResult, row: int, *, is_step: bool = True
    ) -> None:
        """Hand over the new tokens of a step with that tree, or of the end of a prompt."""
        request = sequence.request
        drawn = result.emitted(row)
        token_ids = list(itertools.takewhile(lambda token_id: token_id != NOTHING, drawn))
        delta = sequence.output.push(token_ids, min(int(result.n_accepted[row]), len(token_ids)))
        if is_step:
            sequence.count_step(None if self._runner.shapes.accepts_nothing else tree, delta)
        if sequence.is_scored:
            states = np.concatenate(sequence.hidden_states) if sequence.hidden_states else None
            delta = dataclasses.replace(delta, prompt=tuple(sequence.prompt), hidden_states=states)
            sequence.hidden_states.clear()
        sequence.output_ids += delta.token_ids
        if request.token_mask is not None:
            request.token_mask.accept(delta.token_ids)
        if request.params.logprobs is not None:
            found = logprobs(delta.token_ids, result, row, request.params.logprobs)
            delta = dataclasses.replace(delta, logprobs=found)
        if request.params.return_tree and request.params.speculation != 0 and tree is not None:
            found = draft_tree(tree, result, row, delta)
            # a lookup may propose another client's text, of which what the target has drawn is shown
            is_found = tree.lookup == ALL_TEXT and result.counts[row, 1] != HEAD
            delta = dataclasses.replace(delta, tree=found.accepted_alone() if is_found else found)
        if token_ids:
            self.deliver(sequence, delta)
        if len(token_ids) < len(drawn) and not sequence.has_ended:
            raise RequestError(
                f"after {len(sequence.output_ids)} tokens of the answer, the request's options ban every token"
            )

    def deliver(self, sequence: Sequence, delta: Delta) -> None:
        reason = delta.finish_reason
        if delta.token_ids:
            sequence.last_time = time.monotonic()
            sequence.first_time = sequence.first_time or sequence.last_time
        if reason is not None:
            most = max(self._runner.shapes.max_accepted, len(sequence.acceptance.accepted_per_depth))  # of any head
            delta = dataclasses.replace(delta, stats=stats_of(sequence, most))
            # before its listener is called: a client that has the last token finds the slot and the pages free
            self.is_notifying = True
            self._end(sequence, reason)
        try:
            sequence.request.on_delta(delta)
        except Exception:
            logger.exception("%r: its listener failed; ending it", sequence.request.request_id)
            self._end(sequence, FinishReason.ERROR)
        self.is_notifying = False

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Give back what a sequence holds. Ending it again does nothing."""
        if sequence.has_ended:
            return
        request, slot = sequence.request, sequence.slot
        self._on_end(request)
        self._scheduler.finish(sequence)
        # the slot's next owner is admitted by a later program, so its row still holds this answer
        if slot >= 0 and reason in (FinishReason.STOP, FinishReason.LENGTH) and not request.cache_salt:
            self._runner.remember(slot, len(request.prompt_ids), len(sequence.token_ids) - 1)


def take_scores(sequence: Sequence, num_tokens: int, result: StepResult, row: int) -> None:
    """Add to a sequence what the result of its prompt's next tokens has of what was asked for."""
    params = sequence.request.params
    if params.prompt_logprobs is not None:
        sequence.prompt += prompt_tokens(sequence.request, len(sequence.prompt), num_tokens, result, row)
    if params.hidden_states:
        sequence.hidden_states.append(result.hidden_states[row, :num_tokens])


def prompt_tokens(request: Request, start: int, num_tokens: int, result: StepResult, row: int) -> list[PromptToken]:
    """The next tokens of a scored prompt, of which `start` are known, by the row of its chunk. A chunk has the scores
    of the tokens after its own; the last one's is drawn, and the first of all has nothing before it."""
    assert result.prompt is not None
    assert request.params.prompt_logprobs is not None
    found = [] if start else [PromptToken(request.prompt_ids[0], None, 0)]
    token_ids = request.prompt_ids[start + len(found) :][:num_tokens]
    scores, num_top = result.prompt.logprobs, request.params.prompt_logprobs
    arrays = scores.chosen, scores.top, scores.top_ids, result.prompt.ranks
    each = zip(token_ids, *(array[row] for array in arrays), strict=False)
    for token_id, chosen, top, top_ids, rank in each:
        likeliest = tuple(zip(top_ids[:num_top].tolist(), top[:num_top].tolist(), strict=True))
        found.append(PromptToken(token_id, TokenLogprobs(token_id, float(chosen), likeliest), int(rank)))
    return found


def logprobs(token_ids: tuple[int, ...], result: StepResult, row: int, num_top: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of the tokens that a row of a result emits, one for each of `token_ids`."""
    assert result.logprobs is not None
    found = result.logprobs
    chosen, top, top_ids = (array[row] for array in (found.chosen, found.top, found.top_ids))
    return tuple(
        TokenLogprobs(
            token_id,
            float(chosen[i]),
            tuple(zip(top_ids[i, :num_top].tolist(), top[i, :num_top].tolist(), strict=True)),
        )
        for i, token_id in enumerate(token_ids)
    )


def draft_tree(tree: Tree, result: StepResult, row: int, delta: Delta) -> DraftTree:
    """Return the tree that a step proposed for a row, and the way that the tokens of its delta take through it."""
    assert result.node_ids is not None
    # a deterministic step pads each tree with nodes of its own
    token_ids = result.node_ids[row, : tree.num_nodes + 1].tolist()
    parents = [0, *range(tree.num_nodes)]  # of a chain
    if result.parents is not None:
        parents = result.parents[row, : tree.num_nodes + 1].tolist()
    accepted, current = [], 0
    for token_id in delta.token_ids[: delta.num_accepted]:
        nodes = range(current + 1, len(parents))  # parents come before their children
        current = next(node for node in nodes if (parents[node], token_ids[node]) == (current, token_id))
        accepted.append(current)
    return DraftTree(tuple(token_ids), tuple(parents), tuple(accepted))


def stats_of(sequence: Sequence, max_accepted: int) -> SpeculationStats:
    """Return the statistics of a sequence that ends now."""
    now = time.monotonic()
    versions = [each for each in sequence.versions if each[0] < len(sequence.output_ids)] or sequence.versions[:1]
    admitted = sequence.admit_time or now
    first = sequence.first_time or now
    return SpeculationStats(
        **vars(sequence.acceptance),
        num_cached_tokens=sequence.num_cached or 0,
        drafts=tuple(sequence.drafts),
        max_accepted=max_accepted,
        versions=tuple(versions),
        queue_seconds=admitted - sequence.request.submit_time,
        prefill_seconds=first - admitted,
        decode_seconds=(sequence.last_time or now) - first,
    )
