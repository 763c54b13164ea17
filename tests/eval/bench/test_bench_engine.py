"""The benchmark's laws: every arm says the same to the same questions, and nothing compiles late or is lost."""

import dataclasses
import json

import pytest

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.errors import ConfigError
from specserve.eval.bench.comparison import num_prompts
from specserve.eval.bench.engine import BenchReport, run_bench
from specserve.eval.bench.step_times import read_bandwidth
from specserve.eval.prompts import load_chats
from specserve.eval.report import bench_lines, bench_table, coupling_table
from specserve.eval.settings import BenchRun
from specserve.serve import launch
from specserve.serve.launch import Models

ARMS = ("chain:2", "auto")
SIZE = {"concurrency": (1, 2), "temperature": (0.0, 1.0), "rounds": 2, "requests": 3, "max_tokens": 12}
PLAN = BenchRun(arms=ARMS, max_model_len=128, **SIZE)  # type: ignore[arg-type]
PROMPTS = [[1 + (7 * i + j) % 60 for j in range(5 + i)] for i in range(num_prompts(PLAN))]


@pytest.fixture(scope="module")
def models(tiny_target: Target, tiny_head: Head) -> Models:
    return Models("tiny", tiny_target, tiny_head, None)


@pytest.fixture(scope="module")
def report(models: Models, tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    seen: list[tuple[float, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("costs")))
        patch.setattr(launch, "AUTO_CHAINS", (2,))  # few programs to compile
        patch.setattr(launch, "AUTO_TREES_CPU", ())
        report = run_bench(
            models,
            PLAN,
            PROMPTS,
            on_round=lambda comparison: seen.append((comparison.temperature, comparison.concurrency)),
        )
    assert seen == [(0.0, 1)] * 2 + [(0.0, 2)] * 2 + [(1.0, 1)] * 2 + [(1.0, 2)] * 2
    return report


@pytest.mark.slow
def test_every_arm_answers_the_same(report: BenchReport) -> None:
    assert report.num_late_compiles == 0
    assert report.num_different == 0
    assert len(report.comparisons) == 4
    for comparison in report.comparisons:
        assert list(comparison.arms) == ["off", *ARMS]
        plain = comparison.arms["off"]
        assert plain.ratios == [1.0, 1.0]
        assert plain.acceptance.tau == 1
        assert set(plain.steps) == {"off"}
        for result in comparison.arms.values():
            assert result.num_answers == result.num_identical == 6
            assert result.num_tokens == plain.num_tokens
            assert len(result.ratios) == len(result.rates) == 2
            assert len(result.first) == 6
            assert sum(result.gaps) == pytest.approx(
                _spans(result.per_token, result.num_tokens),
                rel=0.5,  # a mean over answers of different lengths, each timed
            )
            # one delta per step that emitted, after each answer's first
            assert len(result.gaps) == result.acceptance.num_steps
            assert 0 <= result.host_seconds <= result.busy_seconds
        assert set(comparison.arms["chain:2"].steps) == {"chain:2"}


def _spans(per_token: list[float], num_tokens: int) -> float:
    """About how long all answers took after their first tokens."""
    return sum(per_token) / len(per_token) * (num_tokens - len(per_token))


@pytest.mark.slow
def test_the_rest_of_the_report(report: BenchReport, models: Models) -> None:
    (coupling,) = report.couplings
    assert (coupling.arm, coupling.temperature) == ("chain:2", 1.0)
    assert coupling.coupled.num_answers == coupling.coupled.num_identical == 6
    assert coupling.coupled.acceptance.num_steps > 0 < coupling.uncoupled.acceptance.num_steps
    times = report.steps["chain:2"]
    assert min(dataclasses.astuple(times)) > 0
    weights = sum(leaf.nbytes for leaf in [models.target.params.embedding, models.target.params.norm])
    assert report.memory["peak_rss"] > report.memory["weights"] > weights
    assert report.memory["cache"] > 0
    found = json.loads(json.dumps(report.to_json()))
    worst = min(comparison["arms"]["auto"]["ratio_to_plain"] for comparison in found["cells"])
    assert found["auto_worst_ratio_to_plain"] == worst
    assert 1e8 < read_bandwidth() < 1e13
    assert bench_table(report.comparisons, 0.0).row_count == 2 * 3
    assert coupling_table(report.couplings).row_count == 1
    assert any("auto at its worst" in line for line in bench_lines(report))


def test_a_head_is_needed_where_one_is_asked_for(models: Models) -> None:
    headless = Models("tiny", models.target, None, None)
    with pytest.raises(ConfigError, match="tree:2x2x4 need"):
        run_bench(headless, dataclasses.replace(PLAN, arms=("tree:2x2x4", "auto")), PROMPTS)


def test_chats_are_of_several_lengths_and_end_with_a_question() -> None:
    chats = load_chats("pydoc", 9, history=2)
    assert sorted({len(chat) for chat in chats}) == [1, 3, 5]
    assert all(chat[-1]["role"] == "user" for chat in chats)
    assert len({chat[-1]["content"] for chat in chats}) == 9
