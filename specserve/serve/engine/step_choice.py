"""The choice of the next step: which compiled program, and how many steps of it at once."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from specserve.drafters.speculation import describe
from specserve.serve.engine.sequence import Round, Sequence
from specserve.serve.programs import program_list
from specserve.serve.programs.runner import PromptPart, Runner
from specserve.speculative.controller import Controller, Estimate
from specserve.speculative.costs import within_burst
from specserve.speculative.program import StepProgram
from specserve.speculative.slot_state import StepResult
from specserve.speculative.tree import Tree, depth_of

logger = logging.getLogger(__name__)

_RATE = 0.2  # how fast what a step takes is followed


class Bursts:
    """The number of steps that are dispatched at once, by the seconds of steps in service.

    Whatever the host does for a call of a program (arguments, dispatch, reading the result) it does once for all steps
    of the call, and beside a step of two milliseconds that is much. But no token is handed out before the call is over.
    A request that comes meanwhile waits for it, and for the one that is dispatched behind it. So a burst is as many
    steps as end within BURST_SECONDS (`costs.within_burst`).
    """

    def __init__(self, expected: Callable[[StepProgram], float | None] = lambda _program: None) -> None:
        """`expected` gives the seconds of a step that has not been seen yet; None: nothing is known."""
        self._seconds: dict[StepProgram, float] = {}
        self._expected = expected

    def observe(self, program: StepProgram, seconds: float) -> None:
        """Learn that a step took so many seconds."""
        known = self._seconds.get(program, seconds)
        self._seconds[program] = known + _RATE * (seconds - known)

    def num_steps(self, program: StepProgram, most: int) -> int:
        """Return how many such steps to dispatch at once: 1 to `most`, and 1 where nothing is known of them."""
        seconds = self._seconds.get(program) or self._expected(program)
        return 1 if seconds is None else within_burst(seconds, most)


class StepChoice:
    """Chooses steps for the sequences that decode, by what the operator and the controller want, out of the programs
    that are compiled."""

    def __init__(self, runner: Runner, controller: Controller | None, *, is_partial: bool) -> None:
        """Without a controller every step is over the first of the runner's trees."""
        self.controller = controller or Controller({})
        self.is_choosing = controller is not None
        self.only: tuple[Tree | None] | None = None  # the one tree that the operator wants; None: any
        self.is_partial = is_partial  # not every program is compiled, so that steps are made of those that are
        self._runner, self._bursts = runner, Bursts(self._expected_seconds)
        self._prior: Seq[float] | None = None  # acceptance by depth of a head that took the first one's place
        self._num_tokens = self._plain_tokens = (
            0.0  # tokens that steps were expected to emit, and plain ones in their time
        )

    def complete(self, controller: Controller | None, *, is_partial: bool) -> None:
        """Note that every program is compiled, or has failed to compile; then steps are still made of those that are
        there. The controller is one that knows what the steps cost."""
        if controller is not None:
            controller.calibration, self.controller = self.controller.calibration, controller
        self.is_partial = is_partial
        if self._prior is not None:  # the controller was made of what the first head promises
            self.controller.expect(self._prior)

    def use(self, runner: Runner, prior: Seq[float] | None) -> None:
        """Go on with a runner of other weights. `prior` is the acceptance by depth of another head; None: what has been
        learnt of the one before holds."""
        self._runner = runner
        if prior is None:
            self.controller.retract()
            return
        self._bursts, self._prior = Bursts(self._expected_seconds), prior
        if self.only and self.only[0] not in runner.shapes.trees:
            logger.warning("the new head has no programs for %s: the server's own choice holds", describe(*self.only))
            self.only = None
        self.controller.expect(prior)

    def step_only(self, *tree: Tree | None) -> None:
        """Make every step over this tree from now on (None: plainly); without one, as the server chooses."""
        self.only = (tree[0],) if tree else None

    @property
    def leaves_draft(self) -> bool:
        """Return whether the draft need not read the prompts that the target runs: speculation is far from paying, and
        no look at it is due."""
        return not self._keeps_up(is_following=self.controller.follows_prompts)

    @property
    def reads(self) -> bool:
        """Return whether the draft reads what it has not before a prompt that it follows, and not for a look."""
        return self._keeps_up(is_following=self.controller.is_following)

    def _keeps_up(self, *, is_following: bool) -> bool:
        """Return whether the draft keeps up with the target, where the controller has it follow or not."""
        only = self.only  # other threads set it
        if only is not None and self._runner.shapes.has_alone:
            return only[0] is not None
        return not self.is_choosing or is_following

    def is_following(self, slots: Seq[int], num_steps: int = 1) -> bool:
        """Return whether the draft is to keep up with so many plain steps of these slots. The programs by which it
        would, and would catch up before them, may be missing."""
        if self.is_partial or not self._keeps_up(is_following=self.controller.is_following):
            return False
        step = self._choices(slots)[0]
        followed = self._runner.ready_step(StepProgram(step.batch, step.width))
        if self._runner.shapes.has_alone and not self._are_here((followed,)):
            return False
        program = self._runner.catch_up_before(slots, None, num_steps)
        return program is None or self._are_ready((program,))

    def keeps_up(self, program: StepProgram, slots: Seq[int], num_steps: int) -> bool:
        """Return whether the draft keeps up with so many of these steps, which `choose` has chosen."""
        if self._runner.shapes.has_alone:
            return not program.is_alone
        return self.is_following(slots, num_steps)

    @property
    def estimated_speedup(self) -> float:
        """The tokens that steps were expected to emit, over those of plain steps in the same time."""
        return self._num_tokens / self._plain_tokens if self._plain_tokens else 1.0

    def estimate(self, sequence: Sequence) -> Estimate:
        """Return how the sequence accepts draft tokens. At its first admission that is what is known of the drafter by
        then."""
        if sequence.estimate is None:
            sequence.estimate = self.controller.start(sequence.request.params.speculation)
        return sequence.estimate

    def promise(self, sequence: Sequence) -> float:
        """Return how many draft tokens of the deepest tree the sequence is expected to accept."""
        return self.controller.promise(self.estimate(sequence), max(self._runner.shapes.trees, key=depth_of))

    def choose(
        self, decode: Seq[Sequence], slots: Seq[int], work: Round, num_unread: int, num_unseen: int
    ) -> tuple[StepProgram, int]:
        """Return the next step of these sequences, and how many of them to make at once in this round. The draft has so
        many of their tokens to read before it can propose, and so many speculative steps are on their way."""
        followed = min(work.most_steps, self._runner.most_followed)
        program = self._program(decode, self._choices(slots), num_unread, num_unseen)
        program = self._followed(program, slots, followed)
        most = min(work.num_steps(1 + depth_of(program.tree)), self._runner.most_steps(program))
        num_steps = self._bursts.num_steps(program, most)
        return program, self._runner.bounds.num_alike(slots, program.tree, num_steps)

    def stepped(self, decode: Seq[Sequence], program: StepProgram, num_steps: int, num_read: int) -> None:
        """Note that so many steps of these sequences are made, before which the draft has read so many tokens."""
        if self.is_choosing and self.only is None:
            self.controller.stepped(program, num_steps, len(decode), num_read)
            plain = tokens = float(num_steps * len(decode))
            if program.tree is not None:
                estimates = [self.estimate(sequence) for sequence in decode]
                tokens = num_steps * self.controller.expected_tokens(estimates, program.tree)
                plain = tokens / max(self.controller.speedup(estimates, program), 1e-9)
            self._num_tokens += tokens
            self._plain_tokens += plain

    def _followed(self, program: StepProgram, slots: Seq[int], most_steps: int = 1) -> StepProgram:
        """Return the plain step that the draft follows in place of the target's alone, where it is to keep up."""
        is_followed = program.is_alone and self.is_following(slots, most_steps)
        return dataclasses.replace(program, is_alone=False) if is_followed else program

    def _expected_seconds(self, program: StepProgram) -> float | None:
        return self.controller.seconds(program)

    def _choices(self, slots: Seq[int]) -> Seq[StepProgram]:
        shapes = self._runner.shapes
        size = next(size for size in shapes.step_sizes if size >= shapes.batches.least_size(slots))
        return shapes.step_programs[size, self._runner.bounds.width_of(slots)]

    def _program(
        self, decode: Seq[Sequence], choices: Seq[StepProgram], num_unread: int = 0, num_unseen: int = 0
    ) -> StepProgram:
        """Return the best of the choices, or of those that are here: a program that is missing is compiled or read from
        its file meanwhile."""
        runner = self._runner
        if self.is_partial:  # each of them is worth compiling
            runner.compiled.require(itertools.chain(*(program_list.needed(runner, each) for each in choices)))
        else:
            best = self._best(decode, choices, num_unread, num_unseen)
            if self._are_ready(program_list.needed(runner, best)) and self._can_read(best, num_unread):
                return best
        plain = runner.shapes.step(choices[0].batch, choices[0].width, runner.shapes.plain)
        ready = [
            each for each in choices if program_list.is_compiled(runner, each) and self._can_read(each, num_unread)
        ]
        if plain not in ready and (self.is_choosing or not ready):
            return runner.ready_step(plain)  # a larger one
        return self._best(decode, ready, num_unread, num_unseen)

    def _can_read(self, program: StepProgram, num_unread: int) -> bool:
        """Return whether the draft can read so many tokens before such a step, which it need not before a plain one."""
        if program.tree is None or not num_unread:
            return True
        readings = list(self._runner.shapes.readings())
        return self._are_here(readings) or any(each in self._runner.compiled for each in readings)

    def _are_here(self, programs: Iterable[StepProgram]) -> bool:
        """Return whether all of these programs are here. Those that are not are required from now on."""
        away = [program for program in programs if program not in self._runner.compiled]
        self._runner.compiled.require(away)
        return not away

    def _are_ready(self, programs: Seq[StepProgram]) -> bool:
        """Return whether none of these programs is away or lost. One that is away is required from now on."""
        away = list(filter(self._runner.compiled.is_away, programs))
        self._runner.compiled.require(away)
        return not away and not any(map(self._runner.compiled.is_lost, programs))

    def _best(self, decode: Seq[Sequence], choices: Seq[StepProgram], num_unread: int, num_unseen: int) -> StepProgram:
        shapes = self._runner.shapes
        plain = shapes.step(choices[0].batch, choices[0].width, shapes.plain)
        only = self.only  # other threads set it
        if only is not None:  # large batches are stepped plainly, where its programs are not compiled for them
            return next((each for each in choices if each.tree == only[0]), plain)
        if not self.is_choosing:
            return choices[0]
        return self.controller.choose([self.estimate(each) for each in decode], choices, num_unread, num_unseen)

    def choose_constrained(self, decode: Seq[Sequence], slots: Seq[int], num_unread: int) -> StepProgram:
        """Return the next step of sequences of which some have token masks."""
        sizes, shapes = self._choices(slots)[0], self._runner.shapes
        made = shapes.made(sizes).batch
        tree = shapes.only_tree(made)
        plain, speculative = (shapes.step(sizes.batch, sizes.width, each) for each in (None, tree))
        if tree is None or None not in shapes.trees:
            return self._followed(speculative, slots)
        needed = *program_list.needed(self._runner, speculative)[:-1], *shapes.constrained_step(made, tree)
        chosen = plain
        if self.only != (None,) and self._are_here(needed) and not self.is_partial:
            chosen = speculative
            if self.is_choosing:
                estimates = [self.estimate(sequence) for sequence in decode]
                chosen = self.controller.choose(estimates, (plain, speculative), num_unread)
        if chosen.tree is None or not self._can_read(chosen, num_unread):
            return self._followed(self._runner.ready_step(plain), slots)
        return chosen

    def choose_beside(self, decode: Seq[Sequence], slots: Seq[int], parts: Seq[PromptPart]) -> StepProgram | None:
        """Return the program that makes the next step of these sequences and prefills these parts of other prompts;
        None: none is compiled for what is chosen."""
        shapes = self._runner.shapes
        if not shapes.is_mixing:
            return None
        program = self._program(decode, self._choices(slots))
        tree = program.tree
        if self.only is None and tree != shapes.plain:
            tree = shapes.only_tree(program.batch)
        return self._runner.mixed_program(slots, tree, parts)

    def observe_seconds(
        self, program: StepProgram, seconds: float, num_steps: int, *, is_switch: bool, is_exact: bool
    ) -> None:
        """Learn that each of so many steps of one call took so many seconds in service, and whether they came behind
        one of another program. Unless the time `is_exact`, it counts only where nothing better is known."""
        if not is_exact and self.controller.has_seen(program):
            return
        self.controller.observe_seconds(program, seconds, num_steps, is_switch=is_switch)
        self._bursts.observe(program, seconds)

    def observe(self, tree: Tree | None, steps: Seq[StepResult], awaited: Seq[Mapping[int, Sequence]]) -> None:
        """Learn what the steps of one call accepted of the sequences in their rows, of each up to the step within which
        its answer ended: those that were awaited by each step."""
        if tree is None or not steps or not awaited[0] or self._runner.shapes.accepts_nothing:
            return
        rows, estimates = [*awaited[0]], [self.estimate(sequence) for sequence in awaited[0].values()]
        n_accepted = np.stack([each.n_accepted[rows] for each in steps])
        for i, still in enumerate(awaited):
            if len(still) < len(rows):
                n_accepted[i, [row not in still for row in rows]] = -1
        confidence = [each.confidence[rows] for each in steps if each.confidence is not None]
        self.controller.observe(estimates, tree, n_accepted, np.stack(confidence) if confidence else None)
