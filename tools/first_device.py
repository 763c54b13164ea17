"""The parts that `first_gpu.py` and `first_tpu.py` share: stages of commands, each a process with a limit of its own,
and a table of what came of them.

What fails or takes too long is in the table with its last line, and the next begins. The folder of the output gets a
log for each command, and a JSON file with the last lines of all of them, which is written anew after each.
Nothing is downloaded, and the bundled weights are not needed. `specserve` must be importable.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

LINES = 60  # of each command's output, which a table fits into
ROOT = Path(__file__).resolve().parent.parent
COMMAND = ("-m", "specserve.cli.main")
VERSIONS = """
import importlib.metadata, json, os, sys, jax
from specserve.mesh import COMPILER_FLAGS
from specserve.provenance import collect
installed = {each.name: each.version for each in importlib.metadata.distributions()}
names = "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13"
found = {name: installed.get(name) for name in names}
found |= {name: os.environ.get(name) for name in COMPILER_FLAGS}
found |= {"driver": jax.devices()[0].client.platform_version, "memory": jax.devices()[0].memory_stats()}
print(json.dumps({**found, "devices": list(map(str, jax.devices())), **collect()}, default=str))
assert jax.default_backend() == sys.argv[1], jax.default_backend()
"""
COMPILED = """
import jax, sys
sys.path.insert(0, "benchmarks")
from steps import count_steps
for way in ("off", "chain:3"):
    for name, of in count_steps(way):
        sizes = "%.1f MB beside its arguments, %.1f MB moved" % (of.temporary_bytes / 1e6, of.moved_bytes / 1e6)
        print(way, name, sizes, "%d launches, %d started by the host" % (of.launches, of.parts), sep="; ")
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
    state: str  # "ok", "failed", "out of time" or "not begun"
    seconds: float
    last: str  # line of its output
    lines: Sequence[str] = ()  # the last ones of its output


@dataclass(frozen=True)
class Models:
    """What the stages run: a preset's shapes with random weights, and perhaps a model that a head is trained for."""

    preset: str
    context: int  # tokens of each of the preset's sequences
    mesh: str  # devices that the preset is spread over; empty: one
    target: str  # a folder; empty: none
    head: Path  # where the head for it goes

    @property
    def steps(self) -> Sequence[str]:
        """The words that time steps of the preset."""
        sizes = ("--slots", "32", "--max-model-len", str(self.context))
        return ("benchmarks/steps.py", "--target", self.preset, *(("--mesh", self.mesh) if self.mesh else ()), *sizes)

    @property
    def ways(self) -> Sequence[str]:
        """The same for plain steps and chains."""
        return (*self.steps, "--speculation", "off,chain:3", "--rounds", "30")

    @property
    def train(self) -> Sequence[str]:
        """The words that time training steps: with a row for each device, which share the parameters out."""
        number = math.prod(map(int, re.findall(r"=(\d+)", self.mesh)))
        spread = ("--mesh", f"fsdp={number}", "--batch-size", str(number)) if self.mesh else ()
        return ("benchmarks/training.py", "step", "--target", self.preset, *spread)


Stages = Mapping[str, Sequence[Command]]

_SMALL = ("benchmarks/steps.py", "--target", "smollm2-135m", "--slots", "32", "--speculation", "off,chain:3")
SMALL_TARGET = Command("a small target", _SMALL, 240)  # fits any device; its heads are of 64 channels
ATTENTION = ("benchmarks/kernels.py", "--heads", "32", "--kv-heads", "8", "--head-dim", "128")  # of Qwen3-8B
ENTRIES = ("--entries", "1024,8192,32768", "--queries", "1,4,16")


def checks(
    backend: str, mark: str, processes: int = 0, environment: Mapping[str, str] = MappingProxyType({})
) -> Stages:
    """The first stages on any device: what is installed, the laws that are marked for it, and what its compiler makes
    of steps. The laws run in so many processes, where the device takes several; 0: in one."""

    def laws(folder: str) -> Sequence[str]:
        spread = ("-n", str(processes), "--dist", "load")  # their time is the compiler's
        return ("-m", "pytest", "-q", *spread, "-p", "no:benchmark", "-m", mark, folder)

    return {
        "versions": [Command("versions", ("-c", VERSIONS, backend), 120)],
        "kernels": [Command("laws of the kernels", laws("tests/kernels"), 420, environment)],
        "engine": [Command("laws of the engine", laws("tests/serve"), 420, environment)],
        "compiled": [Command("as compiled here, and without a device", ("-c", COMPILED), 300)],
    }


def training(models: Models) -> Stages:
    """The last stages on any device: prompts, training steps, and a head that is trained, served and timed."""
    prompts = (*models.steps, "--speculation", "off", "--rounds", "10", "--prompts")
    found = {
        "prompts": [Command("prompts, and steps beside them", prompts, 420)],
        "training": [
            Command("four layers", (*models.train, "--num-layers", "4"), 300),
            Command("all layers", models.train, 480),
        ],
    }
    if models.target:
        line = ("train", "--target", models.target, "--source", "self", "--budget", "10m", "--output", str(models.head))
        pair = ("--target", models.target, "--draft", str(models.head))
        found["a head"] = [
            Command("trained for ten minutes", (*COMMAND, *line), 900),
            Command("changes no token", (*COMMAND, "verify", *pair), 300),
            Command("tokens per second", (*COMMAND, "bench", "engine", *pair), 300),
        ]
    return found


def run_stages(
    chosen: Stages, output: Path, limit: float, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Result]:
    """Run the commands of the stages, in all for at most `limit` seconds. What is left then is not begun."""
    end = time.monotonic() + limit
    for stage, commands in chosen.items():
        for command in commands:
            seconds = min(command.seconds, end - time.monotonic())
            if seconds <= 0:
                yield Result(stage, command.name, "not begun", 0.0, "")
                continue
            name = f"{stage}-{command.name}.log".replace(" ", "-").replace(",", "")
            yield _run(stage, command, output / name, seconds, environment)


def _run(stage: str, command: Command, log: Path, seconds: float, environment: Mapping[str, str]) -> Result:
    own = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))), "COLUMNS": "200"}
    begin, state = time.monotonic(), "ok"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *command.words],
            cwd=ROOT,
            env={**os.environ, **own, **environment, **command.environment},
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
    return Result(stage, command.name, state, time.monotonic() - begin, "".join(lines[-1:]), lines[-LINES:])


def main(name: str, description: str, platform: str, stages: Callable[[Models], Stages]) -> int:
    """Print a line for each command as it ends, and all of them as a table at the end. `platform` is JAX's name of the
    device; where there is none, commands fail and do not run on the CPU instead. Returns the exit status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", help="some of them, with commas (all)")
    parser.add_argument("--preset", default="qwen3-8b", help="whose shapes are run with random weights (qwen3-8b)")
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens of each of 32 sequences (2048)")
    parser.add_argument("--mesh", default="", help="devices to spread its shapes over, such as tensor=4 (one)")
    parser.add_argument("--target", default="", help="folder of a chat model: a head for it is trained and served")
    parser.add_argument("--output", type=Path, default=Path(name), help=f"folder for logs and figures ({name})")
    parser.add_argument("--minutes", type=float, default=45, help="for all of them together (45)")
    given = parser.parse_args()
    head = given.output.absolute() / "head"
    known = stages(Models(given.preset, given.max_model_len, given.mesh, given.target, head))
    names = given.stages.split(",") if given.stages else list(known)
    if unknown := [each for each in names if each not in known]:
        parser.error(f"--stages {unknown[0]}: expected some of {', '.join(known)}")
    given.output.mkdir(parents=True, exist_ok=True)
    results, chosen = [], {each: known[each] for each in names}
    for result in run_stages(chosen, given.output, 60 * given.minutes, {"JAX_PLATFORMS": f"{platform},cpu"}):
        results.append(result)
        (given.output / f"{name}.json").write_text(json.dumps([asdict(each) for each in results], indent=2) + "\n")
        print(f"{result.stage}, {result.name}: {result.state} after {result.seconds:.0f} s; {result.last}", flush=True)
    print("\n| stage | command | state | seconds |\n|---|---|---|---|")
    for each in results:
        print(f"| {each.stage} | {each.name} | {each.state} | {each.seconds:.0f} |")
    return int(any(result.state != "ok" for result in results))
