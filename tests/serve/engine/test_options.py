"""Law 1 for everything a request can ask for: speculation, batch mates, prefix hits, preemptions and cancellations of
others change no token. And law 2: what is sampled is distributed as the options say."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
from engines import (
    EOS,
    NUM_PAGES,
    VOCAB,
    Ask,
    Dice,
    Fixed,
    Letters,
    Reference,
    make_engine,
    run,
    serving,
    submit,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rounding import assert_within
from scipy import stats

from specserve.checkpoints.load import Target
from specserve.drafters.speculation import parse_speculation
from specserve.errors import RequestError
from specserve.serve.engine.options import bad_sequences, sampler_rows
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.sampling import MAX_BAD_TOKENS

FAMILIES = np.random.default_rng(2).integers(3, VOCAB, (3, 60)).tolist()  # prompts that begin alike
PROMPT = (5, 9, 33, 7, 7, 60, 12)
STOP_IDS = tuple(range(20, 40))


@pytest.fixture(params=["with a head", "without"])
def any_runner(request: pytest.FixtureRequest) -> Runner:
    """Dice take every tree that it has, in any order: each tree alone holds no other law."""
    return request.getfixturevalue("runner" if request.param == "with a head" else "lookup_runner")


def _params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 11, "ignore_eos": True} | options)


def _word(reference: Reference, temperature: float) -> str:
    """Two letters that the plain answer has."""
    token_ids = reference.answer(Ask(PROMPT, _params(temperature=temperature))).token_ids[4:]
    return next(text for pair in itertools.pairwise(token_ids) if len(text := Letters().decode(pair)) == 2)


def _alone(reference: Reference, temperature: float) -> dict[str, SamplingParams]:
    """Every option by itself."""
    word = _word(reference, temperature)
    options: dict[str, dict[str, Any]] = {
        "top_k": {"top_k": 2},
        "top_p": {"top_p": 0.3},
        "min_p": {"min_p": 0.5},
        "presence_penalty": {"presence_penalty": 2.0},
        "frequency_penalty": {"frequency_penalty": 1.5},
        "repetition_penalty": {"repetition_penalty": 3.0},
        "rewarded repetition": {"repetition_penalty": 0.5},
        "logit_bias": {"logit_bias": {7: 6.0, 9: -100.0}},
        "allowed_token_ids": {"allowed_token_ids": [3, 5, 8, 13, 21, 34]},
        "bad_words": {"bad_words": [word, word[0] * 3, "no such word"]},
        "eos": {"logit_bias": {EOS: 9.0}, "ignore_eos": False},
        "min_tokens": {"logit_bias": {EOS: 9.0}, "ignore_eos": False, "min_tokens": 9},
        "stop_token_ids": {"stop_token_ids": STOP_IDS},
        "min_tokens with stop ids": {"stop_token_ids": STOP_IDS, "min_tokens": 15},
        "stop": {"stop": [word]},
        "kept stop": {"stop": [word], "include_stop_str_in_output": True, "skip_special_tokens": False},
        "max_tokens": {"max_tokens": 1},
        "temperature": {"temperature": 0.7},
        "seed": {"seed": -(2**63), "temperature": 1.5},
        "logprobs": {"logprobs": 5},
        "no logprobs but the token's": {"logprobs": 0},
        "no speculation": {"speculation": 0},
        "a little speculation": {"speculation": 1},
    }
    return {name: _params(**{"temperature": temperature} | own) for name, own in options.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_option_alone_changes_what_it_should(reference: Reference, temperature: float) -> None:
    """In plain decoding: otherwise the laws below would hold for options that nobody reads."""
    base = reference.answer(Ask(PROMPT, _params(temperature=temperature))).token_ids
    inactive = {"logprobs", "no logprobs but the token's", "no speculation", "a little speculation"}
    inactive |= {"top_k", "top_p", "min_p"} if temperature == 0 else set()
    answers = {n: reference.answer(Ask(PROMPT, p)) for n, p in _alone(reference, temperature).items()}
    assert {name for name, answer in answers.items() if answer.token_ids == base} == inactive
    assert set(answers["allowed_token_ids"].token_ids) <= {3, 5, 8, 13, 21, 34}
    assert _word(reference, temperature) not in Letters().decode(answers["bad_words"].token_ids)
    assert len(answers["eos"].token_ids) < 9 < len(answers["min_tokens"].token_ids)
    assert len(answers["stop_token_ids"].token_ids) < 15
    assert not set(answers["min_tokens with stop ids"].token_ids[:15]) & set(STOP_IDS)
    assert answers["kept stop"].text == Letters().decode(answers["kept stop"].token_ids, skip_special_tokens=False)
    assert (
        answers["stop"].wait().stop_reason == answers["kept stop"].wait().stop_reason == _word(reference, temperature)
    )
    assert answers["stop_token_ids"].wait().stop_reason in STOP_IDS
    assert answers["eos"].wait().stop_reason is answers["max_tokens"].wait().stop_reason is None
    assert answers["stop"].text + _word(reference, temperature) == Letters().decode(answers["stop"].token_ids)


def test_every_option_speculative_equals_plain(any_runner: Runner, reference: Reference) -> None:
    """All of them together, and some alone."""
    asks = [Ask(PROMPT, params) for temperature in (0.0, 1.0) for params in _alone(reference, temperature).values()] + [
        Ask(PROMPT, params) for params in _params(n=4, temperature=1.0, top_k=9).choices()
    ]
    with serving(make_engine(any_runner, Dice(0))) as engine:
        for ask, inbox in zip(asks, run(engine, asks), strict=True):
            reference.check(ask, inbox)
        for ask in asks[1::5]:
            reference.check(ask, run(engine, [ask])[0])


def test_a_request_limits_its_own_speculation(runner: Runner) -> None:
    limits, seeds = (0, 1, 2, None), range(10)
    asks = [Ask(PROMPT, _params(speculation=limit, max_tokens=40, seed=seed)) for seed in seeds for limit in limits]
    with serving(make_engine(runner, Fixed(parse_speculation("tree:3x3x8")))) as engine:
        found = [inbox.wait().stats for inbox in run(engine, asks)]
    for i, depth in enumerate((0, 1, 2, 3)):
        accepted = np.sum([stats.accepted_per_depth for stats in found[i :: len(limits)] if stats], axis=0)
        drafted = sum(stats.num_draft_tokens for stats in found[i :: len(limits)] if stats)
        assert [bool(n) for n in accepted] == [d < depth for d in range(3)]
        assert bool(drafted) == (depth > 0)


@st.composite
def _any_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 24))
    token_ids = st.lists(st.integers(0, VOCAB - 1), max_size=4)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, max_tokens // 2, max_tokens])),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 2, 10])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.5, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -2.0, 3.0]), max_size=3)),
        allowed_token_ids=draw(st.sampled_from([None, None, None, tuple(range(10, 30))])),
        bad_words=draw(st.lists(st.text(Letters.alphabet[3:], min_size=1, max_size=2), max_size=3)),
        stop_token_ids=draw(token_ids),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        speculation=draw(st.sampled_from([None, None, None, 0, 1])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )


@st.composite
def _any_ask(draw: st.DrawFn) -> Ask:
    prompt = draw(st.sampled_from(FAMILIES))[: draw(st.integers(1, 60))]
    prompt = prompt + draw(st.lists(st.integers(0, VOCAB - 1), max_size=5))
    return Ask(
        tuple(prompt),
        draw(_any_params()),
        salt=draw(st.sampled_from(["", "", "", "mine"])),
        priority=draw(st.integers(-1, 1)),
    )


@given(
    has_head=st.sampled_from([True, True, False]),
    asks=st.lists(_any_ask(), min_size=2, max_size=7),
    num_cancelled=st.integers(0, 2),
    num_pages=st.sampled_from([NUM_PAGES, 24, 16, 13]),
    prefers_cached=st.booleans(),
)
@settings(max_examples=40)
def test_any_mixture_speculative_equals_plain(
    runner: Runner,
    lookup_runner: Runner,
    reference: Reference,
    has_head: bool,
    asks: list[Ask],
    num_cancelled: int,
    num_pages: int,
    prefers_cached: bool,
) -> None:
    assume(all(reference.is_firm(ask) for ask in asks))
    any_runner = runner if has_head else lookup_runner
    engine = make_engine(any_runner, Dice(0), num_pages=num_pages, prefers_cached=prefers_cached)
    inboxes = []
    for i, ask in enumerate(asks):
        request, inbox = submit(engine, ask)
        inboxes.append(inbox)
        if i < num_cancelled:  # by its listener: in the middle of a round
            hear = request.on_delta
            request.on_delta = lambda delta, hear=hear, request=request: (request.cancel(), hear(delta))[1]
    with serving(engine):
        for i, (ask, inbox) in enumerate(zip(asks, inboxes, strict=True)):
            reference.check(ask, inbox, is_cancelled=i < num_cancelled)


def test_logprobs_are_the_targets_own(runner: Runner, reference: Reference, tiny_target: Target) -> None:
    """Before bias, penalties and temperature: log_softmax of one plain forward, whatever the other options."""
    asks = [
        Ask(PROMPT, replace(params, logprobs=5))
        for temperature in (0.0, 1.0)
        for params in _alone(reference, temperature).values()
    ]
    with serving(make_engine(runner, Dice(4))) as engine:
        inboxes = run(engine, asks)
    for ask, inbox in zip(asks, inboxes, strict=True):
        logits = tiny.target_logits(tiny_target, [*ask.prompt, *inbox.token_ids])[len(ask.prompt) - 1 :].astype(float)
        expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        assert [found.token_id for found in inbox.logprobs] == inbox.token_ids
        for row, found in zip(expected, inbox.logprobs, strict=False):
            best, bound = np.sort(row)[::-1][:5], 2 * reference.off
            assert_within(found.logprob, row[found.token_id], bound)
            assert_within([value for _, value in found.top], best, bound)
            assert_within([row[token_id] for token_id, _ in found.top], best, bound)


SAMPLED: list[dict[str, Any]] = [  # every row of one batch; few outcomes, so that few draws are enough
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 0.8, "min_p": 0.5},
    {  # a reward, so that repeated tokens are common
        "temperature": 0.7,
        "top_k": 3,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.3,
        "logit_bias": {61: 1.0},
    },
]
NUM_SEEDS, NUM_DRAWN = 200, 3


def _probs(target: Target, params: SamplingParams, output_ids: Sequence[int]) -> np.ndarray:  # [vocab] float64
    """In NumPy, from the words of the documentation."""
    logits = tiny.target_logits(target, [*PROMPT, *output_ids])[-1].astype(np.float64)
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    counts = np.bincount(np.array(output_ids, int), minlength=VOCAB)
    is_seen = (counts > 0) | np.isin(np.arange(VOCAB), PROMPT)
    penalty = params.repetition_penalty
    logits = np.where(is_seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    logits /= params.temperature
    if params.top_k:
        logits[logits < np.sort(logits)[-params.top_k]] = -np.inf
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    if params.top_p < 1:
        order = np.argsort(-probs)
        mass = np.cumsum(probs[order])
        probs[order[1 + np.argmax(mass >= params.top_p) :]] = 0
    probs[probs < params.min_p * probs.max()] = 0
    return probs / probs.sum()


def test_a_mixed_batch_is_distributed_as_its_options_say(runner: Runner, tiny_target: Target) -> None:
    """Chi-square of the first three tokens together: the first comes from prefill, the others from speculation."""
    asks = [
        Ask(PROMPT, SamplingParams(max_tokens=NUM_DRAWN, seed=seed, ignore_eos=True, **own))
        for seed in range(NUM_SEEDS)
        for own in SAMPLED
    ]
    with serving(make_engine(runner, Fixed(parse_speculation("tree:3x3x8")), max_queue=len(asks))) as engine:
        inboxes = run(engine, asks)
    accepted = sum(found.num_accepted for inbox in inboxes if (found := inbox.wait().stats))
    assert accepted > NUM_SEEDS, "little was accepted, so little was tested"
    for kind, own in enumerate(SAMPLED):
        probs = functools.cache(functools.partial(_probs, tiny_target, SamplingParams(**own)))
        expected: dict[tuple[int, ...], float] = {(): NUM_SEEDS}
        for _ in range(NUM_DRAWN):
            expected = {
                (*drawn, token_id): mass * probs(drawn)[token_id]
                for drawn, mass in expected.items()
                for token_id in np.flatnonzero(probs(drawn)).tolist()
            }
        observed = dict.fromkeys(expected, 0)
        for inbox in itertools.islice(inboxes, kind, None, len(SAMPLED)):
            drawn = tuple(inbox.token_ids)
            assert drawn in expected, f"{own}: {drawn} cannot be drawn"
            observed[drawn] += 1
        common = [drawn for drawn, count in expected.items() if count >= 5]  # the rare ones are one cell together
        cells = [(observed[drawn], expected[drawn]) for drawn in common]
        rare = (NUM_SEEDS - sum(o for o, _ in cells), NUM_SEEDS - sum(e for _, e in cells))
        statistic = sum((o - e) ** 2 / max(e, 1e-9) for o, e in [*cells, rare] if o or e > 1e-6)
        p_value = stats.chi2.sf(statistic, len(cells))
        assert len(cells) > 5
        # seeds are fixed; one set in a thousand would fail a right sampler
        assert p_value > 1e-3, f"{own}: chi-square {statistic:.1f} over {len(cells)} cells, p = {p_value:.2e}"


def test_bad_words_are_banned_at_a_start_and_after_a_space() -> None:
    tokenizer = Letters()
    a, b, space = tokenizer.encode("ab ")
    assert bad_sequences(["ab", " b", "ab"], tokenizer) == [
        (a, b),
        (space, a, b),
        (space, b),
    ]
    longest = "a" * (MAX_BAD_TOKENS - 1)
    assert len(bad_sequences([longest], tokenizer)) == 2
    with pytest.raises(RequestError, match=f"has {MAX_BAD_TOKENS + 1} tokens, at most {MAX_BAD_TOKENS} fit"):
        bad_sequences([longest + "a"], tokenizer)


def test_all_bits_of_a_seed_reach_the_device() -> None:
    seeds = [0, 1, -1, 2**32, -(2**63), 2**63 - 1]
    words = [sampler_rows(SamplingParams(), seed).seed[0].tolist() for seed in seeds]
    assert [low | high << 32 for low, high in words] == [seed % 2**64 for seed in seeds]
