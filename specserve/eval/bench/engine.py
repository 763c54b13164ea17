"""The benchmark of the engine: plain decoding, fixed trees and `auto` on the same questions, from one client to many,
and what each costs: time by part of a step, memory, late compiles."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax

from specserve.errors import ConfigError
from specserve.eval.bench.comparison import (
    AUTO,
    PLAIN,
    ArmResult,
    BenchArm,
    Comparison,
    EngineArm,
    has_draft,
    params_of,
    run_comparisons,
    run_round,
)
from specserve.eval.bench.step_times import StepTimes, measure_steps, read_bandwidth
from specserve.eval.settings import BenchRun
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import measured_engine
from specserve.serve.launch import Models
from specserve.train.speed import host_bytes

CONTEXT = 128  # committed tokens where steps are timed
OnWarmup = Callable[[str, int, int, str], None]  # arm, done, total, name of the program


@dataclass
class Coupling:
    """The same tree with and without coupling. With it the draft ranks its candidates with the noise that the target
    will draw with, so that at temperatures above 0 more of them are accepted."""

    arm: str
    temperature: float
    coupled: ArmResult = field(default_factory=ArmResult)
    uncoupled: ArmResult = field(default_factory=ArmResult)

    def to_json(self) -> dict[str, Any]:
        return {
            "speculation": self.arm,
            "temperature": self.temperature,
            "tau_coupled": self.coupled.acceptance.tau,
            "tau_uncoupled": self.uncoupled.acceptance.tau,
            "accept_rate_coupled": self.coupled.acceptance.accept_rate,
            "accept_rate_uncoupled": self.uncoupled.acceptance.accept_rate,
            "speedup": self.coupled.ratio,
            "answers": self.coupled.num_answers,
            "identical_answers": self.coupled.num_identical,
        }


def measure_coupling(
    name: str,
    coupled: BenchArm,
    uncoupled: BenchArm,
    prompts: Sequence[Sequence[int]],
    run: BenchRun,
    temperature: float,
) -> Coupling:
    """Measure both arms on the same questions and seeds, one answer at a time. They take turns in being the first."""
    found = Coupling(name, temperature)
    arms = {"coupled": coupled, "uncoupled": uncoupled}
    results = {"coupled": found.coupled, "uncoupled": found.uncoupled}
    comparison = Comparison(temperature, 1, results, baseline="uncoupled")
    for arm in arms.values():
        arm.ask(prompts[:1], [params_of(run, 0.0, 0)], 1)
        arm.forget()
    supply = itertools.cycle(prompts)
    for number in range(run.rounds):
        asked = list(itertools.islice(supply, run.requests))
        params = [params_of(run, temperature, number * run.requests + i) for i in range(len(asked))]
        run_round(arms, asked, params, comparison, number)
    return found


@dataclass
class BenchReport:
    """The results of the benchmark of the engine."""

    run: BenchRun
    comparisons: list[Comparison] = field(default_factory=list)
    couplings: list[Coupling] = field(default_factory=list)
    steps: dict[str, StepTimes] = field(default_factory=dict)  # by arm
    read_bandwidth: float = 0.0  # bytes per second
    memory: dict[str, int] = field(default_factory=dict)
    num_late_compiles: int = 0

    @property
    def num_different(self) -> int:
        """The number of answers of our own arms that differ from the plain arm's."""
        results = [result for comparison in self.comparisons for result in comparison.arms.values()]
        return sum(result.num_answers - result.num_identical for result in results if result.must_agree)

    def worst(self, name: str) -> tuple[float, Comparison] | None:
        """Find the comparison where an arm does worst against plain decoding, with its ratio; None if it never ran."""
        found = [(each.arms[name].ratio, each) for each in self.comparisons if name in each.arms]
        return min(found, key=lambda pair: pair[0], default=None)

    def to_json(self) -> dict[str, Any]:
        worst = self.worst(AUTO)
        return {
            "cells": [comparison.to_json() for comparison in self.comparisons],
            "auto_worst_ratio_to_plain": worst and worst[0],
            "different_answers": self.num_different,
            "late_compiles": self.num_late_compiles,
            "coupling": [coupling.to_json() for coupling in self.couplings],
            "step": {name: times.to_json() for name, times in self.steps.items()},
            "read_bandwidth_gb_per_second": self.read_bandwidth / 1e9,
            "memory_bytes": self.memory,
        }


def run_bench(
    models: Models,
    run: BenchRun,
    prompts: Sequence[Sequence[int]],
    *,
    others: Mapping[str, BenchArm] | None = None,
    on_warmup: OnWarmup = lambda _arm, _done, _total, _name: None,
    on_round: Callable[[Comparison], None] = lambda _comparison: None,
) -> BenchReport:
    """Measure the speculations of `run.arms` against plain decoding, each as an engine of its own over the same loaded
    models; `others` are further arms. Prompts leave room for `run.max_tokens`. Raises ConfigError."""
    names = [PLAIN, *[name for name in dict.fromkeys(run.arms) if name != PLAIN]]
    if models.head is None and (headed := [name for name in names if has_draft(name)]):
        raise ConfigError(f"there is no head for {models.name}, and {', '.join(headed)} need one; give it with --draft")
    report = BenchReport(run)

    def make(name: str, num_slots: int, *, is_coupled: bool = True) -> Engine:
        label = name if is_coupled else f"{name}, uncoupled"
        return measured_engine(
            models,
            name,
            num_slots=num_slots,
            max_model_len=run.max_model_len,
            is_coupled=is_coupled,
            on_warmup=lambda done, total, program: on_warmup(label, done, total, program),
        )

    report.read_bandwidth = read_bandwidth()  # before caches fill the device
    engines = {name: make(name, max(run.concurrency)) for name in names}
    for name, engine in engines.items():
        if has_draft(name):
            report.steps[name] = measure_steps(
                engines[PLAIN].runner,
                engine.runner,
                context=CONTEXT,
                bandwidth=report.read_bandwidth,
            )
    with ExitStack() as stack:
        arms: dict[str, BenchArm] = {name: EngineArm(stack.enter_context(engine)) for name, engine in engines.items()}
        report.comparisons = run_comparisons({**arms, **(others or {})}, prompts, run, on_round)
        report.memory = _memory(models, engines.values())  # before further engines are made
        report.num_late_compiles = sum(engine.stats().num_late_compiles for engine in engines.values())
        temperature = next((t for t in run.temperature if t > 0), 1.0)
        for name in filter(has_draft, names if run.coupling else ()):
            with make(name, 1, is_coupled=False) as engine:
                coupling = measure_coupling(name, arms[name], EngineArm(engine), prompts, run, temperature)
                report.num_late_compiles += engine.stats().num_late_compiles
            report.couplings.append(coupling)
    return report


def _memory(models: Models, engines: Iterable[Engine]) -> dict[str, int]:
    """Count bytes of memory. Arrays that several engines share count once."""
    weights: list[Any] = [models.target.params]
    if models.head:
        weights.append(models.head.params)
    caches: list[Any] = []
    for engine in engines:
        weights.append(engine.runner.inputs.layouts.distinct)
        caches.append((engine.runner.state.cache, engine.runner.state.draft))
    return {"peak_rss": host_bytes(), "weights": _num_bytes(weights), "cache": _num_bytes(caches)}


def _num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values())
