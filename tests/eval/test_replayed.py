"""Law 5: the acceptance that a training run measures is the one that the engine then serves with, to the last accepted
token, for every kind of proposal, greedy and sampled, end-of-text and length limits included."""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest
import tiny
from engines import MAX_LEN, SEEDS, Fixed, make_engine, make_runner, moved_weights

from specserve.checkpoints.configs import auto_cache_dtype
from specserve.checkpoints.load import Target
from specserve.data.dataset import Prompt
from specserve.drafters.interface import Head
from specserve.errors import ConfigError, DataError
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.sampling import DrawOptions
from specserve.train import acceptance
from specserve.train.acceptance import AcceptanceMeter, Arm, arms

ARMS = arms(("tree:3x3x8", "chain:3"), (0.0, 0.8))
SEED = 2**32 - 5  # the seeds of the prompts differ in both words
MAX_NEW = 30


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Ragged, of three sources."""
    rng = random.Random(3)
    lengths = [1, 29, 45, *(rng.randrange(1, 30) for _ in range(9))]
    return [Prompt("abc"[i % 3], [rng.randrange(3, 64) for _ in range(n)]) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def meter(tiny_target: Target, tiny_head: Head, prompts: list[Prompt]) -> AcceptanceMeter:
    """Small groups and small chunks, so that both have more than one and a rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "MAX_SLOTS", 5)
        patch.setattr(acceptance, "PREFILL_CHUNK", 16)
        return AcceptanceMeter(tiny_target, tiny_head.drafter, ARMS, prompts, max_new_tokens=MAX_NEW, seed=SEED)


def _served(runner: Runner, arm: Arm, prompts: Sequence[Prompt]) -> dict[str, Acceptance]:
    params = [
        SamplingParams(max_tokens=MAX_NEW, temperature=arm.temperature, seed=SEED + i) for i in range(len(prompts))
    ]
    with make_engine(runner, Fixed(arm.tree)) as engine:
        stats = [done.stats for done in engine.generate([prompt.token_ids for prompt in prompts], params)]
    found: dict[str, Acceptance] = {}
    for stat, prompt in zip(stats, prompts, strict=True):
        found[prompt.source] = found.get(prompt.source, Acceptance()) + stat
    return found


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_served_acceptance_equals_replayed(
    arm: Arm,
    meter: AcceptanceMeter,
    runner: Runner,
    tiny_target: Target,
    tiny_head: Head,
    prompts: list[Prompt],
) -> None:
    replayed = meter.measure(tiny_head.params, tiny_head.target_ids, arm)
    served = _served(runner, arm, prompts)
    for seed in SEEDS:
        with moved_weights(runner, tiny_target, tiny_head, seed):
            assert _served(runner, arm, prompts) == served, "a prompt sits on a near-tie; another seed"
    assert replayed.by_source == served
    assert list(replayed.by_source) == ["a", "b", "c"]
    books = [(found.num_steps, *found.accepted_per_depth) for found in replayed.by_source.values()]
    assert (replayed.total.num_steps, *replayed.total.accepted_per_depth) == tuple(np.sum(books, axis=0))
    assert replayed.total.num_accepted > 2


def test_one_program_for_prompts_and_one_for_each_tree(meter: AcceptanceMeter, tiny_head: Head) -> None:
    for arm in ARMS:
        meter.measure(tiny_head.params, tiny_head.target_ids, arm)
    programs = [meter._prefill, *meter._steps.values()]
    assert [program._cache_size() for program in programs] == [1, 1, 1]  # type: ignore[attr-defined]


# each shapes what is drawn; the rest of the options of a prompt are the first ones
SHAPED = [DrawOptions(0.8)] + [
    dataclasses.replace(DrawOptions(0.8), **{name: value})
    for name, value in {
        "temperature": 1.5, "top_k": 3, "top_p": 0.3, "min_p": 0.5, "presence_penalty": 1.9, "frequency_penalty": 1.9,
        "repetition_penalty": 3.0, "min_tokens": MAX_NEW,
    }.items()
]  # fmt: skip


@pytest.mark.parametrize("arm", ARMS[::2], ids=lambda arm: arm.name)
def test_each_prompt_is_answered_by_its_own_options(
    arm: Arm, meter: AcceptanceMeter, runner: Runner, tiny_target: Target, tiny_head: Head, prompts: list[Prompt]
) -> None:
    """Every option acts as it does in a request, beside prompts that do not have it."""
    assert {field.name for field in dataclasses.fields(DrawOptions)} == {
        name for own in SHAPED for name, value in vars(own).items() if value != getattr(SHAPED[0], name)
    }
    for start in range(0, len(SHAPED), 3):  # prompts have other options each time
        options = [SHAPED[(start + i) % len(SHAPED)] for i in range(len(prompts))]
        params = [
            SamplingParams(max_tokens=MAX_NEW, seed=SEED + i, **dataclasses.asdict(own))
            for i, own in enumerate(options)
        ]

        def served(asked: list[SamplingParams] = params) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
            with make_engine(runner, Fixed(arm.tree)) as engine:
                done = engine.generate([prompt.token_ids for prompt in prompts], asked)
            return [(tuple(each.token_ids), each.stats.accepted_per_depth) for each in done]

        expected = served()
        for seed in SEEDS:
            with moved_weights(runner, tiny_target, tiny_head, seed):
                assert served() == expected, "a prompt sits on a near-tie; another seed"
        found = meter.measure(tiny_head.params, tiny_head.target_ids, arm, options)
        accepted = [each.accepted_per_depth for each in found.by_prompt]
        assert [*zip(found.answers, accepted, strict=True)] == expected


def test_each_prompt_is_answered_at_its_own_temperature(meter: AcceptanceMeter, tiny_head: Head) -> None:
    """As it is where all are at that one."""
    weights, way = (tiny_head.params, tiny_head.target_ids), ARMS[0].speculation
    alike = [meter.measure(*weights, Arm(way, temperature)) for temperature in (0.0, 1.0)]
    mixed = meter.measure(*weights, Arm(way), [DrawOptions(float(i % 2)) for i in range(len(alike[0].answers))])
    assert alike[0].answers[1::2] != alike[1].answers[1::2]
    for start, own in enumerate(alike):
        assert mixed.answers[start::2] == own.answers[start::2]
        assert mixed.by_prompt[start::2] == own.by_prompt[start::2]


def test_prompts_that_do_not_fit_are_counted_and_answers_end_with_the_context(
    tiny_target: Target, tiny_head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "MAX_CONTEXT", MAX_LEN)
    arm = Arm("chain:3")

    def make(*lengths: int) -> AcceptanceMeter:
        prompts = [Prompt(f"of {n}", [3 + i % 50 for i in range(n)]) for n in lengths]
        return AcceptanceMeter(tiny_target, tiny_head.drafter, [arm], prompts, max_new_tokens=MAX_NEW)

    meter = make(MAX_LEN, 7, MAX_LEN - 1, MAX_LEN + 300, 0)
    assert meter.num_skipped == 3
    found = meter.measure(tiny_head.params, tiny_head.target_ids, arm).by_source
    assert found.keys() == {"of 7", f"of {MAX_LEN - 1}"}
    assert found["of 7"].num_emitted == MAX_NEW - 1, "the first token is the prefill's"
    # the one that leaves room for a single token has it from the prefill, and takes no step
    assert found[f"of {MAX_LEN - 1}"] == Acceptance(0, 0, (0, 0, 0))
    with pytest.raises(DataError, match=f"none of 2 held-out prompts fits a context of {MAX_LEN}.*--eval-prompts"):
        make(MAX_LEN, 0)


def test_an_answer_that_begins_with_its_end_takes_no_step(
    tiny_target: Target, tiny_head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end comes out of the last of three chunks of the prompt."""
    monkeypatch.setattr(acceptance, "PREFILL_CHUNK", 16)
    token_ids = [3 + i % 50 for i in range(45)]
    first = int(tiny.target_logits(tiny_target, token_ids)[-1].argmax())
    target = dataclasses.replace(tiny_target, eos_ids=(first,))
    arm = Arm("chain:3")
    meter = AcceptanceMeter(target, tiny_head.drafter, [arm], [Prompt("x", token_ids)], max_new_tokens=9)
    assert meter.measure(tiny_head.params, tiny_head.target_ids, arm).total == Acceptance(0, 0, (0, 0, 0))


def test_arms_are_every_pair_and_only_what_a_head_proposes() -> None:
    assert [arm.name for arm in arms(("chain:2", "static:2x1"), (0.0, 1.0))] == [
        "chain:2 T=0",
        "chain:2 T=1",
        "static:2x1 T=0",
        "static:2x1 T=1",
    ]
    for text in ("off", "ngram:3", "head+suffix:3"):
        with pytest.raises(ConfigError, match=r"eval.speculation .*chain:3 or tree"):
            arms((text,), (0.0,))
    with pytest.raises(ConfigError, match="at least one"):
        arms((), (0.0,))


def test_pages_of_a_bfloat16_checkpoint_are_those_of_both(
    tiny_target: Target, tiny_head: Head, prompts: list[Prompt]
) -> None:
    """What a CPU's training measures over rounded keys and values is what it then serves over them."""
    config = dataclasses.replace(tiny_target.config, cache_dtype=auto_cache_dtype("bfloat16", tiny_target.config.dtype))
    target, arm = dataclasses.replace(tiny_target, config=config), ARMS[0]
    runner = make_runner(target, tiny_head, arm.speculation, "off", has_constrained=False)
    meter = AcceptanceMeter(target, tiny_head.drafter, [arm], prompts, max_new_tokens=MAX_NEW, seed=SEED)
    served = _served(runner, arm, prompts)
    for seed in SEEDS:
        with moved_weights(runner, target, tiny_head, seed):
            assert _served(runner, arm, prompts) == served, "a prompt sits on a near-tie; another seed"
    assert meter.measure(tiny_head.params, tiny_head.target_ids, arm).by_source == served
