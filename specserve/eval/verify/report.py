"""The findings of a proof that speculation changes nothing: by check, by difference, and by statistical test."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from specserve.speculative.acceptance import Acceptance

FALSE_ALARMS = 1e-4  # the chance that a right engine fails any of the statistical tests of a run, all together

Verdict = Literal["tie", "bug"]
Kind = Literal["token", "end", "log-probability", "error"]


@dataclass(frozen=True)
class Mismatch:
    """A place where an answer begins to differ from plain decoding's, and the verdict of the rule of drawing."""

    way: str
    check: str
    ask: str
    kind: Kind
    position: int  # of the answer, from 0
    plain: str
    other: str
    lead: float | None  # by which the rule's own choice leads the other token; None: there is nothing to measure
    verdict: Verdict
    plain_top: tuple[tuple[int, float], ...] = ()  # most likely tokens there with their log-probabilities
    other_top: tuple[tuple[int, float], ...] = ()


@dataclass
class Row:
    """The result of one check of one way to speculate."""

    way: str
    check: str
    num_answers: int = 0
    num_tokens: int = 0
    num_ties: int = 0
    num_bugs: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    note: str = ""
    is_tested: bool = True  # the event that is checked has happened: a preemption, a hit


@dataclass(frozen=True)
class Test:
    """A statistical test. `p_value` is the chance of something this far off where nothing is wrong."""

    __test__ = False  # pytest takes it for one of its own

    way: str
    what: str
    statistic: str
    p_value: float


@dataclass
class ProofReport:
    """The findings of a run of the proof."""

    rows: list[Row] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    tests: list[Test] = field(default_factory=list)
    noise: float = 0.0  # of a log-probability, between programs of different shapes
    num_compared: int = 0  # log-probabilities that the noise is the largest difference of

    @property
    def limit(self) -> float:
        """The p-value below which a test fails: all tests together raise a false alarm in one of 10,000 runs."""
        return FALSE_ALARMS / max(1, len(self.tests))

    @property
    def failed(self) -> list[Test]:
        return [test for test in self.tests if test.p_value < self.limit]

    @property
    def num_bugs(self) -> int:
        return sum(row.num_bugs for row in self.rows) + len(self.failed)

    @property
    def untested(self) -> list[Row]:
        """The checks that nothing was put to: their answers prove no more than those of the others do."""
        return [row for row in self.rows if not row.is_tested]

    @property
    def verdict(self) -> str:
        """The result of the proof in a sentence."""
        if self.num_bugs:
            return f"{self.num_bugs} bugs: speculation is not what plain decoding is, here"
        text = "speculation changes nothing here"
        if self.untested:
            names = ", ".join(f"{row.way}: {row.check}" for row in self.untested)
            text += f", as far as was tested; {len(self.untested)} checks tested nothing ({names})"
        if self.num_ties:
            text += f"; {self.num_ties} ties that rounding decides otherwise"
        return text

    @property
    def num_ties(self) -> int:
        return sum(row.num_ties for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                **{name: getattr(row, name) for name in ("way", "check", "num_answers", "num_tokens")},
                "ties": row.num_ties,
                "bugs": row.num_bugs,
                "tau": row.acceptance.tau,
                "tested": row.is_tested,
                "note": row.note,
            }
            for row in self.rows
        ]
        tests = [{**dataclasses.asdict(test), "failed": test in self.failed} for test in self.tests]
        noise = {"log_probability": self.noise, "num_compared": self.num_compared}
        found = {"bugs": self.num_bugs, "ties": self.num_ties, "untested": len(self.untested), "verdict": self.verdict}
        return {
            **found,
            "noise": noise,
            "rows": rows,
            "tests": tests,
            "p_value_limit": self.limit,
            "mismatches": [dataclasses.asdict(each) for each in self.mismatches],
        }
