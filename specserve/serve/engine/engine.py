"""The engine: one thread that goes round after round (`rounds`), and what others may ask of it.

Other threads only `submit`, `cancel` and ask; the engine never sees HTTP, the device never sees a request.
"""

import dataclasses
import functools
import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

from specserve import host
from specserve.drafters.speculation import describe
from specserve.errors import CapacityError, ConfigError, RequestError
from specserve.processes import ProcessError
from specserve.serve.engine.admission import Queue
from specserve.serve.engine.interface import DraftInfo, EngineStats
from specserve.serve.engine.options import bad_sequences, check_prompt, check_some_token, check_token_ids
from specserve.serve.engine.pages import Watcher
from specserve.serve.engine.rounds import Rounds
from specserve.serve.engine.scheduler import Scheduler
from specserve.serve.engine.swap import Finish, LoadedHead, Swap, prepare
from specserve.serve.programs.compile_queue import Compiler, ProgressLog
from specserve.serve.programs.program_list import mask_programs
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.completion import CompletionOutput, answer_all
from specserve.serve.requests.grammars import Grammars
from specserve.serve.requests.request import Delta, FinishReason, GrammarSpec, Request, SamplingParams, TokenMask
from specserve.speculative.controller import Controller
from specserve.speculative.program import StepProgram
from specserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.2  # how often an idle engine looks for cancelled requests in its queue
RESTS_BEFORE_TRIM, RESTS_BETWEEN_TRIMS = 10, 100  # times of IDLE_SECONDS, until freed memory goes back to the system
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class EngineOptions:
    """The options by which an engine treats its requests. `settings.ServeRun` has the same settings with their
    help."""

    max_queue: int = 1024
    prefill_tokens: int = 0
    is_caching: bool = True
    prefers_cached: bool = False
    watchdog_seconds: float = 0.0
    num_pages: int | None = None  # of each data rank, that its sequences may hold together; None: all
    most_steps: int | None = None  # that are dispatched at once; None: as many as the runner can


class Engine:
    """Answers requests by continuous batching over the slots of a `Runner`, on a thread of its own. It is a context
    manager that starts and stops that thread; requests may be submitted before it starts."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        model_name: str,
        eos_ids: Sequence[int],
        draft: DraftInfo | None = None,
        load_head: Callable[[str], LoadedHead] | None = None,  # to replace the head; None: it stays
        controller: Controller | None = None,  # None: the first of the runner's trees, always
        options: EngineOptions | None = None,
        late_programs: Sequence[StepProgram] = (),  # to be compiled while plain decoding serves
        mask_programs: Sequence[StepProgram] = (),  # the same, once a request has a token mask
        on_compiled: Callable[[Runner], Finish] | None = None,  # then: what is left to do on the engine's thread
        watcher: Watcher | None = None,  # hears what the prefix cache gains and loses
    ) -> None:
        self.runner = runner
        self.model_name, self.draft = model_name, draft
        self.eos_ids = frozenset(eos_ids)
        self.options = options or EngineOptions()
        self._num_pages = self.options.num_pages or runner.shapes.pages_of_rank  # of a sequence, at most
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, self.vocab_size, sorted(eos_ids))
        # all choices of a request have the same, and are submitted one after another
        self._bad_sequences = functools.lru_cache(maxsize=64)(functools.partial(bad_sequences, tokenizer=tokenizer))
        self.rounds = Rounds(
            runner,
            self._new_scheduler(watcher),
            tokenizer,
            controller,
            is_partial=bool(late_programs),
            most_steps=self.options.most_steps,
            on_end=self._count_ended,
        )
        self._num_left = len(late_programs)
        self._has_late, self._has_failed = bool(late_programs), False  # a program that failed is never used
        self._compiler = self._in_background(late_programs, self._count_late)
        self._mask_programs = tuple(mask_programs)
        self._on_compiled = on_compiled
        self._load_head, self._swaps, self._one_swap = load_head, queue.SimpleQueue[Swap](), threading.Lock()
        self._finish: Finish | None = None
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._queue = Queue(self.options.max_queue)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._has_died = self._is_stopping = self._is_draining = self._is_flushing = False
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="engine-watchdog", daemon=True)

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
        return self.runner.shapes.max_model_len

    @property
    def is_healthy(self) -> bool:
        return not self._has_died and self.runner.beyond_repair() is None

    @property
    def is_ready(self) -> bool:
        return self.is_healthy and not (self._is_draining or self._is_stopping)

    @property
    def speculation(self) -> str:
        choice = self.rounds.choice
        if choice.only is not None:
            return describe(*choice.only)
        return "auto" if choice.is_choosing else describe(self.runner.shapes.trees[0])

    def set_speculation(self, speculation: str) -> None:
        """Speculate in this way from the next step on. No token depends on it. Raises ConfigError for a way that no
        programs were compiled for."""
        ways = {describe(tree): tree for tree in self.runner.shapes.trees}
        if speculation in ways:
            self.rounds.choice.step_only(ways[speculation])
        elif speculation == "auto" and self.rounds.choice.is_choosing:
            self.rounds.choice.step_only()
        else:
            known = ", ".join([*(["auto"] if self.rounds.choice.is_choosing else []), *ways])
            raise ConfigError(f"no programs are compiled for speculation {speculation[:100]!r}; there are: {known}")
        logger.info("speculation is %s now", self.speculation)

    def start(self) -> "Engine":
        host.give_back_freed_memory()  # of what was loaded, and of compiling
        self._thread.start()
        if self.options.watchdog_seconds:
            self._watchdog.start()
        if self._num_left:
            logger.info("ready; %d more programs are compiled while serving", self._num_left)
        self._compiler.start()
        return self

    def stop(self) -> None:
        """End every sequence as cancelled and wait for the thread, but not for a stuck device. It may be called again,
        and from any thread."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                logger.error("the engine did not stop within %.0f seconds; its device is stuck", STOP_SECONDS)

    def drain(self, seconds: float) -> None:
        """Take no new sequences (CapacityError), and wait until those that were taken, running or waiting, have ended
        and their listeners know it. The wait takes at most so many seconds; sequences that are left then go on until
        `stop`."""
        self._is_draining = True
        deadline = time.monotonic() + seconds
        # in this order: a sequence is counted as ended when its listener is already being called
        while (
            (self._queue.num_open or self.rounds.delivery.is_notifying)
            and self.is_healthy
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)

    def flush_cache(self) -> None:
        """Forget every cached prefix and recalled answer, at the engine's next round."""
        self._is_flushing = True
        self._wake.set()

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def load_draft(self, folder: str) -> DraftInfo:
        """Replace the draft head by one in a folder, of any kind and shape, while requests run: their tokens stay as
        they would have been, and nothing that the old head wrote is read by the new one. The head is loaded, checked
        and has its programs compiled beside the old one, which stays where anything is wrong: ConfigError or
        CheckpointError says what. May be called from any thread, and returns when the new one speculates; others wait
        for their turn. Raises CapacityError when the engine stops meanwhile."""
        if self._load_head is None:
            raise ConfigError("this engine cannot replace its head; start another one with it")
        if self.runner.shapes.is_deterministic:
            raise ConfigError("a deterministic server never computes an answer's keys again, so its head stays")
        with self._one_swap:
            while self._has_late:  # programs of the head before are still compiled or timed
                self._check_ready()
                time.sleep(IDLE_SECONDS)
            loaded = self._load_head(folder)
            swap = prepare(self.runner, loaded, has_masks=not self._mask_programs, check=self._check_ready)
            self._swaps.put(swap)
            self._wake.set()
            while not wait([swap.done], IDLE_SECONDS).done:
                self._check_ready()
            swap.done.result()
        logger.info("the head is %s now", loaded.info.name)
        return loaded.info

    def _check_ready(self) -> None:
        if not self.is_ready:
            raise CapacityError("the engine is stopping, and has changed nothing; ask again later or elsewhere")

    def stats(self) -> EngineStats:
        """Return the counts of the engine so far. It may be called from any thread, at any time."""
        stats, num_open = self.rounds.stats(), self._queue.num_open
        num_waiting = max(0, num_open - stats.num_running)
        return dataclasses.replace(stats, num_waiting=num_waiting, num_programs_left=self._num_left)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        *,
        priority: int = 0,
        cache_salt: str = "",
        token_mask: TokenMask | None = None,
        request_id: str = "",  # as the log names it; empty: a number
        client: str = "",  # the one that shares the queue with the others
    ) -> Request:
        """Queue one sequence. It never waits for the device; a grammar that is not known (`knows_grammar`) is compiled
        first, when those before it are. Raises RequestError, whose param names what does not fit, or CapacityError."""
        self._check_ready()
        if token_mask is not None:
            self._check_constrained("token_mask")
        spec = params.grammar
        request = Request(
            request_id=request_id or f"seq-{next(self._ids)}",
            prompt_ids=tuple(prompt_ids),
            params=params,
            max_new_tokens=self.check(prompt_ids, params),
            client=client,
            seed=random.getrandbits(63) if params.seed is None else params.seed,
            on_delta=on_delta,
            priority=priority,
            cache_salt=cache_salt,
            token_mask=(spec and self._grammars.compile(spec)()) if token_mask is None else token_mask,
            stop_ids=self._stop_ids(params),
            bad_sequences=self._bad_sequences(params.bad_words),
        )
        with self._lock:  # `_run` takes it at its end, so nothing is put behind its back
            self._check_ready()
            self._queue.take(client, [sequence.request.client for sequence in self.rounds.running])
            self._inbox.put(request)
        self._wake.set()
        return request

    def knows_grammar(self, grammar: GrammarSpec) -> bool:
        return self._grammars.knows(grammar)

    def _check_constrained(self, param: str) -> None:
        if not self.runner.has_constrained:
            raise RequestError(f"{param}: this engine was started with constrained=False", param=param)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Return how many tokens the sequence may grow by. Raises RequestError, as `submit` does."""
        if params.n != 1:
            raise RequestError("the engine takes one sequence at a time; submit params.choices()", param="n")
        if params.grammar is not None:
            self._check_constrained("grammar")
            self._grammars.compile(params.grammar)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none", param="stop")
        room = check_prompt(prompt_ids, params.max_tokens, self.max_model_len, self.vocab_size)
        check_token_ids(params, self.vocab_size)
        check_some_token(params, self._stop_ids(params), self._bad_sequences(params.bad_words), self.vocab_size)
        max_new_tokens = room if params.max_tokens is None else params.max_tokens
        pages = -(-(len(prompt_ids) + max_new_tokens - 1) // self.runner.shapes.page_size)
        if pages > self._num_pages:
            raise RequestError(
                f"prompt and answer need {pages} cache pages, the server has {self._num_pages} for a sequence; lower "
                "max_tokens or start the server with a larger cache",
                param="max_tokens",
            )
        return max_new_tokens

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_done: Callable[[int, CompletionOutput], None] = lambda _i, _completion: None,
    ) -> list[CompletionOutput]:
        """Run many prompts and wait; results in order. `on_done` is called on the engine's thread as each ends."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        asked = list(zip(prompts, each, strict=True))

        def submit(i: int, on_delta: Callable[[Delta], None]) -> Request:
            return self.submit(*asked[i], on_delta)

        return answer_all(submit, len(asked), on_done, most=self.options.max_queue)

    # The engine's thread.

    def _new_scheduler(self, watcher: Watcher | None) -> Scheduler:
        runner, options = self.runner, self.options
        is_caching = options.is_caching
        if is_caching and runner.config.target.is_recurrent:
            logger.info("no prefix cache: %s has recurrent layers, whose state no page keeps", self.model_name)
            is_caching = False
        return Scheduler(
            runner.shapes.num_slots,
            runner.shapes.page_pool(watcher, self._num_pages),
            chunks=runner.shapes.chunks,
            max_step=runner.shapes.max_step,
            cache_lag=runner.config.max_pending,
            prefill_tokens=options.prefill_tokens,
            is_caching=is_caching,
            prefers_cached=options.prefers_cached,
            is_deterministic=runner.shapes.is_deterministic,
        )

    def _run(self) -> None:
        try:
            num_rests = 0
            while not self._is_stopping:
                num_rests += 1
                if self._round() or self._finish:
                    num_rests = 0
                else:
                    self._wake.wait(IDLE_SECONDS)
                    self._wake.clear()
                if num_rests % RESTS_BETWEEN_TRIMS == RESTS_BEFORE_TRIM:
                    host.give_back_freed_memory()  # of a burst, also one of bodies that were refused
                if self._has_late and not self._num_left:
                    self._go_on()
                if self._mask_programs and not self._has_late:  # not while steps are timed
                    self._look_for_masks()
        except BaseException as error:
            self._has_died = True
            if not isinstance(error, ProcessError):  # it is reported where the process ends
                logger.exception("the engine died")
                raise
        finally:
            self._compiler.stop()
            with self._lock:
                self._is_stopping = True
            self._take_inbox()
            self.rounds.end_all(FinishReason.CANCELLED, "the engine stopped")

    def _round(self) -> bool:
        """Do one round of whatever there is to do. Returns False when there was nothing."""
        self._take_inbox()
        if self._is_flushing:
            self._is_flushing = False
            self.rounds.flush_cache()
        try:
            self._swap_heads()
            return self.rounds.run()
        except Exception as error:
            if (end := self.runner.beyond_repair(error)) is not None:
                raise end from error
            logger.exception("a step failed; ending the running requests and rebuilding the cache")
            self.rounds.rebuild(error)
            return True

    def _swap_heads(self) -> None:
        while not self._swaps.empty():
            swap = self._swaps.get_nowait()
            try:
                self.rounds.swap_head(swap.runner, swap.loaded.acceptance)
            except Exception as error:
                swap.done.set_exception(error)
                if isinstance(error, ConfigError):  # the old head goes on
                    continue
                raise
            has_others = swap.runner.compiled is not self.runner.compiled
            self.runner, self.draft = swap.runner, swap.loaded.info
            self._mask_programs = mask_programs(self.runner)
            self._compiler.stop()
            self._compiler = self._in_background(())
            if has_others:
                self._has_late, self._has_failed, self._on_compiled = True, False, swap.loaded.on_compiled
            swap.done.set_result(None)

    def _in_background(
        self, programs: Sequence[StepProgram], count: Callable[[Exception | None], None] = lambda _error: None
    ) -> Compiler:
        """Make a compiler of these programs that works while the engine serves. `count` is called on its threads after
        each."""
        log, runner = ProgressLog(len(programs), "while serving"), self.runner

        def on_compiled(program: StepProgram, error: Exception | None) -> None:
            host.give_back_freed_memory()
            label = runner.shapes.label(program)
            log(label)
            if error is not None:
                logger.error("%s could not be compiled, so it is never used", label, exc_info=error)
            count(error)

        return Compiler(runner.compile, programs, on_compiled=on_compiled, is_background=True)

    def _count_late(self, error: Exception | None) -> None:
        with self._lock:
            self._has_failed |= error is not None
            self._num_left -= 1
        self._wake.set()

    def _look_for_masks(self) -> None:
        """The first request with a token mask is decoded plainly, and has the programs compiled by which it and later
        ones speculate."""
        if any(sequence.request.token_mask is not None for sequence in self.rounds.running):
            logger.info("the first grammar: %d programs are compiled while serving", len(self._mask_programs))
            self._compiler, self._mask_programs = self._in_background(self._mask_programs).start(), ()

    def _go_on(self) -> None:
        """Note that every late program is compiled. The work that is left is done bit by bit, between two rounds."""
        if self._finish is None:
            self._finish = self._on_compiled(self.runner) if self._on_compiled else iter(())
        try:
            next(self._finish)
        except StopIteration as end:
            self.rounds.choice.complete(end.value, is_partial=self._has_failed)
            self._has_late, self._finish = False, None
            logger.info("all programs are compiled")

    def _count_ended(self, request: Request) -> None:
        with self._lock:
            self._queue.give_back(request.client)

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self.rounds.add(self._inbox.get_nowait())

    def _watch(self) -> None:
        """Report a step that does not end. No more can be done, because a device cannot be interrupted from here."""
        is_reported = False
        while self._thread.is_alive():
            seconds = self.rounds.stats().seconds_in_step
            is_late = seconds > self.options.watchdog_seconds
            if is_late and not is_reported:
                logger.error("a step has taken more than %.0f seconds; is the device stuck?", seconds)
            is_reported = is_late
            time.sleep(min(1.0, self.options.watchdog_seconds / 4))
