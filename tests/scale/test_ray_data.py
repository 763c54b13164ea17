"""What workers of Ray Data write is what one process writes, byte for byte, also where one is killed."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Commands

pytestmark = pytest.mark.scale

PROGRAM = """
from specserve.cli.main import main
from specserve.train import capture
capture.SHARD_BYTES = 20_000  # several files of few rows
main()
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    pytest.importorskip("ray")
    started = Commands(tmp_path_factory.mktemp("data"), ("-c", PROGRAM))
    yield started
    started.close()


def regenerate(commands: Commands, name: str, *more: str) -> subprocess.Popen[bytes]:
    line = ["data", "regenerate", "--target", "target", "--source", "mix.jsonl", "--count", "0"]
    line += ["--max-slots", "4", "--temperature", "1"]
    line += ["--max-tokens", "24", "--max-model-len", "128", "--output", f"{name}.jsonl"]
    return commands.start(name, *line, *more)


@pytest.fixture(scope="module")
def alone(commands: Commands) -> bytes:
    """The file that one engine writes."""
    assert commands.end("alone", regenerate(commands, "alone")) == 0, commands.log("alone")
    rows = (commands.folder / "alone.jsonl").read_bytes()
    assert len(rows.splitlines()) > 30
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
    """Rows of before stay, of whichever writer; the rest is answered, and the file is that of one engine."""
    kept = alone.splitlines(keepends=True)
    (commands.folder / "rest.jsonl").write_bytes(b"".join(kept[5:20:3]) + kept[0][:10])
    settings = (commands.folder / "alone.jsonl.settings.json").read_bytes()
    (commands.folder / "rest.jsonl.settings.json").write_bytes(settings)
    process = regenerate(commands, "rest", "--ray", "--num-workers", "2")
    assert commands.end("rest", process) == 0, commands.log("rest")
    assert (commands.folder / "rest.jsonl").read_bytes() == alone
    assert "5 there already" in commands.log("rest")


def test_what_is_wrong_is_said_once(commands: Commands) -> None:
    """Only the workers, which have loaded the target, know its context."""
    process = regenerate(commands, "wrong", "--ray", "--max-model-len", "99999")
    assert commands.end("wrong", process) == 2, commands.log("wrong")
    assert len(re.findall("^error: ", commands.log("wrong"), re.MULTILINE)) == 1
    assert "Traceback" not in commands.log("wrong")


@pytest.mark.slow
def test_many_targets_capture_what_one_does(commands: Commands) -> None:
    line = ["data", "capture", "--target", "target", "--source", "mix.jsonl", "--seq-len", "64", "--batch-size", "2"]
    here = commands.start("here", *line, "--capture", "here")
    assert commands.end("here", here) == 0, commands.log("here")
    many = commands.start("there", *line, "--capture", "there", "--ray", "--num-workers", "2")
    assert commands.end("there", many) == 0, commands.log("there")
    files = sorted(path.relative_to(commands.folder / "here") for path in (commands.folder / "here").rglob("*.*"))
    assert len(files) > 3  # the manifest and several files
    for file in files:
        assert (commands.folder / "here" / file).read_bytes() == (commands.folder / "there" / file).read_bytes()
