"""Counts of the draft tokens that the target accepted, from which tau and the acceptance by depth follow.

The training loop, the evaluation, the benchmarks and the server all count with this class, so their numbers mean the
same. It knows nothing of where the counts come from.
"""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """The accepted draft tokens of the steps after prefill, of one sequence or (by `+`) of many.

    A step is one forward of the target over a tree of draft tokens. It emits the draft tokens that it accepts, and one
    token of the target's own, the bonus token. What lies behind the end of an answer is not emitted and does not count:
    where the answer ends with a draft token, its last step has no bonus token. So the mean number of tokens that a step
    emits, which is the number of an answer's tokens after the first over its steps, is

        tau = (steps + accepted draft tokens - cut steps) / (steps)

    A step of plain decoding has no draft tokens. It counts as a step that accepts none, and plain decoding has tau 1.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0  # proposed, accepted or not
    accepted_per_depth: tuple[int, ...] = ()  # [d]: the steps that accepted a draft token at depth d + 1
    num_cut: int = 0  # steps whose bonus token lay behind the end of an answer

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.accepted_per_depth)

    @property
    def tau(self) -> float:
        """The mean number of tokens that a step emits; 1.0 where there was no step."""
        return self.num_emitted / self.num_steps if self.num_steps else 1.0

    @property
    def num_emitted(self) -> int:
        """The tokens that the steps emitted: all of the answers but their first tokens, which prefill emits."""
        return self.num_steps + self.num_accepted - self.num_cut

    @property
    def accept_rate(self) -> tuple[float, ...]:
        """The conditional acceptance at each depth: of the steps that accepted a token one depth above (at depth 1: of
        all steps), the share that accepted one there. Of 10 steps that accepted (6, 3) it is (0.6, 0.5)."""
        above = (self.num_steps, *self.accepted_per_depth)
        return tuple(n / max(1, m) for n, m in zip(self.accepted_per_depth, above, strict=False))

    def after_step(
        self, n_accepted: int = 0, *, depth: int = 0, num_draft_tokens: int = 0, num_emitted: int | None = None
    ) -> "Acceptance":
        """Return these counts with one step more, over a tree of `depth` levels, of whose tokens the answer takes so
        many, or all. The default is a step of plain decoding."""
        if num_emitted is None:
            num_emitted = n_accepted + 1
        n_accepted = min(n_accepted, num_emitted)
        counts = [*self.accepted_per_depth, *[0] * (depth - len(self.accepted_per_depth))]
        for d in range(n_accepted):
            counts[d] += 1
        num_cut = self.num_cut + (num_emitted <= n_accepted)
        return Acceptance(self.num_steps + 1, self.num_draft_tokens + num_draft_tokens, tuple(counts), num_cut)

    def __add__(self, other: "Acceptance") -> "Acceptance":
        """The counts of both together."""
        return self._plus(other, 1)

    def __sub__(self, earlier: "Acceptance") -> "Acceptance":
        """The counts that came after an earlier reading of the same counters."""
        return self._plus(earlier, -1)

    def _plus(self, other: "Acceptance", sign: int) -> "Acceptance":
        by_depth = itertools.zip_longest(self.accepted_per_depth, other.accepted_per_depth, fillvalue=0)
        return Acceptance(
            self.num_steps + sign * other.num_steps,
            self.num_draft_tokens + sign * other.num_draft_tokens,
            tuple(n + sign * m for n, m in by_depth),
            self.num_cut + sign * other.num_cut,
        )
