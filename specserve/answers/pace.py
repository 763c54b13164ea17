"""The pace of answering: how many conversations can be begun so that all of them end in time.

It goes by tokens, those of running answers included. Much is known by them when no answer has ended yet.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence

from specserve.answers.account import Account
from specserve.answers.questions import Job
from specserve.answers.regenerate import num_open


class Pace:
    """Begins conversations as long as all that are open are expected to end in time."""

    def __init__(
        self, num_slots: int, most_tokens: int, end: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take how many answers are made at once, the longest that one may be, and when the time is over."""
        self._num_slots, self._most_tokens, self._end, self._clock = num_slots, most_tokens, end, clock
        self._account, self._before = Account(), 0  # left out before the first one was begun
        self._num_jobs, self._num_begun, self._most_turns = 0, 0, 1
        self.first_left: Job | None = None  # that was not begun

    def begin(self, jobs: Sequence[Job], account: Account) -> Iterator[Job]:
        """Yield the jobs that are begun, at least one, each when a slot is free for it."""
        self._account, self._before, self._num_jobs = account, account.left_out.total(), len(jobs)
        for job in jobs:
            if self._num_begun and self._clock() + self._seconds_open() > self._end:
                self.first_left = job
                return
            self._num_begun += 1
            self._most_turns = max(self._most_turns, len(job.asked) + job.more_turns)
            yield job

    @property
    def num_ended(self) -> int:
        """The number of conversations that were begun and have ended."""
        return self._account.num_rows + self._account.left_out.total() - self._before

    def expected(self) -> int:
        """Return how many conversations are expected to be begun and to end in time."""
        left = self._end - self._clock() - self._seconds_open()
        if self.first_left or not self._account.num_so_far or left <= 0:
            return self._num_begun
        more = int(left * self._account.tokens_per_second / self._tokens_each())
        return min(self._num_jobs, self._num_begun + more)

    def _tokens_each(self) -> float:
        """Return the mean length of a conversation: all tokens so far, over the conversations that have ended. It is
        the likeliest mean where a conversation may end after any token alike."""
        most = float(self._most_tokens * self._most_turns)
        return min(most, self._account.num_so_far / self.num_ended) if self.num_ended else most

    def _seconds_open(self) -> float:
        """Return how long the open conversations will take: until one that is begun now has a slot, and then as long as
        the longest of those that run, by the speed of one slot."""
        if not self._account.num_so_far:
            return 0.0
        each = self._tokens_each()
        longest = min(self._most_tokens * self._most_turns, each * (1 + math.log(self._num_slots)))
        waiting = each * (num_open(self._num_slots) - self._num_slots)
        return (waiting + longest * self._num_slots) / max(self._account.tokens_per_second, 1e-9)
