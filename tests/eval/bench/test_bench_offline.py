"""`bench latency` and `bench throughput`: a step's work by hand, shares that cannot pass 1, a trace that adds up."""

import dataclasses
import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from specserve.checkpoints.load import Target
from specserve.drafters.speculation import parse_speculation
from specserve.errors import DataError
from specserve.eval.bench.offline import latency, throughput
from specserve.eval.bench.roofline import Peaks, Roofline, measure_peaks, step_work
from specserve.eval.bench.trace import Operation, newest_trace, operations, read_operations
from specserve.eval.settings import LatencyRun, ThroughputRun
from specserve.plan.work import DeviceWork
from specserve.serve.launch import Models
from specserve.speculative.drafter import Weights


@pytest.fixture(scope="module")
def models(shallow_target: Target) -> Models:
    return Models("tiny", shallow_target, tiny.random_head(shallow_target.config, seed=1), None)


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


positive = st.floats(1e-3, 1e15)


@given(positive, positive, positive, positive, positive)
def test_no_share_of_a_peak_passes_one(
    num_bytes: float, num_flops: float, seconds: float, bandwidth: float, flops: float
) -> None:
    """Whatever was measured: the step itself is one of the kernels that the peak is the best of."""
    found = Roofline("off", 1, 1, DeviceWork(num_flops, num_bytes, 0.0), seconds, 0.0, Peaks(bandwidth, flops))
    assert 0 < found.mbu <= 1
    assert 0 < found.mfu <= 1
    if num_bytes / seconds < bandwidth:
        assert found.mbu == pytest.approx(num_bytes / seconds / bandwidth)


def test_the_work_of_a_step_by_hand(models: Models) -> None:
    """2 layers of width 32 with 4 query and 2 KV heads of 8 channels, 48 hidden channels, 64 tokens, in float32."""
    tree = parse_speculation("tree:3x2x5")
    layer = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48
    norms = 2 * (2 * 32 + 2 * 8) + 32
    entry = 2 * 2 * (2 * 8) * 4  # keys and values in both layers
    assert models.head is not None
    config, weights = models.target.config, Weights(models.target.params, models.head.weights(None))
    plain = step_work(config, weights, None, None, batch=2, context=10)
    assert plain.read == 4 * (2 * layer + 64 * 32 + norms) + 2 * 10 * entry
    attention = 2 * 2 * (4 * 8) * 10.5  # products with keys and values over half of 20 keys, the own one included
    assert plain.flops == 2 * (2 * (2 * layer + attention) + 2 * 64 * 32)

    narrow = Weights(jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights.target), None)
    half = step_work(config, narrow, None, None, batch=2, context=10)
    assert half.read == plain.read - 2 * (2 * layer + 64 * 32 + norms), "as the step takes them"
    grown = step_work(config, weights, models.head.drafter, tree, batch=2, context=10)
    head = sum(leaf.size for leaf in jax.tree.leaves(models.head.params) if leaf.ndim > 1)
    assert grown.read - plain.read == 3 * (4 * head + 2 * 10 * entry / 2)
    assert grown.flops == 6 * plain.flops + 2 * head * 2 * (1 + 2 * 2)


def test_operations_are_reported_by_their_own_time(tmp_path: Path) -> None:
    """A loop's body is not counted twice, other threads run beside it, and what is no operation is left out."""

    def event(tid: int, start: float, spent: float, name: str) -> dict[str, object]:
        args = {"hlo_op": name, "hlo_module": "jit_step"}
        return {"ph": "X", "pid": 1, "tid": tid, "ts": start, "dur": spent, "name": name, "args": args}

    events = [
        event(1, 0, 100, "while"),
        event(1, 10, 30, "dot"),
        event(1, 40, 50, "dot.2.1"),
        event(1, 100, 5, "copy"),
        event(2, 0, 60, "dot"),
        {"ph": "X", "pid": 1, "tid": 3, "ts": 0, "dur": 900, "name": "python", "args": {}},
        {"ph": "M", "pid": 7, "tid": 8, "name": "thread_name", "args": {"name": "XLA Ops"}},
        {"ph": "X", "pid": 7, "tid": 8, "ts": 0, "dur": 10, "name": "fusion"},
    ]
    expected = [("jit_step", "dot", 140e-6, 3), ("jit_step", "while", 20e-6, 1), ("", "fusion", 10e-6, 1)]
    expected.append(("jit_step", "copy", 5e-6, 1))
    assert [dataclasses.astuple(found) for found in operations(events)] == [
        (program, name, pytest.approx(seconds), count) for program, name, seconds, count in expected
    ]
    folder = tmp_path / "plugins" / "profile" / "now"
    with pytest.raises(DataError, match="has written no trace"):
        newest_trace(tmp_path)
    folder.mkdir(parents=True)
    file = folder / "vm.trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert read_operations(newest_trace(tmp_path)) == operations(events)
    file.write_bytes(b"nothing")
    with pytest.raises(DataError, match="not a trace"):
        read_operations(file)


@pytest.mark.slow
def test_latency_and_throughput_add_up(models: Models, tmp_path: Path) -> None:
    run = LatencyRun(
        speculation="chain:2",
        bench="random",
        input_len=6,
        output_len=10,
        batch_size=1,
        num_iters_warmup=1,
        num_iters=3,
        profile=str(tmp_path / "trace"),
    )
    result = latency(models, run).result
    assert {"avg_latency", "latencies", "percentiles"} <= result.keys()
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert result["percentiles"].keys() == {"10", "25", "50", "75", "90", "99"}
    assert result["output_throughput"] * sum(result["latencies"]) == pytest.approx(3 * 10)
    assert set(result["steps_by_speculation"]) == {"chain:2"}
    [step] = result["steps"]
    assert step["step_ms"] == pytest.approx(step["draft_ms"] + step["verify_ms"])
    assert 0 < step["mbu"] <= 1 >= step["mfu"] > 0
    found = read_operations(newest_trace(tmp_path / "trace"))
    assert sum(operation.seconds for operation in found) > 0
    assert all(isinstance(operation, Operation) for operation in found)

    load = ThroughputRun(
        speculation="off", bench="random", input_len=6, output_len=8, num_prompts=5, max_slots=1, max_model_len=128
    )
    result = throughput(models, load).result
    names = ("elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second")
    assert set(names) <= result.keys()
    assert result["num_requests"] == 5
    assert result["tokens_per_second"] * result["elapsed_time"] == pytest.approx(result["total_num_tokens"])
    assert result["tau"] == 1
    peaks = measure_peaks("float32")
    assert peaks.bytes_per_second > 1e8 < peaks.flops_per_second
