"""The acceptance of each version of the head while it serves: the last answers of each, and when the newest version is
worse than the one before it."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from specserve.speculative.acceptance import Acceptance
from specserve.speculative.intervals import Interval, tau_interval

MOST_ANSWERS = 512  # the first ones of each version, and the last ones
FEWEST_ANSWERS = 64  # of each version, before two are compared


class LiveTaus:
    """The last answers of each version. Only steps that verified draft tokens count, so that it does not matter how
    often `auto` decodes plainly. One thread observes; others may read."""

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        """Go on from what `kept` has returned. Raises TypeError or ValueError where that is damaged."""
        self._first: dict[str, list[Acceptance]] = {}
        self._answers: dict[str, deque[Acceptance]] = {}
        for version, parts in (kept or {}).items():
            first, last = (
                [Acceptance(int(a), int(b), tuple(map(int, d)), int(c)) for a, b, d, c in part] for part in parts
            )
            self._first[version], self._answers[version] = first, deque(last, MOST_ANSWERS)

    def kept(self, version: str, before: str) -> dict[str, Any]:
        """Return the answers of two versions as JSON has them: the first ones and the last ones of each."""

        def part(answers: list[Acceptance]) -> list[Any]:
            return [[a.num_steps, a.num_draft_tokens, [*a.accepted_per_depth], a.num_cut] for a in answers]

        both = sorted({version, before} & self._answers.keys())
        return {each: [part([*self._first[each]]), part(self._last(each))] for each in both}

    def observe(self, version: str, found: Acceptance) -> None:
        """Take the acceptance of one answer that one version has drafted throughout."""
        if found.num_steps:
            first = self._first.setdefault(version, [])
            if len(first) < MOST_ANSWERS:
                first.append(found)
            self._answers.setdefault(version, deque(maxlen=MOST_ANSWERS)).append(found)

    def begin(self, version: str, before: str) -> None:
        """Compare a version that serves by now with the one before it alone. Its own answers are kept where it is new;
        where it is the one before, which serves again, the traffic is not that of the time when it served last."""
        compared = {version, before} if version != before else set()
        for answers in (self._first, self._answers):
            for other in [*answers]:
                if other not in compared:
                    del answers[other]

    def taus(self) -> Iterator[tuple[str, float, int]]:
        """Yield each version that has answered, its tau, and the number of answers that this is of."""
        for version in [*self._answers]:
            found = self._last(version)
            yield version, sum(found, Acceptance()).tau, len(found)

    def has_fallen(self, version: str, before: str) -> tuple[Interval, Interval] | None:
        """Return the 95% intervals of two versions' tau where the first lies wholly below the second, else None. They
        are compared over the first answers of the new one alone: later on it is the traffic that has moved."""
        new, old = [*self._first.get(version, ())], self._last(before)
        if version == before or min(len(new), len(old)) < FEWEST_ANSWERS:
            return None
        found, expected = tau_interval(new), tau_interval(old)
        assert found is not None
        assert expected is not None
        return (found, expected) if found.high < expected.low else None

    def _last(self, version: str) -> list[Acceptance]:
        return [*self._answers.get(version, ())]
