"""One server of several processes that a Ray job starts: deploy/ray_group.py, on a cluster of this machine."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from commands import PATIENCE, Commands

pytestmark = [pytest.mark.scale, pytest.mark.slow]
SCRIPT = Path(__file__).parents[2] / "deploy" / "ray_group.py"
FLAGS = ["--max-slots", "2", "--max-model-len", "64", "--speculation", "ngram:3", "--no-constrained"]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    pytest.importorskip("ray")
    started = Commands(tmp_path, program=[str(SCRIPT)])
    yield started
    started.close()


def _text(url: str) -> str:
    body = {"prompt": "what is 7 plus one?", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"][0]["text"]


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def _processes(commands: Commands, *numbers: str) -> list[psutil.Process]:
    """Those of the server with these numbers."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = each.cmdline()
            if str(commands.folder / "target") in words and words[-2] == "--process-id" and words[-1] in numbers:
                found.append(each)
    return found


def _words(commands: Commands, port: int, mesh: str = "tensor=2") -> list[str]:
    return ["--target", str(commands.folder / "target"), "--port", str(port), "--mesh", mesh, *FLAGS]


def test_a_job_starts_one_server_of_two_processes_again_and_again(commands: Commands) -> None:
    """A process that is killed ends all, and so does the actor of Ray beside one, which a lost machine takes away; all
    are started again. SIGTERM to the job lets the server drain."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    job = commands.start("job", "--ray-address", "", "--hosts", "2", "--", *_words(commands, port))
    commands.until("job", lambda: _is_ready(url) or job.poll() is not None)
    said = _text(url)
    for is_actor in (False, True):
        [other] = _processes(commands, "1")
        killed = other.parent() if is_actor else other
        assert killed is not None
        killed.kill()
        commands.until("job", lambda: not _is_ready(url) or job.poll() is not None)
        commands.until("job", lambda: _is_ready(url) or job.poll() is not None)
        assert _text(url) == said
        assert ("it has died" in commands.log("job")) == is_actor
    job.send_signal(signal.SIGTERM)
    assert commands.end("job", job) == 0, commands.log("job")
    assert not _processes(commands, "0", "1")


def test_a_wrong_setting_ends_the_job(commands: Commands) -> None:
    """It would come again: each process is started once."""
    job = commands.start("job", "--ray-address", "", "--hosts", "2", "--", *_words(commands, 0, mesh="tensor=3"))
    assert commands.end("job", job) == 1, commands.log("job")
    log = commands.log("job")
    assert log.count("error: mesh tensor=3 needs 3 devices, this machine has 2") == 2, log
    assert "error: a process says in this log what is wrong with its settings" in log
    assert "Traceback" not in log


def test_hosts_that_there_is_no_room_for_are_an_error(commands: Commands) -> None:
    """At once where the whole cluster has too little; after a while where Ray finds no host with all of it."""
    words = _words(commands, 0)
    job = commands.start("large", "--ray-address", "", "--hosts", "2", "--each", "TPU=4", "--", *words)
    assert commands.end("large", job) == 1, commands.log("large")
    assert "2 workers need 8 TPU, 4 each, and the Ray cluster has 0; lower --hosts or --each" in commands.log("large")
