"""Real `specserve train` commands on a tiny target, watched by what they print and write."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiny_folder import write_folder, write_mixture
from tiny_run import curve, metrics

PATIENCE = 300.0  # seconds, on a machine that is busy with other things


class Runs:
    """Starts `specserve train` on a tiny target, each run as a process of its own."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """`settings` are flags of every run, and `environment` is set beside what keeps it on this machine's CPU."""
        self.folder, self._settings, self._environment = folder, settings, environment
        write_folder(folder / "target")
        write_mixture(folder / "mix.jsonl")
        self._started: list[subprocess.Popen[str]] = []

    def start(self, output: str, *more: str, num_devices: int = 1, **changes: Any) -> subprocess.Popen[str]:
        """Relative paths: workers are where the command is."""
        settings = {**self._settings} | {name.replace("_", "-"): value for name, value in changes.items()}
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        line = ["train", "--target", "target", "--source", "mix.jsonl", *flags, "--output", output, *more]
        environment = {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
            "HF_HUB_OFFLINE": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONPATH": str(Path(__file__).parents[1]),
            **self._environment,
        }
        with (self.folder / f"{output}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "specserve.cli.main", *line],
                cwd=self.folder,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def start_two(self, output: str, *more: str) -> list[subprocess.Popen[str]]:
        """Both processes of a run without `--ray`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        joined = ["--coordinator", address, "--num-processes", "2"]
        return [self.start(output, *joined, "--process-id", str(number), *more) for number in range(2)]

    def log(self, output: str) -> str:
        return (self.folder / f"{output}.log").read_text()

    def until(self, output: str, found: Callable[[], Any]) -> Any:
        """Wait for something of a run, whose log is shown where it does not come."""
        end = time.monotonic() + PATIENCE
        while not (what := found()):
            assert time.monotonic() < end, self.log(output)
            time.sleep(0.05)
        return what

    def end(self, output: str, process: subprocess.Popen[str]) -> int:
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log(output)) from None

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


def is_same(output: Path, plain: Path) -> bool:
    weights = [(folder / "model.safetensors").read_bytes() for folder in (output, plain)]
    return weights[0] == weights[1] and curve(output) == curve(plain)


def workers(runs: Runs, output: str) -> list[tuple[int, int]]:
    """(rank, process) of each worker that has begun, in the order in which they did."""
    found = re.findall(r"worker (\d+) of 2 is process (\d+) on ", runs.log(output))
    return [(int(rank), int(process)) for rank, process in found]


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def steps(output: Path) -> int:
    return metrics(output)[-1]["step"] if (output / "metrics.jsonl").is_file() and metrics(output) else 0
