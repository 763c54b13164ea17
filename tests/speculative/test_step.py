"""The whole step over a small state: lookup drafts change no token, plain steps leave the draft what speculative ones
would, and a cached prefix goes on where it ended."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rounding import assert_same, tolerance
from stepping import (
    CHUNK,
    MAX_PAGES,
    NUM_SLOTS,
    PAGE_SIZE,
    Slots,
    check_between_steps,
    decoded,
    draft_entries,
    sampler_rows,
    some_prompts,
)

from specserve.checkpoints.load import Target
from specserve.drafters.follow import pending_of
from specserve.drafters.interface import Head
from specserve.drafters.lookup.drafter import MixedState
from specserve.drafters.speculation import parse_speculation
from specserve.drafters.words import ALL_TEXT
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams, forward
from specserve.speculative import step
from specserve.speculative.drafter import SlotView
from specserve.speculative.sampling import UNBOUNDED, SamplerRows
from specserve.speculative.tree import Tree

DEEP = {"num_layers": 2, "d_model": 24, "has_embedding": True}
BLOCKS = {"num_layers": 2, "block_size": 4, "aux_layers": (0, 2, 4)}
SURE = {"markov_rank": 4, "confidence": "state and token", "has_confidence_bias": True, "foresees_anchor": True}
SELECTED = {"conv_taps": 2, "conv_group": 4, "selector_rank": 4, "selector_top_k": 64}
DRAFTS = [  # of each kind: a tree, and a chain
    pytest.param((tiny.random_head, DEEP, "tree:3x2x6"), id="two layers, tree:3x2x6"),
    pytest.param((tiny.random_head, {}, "chain:3"), id="one layer, chain:3", marks=pytest.mark.slow),
    pytest.param((tiny.random_masked_head, DEEP, "tree:3x2x6"), id="masked slots, tree:3x2x6"),
    pytest.param(
        (tiny.random_masked_head, {}, "chain:3"), id="masked slots, one layer, chain:3", marks=pytest.mark.slow
    ),
    pytest.param((tiny.random_block_head, BLOCKS, "tree:3x2x6"), id="blocks, tree:3x2x6"),
    pytest.param(
        (tiny.random_block_head, BLOCKS | {"window": 6, "vocab_size": 64}, "chain:3"),
        id="blocks with windows, chain:3",
        marks=pytest.mark.slow,
    ),
    pytest.param((tiny.random_joint_head, BLOCKS | {"changes": SURE}, "tree:3x2x6"), id="sure blocks, tree:3x2x6"),
    pytest.param(
        (tiny.random_joint_head, BLOCKS | {"changes": SELECTED, "vocab_size": 64}, "tree:3x2x6"),
        id="selected, tree:3x2x6",
        marks=pytest.mark.slow,
    ),
    pytest.param((tiny.random_carried_layer, {}, "tree:3x2x6"), id="carried layer, tree:3x2x6", marks=pytest.mark.slow),
]


@pytest.fixture(params=DRAFTS)
def drafted(request: pytest.FixtureRequest, tiny_target: Target) -> tuple[Head, Tree | None]:
    """A head and what it proposes."""
    return _drafted_by(request.param, tiny_target)


@pytest.fixture(params=[*DRAFTS[:2], DRAFTS[-1]])
def following(request: pytest.FixtureRequest, tiny_target: Target) -> tuple[Head, Tree | None]:
    """Of a kind that plain steps leave behind."""
    return _drafted_by(request.param, tiny_target)


def _drafted_by(param: tuple[Any, dict[str, Any], str], tiny_target: Target) -> tuple[Head, Tree | None]:
    make, shape, speculation = param
    return make(tiny_target.config, seed=1, **shape), parse_speculation(speculation)


@functools.cache
def _forward_with_taps(config: ModelConfig, taps: tuple[int, ...]) -> Any:
    """A plain forward over whole texts, jitted: the aux hidden states of the tapped layers."""

    def run(params: TargetParams, token_ids: jax.Array) -> Any:
        position_ids = jnp.broadcast_to(jnp.arange(token_ids.shape[1], dtype=jnp.int32), token_ids.shape)
        out = forward(params, config, token_ids, position_ids, tiny.causal(token_ids.shape[1]), aux_layers=taps)
        return out.aux_hidden_states

    return jax.jit(run)


LOOKUP = (0.0, 1.0, 0.2)  # greedy, sampled, and nearly greedy: then the text repeats itself, which lookups live on
COUPLED = (0.0, 4.0, 4.0)  # where the shared noise decides, even a random head is accepted often


@pytest.fixture(scope="module")
def plain(tiny_target: Target) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and their texts with what plain decoding says."""
    prompts = some_prompts(np.random.default_rng(0))
    return prompts, decoded(tiny_target, prompts, 32, sampler_rows(LOOKUP))


# each text that is searched, with a head and without, in a chain and in a tree; the engine serves the other pairs
@pytest.mark.parametrize("speculation", ["suffix:3", "head+ngram:3", "head+suffix:tree:3x2x6"])
def test_lookup_drafts_change_no_token(
    tiny_target: Target, tiny_head: Head, plain: tuple[list[list[int]], list[list[int]]], speculation: str
) -> None:
    tree = parse_speculation(speculation)
    assert tree is not None
    prompts, texts = plain
    other = Slots(tiny_target, tiny_head if tree.uses_head else None, tree, sampler_rows(LOOKUP))
    for slot, prompt in enumerate(prompts):
        other.admit(slot, prompt)
    accepted = [0] * NUM_SLOTS
    while min(map(len, other.texts)) < 40:
        running = tuple(slot for slot in range(NUM_SLOTS) if len(other.texts[slot]) < 40)
        for slot, count in zip(running, other.speculate(running), strict=True):
            accepted[slot] += count
    check_between_steps(other)
    for expected, got in zip(texts, other.texts, strict=True):
        num = min(len(expected), len(got))
        assert num >= 37
        assert got[:num] == expected[:num]
    assert sum(accepted) > 10, "little was accepted, so little was tested"
    if tree.lookup == ALL_TEXT:
        _recalls(other, prompts[1], len(texts[1]))


def _recalls(slots: Slots, prompt: list[int], length: int) -> None:
    """The same question again: what was answered is found, though nothing of it stands in the sequence itself. What
    was computed behind the answer's end is not."""
    answer = list(slots.texts[1])
    last = len(answer) - 3
    draft = step.remember(slots.config, slots.state.draft, slots.state.history, jnp.array((1, len(prompt), last, 0)))
    slots.state = dataclasses.replace(slots.state, draft=draft)
    expected = [*answer[len(prompt) : last + 1], *[-1] * 512][:512]
    draft = slots.state.draft
    recall = draft.lookup if isinstance(draft, MixedState) else draft
    assert np.asarray(recall)[0].tolist() == expected
    slots.admit(1, prompt)
    steps = 0
    while len(slots.texts[1]) < length - 3:
        slots.speculate((1,))
        steps += 1
    num = min(len(slots.texts[1]), len(answer))
    assert slots.texts[1][:num] == answer[:num]
    assert steps < (length - len(prompt)) / 2, "an answer that is known is accepted in strides"


def test_the_draft_is_where_it_would_be_had_it_always_speculated(
    tiny_target: Target, drafted: tuple[Head, Tree | None], rng: np.random.Generator
) -> None:
    """Plain steps, catching up in between or not, and then the same draft entries and the same proposals."""
    (head, tree), prompts = drafted, some_prompts(rng)

    def play(target: TargetParams, draft: Any) -> tuple[Slots, list[list[int]]]:
        always = _slots(tiny_target, target, head, draft, tree, sampler_rows(COUPLED, max_depth=(0, 2, UNBOUNDED)))
        for slot, prompt in enumerate(prompts):
            always.admit(slot, prompt)
        return always, [always.speculate((0, 1, 2)) for _ in range(9)]

    params = tiny_target.params, head.params
    always, accepted = play(*params)
    mixed = Slots(tiny_target, head, tree, sampler_rows(COUPLED))
    for slot, prompt in enumerate(prompts):
        mixed.admit(slot, prompt)
    furthest = np.max(accepted, axis=0).tolist()
    assert furthest == [0, 2, 3], "as far as each may go, so that pages are crossed in strides"
    lens = [len(text) for text in always.texts]
    for i in range(max(lens)):
        behind = tuple(slot for slot in range(NUM_SLOTS) if len(mixed.texts[slot]) < lens[slot])
        if behind:
            mixed.decode(behind)
            check_between_steps(mixed)
        if i % 3 == 1:  # after two plain steps, then after three
            mixed.catch_up((0, 1))
        if i % 5 == 4:
            mixed.catch_up((2,))
    mixed.catch_up((0, 1, 2))
    assert mixed.texts == always.texts
    check_between_steps(mixed)
    assert_same(_drafted(mixed), _drafted(always), tolerance(lambda *params: _drafted(play(*params)[0]), *params))
    for slots in (always, mixed):
        if slots.followed:
            _check_pages(tiny_target, slots)


def test_what_the_target_has_run_alone_is_read_as_if_the_draft_had_followed(
    tiny_target: Target, drafted: tuple[Head, Tree | None], rng: np.random.Generator
) -> None:
    """Prompts or answers, from the first token or from the middle, of any number of pages and chunks: the same draft
    entries, and the same proposals. Without reading they are others."""
    (head, tree), prompts = drafted, some_prompts(rng)

    def play(target: TargetParams, draft: Any, *, is_alone: bool = False, reads: bool = True) -> Slots:
        slots = _slots(tiny_target, target, head, draft, tree, sampler_rows(COUPLED))
        slots.admit(0, prompts[0], is_alone=is_alone)
        slots.admit(1, prompts[1], is_alone=is_alone)
        slots.admit(2, prompts[2])  # the draft reads it at once
        for _ in range(14):
            slots.decode((0, 1, 2), is_alone=is_alone)
            if not is_alone:
                slots.catch_up((0, 1, 2))
        for slot in range(NUM_SLOTS) if is_alone and reads else ():
            slots.read(slot, len(prompts[2]) // PAGE_SIZE * PAGE_SIZE if slot == 2 else 0)
        return slots

    params = tiny_target.params, head.params
    followed, alone = play(*params), play(*params, is_alone=True)
    close = tolerance(lambda *params: _drafted(play(*params)), *params)
    assert alone.texts == followed.texts
    assert_same(_drafted(alone), _drafted(followed), close)
    check_between_steps(alone)
    if alone.followed:
        _check_pages(tiny_target, alone)
    for _ in range(3):
        alone.speculate((0, 1, 2))
        check_between_steps(alone)
    with pytest.raises(AssertionError):
        assert_same(_drafted(play(*params, is_alone=True, reads=False)), _drafted(followed), close)


def _slots(
    target: Target, params: TargetParams, head: Head, draft: Any, tree: Tree | None, rows: SamplerRows | None
) -> Slots:
    return Slots(dataclasses.replace(target, params=params), dataclasses.replace(head, params=draft), tree, rows)


def _drafted(slots: Slots) -> tuple[Any, ...]:
    """The texts, what is proposed after them, and what the draft has written."""
    proposal = slots.propose()
    chosen = proposal.token_ids, proposal.parents, proposal.depths
    return [np.array(text) for text in slots.texts], chosen, draft_entries(slots)


def test_a_draft_that_need_not_follow_costs_no_token(
    tiny_target: Target, following: tuple[Head, Tree | None], rng: np.random.Generator
) -> None:
    """More plain steps than `pending` holds: the latest tokens stay there, and what is proposed later is verified."""
    slots = Slots(tiny_target, *following, sampler_rows(COUPLED))
    prompts = some_prompts(rng)
    for slot, prompt in enumerate(prompts):
        slots.admit(slot, prompt)
    for _ in range(2 * slots.config.max_pending):
        slots.decode((0, 1, 2))
        check_between_steps(slots)
    assert slots.followed is not None
    assert slots.followed.pending.count.tolist() == [1 + 2 * slots.config.max_pending] * NUM_SLOTS
    _check_pending(tiny_target, slots)
    slots.catch_up((0, 1, 2))
    check_between_steps(slots)
    for _ in range(4):
        slots.speculate((0, 1, 2))
        check_between_steps(slots)
    num = max(len(text) for text in slots.texts)
    for text, expected in zip(slots.texts, decoded(tiny_target, prompts, num, sampler_rows(COUPLED)), strict=True):
        assert text == expected[: len(text)]


def _tapped(target: Target, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
    """What the target's tapped layers say over the texts of all slots, and how far rounding may move it."""
    padded = np.zeros((NUM_SLOTS, MAX_PAGES * PAGE_SIZE), np.int32)
    for slot, text in enumerate(slots.texts):
        padded[slot, : len(text)] = text
    run = functools.partial(_forward_with_taps(target.config, slots.config.aux_layers), token_ids=padded)
    return run(target.params), tolerance(run, target.params)


def _check_pending(target: Target, slots: Slots) -> None:
    """The drafter would read the last tokens in their order, each with what the tapped layers said before it."""
    assert slots.followed is not None
    # nothing else of it is looked at
    view = cast(SlotView, SimpleNamespace(slots=jnp.arange(NUM_SLOTS), live=lambda is_valid: is_valid))
    pending = pending_of(slots.followed, view)
    states, off = _tapped(target, slots)
    for slot, text in enumerate(slots.texts):
        count = int(pending.count[slot])
        assert pending.token_ids[slot, :count].tolist() == text[len(text) - count :]
        before = slot, slice(len(text) - count - 1, len(text) - 1)
        assert_same(pending.aux_hidden_states[slot, :count], states[before], off[before], f"slot {slot}")


def _check_pages(target: Target, slots: Slots) -> None:
    """`page_aux` holds what the target's tapped layers said at the last entry of every full page."""
    assert slots.followed is not None
    page_aux = np.asarray(slots.followed.page_aux.rows)
    states, off = _tapped(target, slots)
    for slot, text in enumerate(slots.texts):
        for column in range((len(text) - 1) // PAGE_SIZE):
            found = page_aux[slots.table[slot, column]]
            at = slot, (column + 1) * PAGE_SIZE - 1
            assert_same(found, states[at], off[at], f"slot {slot}, page {column}")


def test_a_prefix_hit_drafts_like_a_miss(
    tiny_target: Target, drafted: tuple[Head, Tree | None], rng: np.random.Generator
) -> None:
    """A prompt that begins with another's text, answer included: the pages hold it, and `page_aux` the state to go on
    from, so that draft entries and proposals are the same."""
    (head, tree), prompts = drafted, some_prompts(rng)

    def play(target: TargetParams, draft: Any) -> list[Any]:
        """Of the miss and of the hit."""
        slots = _slots(tiny_target, target, head, draft, tree, None)
        slots.admit(2, prompts[2])
        while len(slots.texts[2]) < 30:
            slots.speculate((2,))
        slots.propose()
        prompt = [*slots.texts[2][:24], *prompts[0]]
        slots.admit(0, prompt)
        slots.admit(1, prompt, tuple(slots.table[2, : 24 // PAGE_SIZE].tolist()))
        token_ids, entries = np.asarray(slots.propose().token_ids), draft_entries(slots)
        num = 2 * (len(slots.texts[0]) - 1)  # keys and values
        parts = entries[:num], entries[num : 2 * num]
        return [(np.array(slots.texts[slot]), token_ids[slot], part) for slot, part in enumerate(parts)]

    params = tiny_target.params, head.params
    (miss, hit), (off, _) = play(*params), tolerance(play, *params)
    assert_same(hit, miss, off)


def test_a_prompt_in_other_chunks_is_drafted_alike(
    tiny_target: Target, drafted: tuple[Head, Tree | None], rng: np.random.Generator
) -> None:
    """Layers above the first see what those below found in earlier chunks."""
    (head, tree), prompt = drafted, rng.integers(0, 64, 23).tolist()

    def play(target: TargetParams, draft: Any) -> list[Any]:
        slots = _slots(tiny_target, target, head, draft, tree, None)
        for slot, stride in enumerate((CHUNK, 5, 1)):
            slots.admit(slot, prompt, stride=stride)
        token_ids = np.asarray(slots.propose().token_ids)
        return list(zip(token_ids, np.array(draft_entries(slots)[::2]).reshape(3, len(prompt), -1), strict=True))

    params = tiny_target.params, head.params
    (whole, *others), (off, *_) = play(*params), tolerance(play, *params)
    for each in others:
        assert_same(each, whole, off)
