"""`specserve verify` passes what is right, and finds what is planted: each fault changes one thing of a step."""

import random

import pytest
from engines import EOS, VOCAB, Letters, make_runner

from specserve.checkpoints.load import Target
from specserve.drafters.door import Head
from specserve.eval.rule import WholeText
from specserve.eval.verify import Plan, Prover
from specserve.eval.verify_judge import Bench
from specserve.eval.verify_report import Report
from specserve.serve.runner import Runner

PROMPTS = [tuple(random.Random(i).choices(range(3, VOCAB), k=9 + 4 * i)) for i in range(3)]
PLAN = Plan(max_tokens=18, draws=160)


def prove(runner: Runner, target: Target) -> Report:
    report = Report()
    bench = Bench(runner, target, Letters(), WholeText(target))  # type: ignore[arg-type]
    Prover(bench, PROMPTS, PLAN, report).run()
    return report


def test_a_right_engine_passes(tiny_target: Target, tiny_head: Head) -> None:
    runner = make_runner(tiny_target, tiny_head, "off", "chain:3", "tree:3x3x8")
    runner.warmup()
    report = prove(runner, tiny_target)
    for row in report.rows: print(row)
    for test in report.tests: print(test)
    for m in report.mismatches: print(m)
    print(report.noise, report.num_compared, report.limit)
    assert not report.num_bugs
