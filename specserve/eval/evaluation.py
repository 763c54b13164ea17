"""The results of one evaluation, and how they compare with published figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specserve.eval.acceptance import Difference, SpeculationReport, differences
from specserve.eval.bench.step_times import StepTimes
from specserve.eval.intervals import Interval


@dataclass(frozen=True)
class Evaluation:
    """The bench that was asked, and a report for every head (or server), speculation, temperature and concurrency."""

    bench: str
    num_questions: int
    target: str
    reports: Sequence[SpeculationReport]
    steps: Mapping[str, StepTimes]  # of ways in which a head proposes one tree, by name

    @property
    def differences(self) -> list[Difference]:
        """The differences in tau: of each further head less the first one, on the same questions."""
        return differences(self.reports)

    def to_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "questions": self.num_questions,
            "target": self.target,
            "reports": [report.to_json() for report in self.reports],
            "differences": [difference.to_json() for difference in self.differences],
            "steps": {name: times.to_json() for name, times in self.steps.items()},
        }


@dataclass(frozen=True)
class TauVerdict:
    """A published tau beside the measured one, and whether it is within the interval of the measurement."""

    name: str
    expected: float
    tau: float | None
    interval: Interval | None

    @property
    def holds(self) -> bool:
        """Return whether the published tau is within the interval. It is False also where there is no interval."""
        return self.interval is not None and self.expected in self.interval

    @property
    def text(self) -> str:
        """The verdict in a sentence."""
        if self.tau is None or self.interval is None:
            return f"{self.name}: {self.expected:g} cannot be judged, because there is no interval of tau"
        where = "within" if self.holds else "outside"
        return (
            f"{self.name}: tau {self.tau:.3f}; the published {self.expected:g} is {where} the interval "
            f"{self.interval.low:.3f} to {self.interval.high:.3f}"
        )

    def to_json(self) -> dict[str, Any]:
        interval = self.interval and self.interval.to_json()
        return {
            "name": self.name,
            "expected": self.expected,
            "tau": self.tau,
            "interval": interval,
            "holds": self.holds,
        }


def verdicts(reports: Sequence[SpeculationReport], expected: Sequence[float]) -> list[TauVerdict]:
    """Compare each report with its own published tau. The list is empty where no taus are given."""
    pairs = zip(reports, expected, strict=True) if expected else ()
    return [TauVerdict(full_name(report), value, report.tau, report.tau_interval) for report, value in pairs]


def full_name(report: SpeculationReport) -> str:
    """Return a name that tells a report from all others of its evaluation."""
    return f"{report.name}, T={report.temperature:g}, {report.concurrency} at once"
