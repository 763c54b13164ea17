"""What holds for a head of every kind, through the real engine: no token depends on it, and what a step accepts depends
on the step's root alone, not on what asks: the engine, full of others or short of pages, or a measurement."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from dflash_case import MARKOV, SELECTOR
from engines import (
    EOS,
    SEEDS,
    VOCAB,
    Ask,
    Dice,
    Fixed,
    Reference,
    compile_programs,
    make_engine,
    make_runner,
    moved_weights,
    run,
    serving,
    submit,
)
from recordings import Recording, record

from specserve.checkpoints.load import Target, in_few_bits
from specserve.data.dataset import Prompt
from specserve.drafters.interface import Head
from specserve.drafters.layers import windowed
from specserve.drafters.speculation import parse_speculation
from specserve.models.config import ModelConfig
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.controller import Estimate
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree
from specserve.train.acceptance import AcceptanceMeter, Arm

CHAIN, TREE, SHORTER = "chain:3", "tree:3x2x6", "chain:2"
WAYS = CHAIN, TREE, f"head+suffix:{CHAIN.removeprefix('chain:')}", f"head+suffix:{TREE}", "off"
FEW_PAGES = 14  # of 40 that four sequences would grow to
BLOCKS: dict[str, Any] = {"block_size": 4, "num_layers": 1, "aux_layers": (0, 1)}
HEADS: dict[str, Callable[[ModelConfig], Head]] = {
    "eagle3": lambda target: tiny.random_head(target, seed=1, layers=windowed((9,))),
    "p-eagle": lambda target: tiny.random_masked_head(target, seed=1, num_layers=2, layers=windowed((0, 9))),
    "p-eagle of latents": lambda target: tiny.random_masked_head(target, seed=1, **tiny.LATENTS),
    "mtp": lambda target: tiny.random_carried_layer(target, seed=1),
    "dflash": lambda target: tiny.random_block_head(target, seed=4, **BLOCKS),
    "dspark": lambda target: tiny.random_joint_head(target, 1, MARKOV | {"foresees_anchor": True}, **BLOCKS),
    "dflash2": lambda target: tiny.random_joint_head(target, 1, SELECTOR, vocab_size=VOCAB, **BLOCKS),
    "language-model": lambda target: tiny.random_language_model(target, seed=3),
}
QUICK = {(kind, "") for kind in HEADS if kind not in ("eagle3", "p-eagle of latents")} | {("eagle3", "int8")}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 9, "top_p": 0.9},
    {"min_p": 0.05, "logprobs": 3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {7: 3.0, 9: -100.0}},
    {"allowed_token_ids": tuple(range(3, 30))},
    {"bad_words": ["a", "bc"]},
    {"stop_token_ids": (20, 21), "min_tokens": 9, "ignore_eos": False},
    {"speculation": 1},
]
# greedy, and hot, where the shared noise decides: there even a random head is accepted
TEMPERATURES = (0.0, 2.0)
MAX_NEW, FIRST_SEED = 40, 3
LENGTHS = (1, 40, 17, 33, 8, 26)  # of prompts: one chunk, and up to three


@dataclass(frozen=True, eq=False)
class Served:
    """A head, and a runner with all that it does."""

    kind: str
    target: Target
    head: Head
    runner: Runner

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        rng = np.random.default_rng(6)
        return [rng.integers(3, VOCAB, length).tolist() for length in LENGTHS]

    @functools.cache  # noqa: B019  there are as many as there are kinds
    def recorded(self, temperature: float) -> dict[int, Recording]:
        """What every token of the plain answers would accept as a root, by prompt; of prompts whose answer and drafts
        no rounding changes."""

        def run_once() -> list[Recording]:
            trees = [_tree(text) for text in (CHAIN, TREE, SHORTER)]
            options: dict[str, Any] = {"max_tokens": MAX_NEW, "eos_ids": (EOS,), "seed": FIRST_SEED}
            return record(self.runner, self.prompts, trees, temperature=temperature, **options)

        found = dict(enumerate(run_once()))
        for seed in SEEDS:
            with moved_weights(self.runner, self.target, self.head, seed):
                for number, moved in enumerate(run_once()):
                    if number in found and not _is_same(found[number], moved):
                        del found[number]
        assert len(found) > len(LENGTHS) // 2, "most prompts sit on near-ties; others"
        return found

    def params(self, temperature: float, number: int) -> SamplingParams:
        """How a prompt is asked for what is recorded."""
        seed = FIRST_SEED + number
        return SamplingParams(max_tokens=MAX_NEW, temperature=temperature, seed=seed, return_tree=True)


def _tree(text: str) -> Tree:
    tree = parse_speculation(text)
    assert tree is not None
    return tree


def _is_same(one: Recording, other: Recording) -> bool:
    if one.token_ids.tolist() != other.token_ids.tolist():
        return False
    return all(np.array_equal(one.accepted[tree], other.accepted[tree]) for tree in one.accepted)


@pytest.fixture(scope="module")
def reference(shallow_target: Target, kept: Path | None) -> Iterator[Reference]:
    reference = Reference(shallow_target, kept)
    with reference.engine:
        yield reference


def _cases() -> Iterator[Any]:
    for bits, kind in itertools.product(("", "int8"), HEADS):
        yield pytest.param(
            (kind, bits), marks=() if (kind, bits) in QUICK else pytest.mark.slow, id=f"{kind} {bits}".strip()
        )


@pytest.fixture(scope="module", params=_cases())
def served(request: pytest.FixtureRequest, shallow_target: Target, kept: Path | None) -> Served:
    kind, bits = request.param
    head, rng = HEADS[kind](shallow_target.config), np.random.default_rng(7)

    def stir(x: jax.Array) -> jax.Array:  # every part is to matter, those that begin as nothing too
        return jnp.asarray(x + 0.1 * rng.standard_normal(x.shape), x.dtype)

    head = replace(head, params=jax.tree.map(stir, head.params))
    if bits:
        head = replace(head, params=in_few_bits(head.params, bits))
    assert head.drafter.name == kind.partition(" ")[0]
    runner = make_runner(shallow_target, head, *WAYS, is_mixing=True, folder=kept)
    compile_programs(runner)
    return Served(kind, shallow_target, head, runner)


class Noting(Dice):
    """Any tree, and plain steps; it notes what steps of each tree accept, and whether they say how sure the head is."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.accepted: Counter[Tree] = Counter()
        self.is_sure: dict[Tree, set[bool]] = {}

    def observe(
        self, estimates: Sequence[Estimate], tree: Tree, n_accepted: np.ndarray, confidence: np.ndarray | None = None
    ) -> None:
        self.accepted[tree] += int(n_accepted.sum())
        self.is_sure.setdefault(tree, set()).add(confidence is not None)
        super().observe(estimates, tree, n_accepted, confidence)


def _asks() -> Iterator[Ask]:
    """With every option, a grammar too, greedy and sampled, of prompts of all lengths."""
    rng = np.random.default_rng(1)
    for number, (own, temperature) in enumerate(itertools.product(OPTIONS, TEMPERATURES)):
        options = {"max_tokens": 24, "ignore_eos": True, "temperature": temperature, "seed": number} | own
        prompt = tuple(rng.integers(3, VOCAB, 1 + 7 * number % 41).tolist())
        yield Ask(prompt, SamplingParams(**options))
        if not own:
            yield Ask(prompt, SamplingParams(**options), is_constrained=True)


def test_speculation_changes_no_token(served: Served, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests with options, greedy and sampled in one batch, over chains, trees, lookups beside the head and plain
    steps in any order, alone and in one program with others' prompts, where sequences must give up their pages. Beside
    a lookup no confidence is reported, nor in steps with a grammar."""
    asks, controller = list(reference.firm(_asks())), Noting(0)
    assert len(asks) > len(OPTIONS)
    mixed, beside = served.runner.mixed, Counter[Tree | None]()

    def noting(program: StepProgram, *given: Any, **asked: Any) -> Any:
        beside[program.tree] += 1
        return mixed(program, *given, **asked)

    monkeypatch.setattr(served.runner, "mixed", noting)
    with serving(make_engine(served.runner, controller, num_pages=FEW_PAGES)) as engine:
        for ask, inbox in zip(asks, run(engine, asks), strict=True):
            reference.check(ask, inbox)
        assert engine.stats().num_preemptions > 0
    assert {*beside} == {None, _tree(CHAIN)}, "prompts and steps are to have run in one program"
    trees = [tree for tree in served.runner.shapes.trees if tree]
    assert len(trees) == len(WAYS) - 1
    assert all(controller.accepted[tree] > 0 for tree in trees), "nothing was accepted, so nothing was tested"
    is_sure = {tree: {served.kind == "dspark" and not tree.lookup} for tree in trees}
    for size in served.runner.shapes.batch_sizes:  # steps with a grammar have one tree, and report none
        is_sure[served.runner.shapes.only_tree(size)].add(False)
    assert controller.is_sure == is_sure


@pytest.fixture
def unmixed(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """With every step over the tree that is asked for: beside prompts it may be another one."""
    monkeypatch.setattr(served.runner, "shapes", replace(served.runner.shapes, is_mixing=False))
    return served


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_served_acceptance_is_measured_and_replayed(unmixed: Served, temperature: float) -> None:
    """By the meter of a training run and by the engine, which step, and from a recording, which does not."""
    recorded = unmixed.recorded(temperature)
    measured = [Arm(text, temperature) for text in (TREE, SHORTER)]
    prompts = [Prompt(str(number), prompt) for number, prompt in enumerate(unmixed.prompts)]
    options: dict[str, Any] = {"max_new_tokens": MAX_NEW, "seed": FIRST_SEED}
    meter = AcceptanceMeter(unmixed.target, unmixed.head.drafter, measured, prompts, **options)
    for arm in measured:
        found = meter.measure(unmixed.head.params, unmixed.head.target_ids, arm).by_source
        for number, recording in recorded.items():
            assert found[str(number)] == recording.replay(_tree(arm.speculation)), f"{arm.name}, prompt {number}"
    for text in (TREE, CHAIN):
        asked = [unmixed.prompts[number] for number in recorded]
        params = [unmixed.params(temperature, number) for number in recorded]
        with make_engine(unmixed.runner, Fixed(_tree(text))) as engine:
            stats = [done.stats for done in engine.generate(asked, params)]
        replayed = sum((recording.replay(_tree(text)) for recording in recorded.values()), Acceptance())
        assert sum(stats, Acceptance()) == replayed
        assert replayed.num_accepted > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize(
    ("text", "temperature"),
    [(TREE, 2.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((CHAIN, 2.0), (CHAIN, 0.0), (TREE, 0.0)))],
)
def test_a_preemption_changes_no_acceptance(unmixed: Served, text: str, temperature: float) -> None:
    """A sequence that goes on draws its next token in prefill, so its steps have other roots from there on; each
    accepts what a step of that root accepts alone."""
    recorded = unmixed.recorded(temperature)
    engine, asked = make_engine(unmixed.runner, Fixed(_tree(text)), num_pages=FEW_PAGES), []
    for number, recording in [*recorded.items()] * 2:
        ask = Ask(tuple(unmixed.prompts[number]), unmixed.params(temperature, number))
        asked.append((recording, submit(engine, ask)[1]))
    with serving(engine):
        for recording, inbox in asked:
            stats, accepted = inbox.wait().stats, recording.accepted[_tree(text)]
            assert stats is not None
            assert inbox.token_ids == recording.token_ids[: recording.length].tolist()
            ends = np.cumsum([len(delta.token_ids) for delta in inbox.deltas])
            starts = [start for start, delta in zip([0, *ends], inbox.deltas, strict=False) if delta.tree]
            expected = [min(accepted[start - 1], recording.length - start) for start in starts]
            assert [n for _, n in stats.drafts] == expected
        assert engine.stats().num_preemptions > 0
