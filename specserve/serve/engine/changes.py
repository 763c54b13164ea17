"""Changes of what an engine runs, each made between two of its rounds: other weights, a rest, and what ends one."""

import queue
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from specserve.errors import CapacityError, ConfigError

CHECK_SECONDS = 0.2  # how often a thread that waits for its change asks whether the engine is stopping


@dataclass(frozen=True)
class _Change:
    make: Callable[[], None]
    is_patient: bool
    done: Future[None] = field(default_factory=Future)


class Changes:
    """The changes that threads have asked for and that are not made yet, the oldest first."""

    def __init__(self, wake: Callable[[], None], check: Callable[[], None]) -> None:
        """`wake` lets the engine's thread look; `check` raises once the engine is stopping."""
        self._wake, self._check = wake, check
        self._asked: queue.SimpleQueue[_Change] = queue.SimpleQueue()
        self._urgent: queue.SimpleQueue[_Change] = queue.SimpleQueue()
        self._next: _Change | None = None

    def ask(self, make: Callable[[], None], *, is_patient: bool = False, is_urgent: bool = False) -> None:
        """Have a change made on the engine's thread, and wait until it is. One that `is_patient` waits until the
        sequences that have begun have ended, and no other begins before it. One that `is_urgent` is made before all
        that wait: it may end what they wait for. Raises what it raises, and CapacityError where the engine stops
        meanwhile."""
        change = _Change(make, is_patient)
        (self._urgent if is_urgent else self._asked).put(change)
        self._wake()
        try:
            while not wait([change.done], CHECK_SECONDS).done:
                try:
                    self._check()
                except CapacityError:
                    if change.done.cancel():  # else it is being made, and ends as it ends
                        raise
            change.done.result()
        finally:
            change.done.cancel()  # one that nobody waits for is not made
            del change  # else an error would hold it, and with it the weights that were refused

    @property
    def holds_back(self) -> bool:
        """Return whether no sequence may begin. It belongs to the engine's thread, as `make_next` does."""
        if self._next is None and not self._asked.empty():
            self._next = self._asked.get_nowait()
        return self._next is not None and self._next.is_patient

    def make_next(
        self, is_at_rest: Callable[[], bool], repair: Callable[[BaseException], None], *, is_paused: bool
    ) -> bool:
        """Make an urgent change, or else the oldest one, if it need not wait for what has begun to end. Returns whether
        there was one. The thread that asked gets what the change raises, and a ConfigError where the change would wait
        in vain, because the engine is paused. Unless it is a ConfigError, the engine is `repair`ed before it does."""
        if not self._urgent.empty():
            change, is_waiting = self._urgent.get_nowait(), False
        else:
            is_waiting = self.holds_back and not is_at_rest()
            if self._next is None or (is_waiting and not is_paused):
                return False
            change, self._next = self._next, None
        if not change.done.set_running_or_notify_cancel():
            return True
        try:
            if is_waiting:
                raise ConfigError("the engine is paused, so nothing that has begun will end; let it go on first")
            change.make()
        except ConfigError as error:
            change.done.set_exception(error)
        except BaseException as error:
            try:
                repair(error)
            finally:
                change.done.set_exception(error)
        else:
            change.done.set_result(None)
        return True
