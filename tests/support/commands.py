"""Commands of specserve on a tiny target, as users start them: each is a process of its own, in one folder, in which
programs are compiled once."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_folder import write_folder, write_mixture

PATIENCE = 300.0  # seconds, on a machine that is busy with other things


class Commands:
    """The folder has the target in `target` and a mixture in `mix.jsonl`. Paths in a command are relative to it: Ray's
    workers are where the command is. `program` is what Python is given before a command's words. `environment` changes
    that of the commands, whose programs are compiled quickly where it does not say otherwise."""

    def __init__(
        self,
        folder: Path,
        program: Sequence[str] = ("-m", "specserve.cli.main"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self._program, self._environment = folder, program, environment or {}
        write_folder(folder / "target")
        write_mixture(folder / "mix.jsonl")
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *words: str, num_devices: int = 1) -> subprocess.Popen[bytes]:
        """Start `specserve WORDS...` on so many devices. What it says is added to the log of this name."""
        environment = {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
            "HF_HUB_OFFLINE": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **self._environment,
        }
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *self._program, *words],
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

    def until(self, name: str, found: Callable[[], Any]) -> None:
        """Wait for something of a command, whose log is shown where it does not come."""
        end = time.monotonic() + PATIENCE
        while not found():
            assert time.monotonic() < end, self.log(name)
            time.sleep(0.02)

    def end(self, name: str, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a command, and give its status."""
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log(name)) from None

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
