"""The number of steps that are dispatched at once.

Whatever the host does for a call of a program (arguments, dispatch, reading the result) it does once for all steps of
the call, and beside a step of two milliseconds that is much. But nobody hears of a token before the call is over. Who
comes meanwhile waits for it, and for the one that is dispatched behind it. So a burst is as many steps as end within
BURST_SECONDS.
"""

from specserve.speculative.costs import Shape

BURST_SECONDS = 0.02  # a reader sees no pauses of this length
_RATE = 0.2  # how fast what a step takes is followed


class Bursts:
    """The seconds of steps, as they are seen in service."""

    def __init__(self) -> None:
        self._seconds: dict[Shape, float] = {}

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn that a step of this shape took so many seconds."""
        known = self._seconds.get(shape, seconds)
        self._seconds[shape] = known + _RATE * (seconds - known)

    def num_steps(self, shape: Shape, most: int) -> int:
        """Return how many such steps to dispatch at once: 1 to `most`, and 1 where none has been seen."""
        seconds = self._seconds.get(shape)
        return 1 if seconds is None else within_burst(seconds, most)


def within_burst(seconds: float, most: int) -> int:
    """Return how many steps that take so many seconds each to dispatch at once: 1 to `most`."""
    return max(1, min(most, int(BURST_SECONDS / seconds)))
