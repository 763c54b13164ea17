"""Laws of the pace: by a clock of our own and a target of any speed, what is begun ends in time, little of the time is
left, and none is begun where nothing is known to fit but the first."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specserve.answers.account import Account
from specserve.answers.pace import Pace

SLOTS, STEP = 4, 0.5


class _Clock(Account):
    """An account with a clock of its own, whose target writes a token in each slot at every tick."""

    now = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_so_far / max(self.now, 1e-9)


def answer(lengths: list[int], end: float, most: int) -> tuple[Pace, _Clock, float]:
    """Answer as the engine does: a conversation is asked for when one has ended. Returns when the last one ended."""
    account = _Clock()
    pace = Pace(SLOTS, most, end, clock=lambda: account.now)
    jobs: list[Any] = [SimpleNamespace(asked=[[]], more_turns=0, left=length) for length in lengths]
    waiting, is_open = pace.begin(jobs, account), list[Any]()
    while True:
        while len(is_open) < SLOTS + 1 and (job := next(waiting, None)) is not None:
            is_open.append(job)
        if not is_open:
            return pace, account, account.now
        account.now += STEP
        for job in is_open[:SLOTS]:
            job.left -= 1
            account.num_so_far += 1
            account.num_rows += job.left == 0
        is_open = [job for job in is_open if job.left]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.floats(1, 500), st.integers(0, 2))
def test_what_is_begun_ends_in_time(lengths: list[int], end: float, slack: int) -> None:
    most = max(lengths) + 10 * slack
    pace, account, last = answer(lengths, end, most)
    begun = account.num_rows
    assert 1 <= begun <= len(lengths)
    assert (pace.first_left is None) == (begun == len(lengths))
    unavoidable = (SLOTS + 1) * most * STEP  # those that are begun before anything is known
    assert last <= max(end, unavoidable) + 2 * most * STEP
    assert pace.expected() == begun
    assert pace.num_ended == begun


def test_little_time_is_left() -> None:
    """Of answers of one length, whose mean is soon known; and what is expected before is what is reached."""
    for end in (200.0, 1000.0):
        pace, account, last = answer([20] * 2000, end, 64)
        assert end - 3 * 20 * STEP < last <= end
    early = Pace(SLOTS, 64, 1000.0, clock=lambda: 40.0)
    account = _Clock(num_so_far=320, num_rows=16)
    account.now = 40.0
    for _, _ in zip(range(16), early.begin([SimpleNamespace(asked=[[]], more_turns=0)] * 2000, account), strict=False):  # type: ignore[list-item]
        pass
    assert 0.8 * pace.num_ended < early.expected() < 1.2 * pace.num_ended
