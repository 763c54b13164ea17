"""Intervals hold the truth about as often as they say, and pairing takes out what questions have in common."""

import numpy as np
import pytest

from specserve.speculative.acceptance import Acceptance
from specserve.speculative.intervals import Interval, bootstrap, median_interval, tau_difference, tau_interval


def _questions(rng: np.random.Generator, count: int = 60) -> list[Acceptance]:
    """Questions of unequal length and ease; a step of a chain of three accepts 0 to 3 tokens."""
    found = []
    for ease in rng.beta(4, 2, count):
        hits = np.cumprod(rng.random((int(rng.integers(5, 60)), 3)) < ease, axis=1).sum(axis=0)
        found.append(Acceptance(int(rng.integers(60, 61)), 0, tuple(map(int, hits))))
    return found


def test_of_a_hundred_intervals_about_95_hold_the_truth() -> None:
    rng = np.random.default_rng(0)
    truth = sum((sum(_questions(rng, 4000), Acceptance()) for _ in range(3)), Acceptance()).tau
    held = sum(truth in interval for _ in range(100) if (interval := tau_interval(_questions(rng))))
    assert 88 <= held <= 100, "three standard deviations of 100 draws at 95%, and a little for the percentile method"


def test_the_same_measurements_have_the_same_interval_and_equal_arms_do_not_differ() -> None:
    measured = _questions(np.random.default_rng(1))
    assert tau_interval(measured) == tau_interval(measured)
    assert tau_difference(measured, measured) == Interval(0.0, 0.0)
    better = [Acceptance(q.num_steps, 0, (q.accepted_per_depth[0] + 6, *q.accepted_per_depth[1:])) for q in measured]
    paired = tau_difference(better, measured)
    assert paired
    assert 0.1 in Interval(paired.low - 1e-9, paired.high + 1e-9), "six more of sixty steps, in every question"
    alone = tau_interval(measured)
    assert alone
    assert paired.high - paired.low < 1e-9 < alone.high - alone.low


def test_one_measurement_has_no_interval() -> None:
    assert tau_interval([Acceptance(10, 30, (5, 2, 1))]) is None
    assert median_interval([1.5]) is None
    assert median_interval([1.5, 1.5, 1.5]) == Interval(1.5, 1.5)
    found = bootstrap(1000, lambda drawn: drawn.mean(axis=1))
    assert found
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * np.sqrt(1000**2 / 12 / 1000), rel=0.1), "as in theory"
