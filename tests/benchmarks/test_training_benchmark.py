"""The training benchmark measures what it says: both arms learn the same, and memory is the compiler's account."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from naive_training import padded_batches
from training import NaiveArm, bench_config, memory_cells, run_bench, run_steps

from specserve.checkpoints.load import Target
from specserve.data.documents import Document
from specserve.train.settings import DraftSettings, TrainSettings

SETTINGS = TrainSettings(batch_size=2, seq_len=64, rollout=2)


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes():
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    import jax

    with jax.numpy_dtype_promotion("standard"):
        yield


def _documents(lengths: list[int]) -> list[Document]:
    rng = np.random.default_rng(0)
    return [Document(rng.integers(0, 64, n).astype(np.int32), np.arange(n) >= n // 2) for n in lengths]


@pytest.mark.slow
def test_both_arms_are_measured_on_the_same_conversations(tiny_target: Target) -> None:
    documents = _documents([9, 30, 41, 64, 17, 50])
    report = run_bench(tiny_target, documents, np.arange(48), SETTINGS, DraftSettings(), rounds=2, steps=2)
    assert set(report.arms) == {"specserve", "naive"}
    for arm in report.arms.values():
        assert len(arm.useful) == len(arm.positions) == len(arm.peak_share) == 2
        assert all(0 < useful < positions for useful, positions in zip(arm.useful, arm.positions, strict=True))
    assert len(report.ratios) == 2
    assert report.to_json()["ratio_median"] > 0


@pytest.mark.slow
def test_every_length_is_compiled_before_the_clock_runs(tiny_target: Target) -> None:
    """One of 40 conversations is longer than the others, and the first batches are without it."""
    documents = _documents([20] * 39 + [100])
    settings = dataclasses.replace(SETTINGS, seq_len=128)
    config = bench_config(settings, tiny_target.config, 48)
    arm = NaiveArm(config, settings, tiny_target, np.arange(48), documents)
    arm.warm_up()
    gradient: Any = arm._trainer.gradient
    assert gradient._cache_size() == 2
    assert {next(arm._batches).token_ids.shape[1] for _ in range(20)} == {64, 128}


def test_the_naive_arm_pads_to_powers_of_two() -> None:
    documents = _documents([9, 70, 100, 300])
    batches = padded_batches(documents, 2, 256, 0)
    lengths = [next(batches).token_ids.shape[1] for _ in range(20)]
    assert set(lengths) == {128, 256}
    tokens = {int((next(batches).document_ids > 0).sum()) for _ in range(20)}
    assert tokens <= {79, 109, 9 + 256, 170, 70 + 256, 100 + 256}


@pytest.mark.slow
def test_memory_is_less_than_the_naive_steps(tiny_target: Target) -> None:
    """Rollout steps that are computed again take memory one at a time."""
    settings = dataclasses.replace(SETTINGS, rollout=8)
    (cell,) = memory_cells(settings, tiny_target.config, 48, [512])
    assert cell.again.live < 0.6 * cell.kept.live
    assert cell.again.live < 0.4 * cell.naive.live
    assert cell.again.arguments == cell.kept.arguments > cell.naive.arguments, "the naive step is without moments"


@pytest.mark.slow
def test_a_step_of_random_weights_is_the_same_over_a_mesh() -> None:
    """First layers of a preset, of which no file is read; the losses differ by rounding alone."""
    settings = TrainSettings(batch_size=2, seq_len=32, rollout=2)
    one, two = (run_steps("smollm2-135m", settings, num_layers=3, mesh=mesh, steps=1) for mesh in ("", "data=2"))
    assert one.loss == pytest.approx(two.loss, rel=1e-5)
    assert (one.positions, one.flops) == (two.positions, two.flops)
    assert one.positions == 64
    for report in (one, two):
        assert len(report.seconds) == 1
        assert report.mfu == pytest.approx(report.flops / report.seconds[0] / report.peak)
