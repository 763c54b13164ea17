"""Kinds of drafters beside each other: the same data, seeds and training time, measured by the code that serves.

Each head is trained by `specserve train` in a process of its own, one after the other, and measured by `specserve eval`
on the same prompts, plain decoding taking turns with it. Equal time is so many steps as fit into it at the pace that a
few steps of each kind have while nothing else runs; so only `--only paces`, which takes a minute or two a kind, needs a
quiet machine, and heads may be trained over several days. What is in the output folder already is not done again;
reports of other questions than the default ones stand beside those, under names that say which.

The two kinds with the best trees are named at the end. They go on as a second run, into a folder of its own:
`--kinds A,B --seeds 1 --minutes 120 --output longer --train=--source=ANSWERS`, of answers by the target itself.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from environments import run, say
from side_by_side import BenchmarkError

KINDS = ("eagle3", "p-eagle", "mtp", "dflash", "dspark", "dflash2")
CHAIN, TREE = "chain:5", "tree:5x3x15"
METRICS, NOTES, SETTINGS = "metrics.jsonl", "specserve.json", "run.yaml"
PACE_STEPS = 12
DEFAULTS = {"bench": "pydoc", "limit": 24, "max_tokens": 200, "clients": [1, 4, 16]}  # of what is measured


@dataclass(frozen=True)
class Arm:
    """One head: its kind, the seed that it was trained with, and its folder."""

    kind: str
    seed: int
    folder: Path


@dataclass(frozen=True)
class Row:
    """A kind's figures, means over its seeds."""

    kind: str
    parameters: int  # of the head's own tensors
    steps: int  # of training, as the first head's notes say
    tokens_per_second: float  # of training, loss-bearing, while the pace was taken
    draft_ms: float  # of the chain's step, one sequence
    taus: Mapping[tuple[str, float], tuple[float, float, float]]  # by speculation and temperature: mean, least, most
    gains: Mapping[int, tuple[float, float]]  # of `auto`, greedy, by clients: over plain decoding; tokens/s


def main() -> int:
    options = parse()
    try:
        steps = {kind: steps_in(options, kind) for kind in options.kinds}
        if options.only == "paces":
            return 0
        arms = train_all(options, steps)
        rows = []
        for kind in options.kinds:
            own = [arm for arm in arms if arm.kind == kind]
            rows.append(row_of(kind, own, [report for arm in own for report in measure(options, arm)]))
    except BenchmarkError as error:
        say(f"error: {error}")
        return 2
    print(table(rows, options.clients))
    say(f"the best two, by tau of {TREE}: {','.join(best_of(rows))}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    listed = {"type": lambda text: text.split(","), "metavar": "A,B"}
    add("--kinds", default=list(KINDS), help=f"kinds to compare ({','.join(KINDS)})", **listed)
    add("--minutes", type=float, default=30.0, help="training of each head (%(default)s)")
    add("--only", choices=["paces"], help="measure what needs a quiet machine, and end")
    add("--seeds", type=int, default=3, help="heads of each kind (%(default)s)")
    add("--bench", help="as `specserve eval` takes it (%(default)s)")
    add("--limit", type=int, help="questions (%(default)s)")
    add("--max-tokens", type=int, help="of an answer (%(default)s)")
    add("--clients", type=lambda text: [int(each) for each in text.split(",")], metavar="A,B")
    add("--train", action="append", default=[], metavar="FLAGS", help="more flags of every `specserve train`, one each")
    add("--output", type=Path, default=Path("drafters"), help="folder of the heads and reports (%(default)s)")
    parser.set_defaults(**DEFAULTS)
    return parser.parse_args()


def train(options: argparse.Namespace, kind: str, folder: Path, **flags: int) -> None:
    """Train a head by a number of steps, measured once, after the last."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "specserve.cli.main", "train", "--drafter", kind, "--output", str(folder)]
    for name, value in {"max_minutes": 0, "eval_every": 0, **flags}.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    run([*command, *options.train], folder.with_suffix(".log"), f"training {kind}")


def steps_in(options: argparse.Namespace, kind: str) -> int:
    """How many steps of training fit into the minutes, by the pace of the steps of a short run."""
    folder = options.output / f"{kind}-pace"
    if not (folder / NOTES).is_file():
        say(f"taking the pace of {kind}: nothing else should run")
        train(options, kind, folder, max_steps=PACE_STEPS, log_every=1)
    settings = yaml.safe_load((folder / SETTINGS).read_text())["train"]
    pace = median_of(folder, "positions_per_second") / (settings["batch_size"] * settings["seq_len"])
    say(f"{kind}: {1 / pace:.2f} s a step, {round(options.minutes * 60 * pace)} steps in {options.minutes:g} minutes")
    return max(1, round(options.minutes * 60 * pace))


def train_all(options: argparse.Namespace, steps: Mapping[str, int]) -> list[Arm]:
    """Train what is not there yet, seed by seed. Raises BenchmarkError for a head of other steps than are asked for,
    before anything is trained where it is there already."""
    arms = [
        Arm(kind, seed, options.output / f"{kind}-{seed}") for seed in range(options.seeds) for kind in options.kinds
    ]
    trained = [arm for arm in arms if (arm.folder / NOTES).is_file()]
    for arm in trained:
        check_steps(arm, steps[arm.kind])
    for arm in arms:
        if arm in trained:
            continue
        say(f"training {arm.kind}, seed {arm.seed}: {steps[arm.kind]} steps")
        train(options, arm.kind, arm.folder, max_steps=steps[arm.kind], seed=arm.seed)
        check_steps(arm, steps[arm.kind])
    return arms


def steps_of(folder: Path) -> int:
    """Steps of training that a head has had, as its own notes say."""
    return int(json.loads((folder / NOTES).read_text())["steps"])


def check_steps(arm: Arm, expected: int) -> None:
    """Refuse a head that was trained for longer or shorter than the others are. Raises BenchmarkError."""
    if (found := steps_of(arm.folder)) != expected:
        raise BenchmarkError(
            f"{arm.folder} was trained for {found} steps, and --minutes asks for {expected} of {arm.kind}: give the "
            "minutes that it was trained for, or another --output"
        )


def measure(options: argparse.Namespace, arm: Arm) -> list[dict[str, Any]]:
    """What `specserve eval` reports of one head: chains and trees at two temperatures, and of each kind's first head
    `auto` by clients."""
    common = ["--bench", options.bench, "--limit", str(options.limit), "--max-tokens", str(options.max_tokens)]
    common += ["--draft", str(arm.folder)]
    asked = {"taus": ["--speculation", f"{CHAIN},{TREE}", "--temperature", "0,1"]}
    if arm.seed == 0:
        asked["gains"] = ["--speculation", "auto", "--concurrency", ",".join(map(str, options.clients))]
    found = []
    for name, flags in asked.items():
        file = report_file(options, arm, name)
        if not file.is_file():
            say(f"measuring {name} of {arm.kind}, seed {arm.seed}")
            command = [sys.executable, "-m", "specserve.cli.main", "eval", *common, *flags, "--output", str(file)]
            run(command, file.with_suffix(".log"), f"measuring {name}")
        found.append(json.loads(file.read_text()))
    return found


def report_file(options: argparse.Namespace, arm: Arm, name: str) -> Path:
    """Where a head's report is kept: one file for each way to measure it, whose name says what is not the default."""
    asked = {option: getattr(options, option) for option in DEFAULTS if name == "gains" or option != "clients"}
    others = [f"{option}-{value}" for option, value in asked.items() if value != DEFAULTS[option]]
    said = [re.sub(r"[^A-Za-z0-9.]+", "-", other).strip("-") for other in others]
    return arm.folder.with_name("-".join([arm.folder.name, *said, f"{name}.json"]))


def row_of(kind: str, arms: Sequence[Arm], found: Sequence[Mapping[str, Any]]) -> Row:
    """The figures of one kind, from what was found of its heads."""
    taus: dict[tuple[str, float], list[float]] = {}
    gains: dict[int, tuple[float, float]] = {}
    for report in (report for each in found for report in each["reports"]):
        if report["speculation"] == "auto":
            gains[report["concurrency"]] = report["gain"], report["tokens_per_second"]
        else:
            taus.setdefault((report["speculation"], report["temperature"]), []).append(report["tau"])
    drafts = [steps["draft_ms"] for each in found for steps in each["steps"].values()]
    return Row(
        kind,
        num_parameters(arms[0].folder),
        steps_of(arms[0].folder),
        median_of(arms[0].folder.with_name(f"{kind}-pace"), "tokens_per_second"),
        statistics.mean(drafts) if drafts else float("nan"),
        {way: (statistics.mean(each), min(each), max(each)) for way, each in taus.items()},
        gains,
    )


def best_of(rows: Sequence[Row], number: int = 2) -> list[str]:
    """The kinds that accept most with a tree, greedy, the best first."""
    measured = [row for row in rows if (TREE, 0.0) in row.taus]
    return [row.kind for row in sorted(measured, key=lambda row: -row.taus[TREE, 0.0][0])[:number]]


def num_parameters(folder: Path) -> int:
    """Numbers in the float tensors of a head's file, whose header alone is read."""
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    return sum(math.prod(entry["shape"]) for entry in tensors if "F" in entry["dtype"])


def median_of(folder: Path, name: str) -> float:
    """The median over what a training run logged of its speed."""
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return statistics.median([row[name] for row in rows if row.get(name)])


def table(rows: Sequence[Row], clients: Sequence[int]) -> str:
    """The rows as a Markdown table."""
    ways = [(CHAIN, 0.0), (CHAIN, 1.0), (TREE, 0.0), (TREE, 1.0)]
    titles = ["drafter", "parameters", "steps", "tokens/s of training", "ms of a draft"]
    titles += [f"tau {way}, T={temperature:g}" for way, temperature in ways]
    titles += [f"tokens/s and gain of auto, {number} at once" for number in clients]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        taus = [row.taus.get(way) for way in ways]
        cells = [row.kind, f"{row.parameters / 1e6:.1f}M", str(row.steps), f"{row.tokens_per_second:,.0f}"]
        cells += [f"{row.draft_ms:.1f}"]
        cells += ["-" if tau is None else f"{tau[0]:.2f} ({tau[1]:.2f}-{tau[2]:.2f})" for tau in taus]
        gains = {number: f"{pace:.0f}, {gain:.2f}x" for number, (gain, pace) in row.gains.items()}
        cells += [gains.get(number, "-") for number in clients]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
