"""Tokens that only fill a batch, a chunk or a tree: the target makes zeros of them, of which native products are left
out, and neither a token nor an entry of a page depends on whether they are."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stepping
import tiny
from paging import as_rows
from stepping import NUM_SLOTS, Slots, draft_entries, sampler_rows, some_prompts

from specserve.checkpoints.load import Target
from specserve.drafters.speculation import parse_speculation
from specserve.kernels import native
from specserve.models import target as target_model
from specserve.models.cache import Cache
from specserve.models.served import served
from specserve.speculative.drafter import SlotView
from specserve.speculative.sampling import UNBOUNDED
from specserve.speculative.tree import chain

pytestmark = pytest.mark.skipif(not native.is_available(), reason=native.describe())

HIDDEN: list[np.ndarray] = []  # [batch, n, d_model], of each run of the target


@pytest.fixture
def slots(tiny_target: Target) -> Any:
    head = tiny.random_head(tiny_target.config, 1, num_layers=2, d_model=24, has_embedding=True)
    packed = dataclasses.replace(head, params=served(head.params))
    rows = sampler_rows((0.0, 1.0, 0.0), (UNBOUNDED, UNBOUNDED, 1))
    target = dataclasses.replace(tiny_target, params=served(tiny_target.params))
    return lambda tree: Slots(target, packed, tree, rows)


def _serve(made: Slots) -> dict[str, Any]:
    """Go through steps of every kind, of one slot, two and three. Returns what is left of it."""
    for slot, prompt in enumerate(some_prompts(np.random.default_rng(3))):
        made.admit(slot, prompt)
    accepted = [made.speculate((1,)), made.speculate((2, 0))]
    made.decode((0, 2), is_alone=True)
    made.read(0, 4)
    made.decode((1,))
    made.catch_up((1, 2))
    accepted.append(made.speculate((0, 1, 2)))
    cache = made.state.cache
    assert isinstance(cache, Cache)
    pages = [side[made.table[slot, : len(text) // 4]] for slot, text in enumerate(made.texts) for side in _sides(cache)]
    return {"texts": made.texts, "accepted": accepted, "pages": pages, "draft": draft_entries(made)}


def _sides(cache: Cache) -> list[np.ndarray]:
    return [np.moveaxis(side, 1, 0) for side in (np.stack(x) for x in zip(*map(as_rows, cache.layers), strict=True))]


@pytest.mark.parametrize("text", ["chain:3", "tree:3x2x6"])
def test_nothing_depends_on_what_fills(slots: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = parse_speculation(text)
    found = _serve(slots(tree))
    stepping._programs.cache_clear()
    monkeypatch.setattr(SlotView, "live", lambda _view, is_valid: jnp.ones_like(is_valid))
    computed = _serve(slots(tree))
    stepping._programs.cache_clear()
    assert (found["texts"], found["accepted"]) == (computed["texts"], computed["accepted"])
    for kind in ("pages", "draft"):
        assert all((a == b).all() for a, b in zip(found[kind], computed[kind], strict=True)), kind


@pytest.fixture
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a target makes of its tokens, and a language model that drafts of its own."""
    run = target_model.forward_groups

    def recorded(*args: Any, **options: Any) -> Any:
        [out] = run(*args, **options)
        jax.debug.callback(HIDDEN.append, out.hidden_states, ordered=True)
        return [out]

    monkeypatch.setattr(target_model, "forward_groups", recorded)
    stepping._programs.cache_clear()
    yield
    stepping._programs.cache_clear()


def _live(step: Any) -> list[list[list[bool]]]:
    """Which tokens are no zeros, of each model that the step runs."""
    HIDDEN.clear()
    step()
    jax.effects_barrier()
    found = [(states, np.any(states != 0, axis=-1)) for states in HIDDEN]
    assert all(np.all(states[is_live] != 0) for states, is_live in found)
    return [is_live.tolist() for _, is_live in found]


@pytest.mark.usefixtures("_recorded")
def test_what_fills_is_zero_and_what_is_timed_is_not(slots: Any) -> None:
    made = slots(chain(3))

    def live(step: Any) -> list[list[bool]]:
        [of_target] = _live(step)
        return of_target

    for slot in range(NUM_SLOTS):
        assert live(lambda slot=slot: made.admit(slot, [5, 9, 7 + slot])) == [[True] * 3 + [False] * 5]
    assert live(lambda: made.decode((2,))) == [[True], [False], [False]]
    assert live(lambda: made.speculate((0, 2))) == [[True] * 4, [True] * 2 + [False] * 2, [False] * 4]
    made.decode((0,), is_alone=True)
    committed = len(made.texts[0]) - 1 - 4
    assert live(lambda: made.read(0, 4)) == [[True] * committed + [False] * (8 - committed)]
    timed = jnp.full(NUM_SLOTS, NUM_SLOTS + 1)
    assert live(lambda: made.programs.decode(made.weights, made.state, timed)) == [[True]] * 3
    assert live(lambda: made.programs.speculate(made.weights, made.state, timed)) == [[True] * 4] * 3


@pytest.mark.usefixtures("_recorded")
def test_what_fills_is_zero_to_a_language_model_that_drafts(tiny_target: Target) -> None:
    made = Slots(tiny_target, tiny.random_language_model(tiny_target.config, 1), chain(3))
    assert _live(lambda: made.admit(0, [5, 9, 7])) == [[[True] * 3 + [False] * 5]] * 2
    reads = _live(lambda: made.speculate((0,)))[0]
    assert reads == [[True] + [False] * 3, [False] * 4, [False] * 4], "the root alone"
