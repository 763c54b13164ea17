"""The chi-square tests of `specserve verify`: right draws fall evenly, and their number finds what it is said to."""

import numpy as np
from scipy.stats import chi2, ncx2

from specserve.eval.verify.draws import (
    COUNTED_TOKENS,
    FOUND_DISTANCE,
    MOST_TESTS,
    NUM_BINS,
    NUM_DRAWS,
    POWER,
    cells_of,
    chi_square,
    num_answers,
    places,
)
from specserve.eval.verify.report import FALSE_ALARMS

LIMIT = FALSE_ALARMS / MOST_TESTS


def test_the_number_of_draws_is_the_least_with_the_power_that_is_claimed() -> None:
    def power(num_draws: int) -> float:
        noncentrality = 4 * num_draws * FOUND_DISTANCE**2
        return float(ncx2.sf(chi2.isf(LIMIT, NUM_BINS - 1), NUM_BINS - 1, noncentrality))

    assert num_answers(NUM_DRAWS) * COUNTED_TOKENS == NUM_DRAWS
    assert power(NUM_DRAWS - COUNTED_TOKENS) < POWER <= power(NUM_DRAWS)


def test_wrong_draws_are_found_and_right_ones_pass() -> None:
    """Wrong ones are those that are hardest to find at that distance: half of the bins get too much, evenly."""
    rng = np.random.default_rng(0)
    right = rng.random((200, NUM_DRAWS))
    is_moved = rng.random(right.shape) < 2 * FOUND_DISTANCE  # to the first half, where a half of them is anyway
    wrong = np.where(is_moved, right / 2, right)
    p_values = [[chi_square("", "", row).p_value for row in rows] for rows in (right, wrong)]
    found = [sum(p < LIMIT for p in of_kind) for of_kind in p_values]
    assert found[0] == 0
    assert found[1] >= 200 * POWER - 4 * np.sqrt(200 * POWER * (1 - POWER))


def test_tokens_tile_the_cumulative_distribution() -> None:
    """Most likely first, equals in the order of their ids; so right draws fall evenly."""
    rng = np.random.default_rng(1)
    probs = rng.dirichlet(np.full(40, 0.3))
    probs[[3, 30]] = probs[[3, 30]].mean()
    cells = cells_of(np.tile(probs, (40, 1)), range(40))
    order = np.lexsort((np.arange(40), -probs))
    assert order.tolist() == np.argsort(cells[:, 0], kind="stable").tolist()
    np.testing.assert_allclose(cells[order, 0], np.concatenate([[0], np.cumsum(probs[order])[:-1]]), atol=1e-12)
    np.testing.assert_array_equal(cells[:, 1], probs)
    drawn = rng.choice(40, NUM_DRAWS, p=probs)
    assert chi_square("", "", places(cells[drawn])).p_value > 1e-3
    assert chi_square("", "", places(cells[rng.choice(40, NUM_DRAWS, p=np.sort(probs))])).p_value < LIMIT
