"""A target in processes of its own, on a Ray cluster of this machine: training sees what it would have seen with the
target in its step, whatever happens to those processes."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_run import curve, tiny_trainer

from specserve.checkpoints.load import Target, load_target
from specserve.drafters.head import load_head
from specserve.train.settings import ServiceSettings

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module", autouse=True)
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import ray

    ray.init(address="local", num_cpus=4, object_store_memory=100 << 20, include_dashboard=False)
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


def test_training_is_that_with_the_target_in_it(
    whole: Path, tmp_path: Path, alone: Target, tiny_target: Target
) -> None:
    """To the bit, by two processes, stopped after step 4 and resumed with one."""

    def stop(moment: Any) -> None:
        if moment.step == 4:
            signal.raise_signal(signal.SIGTERM)

    trainer = tiny_trainer(tmp_path, alone, service=ServiceSettings(target_service=2))
    assert trainer.train([stop]).step in (4, 5)
    last = tiny_trainer(tmp_path, alone, service=ServiceSettings(target_service=1, target_ahead=1), resume=True).train()
    assert last.ending == "finished"
    _assert_same(tmp_path, whole, tiny_target)
