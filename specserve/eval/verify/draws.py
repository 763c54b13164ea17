"""Chi-square tests of whether tokens are drawn as often as the target's softmax says, and how many draws they take.

A draw is placed where its token falls in the cumulative distribution at its own prefix, the most likely first, at
random within its own share. Right draws fall evenly over [0, 1] and independently of each other, whatever the
distributions are (Rosenblatt, Remarks on a multivariate transformation, Ann. Math. Stat. 23, 1952), so draws after
different prefixes, and several of one answer, are counted in the same NUM_BINS bins.

**How many draws.** Let wrong draws fall into the bins with probabilities p instead of 1 / b, b being the number of
bins. Then the statistic of n draws follows a noncentral chi-square law with b - 1 degrees of freedom and the
noncentrality n * sum((p - 1 / b) ** 2 * b), which is at least 4 * n * d ** 2 (Cauchy and Schwarz), where d is the total
variation distance between p and the even distribution. A test that fails below the p-value a, which a fault of the
distance d is to fail with the power w, so takes n draws with `ncx2.sf(chi2.isf(a, b - 1), b - 1, 4 * n * d ** 2) = w`.
For d = 0.2, w = 0.99, 16 bins, and a the share of one of 20 tests in `verify_report.FALSE_ALARMS` (5e-6), n is 470:
`NUM_DRAWS` is the next number that whole answers give. First tokens, which the program of the prompt draws, have a test
of their own. A way to speculate that is off by less is found by its tokens: every draw is compared with plain
decoding's of the same seed, too.
"""

from collections.abc import Sequence

import numpy as np

from specserve.eval.verify.report import Test

NUM_BINS = 16  # few enough that each expects dozens of draws
FOUND_DISTANCE, POWER, MOST_TESTS = 0.2, 0.99, 20  # NUM_DRAWS follows from them
COUNTED_TOKENS = 8  # of each answer, so that steps of the deepest chains are whole; its first token is not counted
NUM_DRAWS = 472  # draws of each test


def num_answers(num_draws: int) -> int:
    """Return how many answers have `num_draws` counted tokens together."""
    return -(-num_draws // COUNTED_TOKENS)


def places(
    cells: np.ndarray,  # [draw, 2] float64: the probability of all likelier tokens, and that of the token itself
) -> np.ndarray:  # [draw]
    """Return where draws fall in the cumulative distribution at their prefix, in [0, 1]."""
    return cells[:, 0] + np.random.default_rng(0).random(len(cells)) * cells[:, 1]


def cells_of(probs: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:  # [n, 2] float64
    """Return for each of these tokens the probability of all likelier tokens, and its own, in its row of `probs` [n,
    vocab]."""
    ids = np.array(token_ids)[:, None]  # [n, 1]
    own = np.take_along_axis(probs, ids, axis=-1)
    is_before = (probs > own) | ((probs == own) & (np.arange(probs.shape[-1]) < ids))
    return np.stack([(probs * is_before).sum(axis=-1), own[:, 0]], axis=-1)


def chi_square(way: str, what: str, places: np.ndarray) -> Test:
    """Test draws that fell at these places."""
    from scipy.stats import chi2  # takes a third of a second to import

    counts, _ = np.histogram(places, NUM_BINS, (0.0, 1.0 + 1e-6))
    expected = places.size / NUM_BINS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    found = f"{places.size} draws, chi-square {statistic:.1f} of {NUM_BINS - 1} degrees"
    return Test(way, f"distribution of {what}", found, float(chi2.sf(statistic, NUM_BINS - 1)))
