"""Signals that ask a training run to stop, and when it hears of them."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import jax

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """Raised by a signal where nothing is lost by it."""


class Stopping:
    """SIGTERM and Ctrl-C ask the run to stop after its present step, and end a measurement at once. A second one ends
    the process at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.number = 0  # of the one that came
        self._is_at_once = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread listen
            self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context that a signal ends with `Stopped`. Processes of a run of several go on: they stop together."""
        self._is_at_once = jax.process_count() == 1
        try:
            yield
        finally:
            self._is_at_once = False

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        logger.warning("%s: saving after this step; once more ends at once", signal.Signals(number).name)
        if self._is_at_once:
            raise Stopped
