"""`--deterministic`: tokens and log-probabilities are equal to the last bit, whatever runs beside a request, whether
its prompt was cached, and however it is speculated on."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from engines import EOS

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.options import EngineOptions
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import DETERMINISTIC_DEPTH, make_shapes
from specserve.serve.requests.completion import CompletionOutput
from specserve.serve.requests.request import SamplingParams
from specserve.speculative import step

NUM_SLOTS, MAX_LEN, PAGE_SIZE = 4, 256, 8
NUM_TOKENS = 40


SPECULATIONS = ["off", "chain:3", "head+suffix:7"]


@pytest.fixture(scope="module")
def make(tiny_target: Target, tiny_head: Head) -> Callable[[str], Runner]:
    """Each runner is made once."""
    return functools.cache(functools.partial(_runner, tiny_target, tiny_head))


def _runner(target: Target, head: Head, speculation: str, *, has_constrained: bool = False) -> Runner:
    shapes = make_shapes(
        (parse_speculation(speculation),),
        target.config,
        num_slots=NUM_SLOTS,
        max_model_len=MAX_LEN,
        page_size=PAGE_SIZE,
        num_pages=2 * NUM_SLOTS * MAX_LEN // PAGE_SIZE,
        is_deterministic=True,
    )
    return Runner(target, head, shapes, has_constrained=has_constrained)


def test_grammars_have_programs_of_the_one_shape(tiny_target: Target, tiny_head: Head) -> None:
    """A proposed chain is padded to the length that every step verifies."""
    runner = _runner(tiny_target, tiny_head, "chain:2", has_constrained=True)
    for_masks = [program for program in list_programs(runner) if program.is_for_masks]
    assert len(for_masks) == 2
    for program in for_masks:
        runner.call(program).lower()


def _engine(runner: Runner, *, is_caching: bool = True) -> Engine:
    runner.reset()
    return Engine(runner, None, model_name="tiny", eos_ids=(EOS,), options=EngineOptions(is_caching=is_caching))


def _asks() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that begin alike, of several chunks, and end in their own ways; greedy and sampled."""
    rng = np.random.default_rng(3)
    common = rng.integers(3, 64, 150).tolist()
    prompts = [common[:n] + rng.integers(3, 64, m).tolist() for n, m in ((150, 9), (131, 1), (70, 30), (3, 5))]
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 5}
    return prompts, [
        SamplingParams(temperature=0.0, **options),
        SamplingParams(temperature=1.0, seed=1, **options),
        SamplingParams(temperature=0.7, seed=2, top_p=0.9, repetition_penalty=1.1, **options),
        SamplingParams(temperature=0.0, frequency_penalty=0.3, **options),
    ]


def _run(engine: Engine, order: list[list[int]]) -> list[tuple[int, CompletionOutput]]:
    """Groups of requests, each group as one batch."""
    prompts, params = _asks()
    found = []
    with engine:
        for group in order:
            done = engine.generate([prompts[i] for i in group], [params[i] for i in group])
            found += zip(group, done, strict=True)
    return found


ORDER = [[0], [1], [2], [3], [0, 1, 2, 3], [3, 2, 1, 0, 1, 0]]  # the first time a miss, then hits; alone, then together


@pytest.fixture(scope="module")
def expected(make: Callable[[str], Runner]) -> dict[int, CompletionOutput]:
    """Plainly, alone, and nothing cached."""
    return dict(_run(_engine(make("off"), is_caching=False), [[0], [1], [2], [3]]))


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_a_request_gets_the_same_bits(
    make: Callable[[str], Runner], expected: dict[int, CompletionOutput], speculation: str
) -> None:
    found = _run(_engine(make(speculation)), ORDER)
    for i, completion in found:
        assert len(completion.token_ids) == NUM_TOKENS
        assert completion.token_ids == expected[i].token_ids, f"request {i}"
        assert completion.logprobs == expected[i].logprobs, f"request {i}"
    has_accepted = any(completion.stats.num_accepted for _, completion in found)
    assert has_accepted == (speculation != "off"), "plain decoding is a chain of which nothing is accepted"
    assert all((completion.stats.num_drafts > 0) == has_accepted for _, completion in found), "and it drafts nothing"
    num_cached = [completion.stats.num_cached_tokens for i, completion in found if i < 3]
    assert num_cached[0] == 0 < min(num_cached[1:]), "one miss, and hits from then on"


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["bfloat16", "int8", "float8_e4m3fn"])
def test_rounded_entries_are_the_same_committed_or_new(
    tiny_target: Target, tiny_head: Head, expected: dict[int, CompletionOutput], stored: str
) -> None:
    """A draft that is verified sees of its new keys what later steps will see of them in the pages. And it does see
    other numbers than plain pages have."""
    target = dataclasses.replace(tiny_target, config=dataclasses.replace(tiny_target.config, cache_dtype=stored))
    plain = dict(_run(_engine(_runner(target, tiny_head, "off"), is_caching=False), [[0], [1], [2], [3]]))
    found = _run(_engine(_runner(target, tiny_head, "head+suffix:7")), ORDER[-2:])
    for i, completion in found:
        assert completion.token_ids == plain[i].token_ids, f"request {i}"
        assert completion.logprobs == plain[i].logprobs, f"request {i}"
    assert any(completion.stats.num_accepted for _, completion in found)
    assert plain[0].logprobs != expected[0].logprobs


def test_every_way_to_step_is_of_one_shape(make: Callable[[str], Runner]) -> None:
    """For all that this machine's products do, other numbers of rows may give other bits on another."""
    found = set()
    for speculation in SPECULATIONS:
        runner = make(speculation)
        shapes = runner.shapes
        assert (shapes.chunks[1:], shapes.batch_sizes, shapes.widths) == (
            (),
            (NUM_SLOTS,),
            (MAX_LEN // PAGE_SIZE,),
        )
        [tree] = runner.shapes.trees
        assert tree is not None
        propose = functools.partial(step.propose_tree, runner.config, tree=tree, width=runner.shapes.max_pages)
        slots = jax.ShapeDtypeStruct((NUM_SLOTS,), np.int32)
        _, proposal = jax.eval_shape(propose, runner.inputs.layouts.many, state=runner.state, slots=slots)
        found.add(proposal.token_ids.shape)
    assert found == {(NUM_SLOTS, 1 + DETERMINISTIC_DEPTH)}
