"""The costs of steps that a benchmark reports are those of steps that run."""

import pytest
from steps import measure_steps


@pytest.mark.slow
def test_each_way_is_timed_and_counted() -> None:
    plain, chain = measure_steps(["off", "chain:1"], num_slots=1, max_model_len=64, num_rounds=2)
    assert [cost.program.tree is None for cost in (plain, chain)] == [True, False]
    for cost in (plain, chain):
        assert len(cost.seconds) == 2
        assert min(*cost.seconds, cost.making, cost.num_fusions) > 0
    assert chain.num_calls > plain.num_calls  # the draft's too


@pytest.mark.slow
def test_a_preset_is_run_with_random_weights() -> None:
    sizes = {"num_slots": 2, "max_model_len": 64, "num_rounds": 1}
    costs = list(measure_steps(["off", "chain:1"], target="smollm2-135m", num_layers=3, **sizes))
    found = {(cost.program.tree is None, cost.program.batch) for cost in costs}
    assert found == {(is_plain, batch) for is_plain in (True, False) for batch in (1, 2)}
    assert len(costs) == 4
    assert all(cost.seconds[0] > 0 for cost in costs)
