"""The seconds that steps take in service: costs that were measured once, corrected by what is seen while serving.

The seconds of a step are modelled as (cost measured at start) x (the moment) x (its own factor). The moment is one
factor for all steps: a machine that others use, or that is hot, is slower for all of them alike, and changes within
seconds, however short its steps are. The factor of each way hardly changes: in service the host works beside the
device, and a start on a busy machine may have measured anything. A way is a batch size and a tree; plain steps of the
target alone are another one than those that the draft follows. Both logarithms are followed by a Kalman filter that
keeps a variance for each of them, but no covariances. So a step that runs all the time teaches much about the moment
and little about itself, one that has not been seen for long teaches much about itself, and ways to speculate stay
comparable when they are seen at different moments. The first steps of a way that are far off what is expected are laid
to both alike, however little the moment has changed before: else a way that runs for the first time while the machine
is slow would seem expensive long after. The noises below are shares of a step's time, and so the same for fast and slow
machines.

This is host code, like the controller, which uses it.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree

# standard deviations of logarithms
UNKNOWN = 0.4  # of a factor before anything is seen: half as much again is common, twice as much is rare
STEP_NOISE = 0.15  # of a step's seconds around what is expected of it
READ_NOISE = 0.002  # seconds, of when the host reads the result of a call: it may be busy, or wait for a core
STRETCH = 0.02  # seconds: calls of one program that follow each other are taken together until they take so long
BURST_SECONDS = 0.02  # of the steps that one call makes, at most: a reader sees no pauses of this length
MOMENT_DRIFT = 0.05  # of the moment, from one stretch to the next, and less from a shorter one
OWN_DRIFT = 0.02  # of a step's own factor, for each stretch of steps of any kind
FAR_SIGMAS = 2.0  # of noise: a new way that is further off may be so by the moment as well as by itself
MOST_SIGMAS = 3.0  # a step that is further off counts as if it were so far off

_Way = tuple[int, Tree | None, bool]  # batch size, tree, and of the target alone


def within_burst(seconds: float, most: int) -> int:
    """Return how many steps that take so many seconds each to make in one call: 1 to `most`, or as many as end within
    BURST_SECONDS."""
    return max(1, min(most, int(BURST_SECONDS / seconds)))


@dataclass(eq=False)
class _Factor:
    """The logarithm of a factor, as far as it is known."""

    mean: float = 0.0
    variance: float = UNKNOWN**2
    last_seen: float = 0.0  # the stretches that had been seen by then


@dataclass(eq=False)
class _Stretch:
    """Calls of one program, one behind the other."""

    program: StepProgram
    is_switch: bool  # the first one came behind a call of another program
    seconds: float = 0.0
    num_steps: int = 0

    @property
    def share(self) -> float:
        """The part of a whole stretch that it is."""
        return min(self.seconds / STRETCH, 1.0)


@dataclass(eq=False)
class ServedCosts:
    """Seconds of steps in service, by what they cost when they were measured."""

    measured: Mapping[StepProgram, float]
    _moment: _Factor = field(default_factory=_Factor)
    _switch: _Factor = field(default_factory=_Factor)  # of a step behind one of another program
    _own: dict[_Way, _Factor] = field(default_factory=dict)
    _seen: float = 0.0  # stretches
    _known: dict[StepProgram, float] = field(default_factory=dict)  # seconds, until more is learned
    _stretch: "_Stretch | None" = None  # the last calls, of which nothing is learned yet

    def has_seen(self, program: StepProgram) -> bool:
        """Return whether a step of this way has run in service."""
        return _way(program) in self._own

    def seconds(self, program: StepProgram) -> float:
        """Return what a step takes by all that is known. KeyError where it was never measured."""
        if program not in self._known:
            own = self._own.get(_way(program))
            off = own.mean if own else self._usual(program)
            seconds = self.measured[program] * math.exp(self._moment.mean + off)
            self._known[program] = min(seconds, self._followed_seconds(program, own))
        return self._known[program]

    def _followed_seconds(self, program: StepProgram, own: "_Factor | None") -> float:
        """Return what a plain step that the draft follows takes in service, where more is known of it than of this one
        of the target alone, which does less. While steps speculate the draft follows every plain one, so else a cost
        that was measured on a busy machine would stay."""
        if not program.is_alone:
            return math.inf
        followed = dataclasses.replace(program, is_alone=False)
        seen = self._own.get(_way(followed)) if followed in self.measured else None
        if seen is None or (own is not None and self._variance(own) <= self._variance(seen)):
            return math.inf
        return self.seconds(followed)

    def hoped_seconds(self, program: StepProgram) -> float:
        """Return what a step would take if it were off its measured cost no more than others are, whatever its own
        steps seemed to take."""
        own, off = self._own.get(_way(program)), self._usual(program)
        if own:
            off = min(own.mean, off)
        return self.measured[program] * math.exp(self._moment.mean + off)

    def observe(self, program: StepProgram, seconds: float, num_steps: int = 1, *, is_switch: bool = False) -> None:
        """Learn that each of so many steps in a row took so many seconds; those that `is_switch` came behind a step of
        another program. Steps that were never measured are ignored."""
        if program not in self.measured or seconds <= 0:
            return
        stretch = self._stretch
        if stretch is None or stretch.program != program or is_switch:
            self._end_stretch()
            stretch = self._stretch = _Stretch(program, is_switch)
        stretch.seconds += seconds * num_steps
        stretch.num_steps += num_steps
        if stretch.seconds >= STRETCH:
            self._end_stretch()

    def _end_stretch(self) -> None:
        """Learn what the steps of the last calls took together: one that is read late makes the next one seem as much
        faster."""
        stretch, self._stretch = self._stretch, None
        if stretch is None:
            return
        self._known.clear()
        program = stretch.program
        own = self._own.setdefault(_way(program), _Factor(self._usual(program)))
        self._seen += stretch.share
        own.variance, own.last_seen = self._variance(own), self._seen
        moment = self._moment
        moment.variance = min(moment.variance + MOMENT_DRIFT**2 * stretch.share, UNKNOWN**2)
        switch = self._switch
        switch.variance = min(switch.variance + OWN_DRIFT**2, UNKNOWN**2)
        # of the mean step: only the first one comes behind another program
        shares = [(moment, 1.0), (own, 1.0), (switch, stretch.is_switch / stretch.num_steps)]
        expected = sum(share * factor.mean for factor, share in shares)
        took = stretch.seconds / stretch.num_steps / self.measured[program]
        usual = self.measured[program] * math.exp(expected) * stretch.num_steps
        noise = STEP_NOISE**2 + (READ_NOISE / usual) ** 2
        variance = sum(share**2 * factor.variance for factor, share in shares) + noise
        is_new = own.variance > UNKNOWN**2 / 2
        if is_new and abs(math.log(took) - expected) > FAR_SIGMAS * math.sqrt(noise):
            variance += max(0.0, own.variance - moment.variance)
            moment.variance = max(moment.variance, own.variance)
        bound = MOST_SIGMAS * math.sqrt(variance)
        surprise = min(max(math.log(took) - expected, -bound), bound)
        for factor, share in shares:
            gain = share * factor.variance / variance
            factor.mean += gain * surprise
            factor.variance *= 1.0 - share * gain

    def _variance(self, own: _Factor) -> float:
        """Return the variance of a way's own factor now, which has drifted since its last step."""
        return min(own.variance + OWN_DRIFT**2 * (self._seen - own.last_seen), UNKNOWN**2)

    def _usual(self, program: StepProgram) -> float:
        """Return the logarithm of the factor that is expected of a step that has not run in service: the mean of
        similar steps where they were faster than measured, or half of it where they were slower, so that the step is
        tried before one that has proved expensive. Similar steps are those of the same kind, plain or speculative, or
        else all."""
        seen = {other: factor.mean for (size, other, _), factor in self._own.items() if size == program.batch}
        is_plain = program.tree is None
        alike = [mean for other, mean in seen.items() if (other is None) == is_plain] or [*seen.values()] or [0.0]
        mean = sum(alike) / len(alike)
        return min(mean, 0.5 * mean)


def _way(program: StepProgram) -> _Way:
    return program.batch, program.tree, program.is_alone
