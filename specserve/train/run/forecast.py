"""A forecast of what more data would bring: a saturating power law through the tau that was measured, and how sure
that is.

    tau(n) = a - b * n^-c,  b >= 0,  a <= the longest step

The form is that of learning curves in general (Hestness et al. 2017, arXiv 1712.00409, section 3; Kaplan et al. 2020,
arXiv 2001.08361, equation 1.2, for losses). It says what the same recipe would reach on more of the same data. A rate
that falls towards the end of a run lifts tau there, which the curve takes for data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_POINTS = 4  # three parameters, and one point to contradict them
MIN_EXPLAINED = 0.8  # share of the variance of tau; below it the curve says nothing
EXPONENTS = np.geomspace(0.05, 3.0, 60)
HUBER = 1.345  # residuals beyond so many standard deviations count linearly
ROUNDS = 4  # of reweighting
# Student's t, 95th percentile, by degrees of freedom from 1; the last for all above
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


@dataclass(frozen=True)
class Range:
    """A forecast of tau. Nine in ten of such intervals hold the truth where it is a power law under Gaussian noise."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class PowerLaw:
    """The curves that the points allow, one for each exponent."""

    limit: np.ndarray  # a, [curve]
    gain: np.ndarray  # b, [curve], at `unit` samples
    exponent: np.ndarray  # c, [curve]
    best: int
    unit: float  # samples at the last point
    noise: float  # standard deviation of the points about the best curve

    def at(self, num_samples: float) -> Range:
        """Forecast tau after so many samples in all."""
        taus = self.limit - self.gain * (num_samples / self.unit) ** -self.exponent
        return Range(float(taus[self.best]), float(taus.min() - self.noise), float(taus.max() + self.noise))


def fit(num_samples: Sequence[float], taus: Sequence[float], longest: float) -> PowerLaw | None:
    """Fit the curve to (samples, tau), in any order; no tau is above `longest`. The result is None where there is
    nothing to say: too few points, a tau that does not rise, or points that the curve does not explain.

    For each exponent the other two parameters are a linear fit with Huber's loss. A curve is allowed when its loss is
    within what an F test with the best one's noise lets pass (a profile likelihood, Bates and Watts 1988, section 6).
    """
    n, y = np.asarray(num_samples, float), np.asarray(taus, float)
    if len(np.unique(n)) < MIN_POINTS:
        return None
    unit = float(n.max())
    x = (n / unit) ** -EXPONENTS[:, None]  # [curve, point]
    limit, gain, residual, loss = _robust_fits(x, y, longest)
    best = int(np.argmin(loss))
    freedom = len(n) - 3
    squares = float(np.sum(residual[best] ** 2))
    if gain[best] <= 0 or squares > (1 - MIN_EXPLAINED) * np.sum((y - y.mean()) ** 2):
        return None
    variance = squares / freedom
    is_allowed = loss <= loss[best] + T_95[min(freedom, len(T_95)) - 1] ** 2 * variance
    kept = np.flatnonzero(is_allowed)
    return PowerLaw(limit[kept], gain[kept], EXPONENTS[kept], int(np.flatnonzero(kept == best)[0]), unit, variance**0.5)


def _robust_fits(
    x: np.ndarray,  # [curve, point]
    y: np.ndarray,  # [point]
    longest: float,
) -> tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray
]:  # limit, gain [curve], residual [curve, point], loss [curve]
    """Fit y = limit - gain * x for each curve, with Huber's loss, by reweighted least squares."""
    # the median's scale, corrected for the three parameters
    correction = 1.4826 * (len(y) / (len(y) - 3)) ** 0.5

    def measure(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Fit with these weights: limit, gain, residual, and beyond which size a residual counts linearly."""
        limit, gain = _weighted_fits(x, y, weight, longest)
        residual = y - (limit[:, None] - gain[:, None] * x)
        scale = correction * np.median(np.abs(residual), axis=1, keepdims=True)
        return limit, gain, residual, HUBER * np.maximum(scale, 1e-6)

    limit, gain, residual, edge = measure(np.ones_like(x))
    for _ in range(ROUNDS):
        limit, gain, residual, edge = measure(np.minimum(1.0, edge / np.maximum(np.abs(residual), 1e-12)))
    size = np.abs(residual)
    loss = np.where(size <= edge, size**2, 2 * edge * size - edge**2).sum(axis=1)
    return limit, gain, residual, loss


def _weighted_fits(
    x: np.ndarray, y: np.ndarray, weight: np.ndarray, longest: float
) -> tuple[np.ndarray, np.ndarray]:  # limit, gain [curve]
    """Fit each curve by weighted least squares with gain >= 0 and limit <= longest."""
    total = weight.sum(axis=1)
    x_mean, y_mean = (weight * x).sum(axis=1) / total, (weight * y).sum(axis=1) / total
    dx = x - x_mean[:, None]
    covariance = (weight * dx * (y - y_mean[:, None])).sum(axis=1)
    gain = np.maximum(-covariance / np.maximum((weight * dx**2).sum(axis=1), 1e-12), 0.0)
    limit = y_mean + gain * x_mean
    at_bound = (weight * x * (longest - y)).sum(axis=1) / (weight * x**2).sum(axis=1)
    return np.minimum(limit, longest), np.where(limit > longest, at_bound, gain)
