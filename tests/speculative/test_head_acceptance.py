"""Acceptance as it is in service: in phases, whose lengths nobody knows."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from specserve.speculative.controller import Controller, Estimate
from specserve.speculative.head_acceptance import FIRST_VARIANCE, MAX_DEPTH, REVERSION, HeadAcceptance
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import DynamicTree, Tree, chain, depth_of

PROGRAMS = [StepProgram(1, 8), *[StepProgram(1, 8, chain(depth)) for depth in range(1, 8)]]
COSTS = dict(zip(PROGRAMS, (1.59, 1.92, 2.18, 2.37, 2.6, 2.86, 3.2, 3.5), strict=True))  # as on an Intel Xeon, ms
LENGTH = 96  # tokens of an answer
PHASE = 15  # steps in the mean

Choice = Callable[[Controller, Estimate], StepProgram]


def _tokens_per_ms(choose: Choice, phases: tuple[list[float], list[float]], seed: int) -> float:
    """Serve answers whose steps are accepted as in one phase or the other: at each depth with these rates, the last one
    from there on."""
    rng, controller, milliseconds, tokens = np.random.default_rng(seed), Controller(COSTS, (0.6, 0.75)), 0.0, 0
    for _ in range(50):
        estimate, phase, left = controller.start(None), int(rng.integers(2)), LENGTH
        while left > 0:
            program, number = choose(controller, estimate), 0
            phase ^= int(rng.random() < 1 / PHASE)
            if tree := program.tree:
                rates = [phases[phase][min(depth, len(phases[phase]) - 1)] for depth in range(tree.depth)]
                number = int(np.cumprod(rng.random(tree.depth) < rates).sum())
                controller.observe([estimate], tree, np.array([[number]]))
            milliseconds += COSTS[program]
            tokens, left = tokens + 1 + number, left - 1 - number
    return tokens / milliseconds


@pytest.mark.parametrize("phases", [([0.2, 0.5], [0.8]), ([0.1, 0.5], [0.6, 0.7])], ids=str)
def test_acceptance_that_comes_in_phases_is_followed_as_long_as_they_last(
    phases: tuple[list[float], list[float]],
) -> None:
    """That is worth more than any one chain. Estimates that do not go back take too deep a chain after a good phase,
    and plain steps to the end of the answer after a bad one."""

    def always(program: StepProgram) -> Choice:
        return lambda _controller, _estimate: program

    def mean(choose: Choice) -> float:
        return float(np.mean([_tokens_per_ms(choose, phases, seed) for seed in range(2)]))

    best = max(mean(always(program)) for program in PROGRAMS[1:5])
    assert mean(lambda controller, estimate: controller.choose([estimate], PROGRAMS)) > 1.01 * best


def test_a_sequence_left_to_plain_steps_is_tried_again_before_it_ends() -> None:
    """Nothing is seen of it meanwhile, and what was seen says less and less."""
    controller = Controller(COSTS, (0.7, 0.7))
    estimate = controller.start(None)
    while (tree := controller.choose([estimate], PROGRAMS).tree) is not None:
        controller.observe([estimate], tree, np.array([[0]]))
    for _ in range(PHASE):
        controller.choose([estimate], PROGRAMS)
    assert controller.choose([estimate], PROGRAMS).tree is not None


def test_what_is_known_of_a_head_is_the_mean_of_what_was_seen() -> None:
    """Its evaluation counts as some observations, and what was seen long ago is worth less than what is new."""
    head, seen = HeadAcceptance((0.5,)), np.random.default_rng(0).random(400) < 0.9

    def see(is_accepted: np.ndarray) -> None:
        for each in is_accepted:
            head.learn(each - head.rates, np.ones(MAX_DEPTH, int))

    see(seen)
    worth = 1 / FIRST_VARIANCE
    np.testing.assert_allclose(head.rates, (worth * 0.5 + seen.sum()) / (worth + len(seen)))
    together = HeadAcceptance((0.5,))
    together.learn(seen.sum() - len(seen) * together.rates, np.full(MAX_DEPTH, len(seen)))
    np.testing.assert_allclose(head.rates, together.rates)
    learned = head.rates
    see(~seen[:50])
    assert (head.rates > learned - 0.1).all(), "there is much that says otherwise"
    head.steps_passed(10**6)
    see(~seen[:50])
    assert (head.rates < 0.5).all(), "that was long ago"


@pytest.mark.parametrize("tree", [chain(1), chain(5), DynamicTree(4, 2, 7)], ids=str)
def test_steps_of_one_call_are_learned_from_as_if_they_came_one_by_one(tree: Tree) -> None:
    """Each sequence goes back to what is known of the head before the call, which moves little meanwhile."""
    rng, bounds, num_steps = np.random.default_rng(0), (None, None, 2), 7
    n_accepted = rng.integers(0, tree.depth + 1, (num_steps, len(bounds)))
    n_accepted[4:, 1] = -1  # its answer has ended
    together, one_by_one = (Controller({}, (0.6, 0.5)) for _ in range(2))
    own, others = ([each.start(bound) for bound in bounds] for each in (together, one_by_one))
    together.observe(own, tree, n_accepted)
    before, moved = one_by_one.start(None).accept_rate, 0.0
    for numbers in n_accepted:
        going = numbers >= 0
        one_by_one.observe(list(itertools.compress(others, going)), tree, numbers[going][None])
        moved = max(moved, np.abs(one_by_one.start(None).accept_rate - before).max())
    for one, other in zip(own, others, strict=True):
        np.testing.assert_allclose(one.accept_rate, other.accept_rate, atol=num_steps * REVERSION * moved)
    assert together.expected_tokens(own, tree) == pytest.approx(one_by_one.expected_tokens(others, tree), rel=0.05)


@pytest.mark.parametrize("rate", [0.95, 0.1], ids=str)
def test_a_phase_may_be_over_when_the_steps_that_are_on_their_way_are_made(rate: float) -> None:
    """The more of them there are, the more does the next step follow what is known of the head."""

    def depth(rate: float, num_unseen: int = 0) -> int:
        controller = Controller(COSTS, (0.6,))
        estimate = Estimate(np.full(MAX_DEPTH, rate))
        return depth_of(controller.choose([estimate], PROGRAMS, num_unseen=num_unseen).tree)

    depths, usual = [depth(rate, number) for number in (0, 2, 4, 8, 16, 64)], depth(0.6)
    assert depths == sorted(depths, reverse=rate > 0.6)
    assert depths[0] != depths[-1] == usual
    assert len(set(depths)) > 2, "it goes back step by step"
