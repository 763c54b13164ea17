"""Two versions of the tiny target, what each answers, and engines whose weights may be updated."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import Ask, Fixed, Reference, compile_programs, greedy, make_engine, serving

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.serve import launch
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.swap import HeadForm, ServedWeights
from specserve.serve.launch import Models
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams

PROMPT = tuple(int(i) for i in np.random.default_rng(2).integers(3, 64, 40))


@pytest.fixture(scope="module")
def moved(tiny_target: Target) -> Target:
    """Another version: every weight is another number, of bfloat16 where the old one is."""

    def move(leaf: jax.Array) -> jax.Array:
        other = np.random.default_rng(leaf.size).permutation(np.asarray(leaf).ravel()).reshape(leaf.shape)
        return jnp.asarray(other)

    return dataclasses.replace(tiny_target, params=jax.tree.map(move, tiny_target.params))


@pytest.fixture(scope="module")
def old(tiny_target: Target) -> Any:
    yield from _reference(tiny_target)


@pytest.fixture(scope="module")
def new(moved: Target) -> Any:
    yield from _reference(moved)


def _reference(target: Target) -> Any:
    made = Reference(target)
    compile_programs(made.runner)
    with serving(made.engine):
        yield made


def updatable_engine(runner: Runner, target: Target, head: Head | None, way: str, **options: Any) -> Engine:
    """An engine whose weights may be updated."""
    engine = make_engine(runner, Fixed(parse_speculation(way)), **options)
    form = head and HeadForm(dataclasses.replace(head, params=None), "none")
    engine._swaps.weights = ServedWeights(form=form, read=launch._weights_reader(Models("tiny", target, head, None)))
    engine._swaps._form = form
    return engine


def firm_asks(old: Reference, new: Reference, *, max_tokens: int = 40) -> list[Ask]:
    """Ragged prompts that begin alike, greedy and sampled, of firm answers by both versions."""
    found: list[Ask] = []
    for seed in range(100):
        own = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=seed, ignore_eos=True)
        ask = Ask(PROMPT[: 20 + seed % 20], own if seed % 2 else greedy(max_tokens, ignore_eos=True))
        found += [ask] if old.is_firm(ask) and new.is_firm(ask) else []
        if len(found) == 7:
            return found
    raise AssertionError("no firm answers")
