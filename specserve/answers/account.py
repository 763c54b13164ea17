"""The account of a run that has questions answered."""

import time
from collections import Counter
from dataclasses import dataclass, field

from specserve.speculative.acceptance import Acceptance


@dataclass
class Account:
    """The number of questions that were answered so far, and the reasons why others were not."""

    num_rows: int = 0  # written by this run
    num_there: int = 0  # found in the file, not made again
    num_answers: int = 0
    num_tokens: int = 0
    num_so_far: int = 0  # tokens, with those of answers that have not ended
    acceptance: Acceptance = field(default_factory=Acceptance)
    num_compared: int = 0  # answers whose row was rendered as training will render it
    num_exact: int = 0  # of them, those that come back as the very tokens that were generated
    left_out: Counter[str] = field(default_factory=Counter)  # why there is no row
    shortened: Counter[str] = field(default_factory=Counter)  # why a row has fewer answers than it was asked for
    start: float = 0.0  # when the first tokens came; 0: none has come

    def count(self, num_tokens: int) -> None:
        """Count tokens of an answer as they come. What is compiled or read before the first of them is not counted as
        time."""
        self.start = self.start or time.monotonic()
        self.num_so_far += num_tokens

    @property
    def tokens_per_second(self) -> float:
        """The speed so far, running answers included."""
        return self.num_so_far / max(time.monotonic() - self.start, 1e-9) if self.start else 0.0

    def add(self, other: "Account") -> None:
        """Take over what another engine has answered meanwhile. Its time and what it found there do not count."""
        counts = "num_rows", "num_answers", "num_tokens", "num_so_far", "acceptance", "num_compared", "num_exact"
        for name in counts:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.left_out += other.left_out
        self.shortened += other.shortened

    @property
    def num_settled(self) -> int:
        """The number of rows that are finished: written now or earlier, or left out for good."""
        return self.num_there + self.num_rows + self.left_out.total()

    def describe(self) -> str:
        """The account as text for people, one line per subject."""
        lines = [
            f"{self.num_rows} rows written, {self.num_there} there already; {self.num_answers} answers of "
            f"{self.num_tokens:,} tokens at {self.tokens_per_second:,.0f} tokens/s, tau {self.acceptance.tau:.2f}"
        ]
        if self.num_compared:
            lines.append(f"{self.num_exact} of {self.num_compared} come back in training as the tokens they were")
        for what, counts in (("left out", self.left_out), ("shortened", self.shortened)):
            if counts:
                lines.append(f"{what}: {listed(counts)}")
        return "\n".join(lines)


def listed(counts: Counter[str]) -> str:
    """Return reasons with their counts, the most frequent one first."""
    return ", ".join(f"{reason}: {count}" for reason, count in counts.most_common())
