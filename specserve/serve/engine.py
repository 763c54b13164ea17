"""The engine: one thread that admits, prefills, steps, and hands every sequence its tokens.

Rounds overlap: a round is dispatched before the one before it is read, so the device never waits for the host. What a
step makes for a sequence that has ended meanwhile is dropped. Other threads only `submit`, `cancel` and ask; the engine
never sees HTTP, the device never sees a request.
"""

import itertools
import logging
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specserve.errors import CapacityError, RequestError
from specserve.serve.interface import EngineStats
from specserve.serve.options import bad_sequences, check_token_ids, sampler_rows, token_rows
from specserve.serve.output import OutputStream
from specserve.serve.pages import PagePool
from specserve.serve.request import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    TokenMask,
)
from specserve.serve.runner import HostResult, Program, Runner, StepHandle
from specserve.serve.scheduler import Chunk, Round, Scheduler
from specserve.serve.scheduler import Sequence as Running
from specserve.speculative.controller import Controller, Estimate
from specserve.speculative.tree import Tree, describe
from specserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.2  # how often an idle engine looks for cancelled requests in its queue
STOP_SECONDS = 60.0
ROUNDS_AHEAD = 1  # dispatched and not read while the next one is made


@dataclass(frozen=True)
class EngineOptions:
    """How an engine treats its requests; see `settings.ServeRun`."""

    max_queue: int = 1024
    prefill_tokens: int = 0
    is_caching: bool = True
    prefers_cached: bool = False
    watchdog_seconds: float = 0.0


@dataclass(frozen=True)
class Completion:
    """A finished sequence, for callers that wait (`Engine.generate`)."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: SpeculationStats
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    seconds_to_first: float = 0.0  # since it was submitted
    seconds: float = 0.0


@dataclass(eq=False)
class _Active:
    """A sequence that has been admitted, and what the host keeps for it until it ends."""

    sequence: Running
    output: OutputStream
    estimate: Estimate
    bad: list[tuple[int, ...]]
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: list[int] = field(default_factory=list)  # by depth


@dataclass(frozen=True)
class _Flight:
    """A program whose result has not been read: whose rows it holds, and as which of their epochs."""

    handle: StepHandle
    rows: list[tuple[_Active, int]]
    tree: Tree | None
    is_step: bool
    most: int


@dataclass
class _Counters:
    """See `interface.EngineStats`."""

    num_rebuilds: int = 0
    num_late_compiles: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    num_tokens: float = 0.0  # emitted by steps
    plain_tokens: float = 0.0  # what plain steps of the same cost would have emitted


class Engine:
    """Continuous batching over the slots of a `Runner`."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        model_name: str,
        eos_ids: Sequence[int],
        controller: Controller | None = None,  # None: the first of the runner's trees, always
        options: EngineOptions | None = None,
        late_programs: Sequence[Program] = (),  # to be compiled while plain decoding serves
        on_compiled: Callable[[], Controller | None] = lambda: None,  # then: the controller to go on with, if another
    ) -> None:
        self.runner = runner
        self.model_name = model_name
        self.eos_ids = frozenset(eos_ids)
        self.options = options or EngineOptions()
        self._tokenizer = tokenizer
        self._controller = controller or Controller({})
        self._is_choosing = controller is not None
        self._late_programs = deque(late_programs)
        self._on_compiled = on_compiled
        self._num_cached_programs = 0  # of them, compiled into the compilation cache by now
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._num_queued = 0  # submitted and not yet admitted for the first time
        self._num_open = 0  # submitted and not ended
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._has_died = self._is_stopping = self._is_draining = self._is_flushing = False
        self._ids = itertools.count()
        self._active: dict[Running, _Active] = {}
        self._flights: deque[list[_Flight]] = deque()
        self._counters = _Counters()
        self._step_start = 0.0  # when the engine began to wait for a step; 0: it does not
        self._num_compiled = runner.num_compiled
        self._scheduler = self._new_scheduler()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="engine-watchdog", daemon=True)
        self._compiler = threading.Thread(target=self._compile_late, name="engine-compiler", daemon=True)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError where there is none."""
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer: send token ids", param="prompt")
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return self.runner.config.target.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    @property
    def is_healthy(self) -> bool:
        return not self._has_died

    @property
    def is_ready(self) -> bool:
        return not (self._late_programs or self._is_draining or self._is_stopping or self._has_died)

    @property
    def speculation(self) -> str:
        return "auto" if self._is_choosing else describe(self.runner.trees[0])

    def start(self) -> "Engine":
        self._thread.start()
        if self.options.watchdog_seconds:
            self._watchdog.start()
        if self._late_programs:
            self._compiler.start()
        return self

    def stop(self) -> None:
        """End every sequence as cancelled and wait for the thread, but not for a stuck device. May be called again, and
        from any thread."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                logger.error("the engine did not stop within %.0f seconds; its device is stuck", STOP_SECONDS)

    def drain(self, seconds: float) -> None:
        """Take no new sequences (CapacityError), and wait until those that were taken, running or waiting, have ended;
        at most so long: then they go on until `stop`."""
        self._is_draining = True
        deadline = time.monotonic() + seconds
        while self._num_open and not self._has_died and time.monotonic() < deadline:
            time.sleep(0.02)

    def flush_cache(self) -> None:
        """Forget every cached prefix, at the engine's next round."""
        self._is_flushing = True
        self._wake.set()

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stats(self) -> EngineStats:
        """From any thread, at any time."""
        scheduler, pool, counters = self._scheduler, self._scheduler.pool, self._counters
        num_running, start = len(scheduler.running), self._step_start
        return EngineStats(
            num_running=num_running,
            num_waiting=max(0, self._num_open - num_running),
            num_pages=pool.num_pages,
            num_pages_held=pool.num_pages - pool.num_available,
            num_pages_cached=pool.num_cached,
            num_prefix_queries=scheduler.num_queried,
            num_prefix_hits=scheduler.num_hits,
            num_preemptions=scheduler.num_preemptions,
            num_rebuilds=counters.num_rebuilds,
            num_steps=sum(counters.steps.copy().values()),
            num_steps_by_speculation=counters.steps.copy(),
            busy_seconds=counters.busy_seconds,
            host_seconds=counters.busy_seconds - counters.wait_seconds,
            num_late_compiles=counters.num_late_compiles,
            estimated_speedup=counters.num_tokens / counters.plain_tokens if counters.plain_tokens else 1.0,
            seconds_in_step=time.monotonic() - start if start else 0.0,
        )

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        *,
        priority: int = 0,
        cache_salt: str = "",
        token_mask: TokenMask | None = None,
    ) -> Request:
        """Queue one sequence; never blocks. Raises RequestError (param "prompt", "max_tokens" or the option whose
        token ids or words do not fit) or CapacityError."""
        if token_mask is not None and not self.runner.has_constrained:
            raise RequestError("this engine was started without constrained programs", param="token_mask")
        request = Request(
            request_id=f"seq-{next(self._ids)}",
            prompt_ids=tuple(prompt_ids),
            params=params,
            max_new_tokens=self.check(prompt_ids, params),
            seed=random.getrandbits(63) if params.seed is None else params.seed,
            on_delta=on_delta,
            priority=priority,
            cache_salt=cache_salt,
            token_mask=token_mask,
        )
        with self._lock:  # `_run` takes it at its end, so nothing is put behind its back
            if self._is_stopping or self._is_draining or self._has_died:
                raise CapacityError("the engine is stopping; send the request again later or elsewhere")
            if self._num_queued >= self.options.max_queue:
                raise CapacityError(f"{self._num_queued} requests are waiting already; try again later")
            self._num_queued += 1
            self._num_open += 1
            self._inbox.put(request)
        self._wake.set()
        return request

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """The number of tokens the sequence may grow by. Raises RequestError, as `submit` does."""
        if params.n != 1:
            raise RequestError("the engine takes one sequence at a time; submit params.choices()", param="n")
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none", param="stop")
        if not prompt_ids:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        for token_id in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"the prompt holds token id {token_id}; ids go from 0 to {self.vocab_size - 1}", param="prompt"
                )
        check_token_ids(params, self.vocab_size)
        bad_sequences(params, self._tokenizer)
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens; this model takes {self.max_model_len} with at least one "
                "left to answer. Shorten it",
                param="prompt",
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and max_tokens is {params.max_tokens}; together at most "
                f"{self.max_model_len} fit. Lower max_tokens to {room}",
                param="max_tokens",
            )
        max_new_tokens = room if params.max_tokens is None else params.max_tokens
        pages = -(-(len(prompt_ids) + max_new_tokens - 1) // self.runner.page_size)
        if pages > self.runner.num_pages:
            raise RequestError(
                f"prompt and answer need {pages} cache pages, the server has {self.runner.num_pages}; lower "
                "max_tokens or start the server with a larger cache",
                param="max_tokens",
            )
        return max_new_tokens

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_done: Callable[[int, Completion], None] = lambda _i, _completion: None,
    ) -> list[Completion]:
        """Run many prompts and wait; results in order. `on_done` is called on the engine's thread as each ends."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        done: list[Completion | None] = [None] * len(prompts)
        window = threading.Semaphore(self.options.max_queue)
        finished = threading.Semaphore(0)

        def listener(i: int) -> Callable[[Delta], None]:
            token_ids: list[int] = []
            text: list[str] = []
            logprobs: list[TokenLogprobs] = []
            start = time.monotonic()
            first = [0.0]

            def on_delta(delta: Delta) -> None:
                now = time.monotonic() - start
                if delta.token_ids and not token_ids:
                    first[0] = now
                token_ids.extend(delta.token_ids)
                text.append(delta.text)
                logprobs.extend(delta.logprobs)
                if delta.finish_reason is not None:
                    completion = Completion(
                        tuple(token_ids),
                        "".join(text),
                        delta.finish_reason,
                        delta.stats or SpeculationStats(),
                        tuple(logprobs),
                        delta.error,
                        first[0],
                        now,
                    )
                    done[i] = completion
                    window.release()
                    try:
                        on_done(i, completion)
                    finally:
                        finished.release()

            return on_delta

        requests: list[Request] = []
        try:
            for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
                window.acquire()
                requests.append(self.submit(prompt, own, listener(i)))
            for _ in prompts:
                finished.acquire()
        except BaseException:  # an interrupt, or a prompt that is refused: the others are not wanted any more
            for request in requests:
                request.cancel()
            raise
        return [completion for completion in done if completion is not None]

    # The engine's thread.

    def _new_scheduler(self) -> Scheduler:
        runner, options = self.runner, self.options
        return Scheduler(
            runner.num_slots,
            PagePool(runner.num_pages, runner.page_size),
            chunks=runner.chunks,
            max_step=runner.max_step,
            cache_lag=runner.cache_lag,
            prefill_tokens=options.prefill_tokens,
            is_caching=options.is_caching,
            prefers_cached=options.prefers_cached,
            is_deterministic=runner.is_deterministic,
        )

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                start = time.perf_counter()
                if self._num_cached_programs:
                    self._run_late()
                elif self._round():
                    self._counters.busy_seconds += time.perf_counter() - start
                else:
                    self._wake.wait(IDLE_SECONDS)
                    self._wake.clear()
        except BaseException:
            logger.exception("the engine died")
            self._has_died = True
            raise
        finally:
            with self._lock:
                self._is_stopping = True
            self._take_inbox()
            self._flights.clear()
            self._end_all(FinishReason.CANCELLED, "the engine stopped", keep_waiting=False)

    def _round(self) -> bool:
        """Dispatch one round and read the one before; False when there was nothing to do."""
        self._take_inbox()
        if self._is_flushing:
            self._is_flushing = False
            self._scheduler.pool.flush()
        try:
            self._drop_cancelled()
            plan = self._scheduler.schedule()
            if plan.is_empty and not self._flights:
                return False
            if not plan.is_empty:
                self._dispatch(plan)
            while len(self._flights) > (0 if plan.is_empty else ROUNDS_AHEAD):
                self._land()
            self._count_compiles()
        except Exception as error:
            logger.exception("a step failed; ending the running requests and rebuilding the cache")
            self._rebuild(error)
        return True

    def _compile_late(self) -> None:
        """On a thread of its own: fill the compilation cache, so that the engine's thread need not wait long."""
        for program in list(self._late_programs):
            if self._is_stopping:
                return
            try:
                if program.compile is not None:
                    program.compile()
            except Exception:
                logger.exception("%s could not be compiled in the background", program.name)
            with self._lock:
                self._num_cached_programs += 1
            self._wake.set()

    def _run_late(self) -> None:
        """Run a late program once, over padding: from here on it is compiled for the engine."""
        with self._lock:
            self._num_cached_programs -= 1
        self._late_programs[0].run()
        self._late_programs.popleft()
        self._num_compiled = self.runner.num_compiled
        if not self._late_programs:
            self._controller = self._on_compiled() or self._controller
            logger.info("all programs are compiled")

    def _count_compiles(self) -> None:
        num_compiled = self.runner.num_compiled
        if num_compiled != self._num_compiled and not self._late_programs:
            logger.warning("%d programs were compiled while serving", num_compiled - self._num_compiled)
            self._counters.num_late_compiles += num_compiled - self._num_compiled
        self._num_compiled = num_compiled

    def _rebuild(self, error: Exception) -> None:
        """After a device error nothing on the device can be trusted: running requests end, waiting ones stay."""
        self._flights.clear()
        self._end_all(FinishReason.ERROR, f"the device failed: {error}", keep_waiting=True)
        self._scheduler.pool.flush()
        self.runner.reset()
        self._counters.num_rebuilds += 1
        self._step_start = 0.0

    def _dispatch(self, plan: Round) -> None:
        """Decoding first: running streams wait for at most the chunks of one round."""
        flights: list[_Flight] = []
        decode = [self._active[sequence] for sequence in plan.decode]
        if any(active.sequence.request.token_mask for active in decode):
            while self._flights:  # what may come next depends on what has come
                self._land()
            decode = [active for active in decode if self._is_current(active) and active.sequence.num_left > 0]
        if decode:
            self.runner.extend(plan.new_pages)
            flights.append(self._step(decode))
        for chunk in plan.chunks:
            if chunk.sequence.is_running:  # reading ahead of constrained sequences may have ended it
                flight = self._prefill(chunk)
                if flight is not None:
                    flights.append(flight)
        for flight in flights:
            for active, _ in flight.rows:
                active.sequence.num_in_flight += 1
                active.sequence.most_in_flight += flight.most
        self._flights.append(flights)

    def _is_current(self, active: _Active) -> bool:
        return self._active.get(active.sequence) is active and active.sequence.is_running

    def _step(self, decode: list[_Active]) -> _Flight:
        slots = [active.sequence.slot for active in decode]
        has_logprobs = any(active.sequence.request.params.logprobs is not None for active in decode)
        if any(active.sequence.request.token_mask for active in decode):
            tree, handle = self._constrained_step(decode, slots, has_logprobs)
        else:
            tree = self._choose(decode, slots)
            handle = self.runner.step(slots, tree, has_logprobs=has_logprobs)
        self._counters.steps[describe(tree)] += 1
        most = 1 + (tree.depth if tree else 0)
        rows = [(active, active.sequence.epoch) for active in decode]
        return _Flight(handle, rows, tree, is_step=True, most=most)

    def _choose(self, decode: list[_Active], slots: list[int]) -> Tree | None:
        batch_size = self.runner.batch_size_of(len(slots))
        if self._late_programs:  # not all is compiled: the plain way is
            return None if None in self.runner.trees else self.runner.trees[0]
        trees = self.runner.trees_for(batch_size)
        if not self._is_choosing:
            return trees[0]
        width = self.runner.width_of(slots)
        estimates = [active.estimate for active in decode]
        tree = self._controller.choose(estimates, trees, batch_size, width)
        ratio = self._controller.speedup(estimates, batch_size, width, tree)
        tokens = sum(self._controller.expected_tokens(estimate, tree) for estimate in estimates)
        self._counters.num_tokens += tokens
        self._counters.plain_tokens += tokens / max(ratio, 1e-9)
        return tree

    def _constrained_step(
        self, decode: list[_Active], slots: list[int], has_logprobs: bool
    ) -> tuple[Tree | None, StepHandle]:
        """In two programs: the host must say which tokens may follow each proposed one."""
        tree = self.runner.constrained_tree(self.runner.batch_size_of(len(slots)))
        if self._late_programs:
            tree = None if None in self.runner.trees else tree
        token_ids, parents, proposal = self.runner.propose(slots, tree)
        allowed = np.ones((*token_ids.shape, self.vocab_size), bool)
        for row, active in enumerate(decode):
            mask = active.sequence.request.token_mask
            if mask is not None:
                self._guard(active, lambda row=row, mask=mask: _fill(allowed[row], mask, parents[row], token_ids[row]))
        return tree, self.runner.verify(slots, tree, proposal, allowed, has_logprobs=has_logprobs)

    def _guard(self, active: _Active, call: Callable[[], None]) -> bool:
        """Run one request's own code; a fault there ends that request alone."""
        try:
            call()
        except Exception as error:
            request = active.sequence.request
            logger.exception("%s: its own code failed; ending it", request.request_id)
            self._deliver(active, Delta(finish_reason=FinishReason.ERROR, error=f"{type(error).__name__}: {error}"))
            return False
        return True

    def _prefill(self, chunk: Chunk) -> _Flight | None:
        """Run one chunk of a prompt, admitting its sequence before the first."""
        sequence = chunk.sequence
        request = sequence.request
        if chunk.is_first:
            self._admit(chunk)
        active = self._active[sequence]
        allowed = None
        if chunk.is_last and request.token_mask is not None:
            allowed = np.ones((1, self.vocab_size), bool)
            mask, row = request.token_mask, allowed
            last = np.array([sequence.token_ids[-1]])
            if not self._guard(active, lambda: _fill(row, mask, np.zeros(1, np.int32), last)):
                return None
        handle = self.runner.prefill(
            sequence.slot,
            chunk.num_tokens,
            is_last=chunk.is_last,
            has_logprobs=chunk.is_last and request.params.logprobs is not None,
            allowed=allowed,
        )
        rows = [(active, sequence.epoch)] if chunk.is_last else []
        return _Flight(handle, rows, None, is_step=False, most=1)

    def _admit(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        request = sequence.request
        active = self._active.get(sequence)
        if active is None:  # and not one that comes back after a preemption
            active = _Active(
                sequence,
                OutputStream(request, self._tokenizer, self.eos_ids),
                self._controller.start(request.params.speculation),
                bad_sequences(request.params, self._tokenizer),
            )
            self._active[sequence] = active
            with self._lock:
                self._num_queued -= 1
        stop_ids = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else self.eos_ids)
        self.runner.admit(
            sequence.slot,
            sequence.token_ids,
            sequence.pages,
            chunk.num_cached,
            sampler_rows(request.params, request.seed, len(request.prompt_ids)),
            token_rows(request, sequence.output_ids, sorted(stop_ids), active.bad, self.vocab_size),
            head_gain=self._controller.expected_tokens(active.estimate, self.runner.deepest_tree) - 1.0,
        )

    def _land(self) -> None:
        """Read the oldest round and hand out its tokens."""
        flights = self._flights.popleft()
        for flight in flights:
            self._step_start = time.monotonic()
            start = time.perf_counter()
            result = flight.handle.read()
            self._counters.wait_seconds += time.perf_counter() - start
            self._step_start = 0.0
            for row, (active, epoch) in enumerate(flight.rows):
                sequence = active.sequence
                if not self._is_current(active) or sequence.epoch != epoch:
                    continue  # it has ended, or will do this step again
                sequence.num_in_flight -= 1
                sequence.most_in_flight -= flight.most
                if flight.is_step:
                    self._observe(active, flight.tree, result, row)
                self._emit(active, result, row)

    def _observe(self, active: _Active, tree: Tree | None, result: HostResult, row: int) -> None:
        active.num_steps += 1
        if tree is None:
            return
        limit = active.estimate.max_depth
        if limit:
            active.num_draft_tokens += tree.num_nodes
        n_accepted = int(result.n_accepted[row])
        active.num_accepted += [0] * (tree.depth - len(active.num_accepted))
        for depth in range(n_accepted):
            active.num_accepted[depth] += 1
        self._controller.observe(active.estimate, tree, n_accepted)

    def _emit(self, active: _Active, result: HostResult, row: int) -> None:
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

    def _deliver(self, active: _Active, delta: Delta) -> None:
        sequence = active.sequence
        request = sequence.request
        is_last = delta.finish_reason is not None
        if is_last:
            delta = Delta(
                delta.token_ids, delta.text, delta.finish_reason, delta.error, self._stats(active), delta.logprobs
            )
        try:
            request.on_delta(delta)
        except Exception:
            logger.exception("%s: its listener failed; ending it", request.request_id)
            is_last = True
        if is_last and self._active.pop(sequence, None) is not None:
            if sequence.is_running:
                if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and not request.cache_salt:
                    self.runner.remember(sequence.slot, len(request.prompt_ids))
                self._scheduler.finish(sequence)
            else:  # it was put back, and ended before its turn came again
                self._scheduler.waiting.remove(sequence)
            with self._lock:
                self._num_open -= 1

    def _stats(self, active: _Active) -> SpeculationStats:
        return SpeculationStats(
            num_steps=active.num_steps,
            num_draft_tokens=active.num_draft_tokens,
            accepted_per_depth=tuple(active.num_accepted),
            num_cached_tokens=active.sequence.num_cached or 0,
        )

    def _take_inbox(self) -> None:
        while True:
            try:
                self._scheduler.add(self._inbox.get_nowait())
            except queue.Empty:
                return

    def _drop_cancelled(self) -> None:
        gone = Delta(finish_reason=FinishReason.CANCELLED)
        for active in [a for a in self._active.values() if a.sequence.request.is_cancelled]:
            self._deliver(active, gone)
        for sequence in [s for s in self._scheduler.waiting if s.request.is_cancelled]:
            self._end_waiting(sequence, gone)

    def _end_waiting(self, sequence: Running, delta: Delta) -> None:
        """End a sequence that has never been admitted."""
        self._scheduler.waiting.remove(sequence)
        with self._lock:
            self._num_queued -= 1
            self._num_open -= 1
        try:
            sequence.request.on_delta(delta)
        except Exception:
            logger.exception("%s: its listener failed", sequence.request.request_id)

    def _end_all(self, reason: FinishReason, error: str, *, keep_waiting: bool) -> None:
        """End what has been admitted; with `keep_waiting` the others, and those that were put back, stay."""
        delta = Delta(finish_reason=reason, error=error)
        for sequence in list(self._scheduler.running):
            active = self._active.get(sequence)
            if active is not None:
                self._deliver(active, delta)
            else:  # the failure came between its place in the plan and its admission
                self._scheduler.finish(sequence)
                self._scheduler.waiting.append(sequence)
                self._end_waiting(sequence, delta)
        if not keep_waiting:
            for active in list(self._active.values()):
                self._deliver(active, delta)
            for sequence in list(self._scheduler.waiting):
                self._end_waiting(sequence, delta)

    def _watch(self) -> None:
        """Report a step that does not end; nothing can be done to a device from here."""
        reported = 0.0
        while self._thread.is_alive():
            start = self._step_start
            if start and start != reported and time.monotonic() - start > self.options.watchdog_seconds:
                reported = start
                logger.error("a step has taken more than %.0f seconds; is the device stuck?", time.monotonic() - start)
            time.sleep(min(1.0, self.options.watchdog_seconds / 4))


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
