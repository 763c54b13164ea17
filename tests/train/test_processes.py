"""Two processes train as one: real ones, with Gloo between them."""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from rounding import assert_same
from tiny_run import NormEvaluator, metrics, noise_of, numbers, start, tiny_trainer

from specserve import log, processes
from specserve.checkpoints.load import Target
from specserve.errors import ConfigError
from specserve.interop.notes import read_notes

ONE_DEVICE = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


@pytest.fixture(autouse=True)
def _optax_promotes() -> Iterator[None]:
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


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
    one, two = metrics(tmp_path / "alone"), metrics(tmp_path / "whole")
    assert [(row["step"], row["tokens"]) for row in two] == [(row["step"], row["tokens"]) for row in one]
    (losses, taus), (same, other) = (numbers(tmp_path / name).values() for name in ("whole", "alone"))
    assert (taus == other).all(), "the same tokens are accepted"

    def run(target: Target, output: Path) -> np.ndarray:
        tiny_trainer(output, target, evaluator=NormEvaluator(), save_every=0).train()
        return numbers(output)["losses"]

    assert_same(losses, same, noise_of(run, tiny_target, tmp_path / "moved"))

    (first, said), (second, _) = _end(_start_two(tiny_target, tmp_path / "killed", death="step 5"))
    assert (first, second) == (3, -signal.SIGKILL), said
    assert "cannot go on without the others" in said
    assert "--resume" in said
    ends = _end(_start_two(tiny_target, tmp_path / "killed", resume=True))
    assert [code for code, _ in ends] == [0, 0], ends
    assert _curve(tmp_path / "killed") == _curve(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_process_ends_the_other(tmp_path: Path, tiny_target: Target, silent: int) -> None:
    """As one on a machine that is gone: it does nothing, and its connections stay open."""
    both = _start_two(tiny_target, tmp_path, max_steps=10**6, eval_every=0)
    try:
        begin = time.monotonic()
        while not (tmp_path / "metrics.jsonl").exists() or len(metrics(tmp_path)) < 5:
            assert time.monotonic() - begin < 300
            time.sleep(0.1)
        both[silent].send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        said, _ = both[1 - silent].communicate(timeout=300)
        assert both[1 - silent].returncode != 0, said
        assert time.monotonic() - begin < 3 * 30, "thrice the promise of the docs, as this machine may be busy"
    finally:
        for each in both:
            each.kill()
            each.communicate()


def _curve(output: Path) -> list[tuple[object, ...]]:
    return [(row["step"], row["tokens"], row["loss"], row["tau"]) for row in metrics(output)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("", 2, 0), "need a coordinator"),
        (("", 1, 1), "need a coordinator"),
        (("host:1", 2, 2), "it is 0 to 1"),
        (("auto", 2, 1), "coordinator auto asks the launcher"),
        (("host", 2, 1), "expected host:port of the first process, or auto"),
    ],
)
def test_processes_that_cannot_join_are_refused(setting: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processes.join(*setting, 60)


def _meet(*numbers: tuple[int, int], seconds: int = 60) -> list[str]:
    """Have processes come at once, each with its number and the number of all as it has it. Returns errors, or ""."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

    def fares(number: int, count: int) -> str:
        try:
            processes.meet(address, count, number, seconds)
        except (RuntimeError, OSError) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(numbers)) as pool:
        return [each.result() for each in [pool.submit(fares, *each) for each in numbers]]


def test_those_that_come_get_the_same_error() -> None:
    assert _meet((0, 4), (3, 4), (1, 4), (2, 4)) == [""] * 4
    assert _meet((0, 1)) == [""]
    assert _meet((0, 3), (1, 3), (1, 3)) == ["two processes have the number 1"] * 3
    assert _meet((0, 2), (1, 3)) == ["process 1 was told of 3 processes, and the first one of 2"] * 2
    assert _meet((0, 4), (2, 4), seconds=1) == ["of 4 processes 1, 3 did not come within 1 seconds"] * 2
    [alone] = _meet((1, 2), seconds=1)
    assert alone.startswith("process 0 did not answer within 1 seconds: ")
    assert all(_meet((0, 2), (0, 2), seconds=1)), "one has the port, and nobody comes"


def test_who_is_missing_is_said_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the first process and by all that have come; and by those that do not find the first one."""
    monkeypatch.setattr(log, "SAY_SECONDS", 0.1)
    caplog.set_level(logging.INFO, "specserve")
    _meet((0, 4), (2, 4), seconds=1)
    line = re.compile(r"waiting for 1, 3 of 4 processes, (\d) seconds more at most")
    found = [(record.thread, line.fullmatch(record.message)) for record in caplog.records]
    for thread in {thread for thread, _ in found}:
        seconds = [int(match[1]) for each, match in found if each == thread and match]
        assert len(seconds) > 1
        assert seconds == sorted(seconds, reverse=True)
    assert len({thread for thread, match in found if match}) == 2, "in both processes"
    caplog.clear()
    _meet((1, 2), seconds=1)
    assert re.fullmatch(
        r"waiting for process 0 at 127.0.0.1:\d+, [01] seconds more at most \(.*refused.*\)", caplog.messages[0]
    )


def test_strangers_and_those_that_are_started_again_are_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(processes, "HELLO_SECONDS", 0.2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(processes.meet, f"127.0.0.1:{port}", 3, 0, 60)
        _hello(port, b"").close()
        with _hello(port, b"GET / HTTP/1.1\r\n\r\n"), _hello(port, b"specserve"):
            _hello(port, b"specserve 1 3\n").close()  # killed, and started again
            others = [pool.submit(processes.meet, f"127.0.0.1:{port}", 3, 1, 60)]
            processes.meet(f"127.0.0.1:{port}", 3, 2, 60)
            for each in (first, *others):
                each.result()


def test_one_that_ends_while_the_first_waits_may_be_started_again() -> None:
    """Its new connection is there before anybody has looked whether the old one still is."""
    pairs, came = [socket.socketpair() for _ in range(3)], {}
    for number, (_, ours) in zip((1, 1, 2), pairs, strict=True):
        ours.sendall(f"specserve {number} 3\n".encode())
    arriving = iter(pairs)

    def accept() -> tuple[socket.socket, None]:
        if (pair := next(arriving)) is pairs[1]:
            pairs[0][1].close()
        return pair[0], None

    listener: Any = SimpleNamespace(accept=accept, settimeout=lambda _seconds: None)
    with contextlib.ExitStack() as stack:
        assert processes._gather(stack, listener, 3, came, 60) == ""
    assert came == {1: pairs[1][0], 2: pairs[2][0]}
    for _, ours in pairs:
        ours.close()


def test_processes_that_have_come_and_are_not_connected_get_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is not that some are missing: JAX's service is what did not answer, of which a proxy is a cause."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    is_over = threading.Event()
    monkeypatch.setattr(jax.config, "update", lambda *_setting: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_options: is_over.wait(60))
    monkeypatch.setattr(processes, "INITIALIZE_SECONDS", 0.05)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    said = rf"coordinator {address}: all 1 processes have come, .* connect process 0 within .*HTTPS_PROXY.*start all"
    with pytest.raises(ConfigError, match=said):
        processes.join(address, 1, 0, 60)
    is_over.set()


def _hello(port: int, text: bytes) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(text)
            return connection
        except OSError:
            time.sleep(0.01)


JOIN = """
import logging
from specserve import log, processes
from specserve.errors import ConfigError
log.SAY_SECONDS = 0.2
log.setup()
try:
    processes.join("auto", 1, 0, SECONDS)
    import jax
    print(jax.process_index(), "of", jax.process_count(), "with", jax.device_count())
except ConfigError as error:
    print(error)
"""


def _join(launcher: dict[str, str], seconds: int = 60) -> subprocess.Popen[str]:
    """A process that such a launcher has started."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "KUBE"))
    }
    environment |= ONE_DEVICE | {"PYTHONPATH": str(Path(__file__).parents[2])} | launcher
    return subprocess.Popen(
        [sys.executable, "-c", JOIN.replace("SECONDS)", f"{seconds})")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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


def test_a_process_that_is_not_there_in_time_is_not_waited_for() -> None:
    """Where the launcher alone knows the processes, and JAX waits. The log reports that it does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = _join(_slurm(port, 1), seconds=1)
    said, logged = alone.communicate(timeout=300)
    assert (alone.returncode, said) == (0, "not all processes have come within 1 seconds; start all of them again\n")
    assert "waiting for the other processes, 1 seconds more at most" in logged


def test_without_a_launcher_it_is_said_which_there_are() -> None:
    [(_, said)] = _end([_join({})])
    assert said.startswith("coordinator auto: no launcher says who takes part (")
    assert all(name in said for name in ("Slurm", "Open MPI", "Cloud TPU", "jax[k8s]", "host:port"))


def test_a_mistake_has_another_status_than_the_end_of_another_process() -> None:
    """So that the two can be distinguished before processes are started again."""
    assert processes.exit_status(ConfigError("--mesh")) == 2
    assert processes.exit_status(processes.ProcessError("process 1 has ended")) == 3
    assert processes.exit_status(RuntimeError("the device failed")) == 3


def test_one_process_agrees_with_itself() -> None:
    agree = processes.Agreement()
    assert [agree(3, 0), agree(5, 15)] == [[3, 0], [5, 15]]
    processes.check_same("settings", "anything")
    assert processes.shard_of(None, (4, 8)) == (0, 1)
    assert processes.as_lost(ValueError("UNKNOWN: Gloo all-reduce failed")) is None
