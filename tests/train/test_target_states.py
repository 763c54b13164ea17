"""States that are kept while a run lasts: the target runs once over each row, and what is learnt is the same."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from rounding import assert_same
from tiny_run import make_learner, noise_of, numbers, tiny_run

from specserve.checkpoints.load import Target, load_target
from specserve.data.documents import Document
from specserve.data.loader import Loader
from specserve.data.packing import pack
from specserve.errors import CheckpointError, ConfigError
from specserve.mesh import parse_mesh
from specserve.train import target_states
from specserve.train.head import new_drafter
from specserve.train.learner import TrainingData
from specserve.train.run import prepare
from specserve.train.run.checks import check_settings
from specserve.train.run.folder import RunFolder
from specserve.train.settings import CaptureSettings
from specserve.train.target_states import KeptStates
from specserve.train.trainer import Trainer

IDS = np.arange(8, 56, dtype=np.int32)
EPOCH = 4  # steps


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes() -> Iterator[None]:
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def _train(target: Target, output: Path, *, is_kept: bool, **changes: Any) -> int:
    """Train, and return how many batches the target ran over apart from the step."""
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(0, 64, 30).astype(np.int32), rng.random(30) < 0.6) for _ in range(4 * EPOCH)]
    run, rows = tiny_run(output, **changes), pack(documents, 32)
    mesh = parse_mesh(run.mesh)
    ids = np.arange(64, dtype=np.int32) if run.drafter == "mtp" else IDS
    features, count = None, []
    if is_kept:
        layers = new_drafter(run.drafter, run.draft, target.config, len(ids)).aux_layers
        features = KeptStates(output, target, layers, ids, rows, mesh)
        run_target = features._run
        features._run = lambda *args: count.append(1) or run_target(*args)
    data = TrainingData(Loader(rows, run.train.batch_size, run.train.seed), ids, 0.75)
    made = make_learner(run, target, data, features=features, mesh=mesh)
    Trainer(run, made, {"target": "tiny"}, RunFolder(run)).train()
    return len(count)


@pytest.mark.parametrize("changes", [{}, {"drafter": "mtp", "teacher": "greedy"}, {"drafter": "dflash"}])
def test_the_target_runs_once_and_the_losses_are_the_same(
    tmp_path: Path, tiny_target: Target, changes: dict[str, Any]
) -> None:
    changes = {"max_steps": 2 * EPOCH + 2, "save_every": 0, **changes}
    assert _train(tiny_target, tmp_path / "kept", is_kept=True, **changes) == EPOCH

    def losses(target: Target, output: Path) -> np.ndarray:
        _train(target, output, is_kept=False, **changes)
        return numbers(output)["losses"]

    expected = losses(tiny_target, tmp_path / "plain")
    assert_same(numbers(tmp_path / "kept")["losses"], expected, noise_of(losses, tiny_target, tmp_path))


def test_a_mesh_and_parts_of_a_batch_keep_alike(tmp_path: Path, tiny_target: Target) -> None:
    steps = {"max_steps": EPOCH + 2, "save_every": 0}
    spread = load_target(tiny_target.folder, dtype="float32", mesh=parse_mesh("data=2,sequence=2"))
    assert _train(spread, tmp_path / "spread", is_kept=True, mesh="data=2,sequence=2", accumulate=2, **steps) == EPOCH

    def losses(target: Target, output: Path) -> np.ndarray:
        _train(target, output, is_kept=True, **steps)
        return numbers(output)["losses"]

    expected = losses(tiny_target, tmp_path / "plain")
    assert_same(numbers(tmp_path / "spread")["losses"], expected, noise_of(losses, tiny_target, tmp_path))


def test_a_resumed_run_goes_on_to_the_bit_and_leaves_no_file(tmp_path: Path, tiny_target: Target) -> None:
    """Though it runs the target again over rows whose states are gone."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _train(tiny_target, whole, is_kept=True, schedule="constant", warmup_share=0.0, max_steps=2 * EPOCH)
    for steps, more in ((EPOCH + 1, {}), (2 * EPOCH, {"resume": True})):
        _train(tiny_target, cut, is_kept=True, schedule="constant", warmup_share=0.0, max_steps=steps, **more)
    np.testing.assert_array_equal(numbers(cut)["losses"], numbers(whole)["losses"])
    assert {path.name for path in cut.iterdir()} == {path.name for path in whole.iterdir()}
    assert sum(path.stat().st_size for path in whole.rglob("*")) < 1 << 20


class _Disk(NamedTuple):
    free: int


def test_a_disk_without_room_is_named(tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: _Disk(free=1000))
        with pytest.raises(ConfigError, match=r"the disk of .* has 0\.0 GB"):
            _train(tiny_target, tmp_path / "small", is_kept=True)

    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(target_states.tempfile, "TemporaryFile", full)
    with pytest.raises(CheckpointError, match="No space left"):
        _train(tiny_target, tmp_path / "full", is_kept=True)


def test_only_one_process_that_has_the_target_keeps(tmp_path: Path) -> None:
    keep = CaptureSettings(keep_states="true")
    check_settings(tiny_run(tmp_path, features=keep))
    for run in (
        tiny_run(tmp_path, features=dataclasses.replace(keep, capture="features")),
        tiny_run(tmp_path, features=keep, coordinator="host:1", num_processes=2),
    ):
        with pytest.raises(ConfigError, match="--keep-states is for one process"):
            check_settings(run)


def test_states_are_kept_by_themselves_where_rows_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(**changes: Any) -> bool:
        return prepare._keeps_states(tiny_run(tmp_path, **changes), 10)

    assert keeps(max_steps=11)
    assert keeps(budget="1h", max_steps=0)
    assert not keeps(max_steps=10)
    assert not keeps(max_steps=11, features=CaptureSettings(keep_states="false"))
    assert not keeps(max_steps=11, features=CaptureSettings(capture="features"))
    assert not keeps(max_steps=11, coordinator="host:1", num_processes=2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not keeps(max_steps=11)
    assert keeps(max_steps=10, features=CaptureSettings(keep_states="true"))
