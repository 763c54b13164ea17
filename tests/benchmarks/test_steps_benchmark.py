"""The costs of steps that a benchmark reports are those of steps that run."""

import pytest
from steps import measure_steps


@pytest.mark.slow
def test_each_way_is_timed_and_counted() -> None:
    plain, chain = measure_steps(["off", "chain:1"], num_slots=1, max_model_len=64, num_rounds=2)
    assert [cost.program.step and cost.program.step[2] is None for cost in (plain, chain)] == [True, False]
    for cost in (plain, chain):
        assert len(cost.seconds) == 2
        assert min(*cost.seconds, cost.lowering, cost.compiling, cost.num_fusions) > 0
    assert chain.num_calls > plain.num_calls  # the draft's too
