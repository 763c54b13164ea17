"""A small state of three slots that goes through every kind of step, with whichever drafter."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from paging import as_rows
from rounding import assert_same, tolerance

from specserve.checkpoints.load import Target
from specserve.drafters.follow import FIRST_ENTRY, Following
from specserve.drafters.interface import Head
from specserve.drafters.lookup.drafter import MixedState
from specserve.drafters.speculation import drafter_for
from specserve.models.cache import Cache, Pages
from specserve.models.target import TargetParams
from specserve.speculative import slot_state, step
from specserve.speculative.drafter import Weights
from specserve.speculative.sampling import UNBOUNDED, SamplerRows, TokenRows
from specserve.speculative.slot_state import Admission, PromptChunks, StepConfig, StepResult, Unread
from specserve.speculative.tree import Proposal, Tree, chain

PAGE_SIZE, MAX_PAGES, CHUNK = 4, 16, 8
NUM_SLOTS = 3


class Programs:
    """Every call that a state goes through, compiled when it is first made."""

    def __init__(self, config: StepConfig, tree: Tree | None) -> None:
        width = MAX_PAGES
        self.admit = jax.jit(functools.partial(slot_state.admit, config))
        self.prefill = jax.jit(functools.partial(step.prefill, config, chunk=CHUNK, width=width))
        self.decode = jax.jit(functools.partial(step.decode, config, width=width))
        self.read = jax.jit(functools.partial(step.read, config, chunk=CHUNK, width=width))
        self.catch_up = jax.jit(functools.partial(step.catch_up, config))
        self.speculate = jax.jit(functools.partial(step.speculate, config, tree=tree, width=width))
        self.propose = jax.jit(functools.partial(step.propose_tree, config, tree=tree, width=width))


_programs = functools.cache(Programs)


class Slots:
    """A state of three slots and its programs: every slot has pages of its own, in a muddled order."""

    def __init__(self, target: Target, head: Head | None, tree: Tree | None, rows: SamplerRows | None = None) -> None:
        self.weights = Weights(target.params, head.weights() if head else None)
        proposers = [tree, chain(1)] if head else [tree]  # a head follows plain steps too
        drafter = drafter_for(proposers, head.drafter if head else None)
        self.config = StepConfig(target.config, drafter, max_depth=tree.depth if tree else 0)
        self.rows = rows or SamplerRows.greedy(NUM_SLOTS)
        num_pages = NUM_SLOTS * MAX_PAGES
        self.table = np.random.default_rng(5).permutation(num_pages).reshape(NUM_SLOTS, MAX_PAGES).astype(np.int32)
        self.state = slot_state.init_state(
            self.config, num_slots=NUM_SLOTS, num_pages=num_pages, page_size=PAGE_SIZE, max_pages=MAX_PAGES
        )
        self.texts: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
        self.programs = _programs(self.config, tree)

    def admit(
        self, slot: int, prompt: list[int], cached: tuple[int, ...] = (), stride: int = CHUNK, *, is_alone: bool = False
    ) -> None:
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
            chunks = PromptChunks(*map(jnp.asarray, (np.int32([slot]), np.int32([num]), [is_last])))
            result = self._run("prefill", chunks, is_alone)
            if is_last:
                self.texts[slot].append(int(result.counts[0, 2]))

    def _padded(self, slots: tuple[int, ...]) -> jax.Array:
        return jnp.asarray([*slots, *[NUM_SLOTS] * (NUM_SLOTS - len(slots))], jnp.int32)

    def _run(self, kind: str, work: Any, is_alone: bool) -> StepResult:
        """Prefill or decode, beside the draft or as if there was none."""
        programs, weights, state = self.programs, self.weights, self.state
        if is_alone:
            programs = _programs(dataclasses.replace(self.config, drafter=None), None)
            weights, state = dataclasses.replace(weights, draft=None), dataclasses.replace(state, draft=None)
        state, result = getattr(programs, kind)(weights, state, work)
        self.state = dataclasses.replace(state, draft=self.state.draft) if is_alone else state
        return result

    def read(self, slot: int, start: int) -> None:
        """The draft reads what is committed from `start` on, a whole number of pages."""
        for first in range(start, len(self.texts[slot]) - 1, CHUNK):
            unread = Unread(jnp.int32(slot), jnp.int32(first), jnp.float32(0))
            self.state = self.programs.read(self.weights, self.state, unread)

    def decode(self, slots: tuple[int, ...], *, is_alone: bool = False) -> None:
        result = self._run("decode", self._padded(slots), is_alone)
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
    def followed(self) -> Following | None:
        """What a head keeps of the sequences."""
        draft = self.state.draft
        draft = draft.head if isinstance(draft, MixedState) else draft
        return draft if isinstance(draft, Following) else None


def some_prompts(rng: np.random.Generator) -> list[list[int]]:
    return [rng.integers(0, 64, n).tolist() for n in (5, 11, 16)]


def sampler_rows(temperature: tuple[float, ...], max_depth: tuple[int, ...] = (UNBOUNDED,) * NUM_SLOTS) -> SamplerRows:
    return dataclasses.replace(
        SamplerRows.greedy(NUM_SLOTS),
        temperature=jnp.asarray(temperature, jnp.float32),
        seed=jnp.asarray([[1, 0], [2, 0], [3, 7]], jnp.uint32),
        max_depth=jnp.asarray(max_depth, jnp.int32),
    )


def check_between_steps(slots: Slots) -> None:
    """The invariant that `step` states."""
    state = jax.device_get(dataclasses.replace(slots.state, cache=None, draft=None))
    pending = jax.device_get(slots.followed.pending) if slots.followed else None
    for slot, text in enumerate(slots.texts):
        assert state.seq_lens[slot] == len(text) - 1
        assert state.history[slot, : len(text)].tolist() == text
        if pending is not None:
            ring, count = pending.token_ids[slot], int(pending.count[slot])
            last = range(max(0, count - len(ring)), count)
            assert [ring[i % len(ring)] for i in last] == text[len(text) - len(last) :]


def decoded(target: Target, prompts: list[list[int]], num: int, rows: SamplerRows) -> list[list[int]]:
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


def draft_entries(slots: Slots) -> list[np.ndarray]:
    """The committed keys and values of all slots, entry by entry: those that the drafter has written."""
    kept = slots.followed.cache if slots.followed else slots.state.draft
    assert isinstance(kept, Cache)
    # of a drafter that follows the first entry is never visible, and the root's is there
    first, last = (FIRST_ENTRY, 0) if slots.followed else (0, 1)
    layers = [pages for pages in kept.layers if isinstance(pages, Pages)]
    k, v = (np.stack(sides) for sides in zip(*map(as_rows, layers), strict=True))
    found = []
    for slot, text in enumerate(slots.texts):
        for index in range(first, len(text) - last):
            page, offset = slots.table[slot, index // PAGE_SIZE], index % PAGE_SIZE
            found += [k[:, page, :, offset], v[:, page, :, offset]]
    return found
