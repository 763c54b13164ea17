"""The costs of steps that a benchmark reports are those of steps that run."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import steps
from steps import account, measure_steps

from specserve.errors import ConfigError
from specserve.kernels import native
from specserve.serve.programs import shapes
from specserve.serve.programs.shapes import Shapes


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
    sizes = {"num_slots": 2, "max_model_len": 64, "page_size": 16, "num_rounds": 1}
    for mesh, batches in (("", (1, 2)), ("data=2", (2,))):
        costs = list(measure_steps(["off", "chain:1"], target="smollm2-135m", num_layers=3, mesh=mesh, **sizes))
        found = [(cost.program.tree is None, cost.program.batch) for cost in costs]
        assert sorted(found) == sorted((is_plain, batch) for is_plain in (True, False) for batch in batches)
        assert all(cost.seconds[0] > 0 for cost in costs)


@pytest.mark.slow
def test_prompts_are_timed_alone_and_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latter as a server on an accelerator has them."""

    def make_shapes(*args: Any, **sizes: Any) -> Shapes:
        return dataclasses.replace(shapes.make_shapes(*args, **sizes), is_mixing=True, chunks=(16,))

    monkeypatch.setattr(steps, "make_shapes", make_shapes)
    sizes = {"num_slots": 2, "max_model_len": 64, "page_size": 16, "num_rounds": 1}
    costs = list(measure_steps(["off", "chain:1"], target="smollm2-135m", num_layers=3, has_prompts=True, **sizes))
    found = {(cost.program.kind, cost.program.tree is None, cost.program.prompts) for cost in costs}
    most = max(prompts for _, _, prompts in found)
    assert found >= {("prefill", True, 0), ("mixed", True, 1), ("mixed", False, most)}
    assert {cost.program.batch for cost in costs if cost.program.kind == "mixed"} == {2}
    assert all(cost.seconds[0] > 0 for cost in costs)


@pytest.mark.slow
@pytest.mark.skipif(not native.is_available(), reason=native.describe())
def test_an_account_has_every_weight_once() -> None:
    found = account(target="smollm2-135m", num_layers=3, quantization="int4", rows=2, context=40, num_rounds=1)
    calls = {each.name: each.calls for each in found.operations}
    assert calls["attend"] == calls["heads"] == calls["gate"] == calls["matmul, 576 x 3072"] == 3
    assert calls["norm"] == 2 * 3 + 1
    norms = 4 * 576 * (2 * 3 + 1)
    assert sum(each.num_bytes for each in found.operations) + norms == found.num_bytes
    assert min(each.seconds for each in found.operations) > 0


def test_an_accelerator_is_compared_with_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def alike(backend: str, kind: str) -> str:
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
        return steps._alike()

    assert alike("gpu", "NVIDIA H200") == "h100"
    assert alike("tpu", "TPU v5 lite") == "v5e:2x2"
    assert alike("tpu", "TPU v6 lite") == "v6e:2x2"
    with pytest.raises(ConfigError, match="TPU v4: no such device"):
        alike("tpu", "TPU v4")
