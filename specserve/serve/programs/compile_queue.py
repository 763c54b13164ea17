"""Compiled programs, made ahead of the steps that need them, on several threads side by side, and then only called.

Nothing is ever run in order to be compiled, and what is called is the compiled program itself: no call can compile by
accident. A program that is missing when it is asked for is compiled there and then, and counted.
"""

import atexit
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from specserve import host
from specserve.serve.programs.calls import Call
from specserve.serve.programs.program_cache import ProgramCache
from specserve.speculative.program import StepProgram

logger = logging.getLogger(__name__)

MAX_THREADS = 8  # threads side by side: tracing is Python, so more would wait for each other
LOG_SECONDS = 10.0
CHECK_SECONDS = 0.2
MOST_DOUBLINGS = 4  # of the time after which a program is let go
REQUIRED_SECONDS = 5.0  # how long a program counts as required after a step would have used it
# of JAX's monitoring, with the program's identity: JAX reports what it compiles and not what it dispatches, and devices
# of several processes wait for each other where these do not dispatch the same programs in the same order
DISPATCH_EVENT = "/specserve/dispatch"


class CompiledPrograms:
    """The programs that are compiled. Every method may be called from any thread."""

    def __init__(self, cache: ProgramCache | None = None) -> None:
        """`cache` has those that earlier processes have compiled."""
        self._cache = cache
        self._compiled: dict[StepProgram, Any] = {}
        self._in_progress: dict[StepProgram, Future[Any]] = {}
        self._required: dict[StepProgram, float] = {}  # when a step would last have used it
        self._used: dict[StepProgram, float] = {}  # when each compiled one was last called, or came
        self._set_aside: set[StepProgram] = set()
        self._num_gone: dict[StepProgram, int] = {}  # how many times each was let go
        self._dropped: set[StepProgram] = set()
        self._lock = threading.Lock()
        self.num_missed = 0  # compiled, and not only read from a file, because a call needed them

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, program: StepProgram) -> bool:
        return program in self._compiled

    def first(self, programs: Iterator[StepProgram]) -> StepProgram:
        """Return the first that is compiled, of programs that do the same, the cheapest first. It is the first of all
        when every program is; until then larger ones serve."""
        cheapest = next(programs)
        if cheapest in self._compiled:
            return cheapest
        self.require((cheapest,))
        return next((each for each in programs if each in self._compiled), cheapest)

    def require(self, programs: Iterable[StepProgram]) -> None:
        """Note that the steps of this moment would use these programs if they were compiled."""
        self._required.update(dict.fromkeys(programs, time.monotonic()))

    def set_aside(self, program: StepProgram) -> None:
        """Note that the program is in its file, and need be here only while steps use it."""
        self._set_aside.add(program)

    def drop(self, program: StepProgram) -> None:
        """Note that the program can be neither read nor made, so that no step waits for it, and none uses it."""
        self._set_aside.discard(program)
        self._dropped.add(program)

    def is_lost(self, program: StepProgram) -> bool:
        """Return whether the program is not here, and will not be."""
        return program in self._dropped and program not in self._compiled

    def is_away(self, program: StepProgram) -> bool:
        """Return whether the program is set aside and not here: it is to be read before a step uses it."""
        return program not in self._compiled and program in self._set_aside

    def to_read(self) -> list[StepProgram]:
        """List the programs that are away and that steps of late would have used."""
        for program in list(self._required):
            if program in self._compiled:
                self._required.pop(program, None)
        return [program for program in list(self._required) if self.is_away(program) and self.is_required(program)]

    def let_go(self, seconds: float) -> int:
        """Let go of the programs that are set aside and that no step has used for so long; twice as long each of the
        first times that one has come back, so that it does not come and go. Returns how many."""
        now, gone = time.monotonic(), list[StepProgram]()
        for program in list(self._set_aside):
            number = min(self._num_gone.get(program, 0), MOST_DOUBLINGS)
            if now - self._used.get(program, math.inf) > seconds * 2**number:
                gone.append(program)
        with self._lock:
            for program in gone:
                self._num_gone[program] = 1 + self._num_gone.get(program, 0)
                del self._compiled[program], self._used[program]
        return len(gone)

    def is_required(self, program: StepProgram) -> bool:
        """Return whether steps of late would have used the program."""
        return time.monotonic() - self._required.get(program, -math.inf) < REQUIRED_SECONDS

    @property
    def is_keeping(self) -> bool:
        """Return whether there are files for programs."""
        return self._cache is not None

    def is_kept(self, call: Call) -> bool:
        """Return whether there is a file for the program."""
        return self._cache is not None and self._cache.has(call)

    def keep(self, call: Call) -> None:
        """Compile the program for other processes alone: into its file, if there is none yet."""
        if self._cache is not None and not self._cache.has(call):
            self._cache.compile(call)

    def run(self, call: Call) -> Any:
        """Call the program, which is compiled first if it is missing."""
        compiled = self._compiled.get(call.program)
        if compiled is None:
            self.num_missed += not self.is_kept(call)
            compiled = self.compile(call)
        self._used[call.program] = time.monotonic()
        jax.monitoring.record_event(DISPATCH_EVENT, program=repr(call.program))
        return compiled(*call.arguments)

    def compile(self, call: Call) -> Any:
        """Return the program, compiled by now; one that another thread is compiling is waited for."""
        with self._lock:
            found = self._compiled.get(call.program)
            future, is_ours = self._in_progress.get(call.program), False
            if found is None and future is None:
                future = self._in_progress[call.program] = Future()
                is_ours = True
        if found is not None:
            return found
        assert future is not None
        if is_ours:
            try:
                made = self._make(call)
            except BaseException as error:
                with self._lock:
                    del self._in_progress[call.program]
                future.set_exception(error)
            else:
                with self._lock:  # before those that wait for it go on
                    del self._in_progress[call.program]
                    self._compiled[call.program] = made
                    self._used[call.program] = time.monotonic()
                future.set_result(made)
        return future.result()

    def _make(self, call: Call) -> Any:
        if self._cache is None:
            return call.compile()
        found = self._cache.load(call)
        return self._cache.compile(call) if found is None else found


class Compiler:
    """Compiles programs on threads of its own, each by `compile_one`: first those of which `is_urgent` holds by then,
    and else in the order given. `on_compiled` is called on these threads after each, with what went wrong or None;
    `on_end` when all are done, or the others are not needed any more."""

    def __init__(
        self,
        compile_one: Callable[[StepProgram], object],
        programs: Sequence[StepProgram],
        *,
        on_compiled: Callable[[StepProgram, Exception | None], None] = lambda _program, _error: None,
        on_end: Callable[[], object] = lambda: None,
        is_urgent: Callable[[StepProgram], bool] = lambda _program: False,
    ) -> None:
        self._programs, self._compile_one = list(programs), compile_one
        self._on_compiled, self._on_end, self._is_urgent = on_compiled, on_end, is_urgent
        self._lock, self._num_left = threading.Lock(), len(programs)
        # more than there are cores, since one traces at a time, and the others wait for it
        number = min(host.num_cores() * 3 // 2, MAX_THREADS, len(programs))
        # daemons: an interpreter that ends must not wait for programs that are not needed any more (see `end_all`)
        self._threads = [
            threading.Thread(target=self._run, name=host.COMPILER_THREAD, daemon=True) for _ in range(number)
        ]
        _compilers.add(self)

    def start(self) -> "Compiler":
        for thread in self._threads:
            thread.start()
        return self

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the threads, at most so long. Returns whether they have ended."""
        deadline = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def has_ended(self) -> bool:
        """Return whether every program is done."""
        return not self._num_left

    def stop(self) -> None:
        """Begin no other program. What is being compiled on these threads cannot be interrupted."""
        with self._lock:
            self._programs.clear()
        self._on_end()

    def _run(self) -> None:
        while (program := self._next()) is not None:
            error = None
            try:
                self._compile_one(program)
            except Exception as failure:
                error = failure
            self._on_compiled(program, error)
            with self._lock:
                self._num_left -= 1
                is_last = not self._num_left
            if is_last:
                self._on_end()

    def _next(self) -> StepProgram | None:
        with self._lock:
            if not self._programs:
                return None
            program = next(filter(self._is_urgent, self._programs), self._programs[0])
            self._programs.remove(program)
            return program


_compilers: weakref.WeakSet[Compiler] = weakref.WeakSet()


def end_all() -> None:
    """Stop every compiler and wait for what is being compiled: an interpreter that ends under a compiling thread aborts
    the process. Called when a process ends, unless it leaves by `host.leave`."""
    for compiler in list(_compilers):
        compiler.stop()
    for compiler in list(_compilers):
        compiler.join()


atexit.register(end_all)


def compile_all(
    compile_one: Callable[[StepProgram], object],
    programs: Sequence[StepProgram],
    *,
    on_compiled: Callable[[StepProgram], None] = lambda _program: None,
    meanwhile: Callable[[], object] = lambda: None,
    check: Callable[[], object] = lambda: None,
    on_end: Callable[[], object] = lambda: None,
) -> None:
    """Compile these side by side and wait; `meanwhile` is called on this thread once, `check` now and then, `on_end` as
    of `Compiler`. Raises what they raise, or what the first program that fails raises."""
    failures: list[Exception] = []

    def done(program: StepProgram, error: Exception | None) -> None:
        if error is not None:
            failures.append(error)
            if (running := begun()) is not None:
                running.stop()
        on_compiled(program)

    compiler = Compiler(compile_one, programs, on_compiled=done, on_end=on_end)
    begun = weakref.ref(compiler)  # it holds `done`, and a cycle would keep what `compile_one` holds, such as weights
    try:
        compiler.start()
        meanwhile()
        while not compiler.join(CHECK_SECONDS):
            check()
    except BaseException:  # such as an interrupt: the others are not needed any more
        compiler.stop()
        raise
    if failures:
        raise failures[0]


class ProgressLog:
    """A count of the compiled programs, which is logged now and then."""

    def __init__(self, total: int, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._what, self._clock = total, what, clock
        self._num_done, self._last, self._lock = 0, clock(), threading.Lock()

    def __call__(self, label: str) -> None:
        """Count one more compiled program, and its label as the last."""
        with self._lock:
            self._num_done += 1
            now = self._clock()
            if self._num_done < self._total and now - self._last >= LOG_SECONDS:
                self._last = now
                logger.info(
                    "%s: %d of %d programs are compiled, %d are left; the last one was %s",
                    self._what,
                    self._num_done,
                    self._total,
                    self._total - self._num_done,
                    label,
                )
