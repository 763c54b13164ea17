"""The process that makes one round of learning at the priority of what can wait, and ends with it: between two rounds
nothing is in memory, and whatever becomes of it harms no request."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO

import psutil

from specserve import host
from specserve.errors import SpecServeError, first_line
from specserve.learn.task import RoundResult, RoundTask

MOST_SECONDS = 6 * 3600.0  # of a round, while it does not stand still; with more it has come to a halt
LEAST_SHARE = 0.05  # of the processors, since the round began: with less it goes on beside requests
LOOK_SECONDS = 0.05  # from one look at the requests to the next


def attend(process: psutil.Process, is_busy: Callable[[], bool]) -> None:
    """Stop a process while requests run, as long as it has had LEAST_SHARE, and kill it after MOST_SECONDS. Returns
    when it has ended.

    A low priority alone is not enough: a step's threads wait for the one of them that shares its core."""
    cores, begin = host.granted_cores(), time.monotonic()
    now, ran, is_stopped = begin, 0.0, False
    with contextlib.suppress(psutil.NoSuchProcess):
        try:
            while process.status() != psutil.STATUS_ZOMBIE:
                last, now = now, time.monotonic()
                ran += 0.0 if is_stopped else now - last
                if ran > MOST_SECONDS:
                    process.kill()
                times = process.cpu_times()
                has_share = times.user + times.system >= LEAST_SHARE * cores * (now - begin)
                if (has_share and is_busy()) != is_stopped:
                    (process.resume if is_stopped else process.suspend)()
                    is_stopped = not is_stopped
                time.sleep(LOOK_SECONDS)
        finally:
            if is_stopped:
                process.resume()


class LearnerProcess:
    """One round in a process of its own."""

    def __init__(self, task: RoundTask, is_busy: Callable[[], bool]) -> None:
        """Start it. It gives way to what `is_busy` is true of. Raises OSError."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # `result` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            # an accelerator belongs to the server
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            process_group=0,  # Ctrl-C is not for it
        )
        host.let_wait(self._process.pid)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `result` says why it has ended
            self._process.stdin.write(json.dumps(dataclasses.asdict(task)).encode() + b"\n")
            self._process.stdin.flush()  # and stays open: its end is that of the server
        self._is_busy = is_busy

    def result(self) -> RoundResult | str:
        """Wait for the end of the round, and return its judgement, or what went wrong."""
        assert self._process.stdout is not None
        with self._process, self._said:
            self._process.stdout.readline()  # one that was stopped before would outlive a server that is killed
            own = psutil.Process(self._process.pid)
            threading.Thread(target=attend, args=(own, self._is_busy), name="learner-attended", daemon=True).start()
            answer = self._process.stdout.read()
            status = self._process.wait()
            self._said.seek(0)
            last = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
        try:
            return RoundResult(**json.loads(answer))
        except (ValueError, TypeError):
            return f"the learner has ended with status {status}" + (f": {last[:300]}" if last else "")

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self._process.kill()


def _end_with(server: IO[bytes]) -> None:
    """End this process when the server's has ended."""
    server.read()
    host.leave(0)


def _make(task: RoundTask, answers: IO[bytes]) -> int:
    from specserve.learn.round import learn  # the trainer, which the server does not import

    try:
        result = learn(task)
    except SpecServeError as error:
        sys.stderr.write(f"{first_line(error)}\n")
        return 2
    except Exception as error:  # an end by the interpreter would wait for the thread that reads, and say that instead
        traceback.print_exc()
        sys.stderr.write(f"{first_line(error)}\n")
        return 1
    answers.write(json.dumps(dataclasses.asdict(result)).encode())
    answers.flush()
    return 0


def _main() -> None:
    host.end_with_parent()  # by then it may stand still, and read no end of its input
    answers = os.fdopen(os.dup(1), "wb")
    answers.write(b"\n")  # from now on it may be stopped
    answers.flush()
    os.dup2(2, 1)  # prints of libraries are no answers
    task = RoundTask(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    host.leave(_make(task, answers))


if __name__ == "__main__":
    _main()
