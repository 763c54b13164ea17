"""Two processes train as one: real ones, with Gloo between them."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest
from tiny_run import metrics, start

from specserve import processes
from specserve.checkpoints.load import Target
from specserve.drafters.notes import read_notes
from specserve.errors import ConfigError

ONE_DEVICE = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def _start_two(target: Target, output: Path, *, death: str = "", **changes: object) -> list[subprocess.Popen]:
    """The second one may die; both write into one folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    return [
        start(
            target,
            output,
            death=death if number else "",
            environment=ONE_DEVICE,
            is_measured=True,
            coordinator=address,
            num_processes=2,
            process_id=number,
            **{"mesh": "data=2", "eval_every": 4, **changes},
        )
        for number in range(2)
    ]


def _end(running: list[subprocess.Popen]) -> list[tuple[int, str]]:
    return [(process.returncode, output) for process in running for output in [process.communicate(timeout=300)[0]]]


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path: Path, tiny_target: Target) -> None:
    """The same loss and tau as one process. One dies and the other ends too, with a word; started again, they go on bit
    for bit."""
    alone = start(tiny_target, tmp_path / "alone", environment=ONE_DEVICE, is_measured=True, eval_every=4)
    whole = _start_two(tiny_target, tmp_path / "whole")
    ends = _end([alone, *whole])
    assert [code for code, _ in ends] == [0, 0, 0], ends
    assert read_notes(tmp_path / "whole")["steps"] in (4, 8, 10)
    for row, same in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "alone"), strict=True):
        assert (row["step"], row["tokens"]) == (same["step"], same["tokens"])
        assert row["loss"] == pytest.approx(same["loss"], abs=1e-4) if row["loss"] else row["tau"] == same["tau"]

    (first, said), (second, _) = _end(_start_two(tiny_target, tmp_path / "killed", death="step 5"))
    assert (first, second) == (2, -signal.SIGKILL), said
    assert "cannot go on without the others" in said
    assert "--resume" in said
    ends = _end(_start_two(tiny_target, tmp_path / "killed", resume=True))
    assert [code for code, _ in ends] == [0, 0], ends
    assert _curve(tmp_path / "killed") == _curve(tmp_path / "whole")


def _curve(output: Path) -> list[tuple[object, ...]]:
    return [(row["step"], row["tokens"], row["loss"], row["tau"]) for row in metrics(output)]


@pytest.mark.parametrize(
    ("told", "message"),
    [(("", 2, 0), "need a coordinator"), (("", 1, 1), "need a coordinator"), (("host:1", 2, 2), "it is 0 to 1")],
)
def test_processes_that_cannot_join_are_refused(told: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processes.join(*told)


def test_one_process_agrees_with_itself() -> None:
    agree = processes.Agreement()
    assert [agree(3, 0), agree(5, 15)] == [[3, 0], [5, 15]]
    processes.check_same("settings", "anything")
    assert processes.shard_of(None, (4, 8)) == (0, 1)
    assert processes.as_lost(ValueError("UNKNOWN: Gloo all-reduce failed")) is None
