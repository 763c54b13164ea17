"""Measurements over a mesh that cuts sequences: any number of clients can be asked for, and no answer changes."""

from pathlib import Path

import pytest
from spread import mesh_of, spread_head, spread_target

from specserve.errors import ConfigError
from specserve.eval.bench import offline as bench_offline
from specserve.eval.bench.engine import run_bench
from specserve.eval.settings import BenchRun, LatencyRun, ThroughputRun
from specserve.mesh import in_equal_parts
from specserve.serve.engines import measured_engine
from specserve.serve.launch import Models
from specserve.serve.settings import ServeRun

PROMPTS = [[1 + (7 * i + j) % 60 for j in range(5 + i)] for i in range(3)]


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def models_over(text: str) -> Models:
    mesh = mesh_of(text)
    return Models("tiny", spread_target("dense", mesh), spread_head("dense", mesh), None, mesh=mesh)


@pytest.mark.parametrize(("text", "asked", "expected"), [("data=2", 1, 2), ("data=2", 4, 4), ("data=2,tensor=2", 5, 6)])
def test_an_engine_has_slots_that_data_ranks_share_out(
    monkeypatch: pytest.MonkeyPatch, text: str, asked: int, expected: int
) -> None:
    """`eval --concurrency 1` has no --max-slots that could be raised."""
    made: list[int] = []

    def make(_models: Models, run: ServeRun, *_args: object, **_more: object) -> None:
        made.append(run.max_slots)

    monkeypatch.setattr("specserve.serve.engines.make_engine", make)
    models = Models("tiny", None, None, None, mesh=mesh_of(text))  # type: ignore[arg-type]
    measured_engine(models, "off", num_slots=asked, max_model_len=64)
    assert made == [expected]
    assert in_equal_parts(None, "batch", asked) == asked


def test_a_number_of_slots_that_was_given_is_refused_as_everywhere() -> None:
    models = Models("tiny", None, None, None, mesh=mesh_of("data=2"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--max-slots 5: .* give 4 or 6"):
        bench_offline.throughput(models, ThroughputRun(bench="random", max_slots=5))


@pytest.mark.slow
def test_the_benchmark_of_the_engine_ends_with_its_report() -> None:
    """One client over two data ranks, and the coupling, whose engines are made when all the rest is done."""
    size = {"concurrency": (1,), "temperature": (1.0,), "rounds": 1, "requests": 2, "max_tokens": 8}
    run = BenchRun(arms=("chain:2",), max_model_len=128, **size)  # type: ignore[arg-type]
    report = run_bench(models_over("data=2"), run, PROMPTS)
    assert report.num_different == report.num_late_compiles == 0
    assert [coupling.arm for coupling in report.couplings] == ["chain:2"]
    assert report.couplings[0].coupled.num_identical == 2
    assert report.steps["chain:2"].draft > 0


@pytest.mark.slow
def test_one_sequence_and_odd_numbers_of_them_are_timed() -> None:
    models = models_over("data=2")
    sizes = {"bench": "random", "input_len": 5, "output_len": 6, "speculation": "chain:2"}
    result = bench_offline.latency(models, LatencyRun(batch_size=1, num_iters_warmup=1, num_iters=1, **sizes)).result
    assert result["steps_by_speculation"].keys() == {"chain:2"}
    run = ThroughputRun(num_prompts=5, max_slots=8, max_model_len=160, **sizes)
    assert bench_offline.throughput(models, run).result["num_requests"] == 5
