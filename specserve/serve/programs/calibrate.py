"""The costs of all ways to make a step on this machine. They are measured once per host, model and version, then
remembered, and looked at again at each start."""

import hashlib
import itertools
import json
import logging
import math
import os
import platform
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

import specserve
from specserve import host
from specserve.drafters.speculation import describe
from specserve.kernels import native
from specserve.serve.programs import wanted
from specserve.serve.programs.programs import Program
from specserve.serve.programs.runner import Runner
from specserve.speculative.controller import Shape

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ROUNDS = 5  # the programs take turns, so a noisy moment does not fall on one of them
IN_A_ROW = 2  # runs of a program in its turn; the last is timed, as what follows another program takes longer
AGAIN_SECONDS, AGAIN_ROUNDS = 1.0, 3  # of a later start
BUSY_RATIO = 0.8  # a step that takes less than this share of what is known says that what is known is wrong


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
        *_dtypes(runner.layouts.one.target),  # which the fingerprint of files does not say
        *_dtypes(runner.layouts.one.draft),
        *[program.name for program in wanted.programs(runner)],
    ]
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    return host.cache_folder() / "costs" / f"{name}.json"


def _dtypes(params: Any) -> tuple[str, ...]:
    return "weights", *sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)})


Costs = dict[Shape, float]  # seconds of each step
Timing = Generator[object, None, Costs]  # yields between two runs


def step_costs(runner: Runner, file: Path | None) -> Timing:
    """Seconds of every compiled step, by a generator that runs two at a time, so that others can run in between.

    Noise only ever adds to what a step takes, so the file keeps the least that was seen of each. Where it has all, some
    steps are timed again for about a second: if one takes clearly less than it says, then it was made on a busy
    machine, and every step is timed again."""
    programs = [program for program in wanted.programs(runner) if program.step is not None]
    programs = [program for program in programs if wanted.is_compiled(runner, *_shape(program))]
    known = _read(file, programs) if file is not None and file.is_file() else {}
    if known is None:
        logger.warning("%s is damaged; the costs of steps are measured again", file)
    least = dict(known or {})
    if known:
        again = yield from _time(runner, _cheapest(programs, known), AGAIN_ROUNDS)
        _keep_least(least, again)
        if any(seconds < BUSY_RATIO * known[name] for name, seconds in again.items()):
            logger.info("steps take less than %s says: it was made on a busy machine, and is made again", file)
            known = {}
    if not known:
        _keep_least(least, (yield from _time(runner, programs, ROUNDS)))
    if file is not None:
        _write(file, least)
    return {_shape(program): least[program.name] for program in programs}


def finish(timing: Generator[object, None, Result]) -> Result:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(timing)
        except StopIteration as end:
            return end.value


def _time(runner: Runner, programs: Sequence[Program], num_rounds: int) -> Generator[object, None, dict[str, float]]:
    """Time the programs in turns, and return the least time of each, by name."""
    seconds: dict[str, list[float]] = {program.name: [] for program in programs}
    for _ in range(num_rounds):
        for program in programs:
            begin = 0.0
            for _ in range(IN_A_ROW):
                jax.block_until_ready(runner.state)
                begin = time.perf_counter()
                program.run()
            jax.block_until_ready(runner.state)
            seconds[program.name].append(time.perf_counter() - begin)
            yield
    return {name: min(values) for name, values in seconds.items()}


def _cheapest(programs: Sequence[Program], known: dict[str, float]) -> list[Program]:
    """Return the programs that can be timed again within AGAIN_SECONDS, the cheapest first, and one at least."""
    ordered = sorted(programs, key=lambda program: known[program.name])
    ends = itertools.accumulate(AGAIN_ROUNDS * IN_A_ROW * known[program.name] for program in ordered)
    return [program for i, (program, end) in enumerate(zip(ordered, ends, strict=True)) if not i or end < AGAIN_SECONDS]


def _keep_least(costs: dict[str, float], seen: dict[str, float]) -> None:
    for name, seconds in seen.items():
        costs[name] = min(seconds, costs.get(name, seconds))


def _read(file: Path, programs: Sequence[Program]) -> dict[str, float] | None:
    """The times that a file holds, or None unless it has one for every program."""
    try:
        known = json.loads(file.read_text())
        costs = {program.name: float(known[program.name]) for program in programs}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return costs if all(0 < seconds < math.inf for seconds in costs.values()) else None


def _write(file: Path, costs: dict[str, float]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        host.write_whole(file, json.dumps(costs, indent=1).encode())
    except OSError as error:
        logger.warning("the costs of steps cannot be kept in %s: %s", file, error)


def _shape(program: Program) -> Shape:
    assert program.step is not None
    return program.step


def describe_costs(costs: dict[Shape, float]) -> str:
    """Describe the costs in one line for the log: milliseconds by batch size at the narrowest width."""
    narrow = min(width for _, width, _ in costs)
    by_batch: dict[int, list[str]] = {}
    for (batch, width, tree), seconds in costs.items():
        if width == narrow:
            by_batch.setdefault(batch, []).append(f"{describe(tree)} {seconds * 1e3:.1f}")
    return "; ".join(f"batch {batch}: " + ", ".join(parts) for batch, parts in sorted(by_batch.items()))
