"""The rest of an engine: it goes on answering later, and may give back the device's memory meanwhile."""

from collections.abc import Callable, Collection
from typing import Literal

from specserve.errors import ConfigError
from specserve.serve.engine.changes import Changes
from specserve.serve.engine.rounds import PARTS, Part, Rounds
from specserve.serve.engine.swap import Swaps
from specserve.serve.requests.request import Request

# the sequences that have begun: they end as they are (as all that wait), end first, go on later with the pages that
# they have, or go on later with keys and values that are computed anew
PauseMode = Literal["abort", "wait", "keep", "retract"]
SleepMode = Literal["abort", "wait", "retract"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep", "retract")
SLEEP_MODES: tuple[SleepMode, ...] = ("abort", "wait", "retract")


class Rest:
    """The pauses of an engine. Its methods may be called from any thread, any number of times, and return when it is
    so."""

    def __init__(self, rounds: Rounds, changes: Changes, swaps: Swaps) -> None:
        self._rounds, self._changes, self._swaps = rounds, changes, swaps
        self._is_held = False  # by `pause`, until `resume`, whatever sleeps and wakes meanwhile

    @property
    def is_paused(self) -> bool:
        return self._is_held or bool(self._rounds.asleep)

    def abort(self, is_meant: Callable[[Request], bool]) -> None:
        """End the requests that are meant, running or waiting, with the tokens that they have. A change that waits for
        some of them to end is not waited for."""
        self._changes.ask(lambda: self._rounds.abort(is_meant), is_urgent=True)

    def pause(self, mode: PauseMode) -> None:
        """Make no more steps. Requests are still taken, and wait."""
        if mode not in PAUSE_MODES:
            raise ConfigError(f"mode {mode!r}: expected one of {', '.join(PAUSE_MODES)}")

        def rest() -> None:
            self._rounds.land()
            if mode == "abort":
                self._rounds.abort()
            elif mode == "retract":
                self._retract()
            self._is_held = True

        self._end_what_is_waited_for(mode)
        self._changes.ask(rest, is_patient=mode == "wait")

    def resume(self) -> None:
        """Go on. Raises ConfigError while something is off the device."""

        def go_on() -> None:
            if self._rounds.asleep:
                raise ConfigError(f"off the device: {', '.join(sorted(self._rounds.asleep))}; wake it up first")
            self._is_held = False

        self._changes.ask(go_on)

    def sleep(self, parts: Collection[Part] = PARTS, mode: SleepMode = "retract") -> None:
        """Take these parts off the device, and make no more steps until `wake`: of the weights the host keeps a copy;
        keys and values are forgotten, and computed anew then."""
        _check_parts(parts)
        if mode not in SLEEP_MODES:
            raise ConfigError(f"mode {mode!r}: expected one of {', '.join(SLEEP_MODES)}")

        def lie_down() -> None:
            self._rounds.land()
            if mode == "abort":
                self._rounds.abort()
            self._retract()
            self._rounds.lie_down(parts)

        self._end_what_is_waited_for(mode)
        with self._swaps.alone():
            self._changes.ask(lie_down, is_patient=mode == "wait")

    def wake(self, parts: Collection[Part] = PARTS) -> None:
        """Bring these parts back to the device. When all are there, the engine goes on, unless it is paused too. Raises
        ConfigError where the device has no room for one, which may be asked for again."""
        _check_parts(parts)

        def get_up() -> None:
            if self._rounds.asleep:
                self._rounds.get_up(parts)

        self._changes.ask(get_up)

    def _end_what_is_waited_for(self, mode: PauseMode) -> None:
        if mode == "abort":  # an update before this change may wait for them
            self.abort(lambda _request: True)

    def _retract(self) -> None:
        if self._rounds.runner.shapes.is_deterministic and not self._rounds.is_at_rest():
            raise ConfigError("a deterministic server never computes an answer's keys again; pause it with mode wait")
        self._rounds.retract()


def _check_parts(parts: Collection[str]) -> None:
    if not parts or not set(parts) <= set(PARTS):
        raise ConfigError(f"{', '.join(map(str, parts)) or 'no part'}: expected some of {', '.join(PARTS)}")
