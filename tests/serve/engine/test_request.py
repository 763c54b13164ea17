"""Sampling options are checked where they are made."""

import dataclasses
import math

import pytest
from ranges import OUTSIDE

from specserve.errors import RequestError
from specserve.serve.requests.request import SamplingParams

NUMBERS = {name: values for name, values in OUTSIDE.items() if values}


def test_every_number_has_a_range() -> None:
    assert {"n", "temperature", "top_p", "top_k", "seed", "speculation", "logprobs"} < NUMBERS.keys()


@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_out_of_range_names_its_field(field: str) -> None:
    for value in (*NUMBERS[field], math.nan, math.inf, -math.inf):
        with pytest.raises(RequestError, match=f"^{field} should be .*, got") as caught:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 65),
        ("bad_words", ["x" * 1025]),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", range(1025)),
    ],
)
def test_a_list_out_of_bounds_names_its_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert field in str(caught.value)


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(RequestError, match="min_tokens should be at most max_tokens, 4, got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_choice_i_has_seed_plus_i_and_seeds_wrap() -> None:
    params = SamplingParams(n=3, seed=2**63 - 2, logit_bias={5: 1.0}, stop="x")
    choices = params.choices()
    assert [choice.seed for choice in choices] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert {choice.n for choice in choices} == {1}
    assert all(dataclasses.replace(choice, n=3, seed=params.seed) == params for choice in choices)
    assert [choice.seed for choice in SamplingParams(n=2).choices()] == [None, None]


def test_tiny_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=1e-30).temperature == 0.0
    assert SamplingParams(temperature=0.01).temperature == 0.01
