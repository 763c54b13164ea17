"""The costs of all ways to make a step on this machine. They are measured once per host, model and version, kept in a
file, and measured in part again at each start."""

import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

import specserve
from specserve import host
from specserve.drafters.speculation import describe
from specserve.kernels import native
from specserve.serve.programs import program_list
from specserve.serve.programs.runner import Runner
from specserve.speculative.costs import BURST_SECONDS, within_burst
from specserve.speculative.program import StepProgram

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ROUNDS, MOST_ROUNDS = 3, 6  # the programs take turns, so a noisy moment does not fall on one of them
CLEARLY = 0.1  # while a round finds a step that much quicker than those before, the machine was busy, and more follow
QUEUED = 4  # runs in a turn on an accelerator, whose host starts one during another, as an engine does
AGAIN_SECONDS = 1.0  # of a later start
BUSY_RATIO = 0.8  # where a step takes less than this share of what is known, what is known is wrong


def cost_file(models_fingerprint: str, runner: Runner) -> Path:
    """Return the file that keeps the costs of such a runner."""
    facts = [
        platform.node(),
        host.processor(),
        str(os.cpu_count()),
        specserve.__version__,
        jax.__version__,
        jax.devices()[0].device_kind,
        native.describe(),
        str(runner.place),
        models_fingerprint,
        str((runner.shapes, runner.config)),
        *_arrays(runner.inputs.layouts.one.target),  # the fingerprint of files does not give them
        *_arrays(runner.inputs.layouts.one.draft),
        *[runner.shapes.label(program) for program in program_list.timed(runner)],
        "in bursts",  # earlier files have what single calls took
    ]
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    return host.cache_folder() / "costs" / f"{name}.json"


def _arrays(params: Any) -> tuple[str, ...]:
    return "weights", *(f"{leaf.dtype}{leaf.shape}" for leaf in jax.tree.leaves(params))


Costs = dict[StepProgram, float]  # seconds of each step
Between = Sequence[StepProgram] | None  # yielded between two runs: programs that must be here for those to come
Timing = Generator[Between, None, Costs]


def step_costs(runner: Runner, file: Path | None) -> Timing:
    """Measure the seconds of every step, in a generator that runs two at a time, so that others can run in between.
    Steps that failed to compile are left out, and those in files are read for it.

    Noise only ever adds to what a step takes, so the file keeps the least that was seen of each. Where it has all, some
    steps are timed again for about a second: if one takes clearly less than in the file, then that was made on a busy
    machine, and every step is timed again."""
    programs = {
        runner.shapes.label(program): program
        for program in program_list.timed(runner)
        if program_list.is_there(runner, program)
    }
    known = _read(file, programs) if file is not None and file.is_file() else {}
    if known is None:
        logger.warning("%s is damaged; the costs of steps are measured again", file)
    least = dict(known or {})
    if known:
        here = {name: known[name] for name, each in programs.items() if program_list.is_compiled(runner, each)}
        cheapest = {label: programs[label] for label in _cheapest(here)}
        again = yield from _time(runner, cheapest)
        _keep_least(least, again)
        if any(seconds < BUSY_RATIO * known[name] for name, seconds in again.items()):
            logger.info("steps take less than %s says: it was made on a busy machine, and is made again", file)
            known = {}
    if not known:
        yield [each for program in programs.values() for each in program_list.needed(runner, program)]
        programs = {label: each for label, each in programs.items() if program_list.is_compiled(runner, each)}
        _keep_least(least, (yield from _time(runner, programs)))
    if file is not None:
        _write(file, least)
    costs = {program: least[label] for label, program in programs.items()}
    followed = {program: costs.get(dataclasses.replace(program, is_alone=False), math.inf) for program in costs}
    return {program: min(seconds, followed[program]) for program, seconds in costs.items()}  # alone a target does less


def first_costs(runner: Runner) -> Timing:
    """Measure the seconds of the speculative step that a server begins with, and of the plain one beside it, in such a
    generator."""
    first, shapes = program_list.first_speculation(runner), runner.shapes
    timed = [program for program in first if program.kind in ("step", "reading")]
    timed += [shapes.step(each.batch, each.width, shapes.plain) for each in first if each.kind == "step"]
    labels = {shapes.label(program): program for program in timed}
    seconds = yield from _time(runner, labels)
    return {program: seconds[label] for label, program in labels.items()}


def finish(timing: Generator[Between, None, Result]) -> Result:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(timing)
        except StopIteration as end:
            return end.value


def _time(runner: Runner, programs: Mapping[str, StepProgram]) -> Generator[None, None, dict[str, float]]:
    """Time the programs over nothing but padding, in turns, and return the least seconds of a step of each, by label.
    Each turn begins with a run that is not timed, as what follows another program takes longer. Steps are then made as
    an engine on a CPU makes them, as many in one call as a burst has: what the host does for a call is a third of a
    short step. A reading takes so long there that what it follows is no matter."""
    least: dict[str, float] = {}
    is_cpu = jax.default_backend() == "cpu"
    for number_of_round in range(1, MOST_ROUNDS + 1):
        before = dict(least)
        for label, program in programs.items():
            taken = _seconds(runner, program)
            if not is_cpu or program.kind == "step":
                most = runner.most_steps(program) if is_cpu else 1
                number = within_burst(min(taken, least.get(label, math.inf)), most)
                taken = _seconds(runner, program, number, runs=1 if is_cpu else QUEUED) / number
            least[label] = min(taken, least.get(label, taken))
            yield
        if number_of_round >= ROUNDS and all(least[label] > (1 - CLEARLY) * before[label] for label in least):
            break
    return least


def _seconds(runner: Runner, program: StepProgram, num_steps: int = 1, runs: int = 1) -> float:
    """Return the seconds of a run of the program, of so many that follow each other. Of a step that a larger one makes
    the rows are those of as many sequences."""
    values: tuple[Any, ...] = ()
    if program.kind == "step":
        num_sequences, nobody = program.batch, runner.shapes.num_slots
        program = runner.shapes.made(program)
        slots = (nobody + 1,) * num_sequences + (nobody,) * (program.batch - num_sequences)
        values = slots, num_steps
    jax.block_until_ready(runner.state)
    begin = time.perf_counter()
    for _ in range(runs):
        runner.run(program, *values)
    jax.block_until_ready(runner.state)
    return (time.perf_counter() - begin) / runs


def _cheapest(known: dict[str, float]) -> list[str]:
    """Return the labels that can be timed again within AGAIN_SECONDS, the cheapest first, and one at least. A turn is
    a step and a burst."""
    ordered = sorted(known, key=known.__getitem__)
    ends = itertools.accumulate(ROUNDS * (known[label] + max(known[label], BURST_SECONDS)) for label in ordered)
    return [label for i, (label, end) in enumerate(zip(ordered, ends, strict=True)) if not i or end < AGAIN_SECONDS]


def _keep_least(costs: dict[str, float], seen: dict[str, float]) -> None:
    for name, seconds in seen.items():
        costs[name] = min(seconds, costs.get(name, seconds))


def _read(file: Path, labels: Iterable[str]) -> dict[str, float] | None:
    """Return the times that a file holds, or None unless it has one for every label."""
    try:
        known = json.loads(file.read_text())
        costs = {label: float(known[label]) for label in labels}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return costs if all(0 < seconds < math.inf for seconds in costs.values()) else None


def _write(file: Path, costs: dict[str, float]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        host.write_whole(file, json.dumps(costs, indent=1).encode())
    except OSError as error:
        logger.warning("the costs of steps cannot be kept in %s: %s", file, error)


def describe_costs(costs: Costs) -> str:
    """Describe the costs in one line for the log: milliseconds by batch size at the narrowest width."""
    narrow = min(program.width for program in costs)
    by_batch: dict[int, list[str]] = {}
    has_alone = any(program.is_alone for program in costs)
    for program, seconds in costs.items():
        if program.width == narrow and program.kind == "step":
            way = "off, followed" if has_alone and (program.tree, program.is_alone) == (None, False) else None
            by_batch.setdefault(program.batch, []).append(f"{way or describe(program.tree)} {seconds * 1e3:.1f}")
    return "; ".join(f"batch {batch}: " + ", ".join(parts) for batch, parts in sorted(by_batch.items()))
