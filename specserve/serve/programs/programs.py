"""Compiled programs: made ahead of the steps that need them, on several threads side by side, and then only called.

Nothing is ever run in order to be compiled, and what is called is the compiled program itself: no call can compile by
accident. A program that is missing when it is asked for is compiled there and then, and counted.
"""

import atexit
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from specserve import host
from specserve.serve.programs.calls import Call
from specserve.serve.programs.kept import KeptPrograms
from specserve.speculative.tree import Tree

logger = logging.getLogger(__name__)

MAX_THREADS = 8  # that compile side by side: tracing is Python, so more would wait for each other
SAID_EVERY_SECONDS = 10.0
RESERVED_MAPS = 6000  # memory maps that optional programs leave to others
CHECK_SECONDS = 0.2


@dataclass(frozen=True)
class Program:
    """A program that will be needed, what it is good for, and how to run it over nothing but padding."""

    name: str
    is_plain: bool  # needed before anything can be served
    call: Callable[[], Call]
    run: Callable[[], object] = lambda: None
    step: tuple[int, int, Tree | None] | None = None  # of a step: batch size, width, tree
    is_optional: bool = False  # a choice more
    is_for_masks: bool = False  # needed by requests with token masks alone


class Programs:
    """The programs that are compiled, by key. Every method may be called from any thread."""

    def __init__(self, kept: KeptPrograms | None = None) -> None:
        """`kept` are those that earlier processes have compiled."""
        self._kept = kept
        self._compiled: dict[Hashable, Any] = {}
        self._on_their_way: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()
        self.num_missed = 0  # compiled because they were asked for

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._compiled

    def at_once(self, calls: Iterator[Call]) -> Call:
        """The first that is compiled, of calls that do the same, the cheapest first. It is the first of all when every
        program is; until then larger ones serve."""
        first = next(calls)
        return next((call for call in itertools.chain((first,), calls) if call.key in self._compiled), first)

    def run(self, call: Call) -> Any:
        """Call the program, which is compiled first if it is missing."""
        compiled = self._compiled.get(call.key)
        if compiled is None:
            self.num_missed += 1
            compiled = self.compile(call)
        return compiled(*call.arguments)

    def compile(self, call: Call) -> Any:
        """The program, compiled by now; one that is on its way on another thread is waited for."""
        with self._lock:
            found = self._compiled.get(call.key)
            future, is_ours = self._on_their_way.get(call.key), False
            if found is None and future is None:
                future = self._on_their_way[call.key] = Future()
                is_ours = True
        if found is not None:
            return found
        assert future is not None
        if is_ours:
            try:
                future.set_result(self._make(call))
            except BaseException as error:
                future.set_exception(error)
            with self._lock:
                del self._on_their_way[call.key]
                if future.exception() is None:
                    self._compiled[call.key] = future.result()
        return future.result()

    def _make(self, call: Call) -> Any:
        if self._kept is None:
            return call.lower().compile()
        found = self._kept.load(call)
        return self._kept.compile(call) if found is None else found


class RoomForMore:
    """Decides whether a program may be compiled. An optional one may not where the process can hardly map more memory,
    and is left out from then on."""

    def __init__(self) -> None:
        self.left_out: set[str] = set()  # names

    def __call__(self, program: Program) -> bool:
        free = host.free_memory_maps()
        if not program.is_optional or free is None or free > RESERVED_MAPS:
            return True
        if not self.left_out:
            logger.warning(
                "this process may map only %d more pieces of memory, so no more ways to speculate are compiled; raise "
                "the limit with: sysctl vm.max_map_count=1000000",
                free,
            )
        self.left_out.add(program.name)
        return False


class Compiler:
    """Compiles programs on threads of its own, in the order given. `on_compiled` is called on these threads after each,
    with what went wrong or None."""

    def __init__(
        self,
        compiled: Programs,
        programs: Sequence[Program],
        *,
        is_wanted: Callable[[Program], bool] = lambda _program: True,
        on_compiled: Callable[[Program, Exception | None], None] = lambda _program, _error: None,
        is_background: bool = False,  # at the lowest priority, where the system lets threads have one
    ) -> None:
        self._programs, self._compiled = deque(programs), compiled
        self._is_wanted, self._on_compiled, self._is_background = is_wanted, on_compiled, is_background
        number = min(host.num_cores(), MAX_THREADS, len(programs))
        # daemons: an interpreter that ends must not wait for programs that nobody needs any more (see `end_all`)
        self._threads = [
            threading.Thread(target=self._run, name=host.COMPILER_THREAD, daemon=True) for _ in range(number)
        ]
        _compilers.add(self)

    def start(self) -> "Compiler":
        for thread in self._threads:
            thread.start()
        return self

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the threads, at most so long; whether they have ended."""
        deadline = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Begin no other program. What is being compiled cannot be interrupted."""
        self._programs.clear()

    def _run(self) -> None:
        if self._is_background:
            host.lower_priority()
        while True:
            try:
                program = self._programs.popleft()
            except IndexError:
                return
            error = None
            try:
                if self._is_wanted(program):
                    self._compiled.compile(program.call())
            except Exception as failure:
                error = failure
            self._on_compiled(program, error)


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
    compiled: Programs,
    programs: Sequence[Program],
    *,
    is_wanted: Callable[[Program], bool] = lambda _program: True,
    on_compiled: Callable[[Program], None] = lambda _program: None,
    meanwhile: Callable[[], object] = lambda: None,
    check: Callable[[], object] = lambda: None,
    is_background: bool = False,
) -> None:
    """Compile these side by side and wait; `meanwhile` is called on this thread once, and `check` now and then. Raises
    what they raise, or what the first program that fails raises."""
    failures: list[Exception] = []

    def done(program: Program, error: Exception | None) -> None:
        if error is not None:
            failures.append(error)
            compiler.stop()
        on_compiled(program)

    compiler = Compiler(compiled, programs, is_wanted=is_wanted, on_compiled=done, is_background=is_background)
    try:
        compiler.start()
        meanwhile()
        while not compiler.join(CHECK_SECONDS):
            check()
    except BaseException:  # an interrupt, say: nobody waits for the others any more
        compiler.stop()
        raise
    if failures:
        raise failures[0]


class Announcer:
    """A count of the compiled programs, which is logged now and then."""

    def __init__(self, total: int, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._what, self._clock = total, what, clock
        self._num_done, self._last, self._lock = 0, clock(), threading.Lock()

    def __call__(self, program: Program) -> None:
        """Count one more compiled program."""
        with self._lock:
            self._num_done += 1
            now = self._clock()
            if self._num_done < self._total and now - self._last >= SAID_EVERY_SECONDS:
                self._last = now
                logger.info(
                    "%s: %d of %d programs are compiled, %d are left; the last one was %s",
                    self._what,
                    self._num_done,
                    self._total,
                    self._total - self._num_done,
                    program.name,
                )
