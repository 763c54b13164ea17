"""What rounding may do: the tolerance of every law whose two sides add float32 numbers in different orders.

A product alone has an a priori bound. Summed in whatever order, fused or not, k terms are off by at most
gamma_k = k u / (1 - k u) times the sum of their magnitudes, u being the unit roundoff (Higham, Accuracy and Stability
of Numerical Algorithms, 2nd ed., section 3.1).

Of whole programs the noise is measured. A computed product is the exact one of weights that are a little off, by about
sqrt(k) u where roundings are independent (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis,
SIAM J. Sci. Comput. 41, 2019). So a program runs again with its weights and inputs moved by that much at random, and
how far its results move is what its products' rounding can do to them, through norms, softmax and all (Parker, Monte
Carlo Arithmetic, 1997). It is the program and its fixture that say this, not the processor. What is chosen, a token or
an expert, may not move at all: a fixture on a near-tie proves nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from specserve.kernels.check import UNIT
from specserve.kernels.check import product_bound as of_product
from specserve.kernels.matmul import QuantizedMatrix
from specserve.kernels.panels import four_bits

__all__ = ["UNIT", "assert_same", "assert_within", "jittered", "magnitudes", "of_product", "tolerance"]

# Two programs differ by sqrt(2) of what one is off, and the largest of a million normal numbers lies at 5 deviations.
# Measured, over all families against transformers: 1.6.
TIMES = 8
DRAWS = 8  # their root mean square falls below a fifth of its limit with a chance of 3e-5 (chi-square of 8 degrees)
# Of a unit, by which numbers are moved before they are rounded. Many, since one direction may be most of a row's noise.
SHIFTS = tuple((np.arange(32) + 0.5) / 32 - 0.5)
SHARE = 1e-3  # of the values themselves: where a tolerance takes more, the fixture sits on an edge and proves nothing
# The same where numbers are rounded to 16 bits. Measured: up to 0.04 without another choice, 0.2 with one.
SHARE_OF_16_BITS = 5e-2


def magnitudes(weight: QuantizedMatrix) -> np.ndarray:  # [d_in, d_out]
    """The magnitudes of what a product adds up for each weight: its whole number times the scale, and the offset."""
    found = four_bits(np.asarray(weight.values), weight.block)
    shift = 0.0 if found is None or found.shift is None else found.shift
    scale = np.asarray(weight.scale)
    offset = shift * scale + (0.0 if weight.offset is None else np.asarray(weight.offset))
    shift = np.broadcast_to(shift, scale.shape)
    shift, scale, offset = (np.repeat(each, weight.block, axis=0)[: weight.shape[0]] for each in (shift, scale, offset))
    return np.abs((np.asarray(weight.values) - shift) * scale) + np.abs(offset)


def of_one_side(exact: Any, runs: Iterable[Any]) -> Any:
    """What a coarser rounding explains that one of two sides does, played in `runs` of another draw each: for each
    number, at least that of its row and of the whole array."""

    def spread(at: Any, *others: Any) -> np.ndarray:
        squares = _mean_squares(at, others)
        return TIMES * np.sqrt(np.maximum(squares, np.maximum(_rows(squares), squares.mean())))

    exact, *moved = jax.device_get([exact, *runs])
    return jax.tree.map(spread, exact, *moved)


def jittered(tree: Any, seed: int) -> Any:
    """The same arrays, each float32 number moved up or down by `TIMES` what a product with it rounds."""
    rng = np.random.default_rng(seed)

    def move(path: Any, leaf: Any) -> Any:
        if getattr(leaf, "dtype", None) != np.float32:
            return leaf
        is_summed = leaf.ndim > 1 and "embedding" not in jax.tree_util.keystr(path)  # of which rows are read
        share = TIMES * 2 * UNIT * (leaf.shape[-2] if is_summed else 1) ** 0.5
        moved = np.asarray(leaf, np.float64) * (1 + share * rng.choice([-1, 1], leaf.shape))
        place = leaf.sharding if getattr(leaf, "committed", False) else None  # so that nothing compiles again
        return jax.device_put(moved.astype(np.float32), place)

    return jax.tree_util.tree_map_with_path(move, tree)


def tolerance(run: Callable[..., Any], *args: Any) -> Any:
    """How far the results of run(*args) move with the arguments: root mean squares, for each row [..., 1], and at least
    that of the whole array, since numbers of a row that cancel leave the rounding of what they were before."""
    exact = jax.device_get(run(*args))
    moved = [jax.device_get(run(*jittered(args, seed))) for seed in range(DRAWS)]

    def spread(at: Any, *others: Any) -> np.ndarray:
        squares = _mean_squares(at, others)
        return np.sqrt(np.maximum(_rows(squares), squares.mean()))

    return jax.tree.map(spread, exact, *moved)


def _mean_squares(at: Any, others: Iterable[Any]) -> np.ndarray:
    return np.mean([np.square(np.asarray(each, np.float64) - at) for each in others], axis=0)


def _rows(squares: np.ndarray) -> np.ndarray:  # [..., 1]
    return squares.mean(axis=-1, keepdims=True) if squares.ndim else squares


def assert_within(got: Any, expected: Any, bound: Any, what: str = "") -> None:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    with np.errstate(invalid="ignore"):  # both may be infinite
        off = np.where(got == expected, 0, np.abs(got - expected))
    bound = np.broadcast_to(bound, off.shape)
    wrong = ~(off <= bound)
    if wrong.any():
        at = np.unravel_index(np.argmax(np.where(wrong, off - bound, -np.inf)), off.shape)
        reason = f"{got[at]} is not {expected[at]}: off by {off[at]:.2e}, rounding explains {bound[at]:.2e}"
        raise AssertionError(f"{what} at {[int(i) for i in at]}, one of {wrong.sum()}: {reason}")


def assert_same(got: Any, expected: Any, tolerance: Any, what: str = "") -> None:
    """Two trees of results that only rounding may make different. What is counted or chosen is equal, and must be so in
    spite of `TIMES` the rounding."""

    def check(path: Any, mine: Any, other: Any, own: Any) -> None:
        name, scale = f"{what}{jax.tree_util.keystr(path)}", np.sqrt(np.square(np.asarray(other, np.float64)).mean())
        share = SHARE if np.issubdtype(np.asarray(other).dtype, np.floating) else 0
        assert np.max(own) <= share * scale, f"{name}: {np.max(own):.1e} of {scale:.1e} is noise; choose another seed"
        assert_within(mine, other, own, name)

    jax.tree_util.tree_map_with_path(check, got, expected, tolerance)
