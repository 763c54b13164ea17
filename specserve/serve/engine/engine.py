"""The engine: one thread that goes round after round (`rounds`), and what others may ask of it.

Other threads only `submit`, `cancel` and ask; the engine never sees HTTP, the device never sees a request.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from specserve import host
from specserve.drafters.speculation import describe
from specserve.errors import CapacityError, ConfigError, RequestError
from specserve.processes import ProcessError
from specserve.serve.engine.admission import STOPPING, Queue
from specserve.serve.engine.changes import Changes
from specserve.serve.engine.input_processor import InputProcessor
from specserve.serve.engine.interface import DraftInfo, EngineStats
from specserve.serve.engine.late import LatePrograms, LateWork
from specserve.serve.engine.options import EngineOptions
from specserve.serve.engine.rest import PauseMode, Rest, SleepMode
from specserve.serve.engine.rounds import PARTS, Part, Rounds
from specserve.serve.engine.scheduler import Scheduler
from specserve.serve.engine.swap import DraftWeights, ServedWeights, Swaps, TargetWeights, UpdateMode
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.completion import CompletionOutput, answer_all
from specserve.serve.requests.request import Delta, FinishReason, GrammarSpec, Request, RequestOptions, SamplingParams
from specserve.speculative.controller import Controller
from specserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specserve.serve.engine.adapters import Loras, ServedLoras

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.2  # how often an idle engine looks for cancelled requests in its queue
RESTS_BEFORE_TRIM, RESTS_BETWEEN_TRIMS = 10, 100  # times of IDLE_SECONDS, until freed memory goes back to the system
TRIM_SECONDS = 10.0  # the same, of an engine that does not rest
STOP_SECONDS = 60.0


class Engine:
    """Answers requests by continuous batching over the slots of a `Runner`, on a thread of its own. It is a context
    manager that starts and stops that thread; requests may be submitted before it starts. A method without a
    description of its own has that of `interface.EngineLike`."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        model_name: str,
        eos_ids: Sequence[int],
        weights: ServedWeights | None = None,
        controller: Controller | None = None,  # None: the first of the runner's trees, always
        options: EngineOptions | None = None,
        late: LateWork | None = None,  # None: everything is compiled
        loras: "ServedLoras | None" = None,  # None: there is no room for adapters
    ) -> None:
        options, weights, late = options or EngineOptions(), weights or ServedWeights(), late or LateWork()
        if options.is_caching and runner.config.target.is_recurrent and not runner.shapes.kept_states:
            logger.info("no prefix cache: %s has recurrent layers, and no state of a prefix is kept", model_name)
            options = dataclasses.replace(options, is_caching=False)
        num_pages = options.num_pages or runner.shapes.pages_of_rank  # of a sequence, at most
        self.model_name, self.draft, self.options = model_name, weights.info, options
        self.eos_ids = frozenset(eos_ids)
        self.inputs = InputProcessor(runner, tokenizer, eos_ids, num_pages)
        self.vocab_size, self.max_model_len = self.inputs.vocab_size, self.inputs.max_model_len
        self.num_slots = runner.shapes.num_slots
        self._tokenizer = tokenizer
        self._queue = Queue(options.max_queue)
        self.rounds = Rounds(
            runner,
            Scheduler(
                runner.shapes.num_slots,
                runner.shapes.page_pool(options.watcher, num_pages),
                options,
                chunks=runner.shapes.chunks,
                extra_tokens=runner.shapes.extra_tokens,
                most_prompts=runner.shapes.most_prompts,
                max_step=runner.shapes.max_step,
                cache_lag=runner.config.max_pending,
                is_deterministic=runner.shapes.is_deterministic,
            ),
            tokenizer,
            controller,
            is_partial=bool(late.programs),
            most_steps=options.most_steps,
            version=weights.version,
            on_end=self._give_back,
        )
        self._wake = threading.Event()
        self._late = LatePrograms(runner, late, self._wake.set)
        self._changes = Changes(self._wake.set, self._check_ready)
        self._swaps = Swaps(weights, self.rounds, self._late, self._changes, self._check_ready)
        self._rest = Rest(self.rounds, self._changes, self._swaps)
        self._loras = None
        if loras is not None:
            from specserve.serve.engine.adapters import Loras  # no other engine needs it

            self._loras = Loras(loras, model_name, self.rounds, self._changes, self._swaps)
        self._has_died = self._is_stopping = self._is_flushing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def runner(self) -> Runner:
        return self.rounds.runner

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError where there is none."""
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer: send token ids", param="prompt")
        return self._tokenizer

    @property
    def is_healthy(self) -> bool:
        return not self._has_died and self.runner.beyond_repair() is None

    @property
    def is_ready(self) -> bool:
        return self.is_healthy and not self._queue.is_closed

    @property
    def speculation(self) -> str:
        choice = self.rounds.choice
        if (only := choice.only) is not None:
            return describe(*only)
        return "auto" if choice.is_choosing else describe(self.runner.shapes.trees[0])

    def set_speculation(self, speculation: str) -> None:
        ways = {describe(tree): tree for tree in self.runner.shapes.trees}
        known = list(ways)
        if self.rounds.choice.is_choosing:
            known.insert(0, "auto")
        if speculation not in known:
            raise ConfigError(
                f"no programs are compiled for speculation {speculation[:100]!r}; there are: {', '.join(known)}"
            )
        if speculation == "auto":
            self.rounds.choice.step_only()
        else:
            self.rounds.choice.step_only(ways[speculation])
        logger.info("speculation is %s now", self.speculation)

    def start(self) -> "Engine":
        host.give_back_freed_memory()  # of what was loaded, and of compiling
        self._thread.start()
        if self.options.watchdog_seconds:
            watched = self._thread, self.rounds, self.options.watchdog_seconds
            threading.Thread(target=_watch, args=watched, name="engine-watchdog", daemon=True).start()
        self._late.start()
        return self

    def stop(self) -> None:
        """End every sequence as cancelled and wait for the thread, but not for a stuck device. It may be called again,
        and from any thread."""
        self._queue.close()
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                logger.error("the engine did not stop within %.0f seconds; its device is stuck", STOP_SECONDS)

    def drain(self, seconds: float) -> None:
        self._queue.close()
        deadline = time.monotonic() + seconds
        # in this order: a sequence is counted as ended when its listener is already being called
        while (
            (self._queue.num_open or self.rounds.delivery.is_notifying)
            and self.is_healthy
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)

    def flush_cache(self) -> None:
        self._is_flushing = True
        self._wake.set()

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def load_draft(self, folder: str) -> DraftInfo:
        return self._swaps.load_head(folder, self._take_note)

    def _take_note(self, head: DraftInfo) -> None:
        self.draft = head
        if self._loras is not None:
            self._loras.follow(head)

    @property
    def weight_version(self) -> str:
        return self.rounds.version

    @property
    def target_folder(self) -> str:
        """The folder of the target that the engine began with."""
        return self._swaps.weights.folder

    def update_weights(
        self,
        target: TargetWeights | None = None,
        draft: DraftWeights | None = None,
        *,
        version: str = "",
        mode: UpdateMode = "continue",
    ) -> str:
        """Serve another version of the weights, whole, from the next round on; with the mode `drain` once those
        sequences have ended that have begun, while the others wait. Sequences that `continue` have their keys and
        values computed anew. `target` and `draft` are what `swap.TargetWeights` and `swap.DraftWeights` say; None: they
        stay. May be called from any thread, and returns the version's name (`version`, or a number) when it serves.
        Raises ConfigError or CheckpointError where anything is wrong with it, and then nothing has changed;
        CapacityError when the engine stops meanwhile."""

        def on_swapped(info: DraftInfo | None) -> None:
            if self.draft is not None:  # another version of it has its name; its tau was of the weights before
                info = info or (dataclasses.replace(self.draft, tau=None) if draft is None else DraftInfo(""))
                self._take_note(dataclasses.replace(info, name=self.draft.name))

        return self._swaps.update(target, draft, on_swapped, version=version, mode=mode)

    @property
    def loras(self) -> Mapping[str, str]:
        return self._loras.roots if self._loras else {}

    def load_lora(self, name: str, folder: str) -> None:
        """Load the LoRA adapter in a PEFT folder, while requests run, and return when requests find it by this name.
        May be called from any thread. Raises ConfigError or CheckpointError where anything is wrong with it, and then
        nothing has changed; CapacityError when the engine stops meanwhile."""
        self._with_room().load(name, folder)

    def unload_lora(self, name: str) -> None:
        """Let no more requests find a LoRA adapter. Those that were taken go on with it, and until they have ended its
        place is taken. Raises ConfigError where there is none of that name."""
        self._with_room().unload(name)

    def _with_room(self) -> "Loras":
        if self._loras is None:
            raise ConfigError("this engine has no room for LoRA adapters: start it with max_loras")
        return self._loras

    def _give_back(self, request: Request) -> None:
        """Take back what a request had that has ended, or was not taken."""
        self._queue.give_back(request.client)
        if self._loras and request.adapter_id >= 0:
            self._loras.give_back(request.adapter_id)

    @property
    def is_paused(self) -> bool:
        return self._rest.is_paused

    @property
    def is_sleeping(self) -> bool:
        return bool(self.rounds.asleep)

    def abort(self, is_meant: Callable[[Request], bool] = lambda _: True) -> None:
        self._rest.abort(is_meant)

    def pause(self, mode: PauseMode = "abort") -> None:
        self._rest.pause(mode)

    def resume(self) -> None:
        self._rest.resume()

    def sleep(self, parts: Collection[Part] = PARTS, mode: SleepMode = "retract") -> None:
        self._rest.sleep(parts, mode)

    def wake(self, parts: Collection[Part] = PARTS) -> None:
        self._rest.wake(parts)

    def _check_ready(self) -> None:
        if not self.is_ready:
            raise CapacityError(STOPPING)

    def stats(self) -> EngineStats:
        stats, num_open = self.rounds.stats(), self._queue.num_open
        num_waiting = max(0, num_open - stats.num_running)
        return dataclasses.replace(stats, num_waiting=num_waiting, num_programs_left=self._late.num_left)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        **options: Unpack[RequestOptions],
    ) -> Request:
        self._check_ready()
        lora = None
        if name := options.get("lora"):
            if self._loras is None:
                raise RequestError("lora: this engine has no LoRA adapters", param="lora")
            lora = self._loras.take(name)
            options["cache_salt"] = lora.salted(options.get("cache_salt", ""))
        elif self._loras is not None and "cache_salt" in options:
            options["cache_salt"] = self._loras.plain_salt(options["cache_salt"])
        try:
            request = self.inputs.make_request(prompt_ids, params, on_delta, options, lora.place if lora else -1)
            self._queue.put(request, [sequence.request.client for sequence in self.rounds.running])
        except BaseException:
            if self._loras and lora is not None:
                self._loras.give_back(lora.place)
            raise
        self._wake.set()
        return request

    def knows_grammar(self, grammar: GrammarSpec) -> bool:
        return self.inputs.grammars.knows(grammar)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_done: Callable[[int, CompletionOutput], None] = lambda _i, _completion: None,
        **options: Unpack[RequestOptions],
    ) -> list[CompletionOutput]:
        """Run many prompts and wait; results in order. `on_done` is called on the engine's thread as each ends."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        asked = list(zip(prompts, each, strict=True))

        def submit(i: int, on_delta: Callable[[Delta], None]) -> Request:
            return self.submit(*asked[i], on_delta, **options)

        return answer_all(submit, len(asked), on_done, most=self.options.max_queue)

    # The engine's thread.

    def _run(self) -> None:
        try:
            num_rests, next_trim = 0, time.monotonic() + TRIM_SECONDS
            while not self._is_stopping:
                num_rests += 1
                if self._round() or self._late.is_finishing:
                    num_rests = 0
                else:
                    self._wake.wait(IDLE_SECONDS)
                    self._wake.clear()
                is_busy = not num_rests and time.monotonic() >= next_trim
                if is_busy or num_rests % RESTS_BETWEEN_TRIMS == RESTS_BEFORE_TRIM:
                    host.give_back_freed_memory()  # of a burst, also one of bodies that were refused
                    next_trim = time.monotonic() + TRIM_SECONDS
                try:
                    self._late.go_on(self.rounds)
                except Exception as error:
                    self._repair(error)
        except BaseException as error:
            self._has_died = True
            if not isinstance(error, ProcessError):  # it is reported where the process ends
                logger.exception("the engine died")
                raise
        finally:
            self._late.stop()
            self._queue.close()  # so that nothing is put behind its back
            self.rounds.add(self._queue.arrived())
            self.rounds.end_all(FinishReason.CANCELLED, "the engine stopped")

    def _round(self) -> bool:
        """Do one round of whatever there is to do. Returns False when there was nothing."""
        self.rounds.add(self._queue.arrived())
        if self._is_flushing:
            self._is_flushing = False
            self.rounds.flush_cache()
        while self._changes.make_next(self.rounds.is_at_rest, self._repair, is_paused=self._rest.is_paused):
            pass
        try:
            if self._rest.is_paused:
                self.rounds.drop_cancelled()
                return False
            return self.rounds.run(begins=not self._changes.holds_back)
        except Exception as error:
            self._repair(error)
            return True

    def _repair(self, error: BaseException) -> None:
        """Rebuild what a step, or a change, may have lost. Raises what ends the engine."""
        if not isinstance(error, Exception):
            raise error
        if (end := self.runner.beyond_repair(error)) is not None:
            raise end from error
        logger.exception(
            "a step, or a change of the engine, failed; ending the running requests and rebuilding the cache"
        )
        self.rounds.rebuild(error)


def _watch(engine_thread: threading.Thread, rounds: Rounds, most_seconds: float) -> None:
    """Report a step that does not end. No more can be done, because a device cannot be interrupted from here."""
    is_reported = False
    while engine_thread.is_alive():
        seconds = rounds.stats().seconds_in_step
        is_late = seconds > most_seconds
        if is_late and not is_reported:
            logger.error("a step has taken more than %.0f seconds; is the device stuck?", seconds)
        is_reported = is_late
        time.sleep(min(1.0, most_seconds / 4))
