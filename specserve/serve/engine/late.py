"""The programs that are compiled while an engine serves with those that it has, and the work that is left then."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specserve import host
from specserve.serve.engine.rounds import Rounds
from specserve.serve.programs.compile_queue import Compiler, ProgressLog
from specserve.serve.programs.compiling_process import CompilingProcess
from specserve.serve.programs.program_list import mask_programs
from specserve.serve.programs.runner import Runner
from specserve.speculative.program import StepProgram

logger = logging.getLogger(__name__)

UNUSED_SECONDS = 60.0  # after which a program is let go, of those that are in files
LOOK_SECONDS = 10.0  # from one look for such programs to the next
TIMING_SHARE = 0.1  # of the time in which sequences run: what is left to do on the engine's thread, beside them
# A generator, which yields between two runs, and the programs of the runs to come, if they must be here by then; what
# it returns is the controller to go on with, if it is another.
Finish = Iterator[Sequence[StepProgram] | None]


@dataclass(frozen=True)
class LateWork:
    """The work that an engine begins to serve without."""

    programs: Sequence[StepProgram] = ()  # to be compiled while plain decoding serves
    mask_programs: Sequence[StepProgram] = ()  # the same, once a request has a token mask
    on_compiled: Callable[[Runner], Finish] | None = None  # then: what is left to do on the engine's thread
    first: Sequence[StepProgram] = ()  # those that are compiled by now
    on_begin: Callable[[Runner], Finish] | None = None  # the same, to be done with these at once
    process: CompilingProcess | None = None  # begun already; None: one is made


class LatePrograms:
    """The compiling of programs beside an engine that serves. `wake` is called when there is something to `go_on`
    with. The other methods belong to the engine's thread.

    What a process of its own compiles goes into files, and is read when a step would use it; until then the step is
    made as if the program were still compiled. Each takes about 20 MB, so those that no step has used for a minute are
    let go."""

    def __init__(self, runner: Runner, work: LateWork, wake: Callable[[], None]) -> None:
        self.num_left = len(work.programs)
        self.is_complete = not work.programs  # also what is left to do then
        self._has_failed = False  # a program that failed is never used
        self._could_not_time = False
        self._mask_programs, self._on_compiled = tuple(work.mask_programs), work.on_compiled
        self._finish: Finish | None = None
        self._reader: Compiler | None = None  # of programs that are away
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._rests_until = 0.0  # from what is left to do, while sequences run
        self._wake, self._lock = wake, threading.Lock()
        self._begin = work.on_begin(runner) if work.on_begin and work.programs else None
        process = work.process or CompilingProcess(runner)
        for program in work.first:
            process.set_aside(program)
        self._process = process
        self._compiler = self._in_background(runner, work.programs, self._count, process=process)

    @property
    def is_finishing(self) -> bool:
        """Return whether work is left that is done bit by bit, and nothing to wait for before it."""
        return self._begin is not None or (self._finish is not None and not self._is_reading)

    @property
    def times_steps(self) -> bool:
        """Return whether steps are still to be timed, for which nothing may be off the device."""
        return not self.is_complete and self._on_compiled is not None

    @property
    def has_masks(self) -> bool:
        """Return whether the programs that only token masks need are compiled, or on their way."""
        return not self._mask_programs

    def start(self) -> None:
        if self.num_left:
            logger.info("ready; %d more programs are compiled while serving", self.num_left)
        self._compiler.start()

    def stop(self) -> None:
        self._compiler.stop()
        if self._reader is not None:
            self._reader.stop()

    def use(self, runner: Runner, on_compiled: Callable[[Runner], Finish] | None, *, has_others: bool) -> None:
        """Go on with a runner of other weights, whose programs are compiled but for those of token masks. With
        `has_others` they are other ones than those before, and `on_compiled` has what is left to do."""
        self.stop()
        self._begin = None
        # the ones before hold the runner before, with its weights
        self._compiler, self._reader = self._in_background(runner, ()), None
        self._mask_programs = mask_programs(runner)
        if has_others:
            self.is_complete, self._has_failed, self._could_not_time = False, False, False
            self._on_compiled = on_compiled

    def go_on(self, rounds: Rounds) -> None:
        """Do what there is to do between two rounds."""
        if self.num_left and rounds.running:
            self._process.give_way()
        self._read(rounds.runner)
        if self._begin is not None:
            self._go_on_beginning(rounds, self._begin)
        elif not (self.is_complete or self.num_left or self._is_reading or (rounds.asleep and self.times_steps)):
            self._complete(rounds)
        if self._mask_programs and self.is_complete:  # not while steps are timed
            self._look_for_masks(rounds)

    def _go_on_beginning(self, rounds: Rounds, work: Finish) -> None:
        try:
            next(work)
        except StopIteration as end:
            rounds.choice.complete(end.value, is_partial=True)
            self._begin = None
        except Exception:
            self._begin = None
            raise

    def _complete(self, rounds: Rounds) -> None:
        """Note that every late program is compiled. The work that is left is done bit by bit."""
        if self._finish is None:
            self._finish = iter(())
            if self._on_compiled:
                self._finish = self._on_compiled(rounds.runner)
        begin = time.monotonic()
        if rounds.running and begin < self._rests_until:
            return
        try:
            rounds.runner.compiled.require(next(self._finish) or ())
            now = time.monotonic()
            self._rests_until = now + (now - begin) * (1 / TIMING_SHARE - 1)
        except StopIteration as end:
            rounds.choice.complete(end.value, is_partial=self._has_failed)
            self.is_complete, self._finish = True, None
            logger.info("all programs are compiled")
        except Exception:
            # It may be of a step in flight, so all is timed once more. After a second time nothing is known of costs.
            self._finish = None
            if self._could_not_time:
                logger.error("the steps could not be timed, so all of them are taken to cost the same")
                self._on_compiled = None
            self._could_not_time = True
            raise

    @property
    def _is_reading(self) -> bool:
        return self._reader is not None and not self._reader.has_ended

    def _read(self, runner: Runner) -> None:
        """Begin to read the programs that are away and that steps would use, and let go of those that none uses."""
        if not self._is_reading:
            programs = runner.compiled.to_read()
            self._reader = self._in_background(runner, programs, reads=True).start() if programs else None
        # while steps are timed, each round needs all of them again
        if (now := time.monotonic()) >= self._next_look and self._finish is None:
            self._next_look = now + LOOK_SECONDS
            if runner.compiled.let_go(UNUSED_SECONDS):
                host.give_back_freed_memory()

    def _look_for_masks(self, rounds: Rounds) -> None:
        """The first request with a token mask is decoded plainly, and has the programs compiled by which it and later
        ones speculate."""
        if any(sequence.request.token_mask is not None for sequence in rounds.running):
            logger.info("the first grammar: %d programs are compiled while serving", len(self._mask_programs))
            self._compiler = self._in_background(rounds.runner, self._mask_programs).start()
            self._mask_programs = ()

    def _in_background(
        self,
        runner: Runner,
        programs: Sequence[StepProgram],
        count: Callable[[Exception | None], None] = lambda _error: None,
        *,
        reads: bool = False,
        process: CompilingProcess | None = None,
    ) -> Compiler:
        """Make a compiler of these programs that works while the engine serves, first at what would be used now. Unless
        it `reads` all that is in files, it reads nothing else of it. `count` is called on its threads after each."""
        log, process = ProgressLog(len(programs), "while serving"), process or CompilingProcess(runner)

        def make(program: StepProgram) -> None:
            if reads or not process.keep(program) or runner.compiled.is_required(program):
                process.compile(program)
                host.give_back_freed_memory()

        def on_compiled(program: StepProgram, error: Exception | None) -> None:
            label = runner.shapes.label(program)
            log(label)
            if error is not None:
                runner.compiled.drop(program)
                logger.error("%s could not be compiled, so it is never used", label, exc_info=error)
            count(error)

        def on_end() -> None:
            process.close()
            self._wake()

        return Compiler(
            make,
            programs,
            on_compiled=on_compiled,
            on_end=on_end,
            is_urgent=runner.compiled.is_required,
        )

    def _count(self, error: Exception | None) -> None:
        with self._lock:
            self._has_failed |= error is not None
            self.num_left -= 1
        self._wake()
