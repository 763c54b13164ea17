"""The steady state of a replica against its closed forms: each second adds up, at its limits and where speculation
breaks even."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.plan.steady_state import Load, StepCosts, break_even_tau, solve
from specserve.plan.taus import acceptance, tau_of

COSTS = StepCosts(
    batch_sizes=(1, 2, 4, 8),
    plain=(0.010, 0.011, 0.013, 0.017),
    step=(0.015, 0.017, 0.021, 0.029),
    chunks=(16, 64, 256),
    prefill=(0.012, 0.020, 0.050),
    source="made up",
    extra_tokens=64,
)


def test_a_prompt_takes_the_sum_of_its_chunks() -> None:
    """Chunks of 256, 256 and 64, of which 38 are filled; and of one token."""
    assert COSTS.prefill_seconds(550) == (pytest.approx(2 * 0.050 + 0.020), 3)
    assert COSTS.prefill_seconds(1) == (0.012, 1)


def test_steps_lie_on_the_lines_between_batch_sizes() -> None:
    for batch, seconds in ((0.1, 0.010), (1, 0.010), (3, 0.012), (8, 0.017), (99, 0.017)):
        assert COSTS.step_seconds(batch, is_speculative=False) == pytest.approx(seconds)


def test_prompts_that_come_alone_gain_nothing_from_data_ranks() -> None:
    """Under a small load a program has one prompt, and under the largest one for each rank."""
    one, many = (dataclasses.replace(COSTS, num_ranks=ranks) for ranks in (1, 8))
    states = [
        [solve(costs, Load(rate, 256, 65), 1.0, is_speculative=False) for costs in (one, many)] for rate in (1e-3, 1e9)
    ]
    (alone, beside), (full, side_by_side) = states
    assert beside.token_seconds == pytest.approx(alone.token_seconds, rel=1e-5)
    prompt, steps = COSTS.prefill_seconds(256)[0], 64 * COSTS.plain[-1] / COSTS.batch_sizes[-1]
    assert 1 / full.most_requests == pytest.approx(prompt + steps)
    assert 1 / side_by_side.most_requests == pytest.approx(prompt / 8 + steps)


def test_answers_of_one_token_fill_a_replica_with_prompts() -> None:
    state = solve(COSTS, Load(1e9, 256, 1), 1.0, is_speculative=False)
    assert (state.is_full, state.token_seconds, state.batch) == (True, 0.0, 0.0)
    assert state.most_requests == pytest.approx(1 / COSTS.prefill_seconds(256)[0])


def test_speculation_breaks_even_at_its_tau() -> None:
    """At that tau the same load keeps as many sequences running, each with as many tokens per second."""
    for rate in (0.05, 0.6, 1.7, 2.4):
        load = Load(rate, 64, 100)
        plain = solve(COSTS, load, 1.0, is_speculative=False)
        even = solve(COSTS, load, break_even_tau(COSTS, plain.batch), is_speculative=True)
        assert not plain.is_full
        for state in (plain, even):  # each second goes to prompts and to steps
            prompt, _ = COSTS.prefill_seconds(load.prompt)
            steps = rate * (load.answer - 1) / (state.tau * state.batch)
            assert rate * prompt + steps * state.step_seconds == pytest.approx(1)
        assert even.batch == pytest.approx(plain.batch)
        assert even.tokens_per_second == pytest.approx(plain.tokens_per_second)
        assert even.token_seconds == pytest.approx(plain.token_seconds)


@given(st.floats(1.0, 4.0), st.integers(3, 8))
def test_a_tau_of_the_same_depth_stays_itself(tau: float, depth: int) -> None:
    assert tau_of(tau, depth, depth) == pytest.approx(tau)
    assert 0 <= acceptance(tau, depth) <= 1
    assert tau_of(tau, depth, depth + 1) >= tau
