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


def test_a_job_starts_one_server_of_two_processes_again_and_again(commands: Commands) -> None:
    """A process that is killed ends all, and all are started again; SIGTERM to the job lets the server drain."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = ["--target", str(commands.folder / "target"), "--port", str(port), "--mesh", "tensor=2", *FLAGS]
    job = commands.start("job", "--ray-address", "", "--hosts", "2", "--", *words)
    commands.until("job", lambda: _is_ready(url) or job.poll() is not None)
    said = _text(url)
    [other] = _processes(commands, "1")
    other.kill()
    commands.until("job", lambda: not _is_ready(url) or job.poll() is not None)
    commands.until("job", lambda: _is_ready(url) or job.poll() is not None)
    assert _text(url) == said
    job.send_signal(signal.SIGTERM)
    assert commands.end("job", job) == 0, commands.log("job")
    assert not _processes(commands, "0", "1")
