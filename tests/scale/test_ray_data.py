"""What workers of Ray Data write is what one process writes, byte for byte, also where one is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_folder import write_folder, write_mixture

pytestmark = pytest.mark.scale

PATIENCE = 300.0  # seconds, on a machine that is busy with other things
NUM_ROWS = 60
PROGRAM = """
from specserve.cli.main import main
from specserve.train import capture
capture.SHARD_BYTES = 20_000  # several files of few rows
main()
"""


class Commands:
    """Runs `specserve data` on a tiny target."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_folder(folder / "target")
        write_mixture(folder / "mix.jsonl", NUM_ROWS)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *line: str) -> subprocess.Popen[bytes]:
        environment = {
            "XLA_FLAGS": "",
            "HF_HUB_OFFLINE": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "data", *line, "--target", "target"],
                cwd=self.folder,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, name: str, found: Callable[[], object]) -> None:
        """Wait for something of a command, whose log is shown where it does not come."""
        end = time.monotonic() + PATIENCE
        while not found():
            assert time.monotonic() < end, self.log(name)
            time.sleep(0.02)

    def end(self, name: str, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log(name)) from None

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    pytest.importorskip("ray")
    started = Commands(tmp_path_factory.mktemp("data"))
    yield started
    started.close()


def regenerate(commands: Commands, name: str, *more: str) -> subprocess.Popen[bytes]:
    line = ["regenerate", "--source", "mix.jsonl", "--count", "0", "--max-slots", "4", "--temperature", "1"]
    line += ["--max-tokens", "24", "--max-model-len", "128", "--output", f"{name}.jsonl"]
    return commands.start(name, *line, *more)


@pytest.fixture(scope="module")
def alone(commands: Commands) -> bytes:
    """The file that one engine writes."""
    assert commands.end("alone", regenerate(commands, "alone")) == 0, commands.log("alone")
    rows = (commands.folder / "alone.jsonl").read_bytes()
    assert len(rows.splitlines()) > NUM_ROWS // 2
    return rows


def children(process: int) -> list[int]:
    """The actors among the processes that a command's cluster has started, by Linux's own list."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                line = (folder / "cmdline").read_bytes()
                session = (folder / "stat").read_text().rpartition(")")[2].split()[3]
            except OSError:
                continue
            if b"MapWorker" in line and int(session) == process:
                found.append(int(folder.name))
    return found


def test_many_engines_write_the_file_of_one(commands: Commands, alone: bytes) -> None:
    """A worker that is killed on the way is started again, and its questions are answered anew. What is there is not
    asked again."""
    process = regenerate(commands, "many", "--ray", "--num-workers", "2")
    output = commands.folder / "many.jsonl"
    commands.until("many", lambda: output.is_file() and output.stat().st_size)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    assert commands.end("many", process) == 0, commands.log("many")
    assert output.read_bytes() == alone
    assert re.search(rf"{len(alone.splitlines())} rows written, 0 there already", commands.log("many"))
    assert commands.end("again", regenerate(commands, "many", "--ray", "--num-workers", "2")) == 0


@pytest.mark.slow
def test_a_stopped_command_goes_on(commands: Commands, alone: bytes) -> None:
    """Rows of before stay, whoever wrote them; the rest is answered, and the file is that of one engine."""
    kept = alone.splitlines(keepends=True)
    (commands.folder / "rest.jsonl").write_bytes(b"".join(kept[5:20:3]) + kept[0][:10])
    settings = (commands.folder / "alone.jsonl.settings.json").read_bytes()
    (commands.folder / "rest.jsonl.settings.json").write_bytes(settings)
    process = regenerate(commands, "rest", "--ray", "--num-workers", "2")
    assert commands.end("rest", process) == 0, commands.log("rest")
    assert (commands.folder / "rest.jsonl").read_bytes() == alone
    assert "5 there already" in commands.log("rest")


def test_what_is_wrong_is_said_once(commands: Commands) -> None:
    """Only the workers, who have loaded the target, know its context."""
    process = regenerate(commands, "wrong", "--ray", "--max-model-len", "99999")
    assert commands.end("wrong", process) == 2, commands.log("wrong")
    assert len(re.findall("^error: ", commands.log("wrong"), re.MULTILINE)) == 1
    assert "Traceback" not in commands.log("wrong")


@pytest.mark.slow
def test_many_targets_capture_what_one_does(commands: Commands) -> None:
    line = ["--source", "mix.jsonl", "--seq-len", "64", "--batch-size", "2"]
    here = commands.start("here", "capture", *line, "--capture", "here")
    assert commands.end("here", here) == 0, commands.log("here")
    many = commands.start("there", "capture", *line, "--capture", "there", "--ray", "--num-workers", "2")
    assert commands.end("there", many) == 0, commands.log("there")
    files = sorted(path.relative_to(commands.folder / "here") for path in (commands.folder / "here").rglob("*.*"))
    assert len(files) > 3  # the manifest and several files
    for file in files:
        assert (commands.folder / "here" / file).read_bytes() == (commands.folder / "there" / file).read_bytes()
