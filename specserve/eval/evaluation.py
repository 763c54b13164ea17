"""All that one evaluation found, and how it compares with published figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specserve.eval.acceptance import Difference, SpeculationReport, differences
from specserve.eval.intervals import Interval
from specserve.eval.step_times import StepTimes


@dataclass(frozen=True)
class Evaluation:
    """What was asked, and a report for every head (or server), speculation, temperature and concurrency."""

    bench: str
    num_questions: int
    target: str
    reports: Sequence[SpeculationReport]
    steps: Mapping[str, StepTimes]  # of ways in which a head proposes one tree, by name

    @property
    def differences(self) -> list[Difference]:
        """Tau of each further head less that of the first."""
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
    """Whether a published tau is within the interval of what was measured."""

    name: str
    expected: float
    tau: float | None
    interval: Interval | None

    @property
    def holds(self) -> bool:
        """False also where there is no interval to judge by."""
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
    """Judge each report by its own published tau; none where none are given."""
    pairs = zip(reports, expected, strict=True) if expected else ()
    return [TauVerdict(full_name(report), value, report.tau, report.tau_interval) for report, value in pairs]


def full_name(report: SpeculationReport) -> str:
    """What tells a report from all others of its evaluation."""
    return f"{report.name}, T={report.temperature:g}, {report.concurrency} at once"
