"""A process that compiles programs beside one that serves.

Tracing is Python, which runs on one thread of a process at a time, and compiling takes all cores: on threads of the
serving process both cost it more than half of its tokens. So a child traces and compiles, in the time that nobody else
wants, and keeps the programs in their files (`program_cache`). The server reads them, which takes a tenth of a second
each. The child gets shapes in place of weights. Where others want all of the machine's time, it is started anew, to
have a small share of that. Where there can be no such process, or it has ended, the server compiles on threads of its
own.
"""

import contextlib
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import IO

import jax
import psutil

from specserve import host
from specserve.drafters.registry import add_module, outside_kinds
from specserve.errors import first_line
from specserve.mesh import program_platform
from specserve.serve.programs.runner import Runner
from specserve.speculative.program import StepProgram

logger = logging.getLogger(__name__)

STARVED_SECONDS = 10.0  # in which a process that compiles has had at least
# Of a core, unless others want all of them: beside one that does, a process that is idle has a three-hundredth (Linux'
# weights are 3 and 1024).
STARVED_SHARE = 0.005
# Of the time in which this process serves. A process beside it takes a fifth of its tokens (docs/log), although it runs
# only where nobody else would.
BUSY_SHARE = 0.1
SLICE_SECONDS = 0.1


class CompilingProcess:
    """Compiles programs of one runner in a process of its own, which begins with the first program that is in no file
    yet. Every method may be called from any thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._lock = runner, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[StepProgram, Future[str]] = {}  # as `_ask` returns or raises
        self._is_closed = self._has_failed = self._is_starved = False
        self._busy_until = 0.0
        # when its share was last looked at, and the seconds of a core that it had had by then
        self._had: tuple[float, float] | None = None
        self._is_useful = runner.compiled.is_keeping and _can_be_kept(runner)

    @classmethod
    @contextlib.contextmanager
    def begun(cls, runner: Runner, programs: Iterable[StepProgram]) -> "Iterator[CompilingProcess]":
        """Make one, and start the process already where one of these programs is in no file: its imports take seconds,
        in which this process compiles what it begins with. If that fails within the context, the process is ended."""
        made, kept = cls(runner), runner.compiled
        if made._is_useful and not all(kept.is_kept(runner.call(each)) for each in programs):
            with made._lock, contextlib.suppress(Exception):  # `_ask` says what is wrong
                made._process = made._start()
        try:
            yield made
        except BaseException:
            made.close()
            raise

    def keep(self, program: StepProgram) -> bool:
        """Have the process compile a program into its file, if there is none yet. Returns whether it can be read from
        there: not where there can be no such process, nor after `close`. What can be read is set aside, unless
        everything depends on it. Raises JaxRuntimeError where the program cannot be compiled."""
        call = self._runner.call(program)
        if self._is_useful and not self._runner.compiled.is_kept(call):
            failure = self._ask(program)
            if not self._is_closed and not self._runner.compiled.is_kept(call):
                self._give_up(failure or "it has kept no file")
        is_kept = self._is_useful and not self._is_closed
        if is_kept:
            self.set_aside(program)
        return is_kept

    def set_aside(self, program: StepProgram) -> None:
        """Note that a program can be read from its file where that is so, unless everything depends on it."""
        is_kept = self._is_useful and self._runner.compiled.is_kept(self._runner.call(program))
        if is_kept and not self._runner.shapes.is_plain(program):
            self._runner.compiled.set_aside(program)

    def compile(self, program: StepProgram) -> None:
        """Do what `Runner.compile` does, without taking time from what this process serves. After `close` nothing is
        compiled any more. Raises what `keep` and `Runner.compile` raise."""
        self.keep(program)
        if self._is_closed:
            return
        if not self._is_useful:
            host.lower_priority()
        self._runner.compile(program)

    def give_way(self) -> None:
        """Note that this process serves: for a moment the other one has BUSY_SHARE of the time."""
        self._busy_until = time.monotonic() + SLICE_SECONDS / BUSY_SHARE

    def close(self) -> None:
        """End the process, also while it compiles."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _ask(self, program: StepProgram) -> str:
        """Have the process keep a program. Returns what is wrong with the process, or an empty text. Raises
        JaxRuntimeError where the program is at fault."""
        with self._lock:
            try:
                if self._is_closed:
                    return "it is closed"
                if self._process is None:
                    self._process = self._start()
                self._had = self._had if self._waiting else None
                answer = self._waiting[program] = Future()
                _send(self._process.stdin, program)
            except Exception as error:  # of the system, or an object of a drafter from outside that no pickle takes
                self._waiting.pop(program, None)
                return first_line(error)
        while not self._is_starved:
            with contextlib.suppress(TimeoutError):
                return answer.result(STARVED_SECONDS)
            self._look_after()
        return answer.result()

    def _look_after(self) -> None:
        """Start the process anew where it comes to nothing in the time that no other one wants: from then on it has a
        share. Only the superuser may take a thread out of idle scheduling."""
        with self._lock, contextlib.suppress(psutil.Error, OSError):  # `_listen` finds that it has ended
            if self._process is None or not self._is_useful or self._is_closed or self._is_starved:
                return
            times, now = psutil.Process(self._process.pid).cpu_times(), time.monotonic()
            since, before = had = self._had or (now, times.user + times.system)
            if now - since < STARVED_SECONDS:  # another thread has looked
                self._had = had
                return
            self._had = now, times.user + times.system
            if self._had[1] - before < STARVED_SHARE * (now - since):
                self._is_starved = True
                logger.info("nothing is left of the processor for compiling, so it takes a share from now on")
                self._process.kill()
                self._process = self._start()
                for program in list(self._waiting):  # answers of the one before still come
                    _send(self._process.stdin, program)

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start the process. Raises OSError, and what pickling raises."""
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=self._pace, args=(started,), name="compiling-pace", daemon=True).start()
        return started.result()

    def _pace(self, started: "Future[subprocess.Popen[bytes]]") -> None:
        """Start the process, and let it stand still for most of the time in which it is to give way. It ends with this
        thread, and so with this process, even if it stands still then."""
        try:
            process = self._popen()
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(process)
        while process.poll() is None:
            time.sleep(SLICE_SECONDS)
            if sys.platform == "linux" and not self._is_starved and time.monotonic() < self._busy_until:
                process.send_signal(signal.SIGSTOP)
                time.sleep(SLICE_SECONDS * (1 / BUSY_SHARE - 1))
                process.send_signal(signal.SIGCONT)

    def _popen(self) -> "subprocess.Popen[bytes]":
        with contextlib.ExitStack() as files:
            said, begin = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            for each in (dict(jax.config.values), outside_kinds(), self._runner.described()):  # type: ignore[attr-defined]
                _send(begin, each)  # through a pipe it would wait for the process to read it
            begin.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(begin.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                pass_fds=[begin.fileno()],
                # Ctrl-C is not for it; but a session of its own could get as much of the processor as the server's
                process_group=0,
            )
            files.pop_all()
            begin.close()
        host.let_wait(process.pid, is_idle=not self._is_starved)
        threading.Thread(target=self._listen, args=(process, said), name="compiling-process", daemon=True).start()
        return process

    def _listen(self, process: "subprocess.Popen[bytes]", said: IO[bytes]) -> None:
        """Hand out the answers of the process, until it ends."""
        assert process.stdout is not None
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                program, failure = pickle.load(process.stdout)
                answer = self._waiting.pop(program, None)
                if answer is None:  # the process before had kept it, and has been heard since
                    continue
                if failure:
                    answer.set_exception(jax.errors.JaxRuntimeError(failure))
                else:
                    answer.set_result("")
        process.kill()
        with process, said:
            status = process.wait()
            said.seek(0)
            last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
        with self._lock:
            if process is not self._process:
                return  # another one has taken its place
            self._is_useful = False
            waiting = [self._waiting.popitem()[1] for _ in range(len(self._waiting))]
        for answer in waiting:
            answer.set_result(f"it has ended with status {status}" + (f": {last[:300]}" if last else ""))

    def _give_up(self, failure: str) -> None:
        """Say once that there is no use in the process, and end it."""
        with self._lock:
            has_failed, self._has_failed, self._is_useful = self._has_failed, True, False
            if self._process is not None:
                self._process.kill()
        if not has_failed:
            logger.warning(
                "the process that compiles programs is of no use (%s), so this one compiles them and serves more "
                "slowly meanwhile",
                failure,
            )


def _can_be_kept(runner: Runner) -> bool:
    """Return whether another process could compile programs for this one: accelerators belong to one process, programs
    for several devices name them, and what a compilation cache of JAX's has is not kept."""
    config = jax.config.values  # type: ignore[attr-defined]
    has_cache = config["jax_enable_compilation_cache"] and config["jax_compilation_cache_dir"]
    return program_platform() == "cpu" and runner.place.mesh is None and jax.process_count() == 1 and not has_cache


def _send(pipe: IO[bytes] | None, message: object) -> None:
    assert pipe is not None
    pipe.write(pickle.dumps(message))
    pipe.flush()


def _serve(begin: IO[bytes], requests: IO[bytes], answers: IO[bytes]) -> None:
    """Keep the programs that are asked for, side by side, until there are no more requests."""
    for name, value in pickle.load(begin).items():
        if jax.config.values[name] != value:  # type: ignore[attr-defined]
            jax.config.update(name, value)
    for place in pickle.load(begin):
        add_module(place)
    runner, lock = Runner.of_described(*pickle.load(begin)), threading.Lock()
    gc.collect()
    gc.freeze()  # of what tracing makes little is garbage in cycles: looking for it takes a third as long as tracing

    def keep(program: StepProgram) -> None:
        failure = ""
        try:
            runner.compiled.keep(runner.call(program))
        except Exception as error:
            failure = first_line(error)
        with lock:
            _send(answers, (program, failure))
        host.give_back_freed_memory()

    while True:
        program = pickle.load(requests)
        threading.Thread(target=keep, args=(program,), daemon=True).start()


def _main() -> None:
    host.end_with_parent()  # by then it may stand still, and read no end of its input
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of libraries are no answers
    with contextlib.suppress(EOFError), os.fdopen(int(sys.argv[1]), "rb") as begin:
        _serve(begin, sys.stdin.buffer, answers)
    host.leave(0)  # the server has ended: it ends this process as soon as it has no more need of it


if __name__ == "__main__":
    _main()
