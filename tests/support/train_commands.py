"""`specserve train` on a tiny target, watched by what it prints and writes."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands import Commands
from tiny_run import curve, metrics


class Runs(Commands):
    """Runs of `specserve train`, whose logs have the names of their outputs. `settings` are flags of every run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        super().__init__(folder, environment=environment)
        self._settings = settings

    def train(self, output: str, *more: str, num_devices: int = 1, **changes: Any) -> subprocess.Popen[bytes]:
        settings = {**self._settings} | {name.replace("_", "-"): value for name, value in changes.items()}
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        line = ["train", "--target", "target", "--source", "mix.jsonl", *flags, "--output", output]
        return self.start(output, *line, *more, num_devices=num_devices)

    def train_in_two(self, output: str, *more: str) -> list[subprocess.Popen[bytes]]:
        """Both processes of a run that are started by hand."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        joined = ["--coordinator", address, "--num-processes", "2"]
        return [self.train(output, *joined, "--process-id", str(number), *more) for number in range(2)]


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
