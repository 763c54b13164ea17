"""The rule by which a draft that was left out reads what the target has run alone, and one that follows is left out.

A draft that is not used need not read what the target runs: plain steps and prompts are quicker without it. Where
speculation pays again, the draft must read all that first, and for how long it will pay is not known. So both changes
wait until not to make them has cost as many seconds as they would. In a single lull at first no more is lost than twice
the reading, and the reading of what has come meanwhile.

To follow a prompt while the target runs it costs a small part of what reading it later would. So with one sequence at a
time the draft follows the next prompt once plain steps have lost that much, or once a look at speculation may cost it,
and the sequence after it begins with everything read.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from specserve.speculative.program import StepProgram

FOLLOWING = 0.1  # of a plain step or of a prompt: following adds so much in service at least (docs/log)
MOST_PATIENCE = 64  # times the price of reading, of what many short lulls have lost
MOST_PATIENCE_NOW = 8  # the same, of one lull that lasts


@dataclass(eq=False)
class _Missed:
    """The plain steps that were made where speculation would pay."""

    seconds: float = 0.0  # lost by them
    num_tokens: int = 0  # made by them


class ReadingRule:
    """Decides whether the draft keeps up with plain steps, by what that and reading cost and what speculation saves.

    What was lost in many short lulls adds up. But where speculation has saved less, by the time that the draft is left
    out again, than reading and following took, then twice as much must be lost before the next reading, until it saves
    twice what they take. So it is at the ragged ends of batches that are full again at once."""

    def __init__(self, costs: Mapping[StepProgram, float]) -> None:
        readings = [program for program in costs if program.chunk]
        self._least_reading = min((costs[each] for each in readings), default=0.0)  # seconds
        self._per_token = min((costs[each] / each.chunk for each in readings), default=0.0)
        # by batch and width, see `_extra_share`
        self._extra = {
            (program.batch, program.width): max(costs[followed] / costs[program] - 1.0, FOLLOWING)
            for program in costs
            if program.is_alone
            and program.kind == "step"
            and (followed := dataclasses.replace(program, is_alone=False)) in costs
        }
        self.is_following = True
        self.follows_next = False  # the next prompt, and from there on what is chosen then
        self._is_waiting = False  # speculation would pay now, and plain steps have not lost enough yet
        self._now, self._all = _Missed(), _Missed()  # since it would pay without a break, and since all was read
        self._patience = 1
        # seconds since the draft was last left out: of following, less what speculation has saved; of both following
        # and reading; and what speculation has saved
        self._kept_up = self._spent = self._saved = 0.0

    def waits(self, num_unread: int, gain: float, num_sequences: int) -> bool:
        """Return whether plain steps go on for now, since the draft has so many tokens of the sequences to read before
        the best way, which brings so much more than plain decoding, as a share of it."""
        pays = num_unread > 0 and gain > 0
        if not num_unread:
            self._all = _Missed()
        if not num_unread or num_sequences > 1:
            self.follows_next = False
        if not pays:
            self._now = _Missed()
        self._is_waiting = pays and not self._has_waited(num_unread)
        if self._is_waiting and num_sequences == 1 and not self.follows_next:
            price = self.following_seconds(max(num_unread - self._all.num_tokens, num_unread / 2))
            self.follows_next = self._all.seconds >= self._patience * price
        return self._is_waiting

    def look_soon(self) -> None:
        """Follow the next prompt, since a look at speculation may cost that by now."""
        self.follows_next = True

    def _has_waited(self, num_unread: int) -> bool:
        """Return whether plain steps have lost the price: the reading of what was unread before they began to lose any.
        Of other sequences than now that may be too little, so half of it all counts at least."""
        now, all_ = num_unread - self._now.num_tokens, num_unread - self._all.num_tokens
        for_now = max(min(self._patience, MOST_PATIENCE_NOW) * now, num_unread / 2)
        return self._now.seconds >= self.reading_seconds(for_now) or self._all.seconds >= self.reading_seconds(
            self._patience * max(all_, num_unread / 2)
        )

    def choose(self, plain: StepProgram, *, is_used: bool, is_near: bool) -> None:
        """Note that speculation is used for such a batch, or is nearly as good as plain decoding."""
        if self._extra_share(plain) is None:  # following costs little, and a draft could not read later
            self.is_following = is_used or is_near
        elif is_used:
            self.is_following = True

    def stepped(self, program: StepProgram, seconds: float, gain: float, num_tokens: int, num_read: int) -> None:
        """Note steps of so many seconds and tokens together, before which the draft has read so many tokens, and what
        the best way brings over plain ones. They lose it, where speculation would pay and waits, and a draft that
        follows for nothing costs something."""
        if self.is_following:  # and not for a look
            self._spent += self.reading_seconds(num_read)
        if program.tree is not None:
            self._saved += gain * seconds
            self._kept_up = max(0.0, self._kept_up - gain * seconds)
        elif self._is_waiting:
            for missed in (self._now, self._all):
                missed.seconds += gain * seconds
                missed.num_tokens += num_tokens
        elif self.is_following and not program.is_alone and (share := self._extra_share(program)) is not None:
            self._kept_up += share * seconds
            self._spent += share * seconds
            if self._kept_up >= self._least_reading:
                self.leave_out()

    def leave_out(self) -> None:
        """Leave the draft out: following has cost what going on will at least, the smallest reading, or a batch is of a
        size that cannot speculate yet."""
        if self._saved < self._spent:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        elif self._saved > 2 * self._spent:  # a saving between the two may as well be a loss
            self._patience = 1
        self.is_following = False
        self._kept_up = self._spent = self._saved = 0.0

    def reading_seconds(self, num_tokens: float) -> float:
        """Return what the draft takes to read so many tokens."""
        return num_tokens * self._per_token

    def following_seconds(self, num_tokens: float) -> float:
        """Return what following a prompt of so many tokens adds to it."""
        return FOLLOWING * self.reading_seconds(num_tokens)

    def _extra_share(self, program: StepProgram) -> float | None:
        """Return what a plain step that the draft follows takes beyond one of the target alone, as a share of that;
        FOLLOWING at least. None where there are not both."""
        return self._extra.get((program.batch, program.width))
