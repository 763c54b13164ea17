"""Targets with recurrent layers have a prefix cache: a hit goes on from a kept state, and changes no bit but the time
it takes, whatever is given up meanwhile."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Ask, Dice, Fixed, Reference, compile_programs, greedy, make_engine, make_runner, run, serving
from spread import head_of, mesh_of, spread_head, spread_target, target_of
from storms import storm

from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.serve.launch import Models
from specserve.serve.launch import make_runner as launch_runner
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun

MODEL = "delta nets"
CHUNK = 16  # and the border of states
ALL = {"max_tokens": 12, "ignore_eos": True, "logprobs": 3}
PARAMS = SamplingParams(temperature=0.0, **ALL), SamplingParams(seed=5, presence_penalty=0.3, **ALL)


@pytest.fixture(scope="module")
def keeping(kept: Path | None) -> Runner:
    runner = make_runner(target_of(MODEL), head_of(MODEL), "tree:2x2x4", "chain:2", "off", kept_states=3, folder=kept)
    compile_programs(runner)
    return runner


@pytest.fixture(scope="module")
def reference(kept: Path | None) -> Iterator[Reference]:
    reference = Reference(target_of(MODEL), kept)
    compile_programs(reference.runner)
    with serving(reference.engine):
        yield reference


def said(inbox: Any) -> Any:
    """Everything that depends on a bit of the state: tokens, their log-probabilities, and what was accepted."""
    stats = inbox.wait().stats
    found = [item for delta in inbox.deltas for item in delta.logprobs]
    return inbox.token_ids, found, stats.num_steps, stats.accepted_per_depth


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", ["off", "chain:2", "tree:2x2x4"])
def test_a_hit_equals_a_miss_bit_for_bit(keeping: Runner, way: str, params: SamplingParams) -> None:
    prompt = tuple(random.Random(3).choices(range(3, 64), k=45))
    turn, other = (*prompt, *prompt[5:17]), (*prompt[:20], 9, 9, 9)
    asks = [Ask(each, params) for each in (prompt, prompt, turn, other, other)]
    with serving(make_engine(keeping, Fixed(parse_speculation(way)))) as engine:
        hits = [run(engine, [ask])[0] for ask in asks]
        assert [inbox.wait().stats.num_cached_tokens for inbox in hits] == [0, 32, 32, 0, 16]
        for ask, hit in zip(asks, hits, strict=True):
            engine.flush_cache()
            miss = run(engine, [ask])[0]
            assert miss.wait().stats.num_cached_tokens == 0
            assert said(hit) == said(miss)
        assert engine.stats().num_prefix_hits == 80


@pytest.mark.parametrize("spread", ["", pytest.param("data=2,tensor=2", marks=pytest.mark.slow)])
def test_storms_change_no_token(keeping: Runner, reference: Reference, spread: str) -> None:
    """Few pages and fewer states: they are given up all the time."""
    runner = keeping
    if spread:
        mesh, ways = mesh_of(spread), ("tree:2x2x4", "chain:2", "off")
        runner = make_runner(spread_target(MODEL, mesh), spread_head(MODEL, mesh), *ways, kept_states=3, mesh=mesh)
        compile_programs(runner)
    stats, _ = storm(runner, reference, 80, 25, num_pages=20)
    assert stats.num_prefix_hits


def test_a_preempted_answer_goes_on_behind_a_kept_state(keeping: Runner, reference: Reference) -> None:
    """Room for one of two long answers: the younger gives its pages back, and its next turn is hit."""
    prompt = tuple(random.Random(8).choices(range(3, 64), k=50))
    asked = (Ask(prompt[i : i + 30], greedy(60, ignore_eos=True)) for i in range(20))
    first, second = itertools.islice(reference.firm(asked), 2)
    with serving(make_engine(keeping, Dice(2), num_pages=14)) as engine:
        inboxes = run(engine, [first, second])
        assert engine.stats().num_preemptions
    for ask, inbox in zip((first, second), inboxes, strict=True):
        reference.check(ask, inbox)


def test_a_server_keeps_states_as_its_settings_say() -> None:
    models = Models("tiny", target_of(MODEL), None, None)
    for settings, number in (({}, 8), ({"kept_states": 2}, 2), ({"prefix_cache": False}, 0), ({"max_slots": 64}, 16)):
        runner = launch_runner(models, ServeRun(max_model_len=64, **settings), [None])
        assert runner.shapes.kept_states == number
        kept = [state for state in runner.state.cache.kept if state is not None]
        assert {state.matrix.shape[0] for state in kept} == ({number} if number else set())
    dense = Models("dense", target_of("dense"), None, None)
    with pytest.raises(ConfigError, match="--kept-states 2: dense has no recurrent layers; leave the flag out"):
        launch_runner(dense, ServeRun(max_model_len=64, kept_states=2), [None])
    with pytest.raises(ConfigError, match="--kept-states 2: prefixes are not cached"):
        launch_runner(models, ServeRun(max_model_len=64, kept_states=2, prefix_cache=False), [None])
