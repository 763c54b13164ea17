"""Environments of their own for what is compared with specserve, so that nothing of a peer is installed beside it; and
other work on the machine meanwhile."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from side_by_side import BenchmarkError, tail


def say(text: str) -> None:
    """Print the progress for the user, on stderr."""
    print(text, file=sys.stderr, flush=True)


def report(compare: Callable[[], Any], output: Path | None = None) -> int:
    """Run a comparison and write what it found to a JSON file, where one is named. Returns the exit status: 2 where it
    could not be done; stderr then has the reason."""
    from specserve.errors import SpecServeError  # absent from the environments that benchmarks make

    try:
        found = compare()
    except (BenchmarkError, SpecServeError) as error:
        say(f"error: {error}")
        return 2
    if output:
        output.write_text(json.dumps(found, indent=1, default=str) + "\n")
    return 0


def run(command: Sequence[str | Path], log: Path, what: str) -> None:
    """Run a command that logs into a file. Raises BenchmarkError with the file's last lines where it fails."""
    with log.open("wb") as out:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if subprocess.run([str(part) for part in command], stdout=out, stderr=out, env=environment).returncode:
            raise BenchmarkError(f"{what} failed. The last lines of {log}:\n{tail(log)}")


def spin(parent: int) -> None:
    """Take a core for as long as the parent process lives, however that ends."""
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


@contextlib.contextmanager
def load(number: int) -> Iterator[None]:
    """Have so many processes take a core each."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=spin, args=(os.getpid(),), daemon=True)
        for _ in range(number)
    ]
    for each in processes:
        each.start()
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.join()


def environment(folder: Path, packages: Sequence[str], *, needs: str = "", without: Sequence[str] = ()) -> Path:
    """Make an environment with these packages in `folder`, once, and return its interpreter.

    `needs` is a further part of the stamp by which an existing environment is recognised. The packages of `without`,
    which others bring along and nothing here uses, are taken out again. Raises BenchmarkError where
    pip cannot install the packages.
    """
    python = folder / "env" / "bin" / "python"
    stamp, expected = folder / "installed.json", json.dumps([*packages, needs])
    if stamp.is_file() and stamp.read_text() == expected:
        return python
    say(f"installing {', '.join(packages)} into {folder}, once")
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    run([sys.executable, "-m", "venv", "--clear", folder / "env"], folder / "venv.log", "making an environment")
    what = "pip install (it needs a network, and a package index that has wheels for this platform)"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", *packages], folder / "pip.log", what)
    if without:
        run([*pip, "uninstall", "--yes", *without], folder / "pip.log", "pip uninstall")
    stamp.write_text(expected)
    return python
