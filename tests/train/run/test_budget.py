"""Laws of a budget: what is decided fits it, more time is never less work, and what was decided stays decided."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import tiny_run

from specserve.errors import CheckpointError, ConfigError
from specserve.train.run import budget as budgets
from specserve.train.run.budget import ANSWERS_SHARE, ENDING_SHARE, MEASUREMENTS, Budget, seconds_of
from specserve.train.settings import TrainRun, TrainSettings
from specserve.train.speed import StepSeconds

seconds = st.floats(1.0, 1e6)
each = st.floats(1e-3, 1e3)


@given(seconds, st.integers(0, 10**6), each, seconds, st.one_of(st.just(0.0), each), st.floats(1, 10))
def test_steps_and_measurements_take_what_is_left(
    total: float, most: int, each: float, spent: float, measuring: float, more: float
) -> None:
    def decided(total: float) -> Budget:
        return Budget(total, spent).with_steps(most=most, step=StepSeconds(each, each, 10), measuring=measuring)

    found = decided(total)
    assert found.steps >= 1
    assert found.steps <= most or not most
    assert 1 <= found.measurements <= MEASUREMENTS
    ending = ENDING_SHARE * total
    assert found.measurements == 1 or found.measurements * measuring <= ending * (1 + 1e-9)
    left = total - spent - max(ending, found.measurements * measuring)
    assert found.steps == 1 or found.steps * each <= left * (1 + 1e-9)
    assert found.steps == most or (found.steps + 1) * each > left * (1 - 1e-9)
    assert decided(total * more).measurements >= found.measurements


@given(seconds, st.floats(1e-3, 1e3), st.floats(1e-3, 1.0), st.integers(0, 10**4))
def test_steps_over_rows_that_were_seen_may_cost_less(left: float, new: float, share: float, num_new: int) -> None:
    step = StepSeconds(new, new * share, num_new)
    number = step.number_in(left)
    taken = min(number, num_new) * step.new + max(0, number - num_new) * step.seen
    assert taken <= left * (1 + 1e-9)
    assert taken + step.new >= left * (1 - 1e-9)
    assert number >= StepSeconds(new, new, num_new).number_in(left)


@given(seconds, st.lists(st.floats(0, 1e5), max_size=5))
def test_answers_have_what_is_left_of_their_share(total: float, times: list[float]) -> None:
    budget = Budget(total)
    for passed in times:
        budget = budget.after(passed)
    assert budget.answer_seconds == pytest.approx(max(0.0, ANSWERS_SHARE * total - sum(times)), abs=1e-6 * total)


@given(st.integers(1, 10**5), st.integers(1, MEASUREMENTS))
def test_tau_is_measured_as_often_as_was_decided(steps: int, measurements: int) -> None:
    """Along the way, and at the end in any case."""
    decided = Budget(1.0, steps=steps, seconds_per_step=1.0, measurements=measurements)
    every = decided.apply(TrainRun(train=TrainSettings(eval_every=10**6))).train.eval_every
    assert sum(step % every == 0 for step in range(1, steps)) + 1 <= measurements


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
    decided = Budget(3600.0, 7.0, {"a.jsonl": 30, "b.jsonl": 20}, steps=300, seconds_per_step=5.0, measurements=10)
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
