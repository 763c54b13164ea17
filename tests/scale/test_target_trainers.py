"""Several training processes, each with target processes of its own on one Ray cluster, train the head of one process
over the same mesh with the target in its step, to the bit, whatever dies. The commands are real ones; the target is
tiny."""

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from train_commands import Runs, is_same, steps, workers

pytestmark = pytest.mark.scale

SMALL = {
    "max-steps": 200,
    "seq-len": 64,
    "rollout": 2,
    "batch-size": 8,
    "accumulate": 2,
    "eval-prompts": 0,
    "eval-every": 0,
    "bench": "",
    "save-every": 10,
    "log-every": 1,
    "mesh": "data=2",
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster with room for all, which the commands attach to."""
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks, Python of what Ray leaves open
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        ray.init(address="local", num_cpus=4, object_store_memory=100 << 20, include_dashboard=False)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[Runs]:
    del address  # the commands end before the cluster does
    started = Runs(tmp_path_factory.mktemp("runs"), SMALL, {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"})
    yield started
    started.close()


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    """One process over two devices, with the target in its step."""
    assert runs.end("whole", runs.train("whole", num_devices=2)) == 0, runs.log("whole")
    return runs.folder / "whole"


def target_processes() -> list[int]:
    """Those of the cluster that this process has started."""
    every = psutil.Process().children(recursive=True)
    return [each.pid for each in every if "TargetActor" in "".join(each.cmdline()[:1])]


@pytest.mark.slow
def test_whatever_dies_the_head_is_that_of_one_process(runs: Runs, address: str, whole: Path) -> None:
    """A target process is killed first and started again by Ray; then a training process is, so that Ray starts all of
    them again with others."""
    flags = ["--ray", "--num-workers", "2", "--ray-address", address, "--target-service", "2"]
    process = runs.train("ray", *flags)
    runs.until("ray", lambda: steps(runs.folder / "ray") > 12)
    first = target_processes()
    assert len(first) == 2
    os.kill(first[0], signal.SIGKILL)
    runs.until("ray", lambda: "died and was started again" in runs.log("ray"))
    begun = steps(runs.folder / "ray")
    runs.until("ray", lambda: steps(runs.folder / "ray") > begun + 12)
    os.kill(dict(workers(runs, "ray"))[1], signal.SIGKILL)
    assert runs.end("ray", process) == 0, runs.log("ray")
    assert "going on from step" in runs.log("ray")
    assert sorted(number for number, _ in workers(runs, "ray")) == [0, 0, 1, 1]
    assert is_same(runs.folder / "ray", whole)
    runs.until("ray", lambda: not target_processes())


@pytest.mark.slow
def test_processes_that_were_started_by_hand_share_one_cluster(runs: Runs, address: str, whole: Path) -> None:
    both = runs.train_in_two("joined", "--ray-address", address, "--target-service", "2", "--target-ahead", "1")
    assert [runs.end("joined", process) for process in both] == [0, 0], runs.log("joined")
    assert is_same(runs.folder / "joined", whole)


def test_room_for_trainers_and_targets_is_looked_for_first(runs: Runs, address: str) -> None:
    flags = ["--ray", "--num-workers", "2", "--ray-address", address, "--target-service", "4"]
    process = runs.train("many", *flags)
    assert runs.end("many", process) == 2, runs.log("many")
    needed = "error: 4 workers need 4 CPU, 1 each, beside 2 of the training processes, and the Ray cluster has 4"
    assert needed in runs.log("many")
