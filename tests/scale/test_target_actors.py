"""A target in processes of its own, on a Ray cluster of this machine: training sees what it would have seen with the
target in its step, whatever happens to those processes."""

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_run import curve, tiny_trainer

from specserve.checkpoints.load import Target, load_target
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.head import load_head
from specserve.processes import ProcessError
from specserve.train.remote import target_service
from specserve.train.settings import ServiceSettings

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks, Python of what Ray leaves open
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        ray.init(address="local", num_cpus=8, object_store_memory=100 << 20, include_dashboard=False)
        yield ray
        ray.shutdown()


@pytest.fixture(autouse=True)
def _as_users_compile() -> Iterator[None]:
    """The other processes know nothing of the tests' quicker way to compile; optax raises a Python float to a power."""
    jax.config.update("jax_disable_most_optimizations", False)
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """A run with the target in its step."""
    jax.config.update("jax_disable_most_optimizations", False)
    output = tmp_path_factory.mktemp("whole")
    with jax.numpy_dtype_promotion("standard"):
        tiny_trainer(output, tiny_target).train()
    return output


@pytest.fixture(scope="module")
def alone(tiny_target: Target) -> Target:
    """The target as training has it then."""
    return load_target(tiny_target.folder, dtype="float32", has_layers=False)


def _assert_same(output: Path, other: Path, target: Target) -> None:
    assert curve(output) == curve(other)
    heads = [load_head(folder, target, dtype="float32").params for folder in (output, other)]
    for leaf, same in zip(*map(jax.tree.leaves, heads), strict=True):
        np.testing.assert_array_equal(leaf, same)


def test_training_is_that_with_the_target_in_its_step(
    whole: Path, tmp_path: Path, alone: Target, tiny_target: Target
) -> None:
    """To the bit: by two processes of which one is killed after step 2, stopped after step 5, resumed with one that is
    killed too."""
    trainer = tiny_trainer(tmp_path, alone, service=ServiceSettings(target_service=2, target_ahead=1))

    def disturb(moment: Any) -> None:
        if moment.step == 2:
            os.kill(trainer.learner.features._processes[0], signal.SIGKILL)
        if moment.step == 5:
            signal.raise_signal(signal.SIGTERM)

    assert trainer.train([disturb]).step in (5, 6)
    again = tiny_trainer(tmp_path, alone, service=ServiceSettings(target_service=1, target_ahead=1), resume=True)

    def kill(moment: Any) -> None:
        if moment.step == 7:
            os.kill(again._features._processes[0], signal.SIGKILL)

    assert again.train([kill]).ending == "finished"
    _assert_same(tmp_path, whole, tiny_target)


@pytest.mark.slow
def test_one_that_stops_is_given_up_and_the_last_one_ends_the_run(
    tmp_path: Path, alone: Target, whole: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: the process is there, and says nothing. The steps so far are saved, and the run goes on from them."""
    monkeypatch.setattr(target_service, "SILENCE_SECONDS", 5)
    trainer = tiny_trainer(tmp_path, alone, save_every=0, service=ServiceSettings(target_service=2, target_ahead=1))

    def disturb(moment: Any) -> None:
        if moment.step in (2, 5):
            number = int(moment.step == 5)
            os.kill(trainer.learner.features._processes[number], signal.SIGSTOP)

    with pytest.raises(ProcessError, match=r"target process 1 does not answer for 10 seconds, and none is left"):
        trainer.train([disturb])
    assert trainer.step >= 5
    tiny_trainer(tmp_path, tiny_target, save_every=0, resume=True).train()
    _assert_same(tmp_path, whole, tiny_target)


def test_what_cannot_be_is_said_at_once(tmp_path: Path, tiny_target: Target, alone: Target) -> None:
    """More on its way than the object store has, more processes than the cluster, and another target over there."""
    room = r"5001 batches of 4 rows of 0.0164 MB: 328 MB, and Ray's object store has \d+ MB; lower --target-ahead"
    with pytest.raises(ConfigError, match=room):
        tiny_trainer(tmp_path / "a", alone, service=ServiceSettings(target_service=1, target_ahead=5000))
    with pytest.raises(ConfigError, match=r"9 workers need 9 CPU.* lower --target-service or --target-mesh"):
        tiny_trainer(tmp_path / "b", alone, service=ServiceSettings(target_service=9))
    trainer = tiny_trainer(tmp_path / "c", alone, service=ServiceSettings(target_service=1))
    weights = tiny_target.folder / "model.safetensors"
    content = weights.read_bytes()
    try:
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=r"target process 0: .* has the fingerprint .* give all"):
            trainer.train()
    finally:
        weights.write_bytes(content)
