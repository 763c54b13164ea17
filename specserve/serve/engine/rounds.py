"""The rounds of the engine: programs are dispatched, results read, tokens handed out.

Rounds overlap: a round is dispatched before the one before it is read, so the device does not wait for the host. The
tokens that a step makes for a sequence that has ended meanwhile are dropped. Everything here runs on the engine's
thread.
"""

import bisect
import functools
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, TypedDict

import jax
import numpy as np

from specserve.drafters.speculation import describe
from specserve.errors import ConfigError, first_line
from specserve.serve.engine.backlog import Backlog
from specserve.serve.engine.delivery import Delivery, take_scores
from specserve.serve.engine.in_flight import InFlight, awaiting, ending, prompts_in_flight
from specserve.serve.engine.interface import ROUND_SIZES, EngineStats
from specserve.serve.engine.options import sampler_rows, token_rows
from specserve.serve.engine.scheduler import Scheduler
from specserve.serve.engine.sequence import Chunk, Round, Sequence
from specserve.serve.engine.step_choice import StepChoice
from specserve.serve.programs.program_list import has_prefill
from specserve.serve.programs.results import StepHandle
from specserve.serve.programs.runner import PromptPart, Runner
from specserve.serve.requests.output import OutputStream
from specserve.serve.requests.request import Delta, FinishReason, Request, fill_masks
from specserve.speculative.controller import Controller
from specserve.speculative.program import StepProgram
from specserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "kv_cache")  # of what an engine has on its device
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


def _asked(sequences: Iterable[Sequence]) -> _Asked:
    params = [sequence.request.params for sequence in sequences]
    return {
        "has_logprobs": any(each.logprobs is not None for each in params),
        "has_tree": any(each.return_tree for each in params),
    }


def _loras_of(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(sorted({each.request.lora for each in sequences} - {""}))


def _parts(chunks: Seq[Chunk]) -> list[PromptPart]:
    return [(chunk.sequence.slot, chunk.num_tokens, chunk.is_last) for chunk in chunks]


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
        version: str,  # of the weights
        on_end: Callable[[Request], None],
    ) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.choice = StepChoice(runner, controller, is_partial=is_partial)
        scheduler.is_here = lambda chunk: has_prefill(self.runner, chunk, is_alone=self.choice.leaves_draft)
        self.delivery = Delivery(runner, scheduler, on_end)
        self.backlog = Backlog(runner)
        self.in_flight: deque[list[InFlight]] = deque()  # by round
        self._wait_start = 0.0  # when the thread began to wait for a step; 0: it does not
        self._counters = _Counters()
        self._num_missed = runner.compiled.num_missed
        self._most_steps, self._tokenizer = most_steps, tokenizer
        self.version = version
        self.asleep: frozenset[Part] = frozenset()  # the parts that are off the device
        # of the step before: when it was read, if the device went on without a pause (0: it did not), whether the
        # device had made it before the host came to read it, and its program
        self._last_read, self._was_done, self._last_program = 0.0, False, None

    @property
    def running(self) -> Seq[Sequence]:
        """The sequences in a slot. It may be called from any thread."""
        return tuple(self.scheduler.running)

    def add(self, requests: Iterable[Request]) -> None:
        """Put requests into the queue."""
        for request in requests:
            self.scheduler.add(Sequence(request, OutputStream(request, self._tokenizer)))

    def is_at_rest(self) -> bool:
        """Return whether no sequence has begun that has not ended."""
        return not self.in_flight and not any(each.has_begun for each in (*self.running, *self.scheduler.waiting))

    def run(self, *, begins: bool = True) -> bool:
        """Dispatch one round and read the one before; False when there was nothing to do. Unless it `begins` some, only
        sequences that have begun go on. Raises what the device raises: then `rebuild`."""
        start = time.perf_counter()
        self.drop_cancelled()
        most_steps = min(self.runner.shapes.most_steps, self._most_steps or self.runner.shapes.most_steps)
        work = self.scheduler.schedule(most_steps, side_by_side=not self.choice.is_partial, begins=begins)
        if work.is_empty and not self.in_flight:
            return False
        if not work.is_empty:
            self._dispatch(work)
        while len(self.in_flight) > (0 if work.is_empty else ROUNDS_AHEAD):
            self._read()
        self._count_late_compiles()
        self._counters.busy_seconds += time.perf_counter() - start
        return True

    def rebuild(self, error: Exception) -> None:
        """Start anew after a device error, when nothing on the device can be trusted: running requests end, waiting
        ones stay."""
        self._end_running(FinishReason.ERROR, f"the device failed: {error}")
        self.scheduler.pool.flush()
        if "kv_cache" not in self.asleep:
            self.runner.reset()
        self._counters.num_rebuilds += 1
        self._wait_start = 0.0

    def flush_cache(self) -> None:
        """Forget every cached prefix and every answer that a lookup may find."""
        self.scheduler.pool.flush()
        if "kv_cache" not in self.asleep:  # else they are forgotten
            self.runner.forget_answers()

    def swap(self, runner: Runner, *, prior: Seq[float] | None = None, version: str = "") -> None:
        """Go on with other weights, by a runner `with_weights`, or `with_head` of `prior` acceptance by depth. What the
        old ones wrote is not read by them: running sequences wait for their turn again and are prefilled anew, and
        cached prefixes are forgotten. `version` names the weights; empty: the target's are the same. Raises ConfigError
        where the device cannot run it, and then goes on with the old ones."""
        self.land()
        self.retract()
        try:
            runner.take_over(self.runner)
        except ConfigError:
            self.runner.take_off(self.asleep)  # its state is back
            raise
        runner.take_off(self.asleep)
        self.runner, self._num_missed, self._last_read = runner, runner.compiled.num_missed, 0.0
        self.delivery.use(runner)
        shapes, cache_lag = runner.shapes, runner.config.max_pending
        self.backlog = Backlog(runner, self.backlog.num_read)
        self.scheduler.set_step(max_step=shapes.max_step, cache_lag=cache_lag, windows=shapes.windows)
        self.choice.use(runner, prior)
        if version:
            self.version = version
        if prior is not None:
            for sequence in self.scheduler.waiting:
                sequence.estimate = None

    def land(self) -> None:
        """Read what is in flight."""
        while self.in_flight:
            self._read()
        self._last_read = 0.0

    def retract(self) -> None:
        """Send what runs back to the queue, to be prefilled anew, and forget every cached prefix. Nothing may be in
        flight."""
        self.scheduler.preempt_all()
        self.scheduler.pool.flush()

    def lie_down(self, parts: Collection[Part]) -> None:
        """Take these parts off the device. Nothing may run, and nothing may be cached."""
        self.runner.take_off(set(parts) - self.asleep)
        self.asleep |= frozenset(parts)

    def get_up(self, parts: Collection[Part]) -> None:
        """Bring these parts back, one after another. Raises ConfigError where the device has no room for one."""
        for part in PARTS:
            if part in self.asleep and part in parts:
                try:
                    self.runner.bring_back(part)
                except jax.errors.JaxRuntimeError as error:
                    self.runner.take_off((part,))
                    raise ConfigError(f"{part} cannot be brought back to the device: {first_line(error)}") from error
                self.asleep -= {part}

    def drop_cancelled(self) -> None:
        """End the sequences whose clients have left."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.request.is_cancelled:
                self.delivery.deliver(sequence, Delta(finish_reason=FinishReason.CANCELLED))

    def abort(self, is_meant: Callable[[Request], bool] = lambda _: True) -> None:
        """End sequences, all unless it is said which, with the tokens that they have."""
        self.land()
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if is_meant(sequence.request):
                text, error = sequence.output.finish(), "the server's operator has ended it; send it again"
                self.delivery.deliver(sequence, Delta(text=text, finish_reason=FinishReason.ABORTED, error=error))

    def end_all(self, reason: FinishReason, error: str) -> None:
        """End every sequence, running or waiting."""
        self._end_running(reason, error)
        for sequence in list(self.scheduler.waiting):
            self.delivery.deliver(sequence, Delta(finish_reason=reason, error=error))

    def stats(self) -> EngineStats:
        """Return the counts of the rounds; the engine knows the rest. It may be called from any thread."""
        counters, scheduler, start = self._counters, self.scheduler, self._wait_start
        pool, steps, calibration = scheduler.pool, counters.steps.copy(), self.choice.controller.calibration
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
            num_caught_up=self.backlog.num_read,
            estimated_speedup=self.choice.estimated_speedup,
            num_promised=calibration.promised,
            num_kept=calibration.kept,
            confidence_trust=calibration.trust,
            max_loras=self.runner.shapes.max_loras,
            running_loras=_loras_of(self.running),
            waiting_loras=_loras_of(tuple(scheduler.waiting)),
            seconds_in_step=time.monotonic() - start if start else 0.0,
        )

    def _count_late_compiles(self) -> None:
        num_missed = self.runner.compiled.num_missed
        number, self._num_missed = num_missed - self._num_missed, num_missed
        if number and not self.choice.is_partial:
            logger.warning("%d programs were compiled while serving", number)
            self._counters.num_late_compiles += number

    def _dispatch(self, work: Round) -> None:
        """Dispatch a round, decoding first: running streams wait for at most the chunks of one round."""
        dispatched: list[InFlight] = []
        decode = work.decode
        if any(sequence.request.token_mask is not None for sequence in decode):
            while self.in_flight:  # the masks of the next tokens depend on those before
                self._read()
            decode = [sequence for sequence in decode if sequence.is_running and sequence.num_left > 0]
        prefills = work.prefills
        if decode:
            self.runner.extend(work.new_pages)
            self.backlog.grown(work.new_pages)
            if both := self._step_beside(decode, prefills[:1]):
                dispatched, prefills = [*both], prefills[1:]
            else:
                dispatched = [self._step(decode, work)]
        dispatched += [self._prefill(chunks) for chunks in prefills]
        for each in dispatched:
            for sequence, _ in each.rows.values():
                sequence.dispatched(*each.tokens)
        self.in_flight.append(dispatched)

    def _step(self, decode: list[Sequence], work: Round) -> InFlight:
        slots, asked, num_steps = [sequence.slot for sequence in decode], _asked(decode), 1
        num_unread, num_read = self.backlog.num_unread(decode), self.backlog.num_read
        if any(sequence.request.token_mask is not None for sequence in decode):
            program, handle = self._constrained_step(decode, slots, asked, num_unread)
        else:
            num_unseen = sum(each.num_steps for each in itertools.chain(*self.in_flight) if each.tree)
            program, num_steps = self.choice.choose(decode, slots, work, num_unread, num_unseen)
            chosen, program = program, self.backlog.before_step(decode, program, self.choice)
            num_steps = num_steps if program == chosen else 1
            is_following = self.choice.keeps_up(program, slots, num_steps)
            handle = self.runner.step(slots, program.tree, num_steps=num_steps, **asked, is_following=is_following)
        num_read = self.backlog.num_read - num_read
        self.choice.stepped(decode, program, num_steps, num_read)
        return InFlight(handle, awaiting(dict(enumerate(decode))), program, num_steps, num_read > 0)

    def _step_beside(self, decode: list[Sequence], prefills: Seq[Seq[Chunk]]) -> tuple[InFlight, InFlight] | None:
        """Dispatch a step together with the first prefill, where one program does both. None: it does not."""
        sequences = [*decode, *(chunk.sequence for chunks in prefills for chunk in chunks)]
        if not prefills or any(each.request.token_mask is not None or each.is_scored for each in sequences):
            return None
        [chunks], slots = prefills, [sequence.slot for sequence in decode]
        if (program := self.choice.choose_beside(decode, slots, parts := _parts(chunks))) is None:
            return None
        self._admit_new(chunks)
        asked, is_following = _asked(sequences), self.choice.is_following(slots)
        step, prompts = self.runner.mixed(program, slots, parts, **asked, is_following=is_following)
        return InFlight(step, awaiting(dict(enumerate(decode))), program), prompts_in_flight(prompts, chunks)

    def _constrained_step(
        self, decode: list[Sequence], slots: list[int], asked: _Asked, num_unread: int
    ) -> tuple[StepProgram, StepHandle]:
        """Dispatch a step with constrained sequences. A tree takes two programs, because the host must compute which
        tokens may follow each proposed one."""
        program = self.choice.choose_constrained(decode, slots, num_unread)
        program = self.backlog.before_step(decode, program, self.choice)
        if program.tree is None:
            nothing = np.zeros((len(slots), 1), np.int32)
            allowed = self._masks(decode, nothing, nothing)
            return program, self.runner.step(slots, None, allowed=allowed, is_following=not program.is_alone, **asked)
        token_ids, parents, proposal = self.runner.propose(slots, program.tree)
        allowed = self._masks(decode, parents, token_ids)
        return program, self.runner.verify(slots, program.tree, proposal, allowed, **asked)

    def _masks(self, decode: list[Sequence], parents: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Return the tokens that may follow the nodes of each sequence, [batch, node, bytes] uint8. A fault of a
        request's mask ends that request."""
        allowed = np.full((*token_ids.shape, -(-self.runner.config.target.vocab_size // 8)), 255, np.uint8)
        for row, sequence in enumerate(decode):
            mask = sequence.request.token_mask
            if mask is not None:
                self.delivery.guard(
                    sequence, functools.partial(fill_masks, allowed[row], mask, parents[row], token_ids[row])
                )
        return allowed

    def _prefill(self, chunks: Seq[Chunk]) -> InFlight:
        """Run chunks of prompts side by side, admitting their sequences before the first. They run even where a token
        mask fails and ends its sequence: the prefix cache has its pages already."""
        self._admit_new(chunks)
        lasts, parts, is_scored = ending(chunks), _parts(chunks), any(chunk.sequence.is_scored for chunk in chunks)
        handle = self.runner.prefill(
            parts,
            is_alone=not is_scored and self.backlog.leaves_out(chunks, parts, self.choice),
            is_scored=is_scored,
            has_states=any(chunk.sequence.request.params.hidden_states for chunk in chunks),
            has_logprobs=_asked(lasts.values())["has_logprobs"],
            allowed=self._masks_of_prompts(lasts, len(chunks)),
        )
        for chunk in chunks:
            if chunk.keep is not None:
                self.runner.keep_state(chunk.sequence.slot, chunk.keep)
        return prompts_in_flight(handle, chunks)

    def _masks_of_prompts(self, lasts: dict[int, Sequence], batch: int) -> np.ndarray | None:
        """Return what may follow prompts that end in these rows of so many, [batch, 1, bytes] uint8; None: anything."""
        if all(sequence.request.token_mask is None for sequence in lasts.values()):
            return None
        last_ids = np.array([[sequence.token_ids[-1]] for sequence in lasts.values()])
        allowed = np.full((batch, 1, -(-self.runner.config.target.vocab_size // 8)), 255, np.uint8)
        allowed[list(lasts)] = self._masks([*lasts.values()], np.zeros_like(last_ids), last_ids)
        return allowed

    def _admit_new(self, chunks: Seq[Chunk]) -> None:
        for chunk in chunks:
            if chunk.is_first:
                self._admit(chunk)
        self.runner.extend([row for chunk in chunks for row in chunk.new_pages])

    def _admit(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        request, vocab_size = sequence.request, self.runner.config.target.vocab_size
        sequence.admitted(self.version)
        self.runner.admit(
            sequence.slot,
            sequence.token_ids,
            sequence.pages,
            chunk.num_cached,
            sampler_rows(request.params, request.seed, len(request.prompt_ids)),
            token_rows(request, sequence.output_ids, sorted(request.stop_ids), request.bad_sequences, vocab_size),
            promise=self.choice.promise(sequence),
            ends=self.runner.eos_ids <= request.stop_ids,
            kept=sequence.kept,
            adapter_id=request.adapter_id,
        )
        self.backlog.begin(sequence, chunk.num_cached)
        if sequence.kept >= 0 and self.scheduler.pool.kept is not None:
            self.scheduler.pool.kept.was_read(sequence.kept)

    def _read(self) -> None:
        """Read the oldest round and hand out its tokens."""
        of_round = self.in_flight.popleft()
        num_tokens = [sum(each.num_prompt for each in of_round)]  # of each step; chunks run beside the only one
        for each in of_round:
            self._wait_start = time.monotonic()
            start, is_done = time.perf_counter(), each.handle.is_done
            steps = each.handle.read_each()
            now = time.perf_counter()
            self._counters.wait_seconds += now - start
            self._wait_start = 0.0
            if each.program:
                self._counters.steps[describe(None if self.runner.shapes.accepts_nothing else each.tree)] += len(steps)
            if not steps and each.awaited():
                raise RuntimeError("the device takes sequences for ended that are not")
            if each.program and steps and len(of_round) == 1 and self._last_read and not each.has_read:
                is_switch, seconds = each.program != self._last_program, (now - self._last_read) / len(steps)
                # read late where it had long been made, a step seems slower than it was, and the next one faster
                how = {"is_switch": is_switch, "is_exact": is_done == self._was_done}
                self.choice.observe_seconds(each.program, seconds, len(steps), **how)
            # the next step began when this one ended, if it was on its way already
            self._last_read = now if len(of_round) == 1 and self.in_flight else 0.0
            self._was_done, self._last_program = is_done, each.program
            for row, (sequence, epoch, number) in each.scored.items():
                if sequence.epoch == epoch:
                    take_scores(sequence, number, steps[0], row)
            for sequence in each.awaited().values():
                sequence.landed(*each.tokens)
            num_tokens += [0] * (len(steps) - len(num_tokens))
            awaited: list[dict[int, Sequence]] = []  # by each step
            emit = functools.partial(self.delivery.emit, is_step=each.program is not None)
            for number, result in enumerate(steps):
                awaited.append(each.awaited())
                n_accepted = result.n_accepted.tolist()
                for row, sequence in awaited[-1].items():
                    num_tokens[number] += 1 + n_accepted[row]
                    self.delivery.guard(sequence, functools.partial(emit, sequence, each.tree, result, row))
            if each.program:
                self.choice.observe(each.tree, steps, awaited)
        while len(num_tokens) > 1 and not num_tokens[-1]:  # steps that ran on after every answer had ended
            num_tokens.pop()
        self._counters.num_round_tokens += sum(num_tokens)
        for number in num_tokens:
            self._counters.round_sizes[bisect.bisect_left(ROUND_SIZES, number)] += 1

    def _end_running(self, reason: FinishReason, error: str) -> None:
        """End what holds a slot; those that wait, also after a preemption, stay."""
        self.in_flight.clear()
        for sequence in list(self.scheduler.running):
            self.delivery.deliver(sequence, Delta(finish_reason=reason, error=error))
