"""Intervals of figures that were measured over few questions, by the bootstrap. As many questions as there are are
drawn again, with replacement, and the figure is computed anew. The middle 95% of many such figures are the interval
(Efron's percentile method). The draws are seeded, so the same measurements have the same interval."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specserve.speculative.acceptance import Acceptance

NUM_DRAWS = 2000
COVERAGE = 0.95


@dataclass(frozen=True)
class Interval:
    """An interval from `low` to `high`, both included."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_json(self) -> list[float]:
        return [self.low, self.high]


def bootstrap(
    count: int,
    statistic: Callable[[np.ndarray], np.ndarray],  # of indices [draw, count] int64; returns [draw]
    seed: int = 0,
) -> Interval | None:
    """Return the interval of a statistic over `count` independent measurements. The statistic is called with the
    indices of the measurements to use. None where there are fewer than two, because one measurement does not show
    how others would vary."""
    if count < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, count, (NUM_DRAWS, count))
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(statistic(drawn), [tail, 1 - tail])
    return Interval(float(low), float(high))


def tau_interval(measured: Sequence[Acceptance]) -> Interval | None:
    """Return the interval of tau over questions. Each question's own counts stay together."""
    steps, emitted = _counts(measured)
    return bootstrap(len(measured), lambda drawn: _tau(steps, emitted, drawn))


def tau_difference(measured: Sequence[Acceptance], others: Sequence[Acceptance]) -> Interval | None:
    """Return the interval of the first tau less the second, over the same questions in the same order. Both are drawn
    together, so what makes a question easy for both does not widen it."""
    assert len(measured) == len(others), "both arms must have answered the same questions"
    own, other = _counts(measured), _counts(others)
    return bootstrap(len(measured), lambda drawn: _tau(*own, drawn) - _tau(*other, drawn))


@dataclass(frozen=True)
class MedianDifference:
    """The difference of two taus for the median of some groups, and its interval."""

    value: float
    interval: Interval | None


def median_difference(
    measured: Sequence[Acceptance], others: Sequence[Acceptance], groups: Sequence[Any]
) -> MedianDifference:
    """Return the first tau less the second for the median group, where `groups` says of each question to which it
    belongs. A group counts once, however many questions it has, and in a draw only where it has any."""
    own, other = _counts(measured), _counts(others)
    names = np.unique(np.array(groups), return_inverse=True)[1]

    def medians(drawn: np.ndarray) -> np.ndarray:
        each = []
        for name in range(names.max(initial=-1) + 1):
            counts = names[drawn] == name
            difference = _tau(*own, drawn, counts) - _tau(*other, drawn, counts)
            each.append(np.where(counts.any(axis=1), difference, np.nan))
        return np.nanmedian(each, axis=0)

    value = float(medians(np.arange(len(measured))[None])[0]) if measured else 0.0
    return MedianDifference(value, bootstrap(len(measured), medians))


def median_interval(values: Sequence[float]) -> Interval | None:
    """Return the interval of a median, such as that of the gains of rounds, each against plain decoding in the same
    round."""
    array = np.asarray(values, float)
    return bootstrap(len(array), lambda drawn: np.median(array[drawn], axis=1))


def _counts(measured: Sequence[Acceptance]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([found.num_steps for found in measured]), np.array([found.num_emitted for found in measured])


def _tau(steps: np.ndarray, emitted: np.ndarray, drawn: np.ndarray, counts: np.ndarray | bool = True) -> np.ndarray:
    """Return the tau of each draw's counts together, as `Acceptance.tau` defines it, of those that count."""
    num_steps = (steps[drawn] * counts).sum(axis=1)
    return np.where(num_steps, (emitted[drawn] * counts).sum(axis=1) / np.maximum(1, num_steps), 1.0)
