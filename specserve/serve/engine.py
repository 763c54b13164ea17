"""The engine: one thread that admits, prefills, steps, and hands every sequence its tokens.

Other threads only `submit` and `cancel`. The engine never sees HTTP; the device never sees a request.
"""

import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specserve.errors import CapacityError, RequestError
from specserve.serve.output import OutputStream
from specserve.serve.pages import PageAllocator
from specserve.serve.request import Delta, FinishReason, Request, SamplingParams, SpeculationStats
from specserve.serve.runner import PREFILL_CHUNKS, HostResult, Runner
from specserve.serve.scheduler import Scheduler
from specserve.serve.scheduler import Sequence as Running
from specserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.2  # how often an idle engine looks for cancelled requests in its queue


@dataclass
class EngineTimes:
    """Where the engine's time went. Host time is what the loop spends outside the device's steps."""

    num_steps: int = 0
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    busy_seconds: float = 0.0  # rounds that had work, everything included

    @property
    def host_seconds(self) -> float:
        return self.busy_seconds - self.step_seconds - self.prefill_seconds


@dataclass(frozen=True)
class Completion:
    """A finished sequence, for callers that wait (`Engine.generate`)."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: SpeculationStats


@dataclass(eq=False)
class _Active:
    """A sequence in the engine and what the host keeps for it."""

    sequence: Running
    output: OutputStream
    num_steps: int = 0
    num_accepted: list[int] = field(default_factory=list)  # by depth


class Engine:
    """Continuous batching over the slots of a `Runner`."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        eos_ids: Sequence[int],
        max_queue: int = 1024,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.eos_ids = frozenset(eos_ids)
        self.max_queue = max_queue
        self.times = EngineTimes()
        self.is_healthy = True
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._num_queued = 0  # submitted and not yet admitted
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_stopping = False
        self._ids = itertools.count()
        self._active: dict[Running, _Active] = {}
        self._scheduler = self._new_scheduler()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def vocab_size(self) -> int:
        return self.runner.config.target.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    def start(self) -> "Engine":
        self._thread.start()
        return self

    def stop(self) -> None:
        """End every sequence as cancelled and join the thread."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, on_delta: Callable[[Delta], None]) -> Request:
        """Queue one sequence; never blocks. Raises RequestError (param "prompt", "max_tokens" or "stop_token_ids")
        or CapacityError."""
        if self._is_stopping or not self.is_healthy:
            raise CapacityError("the engine is stopping; send the request again later or elsewhere")
        request = Request(
            request_id=f"seq-{next(self._ids)}",
            prompt_ids=tuple(prompt_ids),
            params=params,
            max_new_tokens=self._check(prompt_ids, params),
            seed=random.getrandbits(63) if params.seed is None else params.seed,
            on_delta=on_delta,
        )
        with self._lock:
            if self._num_queued >= self.max_queue:
                raise CapacityError(f"{self._num_queued} requests are waiting already; try again later")
            self._num_queued += 1
        self._inbox.put(request)
        self._wake.set()
        return request

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """The number of tokens the sequence may grow by."""
        if not prompt_ids:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        for token_id in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"the prompt holds token id {token_id}; ids go from 0 to {self.vocab_size - 1}", param="prompt"
                )
        for token_id in params.stop_token_ids:
            if token_id >= self.vocab_size:
                raise RequestError(
                    f"stop_token_ids holds {token_id}; ids go from 0 to {self.vocab_size - 1}", param="stop_token_ids"
                )
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
        window = threading.Semaphore(self.max_queue)
        finished = threading.Semaphore(0)

        def listener(i: int) -> Callable[[Delta], None]:
            token_ids: list[int] = []
            text: list[str] = []

            def on_delta(delta: Delta) -> None:
                token_ids.extend(delta.token_ids)
                text.append(delta.text)
                if delta.finish_reason is not None:
                    stats = delta.stats or SpeculationStats()
                    completion = Completion(tuple(token_ids), "".join(text), delta.finish_reason, stats)
                    done[i] = completion
                    window.release()
                    try:
                        on_done(i, completion)
                    finally:
                        finished.release()

            return on_delta

        for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            window.acquire()
            self.submit(prompt, own, listener(i))
        for _ in prompts:
            finished.acquire()
        return [completion for completion in done if completion is not None]

    # The engine's thread.

    def _new_scheduler(self) -> Scheduler:
        runner = self.runner
        return Scheduler(runner.num_slots, PageAllocator(runner.num_pages), runner.page_size)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                start = time.perf_counter()
                if self._round():
                    self.times.busy_seconds += time.perf_counter() - start
                else:
                    self._wake.wait(IDLE_SECONDS)
                    self._wake.clear()
        except BaseException:
            logger.exception("the engine died")
            self.is_healthy = False
            raise
        finally:
            self._take_inbox()
            self._end_all(FinishReason.CANCELLED, "the engine stopped")

    def _round(self) -> bool:
        """One prefill chunk and one step; False when there was nothing to do."""
        self._take_inbox()
        self._drop_cancelled()
        plan = self._scheduler.schedule()
        with self._lock:
            self._num_queued -= len(plan.admitted)
        if plan.prefill is None and not plan.decode:
            return False
        try:
            for sequence in plan.admitted:
                request = sequence.request
                self.runner.admit(sequence.slot, sequence.pages, request.params, request.seed)
                output = OutputStream(request, self.tokenizer, self.eos_ids)
                self._active[sequence] = _Active(sequence, output)
            drawn = self._prefill(plan.prefill) if plan.prefill else None
            result = self._step(plan.decode) if plan.decode else None
        except Exception as error:
            logger.exception("a step failed; ending the running requests and rebuilding the cache")
            self._end_all(FinishReason.ERROR, f"the device failed: {error}", keep_waiting=True)
            self.runner.reset()
            return True
        if plan.prefill and drawn:
            self._emit(self._active[plan.prefill], drawn.emitted(0))
        if result:
            for row, sequence in enumerate(plan.decode):
                self._commit(self._active[sequence], result, row)
        return True

    def _prefill(self, sequence: Running) -> HostResult | None:
        """Run the next chunk; a result when it was the last."""
        start = time.perf_counter()
        chunk = sequence.request.prompt_ids[sequence.num_prefilled : sequence.num_prefilled + PREFILL_CHUNKS[-1]]
        result = self.runner.prefill(sequence.slot, chunk)
        sequence.num_prefilled += len(chunk)
        self.times.prefill_seconds += time.perf_counter() - start
        return None if sequence.is_prefilling else result

    def _step(self, sequences: list[Running]) -> HostResult:
        start = time.perf_counter()
        result = self.runner.step([sequence.slot for sequence in sequences])
        self.times.step_seconds += time.perf_counter() - start
        self.times.num_steps += 1
        return result

    def _commit(self, active: _Active, result: HostResult, row: int) -> None:
        depth = result.token_ids.shape[1] - 1
        if not active.num_accepted:
            active.num_accepted = [0] * depth
        active.num_steps += 1
        for i in range(int(result.n_accepted[row])):
            active.num_accepted[i] += 1
        self._emit(active, result.emitted(row))

    def _emit(self, active: _Active, token_ids: list[int]) -> None:
        """Hand over new tokens. A fault in one request's host code ends that request alone."""
        try:
            delta = active.output.push(token_ids)
        except Exception as error:
            logger.exception("%s: its output could not be made", active.sequence.request.request_id)
            delta = Delta(finish_reason=FinishReason.ERROR, error=str(error))
        self._deliver(active, delta)

    def _deliver(self, active: _Active, delta: Delta) -> None:
        request = active.sequence.request
        is_last = delta.finish_reason is not None
        if is_last:
            delta = Delta(delta.token_ids, delta.text, delta.finish_reason, delta.error, self._stats(active))
        try:
            request.on_delta(delta)
        except Exception:
            logger.exception("%s: its listener failed; ending it", request.request_id)
            is_last = True
        if is_last:
            del self._active[active.sequence]
            self._scheduler.finish(active.sequence)

    def _stats(self, active: _Active) -> SpeculationStats:
        tree = self.runner.tree
        return SpeculationStats(
            num_steps=active.num_steps,
            num_draft_tokens=active.num_steps * (tree.num_nodes if tree else 0),
            accepted_per_depth=tuple(active.num_accepted),
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
            self._scheduler.waiting.remove(sequence)
            self._end_waiting(sequence, gone)

    def _end_waiting(self, sequence: Running, delta: Delta) -> None:
        with self._lock:
            self._num_queued -= 1
        try:
            sequence.request.on_delta(delta)
        except Exception:
            logger.exception("%s: its listener failed", sequence.request.request_id)

    def _end_all(self, reason: FinishReason, error: str, *, keep_waiting: bool = False) -> None:
        delta = Delta(finish_reason=reason, error=error)
        for sequence in list(self._scheduler.running):
            active = self._active.get(sequence) or _Active(
                sequence, OutputStream(sequence.request, self.tokenizer, self.eos_ids)
            )
            self._active[sequence] = active
            self._deliver(active, delta)
        while self._scheduler.waiting and not keep_waiting:
            self._end_waiting(self._scheduler.waiting.popleft(), delta)
