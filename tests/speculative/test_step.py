"""The whole step over a small state: lookup drafts change no token, plain steps leave the draft what speculative ones
would, and a cached prefix goes on where it ended."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from paging import keys_as_rows
from rounding import assert_same, tolerance

from specserve.checkpoints.load import Target
from specserve.drafters.door import Head
from specserve.drafters.eagle3.follow import Eagle3State
from specserve.drafters.eagle3.model import Eagle3Params
from specserve.drafters.eagle3.propose import FIRST_ENTRY
from specserve.drafters.lookup.drafter import MixedState
from specserve.drafters.speculation import drafter_for, parse_speculation
from specserve.drafters.words import ALL_TEXT
from specserve.models.cache import Pages
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams, forward
from specserve.speculative import step
from specserve.speculative.sampling import UNBOUNDED, SamplerRows, TokenRows
from specserve.speculative.step import Admission, StepConfig, Weights
from specserve.speculative.tree import Proposal, Tree, chain

PAGE_SIZE, MAX_PAGES, CHUNK = 4, 16, 8
NUM_SLOTS = 3


class Programs:
    """Every call that a state goes through, compiled when it is first made."""

    def __init__(self, config: StepConfig, tree: Tree | None) -> None:
        width = MAX_PAGES
        self.admit = jax.jit(functools.partial(step.admit, config))
        self.prefill = jax.jit(functools.partial(step.prefill, config, chunk=CHUNK, width=width))
        self.decode = jax.jit(functools.partial(step.decode, config, width=width))
        self.catch_up = jax.jit(functools.partial(step.catch_up, config))
        self.speculate = jax.jit(functools.partial(step.speculate, config, tree=tree, width=width))
        self.propose = jax.jit(functools.partial(step.propose_tree, config, tree=tree, width=width))


_programs = functools.cache(Programs)


class Slots:
    """A state of three slots and its programs: every slot has pages of its own, in a muddled order."""

    def __init__(self, target: Target, head: Head | None, tree: Tree | None, rows: SamplerRows | None = None) -> None:
        draft = None
        if head is not None:
            draft = head.drafter.weights(head.params, target.params, jnp.asarray(head.target_ids))
        self.weights = Weights(target.params, draft)
        proposers = [tree, chain(1)] if head else [tree]  # a head follows plain steps too
        drafter = drafter_for(proposers, head.drafter if head else None)
        self.config = StepConfig(target.config, drafter, max_depth=tree.depth if tree else 0)
        self.rows = rows or SamplerRows.greedy(NUM_SLOTS)
        num_pages = NUM_SLOTS * MAX_PAGES
        self.table = np.random.default_rng(5).permutation(num_pages).reshape(NUM_SLOTS, MAX_PAGES).astype(np.int32)
        self.state = step.init_state(
            self.config, num_slots=NUM_SLOTS, num_pages=num_pages, page_size=PAGE_SIZE, max_pages=MAX_PAGES
        )
        self.texts: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
        self.programs = _programs(self.config, tree)

    def admit(self, slot: int, prompt: list[int], cached: tuple[int, ...] = (), stride: int = CHUNK) -> None:
        """Prefill a prompt, of which some pages are there already, in chunks of at most `stride` tokens."""
        self.table[slot, : len(cached)] = cached
        history = np.zeros(MAX_PAGES * PAGE_SIZE, np.int32)
        history[: len(prompt)] = prompt
        row = jax.tree.map(lambda x: np.asarray(x)[slot : slot + 1], self.rows)
        row = dataclasses.replace(row, output_start=np.array([len(prompt)], np.int32))
        new = Admission(
            page_row=jnp.asarray(self.table[slot]),
            history=jnp.asarray(history),
            num_cached=jnp.int32(len(cached) * PAGE_SIZE),
            rows=row,
            tokens=TokenRows.zeros(1, self.config.target.vocab_size),
            promise=jnp.float32(0),
        )
        self.state = self.programs.admit(self.state, jnp.int32(slot), new)
        self.texts[slot] = list(prompt)
        for start in range(len(cached) * PAGE_SIZE, len(prompt), stride):
            num = min(stride, len(prompt) - start)
            is_last = start + num == len(prompt)
            args = jnp.asarray([slot], jnp.int32), jnp.asarray([num], jnp.int32), jnp.asarray([is_last])
            self.state, result = self.programs.prefill(self.weights, self.state, *args)
            if is_last:
                self.texts[slot].append(int(result.counts[0, 2]))

    def _padded(self, slots: tuple[int, ...]) -> jax.Array:
        return jnp.asarray([*slots, *[NUM_SLOTS] * (NUM_SLOTS - len(slots))], jnp.int32)

    def decode(self, slots: tuple[int, ...]) -> None:
        self.state, result = self.programs.decode(self.weights, self.state, self._padded(slots))
        for row, slot in enumerate(slots):
            self.texts[slot].append(int(result.counts[row, 2]))

    def catch_up(self, slots: tuple[int, ...]) -> None:
        self.state = self.programs.catch_up(self.weights, self.state, self._padded(slots))

    def speculate(self, slots: tuple[int, ...]) -> list[int]:
        """Returns how many proposed tokens were accepted."""
        self.state, result = self.programs.speculate(self.weights, self.state, self._padded(slots))
        counts = np.asarray(result.counts)
        for row, slot in enumerate(slots):
            self.texts[slot] += counts[row, 2 : 3 + counts[row, 0]].tolist()
        return counts[: len(slots), 0].tolist()

    def propose(self) -> Proposal:
        """After which the draft has caught up."""
        self.state, proposal = self.programs.propose(self.weights, self.state, self._padded((0, 1, 2)))
        return proposal

    @property
    def followed(self) -> Eagle3State | None:
        """What a head keeps of the sequences."""
        draft = self.state.draft
        draft = draft.head if isinstance(draft, MixedState) else draft
        return draft if isinstance(draft, Eagle3State) else None


DEEP = {"num_layers": 2, "d_model": 24, "has_embedding": True}
DRAFTS = [
    pytest.param((DEEP, "tree:3x2x6"), id="two layers, tree:3x2x6"),
    pytest.param(({}, "chain:3"), id="one layer, chain:3", marks=pytest.mark.slow),
]


@pytest.fixture(params=DRAFTS)
def drafted(request: pytest.FixtureRequest, tiny_target: Target) -> tuple[Head, Tree | None]:
    """A head and what it proposes."""
    shape, speculation = request.param
    return tiny.random_head(tiny_target.config, seed=1, **shape), parse_speculation(speculation)


def _check_between_steps(slots: Slots) -> None:
    """The invariant that `step` states."""
    state = jax.device_get(dataclasses.replace(slots.state, cache=None, draft=None))
    pending = jax.device_get(slots.followed.pending) if slots.followed else None
    for slot, text in enumerate(slots.texts):
        assert state.seq_lens[slot] == len(text) - 1
        assert state.history[slot, : len(text)].tolist() == text
        if pending is not None:
            count = int(pending.count[slot])
            assert pending.token_ids[slot, :count].tolist() == text[len(text) - count :]


def _prompts(rng: np.random.Generator) -> list[list[int]]:
    return [rng.integers(0, 64, n).tolist() for n in (5, 11, 16)]


def _rows(temperature: tuple[float, ...], max_depth: tuple[int, ...] = (UNBOUNDED,) * NUM_SLOTS) -> SamplerRows:
    return dataclasses.replace(
        SamplerRows.greedy(NUM_SLOTS),
        temperature=jnp.asarray(temperature, jnp.float32),
        seed=jnp.asarray([[1, 0], [2, 0], [3, 7]], jnp.uint32),
        max_depth=jnp.asarray(max_depth, jnp.int32),
    )


@functools.cache
def _forward_with_taps(config: ModelConfig, taps: tuple[int, ...]) -> Any:
    """A plain forward over whole texts, jitted: the aux hidden states of the tapped layers."""

    def run(params: TargetParams, token_ids: jax.Array) -> Any:
        position_ids = jnp.broadcast_to(jnp.arange(token_ids.shape[1], dtype=jnp.int32), token_ids.shape)
        out = forward(params, config, token_ids, position_ids, tiny.causal(token_ids.shape[1]), aux_layers=taps)
        return out.aux_hidden_states

    return jax.jit(run)


def _decoded(target: Target, prompts: list[list[int]], num: int, rows: SamplerRows) -> list[list[int]]:
    """Plainly, so many steps after the first token: texts that no rounding changes."""

    def run(params: TargetParams) -> list[np.ndarray]:
        plain = Slots(dataclasses.replace(target, params=params), None, None, rows)
        for slot, prompt in enumerate(prompts):
            plain.admit(slot, prompt)
        for _ in range(num):
            plain.decode((0, 1, 2))
        return [np.array(text) for text in plain.texts]

    texts = run(target.params)
    assert_same(texts, texts, tolerance(run, target.params))
    return [text.tolist() for text in texts]


LOOKUP = (0.0, 1.0, 0.2)  # greedy, sampled, and nearly greedy: then the text repeats itself, which lookups live on
COUPLED = (0.0, 4.0, 4.0)  # where the shared noise decides, even a random head is accepted often


@pytest.fixture(scope="module")
def plain(tiny_target: Target) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and their texts with what plain decoding says."""
    prompts = _prompts(np.random.default_rng(0))
    return prompts, _decoded(tiny_target, prompts, 32, _rows(LOOKUP))


# each text that is searched, with a head and without, in a chain and in a tree; the engine serves the other pairs
@pytest.mark.parametrize("speculation", ["suffix:3", "head+ngram:3", "head+suffix:tree:3x2x6"])
def test_lookup_drafts_change_no_token(
    tiny_target: Target, tiny_head: Head, plain: tuple[list[list[int]], list[list[int]]], speculation: str
) -> None:
    tree = parse_speculation(speculation)
    assert tree is not None
    prompts, texts = plain
    other = Slots(tiny_target, tiny_head if tree.uses_head else None, tree, _rows(LOOKUP))
    for slot, prompt in enumerate(prompts):
        other.admit(slot, prompt)
    accepted = [0] * NUM_SLOTS
    while min(map(len, other.texts)) < 40:
        running = tuple(slot for slot in range(NUM_SLOTS) if len(other.texts[slot]) < 40)
        for slot, count in zip(running, other.speculate(running), strict=True):
            accepted[slot] += count
    _check_between_steps(other)
    for expected, got in zip(texts, other.texts, strict=True):
        num = min(len(expected), len(got))
        assert num >= 37
        assert got[:num] == expected[:num]
    assert sum(accepted) > 10, "little was accepted, so little was tested"
    if tree.lookup == ALL_TEXT:
        _recalls(other, prompts[1], len(texts[1]))


def _recalls(slots: Slots, prompt: list[int], length: int) -> None:
    """The same question again: what was answered is found, though nothing of it stands in the sequence itself."""
    answer = list(slots.texts[1])
    slots.state = step.remember(slots.config, slots.state, jnp.int32(1), jnp.int32(len(prompt)), jnp.int32(0))
    expected = [*answer[len(prompt) :], *[-1] * 512][:512]
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
    (head, tree), prompts = drafted, _prompts(rng)

    def play(target: TargetParams, draft: Eagle3Params) -> tuple[Slots, list[list[int]]]:
        always = _slots(tiny_target, target, head, draft, tree, _rows(COUPLED, max_depth=(0, 2, UNBOUNDED)))
        for slot, prompt in enumerate(prompts):
            always.admit(slot, prompt)
        return always, [always.speculate((0, 1, 2)) for _ in range(9)]

    params = tiny_target.params, head.params
    always, accepted = play(*params)
    mixed = Slots(tiny_target, head, tree, _rows(COUPLED))
    for slot, prompt in enumerate(prompts):
        mixed.admit(slot, prompt)
    furthest = np.max(accepted, axis=0).tolist()
    assert furthest == [0, 2, 3], "as far as each may go, so that pages are crossed in strides"
    lens = [len(text) for text in always.texts]
    for i in range(max(lens)):
        behind = tuple(slot for slot in range(NUM_SLOTS) if len(mixed.texts[slot]) < lens[slot])
        if behind:
            mixed.decode(behind)
            _check_between_steps(mixed)
        if i % 3 == 1:  # after two plain steps, then after three
            mixed.catch_up((0, 1))
        if i % 5 == 4:
            mixed.catch_up((2,))
    mixed.catch_up((0, 1, 2))
    assert mixed.texts == always.texts
    _check_between_steps(mixed)
    assert_same(_drafted(mixed), _drafted(always), tolerance(lambda *params: _drafted(play(*params)[0]), *params))
    for slots in (always, mixed):
        _check_pages(tiny_target, slots)


def _slots(
    target: Target, params: TargetParams, head: Head, draft: Eagle3Params, tree: Tree | None, rows: SamplerRows | None
) -> Slots:
    return Slots(dataclasses.replace(target, params=params), dataclasses.replace(head, params=draft), tree, rows)


def _drafted(slots: Slots) -> tuple[Any, ...]:
    """The texts, what is proposed after them, and what the draft has written."""
    proposal = slots.propose()
    chosen = proposal.token_ids, proposal.parents, proposal.depths
    return [np.array(text) for text in slots.texts], chosen, _draft_entries(slots)


def test_a_draft_that_need_not_follow_costs_no_token(
    tiny_target: Target, drafted: tuple[Head, Tree | None], rng: np.random.Generator
) -> None:
    """More plain steps than `pending` holds: the latest tokens stay there, and what is proposed later is verified."""
    slots = Slots(tiny_target, *drafted, _rows(COUPLED))
    prompts = _prompts(rng)
    for slot, prompt in enumerate(prompts):
        slots.admit(slot, prompt)
    for _ in range(2 * slots.config.max_pending):
        slots.decode((0, 1, 2))
        _check_between_steps(slots)
    assert slots.followed is not None
    assert slots.followed.pending.count.tolist() == [slots.config.max_pending] * NUM_SLOTS
    slots.catch_up((0, 1, 2))
    for _ in range(4):
        slots.speculate((0, 1, 2))
        _check_between_steps(slots)
    num = max(len(text) for text in slots.texts)
    for text, expected in zip(slots.texts, _decoded(tiny_target, prompts, num, _rows(COUPLED)), strict=True):
        assert text == expected[: len(text)]


def _draft_entries(slots: Slots) -> list[np.ndarray]:
    """The committed keys and values, entry by entry, of all slots."""
    assert slots.followed is not None
    layers = [pages for pages in slots.followed.cache.layers if isinstance(pages, Pages)]
    k, v = (np.stack(sides) for sides in zip(*((keys_as_rows(p), np.asarray(p.v)) for p in layers), strict=True))
    found = []
    for slot, text in enumerate(slots.texts):
        for index in range(FIRST_ENTRY, len(text)):
            page, offset = slots.table[slot, index // PAGE_SIZE], index % PAGE_SIZE
            found += [k[:, page, :, offset], v[:, page, :, offset]]
    return found


def _check_pages(target: Target, slots: Slots) -> None:
    """`page_aux` holds what the target's tapped layers said at the last entry of every full page."""
    assert slots.followed is not None
    page_aux = np.asarray(slots.followed.page_aux)
    padded = np.zeros((NUM_SLOTS, MAX_PAGES * PAGE_SIZE), np.int32)
    for slot, text in enumerate(slots.texts):
        padded[slot, : len(text)] = text
    run = functools.partial(_forward_with_taps(target.config, slots.config.aux_layers), token_ids=padded)
    states, off = run(target.params), tolerance(run, target.params)
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
    (head, tree), prompts = drafted, _prompts(rng)

    def play(target: TargetParams, draft: Eagle3Params) -> list[Any]:
        """Of the miss and of the hit."""
        slots = _slots(tiny_target, target, head, draft, tree, None)
        slots.admit(2, prompts[2])
        while len(slots.texts[2]) < 30:
            slots.speculate((2,))
        slots.propose()
        prompt = [*slots.texts[2][:24], *prompts[0]]
        slots.admit(0, prompt)
        slots.admit(1, prompt, tuple(slots.table[2, : 24 // PAGE_SIZE].tolist()))
        token_ids, entries = np.asarray(slots.propose().token_ids), _draft_entries(slots)
        num = 2 * (len(slots.texts[0]) - FIRST_ENTRY)  # keys and values
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

    def play(target: TargetParams, draft: Eagle3Params) -> list[Any]:
        slots = _slots(tiny_target, target, head, draft, tree, None)
        for slot, stride in enumerate((CHUNK, 5, 1)):
            slots.admit(slot, prompt, stride=stride)
        token_ids = np.asarray(slots.propose().token_ids)
        return list(zip(token_ids, np.array(_draft_entries(slots)[::2]).reshape(3, len(prompt), -1), strict=True))

    params = tiny_target.params, head.params
    (whole, *others), (off, *_) = play(*params), tolerance(play, *params)
    for each in others:
        assert_same(each, whole, off)
