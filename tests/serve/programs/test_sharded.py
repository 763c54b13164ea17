"""Serving over a mesh: tokens are those of one device, whatever is spread over what, and nothing is sent twice."""

from pathlib import Path

import numpy as np
import pytest
from engines import Dice, Reference, compile_programs, make_engine, make_runner, run, serving
from spread import CASES, head_of, mesh_of, spread_head, spread_target, target_of

from specserve.kernels import native
from specserve.speculative.program import StepProgram

QUICK = ("latents", "data=2,tensor=2,expert=2", "chain:2")
DENSE = ("dense", "data=2,tensor=4", "tree:2x2x4")


ALL_WAYS = "off chain:2 tree:2x3x6"
KINDS = [
    ("dense", "data=2,tensor=4", "dflash"),
    ("dense", "data=2,tensor=4", "dspark"),
    ("experts", "data=2,tensor=2,expert=2", "dflash2"),
    ("experts", "data=2,tensor=2,expert=2", "p-eagle"),
    ("latents", "data=2,tensor=2,expert=2", "mtp"),
    ("latents", "data=2,tensor=2,expert=2", "language-model"),
]


@pytest.mark.parametrize(
    ("model", "text", "ways", "kind"),
    [
        (*QUICK, "eagle3"),
        pytest.param(*DENSE, "eagle3", marks=pytest.mark.slow),
        *(pytest.param(*case, ALL_WAYS, "eagle3", marks=pytest.mark.slow) for case in CASES),
        *(pytest.param(model, text, ALL_WAYS, kind, marks=pytest.mark.slow) for model, text, kind in KINDS),
    ],
)
def test_a_mesh_changes_no_token(
    model: str, text: str, ways: str, kind: str, kept: Path | None, rng: np.random.Generator
) -> None:
    """Of plain steps, chains and trees of any kind of head, in any order, greedy and sampled, in mixed batches. Nothing
    compiles late."""
    mesh = mesh_of(text)
    target, head = spread_target(model, mesh), spread_head(model, mesh, kind)
    runner = make_runner(target, head, *ways.split(), has_constrained=False, mesh=mesh, folder=kept)
    compile_programs(runner)
    reference = Reference(target_of(model), kept)
    with serving(make_engine(runner, Dice(0))) as engine, reference.engine:
        asks = [reference.any_ask(rng, length, i % 2 == 1) for i, length in enumerate((1, 16, 37, 20, 9))]
        for ask, inbox in zip(asks, run(engine, asks), strict=True):
            reference.check(ask, inbox)


@pytest.mark.parametrize(
    ("text", "way"),
    [("expert=4", "off"), pytest.param("data=2,expert=2", "chain:2", marks=pytest.mark.slow)],
)
def test_each_device_steps_its_own_sequences(text: str, way: str) -> None:
    """Along `expert` as along `data`: what a device computes in a step of four sequences over four devices is less than
    twice what one device computes for one sequence. Once it was four times as much."""
    mesh = mesh_of(text)
    with native.left_out():
        alone = make_runner(target_of("experts"), head_of("experts"), way)
        runner = make_runner(spread_target("experts", mesh), spread_head("experts", mesh), way, mesh=mesh)
        tree, width = runner.shapes.trees[-1], runner.shapes.widths[-1]
        steps = (alone.call(StepProgram(1, width, tree)), runner.call(StepProgram(4, width, tree)))
        one, four = (call.lower().compile().cost_analysis()["flops"] for call in steps)
    assert one / 4 < four < 2 * one
