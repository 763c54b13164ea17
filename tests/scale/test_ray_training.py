"""A run in workers of a Ray cluster of its own is the run of plain processes, bit for bit, also where a worker is
killed or the command is stopped. The commands are real ones; the target is tiny."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_commands import Runs, is_gone, is_same, steps, workers

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
    started = Runs(tmp_path_factory.mktemp("runs"), SMALL)
    yield started
    started.close()


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Path:
    """The run of two processes without Ray."""
    both = runs.train_in_two("plain")
    assert [runs.end("plain", process) for process in both] == [0, 0], runs.log("plain")
    return runs.folder / "plain"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_worker_changes_nothing(runs: Runs, plain: Path, rank: int) -> None:
    """The head and every loss, from before it was killed and after, are those of two plain processes: all workers are
    started again, and go on from the last saved state. Progress reaches the terminal; nothing is left."""
    output = f"killed{rank}"
    process = runs.train(output, *RAY)
    runs.until(output, lambda: steps(runs.folder / output) > 25)
    os.kill(dict(workers(runs, output))[rank], signal.SIGKILL)
    assert runs.end(output, process) == 0, runs.log(output)
    assert is_same(runs.folder / output, plain)
    assert sorted(number for number, _ in workers(runs, output)) == [0, 0, 1, 1]
    assert f"worker {rank} of 2: it has died" in runs.log(output)
    [begin] = re.findall(r"going on from step (\d+)", "\n".join(set(re.findall(r"going on.*", runs.log(output)))))
    assert int(begin) > 0
    assert f"step {STEPS}" in runs.log(output)
    runs.until(output, lambda: all(is_gone(worker) for _, worker in workers(runs, output)))


@pytest.mark.slow
def test_a_stopped_command_goes_on(runs: Runs, plain: Path) -> None:
    """Ctrl-C ends with the state saved and status 0; with --resume the run goes on to the same head."""
    process = runs.train("stopped", *RAY)
    runs.until("stopped", lambda: steps(runs.folder / "stopped") > 12)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of its processes
    assert runs.end("stopped", process) == 0, runs.log("stopped")
    assert "go on with specserve train --config stopped/run.yaml --resume" in runs.log("stopped")
    assert 12 < steps(runs.folder / "stopped") < STEPS
    process = runs.train("stopped", "--resume", *RAY)
    assert runs.end("stopped", process) == 0, runs.log("stopped")
    assert is_same(runs.folder / "stopped", plain)


def test_an_error_of_a_worker_ends_the_run(runs: Runs) -> None:
    """What would come again is not tried again: one line, status 2."""
    process = runs.train("wrong", *RAY, source="none.jsonl")
    assert runs.end("wrong", process) == 2, runs.log("wrong")
    said = runs.log("wrong")
    assert len(re.findall(r"^error: .*none\.jsonl", said, re.MULTILINE)) == 1, said
    assert sorted(number for number, _ in workers(runs, "wrong")) == [0, 1], said


def test_too_many_workers_are_refused(runs: Runs) -> None:
    number = 1000
    process = runs.train("many", "--ray", "--num-workers", str(number), mesh=f"data={number}", batch_size=number)
    assert runs.end("many", process) == 2, runs.log("many")
    assert f"error: {number} workers need {number} CPU, 1 each, and the Ray cluster has" in runs.log("many")


def test_a_cluster_that_is_not_there_is_said(runs: Runs) -> None:
    process = runs.train("nowhere", *RAY, "--ray-address", "127.0.0.1:1")
    assert runs.end("nowhere", process) == 2, runs.log("nowhere")
    assert "error: ray address '127.0.0.1:1' cannot be reached" in runs.log("nowhere")
