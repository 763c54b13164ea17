"""What the engine does round by round: programs are dispatched, results read, tokens handed out.

Rounds overlap: a round is dispatched before the one before it is read, so the device does not wait for the host. What a
step makes for a sequence that has ended meanwhile is dropped. Everything here runs on the engine's thread.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specserve.drafters.speculation import describe
from specserve.serve.handles import HostResult, StepHandle
from specserve.serve.options import bad_sequences, sampler_rows, token_rows
from specserve.serve.output import OutputStream
from specserve.serve.request import Delta, FinishReason, SpeculationStats, TokenLogprobs, TokenMask
from specserve.serve.runner import Runner
from specserve.serve.scheduler import Chunk, Round, Scheduler, Sequence
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.controller import Controller, Estimate
from specserve.speculative.tree import Tree
from specserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ROUNDS_AHEAD = 1  # dispatched and not read while the next one is made


@dataclass(eq=False)
class Active:
    """A sequence that has been admitted, and what the host keeps for it until it ends."""

    sequence: Sequence
    output: OutputStream
    estimate: Estimate
    bad: list[tuple[int, ...]]
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(frozen=True)
class Flight:
    """A program whose result has not been read: whose rows it holds, and as which of their epochs."""

    handle: StepHandle
    rows: list[tuple[Active, int]]
    tree: Tree | None
    is_step: bool
    most: int
    shape: tuple[int, int] = (0, 0)  # of a step: batch size and width


@dataclass
class Counters:
    """See `interface.EngineStats`."""

    num_rebuilds: int = 0
    num_late_compiles: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    num_tokens: float = 0.0  # emitted by steps
    plain_tokens: float = 0.0  # what plain steps of the same cost would have emitted


class Rounds:
    """The running sequences over a `Runner`. `on_admitted` is called as each leaves the queue, `on_end` as it
    ends."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        controller: Controller | None,
        *,
        is_partial: bool,
        on_admitted: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.controller = controller or Controller({})
        self.is_choosing = controller is not None
        self.is_partial = is_partial  # not every program is compiled, so that steps are made of those that are
        self.active: dict[Sequence, Active] = {}
        self.flights: deque[list[Flight]] = deque()
        self.counters = Counters()
        self.wait_start = 0.0  # when the thread began to wait for a step; 0: it does not
        self._last_landing = 0.0  # when the step before was read, if the device went on without a pause; 0: it did not
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self._on_admitted, self._on_end = on_admitted, on_end

    def complete(self, controller: Controller | None, *, is_partial: bool) -> None:
        """Every program is compiled, or has failed to be: then steps are still made of those that are there. The
        controller is one that knows what the steps cost."""
        self.controller, self.is_partial = controller or self.controller, is_partial

    def count_late_compiles(self, number: int) -> None:
        """So many programs more were compiled while somebody waited for them."""
        self.counters.num_late_compiles += number

    def run(self) -> bool:
        """Dispatch one round and read the one before; False when there was nothing to do. Raises what the device
        raises: then `rebuild`."""
        self._drop_cancelled()
        plan = self.scheduler.schedule()
        if plan.is_empty and not self.flights:
            return False
        if not plan.is_empty:
            self._dispatch(plan)
        while len(self.flights) > (0 if plan.is_empty else ROUNDS_AHEAD):
            self._land()
        return True

    def rebuild(self, error: Exception) -> None:
        """After a device error nothing on the device can be trusted: running requests end, waiting ones stay."""
        self.end_running(FinishReason.ERROR, f"the device failed: {error}")
        self.scheduler.pool.flush()
        self.runner.reset()
        self.counters.num_rebuilds += 1
        self.wait_start = 0.0

    def _dispatch(self, plan: Round) -> None:
        """Decoding first: running streams wait for at most the chunks of one round."""
        flights: list[Flight] = []
        decode = [self.active[sequence] for sequence in plan.decode]
        if any(active.sequence.request.token_mask for active in decode):
            while self.flights:  # what may come next depends on what has come
                self._land()
            decode = [active for active in decode if self._is_current(active) and active.sequence.num_left > 0]
        if decode:
            self.runner.extend(plan.new_pages)
            flights.append(self._step(decode))
        for chunk in plan.chunks:
            flights.append(self._prefill(chunk))
        for flight in flights:
            for active, _ in flight.rows:
                active.sequence.num_in_flight += 1
                active.sequence.most_in_flight += flight.most
        self.flights.append(flights)

    def _is_current(self, active: Active) -> bool:
        return self.active.get(active.sequence) is active and active.sequence.is_running

    def _step(self, decode: list[Active]) -> Flight:
        slots = [active.sequence.slot for active in decode]
        shape = self.runner.shapes.batch_size_of(len(slots)), self.runner.width_of(slots)
        has_logprobs = any(active.sequence.request.params.logprobs is not None for active in decode)
        if any(active.sequence.request.token_mask for active in decode):
            tree, handle = self._constrained_step(decode, slots, has_logprobs)
        else:
            tree = self._choose(decode, slots)
            # while programs are missing, that by which the draft would catch up may be one of them
            is_following = not self.is_partial and (not self.is_choosing or self.controller.is_following)
            handle = self.runner.step(slots, tree, has_logprobs=has_logprobs, is_following=is_following)
        self.counters.steps[describe(tree)] += 1
        most = 1 + (tree.depth if tree else 0)
        rows = [(active, active.sequence.epoch) for active in decode]
        return Flight(handle, rows, tree, is_step=True, most=most, shape=shape)

    def _choose(self, decode: list[Active], slots: list[int]) -> Tree | None:
        batch_size = self.runner.shapes.batch_size_of(len(slots))
        trees, width = self.runner.shapes.trees_for(batch_size), self.runner.width_of(slots)
        if self.is_partial:
            trees = [tree for tree in trees if self.runner.is_compiled(batch_size, width, tree)]
            if not trees:  # the plain way is, in a larger form
                return None if None in self.runner.shapes.trees else self.runner.shapes.trees[0]
        if not self.is_choosing:
            return trees[0]
        estimates = [active.estimate for active in decode]
        tree = self.controller.choose(estimates, trees, batch_size, width)
        ratio = self.controller.speedup(estimates, batch_size, width, tree)
        tokens = sum(self.controller.expected_tokens(estimate, tree) for estimate in estimates)
        self.counters.num_tokens += tokens
        self.counters.plain_tokens += tokens / max(ratio, 1e-9)
        return tree

    def _constrained_step(
        self, decode: list[Active], slots: list[int], has_logprobs: bool
    ) -> tuple[Tree | None, StepHandle]:
        """In two programs: the host must say which tokens may follow each proposed one."""
        tree = self.runner.shapes.constrained_tree(self.runner.shapes.batch_size_of(len(slots)))
        if self.is_partial:
            tree = None if None in self.runner.shapes.trees else tree
        token_ids, parents, proposal = self.runner.propose(slots, tree)
        allowed = np.ones((*token_ids.shape, self._vocab_size), bool)
        for row, active in enumerate(decode):
            mask = active.sequence.request.token_mask
            if mask is not None:
                self._guard(active, lambda row=row, mask=mask: _fill(allowed[row], mask, parents[row], token_ids[row]))
        return tree, self.runner.verify(slots, tree, proposal, allowed, has_logprobs=has_logprobs)

    def _guard(self, active: Active, call: Callable[[], None]) -> None:
        """Run one request's own code; a fault there ends that request alone."""
        try:
            call()
        except Exception as error:
            request = active.sequence.request
            logger.exception("%s: its own code failed; ending it", request.request_id)
            self._deliver(active, Delta(finish_reason=FinishReason.ERROR, error=f"{type(error).__name__}: {error}"))

    def _prefill(self, chunk: Chunk) -> Flight:
        """Run one chunk of a prompt, admitting its sequence before the first. It runs even where its token mask fails
        and ends the sequence: the prefix cache has its pages already."""
        sequence = chunk.sequence
        request = sequence.request
        if chunk.is_first:
            self._admit(chunk)
        active, slot = self.active[sequence], sequence.slot
        allowed = None
        if chunk.is_last and request.token_mask is not None:
            allowed = np.ones((1, self._vocab_size), bool)
            mask, row = request.token_mask, allowed
            last = np.array([sequence.token_ids[-1]])
            self._guard(active, lambda: _fill(row, mask, np.zeros(1, np.int32), last))
        handle = self.runner.prefill(
            slot,
            chunk.num_tokens,
            is_last=chunk.is_last,
            has_logprobs=chunk.is_last and request.params.logprobs is not None,
            allowed=allowed,
        )
        rows = [(active, sequence.epoch)] if chunk.is_last else []
        return Flight(handle, rows, None, is_step=False, most=1)

    def _admit(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        request = sequence.request
        active = self.active.get(sequence)
        if active is None:  # and not one that comes back after a preemption
            active = Active(
                sequence,
                OutputStream(request, self._tokenizer, self._eos_ids),
                self.controller.start(request.params.speculation),
                bad_sequences(request.params, self._tokenizer),
            )
            self.active[sequence] = active
            self._on_admitted()
        stop_ids = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else self._eos_ids)
        self.runner.admit(
            sequence.slot,
            sequence.token_ids,
            sequence.pages,
            chunk.num_cached,
            sampler_rows(request.params, request.seed, len(request.prompt_ids)),
            token_rows(request, sequence.output_ids, sorted(stop_ids), active.bad, self._vocab_size),
            promise=self.controller.expected_tokens(active.estimate, self.runner.shapes.deepest_tree) - 1.0,
        )

    def _land(self) -> None:
        """Read the oldest round and hand out its tokens."""
        flights = self.flights.popleft()
        for flight in flights:
            self.wait_start = time.monotonic()
            start = time.perf_counter()
            result = flight.handle.read()
            now = time.perf_counter()
            self.counters.wait_seconds += now - start
            self.wait_start = 0.0
            if flight.is_step and len(flights) == 1 and self._last_landing:
                self.controller.observe_seconds(*flight.shape, flight.tree, now - self._last_landing)
            # the next step began when this one ended, if it was on its way already
            self._last_landing = now if len(flights) == 1 and self.flights else 0.0
            for row, (active, epoch) in enumerate(flight.rows):
                sequence = active.sequence
                if not self._is_current(active) or sequence.epoch != epoch:
                    continue  # it has ended, or will do this step again
                sequence.num_in_flight -= 1
                sequence.most_in_flight -= flight.most
                if flight.is_step:
                    self._observe(active, flight.tree, result, row)
                self._emit(active, result, row)

    def _observe(self, active: Active, tree: Tree | None, result: HostResult, row: int) -> None:
        if tree is None:
            active.acceptance = active.acceptance.after_step()
            return
        n_accepted = int(result.n_accepted[row])
        num_draft_tokens = tree.num_nodes if active.estimate.max_depth else 0  # 0: the request wants none
        active.acceptance = active.acceptance.after_step(
            n_accepted, depth=tree.depth, num_draft_tokens=num_draft_tokens
        )
        self.controller.observe(active.estimate, tree, n_accepted)

    def _emit(self, active: Active, result: HostResult, row: int) -> None:
        """Hand over new tokens."""
        sequence = active.sequence
        request = sequence.request

        def emit() -> None:
            delta = active.output.push(result.emitted(row))
            sequence.output_ids += delta.token_ids
            if request.token_mask is not None:
                request.token_mask.accept(delta.token_ids)
            if request.params.logprobs is not None:
                delta = _with_logprobs(delta, result, row, request.params.logprobs)
            self._deliver(active, delta)

        self._guard(active, emit)

    def _deliver(self, active: Active, delta: Delta) -> None:
        request = active.sequence.request
        if delta.finish_reason is not None:
            stats = SpeculationStats(**vars(active.acceptance), num_cached_tokens=active.sequence.num_cached or 0)
            delta = Delta(delta.token_ids, delta.text, delta.finish_reason, delta.error, stats, delta.logprobs)
            # before its listener hears of it: who has the last token finds the slot and the pages free
            self._end(active, delta.finish_reason)
        try:
            request.on_delta(delta)
        except Exception:
            logger.exception("%s: its listener failed; ending it", request.request_id)
            self._end(active, FinishReason.ERROR)

    def _end(self, active: Active, reason: FinishReason) -> None:
        """Give back what a sequence holds. Ending it again does nothing."""
        sequence = active.sequence
        if self.active.pop(sequence, None) is None:
            return
        request = sequence.request
        is_whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if sequence.is_running and is_whole and not request.cache_salt:
            self.runner.remember(sequence.slot, len(request.prompt_ids))
        self.scheduler.finish(sequence)
        self._on_end()

    def _drop_cancelled(self) -> None:
        gone = Delta(finish_reason=FinishReason.CANCELLED)
        for active in [a for a in self.active.values() if a.sequence.request.is_cancelled]:
            self._deliver(active, gone)
        for sequence in [s for s in self.scheduler.waiting if s.request.is_cancelled]:
            self._end_unadmitted(sequence, gone)

    def _end_unadmitted(self, sequence: Sequence, delta: Delta) -> None:
        """End a sequence that has never begun."""
        self.scheduler.finish(sequence)
        self._on_admitted()  # it is queued no more
        self._on_end()
        try:
            sequence.request.on_delta(delta)
        except Exception:
            logger.exception("%s: its listener failed", sequence.request.request_id)

    def end_running(self, reason: FinishReason, error: str) -> None:
        """End what holds a slot; those that wait, also after a preemption, stay."""
        self.flights.clear()
        delta = Delta(finish_reason=reason, error=error)
        for sequence in list(self.scheduler.running):
            active = self.active.get(sequence)
            if active is not None:
                self._deliver(active, delta)
            else:  # the failure came between its place in the plan and its admission
                self._end_unadmitted(sequence, delta)

    def end_all(self, reason: FinishReason, error: str) -> None:
        """End every sequence."""
        self.end_running(reason, error)
        delta = Delta(finish_reason=reason, error=error)
        for active in list(self.active.values()):
            self._deliver(active, delta)
        for sequence in list(self.scheduler.waiting):
            self._end_unadmitted(sequence, delta)

    @property
    def _vocab_size(self) -> int:
        return self.runner.config.target.vocab_size


def _fill(allowed: np.ndarray, mask: TokenMask, parents: np.ndarray, token_ids: np.ndarray) -> None:
    """Write a request's masks into its rows, [node, vocab] bool."""
    rows = np.asarray(mask.masks(parents.tolist(), token_ids.tolist()))
    if rows.shape != allowed.shape or rows.dtype != bool or not rows.any(axis=1).all():
        raise ValueError(
            f"a token mask returned {rows.dtype} {rows.shape}; expected bool {allowed.shape} with a True in each row"
        )
    allowed[:] = rows


def _with_logprobs(delta: Delta, result: HostResult, row: int, num_top: int) -> Delta:
    assert result.logprobs is not None
    chosen, top, top_ids = (array[row] for array in result.logprobs)
    found = tuple(
        TokenLogprobs(
            token_id,
            float(chosen[i]),
            tuple(zip(top_ids[i, :num_top].tolist(), top[i, :num_top].tolist(), strict=True)),
        )
        for i, token_id in enumerate(delta.token_ids)
    )
    return Delta(delta.token_ids, delta.text, delta.finish_reason, delta.error, delta.stats, found)
