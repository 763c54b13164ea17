"""Sampling options are checked where they are made."""

import dataclasses
import math

import pytest

from specserve.errors import RequestError
from specserve.serve.request import SamplingParams


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
        ("presence_penalty", -2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 65),
        ("bad_words", ["x" * 1025]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("speculation", -1),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 129),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", range(1025)),
    ],
)
def test_out_of_range_names_the_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert field in str(caught.value)


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(RequestError, match=r"min_tokens must be in \[0, 4\], got 5"):
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
