"""A draft's own confidence in the choice of trees: what a true one brings, and that no false one costs anything."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specserve.speculative.confidence import MOST_TRUST, Surety
from specserve.speculative.controller import Controller, Estimate
from specserve.speculative.head_acceptance import MAX_DEPTH
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import DynamicTree, Tree, chain

WIDTH = 8
TREES: tuple[Tree | None, ...] = (None, *[chain(depth) for depth in range(1, 8)], DynamicTree(4, 2, 7))
EASY, HARD = 0.95, 0.15  # acceptance at every depth
STAY = 0.92  # of a dozen steps, one changes between the two
NUM_STEPS = 1500
Says = Callable[[np.random.Generator, float], float]  # log-odds of the confidence where that is the acceptance


def odds(rate: float) -> float:
    return float(np.log(rate / (1 - rate)))


def true(rng: np.random.Generator, rate: float) -> float:
    return odds(rate) + rng.normal(0, 1)


FALSE: dict[str, Says] = {
    "noise": lambda rng, _rate: rng.normal(0, 2),
    "the contrary": lambda rng, rate: -true(rng, rate),
    "always sure": lambda _rng, _rate: 12.0,
}


def _choose(controller: Controller, estimates: Sequence[Estimate], batch: int) -> Tree | None:
    return controller.choose(estimates, [StepProgram(batch, WIDTH, tree) for tree in TREES]).tree


def _costs(batch: int) -> dict:
    return {
        StepProgram(batch, WIDTH, tree): 1 + (0.05 * tree.depth + 0.06 * tree.num_nodes if tree else 0)
        for tree in TREES
    }


def _serve(controller: Controller, says: Says | None, batch: int, num_steps: int, seed: int) -> list[tuple]:
    """Acceptance of each row, chosen tree and expected tokens, step by step. What a step says is known two choices
    later, as rounds overlap."""
    rng, said, found = np.random.default_rng(seed), np.random.default_rng(seed + 1), []
    estimates = [controller.start(None) for _ in range(batch)]
    rates, before = [EASY] * batch, []
    for _ in range(num_steps):
        tree = _choose(controller, estimates, batch)
        for row, tree_before, n_accepted, confidence in before:
            said_of_it = None if confidence is None else confidence[None, None]
            controller.observe([estimates[row]], tree_before, np.array([[n_accepted]]), said_of_it)
        before, num_tokens = [], 0.0
        for row in range(batch):
            if rng.random() > STAY:
                rates[row] = HARD if rates[row] == EASY else EASY
            draws = rng.random((7, 2)) < rates[row]
            sure = 1 / (1 + np.exp(-np.array([says(said, rates[row]) for _ in range(7)]))) if says else None
            num_tokens += 1.0
            if tree is None:
                continue
            hits = draws[: tree.depth, : tree.top_k].any(axis=1)
            n_accepted = int(np.cumprod(hits).sum())
            num_tokens += np.cumprod([1 - (1 - rates[row]) ** tree.top_k] * tree.depth).sum()
            before.append((row, tree, n_accepted, None if sure is None else sure[: tree.depth].astype(np.float32)))
        found.append((tuple(rates), tree, num_tokens))
    return found


def _rate(found: Sequence[tuple], batch: int) -> float:
    return sum(tokens for *_, tokens in found) / sum(
        _costs(batch)[StepProgram(batch, WIDTH, tree)] for _, tree, _ in found
    )


def _depth(found: Sequence[tuple], rate: float) -> float:
    """Of the trees that were chosen while every row accepted so much."""
    return float(np.mean([tree.depth if tree else 0 for rates, tree, _ in found if set(rates) == {rate}]))


def test_sure_rows_get_deeper_trees() -> None:
    """And more tokens for the same time, than by what was accepted alone. It is as well if the confidence is always too
    high: what it usually is says nothing."""
    batch = 2
    without = _serve(Controller(_costs(batch)), None, batch, NUM_STEPS, seed=1)
    for says in (true, lambda rng, rate: true(rng, rate) + 3):
        controller = Controller(_costs(batch))
        found = _serve(controller, says, batch, NUM_STEPS, seed=1)
        assert controller.calibration.trust > 0.2
        gap = _depth(found, EASY) - _depth(found, HARD)
        assert gap > _depth(without, EASY) - _depth(without, HARD) + 1
        assert _rate(found, batch) > _rate(without, batch)


def test_plain_steps_leave_nothing_of_a_confidence() -> None:
    """It moves what a sequence is expected to accept now, and not what is known of it."""
    controller = Controller({StepProgram(1, WIDTH): 1.0, StepProgram(1, WIDTH, chain(2)): 9.0}, (0.5,))
    estimate, known = controller.start(None), controller.start(None).accept_rate
    controller.calibration.trust = 1.0
    estimate.surety = Surety(np.zeros(MAX_DEPTH), np.full(MAX_DEPTH, 2.0))
    for _ in range(7):  # no look yet
        assert _choose(controller, [estimate], 1) is None
    np.testing.assert_allclose(estimate.accept_rate, known)


@pytest.mark.parametrize("kind", FALSE)
def test_a_false_confidence_does_no_harm(kind: str) -> None:
    batch = 2
    without = _serve(Controller(_costs(batch)), None, batch, NUM_STEPS, seed=2)
    controller = Controller(_costs(batch))
    found = _serve(controller, FALSE[kind], batch, NUM_STEPS, seed=2)
    assert controller.calibration.trust < 0.2
    assert _rate(found, batch) > 0.97 * _rate(without, batch)


def test_what_was_promised_is_held_against_what_was_kept() -> None:
    """Over what was seen: up to the first rejection, and within the request's bound. Another head begins with no
    trust, and the counts go on."""
    controller = Controller({}, (0.5,))
    sure = np.array([0.9, 0.8, 0.7], np.float32)
    estimate, bounded = controller.start(None), controller.start(1)
    controller.observe([estimate], chain(3), np.array([[1]]), sure[None, None])
    controller.observe([bounded], chain(3), np.array([[1]]), sure[None, None])
    controller.observe([controller.start(0)], chain(3), np.array([[0]]), sure[None, None])
    controller.observe([controller.start(None)], chain(3), np.array([[3]]))
    calibration = controller.calibration
    assert (round(calibration.promised, 4), calibration.kept) == (0.9 + 0.8 + 0.9, 2)
    for _ in range(200):
        controller.observe([estimate], chain(3), np.array([[3]]), np.full((1, 1, 3), 0.99, np.float32))
        controller.observe([estimate], chain(3), np.array([[0]]), np.full((1, 1, 3), 0.01, np.float32))
    assert 0 <= calibration.trust <= MOST_TRUST
    counts = calibration.promised, calibration.kept
    controller.expect((0.3,))
    assert (calibration.trust, calibration.promised, calibration.kept) == (0.0, *counts)


def test_a_draft_that_is_not_asked_is_soon_as_sure_as_ever() -> None:
    controller = Controller({StepProgram(1, WIDTH, None): 1.0, StepProgram(1, WIDTH, chain(2)): 9.0}, (0.5,))
    estimate = controller.start(None)
    for confidence in (0.5, 0.01):
        controller.observe([estimate], chain(2), np.array([[0]]), np.full((1, 1, 2), confidence, np.float32))
    assert estimate.surety is not None
    off = estimate.surety.off[0]
    assert off < -1
    chosen = [_choose(controller, [estimate], 1) for _ in range(10)]
    assert chosen.count(None) == 9, "all but one look"
    assert abs(estimate.surety.off[0]) < 0.02 * abs(off)
