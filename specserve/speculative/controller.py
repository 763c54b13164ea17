"""The controller chooses the tree of the next step: the one that promises the most tokens per second for the whole
batch.

The promise is (expected tokens) / (cost). Costs are measured when the server starts, and corrected by what steps take
in service (`costs`). Now and then one step looks at another way than the best: soon after a change from plain decoding
to speculation or back, since that may have been a mistake, and then more and more rarely. A way that has proved
expensive is looked at so rarely that the looks take no noticeable share of the time.

A chain of length K is expected to emit 1 + sum over d <= K of p_1 ... p_d tokens, where p_d is the sequence's
acceptance at depth d, estimated while serving. A tree's acceptance at each depth is 1 - (1 - p)^lift, with a lift of
its own that is estimated as well. Where the draft gives a confidence in a sequence, that moves p as far as it has
proved right (`confidence`). Plain decoding is one of the choices, so a head that does not pay costs nothing but the
looks.

The controller is host code. It knows nothing of requests or devices.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from specserve.speculative.confidence import Calibration, Surety
from specserve.speculative.costs import UNKNOWN, ServedCosts, within_burst
from specserve.speculative.head_acceptance import MAX_DEPTH, HeadAcceptance
from specserve.speculative.program import StepProgram
from specserve.speculative.reading import ReadingRule
from specserve.speculative.tree import StaticTree, Tree

SAME = 1e-3  # acceptance that differs less decides nothing
LIFT_RATE = 0.04  # how fast the lift of a tree follows what is seen
LOOK_STEPS = 64  # after so many steps, one looks whether another way would pay more by now
FIRST_LOOK_STEPS = 8  # the same after speculation has begun or ended; then twice as many, up to that
LOOK_SHARE = 0.005  # of the time: what looks at a way may lose once its cost has been seen in service
WORTH = 1.05  # a batch speculates where that promises more than so much of plain decoding
LOYALTY = 1.02  # another way must promise more than this much of what the current one does

_DEPTHS = np.arange(MAX_DEPTH)


@dataclass(eq=False)
class Estimate:
    """The conditional acceptance of one sequence's draft tokens, by depth."""

    accept_rate: np.ndarray  # [MAX_DEPTH] float64
    max_depth: int = MAX_DEPTH  # draft tokens that its request lets a step accept
    surety: Surety | None = None  # how sure the draft is of it; None where it gives no confidence


@dataclass(eq=False)
class _Forecast:
    """The tokens that several sequences are expected to accept. They are computed for all of them at once, and for all
    depths: the host does this in every step, beside the device."""

    rates: np.ndarray  # [sequence, MAX_DEPTH] float64, of a chain
    max_depths: np.ndarray  # [sequence] int
    _emitted: dict[float, np.ndarray] = field(default_factory=dict)  # by lift: [MAX_DEPTH], by a tree of that depth

    @classmethod
    def of(cls, estimates: Sequence[Estimate]) -> Self:
        rates = np.array([estimate.accept_rate for estimate in estimates]).reshape(-1, MAX_DEPTH)
        return cls(rates, np.array([estimate.max_depth for estimate in estimates], int))

    def tokens(self, depth: int, lift: float) -> float:
        """Return how many tokens a step over a tree of such depth and lift is expected to emit for all sequences."""
        if lift not in self._emitted:
            reach = np.cumprod(_lifted(self.rates, lift), axis=1)
            reach[np.arange(MAX_DEPTH) >= self.max_depths[:, None]] = 0.0
            self._emitted[lift] = len(reach) + np.cumsum(reach.sum(axis=0))
        return float(self._emitted[lift][min(depth, MAX_DEPTH) - 1])


def _lifted(rates: np.ndarray, lift: float) -> np.ndarray:
    return rates if lift == 1.0 else 1.0 - (1.0 - rates) ** lift


@dataclass(eq=False)
class _Present:
    """The tree that steps of one kind take at present, and when they look at another."""

    tree: Tree | None
    num_looks: int = 0
    num_steps: int = 0  # since the last look
    patience: int = FIRST_LOOK_STEPS  # steps from one look to the next
    awaits_reading: bool = False  # so many because the draft would have to read before it


@dataclass(eq=False)
class Controller:
    """Chooses trees by measured costs and estimated acceptance.

    `costs` are seconds per step; one that has none is never chosen. `prior` is the head's own acceptance by depth,
    from its evaluation.
    """

    costs: Mapping[StepProgram, float]
    prior: Sequence[float] = ()
    calibration: Calibration = field(default_factory=Calibration)
    most_steps: int = 1  # of one call, at most
    _gain: float = 0.0  # of the best way over plain decoding, as a share
    _next_look: tuple[Any, Tree] | None = None  # the kind and the tree of a look, for which the draft is still reading
    _lift: dict[Tree, float] = field(default_factory=dict)
    # By batch size and the trees that there are: steps with a token mask have fewer, and a schedule of their own.
    _present: dict[tuple[int, frozenset[Tree | None]], _Present] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._served = ServedCosts(self.costs)
        plain = [each for each in self.costs if each.kind == "step" and each.tree is None]
        plain.sort(key=operator.attrgetter("is_alone"))
        self._plain = {(each.batch, each.width): each for each in plain}  # the target's alone where there are both
        self._last: tuple[list[np.ndarray], _Forecast] = [], _Forecast.of(())
        self.expect(self.prior)

    @property
    def is_following(self) -> bool:
        """The draft is to keep up with plain steps, since speculation may pay soon."""
        return self._reading.is_following

    @property
    def follows_prompts(self) -> bool:
        """The draft is to run with the next prompts: it is following, or the next sequence begins with a look."""
        return self._reading.is_following or self._reading.follows_next

    def retract(self) -> None:
        """Begin anew to choose when the draft reads: weights have changed, and every sequence is prefilled anew."""
        self._reading, self._gain, self._next_look = ReadingRule(self.costs), 0.0, None

    def expect(self, prior: Sequence[float]) -> None:
        """Begin anew with a head of this acceptance by depth. Estimates that were started before belong to the old
        head."""
        self._lift.clear()
        self.calibration.forget()
        self.retract()
        self._head = HeadAcceptance(prior)

    def start(self, max_depth: int | None) -> Estimate:
        """The estimate for a new sequence, which is what is known of the head so far. `max_depth` is the request's
        bound, None for none."""
        return Estimate(self._head.rates.copy(), MAX_DEPTH if max_depth is None else max_depth)

    def expected_tokens(self, estimates: Sequence[Estimate], tree: Tree | None) -> float:
        """Return how many tokens a step over this tree is expected to emit for these sequences together, their bonus
        tokens included."""
        return float(len(estimates)) if tree is None else self._tokens(self._forecast(estimates), tree)

    def promise(self, estimate: Estimate, tree: Tree | None) -> float:
        """Return how many draft tokens of a step over this tree a sequence is expected to accept."""
        if tree is None:
            return 0.0
        rates = _lifted(estimate.accept_rate[: min(tree.depth, estimate.max_depth)], self._lift_of(tree)).tolist()
        return sum(itertools.accumulate(rates, operator.mul))

    def choose(
        self,
        estimates: Sequence[Estimate],
        choices: Sequence[StepProgram],
        num_unread: int = 0,  # tokens of theirs that the draft has to read before it can propose
        num_unseen: int = 0,  # speculative steps of theirs that are on their way
    ) -> StepProgram:
        """The next step of these sequences, out of `choices`, which are those for their number, rounded up, and the
        width. One without a tree is plain decoding."""
        known = {program.tree: program for program in choices if program in self.costs}
        if not known:
            if self.costs:  # of smaller batches, which a server begins with
                self._reading.leave_out()
            return choices[0]
        # as far ahead as the middle of the next call, which is about as long as the one that is on its way
        forecast = self._forecast(estimates, 1.5 * num_unseen)
        promises = {tree: self._promise(forecast, program) for tree, program in known.items()}
        kind = choices[0].batch, frozenset(known)
        is_open = any(estimate.max_depth for estimate in estimates)  # else no draft may be accepted, whatever it pays
        present = self._present.get(kind) if is_open else None
        if present is not None:
            promises[present.tree] *= LOYALTY
        best = max(known, key=promises.__getitem__)
        speculative = [tree for tree in known if tree is not None]
        self._gain = promises[best] / promises[None] - 1.0 if None in known else 0.0
        if self._reading.waits(num_unread, self._gain, len(estimates)):
            return known[None]
        most = max((promises[tree] for tree in speculative), default=0.0)
        is_near = is_open and LOYALTY * most > promises[best]
        # costs that were measured on a busy machine are too high
        may_pay = not num_unread and most * math.exp(UNKNOWN) > promises[best]
        is_unknown = best is None and may_pay and not any(self._served.has_seen(known[tree]) for tree in speculative)
        is_used = is_open and (best is not None or is_unknown)
        self._reading.choose(choices[0], is_used=is_used, is_near=is_near)
        if not is_open:
            return known[best]
        expected, self._next_look = self._next_look, None
        if expected is not None and expected[0] == kind:  # the draft has been reading for it
            self._next_look = expected if num_unread else None
            return known[expected[1]]
        present = self._present.setdefault(kind, _Present(best))
        if (best is None) != (present.tree is None):
            present.num_steps, present.patience = 0, FIRST_LOOK_STEPS
        present.tree = best
        present.num_steps += bool(speculative)
        if present.num_steps >= present.patience or (present.awaits_reading and not num_unread):
            look = self._look(forecast, known, present)
            if self._is_time(forecast, known[look], known[best], present, num_unread):
                present.num_steps, present.patience = 0, min(2 * present.patience, LOOK_STEPS)
                present.num_looks += 1
                if look != best:
                    self._next_look = (kind, look) if num_unread and look is not None else None
                    return known[look]
        if best is None:
            self._see_nothing(estimates, within_burst(self._served.seconds(known[best]), self.most_steps))
        return known[best]

    def _see_nothing(self, estimates: Sequence[Estimate], num_steps: int) -> None:
        """Note so many plain steps of these sequences. Estimates that are the head's own by now stay the same arrays,
        so that their forecast stays too."""
        self._head.steps_passed(num_steps)
        rates = np.array([estimate.accept_rate for estimate in estimates])  # not as confidence moves them
        if np.abs(rates - self._head.rates).max() > SAME:
            for estimate, faded in zip(estimates, self._head.faded(rates, num_steps), strict=True):
                estimate.accept_rate = faded
        for estimate in estimates:
            if estimate.surety is not None:
                estimate.surety.fade()

    def _look(self, forecast: _Forecast, known: Mapping[Tree | None, StepProgram], present: _Present) -> Tree | None:
        """Return a tree to try once. It is the one that would promise most, if it were off its measured cost no more
        than others are, whatever its own steps seemed to take. Every second time, and where there is no such tree, it
        is plain decoding."""
        others = [tree for tree in known if tree not in (None, present.tree)]
        if present.tree is not None and None in known and (present.num_looks % 2 == 0 or not others):
            return None

        def hope(tree: Tree) -> float:
            return self._tokens(forecast, tree) / self._served.hoped_seconds(known[tree])

        return max(others, key=hope, default=present.tree)

    def _is_time(
        self, forecast: _Forecast, look: StepProgram, best: StepProgram, present: _Present, num_unread: int
    ) -> bool:
        """Return whether a call of the other way, and reading before it, are no more than LOOK_SHARE of the time since
        the last look; else note when to ask again. A call is as many steps as end within a burst. The call itself
        counts only where the other way has been seen in service: its measured cost may be wrong."""
        lost, reading, following = 0.0, 0.0, 0.0
        if look.tree is not None:
            reading = self._reading.reading_seconds(num_unread)
            following = self._reading.following_seconds(num_unread)
        if self._served.has_seen(look):
            promised = self._promise(forecast, look) / self._promise(forecast, best)
            lost += max(0.0, (1.0 - promised) * self._call_seconds(look))
        wait, soon = ((lost + price) / self._call_seconds(best) / LOOK_SHARE for price in (reading, following))
        present.awaits_reading = num_unread > 0 and present.num_steps < wait
        if present.num_steps >= wait:
            return True
        if num_unread and len(forecast.rates) == 1 and not self._reading.follows_next:
            if present.num_steps >= soon:
                self._reading.look_soon()
            else:
                wait = soon
        present.patience = math.ceil(wait)
        return False

    def stepped(self, program: StepProgram, num_steps: int, num_sequences: int, num_read: int = 0) -> None:
        """Note that so many steps of so many sequences are made, before which the draft has read so many tokens."""
        seconds = self._served.seconds(program) if program in self.costs else 0.0
        self._reading.stepped(program, num_steps * seconds, self._gain, num_steps * num_sequences, num_read)

    def _call_seconds(self, program: StepProgram) -> float:
        seconds = self._served.seconds(program)
        return seconds * within_burst(seconds, self.most_steps)

    def has_seen(self, program: StepProgram) -> bool:
        """Return whether anything has been learned of what such a step takes in service."""
        return self._served.has_seen(program)

    def seconds(self, program: StepProgram) -> float | None:
        """Return what a step takes by all that is known. None where its cost was never measured."""
        return self._served.seconds(program) if program in self.costs else None

    def speedup(self, estimates: Sequence[Estimate], program: StepProgram) -> float:
        """The tokens per second that the step promises, over those of a plain step. 1 where either cost is unknown."""
        plain = self._plain.get((program.batch, program.width))
        if program.tree is None or not estimates or plain is None or program not in self.costs:
            return 1.0
        tokens = self.expected_tokens(estimates, program.tree)
        return tokens / len(estimates) * self._served.seconds(plain) / self._served.seconds(program)

    def observe(
        self,
        estimates: Sequence[Estimate],
        tree: Tree,
        n_accepted: np.ndarray,  # [step, sequence] int, draft tokens; -1: the sequence had ended before this step
        confidence: np.ndarray | None = None,  # [step, sequence, depth], how sure the draft was of them
    ) -> None:
        """Learn what steps over this tree, one behind the other, accepted of some sequences."""
        if not estimates:
            return
        forecast = _Forecast.of(estimates)
        lasts = np.minimum(forecast.max_depths, min(tree.depth, MAX_DEPTH))[:, None]
        num_seen = np.minimum(n_accepted[..., None] + 1, lasts)  # the first rejection is the last thing seen
        # depths that no step has looked at follow the deepest, else a longer chain is never tried
        shown_at = np.minimum(_DEPTHS, lasts - 1)  # [sequence, MAX_DEPTH]
        shows = (shown_at < num_seen) & (lasts > 0)  # [step, sequence, MAX_DEPTH]
        is_accepted = shown_at < n_accepted[..., None]
        rates, lift, row = forecast.rates, self._lift_of(tree), np.arange(len(estimates))[:, None]
        for step, is_shown in enumerate(shows):
            if confidence is not None:
                known = estimates, rates, lift
                self._observe_confidence(*known, is_accepted[step], num_seen[step, :, 0], confidence[step])
            surprise = is_shown * (is_accepted[step] - _lifted(rates, lift)[row, shown_at])
            if not _is_chain(tree):
                # of a step in the mean: good phases show more depths than bad ones, and the lift of both is the same
                of_each = (surprise * (lasts > _DEPTHS)).sum(axis=1) / np.maximum(num_seen[step, :, 0], 1)
                lift = self._lift[tree] = float(np.clip(lift * np.prod(1 + LIFT_RATE * of_each), 1.0, 8.0))
            rates = self._head.followed(rates, surprise)
        for estimate, own in zip(estimates, rates, strict=True):
            estimate.accept_rate = own
        of_head = shows * (is_accepted - _lifted(self._head.rates, lift)[shown_at])
        self._head.steps_passed(len(shows))
        self._head.learn(of_head.sum(axis=(0, 1)), shows.sum(axis=(0, 1)))

    def _observe_confidence(
        self,
        estimates: Sequence[Estimate],
        rates: np.ndarray,  # [sequence, MAX_DEPTH], of a chain, before this step
        lift: float,
        is_accepted: np.ndarray,  # [sequence, MAX_DEPTH]
        num_seen: np.ndarray,  # [sequence]
        confidence: np.ndarray,  # [sequence, depth]
    ) -> None:
        for i, estimate in enumerate(estimates):
            if seen := int(num_seen[i]):
                foreseen = _lifted(self.calibration.moved(rates[i], estimate.surety), lift)[:seen]
                own = confidence[i, :MAX_DEPTH]
                number = int(is_accepted[i, :seen].sum())
                surprise = is_accepted[i, :seen] - foreseen
                estimate.surety = self.calibration.observe(estimate.surety, own, surprise, number, MAX_DEPTH)

    def observe_seconds(
        self, program: StepProgram, seconds: float, num_steps: int = 1, *, is_switch: bool = False
    ) -> None:
        """Learn that each of so many steps in a row took so many seconds in service, and whether they came behind a
        step of another program."""
        self._served.observe(program, seconds, num_steps, is_switch=is_switch)

    def _promise(self, forecast: _Forecast, program: StepProgram) -> float:
        """Return the tokens per second that a step promises. Sequences of a batch that speculates do not end together,
        so that some of its rows stand empty while the next prompts run, and each step gives the host more to do."""
        worth = 1.0 if program.tree is None or len(forecast.rates) < 2 else WORTH
        return self._tokens(forecast, program.tree) / self._served.seconds(program) / worth

    def _tokens(self, forecast: _Forecast, tree: Tree | None) -> float:
        return float(len(forecast.rates)) if tree is None else forecast.tokens(tree.depth, self._lift_of(tree))

    def _forecast(self, estimates: Sequence[Estimate], num_ahead: float = 0.0) -> _Forecast:
        """Forecast what the sequences accept, by how sure the draft is of them now. While they are decoded plainly for
        long nothing of it changes, and on a CPU the host's time is taken from the device."""
        rates, (known, forecast) = [estimate.accept_rate for estimate in estimates], self._last
        if len(rates) != len(known) or any(map(operator.is_not, rates, known)):
            forecast = _Forecast.of(estimates)
            self._last = rates, forecast
        if num_ahead:
            forecast = _Forecast(self._head.faded(forecast.rates, num_ahead), forecast.max_depths)
        if not self.calibration.trust:
            return forecast
        moved = [
            self.calibration.moved(own, estimate.surety)
            for own, estimate in zip(forecast.rates, estimates, strict=True)
        ]
        return _Forecast(np.array(moved).reshape(forecast.rates.shape), forecast.max_depths)

    def _lift_of(self, tree: Tree) -> float:
        """The lift of a tree: 1 of a chain. Before anything is observed, more children help, each less than the one
        before."""
        return 1.0 if _is_chain(tree) else self._lift.get(tree, 1.0 + 0.35 * (tree.top_k - 1))


def _is_chain(tree: Tree) -> bool:
    return not isinstance(tree, StaticTree) and tree.top_k == 1
