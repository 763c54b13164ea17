"""A run in workers of a Ray cluster of its own is the run of plain processes, bit for bit, also where a worker is
killed or the command is stopped. The commands are real ones; the target is tiny."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_commands import Runs, is_gone, is_same, steps, workers

from specserve.errors import ConfigError
from specserve.processes import ProcessError

pytestmark = pytest.mark.scale

STEPS = 120
SMALL = {
    "max-steps": STEPS,
    "seq-len": 64,
    "rollout": 2,
    "batch-size": 4,
    "eval-prompts": 0,
    "eval-every": 0,
    "bench": "",
    "save-every": 10,
    "log-every": 1,
    "mesh": "data=2",
}
RAY = ["--ray", "--num-workers", "2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    pytest.importorskip("ray")
    started = Runs(tmp_path_factory.mktemp("runs"), SMALL, {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})
    yield started
    started.close()


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Path:
    """The run of two processes without Ray."""
    both = runs.start_two("plain")
    assert [runs.end("plain", process) for process in both] == [0, 0], runs.log("plain")
    return runs.folder / "plain"


def test_workers_are_processes(runs: Runs, plain: Path) -> None:
    """The head and every loss are those of two plain processes; progress reaches the terminal; nothing is left."""
    process = runs.start("ray", *RAY)
    assert runs.end("ray", process) == 0, runs.log("ray")
    assert is_same(runs.folder / "ray", plain)
    assert f"step {STEPS}" in runs.log("ray")
    runs.until("ray", lambda: all(is_gone(worker) for _, worker in workers(runs, "ray")))
    assert not (runs.folder / "ray" / ".ray").exists()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_worker_changes_nothing(runs: Runs, plain: Path, rank: int) -> None:
    """All workers are started again, and go on from the last saved state to the same head."""
    output = f"killed{rank}"
    process = runs.start(output, *RAY)
    runs.until(output, lambda: steps(runs.folder / output) > 25)
    os.kill(dict(workers(runs, output))[rank], signal.SIGKILL)
    assert runs.end(output, process) == 0, runs.log(output)
    assert is_same(runs.folder / output, plain)
    assert sorted(number for number, _ in workers(runs, output)) == [0, 0, 1, 1]
    assert f"worker {rank} of 2: it has died" in runs.log(output)
    [begin] = re.findall(r"going on from step (\d+)", "\n".join(set(re.findall(r"going on.*", runs.log(output)))))
    assert int(begin) > 0


@pytest.mark.slow
def test_a_stopped_command_goes_on(runs: Runs, plain: Path) -> None:
    """Ctrl-C ends with the state saved and status 0; with --resume the run goes on to the same head."""
    process = runs.start("stopped", *RAY)
    runs.until("stopped", lambda: steps(runs.folder / "stopped") > 12)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of its processes
    assert runs.end("stopped", process) == 0, runs.log("stopped")
    assert "go on with specserve train --config stopped/run.yaml --resume" in runs.log("stopped")
    assert 12 < steps(runs.folder / "stopped") < STEPS
    process = runs.start("stopped", "--resume", *RAY)
    assert runs.end("stopped", process) == 0, runs.log("stopped")
    assert is_same(runs.folder / "stopped", plain)


def test_an_error_of_a_worker_ends_the_run(runs: Runs) -> None:
    """What would come again is not tried again: one line, status 2."""
    process = runs.start("wrong", *RAY, source="none.jsonl")
    assert runs.end("wrong", process) == 2, runs.log("wrong")
    said = runs.log("wrong")
    assert len(re.findall(r"^error: .*none\.jsonl", said, re.MULTILINE)) == 1, said
    assert sorted(number for number, _ in workers(runs, "wrong")) == [0, 1], said


def test_too_many_workers_are_refused(runs: Runs) -> None:
    number = 1000
    process = runs.start("many", "--ray", "--num-workers", str(number), mesh=f"data={number}", batch_size=number)
    assert runs.end("many", process) == 2, runs.log("many")
    assert f"error: {number} workers need {number} CPU, 1 each, and the Ray cluster has" in runs.log("many")


def test_a_cluster_that_is_not_there_is_said(runs: Runs) -> None:
    process = runs.start("nowhere", *RAY, "--ray-address", "127.0.0.1:1")
    assert runs.end("nowhere", process) == 2, runs.log("nowhere")
    assert "error: ray address '127.0.0.1:1' cannot be reached" in runs.log("nowhere")


def test_which_failures_are_tried_again() -> None:
    pytest.importorskip("ray")
    from ray.exceptions import ActorDiedError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    from specserve.train.workers import lasting_error

    died, lost, wrong = WorkerHealthCheckFailedError("", ActorDiedError()), ProcessError("lost"), ConfigError("wrong")
    assert lasting_error({0: lost, 1: died}) is None
    assert lasting_error({0: wrong, 1: died}) is None  # it may have followed from that
    assert lasting_error({0: lost}) is None
    assert lasting_error({0: lost, 1: wrong}) is wrong


def test_what_is_said_of_a_failed_run() -> None:
    """Our own error as it was, also out of a process of Ray's; else a line with every worker's."""
    pytest.importorskip("ray")
    from ray.exceptions import ActorDiedError, RayTaskError
    from ray.train import ControllerError, WorkerGroupError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    from specserve.train.workers import _reason

    wrong = ConfigError("wrong")
    elsewhere = RayTaskError("run", "a traceback", wrong, "worker", 1, "127.0.0.1")
    for error in (wrong, ControllerError(wrong), elsewhere, ControllerError(elsewhere)):
        assert _reason(error) is wrong
    assert _reason(elsewhere.make_dual_exception_instance()) is wrong
    died = WorkerHealthCheckFailedError("a\nb", ActorDiedError())
    many = _reason(WorkerGroupError("", {0: ValueError("bad\nand more"), 1: died}))
    assert isinstance(many, ProcessError)
    assert "(worker 0: bad; worker 1: it has died (ActorDiedError)); go on with --resume" in str(many)
    assert "(no room)" in str(_reason(ControllerError(RuntimeError("no room"))))
