"""The account of what an engine's seconds were spent on."""

import pytest
from account import FEW, Account, lost_to_ways


def _account(**ways: tuple[float, int, int]) -> Account:
    found = Account()
    for way, (seconds, number, tokens) in ways.items():
        name = " 8 sequences, " + way if way != "prompts" else way
        found.seconds[name], found.numbers[name], found.tokens[name] = seconds, number, tokens
    return found


def test_a_choice_costs_what_the_quickest_way_would_have_saved() -> None:
    """Of steps alone, and a way that was tried for a few steps is no measure of the others."""
    off = _account(off=(2.0, 100, 800), prompts=(5.0, 9, 9))
    own = _account(off=(1.0, 40, 320), chain=(1.5, 150, 1200), luck=(0.01, FEW - 1, 100), prompts=(5.0, 9, 9))
    lost = lost_to_ways({"off": off, "auto": own})
    assert lost["off"] == pytest.approx(2.0 - 800 / 800)
    assert lost["auto"] == pytest.approx(1.0 - 320 / 800)
