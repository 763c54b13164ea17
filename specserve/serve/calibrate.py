"""What each way to make a step costs on this machine: measured once per host, model and version, then remembered."""

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

import specserve
from specserve import host
from specserve.serve.runner import Program, Runner
from specserve.speculative.controller import Shape
from specserve.speculative.tree import describe

logger = logging.getLogger(__name__)

ROUNDS = 5  # the programs take turns, so a noisy moment does not fall on one of them


def cost_file(models_fingerprint: str, runner: Runner) -> Path:
    """Where the costs of such a runner are kept."""
    facts = [
        platform.node(),
        platform.processor(),
        str(os.cpu_count()),
        specserve.__version__,
        jax.__version__,
        jax.devices()[0].device_kind,
        str(runner.place),
        models_fingerprint,
        str((runner.page_size, runner.num_slots, runner.max_pages, runner.config)),
        *[program.name for program in runner.programs()],
    ]
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    return host.cache_folder() / "costs" / f"{name}.json"


def step_costs(
    runner: Runner, file: Path | None, on_round: Callable[[int, int], None] = lambda _done, _total: None
) -> dict[Shape, float]:
    """Seconds of every compiled step, the programs being warm; read from `file` where it has them, else written there.
    `on_round(done, total)` reports."""
    programs = [program for program in runner.programs() if program.step is not None]
    if file is not None and file.is_file():
        known = _read(file, programs)
        if known is not None:
            return known
        logger.warning("%s is damaged; the costs of steps are measured again", file)
    seconds: dict[str, list[float]] = {program.name: [] for program in programs}
    for done in range(ROUNDS):
        for program in programs:
            jax.block_until_ready(runner.state)
            begin = time.perf_counter()
            program.run()
            jax.block_until_ready(runner.state)
            seconds[program.name].append(time.perf_counter() - begin)
        on_round(done + 1, ROUNDS)
    least = {name: min(values) for name, values in seconds.items()}  # the least disturbed run tells what it costs
    if file is not None:
        _write(file, least)
    return {_shape(program): least[program.name] for program in programs}


def _read(file: Path, programs: Sequence[Program]) -> dict[Shape, float] | None:
    """None unless it holds a time for every program."""
    try:
        known = json.loads(file.read_text())
        costs = {_shape(program): float(known[program.name]) for program in programs}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return costs if all(0 < seconds < math.inf for seconds in costs.values()) else None


def _write(file: Path, costs: dict[str, float]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(costs, indent=1))
        draft.replace(file)
    except OSError as error:
        logger.warning("the costs of steps cannot be kept in %s: %s", file, error)


def _shape(program: Program) -> Shape:
    assert program.step is not None
    return program.step


def describe_costs(costs: dict[Shape, float]) -> str:
    """One line for the log: milliseconds by batch size at the narrowest width."""
    narrow = min(width for _, width, _ in costs)
    by_batch: dict[int, list[str]] = {}
    for (batch, width, tree), seconds in costs.items():
        if width == narrow:
            by_batch.setdefault(batch, []).append(f"{describe(tree)} {seconds * 1e3:.1f}")
    return "; ".join(f"batch {batch}: " + ", ".join(parts) for batch, parts in sorted(by_batch.items()))
