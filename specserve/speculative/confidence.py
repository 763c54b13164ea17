"""The use of a drafter's own confidence, which is learned while serving.

Some drafters say for each depth of a tree how likely a token there is accepted. The average is known better from what
was accepted. So confidence only moves a sequence's estimate: by how far the last steps' confidence is from its usual
value in that sequence, in log-odds, times a trust that all sequences share. The trust begins at zero and follows the
gradient of the log-likelihood of what is accepted. A confidence that predicts nothing, or the contrary, is not
trusted, and one that is always too high or too low does no harm.

This is host code, like the controller.
"""

from dataclasses import dataclass

import numpy as np

RECENT_RATE, USUAL_RATE = 0.4, 0.08  # how fast the confidence of late, and the usual one of a sequence, follow
COMMON_RATE = 0.01  # how fast that with which new sequences begin does
TRUST_RATE, MOST_TRUST = 0.01, 1.5
SUREST = 6.0  # log-odds beyond count as these


@dataclass(eq=False)
class Surety:
    """The drafter's confidence in one sequence's draft tokens, by depth, in log-odds."""

    usual: np.ndarray  # [max_depth] float64
    off: np.ndarray  # [max_depth] float64, by how much it has been surer than that of late

    def fade(self) -> None:
        """Note a step in which the drafter was not asked: its recent deviation counts less."""
        self.off *= 1 - RECENT_RATE


@dataclass(eq=False)
class Calibration:
    """The trust in the drafter's confidence: how many accepted tokens it promised, and how many there were."""

    promised: float = 0.0  # draft tokens that were expected to be accepted, of those whose fate was seen
    kept: int = 0  # of them, accepted
    trust: float = 0.0
    _common: np.ndarray | None = None  # [max_depth] float64, log-odds, over all sequences

    def forget(self) -> None:
        """Begin anew with another head. The counts `promised` and `kept` stay."""
        self.trust, self._common = 0.0, None

    def moved(self, rates: np.ndarray, surety: Surety | None) -> np.ndarray:  # [depth] -> [depth]
        """Return the acceptance by depth, moved by how sure the drafter is of this sequence now."""
        if surety is None or not self.trust:
            return rates
        return _probability(_log_odds(rates) + self.trust * surety.off[: len(rates)])

    def observe(
        self,
        surety: Surety | None,
        confidence: np.ndarray,  # [depth], probabilities, of the step that is observed
        surprise: np.ndarray,  # [seen], 1 or 0 for what was accepted, less what was expected
        num_accepted: int,  # of those that were seen
        max_depth: int,
    ) -> Surety:
        """Learn from a step, and return the sequence's new surety."""
        num_seen, depth = len(surprise), len(confidence)
        self.promised += float(confidence[:num_seen].sum())
        self.kept += num_accepted
        said = np.clip(_log_odds(confidence), -SUREST, SUREST)
        if surety is not None:
            self.trust += TRUST_RATE * float(surprise @ surety.off[:num_seen])
            self.trust = min(max(self.trust, 0.0), MOST_TRUST)
        if self._common is None:
            self._common = np.pad(said, (0, max_depth - depth), mode="edge")
        surety = surety or Surety(self._common.copy(), np.zeros(max_depth))
        self._common[:depth] += COMMON_RATE * (said - self._common[:depth])
        off = np.pad(
            said - surety.usual[:depth], (0, max_depth - depth), mode="edge"
        )  # the last stands for deeper ones
        surety.off += RECENT_RATE * (off - surety.off)
        surety.usual[:depth] += USUAL_RATE * (said - surety.usual[:depth])
        return surety


def _log_odds(rates: np.ndarray) -> np.ndarray:
    rates = np.clip(rates.astype(np.float64), 1e-6, 1 - 1e-6)
    return np.log(rates / (1 - rates))


def _probability(log_odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-log_odds))
