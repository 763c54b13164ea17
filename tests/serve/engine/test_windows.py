"""Layers with a window have fewer pages than the others, and give back those behind it: no bit of an answer changes."""

import itertools
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from engines import (
    MAX_LEN,
    NUM_SLOTS,
    PAGE_SIZE,
    VOCAB,
    Ask,
    Dice,
    Fixed,
    Inbox,
    Letters,
    Reference,
    compile_programs,
    find_tie,
    make_engine,
    make_runner,
    run,
    serving,
)
from spread import mesh_of, spread_head, spread_target, target_of
from storms import storm

from specserve.drafters.layers import windowed
from specserve.drafters.speculation import parse_speculation
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.windows import window_sizes
from specserve.serve.launch import Models
from specserve.serve.launch import make_runner as launch_runner
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import tokens_ahead
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun
from specserve.speculative.controller import Controller
from specserve.speculative.slot_state import PageTables

MODEL, WINDOW = "windows", 11
WAYS = "tree:2x2x4", "chain:2", "off"
MOST_STEPS, MAX_STEP, CHUNK = 2, 3, 16
NUM_PAGES = NUM_SLOTS * MAX_LEN // PAGE_SIZE
ALL = {"max_tokens": 40, "ignore_eos": True, "logprobs": 3}
PARAMS = SamplingParams(temperature=0.0, **ALL), SamplingParams(seed=5, temperature=2.0, presence_penalty=0.3, **ALL)
[(_, NUMBER)] = SIZES = window_sizes(
    [WINDOW],
    num_slots=NUM_SLOTS,
    num_pages=NUM_PAGES,
    page_size=PAGE_SIZE,
    ahead=tokens_ahead(MOST_STEPS, MAX_STEP, cache_lag=8),
    chunks=(CHUNK,),
    num_cached=1,
)


HEAD = tiny.random_head(target_of(MODEL).config, 1, num_kv_heads=2, head_dim=8, layers=windowed((WINDOW - 2,)))


@pytest.fixture(scope="module")
def runner(kept: Path | None) -> Runner:
    runner = make_runner(target_of(MODEL), HEAD, *WAYS, windows=SIZES, has_constrained=False, folder=kept)
    assert NUMBER < 3 / 4 * NUM_PAGES  # else nothing is given to others
    assert {layer.k.shape[0] for layer in runner.state.cache.layers} == {NUMBER, NUM_PAGES}
    assert [layer.k.shape[0] for layer in runner.state.draft.cache.layers] == [NUMBER], "the head's layer too"
    compile_programs(runner)
    return runner


def said(inbox: Inbox) -> Any:
    """Everything that depends on a bit of the pages: tokens, their log-probabilities, and what was accepted."""
    stats = inbox.wait().stats
    found = [item for delta in inbox.deltas for item in delta.logprobs]
    return inbox.token_ids, found, stats.num_steps, stats.accepted_per_depth


def _engine(runner: Runner, control: Controller, **options: Any) -> Engine:
    """An engine whose pages all have the same window page, until it gives them others."""
    engine = make_engine(runner, control, most_steps=MOST_STEPS, **options)
    tables = PageTables.of(runner.state)
    nothing = jax.tree.map(jnp.zeros_like, tables.windows)
    runner.state = PageTables(tables.pages, nothing).put_into(runner.state)
    return engine


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_depends_on_what_is_given_back(runner: Runner, way: str) -> None:
    """Answers over many windows, behind prompts of one chunk and of four, together and alone, and again behind what is
    cached of them, are those of requests that run alone, each computed whole, and keep all their pages."""
    prompt = tuple(random.Random(3).choices(range(3, 64), k=50))
    asks = [Ask(prompt[:n], params) for params in PARAMS for n in (5, 50)]
    others = [Ask((*prompt[:25], token, 9, 9), PARAMS[1]) for token in (11, 12)]
    control = Fixed(parse_speculation(way))
    with serving(_engine(runner, control)) as engine:
        found = run(engine, asks)
        turn = Ask((*prompt, *found[1].token_ids), SamplingParams(temperature=0.0, max_tokens=4))
        again = [asks[3], *others, turn]
        found += [run(engine, [ask])[0] for ask in again]
        stats = [inbox.wait().stats for inbox in found]
        cached = [each.num_cached_tokens for each in stats[4:]]
        assert way == "off" or sum(each.num_accepted for each in stats) > 20
        assert cached == [48, 24, 24, 80]
    with serving(_engine(runner, control, is_caching=False)) as engine:
        engine.rounds.scheduler.pool.use_windows(((10**6, NUMBER),))
        for ask, inbox in zip([*asks, *again], found, strict=True):
            assert said(run(engine, [ask])[0]) == said(inbox)


def test_a_preempted_answer_goes_on_behind_its_window(runner: Runner) -> None:
    """Room for one or two of eight answers: what was given up is computed again, and no token changes."""
    prompt = random.Random(8).choices(range(3, 64), k=60)
    asks = [Ask(tuple(prompt[i : i + 30]), PARAMS[0]) for i in range(8)]
    said_before = [inbox.token_ids for inbox in _all(runner, asks)]
    off = float(tiny.tolerance(target_of(MODEL), range(VOCAB)).max())
    firm = [not find_tie(target_of(MODEL), Letters(), *each, off) for each in zip(asks, said_before, strict=True)]
    assert sum(firm) > 3, "near-ties; ask for something else"
    with serving(_engine(runner, Dice(2), num_pages=14)) as engine:
        found = [inbox.token_ids for inbox in run(engine, asks)]
        assert engine.stats().num_preemptions
    assert list(itertools.compress(found, firm)) == list(itertools.compress(said_before, firm))


def _all(runner: Runner, asks: list[Ask]) -> list[Inbox]:
    with serving(_engine(runner, Dice(1))) as engine:
        return run(engine, asks)


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["", "data=2,tensor=2"])
def test_storms_change_no_token(spread: str, kept: Path | None) -> None:
    """Few pages, cancelled and preempted requests, some of them with grammars."""
    reference, models, mesh = Reference(target_of(MODEL), kept), (target_of(MODEL), HEAD), None
    if spread:
        mesh = mesh_of(spread)
        models = spread_target(MODEL, mesh), spread_head(MODEL, mesh)
    runner = make_runner(*models, *WAYS, windows=SIZES, mesh=mesh)
    for each in (runner, reference.runner):
        compile_programs(each)
    with serving(reference.engine):
        stats, _ = storm(runner, reference, 80, 25, num_pages=13, most_steps=MOST_STEPS)
    assert stats.num_prefix_hits
    assert spread or stats.num_preemptions, "nobody had to give up its pages"


def test_a_server_has_as_many_pages_as_its_windows_need() -> None:
    models = Models("tiny", target_of(MODEL), HEAD, None)
    runner = launch_runner(models, ServeRun(max_slots=64, page_size=8), [parse_speculation("chain:2")])
    assert runner.with_head(HEAD).compiled is runner.compiled, "another head alike takes the same programs"
    deeper = runner.with_head(HEAD, [parse_speculation("chain:7")]).shapes.windows
    [(window, number)] = runner.shapes.windows
    assert (window, number) == (WINDOW, runner.state.cache.layers[0].k.shape[0])
    assert number < deeper[0][1] < runner.shapes.num_pages / 2
    assert not launch_runner(models, ServeRun(max_model_len=32, page_size=8), [None]).shapes.windows, "none is saved"
