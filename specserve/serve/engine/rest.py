"""The rest of an engine: it goes on answering later, and may give back the device's memory meanwhile."""

from collections.abc import Callable, Collection
from typing import Literal

from specserve.errors import ConfigError
from specserve.serve.engine.changes import Changes
from specserve.serve.engine.rounds import Rounds
from specserve.serve.requests.request import FinishReason

# the sequences that have begun: they end as cancelled (as all that wait), end first, go on later with
# the pages that they have, or go on later with keys and values that are computed anew
PauseMode = Literal["abort", "wait", "keep", "retract"]
Part = Literal["weights", "kv_cache"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep", "retract")
PARTS: tuple[Part, ...] = ("weights", "kv_cache")


class Rest:
    """The state of an engine that may rest, and the parts of it that are off the device. Its methods may be called from
    any thread, any number of times, and return when it is so."""

    def __init__(self, rounds: Rounds, changes: Changes, wait_for_programs: Callable[[], None]) -> None:
        self._rounds, self._changes, self._wait_for_programs = rounds, changes, wait_for_programs
        self.is_paused = False
        self.asleep: frozenset[Part] = frozenset()

    def pause(self, mode: PauseMode) -> None:
        """Make no more steps. Requests are still taken, and wait."""
        if mode not in PAUSE_MODES:
            raise ConfigError(f"mode {mode!r}: expected one of {', '.join(PAUSE_MODES)}")
        if self.is_paused and mode == "wait" and not self._rounds.is_at_rest():
            raise ConfigError("the engine is paused, so nothing that has begun will end; let it go on first")

        def rest() -> None:
            self._rounds.land()
            if mode == "abort":
                self._rounds.end_all(FinishReason.CANCELLED, "the server was paused")
            elif mode == "retract":
                self._rounds.retract()
            self.is_paused = True

        self._changes.ask(rest, is_patient=mode == "wait")

    def resume(self) -> None:
        """Go on. Raises ConfigError while something is off the device."""

        def go_on() -> None:
            if self.asleep:
                raise ConfigError(f"off the device: {', '.join(sorted(self.asleep))}; wake it up first")
            self.is_paused = False

        self._changes.ask(go_on)

    def sleep(self, parts: Collection[Part] = PARTS) -> None:
        """Pause, and take these parts off the device: of the weights the host keeps a copy; keys and values are
        forgotten, and computed anew after `wake`."""
        _check_parts(parts)
        self._wait_for_programs()

        def lie_down() -> None:
            self._rounds.land()
            self._rounds.retract()
            self.is_paused = True
            self._rounds.runner.take_off(frozenset(parts) - self.asleep)
            self.asleep |= frozenset(parts)

        self._changes.ask(lie_down)

    def wake(self, parts: Collection[Part] = PARTS) -> None:
        """Bring these parts back to the device. When all are there, the engine goes on."""
        _check_parts(parts)

        def get_up() -> None:
            back = self.asleep & frozenset(parts)
            self._rounds.runner.bring_back(back)
            was_asleep, self.asleep = bool(self.asleep), self.asleep - back
            self.is_paused = self.is_paused and not (was_asleep and not self.asleep)

        self._changes.ask(get_up)


def _check_parts(parts: Collection[str]) -> None:
    if not parts or not set(parts) <= set(PARTS):
        raise ConfigError(f"{', '.join(map(str, parts)) or 'no part'}: expected some of {', '.join(PARTS)}")
