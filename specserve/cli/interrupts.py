"""Ctrl-C ends a command within seconds, also while the main thread is in a program that Python cannot interrupt: one
that XLA compiles, or a long step."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

import psutil

from specserve import host

GRACE_SECONDS = 3.0  # for a step that ends and what is saved after it
SAVING_SECONDS = 60.0  # more, where the state is being written when these are over
STATUS = 130  # of a process that Ctrl-C has ended


class Interrupts:
    """A context in which Ctrl-C leaves the process a few seconds to end by itself, and then ends it; a second one does
    at once. Python writes signals to a socket when they come, and not when the main thread comes round to them. The
    thread that reads there outlives the context after Ctrl-C: the end of a process may take long too."""

    def __init__(self, say: Callable[[], None], is_saving: Callable[[], bool] = lambda: False) -> None:
        """Take what is said before the process is ended, and whether a state is being written."""
        self._say, self.is_saving = say, is_saving
        self._has_come, self.is_reported = False, False

    def __enter__(self) -> "Interrupts":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._is_main = threading.current_thread() is threading.main_thread()  # no other thread may listen
        if self._is_main:
            signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_main and not self._has_come:
            signal.set_wakeup_fd(-1)
            self._writer.close()

    def report(self) -> None:
        """Say it, once."""
        if not self.is_reported:
            self.is_reported = True
            self._say()

    def _watch(self) -> None:
        while byte := self._reader.recv(1):
            if byte[0] == signal.SIGINT:
                self._has_come = True
                self._wait()
                self._end()
        self._reader.close()

    def _wait(self) -> None:
        """Wait until the time is over, or the signal comes once more."""
        begin = time.monotonic()
        while time.monotonic() - begin < GRACE_SECONDS + SAVING_SECONDS * self.is_saving():
            self._reader.settimeout(0.1)
            try:
                if self._reader.recv(1)[:1] == bytes([signal.SIGINT]):
                    return
            except TimeoutError:
                continue

    def _end(self) -> None:
        self.report()
        for child in psutil.Process(os.getpid()).children(recursive=True):
            child.kill()
        host.leave(STATUS)
