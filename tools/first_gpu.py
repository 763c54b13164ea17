"""Run every check and figure that waits for an NVIDIA GPU, the cheapest first: what to do with the first 45 minutes on
one.

    python tools/first_gpu.py                                 # all stages
    python tools/first_gpu.py --stages versions,kernels
    python tools/first_gpu.py --target ./smollm2              # also trains a head for that model, and serves it

A stage is one or more commands, each a process with a limit of its own: what fails or takes too long is in the table
with its last line, and the next begins. `--output` gets a log for each command, and `first_gpu.json`, which is written
anew after each. Nothing is downloaded, and the bundled weights are not needed. `specserve` must be importable.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ("-m", "specserve.cli.main")
IN_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE"}  # loops too
TFRT = {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"}
VERSIONS = """
import json, os, sys, jax, jaxlib
from specserve.provenance import collect
found = {"python": sys.version, "jaxlib": jaxlib.__version__, "flags": os.environ.get("XLA_FLAGS")}
print(json.dumps({**found, "devices": [device.device_kind for device in jax.devices()], **collect()}, default=str))
assert jax.default_backend() == "gpu", jax.default_backend()
"""
COUNTS = """
import jax, sys
sys.path.insert(0, "benchmarks")
from steps import count_launches
for way in ("off", "chain:3"):
    print(way, *("%s: %d launches, %d started by the host" % each for each in count_launches(way)), sep="; ")
"""


@dataclass(frozen=True)
class Command:
    """A command line of Python, and the seconds that it may take."""

    name: str
    words: Sequence[str]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    stage: str
    name: str
    state: str  # "ok", "failed" or "out of time"
    seconds: float
    last: str  # line of its output


def stages(target: str, head: Path) -> Mapping[str, Sequence[Command]]:
    """The stages by name, in the order in which they run."""
    steps = ("benchmarks/steps.py", "--target", "qwen3-8b", "--slots", "32", "--max-model-len", "4096")
    few = (*steps, "--speculation", "off,chain:3", "--rounds", "30")
    small = ("benchmarks/steps.py", "--target", "smollm2-135m", "--slots", "32", "--speculation", "off,chain:3")
    attention = ("--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--page-size", "32")
    entries = ("--entries", "1024,8192,32768", "--queries", "1,4,16", "--rows", "1,8,64", "--target", "qwen3-8b")
    found = {
        "versions": [Command("versions", ("-c", VERSIONS), 120)],
        "kernels": [
            Command("laws of the kernels", ("-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests/kernels"), 420)
        ],
        "engine": [
            Command("laws of the engine", ("-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests/serve"), 420),
        ],
        "launches": [Command("as compiled here, and without a device", ("-c", COUNTS), 240)],
        "steps": [
            Command("as they are", few, 420),
            Command("batches from 1", (*few, "--least-batch", "1"), 420),
            Command("loops in graphs, bursts of 8", (*few, "--burst", "8"), 420, IN_GRAPHS),
            Command("the TFRT client", few, 420, TFRT),
            Command("a small target", small, 240),
        ],
        "attention": [Command("attention and products", ("benchmarks/kernels.py", *attention, *entries), 420)],
        "prompts": [Command("prompts", (*steps, "--speculation", "off", "--rounds", "10", "--prompts"), 300)],
    }
    if target:
        line = (*COMMAND, "train", "--target", target, "--source", "self", "--budget", "10m", "--output", str(head))
        pair = ("--target", target, "--draft", str(head))
        found["a head"] = [
            Command("trained for ten minutes", line, 900),
            Command("changes no token", (*COMMAND, "verify", *pair), 300),
            Command("tokens per second", (*COMMAND, "bench", "engine", *pair), 300),
        ]
    return found


def run_stages(chosen: Mapping[str, Sequence[Command]], output: Path, limit: float) -> Iterator[Result]:
    """Run the commands of the stages, in all for at most `limit` seconds. What is left then is not begun."""
    end = time.monotonic() + limit
    for stage, commands in chosen.items():
        for command in commands:
            seconds = min(command.seconds, end - time.monotonic())
            if seconds <= 0:
                yield Result(stage, command.name, "not begun", 0.0, "")
                continue
            yield _run(
                stage, command, output / f"{stage}-{command.name}.log".replace(" ", "-").replace(",", ""), seconds
            )


def _run(stage: str, command: Command, log: Path, seconds: float) -> Result:
    own = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    begin, state = time.monotonic(), "ok"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *command.words],
            cwd=ROOT,
            env={**os.environ, **own, **command.environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if process.wait(seconds):
                state = "failed"
        except subprocess.TimeoutExpired:
            state = "out of time"
            os.killpg(process.pid, 9)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Result(stage, command.name, state, time.monotonic() - begin, lines[-1] if lines else "")


def main() -> int:
    """Print a line for each command as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", help="some of them, with commas (all)")
    parser.add_argument("--target", default="", help="folder of a chat model: a head for it is trained and served")
    parser.add_argument(
        "--output", type=Path, default=Path("first_gpu"), help="folder for logs and figures (first_gpu)"
    )
    parser.add_argument("--minutes", type=float, default=45, help="for all of them together (45)")
    given = parser.parse_args()
    known = stages(given.target, given.output.absolute() / "head")
    names = given.stages.split(",") if given.stages else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--stages {unknown[0]}: expected some of {', '.join(known)}")
    given.output.mkdir(parents=True, exist_ok=True)
    results = []
    for result in run_stages({name: known[name] for name in names}, given.output, 60 * given.minutes):
        results.append(result)
        (given.output / "first_gpu.json").write_text(json.dumps([asdict(each) for each in results], indent=2) + "\n")
        print(f"{result.stage}, {result.name}: {result.state} after {result.seconds:.0f} s; {result.last}", flush=True)
    return int(any(result.state != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())
