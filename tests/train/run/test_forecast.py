"""The forecast's laws, on curves whose future is known."""

import numpy as np
import pytest

from specserve.train.run.forecast import Range, fit

LONGEST = 4.0


def _law(n: np.ndarray, exponent: float = 0.5) -> np.ndarray:
    return 2.5 - 1.2 * (n / 1000) ** -exponent


@pytest.mark.parametrize("exponent", [0.2, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("spacing", [np.linspace, np.geomspace])
def test_an_exact_curve_is_found(exponent: float, spacing) -> None:
    n = spacing(2000, 20_000, 8)
    found = fit(n, _law(n, exponent), LONGEST)
    assert found is not None
    for ahead in (40_000, 200_000):
        # exponents are tried on a grid: to a hundredth, a tenth of what an interval may be wide
        assert found.at(ahead).expected == pytest.approx(_law(np.array(ahead), exponent), abs=0.01)
        assert found.at(ahead).high - found.at(ahead).low < 0.1


def test_nine_intervals_in_ten_hold_the_truth_and_widen_ahead() -> None:
    rng = np.random.default_rng(0)
    held: list[bool] = []
    for noise in (0.01, 0.03):
        for count in (4, 6, 12):
            n = np.linspace(2000, 20_000, count)
            for _ in range(40):
                found = fit(n, _law(n) + rng.normal(0, noise, count), LONGEST)
                assert found is not None
                ranges = [found.at(ahead) for ahead in (20_000, 40_000, 200_000)]
                assert all(r.low <= r.expected <= r.high for r in ranges)
                held += [
                    r.low <= _law(np.array(ahead)) <= r.high for r, ahead in zip(ranges[1:], (4e4, 2e5), strict=True)
                ]
    assert np.mean(held) > 0.85
    near, far = ranges[0], ranges[-1]
    assert far.high - far.low > near.high - near.low


def test_one_wild_measurement_moves_the_forecast_little() -> None:
    n = np.linspace(2000, 20_000, 12)
    taus = _law(n) + np.random.default_rng(1).normal(0, 0.003, 12)
    calm = fit(n, taus, LONGEST)
    taus[8] -= 0.2
    wild = fit(n, taus, LONGEST)
    assert calm is not None
    assert wild is not None
    assert wild.at(40_000).expected == pytest.approx(calm.at(40_000).expected, abs=0.02)  # a tenth


def test_order_and_units_do_not_matter() -> None:
    n = np.linspace(2000, 20_000, 6)
    taus = _law(n) + np.random.default_rng(2).normal(0, 0.01, 6)
    found, shuffled, other = fit(n, taus, LONGEST), fit(n[::-1], taus[::-1], LONGEST), fit(n / 7, taus, LONGEST)
    assert found is not None
    assert shuffled is not None
    assert other is not None
    for same in (shuffled.at(40_000), other.at(40_000 / 7)):
        for name in Range.__dataclass_fields__:
            # float64's rounding, through a least-squares fit
            assert getattr(same, name) == pytest.approx(getattr(found.at(40_000), name), abs=1e-9)


def test_no_forecast_promises_more_than_a_step_holds() -> None:
    n = np.linspace(1000, 5000, 6)
    found = fit(n, 1 + n / 5000, LONGEST)  # still a straight line
    assert found is not None
    assert found.at(1e9).high <= LONGEST + 0.1


@pytest.mark.parametrize(
    "taus",
    [
        [1.5, 1.8, 2.0],  # too few
        [2.0] * 8,  # flat
        [2.0, 1.9, 1.8, 1.7, 1.6],  # falling
        [1.5, 2.0, 1.4, 2.1, 1.6, 1.5, 2.0],  # noise
    ],
)
def test_nothing_is_said_where_there_is_nothing_to_say(taus: list[float]) -> None:
    assert fit(np.arange(1, len(taus) + 1) * 1000.0, taus, LONGEST) is None


def test_points_at_one_place_are_one_point() -> None:
    assert fit([1000, 1000, 1000, 2000], [1.5, 1.5, 1.5, 1.8], LONGEST) is None
