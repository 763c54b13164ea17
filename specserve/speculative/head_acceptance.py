"""Acceptance of a head's draft tokens by depth, and how a sequence departs from it for a while.

Acceptance comes in phases: text that repeats is guessed well, and then something new begins. What a step of a sequence
shows says something about its next steps, and little about those after some twenty more (docs/log). So the estimate of
a sequence follows what is seen, and goes back to the head's own with each step that passes, seen or not. One that only
followed would be low or high by chance where it decides something, and would stay low once nothing is seen any more.

The head's own acceptance begins with its evaluation. The more has been seen, the less one more observation moves it;
with each step that passes it is less certain again, like a random walk in a Kalman filter.
"""

from collections.abc import Sequence

import numpy as np

MAX_DEPTH = 16  # acceptance beyond is taken for that at this depth
UNKNOWN = 0.5  # acceptance where a head has none of its own evaluation
LEAST, MOST = 0.02, 0.98
FOLLOWING, REVERSION = 0.12, 0.08  # how far a sequence's estimate follows what a step shows, and goes back in one
FIRST_VARIANCE = 0.05  # of what a head's evaluation says, in those of an observation: it counts as 20 of them
DRIFT = 3e-6  # of the uncertainty with each step, in variances of an observation


class HeadAcceptance:
    """The conditional acceptance of a head's draft tokens, by depth. `evaluated` is that of its own evaluation."""

    def __init__(self, evaluated: Sequence[float] = ()) -> None:
        rates = [*evaluated] or [UNKNOWN]
        rates += [rates[-1]] * (MAX_DEPTH - len(rates))
        self.rates = np.clip(np.array(rates[:MAX_DEPTH]), LEAST, MOST)  # [MAX_DEPTH] float64
        self._variance = np.full(MAX_DEPTH, FIRST_VARIANCE)  # of the rates, in those of an observation

    def steps_passed(self, num_steps: int) -> None:
        """Note that so many steps are made, whether or not they show anything of the head."""
        self._variance = np.minimum(self._variance + num_steps * DRIFT, FIRST_VARIANCE)

    def learn(self, surprise: np.ndarray, number: np.ndarray) -> None:
        """Learn from several observations: for each depth by how much more was accepted than these rates promise, in
        all of them together, and how many there are. To learn from one after the other is the same."""
        self._variance = self._variance / (1.0 + number * self._variance)
        self.rates = np.clip(self.rates + self._variance * surprise, LEAST, MOST)

    def followed(self, rates: np.ndarray, surprise: np.ndarray) -> np.ndarray:
        """Return estimates of sequences, [..., MAX_DEPTH], after a step that showed so much more than expected."""
        return np.clip(rates + REVERSION * (self.rates - rates) + FOLLOWING * surprise, LEAST, MOST)

    def faded(self, rates: np.ndarray, num_steps: float) -> np.ndarray:
        """Return estimates of sequences, [..., MAX_DEPTH], after so many steps that showed nothing."""
        return self.rates + (1.0 - REVERSION) ** num_steps * (rates - self.rates)
