"""The arguments of compiled programs, made of what the host knows: slots, numbers, token ids and masks.

Arguments that are left out stand for nothing but padding. A program is compiled for the shapes of those, and a step
over them changes nothing, which is how steps are timed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specserve.serve.engine.options import blank_token_rows, sampler_rows
from specserve.serve.programs.calls import Burst
from specserve.serve.programs.layouts import Layouts
from specserve.serve.programs.placement import Placement
from specserve.serve.programs.shapes import Shapes
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.drafter import Weights
from specserve.speculative.program import Kind, StepProgram
from specserve.speculative.sampling import SamplerRows, TokenRows
from specserve.speculative.slot_state import Admission, PageTables, PromptChunks, SlotState, Unread
from specserve.speculative.tree import Proposal, Tree

PAGES_AT_ONCE = 32  # page-table entries that one call sets

Slots = tuple[int, ...]  # of a padded batch: past the last slot where a row is padding


class Inputs:
    """Makes the arguments of a runner's programs, for the shapes and the layouts of the weights that it has."""

    def __init__(
        self, shapes: Shapes, layouts: Layouts, place: Placement, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self.layouts = layouts
        self._shapes, self._place, self._num_bytes = shapes, place, -(-vocab_size // 8)
        # of requests without an option that names a token: by whether the target's own ids end them
        self._blank_tokens = {
            ends: place.put(blank_token_rows(vocab_size, eos_ids if ends else ())) for ends in (False, True)
        }
        self._everything_allowed: dict[int, jax.Array] = {}  # by batch size: most steps have no mask

    def of(self, program: StepProgram, state: SlotState, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a program over a state. `values` are those of the method for its kind, below."""
        arguments = _MAKERS[program.kind](self, program, state, *values)
        if not program.is_alone:
            return arguments
        weights, state, *rest = arguments
        return dataclasses.replace(weights, draft=None), dataclasses.replace(state, draft=None), *rest

    def layout_for(self, batch: int, tree: Tree | None) -> Weights:
        """Return the weights that a step of so many sequences takes."""
        return self.layouts.for_rows(batch * self._shapes.num_nodes(tree))

    def catch_up_for(self, batch: int, tree: Tree | None) -> StepProgram:
        """Return the program by which the drafter reads what is pending, before a step of so many sequences."""
        return StepProgram(batch, kind="catch-up", layout=self.layouts.number(self.layout_for(batch, tree)))

    def _admission(
        self,
        _program: StepProgram,
        state: SlotState,
        slot: int = 0,
        token_ids: Sequence[int] | np.ndarray = (),  # the prompt, and the answer so far
        pages: Sequence[int] | np.ndarray = (),
        num_cached: int = 0,
        rows: SamplerRows | None = None,  # [1], see `options`
        tokens: TokenRows | None = None,  # None: no option names a token
        promise: float = 0.0,
        ends: bool = False,
        kept: int = -1,
        adapter_id: int = -1,
    ) -> tuple[Any, ...]:
        """Fill a slot; see `Runner.admit`."""
        shapes = self._shapes
        page_row: Any = np.full(shapes.max_pages, shapes.num_pages, np.int32)
        page_row[: len(pages)] = pages
        history: Any = np.zeros(shapes.max_pages * shapes.page_size, np.int32)
        history[: len(token_ids)] = token_ids
        rows = rows or sampler_rows(SamplingParams(), 0)
        if shapes.accepts_nothing:
            nothing: Any = np.zeros(1, np.int32)
            rows = dataclasses.replace(rows, max_depth=nothing)
        cached: Any = np.int32(num_cached)
        promised: Any = np.float32(promise)
        place: Any = np.int32(kept) if shapes.kept_states else None
        adapter: Any = np.int32(adapter_id) if shapes.max_loras else None
        new = Admission(page_row, history, cached, rows, tokens or self._blank_tokens[ends], promised, place, adapter)
        return state, self._place.scalar(slot), self._place.once(new)

    def _page_table(
        self, _program: StepProgram, state: SlotState, entries: np.ndarray | None = None
    ) -> tuple[Any, ...]:
        """Set entries of the page table, as `slot_state.extend` takes PAGES_AT_ONCE of them."""
        if entries is None:
            entries = np.zeros((3 + len(self._shapes.windows), PAGES_AT_ONCE), np.int32)
        return PageTables.of(state), self._place.once(entries)

    def _recall(
        self, _program: StepProgram, state: SlotState, slot: int = 0, start: int = 0, last: int = 0, number: int = 0
    ) -> tuple[Any, ...]:
        """Have the drafter keep the answer in a slot, from `start` to `last`, as its `number`-th."""
        return state.draft, state.history, self._place.once(np.array((slot, start, last, number), np.int32))

    def _kept_state(self, _program: StepProgram, state: SlotState, slot: int = 0, place: int = 0) -> tuple[Any, ...]:
        """Copy the recurrent state of a slot to a place."""
        return state, self._place.scalar(slot), self._place.scalar(place)

    def _catch_up(self, program: StepProgram, state: SlotState, slots: Slots = ()) -> tuple[Any, ...]:
        """Have the drafter read what plain steps have left pending."""
        return self.layouts.distinct[program.layout], state, self._slots(program.batch, slots)

    def _reading(
        self, _program: StepProgram, state: SlotState, slot: int | None = None, start: int = 0, promise: float = 0.0
    ) -> tuple[Any, ...]:
        """Have the drafter read what the target has run alone, from `start` on."""
        nobody = self._shapes.num_slots + 1 if slot is None else slot
        numbers: Any = np.int32(nobody), np.int32(start), np.float32(promise)
        return self.layouts.many, state, self._place.once(Unread(*numbers))

    def _prefill(
        self,
        program: StepProgram,
        state: SlotState,
        slots: Slots = (),  # one for each data rank
        num_tokens: tuple[int, ...] = (),
        is_last: tuple[bool, ...] = (),
        allowed: np.ndarray | None = None,
    ) -> tuple[Any, ...]:
        """Run the next `num_tokens` tokens of a prompt in each slot, which `is_last` or not."""
        prompts = self._prompts(program.batch, program.chunk, slots, num_tokens, is_last)
        return self.layouts.many, state, prompts, self._allowed(program.batch, allowed)

    def _mixed(
        self,
        program: StepProgram,
        state: SlotState,
        slots: Slots = (),
        prompts: Slots = (),
        num_tokens: tuple[int, ...] = (),
        is_last: tuple[bool, ...] = (),
    ) -> tuple[Any, ...]:
        """Make a step of some slots, and run the next tokens of other slots' prompts as `_prefill` does."""
        chunks = self._prompts(program.prompts, program.chunk, prompts, num_tokens, is_last)
        return self.layouts.many, state, self._slots(program.batch, slots), chunks

    def _prompts(
        self, number: int, chunk: int, slots: Slots, num_tokens: tuple[int, ...], is_last: tuple[bool, ...]
    ) -> PromptChunks:
        return PromptChunks(
            self._slots(number, slots),
            self._place.slots(num_tokens or (chunk,) * number),
            self._place.flags(is_last or (True,) * number),
        )

    def _step(
        self,
        program: StepProgram,
        state: SlotState,
        slots: Slots = (),
        num_steps: int = 1,
        allowed: np.ndarray | None = None,  # of plain steps
    ) -> tuple[Any, ...]:
        """Make steps one after another."""
        number, bits = self._place.scalar(num_steps), self._allowed(program.batch, allowed)
        burst = Burst(self._slots(program.batch, slots), number, bits)
        return self.layout_for(program.batch, program.tree), state, burst

    def _proposal(self, program: StepProgram, state: SlotState, slots: Slots = ()) -> tuple[Any, ...]:
        """Propose a tree for each sequence."""
        return self.layout_for(program.batch, program.tree), state, self._slots(program.batch, slots)

    def _verification(
        self,
        program: StepProgram,
        state: SlotState,
        slots: Slots = (),
        proposal: Proposal | None = None,
        allowed: np.ndarray | None = None,  # [batch, node, bytes] uint8
    ) -> tuple[Any, ...]:
        """Verify proposed trees."""
        assert program.tree is not None
        layout, padded = self.layout_for(program.batch, program.tree), self._slots(program.batch, slots)
        if proposal is not None:
            return layout, state, padded, proposal, self._allowed(program.batch, allowed)
        shape, batch, num_nodes = self._place.shape, program.batch, self._shapes.num_nodes(program.tree)
        of_nodes, bits = shape(batch, num_nodes), shape(batch, num_nodes, self._num_bytes, dtype=np.uint8)
        return layout, state, padded, Proposal(of_nodes, of_nodes, of_nodes, shape(batch)), bits

    def _slots(self, batch: int, slots: Slots) -> jax.Array:
        """A batch's slots, or as many that nobody has, for which a step computes all the same (`SlotView.live`)."""
        return self._place.slots(slots or (self._shapes.num_slots + 1,) * batch)

    def _allowed(self, batch: int, allowed: np.ndarray | None) -> jax.Array:
        """Return the mask of tokens that a step of so many sequences may draw, [batch, node, bytes] uint8. None allows
        every token at every node."""
        if allowed is not None:
            return self._place.put(allowed)
        if batch not in self._everything_allowed:
            everything = np.full((batch, 1, self._num_bytes), 255, np.uint8)
            self._everything_allowed[batch] = self._place.put(everything)
        return self._everything_allowed[batch]


# of each kind of program. Bound methods in an `Inputs` would be a cycle, by which weights that serve no more stay in
# memory until Python looks for such
_MAKERS: dict[Kind, Callable[..., tuple[Any, ...]]] = {
    "empty state": lambda _inputs, _program, _state: (),
    "admission": Inputs._admission,
    "page table": Inputs._page_table,
    "recall": Inputs._recall,
    "kept state": Inputs._kept_state,
    "catch-up": Inputs._catch_up,
    "reading": Inputs._reading,
    "prefill": Inputs._prefill,
    "step": Inputs._step,
    "mixed": Inputs._mixed,
    "proposal": Inputs._proposal,
    "verification": Inputs._verification,
}
