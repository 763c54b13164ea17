"""`kill -9` at any moment, and the run goes on as if nothing had happened: killed processes, real ones."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import assert_same
from tiny_run import NormEvaluator, curve, metrics, noise_of, numbers, start, tiny_trainer

from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.train_state import StateStore
from specserve.drafters.registry import KINDS, KindName
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.head import load_head
from specserve.interop.notes import read_notes
from specserve.mesh import make_mesh
from specserve.train.step import seeds_of_step


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes() -> Iterator[None]:
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """A run that nobody disturbs."""
    output = tmp_path_factory.mktemp("whole")
    tiny_trainer(output, tiny_target, evaluator=NormEvaluator(), eval_every=4).train()
    return output


def _assert_same_head(output: Path, other: Path, target: Target) -> None:
    heads = [load_head(folder, target, dtype="float32").params for folder in (output, other)]
    for leaf, same in zip(*map(jax.tree.leaves, heads), strict=True):
        np.testing.assert_array_equal(leaf, same)
    assert read_notes(output)["steps"] == read_notes(other)["steps"]


def test_a_killed_run_goes_on_bit_for_bit(whole: Path, tmp_path: Path, tiny_target: Target) -> None:
    """Killed in the middle of a line, and again while it saves."""
    process = start(tiny_target, tmp_path, death="line 5", eval_every=4)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert not (tmp_path / "metrics.jsonl").read_text().endswith("\n")
    process = start(tiny_target, tmp_path, death="save 6", eval_every=4, resume=True)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert list((tmp_path / "state").glob("6.*tmp*"))
    assert not (tmp_path / "state" / "6").exists()
    assert metrics(tmp_path)[-1]["step"] >= 6
    last = tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator(), eval_every=4, resume=True).train()
    assert last.ending == "finished"
    assert curve(tmp_path) == curve(whole)
    _assert_same_head(tmp_path, whole, tiny_target)
    assert not list((tmp_path / "state").glob("*tmp*"))


def test_anchors_are_drawn_by_the_step(tmp_path: Path, tiny_target: Target) -> None:
    """A run that was stopped learns at the places where it would have learnt, and no two rows of its steps share a
    seed."""
    changes = {"drafter": "dflash", "max_steps": 4, "anchors": 3}
    tiny_trainer(tmp_path / "whole", tiny_target, evaluator=NormEvaluator(), **changes).train()

    def stop(moment: object) -> None:
        if moment.step == 2:  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGTERM)

    stopped = tmp_path / "stopped"
    assert tiny_trainer(stopped, tiny_target, evaluator=NormEvaluator(), **changes).train([stop]).step == 3
    tiny_trainer(stopped, tiny_target, evaluator=NormEvaluator(), resume=True, **changes).train()
    assert curve(stopped) == curve(tmp_path / "whole")
    _assert_same_head(stopped, tmp_path / "whole", tiny_target)
    seeds = [seeds_of_step(jnp.int32(number), jnp.zeros((4, 32), jnp.int32)) for number in range(4)]
    assert len(np.unique(seeds)) == 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if name != "eagle3" and kind.is_trained])
def test_a_killed_run_of_every_kind_goes_on(tmp_path: Path, tiny_target: Target, kind: KindName) -> None:
    """What is drawn at random for a step, the best head and the optimiser's moments come back as they were."""
    changes: dict[str, Any] = {"drafter": kind, "max_steps": 6, "eval_every": 2}
    tiny_trainer(tmp_path / "whole", tiny_target, evaluator=NormEvaluator(), **changes).train()
    killed = tmp_path / "killed"
    process = start(tiny_target, killed, death="step 5", **changes)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    tiny_trainer(killed, tiny_target, evaluator=NormEvaluator(), resume=True, **changes).train()
    assert curve(killed) == curve(tmp_path / "whole")
    _assert_same_head(killed, tmp_path / "whole", tiny_target)
    losses = [row["loss"] for row in metrics(killed) if row["loss"] is not None]
    assert len(set(losses)) == 6


@pytest.mark.slow
@pytest.mark.parametrize("death", ["line 1", "export 1", "save 10"])
def test_killed_at_other_moments_too(whole: Path, tmp_path: Path, tiny_target: Target, death: str) -> None:
    process = start(tiny_target, tmp_path, death=death, eval_every=4)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator(), eval_every=4, resume=True).train()
    assert curve(tmp_path) == curve(whole)
    _assert_same_head(tmp_path, whole, tiny_target)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_a_run_goes_on_on_other_devices(whole: Path, tmp_path: Path, tiny_target: Target, axes: dict[str, int]) -> None:
    """One device, then a mesh of eight, then one again."""
    mesh = make_mesh(**axes)
    spread = load_target(tiny_target.folder, dtype="float32", mesh=mesh)
    for target, on, until in ((tiny_target, None, 3), (spread, mesh, 6), (tiny_target, None, 0)):
        trainer = tiny_trainer(
            tmp_path, target, evaluator=NormEvaluator(), mesh=on, eval_every=4, resume=(tmp_path / "state").exists()
        )

        def stop(moment: object, until: int = until) -> None:
            if moment.step == until:  # type: ignore[attr-defined]
                signal.raise_signal(signal.SIGTERM)

        last = trainer.train([stop])
        assert last.step == (until + 1 if until else 10)
        assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(trainer.learner.state)} == {8 if on else 1}

    def run(target: Target, output: Path) -> dict[str, np.ndarray]:
        tiny_trainer(output, target, evaluator=NormEvaluator(), eval_every=4, save_every=0).train()
        return numbers(output)

    assert [row["step"] for row in metrics(tmp_path)] == [row["step"] for row in metrics(whole)]
    assert_same(numbers(tmp_path), numbers(whole), noise_of(run, tiny_target, tmp_path / "moved"))


def test_one_step_is_compiled_once(tmp_path: Path, tiny_target: Target) -> None:
    """Over measurements, saves and a resumption."""
    for until in (5, 8):
        trainer = tiny_trainer(
            tmp_path, tiny_target, evaluator=NormEvaluator(), eval_every=2, max_steps=until, resume=until == 8
        )
        trainer.learner._step.clear_cache()  # type: ignore[attr-defined]  # what other runs of these settings compiled
        trainer.train()
        assert trainer.learner._step._cache_size() == 1  # type: ignore[attr-defined]


def test_what_would_change_the_curve_is_refused(whole: Path, tiny_target: Target) -> None:
    before = (whole / "run.yaml").read_text()
    with pytest.raises(
        ConfigError, match=r"train\.lr was 0\.005, now it is 0\.1; train\.seed was 0, now it is 1\. Go on"
    ):
        tiny_trainer(whole, tiny_target, resume=True, lr=0.1, seed=1, log_every=7)
    with pytest.raises(ConfigError, match=r"holds the state of a run.*--resume.*--output"):
        tiny_trainer(whole, tiny_target)
    assert (whole / "run.yaml").read_text() == before


def test_a_longer_bound_lets_a_finished_run_go_on(tmp_path: Path, tiny_target: Target) -> None:
    tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator(), max_steps=4).train()
    last = tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator(), max_steps=6, resume=True).train()
    assert last.step == 6
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 6]  # the end at 4 was none after all


def test_a_full_disk_loses_nothing(tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes the second state finds the disk full; training, meanwhile, has gone on."""
    import os

    move = os.rename

    def fail(source: object, to: object, **places: object) -> None:
        if Path(str(to)).name == "6":
            raise OSError(28, "No space left on device")
        move(source, to, **places)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", fail)
    trainer = tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator())
    with pytest.raises(CheckpointError, match=r"No space left on device.*whole are steps 3\. Make room"):
        trainer.train()
    monkeypatch.undo()
    store = StateStore(tmp_path / "state")
    assert store.latest_step == 3
    store.close()
    assert tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator(), resume=True).train().step == 10


def test_a_state_that_was_cut_short_is_called_damaged(tmp_path: Path, tiny_target: Target) -> None:
    """The settings are not to blame, and the state before it is still there."""
    tiny_trainer(tmp_path, tiny_target, max_steps=6, save_every=3).train()
    largest = max((tmp_path / "state/6/state").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    os.truncate(largest, largest.stat().st_size // 2)
    process = start(tiny_target, tmp_path, max_steps=9, save_every=3, resume=True)  # Orbax leaves coroutines behind
    assert re.search(r"the state of step 6 is damaged .* goes on from step 3$", process.communicate()[0], re.MULTILINE)
    shutil.rmtree(tmp_path / "state/6")
    assert tiny_trainer(tmp_path, tiny_target, max_steps=9, resume=True).train().step == 9


def test_metrics_that_are_not_ours_are_not_cut(tmp_path: Path, tiny_target: Target) -> None:
    tiny_trainer(tmp_path, tiny_target, max_steps=4).train()
    path = tmp_path / "metrics.jsonl"
    path.write_text("no json\n" + json.dumps({"step": 1}) + "\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 1: not JSON"):
        tiny_trainer(tmp_path, tiny_target, max_steps=5, resume=True).train()
