"""Laws of a budget: what is decided fits it, more time is never less work, and what was decided stays decided."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import tiny_run

from specserve.errors import CheckpointError, ConfigError
from specserve.train.run import budget as budgets
from specserve.train.run.budget import ANSWERS_SHARE, ENDING_SHARE, Budget, seconds_of

seconds = st.floats(1.0, 1e6)
each = st.floats(1e-3, 1e3)


@given(seconds, st.integers(1, 10**6), st.integers(0, 1000), each, st.floats(0, 60), st.floats(1, 10))
def test_answers_take_their_share(total: float, most: int, there: int, each: float, spent: float, more: float) -> None:
    def decided(total: float) -> int:
        return Budget(total).with_conversations(most=most, there=there, seconds_each=each, spent=spent).conversations

    number = decided(total)
    assert 1 <= number <= most
    share = ANSWERS_SHARE * total
    assert number <= max(1, there) or spent + (number - there) * each <= share * (1 + 1e-9)
    assert number == most or spent + (number + 1 - there) * each > share * (1 - 1e-9) or number < there
    assert decided(total * more) >= number


@given(seconds, st.integers(0, 10**6), each, seconds, st.floats(1, 10))
def test_steps_take_what_is_left(total: float, most: int, each: float, spent: float, more: float) -> None:
    def decided(total: float) -> int:
        return Budget(total).with_steps(most=most, seconds_each=each, spent=spent).steps

    number = decided(total)
    assert number >= 1
    assert number <= most or not most
    left = (1 - ENDING_SHARE) * total
    assert number == 1 or spent + number * each <= left * (1 + 1e-9)
    assert number == most or spent + (number + 1) * each > left * (1 - 1e-9)
    assert decided(total * more) >= number


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200), ("90m", 5400), ("1h 30min", 5400), ("1.5h", 5400), ("45 s", 45), ("1d", 86400)]
)
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["2", "h", "0h", "two hours", "2h!", "-1h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a time such as 2h"):
        seconds_of(text)


def test_what_was_decided_is_followed(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, budget="1h", eval_every=2000, save_every=0, max_steps=40_000)
    assert budgets.begin("", tmp_path, is_resumed=False) is None
    decided = dataclasses.replace(Budget(3600.0), conversations=50, steps=300, spent=7.0)
    budgets.record(Path(run.output), decided)
    assert budgets.begin("1h", tmp_path, is_resumed=True) == decided
    scaled = decided.apply(run)
    assert budgets.decided(run) == scaled, "what the report shows"
    assert budgets.decided(dataclasses.replace(run, budget="")).train.max_steps == 40_000
    train = scaled.train
    assert (scaled.data.max_conversations, train.max_steps, train.eval_every, train.save_every) == (50, 300, 30, 0)
    (tmp_path / budgets.FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"budget\.json"):
        budgets.begin("1h", tmp_path, is_resumed=True)
    assert budgets.begin("1h", tmp_path, is_resumed=False) == Budget(3600.0), "another run in the folder begins anew"
    assert not (tmp_path / budgets.FILE).exists()
