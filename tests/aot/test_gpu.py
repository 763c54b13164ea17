"""Whole programs of a server, compiled for an H100 that is not here (`-m cuda_aot`; `plan.ahead` says what to install).

The target is Qwen3-8B's first layers, the head a whole one.
"""

import dataclasses
import functools
import re

import jax
import pytest

from specserve.drafters.registry import DraftSettings, load_kind
from specserve.drafters.speculation import parse_speculation
from specserve.models.presets import PRESETS
from specserve.plan.ahead import Counted, Described, describe
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.sizes import LOGITS_AT_ONCE, estimated_temporaries
from specserve.speculative.program import StepProgram

pytestmark = pytest.mark.cuda_aot
LAYERS, SLOTS, CONTEXT, PAGE, CHUNK = 4, 8, 4096, 32, 1024
WAYS = ("off", "chain:3", "tree:5x4x16")


@pytest.fixture(scope="module")
def h100() -> Described:
    return describe("h100")


@pytest.fixture(scope="module")
def runner(h100: Described) -> Runner:
    full = PRESETS["qwen3-8b"].config()
    target = dataclasses.replace(full, num_layers=LAYERS, layers=full.layers[:LAYERS])
    head = load_kind("eagle3").new(DraftSettings(), full, 32_000).with_dtype("bfloat16")
    drafter = type(head)(dataclasses.replace(head.config, aux_layers=(0, 1, 2)))
    sizes = {"num_slots": SLOTS, "max_model_len": CONTEXT, "page_size": PAGE, "num_pages": SLOTS * CONTEXT // PAGE}
    with h100.made_for():
        return h100.runner(target, drafter, make_shapes([parse_speculation(way) for way in WAYS], target, **sizes))


@pytest.fixture(scope="module")
def compiled(h100: Described, runner: Runner):
    @functools.cache
    def compile(way: str, batch: int) -> Counted:
        width = runner.shapes.max_pages
        if way == "prefill":
            return h100.compile(runner, runner.shapes.prefill(width, CHUNK))
        return h100.compile(runner, StepProgram(batch, width, parse_speculation(way)))

    return compile


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_one_graph(compiled, way: str) -> None:
    """The host starts it and goes on: no loop or choice within the step waits for the host."""
    assert compiled(way, SLOTS).parts == 1


@pytest.mark.parametrize("way", [*WAYS, "prefill"])
def test_memory_is_that_of_logits_and_the_state_is_written_in_place(compiled, runner: Runner, way: str) -> None:
    """Beside its arguments a step holds no second state, but arrays of logits as sampled rows need them (a prompt:
    scores of a layer). They are what a server sets aside before it fills the device."""
    found, target, shapes = compiled(way, SLOTS), runner.config.target, runner.shapes
    assert found.aliased_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(runner.state))
    alone = dataclasses.replace(shapes, trees=(parse_speculation("off" if way == "prefill" else way),))
    assert found.temporary_bytes <= estimated_temporaries(target, alone, None)
    if way != "prefill":
        rows = SLOTS * shapes.num_nodes(parse_speculation(way))
        assert found.temporary_bytes <= 4 * LOGITS_AT_ONCE * rows * target.vocab_size


@pytest.mark.parametrize("way", [*WAYS, "prefill"])
def test_no_array_of_pages_is_copied(compiled, runner: Runner, way: str) -> None:
    shape = ",".join(map(str, runner.state.cache.layers[0].k.shape))
    made = re.findall(rf"= \w+\[{shape}\]\S* ([\w-]+)\(", compiled(way, SLOTS).text)
    assert not {"copy", "transpose", "copy-start"} & {*made}, made
