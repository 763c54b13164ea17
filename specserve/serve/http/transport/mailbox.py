"""A mailbox from other threads to the event loop: calls are made there in the order in which they were posted."""

import asyncio
from collections import deque
from collections.abc import Callable


class Mailbox:
    """The calls that wait for one event loop. All calls that are posted before the loop gets to them wake it once. A
    step of the engine has deltas for every stream, and each wake-up is a system call for which the engine's thread
    lets go of the interpreter."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._is_due = False

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop make this call. Raises RuntimeError where the loop is closed."""
        self._calls.append(call)
        if not self._is_due:
            self._is_due = True
            self.loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_due = False  # before anything is taken out, so that what is posted from now on has its own wake-up
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            if self._calls:  # a call failed, which the loop's own handler tells; the others are made all the same
                self.loop.call_soon(self._run)
