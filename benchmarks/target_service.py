"""The target in processes of its own beside the target in the training step, on this machine's cores: steps per second
of the same run, and megabytes per second through the buffer while nothing trains.

Run from the checkout, with the extra `scale`: `python benchmarks/target_service.py`. Each arm trains the same steps of
the same data; the seconds of the first two steps, which compile, do not count. The arms take turns, one run each, and
what is printed are medians over the rounds; a ratio is that to the first arm, with its least and greatest.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from in_turns import spread, turns
from served_flags import device, positive

from specserve import cluster, config
from specserve.train.run.folder import RunFolder
from specserve.train.run.prepare import prepare
from specserve.train.settings import TrainRun
from specserve.train.trainer import Progress, Trainer

WARM = 2  # steps


@dataclass(frozen=True)
class Turn:
    """One run of an arm."""

    steps_per_second: float
    flow: float  # megabytes per second through the buffer; 0: there is none
    size: float  # megabytes of a batch


def make(asked: argparse.Namespace, folder: Path, name: str) -> Trainer:
    """The trainer of an arm: `step`, or the transport of a target elsewhere."""
    flags = {
        "target": asked.target,
        "output": str(folder / name),
        "batch-size": asked.batch_size,
        "seq-len": asked.seq_len,
        "max-steps": asked.steps,
        "max-conversations": 200,
        "eval-prompts": 0,
        "log-every": 1,
        "save-every": 0,
    }
    if name != "step":
        flags |= {"target-service": asked.processes, "target-transport": name}
    names = {leaf.flag.removeprefix("--"): leaf.name for leaf in config.leaves(TrainRun)}
    run = config.resolve(TrainRun, overrides=[f"{names[flag]}={value}" for flag, value in flags.items()])
    return prepare(run, RunFolder(run))


def steps_per_second(trainer: Trainer) -> float:
    """Train, and close everything."""
    times: list[float] = []

    def note(moment: Progress) -> None:
        if moment.loss is not None:
            times.append(time.perf_counter())

    trainer.train([note])
    return (len(times) - 1 - WARM) / (times[-1] - times[WARM])


def megabytes_per_second(trainer: Trainer, batches: int) -> float:
    """Take batches out of the buffer as fast as they come, and leave the data where it was."""
    source, loader = trainer.learner.features, trainer.learner.data.loader
    assert source is not None
    position, begin, moved = loader.state(), 0.0, 0
    for number in range(WARM + batches):
        found = source.next_features(loader)
        loader.next_batch()
        if number < WARM:
            begin = time.perf_counter()
        else:
            moved += sum(leaf.nbytes for leaf in jax.tree.leaves(found))
    seconds = time.perf_counter() - begin
    loader.restore(position)
    return moved / seconds / 1e6


def measure(asked: argparse.Namespace, name: str) -> Turn:
    """Run an arm once."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, flow, size = make(asked, Path(folder), name), 0.0, 0.0
        if source := trainer.learner.features:
            flow = megabytes_per_second(trainer, asked.batches)
            first = source.next_features(trainer.learner.data.loader)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(first)) / 1e6
        return Turn(steps_per_second(trainer), flow, size)


def row(name: str, found: Sequence[Turn], first: Sequence[Turn]) -> str:
    """Write what came of an arm beside the first one."""
    rates = [turn.steps_per_second for turn in found]
    ratios = spread([rate / turn.steps_per_second for rate, turn in zip(rates, first, strict=True)])
    flow, size = (statistics.median(getattr(turn, field) for turn in found) for field in ("flow", "size"))
    buffer = f" {flow:>8.1f} {size:>11.2f}" if size else ""
    return f"{name:>6} {statistics.median(rates):>8.3f} {ratios:>22}{buffer}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="pydoc")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batches", type=int, default=10, help="taken for the megabytes")
    parser.add_argument("--arms", default="step,exact,int8")
    parser.add_argument("--rounds", type=positive, default=3, help="in each of which every arm runs once")
    asked = parser.parse_args()
    cluster.connect()
    names = asked.arms.split(",")
    found: dict[str, list[Turn]] = {name: [] for name in names}
    print(f"{device()}\n", flush=True)
    for _, name in turns(names, asked.rounds):
        found[name].append(measure(asked, name))
    print(f"{'arm':>6} {'steps/s':>8} {f'to {names[0]}':>22} {'MB/s':>8} {'MB a batch':>11}")
    for name in names:
        print(row(name, found[name], found[names[0]]))


if __name__ == "__main__":
    main()
