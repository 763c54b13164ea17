"""The rounds of the engine: programs are dispatched, results read, tokens handed out.

Rounds overlap: a round is dispatched before the one before it is read, so the device does not wait for the host. The
tokens that a step makes for a sequence that has ended meanwhile are dropped. Everything here runs on the engine's
thread.
"""

import bisect
import dataclasses
import functools
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from specserve.drafters.speculation import describe
from specserve.errors import RequestError
from specserve.serve.engine import results
from specserve.serve.engine.bursts import Bursts
from specserve.serve.engine.flights import Flight
from specserve.serve.engine.handles import HostResult, StepHandle
from specserve.serve.engine.interface import ROUND_SIZES, EngineStats
from specserve.serve.engine.options import sampler_rows, token_rows
from specserve.serve.engine.scheduler import Chunk, Round, Scheduler, Sequence
from specserve.serve.programs import wanted
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.output import OutputStream
from specserve.serve.requests.request import Delta, FinishReason, Request, fill_masks
from specserve.speculative.controller import Controller, Estimate
from specserve.speculative.sampling import NOTHING
from specserve.speculative.tree import Tree
from specserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ROUNDS_AHEAD = 1  # dispatched and not read while the next one is made


class _Asked(TypedDict):
    """The parts of a step's result that some sequence wants besides its tokens."""

    has_logprobs: bool
    has_tree: bool


@dataclass
class _Counters:
    """The counts behind the part of `interface.EngineStats` that concerns rounds."""

    num_rebuilds: int = 0
    num_late_compiles: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    round_sizes: list[int] = field(default_factory=lambda: [0] * (len(ROUND_SIZES) + 1))  # by `ROUND_SIZES`
    num_round_tokens: int = 0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    num_tokens: float = 0.0  # emitted by steps
    plain_tokens: float = 0.0  # what plain steps of the same cost would have emitted


class Rounds:
    """The sequences that the engine has taken, over a `Runner`. `on_end` is called as each ends."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        controller: Controller | None,
        *,
        is_partial: bool,
        most_steps: int | None,  # see `EngineOptions`
        on_end: Callable[[Request], None],
    ) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.controller = controller or Controller({})
        self.is_choosing = controller is not None
        self._prior: Seq[float] | None = None  # acceptance by depth of a head that took the first one's place
        self.only: tuple[Tree | None] | None = None  # the one way to step that the operator wants; None: any
        self.is_partial = is_partial  # not every program is compiled, so that steps are made of those that are
        self.flights: deque[list[Flight]] = deque()
        self._wait_start = 0.0  # when the thread began to wait for a step; 0: it does not
        self._counters = _Counters()
        self._num_missed = runner.compiled.num_missed
        self._bursts, self._most_steps = Bursts(), most_steps
        self._last_landing = 0.0  # when the step before was read, if the device went on without a pause; 0: it did not
        self._tokenizer, self._on_end = tokenizer, on_end
        self.is_telling = False  # a sequence has ended, and its listener is being told

    def complete(self, controller: Controller | None, *, is_partial: bool) -> None:
        """Note that every program is compiled, or has failed to compile; then steps are still made of those that are
        there. The controller is one that knows what the steps cost."""
        if controller is not None:
            controller.calibration, self.controller = self.controller.calibration, controller
        self.is_partial = is_partial
        if self._prior is not None:  # the controller was made of what the first head promises
            self.controller.expect(self._prior)

    @property
    def running(self) -> Seq[Sequence]:
        """The sequences in a slot. It may be called from any thread."""
        return tuple(self.scheduler.running)

    def step_only(self, *way: Tree | None) -> None:
        """Make every step in this one way from now on (None: plainly); without a way, as the server chooses."""
        self.only = (way[0],) if way else None

    def add(self, request: Request) -> None:
        """Put a request into the queue."""
        self.scheduler.add(Sequence(request, OutputStream(request, self._tokenizer)))

    def run(self) -> bool:
        """Dispatch one round and read the one before; False when there was nothing to do. Raises what the device
        raises: then `rebuild`."""
        start = time.perf_counter()
        self._drop_cancelled()
        plan = self.scheduler.schedule(min(self.runner.most_steps, self._most_steps or self.runner.most_steps))
        if plan.is_empty and not self.flights:
            return False
        if not plan.is_empty:
            self._dispatch(plan)
        while len(self.flights) > (0 if plan.is_empty else ROUNDS_AHEAD):
            self._land()
        self._count_late_compiles()
        self._counters.busy_seconds += time.perf_counter() - start
        return True

    def rebuild(self, error: Exception) -> None:
        """Start anew after a device error, when nothing on the device can be trusted: running requests end, waiting
        ones stay."""
        self._end_running(FinishReason.ERROR, f"the device failed: {error}")
        self.scheduler.pool.flush()
        self.runner.reset()
        self._counters.num_rebuilds += 1
        self._wait_start = 0.0

    def flush_cache(self) -> None:
        """Forget every cached prefix and every answer that a lookup may find."""
        self.scheduler.pool.flush()
        self.runner.forget_answers()

    def swap_head(self, runner: Runner, prior: Seq[float]) -> None:
        """Go on with another head, of this acceptance by depth, by a runner `with_head`. What the old one wrote is not
        read by it: running sequences wait for their turn again and are prefilled anew, and cached prefixes are
        forgotten. Raises ConfigError where the device cannot run it, and then goes on with the old one."""
        while self.flights:
            self._land()
        self.scheduler.preempt_all()
        self.scheduler.pool.flush()
        runner.take_over(self.runner)
        self.runner, self._num_missed, self._last_landing = runner, runner.compiled.num_missed, 0.0
        self._bursts = Bursts()  # another head takes another time
        self.scheduler.set_step(max_step=runner.shapes.max_step, cache_lag=runner.cache_lag)
        if self.only and self.only[0] not in runner.shapes.trees:
            logger.warning("the new head has no programs for %s: the server's own choice holds", describe(*self.only))
            self.only = None
        self._prior = prior
        self.controller.expect(prior)
        for sequence in self.scheduler.waiting:
            sequence.estimate = None

    def end_all(self, reason: FinishReason, error: str) -> None:
        """End every sequence, running or waiting."""
        self._end_running(reason, error)
        for sequence in list(self.scheduler.waiting):
            self._deliver(sequence, Delta(finish_reason=reason, error=error))

    def stats(self) -> EngineStats:
        """Return the counts of the rounds; the engine knows the rest. It may be called from any thread."""
        counters, scheduler, start = self._counters, self.scheduler, self._wait_start
        pool, steps = scheduler.pool, counters.steps.copy()
        return EngineStats(
            num_running=len(self.running),
            num_pages=pool.num_pages,
            num_pages_held=pool.num_pages - pool.num_available,
            num_pages_cached=pool.num_cached,
            num_prefix_queries=scheduler.num_queried,
            num_prefix_hits=scheduler.num_hits,
            num_preemptions=scheduler.num_preemptions,
            num_rebuilds=counters.num_rebuilds,
            num_steps=sum(steps.values()),
            num_steps_by_speculation=steps,
            round_sizes=tuple(counters.round_sizes),
            num_round_tokens=counters.num_round_tokens,
            page_size=self.runner.shapes.page_size,
            cache_dtype=self.runner.config.target.cache_dtype or self.runner.config.target.dtype,
            is_caching=scheduler.is_caching,
            busy_seconds=counters.busy_seconds,
            host_seconds=counters.busy_seconds - counters.wait_seconds,
            num_late_compiles=counters.num_late_compiles,
            estimated_speedup=counters.num_tokens / counters.plain_tokens if counters.plain_tokens else 1.0,
            num_promised=self.controller.calibration.promised,
            num_kept=self.controller.calibration.kept,
            confidence_trust=self.controller.calibration.trust,
            seconds_in_step=time.monotonic() - start if start else 0.0,
        )

    def _count_late_compiles(self) -> None:
        num_missed = self.runner.compiled.num_missed
        number, self._num_missed = num_missed - self._num_missed, num_missed
        if number and not self.is_partial:
            logger.warning("%d programs were compiled while serving", number)
            self._counters.num_late_compiles += number

    def _dispatch(self, plan: Round) -> None:
        """Decoding first: running streams wait for at most the chunks of one round."""
        flights: list[Flight] = []
        decode = plan.decode
        if any(sequence.request.token_mask is not None for sequence in decode):
            while self.flights:  # what may come next depends on what has come
                self._land()
            decode = [sequence for sequence in decode if sequence.is_running and sequence.num_left > 0]
        if decode:
            self.runner.extend(plan.new_pages)
            flights.append(self._step(decode, plan.most_steps))
        flights += [self._prefill(chunks) for chunks in plan.prefills]
        for flight in flights:
            for sequence, _ in flight.rows.values():
                sequence.dispatched(*flight.tokens)
        self.flights.append(flights)

    def _step(self, decode: list[Sequence], most_steps: int) -> Flight:
        slots = [sequence.slot for sequence in decode]
        shape = self.runner.shapes.batch_size_of(slots), self.runner.width_of(slots)
        asked: _Asked = {
            "has_logprobs": any(sequence.request.params.logprobs is not None for sequence in decode),
            "has_tree": any(sequence.request.params.return_tree for sequence in decode),
        }
        num_steps = 1
        if any(sequence.request.token_mask is not None for sequence in decode):
            tree, handle = self._constrained_step(decode, slots, asked)
        else:
            tree = self._choose(decode, *shape)
            num_steps = self.runner.num_alike(slots, tree, self._bursts.num_steps((*shape, tree), most_steps))
            if self.is_choosing and self.only is None:
                self._count_promise(decode, shape, tree, num_steps)
            # while programs are missing, that by which the draft would catch up may be one of them
            is_following = not self.is_partial and (not self.is_choosing or self.controller.is_following)
            handle = self.runner.step(slots, tree, num_steps=num_steps, **asked, is_following=is_following)
        rows = {row: (sequence, sequence.epoch) for row, sequence in enumerate(decode)}
        return Flight(handle, rows, tree, shape, num_steps)

    def _choose(self, decode: list[Sequence], batch_size: int, width: int) -> Tree | None:
        trees = self.runner.shapes.trees_for(batch_size)
        if self.is_partial:
            trees = [tree for tree in trees if wanted.is_compiled(self.runner, batch_size, width, tree)]
            if not trees:  # the plain way is, in a larger form
                return self.runner.shapes.plain
        if self.only is not None:  # large batches are stepped plainly, where its programs are not compiled for them
            return self.only[0] if self.only[0] in trees else self.runner.shapes.plain
        if not self.is_choosing:
            return trees[0]
        return self.controller.choose([self._estimate(each) for each in decode], trees, batch_size, width)

    def _count_promise(self, decode: list[Sequence], shape: tuple[int, int], tree: Tree | None, num_steps: int) -> None:
        """Count the tokens that the steps are expected to emit, and those that plain steps would in the same time."""
        estimates = [self._estimate(sequence) for sequence in decode]
        tokens = num_steps * self.controller.expected_tokens(estimates, tree)
        self._counters.num_tokens += tokens
        self._counters.plain_tokens += tokens / max(self.controller.speedup(estimates, *shape, tree), 1e-9)

    def _estimate(self, sequence: Sequence) -> Estimate:
        """Return how the sequence accepts draft tokens. At its first admission that is what is known of the drafter by
        then."""
        if sequence.estimate is None:
            sequence.estimate = self.controller.start(sequence.request.params.speculation)
        return sequence.estimate

    def _constrained_step(
        self, decode: list[Sequence], slots: list[int], asked: _Asked
    ) -> tuple[Tree | None, StepHandle]:
        """Dispatch a step with constrained sequences. A tree takes two programs, because the host must say which
        tokens may follow each proposed one."""
        tree = self._choose_constrained(decode, slots)
        if tree is None:
            nothing = np.zeros((len(slots), 1), np.int32)
            allowed = self._masks(decode, nothing, nothing)
            return None, self.runner.step(slots, None, allowed=allowed, **asked)
        token_ids, parents, proposal = self.runner.propose(slots, tree)
        allowed = self._masks(decode, parents, token_ids)
        return tree, self.runner.verify(slots, tree, proposal, allowed, **asked)

    def _choose_constrained(self, decode: list[Sequence], slots: list[int]) -> Tree | None:
        shapes = self.runner.shapes
        batch_size = shapes.batch_size_of(slots)
        tree = shapes.constrained_tree(batch_size)
        if tree is None or None not in shapes.trees:
            return tree
        if self.only == (None,):
            return None
        if self.is_partial or not wanted.is_constrained_compiled(self.runner, batch_size, tree):
            return None
        if not self.is_choosing:
            return tree
        return self.controller.choose(
            [self._estimate(sequence) for sequence in decode], (None, tree), batch_size, self.runner.width_of(slots)
        )

    def _masks(self, decode: list[Sequence], parents: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Return the tokens that may follow the nodes of each sequence, [batch, node, bytes] uint8. A fault of a
        request's mask ends that request."""
        allowed = np.full((*token_ids.shape, -(-self._vocab_size // 8)), 255, np.uint8)
        for row, sequence in enumerate(decode):
            mask = sequence.request.token_mask
            if mask is not None:
                self._guard(sequence, functools.partial(fill_masks, allowed[row], mask, parents[row], token_ids[row]))
        return allowed

    def _guard(self, sequence: Sequence, call: Callable[[], None]) -> None:
        """Run one request's own code; a fault there ends that request alone."""
        try:
            call()
        except RequestError as error:
            self._deliver(sequence, Delta(finish_reason=FinishReason.ERROR, error=str(error), is_refused=True))
        except Exception as error:
            logger.exception("%s: its own code failed; ending it", sequence.request.request_id)
            self._deliver(sequence, Delta(finish_reason=FinishReason.ERROR, error=f"{type(error).__name__}: {error}"))

    def _prefill(self, chunks: Seq[Chunk]) -> Flight:
        """Run chunks of prompts side by side, admitting their sequences before the first. They run even where a token
        mask fails and ends its sequence: the prefix cache has its pages already."""
        parts = [(chunk.sequence.slot, chunk.num_tokens, chunk.is_last) for chunk in chunks]
        for chunk in chunks:
            if chunk.is_first:
                self._admit(chunk)
        lasts = {row: chunk.sequence for row, chunk in enumerate(chunks) if chunk.is_last}
        scored = {row: chunk for row, chunk in enumerate(chunks) if chunk.sequence.is_scored}
        handle = self.runner.prefill(
            parts,
            is_scored=bool(scored),
            has_logprobs=any(sequence.request.params.logprobs is not None for sequence in lasts.values()),
            allowed=self._masks_of_prompts(lasts, len(chunks)),
        )
        return Flight(
            handle,
            {row: (sequence, sequence.epoch) for row, sequence in lasts.items()},
            scored={row: (chunk.sequence, chunk.sequence.epoch, chunk.num_tokens) for row, chunk in scored.items()},
            num_prompt=sum(chunk.num_tokens for chunk in chunks),
        )

    def _masks_of_prompts(self, lasts: dict[int, Sequence], batch: int) -> np.ndarray | None:
        """Return what may follow prompts that end in these rows of so many, [batch, 1, bytes] uint8; None: anything."""
        if all(sequence.request.token_mask is None for sequence in lasts.values()):
            return None
        sequences = list(lasts.values())
        last_ids = np.array([[sequence.token_ids[-1]] for sequence in sequences])
        allowed = np.full((batch, 1, -(-self._vocab_size // 8)), 255, np.uint8)
        allowed[list(lasts)] = self._masks(sequences, np.zeros_like(last_ids), last_ids)
        return allowed

    def _admit(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        request, estimate = sequence.request, self._estimate(sequence)
        sequence.prompt.clear()
        sequence.admit_time = sequence.admit_time or time.monotonic()
        self.runner.admit(
            sequence.slot,
            sequence.token_ids,
            sequence.pages,
            chunk.num_cached,
            sampler_rows(request.params, request.seed, len(request.prompt_ids)),
            token_rows(request, sequence.output_ids, sorted(request.stop_ids), request.bad_sequences, self._vocab_size),
            promise=self.controller.expected_tokens([estimate], self.runner.shapes.deepest_tree) - 1.0,
            ends=self.runner.eos_ids <= request.stop_ids,
        )

    def _land(self) -> None:
        """Read the oldest round and hand out its tokens."""
        flights = self.flights.popleft()
        num_tokens = [sum(flight.num_prompt for flight in flights)]  # of each step; chunks run beside the only one
        for flight in flights:
            self._wait_start = time.monotonic()
            start = time.perf_counter()
            steps = flight.handle.read_each()
            now = time.perf_counter()
            self._counters.wait_seconds += now - start
            self._wait_start = 0.0
            if flight.shape:
                way = None if self.runner.shapes.accepts_nothing else flight.tree
                self._counters.steps[describe(way)] += len(steps)
            if not steps and flight.awaited():
                raise RuntimeError("the device takes sequences for ended that are not")
            if flight.shape and steps and len(flights) == 1 and self._last_landing:
                seconds = (now - self._last_landing) / len(steps)
                self.controller.observe_seconds(*flight.shape, flight.tree, seconds)
                self._bursts.observe((*flight.shape, flight.tree), seconds)
            # the next step began when this one ended, if it was on its way already
            self._last_landing = now if len(flights) == 1 and self.flights else 0.0
            for row, (sequence, epoch, number) in flight.scored.items():
                if sequence.epoch == epoch:
                    known = len(sequence.prompt)
                    sequence.prompt += results.prompt_tokens(sequence.request, known, number, steps[0], row)
            for sequence in flight.awaited().values():
                sequence.landed(*flight.tokens)
            num_tokens += [0] * (len(steps) - len(num_tokens))
            for number, result in enumerate(steps):
                awaited = flight.awaited()
                if flight.shape:
                    self._observe(flight.tree, result, awaited)
                for row, sequence in awaited.items():
                    num_tokens[number] += 1 + int(result.n_accepted[row])
                    self._guard(sequence, functools.partial(self._emit, sequence, flight.tree, result, row))
        while len(num_tokens) > 1 and not num_tokens[-1]:  # steps that ran on after every answer had ended
            num_tokens.pop()
        self._counters.num_round_tokens += sum(num_tokens)
        for number in num_tokens:
            self._counters.round_sizes[bisect.bisect_left(ROUND_SIZES, number)] += 1

    def _observe(self, tree: Tree | None, result: HostResult, sequences: dict[int, Sequence]) -> None:
        """Count what a step accepted of the sequences in its rows, and learn from it."""
        if tree is None or self.runner.shapes.accepts_nothing:
            for sequence in sequences.values():
                sequence.acceptance = sequence.acceptance.after_step()
            return
        rows, estimates = list(sequences), [self._estimate(sequence) for sequence in sequences.values()]
        n_accepted = result.n_accepted[rows]
        for sequence, estimate, number in zip(sequences.values(), estimates, n_accepted.tolist(), strict=True):
            num_draft_tokens = tree.num_nodes if estimate.max_depth else 0  # 0: the request wants none
            if num_draft_tokens:
                sequence.drafts.append((num_draft_tokens, number))
            sequence.acceptance = sequence.acceptance.after_step(
                number, depth=tree.depth, num_draft_tokens=num_draft_tokens
            )
        said = result.confidence
        self.controller.observe(estimates, tree, n_accepted, said if said is None else said[rows])

    def _emit(self, sequence: Sequence, tree: Tree | None, result: HostResult, row: int) -> None:
        """Hand over the new tokens of a step with that tree."""
        request = sequence.request
        drawn = result.emitted(row)
        token_ids = list(itertools.takewhile(lambda token_id: token_id != NOTHING, drawn))
        delta = sequence.output.push(token_ids, min(int(result.n_accepted[row]), len(token_ids)))
        if sequence.is_scored:
            delta = dataclasses.replace(delta, prompt=tuple(sequence.prompt))
        sequence.output_ids += delta.token_ids
        if request.token_mask is not None:
            request.token_mask.accept(delta.token_ids)
        if request.params.logprobs is not None:
            found = results.logprobs(delta.token_ids, result, row, request.params.logprobs)
            delta = dataclasses.replace(delta, logprobs=found)
        if request.params.return_tree and request.params.speculation != 0 and tree is not None:
            delta = dataclasses.replace(delta, tree=results.draft_tree(tree, result, row, delta))
        if token_ids:
            self._deliver(sequence, delta)
        if len(token_ids) < len(drawn) and not sequence.has_ended:
            raise RequestError(
                f"after {len(sequence.output_ids)} tokens of the answer, the request's options ban every token"
            )

    def _deliver(self, sequence: Sequence, delta: Delta) -> None:
        reason = delta.finish_reason
        if delta.token_ids:
            sequence.last_time = time.monotonic()
            sequence.first_time = sequence.first_time or sequence.last_time
        if reason is not None:
            most = max(self.runner.shapes.max_accepted, len(sequence.acceptance.accepted_per_depth))  # of any head
            delta = dataclasses.replace(delta, stats=results.stats_of(sequence, most))
            # before its listener hears of it: who has the last token finds the slot and the pages free
            self.is_telling = True
            self._end(sequence, reason)
        try:
            sequence.request.on_delta(delta)
        except Exception:
            logger.exception("%s: its listener failed; ending it", sequence.request.request_id)
            self._end(sequence, FinishReason.ERROR)
        self.is_telling = False

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Give back what a sequence holds. Ending it again does nothing."""
        if sequence.has_ended:
            return
        request, slot = sequence.request, sequence.slot
        self._on_end(request)
        self.scheduler.finish(sequence)
        # the slot's next owner is admitted by a later program, so its row still holds this answer
        if slot >= 0 and reason in (FinishReason.STOP, FinishReason.LENGTH) and not request.cache_salt:
            self.runner.remember(slot, len(request.prompt_ids), len(sequence.token_ids) - 1)

    def _drop_cancelled(self) -> None:
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.request.is_cancelled:
                self._deliver(sequence, Delta(finish_reason=FinishReason.CANCELLED))

    def _end_running(self, reason: FinishReason, error: str) -> None:
        """End what holds a slot; those that wait, also after a preemption, stay."""
        self.flights.clear()
        for sequence in list(self.scheduler.running):
            self._deliver(sequence, Delta(finish_reason=reason, error=error))

    @property
    def _vocab_size(self) -> int:
        return self.runner.config.target.vocab_size
