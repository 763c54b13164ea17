"""The programs that the engine runs, and the state that they run over.

Shapes come from short lists (batch buckets, page-table widths, prefill chunks, trees), so the set of programs is known
at start and compiled ahead (`programs`); everything a client sends is traced. A step over nothing but padding changes
nothing, which is how steps are timed. Nothing here waits for the device but `StepHandle.read`.
"""

import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import drafter_for
from specserve.errors import ConfigError, first_line
from specserve.mesh import num_parts
from specserve.serve.engine.handles import StepHandle
from specserve.serve.engine.ledger import Ledger
from specserve.serve.engine.options import blank_token_rows
from specserve.serve.fleet.plans import MAKERS, Plan, told
from specserve.serve.fleet.ranks import Follower, Leader
from specserve.serve.programs.calls import Calls
from specserve.serve.programs.kept import KeptPrograms
from specserve.serve.programs.layouts import make_layouts
from specserve.serve.programs.placement import Placement, reads_by_page
from specserve.serve.programs.programs import Call, Programs, RoomForMore
from specserve.serve.programs.shapes import Shapes, make_shapes
from specserve.speculative import step
from specserve.speculative.drafter import Weights
from specserve.speculative.sampling import SamplerRows, TokenRows
from specserve.speculative.step import Admission, StepConfig, StepResult
from specserve.speculative.tree import Proposal, Tree

logger = logging.getLogger(__name__)

PAGES_AT_ONCE = 32  # page-table entries that one call of `_extend` sets


class Runner:
    """A target, perhaps a head, ways to speculate, and the paged state of `num_slots` sequences."""

    def __init__(
        self,
        target: Target,
        head: Head | None,
        trees: Sequence[Tree | None],
        *,
        num_slots: int,
        max_model_len: int,
        page_size: int,
        num_pages: int,
        is_deterministic: bool = False,
        is_coupled: bool = True,
        has_constrained: bool = True,
        mesh: Mesh | None = None,  # that the parameters are spread over
        folder: Path | None = None,  # where compiled programs are kept; None: nowhere
        check: Callable[[StepConfig, Shapes], None] | None = None,  # called before anything is allocated
    ) -> None:
        """`trees` are the ways to make a step, None being plain decoding; the head is used where one of them asks for
        it. Without `has_constrained` the programs that token masks need are not compiled."""
        shapes = self.shapes = make_shapes(
            trees,
            num_slots=num_slots,
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=num_pages,
            is_recurrent=target.config.is_recurrent,
            reads_by_page=reads_by_page(target.config, num_pages, page_size, mesh),
            is_deterministic=is_deterministic,
            num_ranks=num_parts(mesh, "batch"),
        )
        self.config = StepConfig(
            target.config.for_length(max_model_len),
            drafter_for(shapes.trees, head.drafter if head else None),
            shapes.max_depth,
            is_coupled=is_coupled,
            verified_depth=shapes.verified_depth,
        )
        if check is not None:
            check(self.config, shapes)
        self.layouts = make_layouts(target, head if shapes.uses_head else None, mesh)
        self._everything_allowed: dict[int, jax.Array] = {}  # by batch size: most steps have no mask
        self.has_constrained, self.place, self._folder = has_constrained, Placement(mesh), folder
        self._bind()
        self.compiled.compile(self.beginning)
        self.leader: Leader | None = None  # where this is the first of several processes
        self._proposal_made: Proposal | None = None  # the last one
        self.reset()
        # of requests without an option that names a token: by whether the target's own ids end them
        self._blank_tokens = {
            ends: self.place.put(blank_token_rows(target.config.vocab_size, target.eos_ids if ends else ()))
            for ends in (False, True)
        }
        self.eos_ids = frozenset(target.eos_ids)

    def _bind(self) -> None:
        """Bind the programs to this config and these shapes. Nothing is compiled; the state is one of shapes."""
        shapes = self.shapes
        sizes = {"num_slots": shapes.num_slots, "num_pages": shapes.num_pages, "page_size": shapes.page_size}
        sizes |= {"max_pages": shapes.max_pages, "num_ranks": shapes.num_ranks}
        make = functools.partial(step.init_state, self.config, **sizes)
        self.state: Any = self.place.shapes(make)
        self.calls = Calls(self.config, self.place, self.place.state(make))
        self.beginning = self.calls.begin(**sizes)
        facts = repr(self.config), str(self.place)
        self.compiled = Programs(self._folder and KeptPrograms(self._folder, facts, self.place.devices))
        self.has_room_for = RoomForMore()

    def reset(self) -> None:
        """Forget every sequence and every cached page: after a device error the donated buffers are gone."""
        self.run_call(self.beginning)
        self.place.give_back_zeros(self.state.cache)
        self._ledger = Ledger(self.shapes.num_slots, self.config.max_pending)
        self._num_remembered = 0

    def with_head(self, head: Head, trees: Sequence[Tree | None] = ()) -> "Runner":
        """A runner of the same target beside another head, whose ways to make a step are `trees`; none: the same. It
        has no state until it `takes_over`. The compiled programs are the same ones where the head is of the same shape
        and in as many bits; else nothing is compiled yet. Raises ConfigError where no way asks for a head, or one is
        too deep for it."""
        shapes = dataclasses.replace(self.shapes, trees=tuple(trees) or self.shapes.trees)
        if not shapes.uses_head:
            raise ConfigError("this server speculates without a head, so there is none to replace")
        drafter, other = drafter_for(shapes.trees, head.drafter), copy.copy(self)
        other.layouts = self.layouts.with_head(head)
        is_alike = other.layouts.draft_shapes() == self.layouts.draft_shapes()
        if not is_alike or (drafter, shapes) != (self.config.drafter, self.shapes):
            other.config = dataclasses.replace(self.config, drafter=drafter, max_depth=shapes.max_depth)
            other.shapes = shapes
            other._bind()
        return other

    def take_over(self, other: "Runner") -> None:
        """Go on in place of another runner, on whose cache nothing may depend any more: two states are never there at
        once. Where the programs are other ones, the state is empty, and the ways to step are tried over padding. Raises
        ConfigError where the device cannot run that; then the other one is there again, with an empty state."""
        if self.compiled is other.compiled:
            self.state, self._ledger, self._num_remembered = other.state, other._ledger, other._num_remembered
            return
        other.state = None
        try:
            self.reset()
            for tree in self.shapes.trees_for(1):
                self._run_step((), tree, self.shapes.widths[0], None)
            jax.block_until_ready(self.state)
        except Exception as error:
            self.state = None
            other.reset()
            raise ConfigError(f"the device cannot run this head, so the old one stays: {first_line(error)}") from error

    @property
    def is_whole(self) -> bool:
        """Return whether all processes that this one sends its plans to are still there."""
        return self.leader is None or self.leader.lost is None

    @property
    def cache_lag(self) -> int:
        """The number of last committed entries of a growing sequence that must not be cached yet, because the drafter
        may not have written its own entries for them."""
        return self.config.max_pending

    def admit(
        self,
        slot: int,
        token_ids: Sequence[int],  # the prompt, and the answer so far
        pages: Sequence[int],
        num_cached: int,
        rows: SamplerRows,  # [1], see `options`
        tokens: TokenRows | None,  # None: no option names a token
        promise: float = 0.0,  # accepted tokens per step that the head promises
        ends: bool = False,  # with no `tokens`: the target's own ids end it, so that no step is made behind them
    ) -> None:
        """Start a sequence, of which the first `num_cached` tokens are in its pages already."""
        ids, held = (np.array(numbers, np.int32) for numbers in (token_ids, pages))  # told faster than lists
        self.run_call(self.admission_call(slot, ids, held, num_cached, rows, tokens, promise=promise, ends=ends))
        self._ledger.begin(slot, num_cached)

    @told
    def admission_call(
        self,
        slot: int,
        token_ids: Sequence[int] | np.ndarray,
        pages: Sequence[int] | np.ndarray,
        num_cached: int,
        rows: SamplerRows,
        tokens: TokenRows | None,
        *,
        promise: float = 0.0,
        ends: bool = False,
    ) -> Call:
        """Fill a slot; the arguments are `admit`'s."""
        page_row: Any = np.full(self.shapes.max_pages, self.shapes.num_pages, np.int32)
        page_row[: len(pages)] = pages
        history: Any = np.zeros(self.shapes.max_pages * self.shapes.page_size, np.int32)
        history[: len(token_ids)] = token_ids
        if self.shapes.accepts_nothing:
            nothing: Any = np.zeros(1, np.int32)
            rows = dataclasses.replace(rows, max_depth=nothing)
        cached: Any = np.int32(num_cached)
        promised: Any = np.float32(promise)
        new = Admission(page_row, history, cached, rows, tokens or self._blank_tokens[ends], promised)
        return self.calls.admit(self.state, self.place.scalar(slot), self.place.put(new))

    def extend(self, new_pages: Sequence[tuple[int, int, int]]) -> None:
        """Give sequences more pages: (slot, which page of the sequence, page)."""
        for start in range(0, len(new_pages), PAGES_AT_ONCE):
            entries = np.full((3, PAGES_AT_ONCE), self.shapes.num_slots, np.int32)
            part = np.array(new_pages[start : start + PAGES_AT_ONCE], np.int32).T
            entries[:, : part.shape[1]] = part
            self.run_call(self.extension_call(entries))

    @told
    def extension_call(self, entries: np.ndarray) -> Call:
        """Set entries of the page table, [3, PAGES_AT_ONCE] int32: slots, columns and pages."""
        return self.calls.extend(self.state.page_table, self.place.put(entries))

    def prefill(
        self,
        parts: Sequence[tuple[int, int, bool]],
        *,
        has_logprobs: bool = False,
        is_scored: bool = False,
        allowed: np.ndarray | None = None,
    ) -> StepHandle:
        """Run the next tokens of prompts, one of each data rank at most: `parts` are their slots, how many tokens (at
        most the largest of `chunks`), and whether they are the last. The drawn token counts after the last.
        With `is_scored` the result says how likely the prompts' own tokens were.
        `allowed` ([part, 1, bytes] uint8, as `TokenMask.masks`) says which tokens it may be."""
        slots, batch = [slot for slot, _, _ in parts], self.shapes.num_ranks
        chunks = [chunk for chunk in self.shapes.chunks if all(chunk >= number for _, number, _ in parts)]
        most = max(self._ledger.num_entries((slot,)) + number for slot, number, _ in parts)
        widths = self.shapes.widths_for(most)
        if is_scored:  # there is one program for all
            widths, chunks = self.shapes.widths[-1:], self.shapes.chunks[-1:]
        rows = self.shapes.prompts_in_rows(parts)
        bits = self.shapes.masks_in_rows(slots, allowed, batch)
        shapes = itertools.product(widths, chunks)
        call = self.compiled.at_once(self.prefill_call(*rows, chunk, width, bits, is_scored) for width, chunk in shapes)
        result = self.run_call(call)
        for slot, number, _ in parts:
            self._ledger.prefilled(slot, number)
        rows_read = functools.partial(self.shapes.rows_of, slots)
        return StepHandle(result, lambda _n_accepted: None, rows_read, has_logprobs=has_logprobs)

    @told
    def prefill_call(
        self,
        slots: tuple[int, ...],  # one for each data rank, past the last one where that has none
        num_tokens: tuple[int, ...],
        is_last: tuple[bool, ...],
        chunk: int,
        width: int,
        allowed: np.ndarray | None = None,
        is_scored: bool = False,
    ) -> Call:
        """Run chunks of prompts of this size, over pages of this width."""
        return self.calls.prefill(
            self.layouts.many,
            self.state,
            self.place.slots(slots),
            self.place.slots(num_tokens),
            self.place.flags(is_last),
            self._allowed(len(slots), allowed),
            chunk=chunk,
            width=width,
            is_scored=is_scored,
        )

    def step(
        self,
        slots: Sequence[int],
        tree: Tree | None,
        *,
        num_steps: int = 1,
        has_logprobs: bool = False,
        has_tree: bool = False,
        is_following: bool = True,
        allowed: np.ndarray | None = None,
    ) -> StepHandle:
        """Dispatch one step for these slots, with one of `trees`, or several at once, `most_steps` of them at most.
        Where the draft need not follow, plain steps do not wait for it (`speculative.step.decode`). Plain steps draw
        `allowed` tokens ([batch, 1, bytes] uint8)."""
        assert tree is None or allowed is None, "who may follow a tree's nodes is known when it is proposed: `propose`"
        width = self._prepare(slots, tree, num_steps, is_following=is_following)
        result = self._run_step(slots, tree, width, allowed, num_steps)
        asked = {"has_logprobs": has_logprobs, "has_tree": has_tree}
        return self._handle(slots, tree, result, num_steps=num_steps, **asked)

    def propose(self, slots: Sequence[int], tree: Tree) -> tuple[np.ndarray, np.ndarray, Proposal]:
        """The first half of a step with constrained sequences: token ids and parents of the proposed nodes, [batch,
        node], on the host; and the proposal for `verify`. A proposal changes nothing that a later step depends on, so
        that several trees may be proposed one after another."""
        padded = self.shapes.pad(slots)
        self._prepare(slots, tree, 1)
        proposal = self.run_call(self.proposal_call(padded, tree))
        rows = self.shapes.rows_of(slots, len(padded))
        return np.asarray(proposal.token_ids)[rows], np.asarray(proposal.parents)[rows], proposal

    def draft_alone(self, slots: Sequence[int], tree: Tree) -> None:
        """Run the drafter's share of a step by itself and wait for it, so that it can be timed. As with every proposal,
        no later step depends on it."""
        padded, width = self.shapes.pad(slots), self.width_of(slots)
        layout = self.layout_for(len(padded), tree)
        call = self.calls.propose(layout, self.state, self.place.slots(padded), tree=tree, width=width)
        self.compiled.compile(call)  # so that it is not counted as a program that a step missed
        jax.block_until_ready(self.run_call(call))

    def verify(
        self,
        slots: Sequence[int],
        tree: Tree,
        proposal: Proposal,
        allowed: np.ndarray,  # [batch, node, bytes] uint8
        *,
        has_logprobs: bool = False,
        has_tree: bool = False,
    ) -> StepHandle:
        """The second half: only allowed tokens are drawn."""
        padded = self.shapes.pad(slots)
        bits = self.shapes.masks_in_rows(slots, allowed, len(padded))
        result = self.run_call(self.verification_call(padded, tree, proposal, bits))
        return self._handle(slots, tree, result, num_steps=0, has_logprobs=has_logprobs, has_tree=has_tree)

    def remember(self, slot: int, num_prompt: int, last: int) -> None:
        """Tell a drafter that wants to know of a finished answer, whose last token is at the index `last`. Steps that
        were dispatched before its end was known have written on behind it."""
        if self.remembers:
            self.run_call(self.recall_call(slot, num_prompt, last, self._num_remembered))
            self._num_remembered += 1

    @property
    def remembers(self) -> bool:
        return self.config.drafter is not None and self.config.drafter.remembers

    def forget_answers(self) -> None:
        """Forget all finished answers: lookups find nothing of them any more."""
        if self.leader is not None:
            self.leader.send(Plan("forget_answers"))
        if self.config.drafter:
            draft = self.config.drafter.forget(self.state.draft)
            self.state = dataclasses.replace(self.state, draft=draft)

    @told
    def recall_call(self, slot: int, start: int, last: int, number: int) -> Call:
        """Have the drafter keep the answer in a slot, from `start` to `last`, as its `number`-th."""
        return self.calls.remember(self.state, *map(self.place.scalar, (slot, start, last, number)))

    @property
    def most_steps(self) -> int:
        """Steps that may be dispatched at once. After the last of them the draft can still read all that is pending."""
        most, room = self.shapes.most_steps, self.config.max_pending
        return min(most, room - 1) if room else most

    def num_alike(self, slots: Sequence[int], tree: Tree | None, most: int) -> int:
        """Return how many steps, up to `most`, the program of the next one can make at once: those of its width."""
        width, size = self.width_of(slots), 1 + (tree.depth if tree else 0)
        return max(number for number in range(1, most + 1) if self.width_of(slots, (number - 1) * size) == width)

    def _prepare(self, slots: Sequence[int], tree: Tree | None, num_steps: int, *, is_following: bool = True) -> int:
        """Let the draft catch up where these steps could not hold what is pending; returns their width."""
        if self.config.max_pending and slots and (tree is not None or is_following):
            room = self.config.max_pending - num_steps if tree is None else tree.depth + 1
            if self._ledger.num_pending(slots) > room:
                padded = self.shapes.pad(slots)
                number = self.layouts.number(self.layout_for(len(padded), tree))
                self.run_call(self.catch_up_call(padded, number))
                self._ledger.caught_up(slots)
        return self.width_of(slots, (num_steps - 1) * (1 + (tree.depth if tree else 0)))

    def _handle(
        self, slots: Sequence[int], tree: Tree | None, result: StepResult, *, num_steps: int, **asked: bool
    ) -> StepHandle:
        on_read = self._ledger.stepped(slots, tree.depth if tree else 0, max(1, num_steps))
        rows = functools.partial(self.shapes.rows_of, slots)
        return StepHandle(result, on_read, rows, num_steps=num_steps, **asked)

    def width_of(self, slots: Sequence[int], num_before: int = 0) -> int:
        """The width of the next step of these slots, before which others emit so many tokens at most."""
        return self.shapes.widths_for(self._ledger.num_entries(slots) + num_before + 1)[0]

    def _run_step(
        self, slots: Sequence[int], tree: Tree | None, width: int, allowed: np.ndarray | None, num_steps: int = 1
    ) -> StepResult:
        widths = [each for each in self.shapes.widths if each >= width]
        sizes = [size for size in self.shapes.batch_sizes if size >= self.shapes.batch_size_of(slots)]
        shapes = itertools.product(widths, sizes)
        calls = (
            self.step_call(
                *(self.shapes.pad(slots, size), tree, each, self.shapes.masks_in_rows(slots, allowed, size), num_steps)
            )
            for each, size in shapes
        )
        return self.run_call(self.compiled.at_once(calls))

    def run_call(self, call: Call) -> Any:
        """Dispatch a call, on all processes, and go on with the state that it gives; returns what it gives besides."""
        if self.leader is not None:
            assert call.plan is not None, "the others would not run it"
            self.leader.send(call.plan)
        given = self.compiled.run(call)
        state, result = given if isinstance(given, tuple) else (given, None)
        # `extend` gives the page table alone
        self.state = dataclasses.replace(self.state, page_table=state) if isinstance(state, jax.Array) else state
        self._proposal_made = result if isinstance(result, Proposal) else self._proposal_made
        return result

    def follow(self, follower: Follower) -> None:
        """Run what the first process runs, until it ends. Raises ProcessError when it has ended without a word."""
        for plan in follower.plans(self.shapes.trees, lambda: self._proposal_made):
            if plan.name == "forget_answers":
                self.forget_answers()
            else:
                self.run_call(MAKERS[plan.name](self, *plan.arguments, **plan.options))

    @told
    def catch_up_call(self, padded: tuple[int, ...], number: int) -> Call:
        """Have the drafter read what is pending in the slots of a padded batch; `number` is the layout's."""
        return self.calls.catch_up(self.layouts.distinct[number], self.state, self.place.slots(padded), number=number)

    @told
    def step_call(
        self,
        padded: tuple[int, ...],
        tree: Tree | None,
        width: int,
        allowed: np.ndarray | None = None,
        num_steps: int = 1,
    ) -> Call:
        """Make steps of one kind for a padded batch, over pages of this width; `allowed` as for `step`."""
        layout, bits = self.layout_for(len(padded), tree), self._allowed(len(padded), allowed)
        arguments = layout, self.state, self.place.slots(padded), self.place.scalar(num_steps), bits
        return self.calls.steps(*arguments, tree=tree, width=width, most=self.shapes.most_steps)

    def _allowed(self, batch: int, allowed: np.ndarray | None) -> jax.Array:
        """Return the mask of tokens that a step of so many sequences may draw, [batch, node, bytes] uint8. None allows
        every token at every node."""
        if allowed is None:
            if batch not in self._everything_allowed:
                everything = np.full((batch, 1, -(-self.config.target.vocab_size // 8)), 255, np.uint8)
                self._everything_allowed[batch] = self.place.put(everything)
            return self._everything_allowed[batch]
        return self.place.put(allowed)

    @told
    def proposal_call(self, padded: tuple[int, ...], tree: Tree) -> Call:
        """Propose a tree for each sequence of a padded batch."""
        layout, slots, width = self.layout_for(len(padded), tree), self.place.slots(padded), self.shapes.max_pages
        return self.calls.propose(layout, self.state, slots, tree=tree, width=width)

    @told
    def verification_call(self, padded: tuple[int, ...], tree: Tree, proposal: Proposal, allowed: Any) -> Call:
        """Verify proposed trees for a padded batch; `allowed` as for `verify`."""
        bits = self._allowed(len(padded), allowed) if isinstance(allowed, np.ndarray) else allowed  # or its shape
        layout, slots, width = self.layout_for(len(padded), tree), self.place.slots(padded), self.shapes.max_pages
        return self.calls.verify(layout, self.state, slots, proposal, bits, tree=tree, width=width)

    def layout_for(self, batch: int, tree: Tree | None) -> Weights:
        """The weights that a step of so many sequences takes."""
        return self.layouts.for_rows(batch * self.shapes.num_nodes(tree))
