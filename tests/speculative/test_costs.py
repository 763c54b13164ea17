"""What is learned of the seconds of steps in service: of short steps as of long ones, and of each way apart."""

import numpy as np
import pytest

from specserve.speculative.costs import ServedCosts
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import chain

ALONE, FOLLOWED, CHAIN = StepProgram(1, 8, is_alone=True), StepProgram(1, 8), StepProgram(1, 8, chain(2))


def _take_turns(costs: ServedCosts, true: dict[StepProgram, float], num_steps: int, num_turns: int = 8) -> None:
    """Observe four calls of each way by turns, of so many steps each."""
    rng = np.random.default_rng(0)
    for _ in range(num_turns):
        for program, seconds in true.items():
            for noise in np.exp(0.1 * rng.standard_normal(4)):
                costs.observe(program, seconds * float(noise), num_steps)


@pytest.mark.parametrize("num_steps", [2, 40])
def test_as_much_is_learned_of_short_steps_as_of_long_ones_that_take_as_long_together(num_steps: int) -> None:
    """A machine that others use changes no more within the same seconds where steps are short."""
    found = []
    for number in (1, num_steps):
        measured, true = {ALONE: 0.03, CHAIN: 0.04}, {ALONE: 0.03, CHAIN: 0.06}
        costs = ServedCosts({program: seconds / number for program, seconds in measured.items()})
        _take_turns(costs, {program: seconds / number for program, seconds in true.items()}, number)
        found.append([number * costs.seconds(program) for program in measured])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[0][1] / found[0][0] == pytest.approx(2, rel=0.1), "it is the chain that takes longer than was measured"


def test_steps_of_the_target_alone_are_not_taken_for_those_that_the_draft_follows() -> None:
    """They were measured alike, over padding. In service the followed ones take a third longer, and while steps
    speculate only these are seen."""
    costs = ServedCosts({ALONE: 6e-4, FOLLOWED: 6e-4, CHAIN: 1.4e-3})
    _take_turns(costs, {ALONE: 6e-4, CHAIN: 1.4e-3}, 30)
    _take_turns(costs, {FOLLOWED: 8e-4, CHAIN: 1.4e-3}, 30)
    assert costs.seconds(ALONE) / costs.seconds(CHAIN) == pytest.approx(6 / 14, rel=0.1)
    assert costs.seconds(FOLLOWED) / costs.seconds(CHAIN) == pytest.approx(8 / 14, rel=0.1)


@pytest.mark.parametrize("times", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("was_seen", [False, True])
def test_steps_of_the_target_alone_take_no_longer_than_those_that_the_draft_follows(
    times: float, was_seen: bool
) -> None:
    """The cost of the first was measured on a busy machine. While steps speculate, looks at plain decoding are steps
    of the second."""
    costs = ServedCosts({ALONE: times * 6e-4, FOLLOWED: 6e-4, CHAIN: 1.4e-3})
    if was_seen:  # once, in a slow moment
        costs.observe(ALONE, 1.5 * times * 6e-4, 20)
    _take_turns(costs, {FOLLOWED: 6.5e-4, CHAIN: 1.4e-3}, 30)
    assert costs.seconds(ALONE) / costs.seconds(CHAIN) < 1.1 * 6.5 / 14


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("num_slow", [1, 2, 5, 20])
@pytest.mark.parametrize("num_after", [0, 1, 4])
def test_a_way_that_first_runs_in_a_slow_moment_does_not_seem_expensive(
    slower: float, num_slow: int, num_after: int
) -> None:
    """A larger batch comes while the machine is slow. Half of that is laid to its plain steps, and of this a half is
    expected of a chain which never ran: more would have the chain taken where it does not pay."""
    plain, tree = StepProgram(8, 8, is_alone=True), StepProgram(8, 8, chain(2))
    costs = ServedCosts({ALONE: 0.03, CHAIN: 0.04, plain: 0.04, tree: 0.1})
    _take_turns(costs, {ALONE: 0.03, CHAIN: 0.04}, 1)
    for number in range(num_slow + num_after):
        costs.observe(plain, 0.04 * (slower if number < num_slow else 1.0))
    assert costs.seconds(plain) / costs.seconds(tree) < 1.05 * slower**0.25 * 0.04 / 0.1
