"""Sampling options are checked where they are made."""

import math

import pytest

from specserve.errors import RequestError
from specserve.serve.request import SamplingParams, SpeculationStats


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
    ],
)
def test_out_of_range_names_the_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.create(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert field in str(caught.value)


def test_tiny_temperatures_are_greedy() -> None:
    assert SamplingParams.create(temperature=1e-30).temperature == 0.0
    assert SamplingParams.create(temperature=0.01).temperature == 0.01


def test_tau_counts_the_bonus() -> None:
    assert SpeculationStats().tau == 1.0
    assert SpeculationStats(num_steps=10, num_draft_tokens=30, accepted_per_depth=(6, 3, 1)).tau == 2.0
