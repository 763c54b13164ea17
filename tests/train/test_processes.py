"""Two processes train as one: real ones, with Gloo between them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    [
        (("", 2, 0), "need a coordinator"),
        (("", 1, 1), "need a coordinator"),
        (("host:1", 2, 2), "it is 0 to 1"),
        (("auto", 2, 1), "coordinator auto asks the launcher"),
        (("host", 2, 1), "expected host:port of the first process, or auto"),
    ],
)
def test_processes_that_cannot_join_are_refused(told: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processes.join(*told)


def _meet(*told: tuple[int, int]) -> list[str]:
    """How processes of these numbers fare that come at once, each with the number of all that it was told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

    def fares(number: int, count: int) -> str:
        try:
            processes.meet(address, count, number)
        except (RuntimeError, OSError) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(told)) as pool:
        return [each.result() for each in [pool.submit(fares, *each) for each in told]]


def test_those_that_come_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _meet((0, 4), (3, 4), (1, 4), (2, 4)) == [""] * 4
    assert _meet((0, 1)) == [""]
    assert _meet((0, 3), (1, 3), (1, 3)) == ["two processes have the number 1"] * 3
    assert _meet((0, 2), (1, 3)) == ["process 1 was told of 3 processes, and the first one of 2"] * 2
    monkeypatch.setattr(processes, "START_SECONDS", 1)
    assert _meet((0, 4), (2, 4)) == ["of 4 processes 1, 3 did not come within 1 seconds"] * 2
    [alone] = _meet((1, 2))
    assert alone.startswith("process 0 did not answer within 1 seconds: ")
    assert sorted(map(bool, _meet((0, 2), (0, 2)))) == [True, True], "one has the port, and nobody comes"


def test_strangers_and_those_that_are_started_again_are_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(processes, "HELLO_SECONDS", 0.2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(processes.meet, f"127.0.0.1:{port}", 3, 0)
        _hello(port, b"").close()
        with _hello(port, b"GET / HTTP/1.1\r\n\r\n"), _hello(port, b"specserve"):
            _hello(port, b"specserve 1 3\n").close()  # killed, and started again
            others = [pool.submit(processes.meet, f"127.0.0.1:{port}", 3, 1)]
            processes.meet(f"127.0.0.1:{port}", 3, 2)
            for each in (first, *others):
                each.result()


def _hello(port: int, text: bytes) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(text)
            return connection
        except OSError:
            time.sleep(0.01)


JOIN = """
from specserve import processes
from specserve.errors import ConfigError
CHANGE
try:
    processes.join("auto", 1, 0)
    import jax
    print(jax.process_index(), "of", jax.process_count(), "with", jax.device_count())
except ConfigError as error:
    print(error)
"""


def _join(launcher: dict[str, str], change: str = "") -> subprocess.Popen[str]:
    """A process that such a launcher has started."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "KUBE"))
    }
    environment |= ONE_DEVICE | {"PYTHONPATH": str(Path(__file__).parents[2])} | launcher
    return subprocess.Popen(
        [sys.executable, "-c", JOIN.replace("CHANGE", change)], env=environment, stdout=subprocess.PIPE, text=True
    )


def _slurm(port: int, number: int) -> dict[str, str]:
    said = {"JOB_ID": "7", "STEP_NODELIST": "localhost", "NTASKS": "2", "PROCID": number, "LOCALID": number}
    return {f"SLURM_{name}": str(value) for name, value in said.items()} | {"JAX_COORDINATOR_PORT": str(port)}


def _open_mpi(port: int, number: int) -> dict[str, str]:
    said = {"SIZE": 2, "RANK": number, "LOCAL_RANK": number}
    uri = {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:9", "JAX_COORDINATOR_PORT": str(port)}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in said.items()} | uri


@pytest.mark.parametrize("launcher", [_slurm, _open_mpi])
def test_a_launcher_says_who_takes_part(launcher: Callable[[int, int], dict[str, str]]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = [_join(launcher(port, number)) for number in range(2)]
    assert [said for _, said in _end(both)] == ["0 of 2 with 2\n", "1 of 2 with 2\n"]


def test_who_is_not_there_in_time_is_not_waited_for() -> None:
    """Where the launcher alone knows who takes part, and JAX waits."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    [(code, said)] = _end([_join(_slurm(port, 1), "processes.START_SECONDS = 1")])
    assert (code, said) == (0, "not all processes have come within 1 seconds; start all of them again\n")


def test_without_a_launcher_it_is_said_which_there_are() -> None:
    [(_, said)] = _end([_join({})])
    assert said.startswith("coordinator auto: no launcher says who takes part (")
    assert all(name in said for name in ("Slurm", "Open MPI", "Cloud TPU", "jax[k8s]", "host:port"))


def test_one_process_agrees_with_itself() -> None:
    agree = processes.Agreement()
    assert [agree(3, 0), agree(5, 15)] == [[3, 0], [5, 15]]
    processes.check_same("settings", "anything")
    assert processes.shard_of(None, (4, 8)) == (0, 1)
    assert processes.as_lost(ValueError("UNKNOWN: Gloo all-reduce failed")) is None
