"""A prefix hit changes nothing but the time it takes: same tokens, same acceptance, fewer tokens to prefill."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from engines import (
    PAGE_SIZE,
    SEEDS,
    VOCAB,
    Ask,
    Fixed,
    Inbox,
    Reference,
    greedy,
    make_engine,
    moved_weights,
    run,
    serving,
    submit,
)

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.serve.engine.engine import Engine
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import Delta, FinishReason, SamplingParams, SpeculationStats

PROMPT = tuple(random.Random(4).choices(range(3, VOCAB), k=41))
PARAMS = [greedy(30, ignore_eos=True), SamplingParams(max_tokens=30, seed=3, ignore_eos=True, presence_penalty=0.3)]


@pytest.fixture(params=["tree:3x3x8"])
def engine(request: pytest.FixtureRequest, runner: Runner) -> Iterator[Engine]:
    with serving(make_engine(runner, Fixed(parse_speculation(request.param)))) as engine:
        yield engine


@pytest.fixture
def num_prefilled(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompt tokens, chunk by chunk."""
    prefill, found = runner.prefill, []

    def noted(parts: Sequence[tuple[int, int, bool]], **options: object) -> object:
        found.extend(num_tokens for _, num_tokens, _ in parts)
        return prefill(parts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "prefill", noted)
    return found


def _stats(inbox: Inbox) -> SpeculationStats:
    stats = inbox.wait().stats
    assert stats is not None
    return stats


Check = Callable[[Ask, Inbox, int], None]


@pytest.fixture
def check_hit(engine: Engine, tiny_target: Target, tiny_head: Head) -> Check:
    """Of a request, what a hit said and how many tokens were cached, against a miss. Flushes the cache."""

    def miss(ask: Ask) -> tuple[Any, ...]:
        engine.flush_cache()
        inbox = run(engine, [ask])[0]
        assert _stats(inbox).num_cached_tokens == 0
        return _said(inbox)

    def check(ask: Ask, hit: Inbox, num_cached: int) -> None:
        expected = miss(ask)
        for seed in SEEDS:
            with moved_weights(engine.runner, tiny_target, tiny_head, seed):
                assert miss(ask) == expected, f"{ask} sits on a near-tie; ask with another seed"
        engine.flush_cache()
        assert _said(hit) == expected
        assert _stats(hit).num_cached_tokens == num_cached

    return check


def _said(inbox: Inbox) -> tuple[Any, ...]:
    stats = _stats(inbox)
    return inbox.token_ids, stats.num_steps, stats.accepted_per_depth


@pytest.mark.parametrize(
    ("engine", "params"),
    [pytest.param("tree:3x3x8", PARAMS[0], id="greedy"), pytest.param("chain:3", PARAMS[1], id="sampled")],
    indirect=["engine"],
)
def test_a_hit_equals_a_miss_in_tokens_and_acceptance(
    engine: Engine, num_prefilled: list[int], check_hit: Check, params: SamplingParams
) -> None:
    ask, later = Ask(PROMPT, params), Ask((*PROMPT[:20], 5, 5, 5), params)  # of which two pages are cached
    _, hit = run(engine, [ask])[0], run(engine, [ask])[0]
    assert _stats(hit).num_accepted > 0, "nothing was accepted, so nothing was tested"
    assert num_prefilled == [16, 16, 9, 1]
    later_hit = run(engine, [later])[0]
    check_hit(ask, hit, 40)
    check_hit(later, later_hit, 16)


@pytest.mark.parametrize(
    ("engine", "first_turn"), [("tree:3x3x8", "speculative"), ("chain:3", "plain")], indirect=["engine"]
)
def test_the_answer_is_cached_with_its_question(
    engine: Engine, reference: Reference, check_hit: Check, first_turn: str
) -> None:
    """What steps of the first turn wrote, aux hidden states and draft entries included, serves the second as if it had
    been prefilled; plain steps leave tokens behind that the draft has not consumed."""
    controller = engine.rounds.choice.controller
    first = Ask(PROMPT[:13], PARAMS[1])
    if first_turn == "plain":
        engine.rounds.choice.complete(Fixed(None), is_partial=False)
    inbox = run(engine, [first])[0]
    reference.check(first, inbox)
    engine.rounds.choice.complete(controller, is_partial=False)
    prompt = (*first.prompt, *inbox.token_ids, 7, 8, 9, 10)
    second = [Ask(prompt, SamplingParams(max_tokens=30, seed=seed, ignore_eos=True)) for seed in range(4)]
    hits = [run(engine, [ask])[0] for ask in second]
    for ask, hit, num_cached in zip(second, hits, (32, 40, 40, 40), strict=True):  # 13 + 30 - 1, less 8 pending: 34
        check_hit(ask, hit, num_cached)
    assert sum(_stats(hit).num_accepted for hit in hits) > 4, "little was accepted, so little was tested"


def test_twins_share_pages_while_they_run(runner: Runner, num_prefilled: list[int]) -> None:
    engine = make_engine(runner, Fixed(parse_speculation("chain:3")))
    twins = [submit(engine, Ask(PROMPT, params))[1] for params in PARAMS * 2]
    with serving(engine):
        stats = [_stats(twin) for twin in twins]
    assert [found.num_cached_tokens for found in stats] == [0, 40, 40, 40]
    assert sum(num_prefilled) == 41 + 3


def test_salts_share_nothing_with_others(engine: Engine) -> None:
    cached = [
        _stats(run(engine, [Ask(PROMPT, greedy(3), salt=salt)])[0]).num_cached_tokens
        for salt in ("", "alice", "bob", "alice", "", "bob")
    ]
    assert cached == [0, 0, 0, 40, 40, 40]


@pytest.mark.parametrize("length", [5, 41])  # no page of it is cached when the flush comes, or five
def test_a_flush_forgets_also_what_runs(engine: Engine, length: int) -> None:
    ask, inbox = Ask(PROMPT[:length], greedy(40, ignore_eos=True)), Inbox()

    def flush_once(delta: Delta) -> None:
        if not inbox.deltas:
            engine.flush_cache()
        inbox(delta)

    engine.submit(ask.prompt, ask.params, flush_once)
    assert inbox.wait().finish_reason == FinishReason.LENGTH
    assert len(inbox.deltas) > 2, "it ended before the flush"
    later = Ask((*ask.prompt, *inbox.token_ids), greedy(3))
    cached = [_stats(run(engine, [later])[0]).num_cached_tokens for _ in range(2)]
    assert cached == [0, (length + 40 - 1) // PAGE_SIZE * PAGE_SIZE]


def test_without_a_cache_nothing_is_found(runner: Runner) -> None:
    with serving(make_engine(runner, is_caching=False)) as engine:
        asks = [Ask(PROMPT, greedy(3))] * 2
        assert [_stats(run(engine, [ask])[0]).num_cached_tokens for ask in asks] == [0, 0]
        assert engine.stats().num_pages_cached == 0


def test_a_full_cache_evicts_and_serves(runner: Runner, reference: Reference) -> None:
    """Far more prompts than pages, one after the other: idle pages make room."""
    rng = random.Random(4)
    with serving(make_engine(runner, Fixed(parse_speculation("chain:3")), num_pages=12)) as engine:
        for _ in range(12):
            ask = Ask(tuple(rng.choices(range(VOCAB), k=5 * PAGE_SIZE)), greedy(9))
            reference.check(ask, run(engine, [ask])[0])
        assert 0 < engine.stats().num_pages_cached <= 12
