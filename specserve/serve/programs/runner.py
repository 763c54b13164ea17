"""The programs that the engine runs, and the state that they run over.

Shapes come from short lists (`shapes`), so the set of programs is known at start and compiled ahead (`program_list`);
everything that a client sends is traced. Nothing here waits for the device but `StepHandle.read`.
"""

import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from specserve import host
from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import drafter_for
from specserve.errors import ConfigError, first_line
from specserve.models.target import TargetParams
from specserve.serve.engine.scheduler import chunk_size
from specserve.serve.programs.calls import Call, Calls, shape_of
from specserve.serve.programs.compile_queue import CompiledPrograms
from specserve.serve.programs.inputs import PAGES_AT_ONCE, Inputs
from specserve.serve.programs.layouts import Layouts, make_layouts
from specserve.serve.programs.placement import Placement
from specserve.serve.programs.program_cache import ProgramCache
from specserve.serve.programs.results import StepHandle, asked_parts
from specserve.serve.programs.shapes import Shapes
from specserve.serve.programs.slot_bounds import SlotBounds
from specserve.speculative import slot_state
from specserve.speculative.drafter import Drafter
from specserve.speculative.program import StepProgram
from specserve.speculative.sampling import SamplerRows, TokenRows
from specserve.speculative.slot_state import PageTables, StepConfig, StepResult
from specserve.speculative.tree import Proposal, Tree, depth_of

if TYPE_CHECKING:
    from specserve.models.adapters import Adapter

logger = logging.getLogger(__name__)

RESERVED_MAPS = 6000  # memory maps that optional programs leave to others
# of a prompt: the slot, how many tokens (at most the largest of `chunks`), and whether they are the last
PromptPart = tuple[int, int, bool]
EMPTY_STATE, ADMISSION = StepProgram(kind="empty state"), StepProgram(kind="admission")
PAGE_TABLE, RECALL = StepProgram(kind="page table"), StepProgram(kind="recall")
KEEPING = StepProgram(kind="kept state")


class Runner:
    """A target, perhaps a head, ways to speculate, and the paged state of the slots' sequences."""

    def __init__(
        self,
        target: Target,
        head: Head | None,
        shapes: Shapes,
        *,
        is_coupled: bool = True,
        has_constrained: bool = True,
        mesh: Mesh | None = None,  # the mesh that the parameters are spread over
        folder: Path | None = None,  # where compiled programs are kept; None: nowhere
        check: Callable[[StepConfig, Shapes], None] | None = None,  # called before anything is allocated
        place: Placement | None = None,  # None: on devices that are here, with a state
    ) -> None:
        """`shapes.trees` are the ways to make a step; the head is used where one of them asks for it. Without
        `has_constrained` the programs that token masks need are not compiled."""
        self.shapes = shapes
        self.config = StepConfig(
            target.config.for_length(shapes.max_model_len),
            _drafter(shapes, head),
            shapes.max_depth,
            is_coupled=is_coupled,
            kept_layers=shapes.kept_layers,
            kept_states=shapes.kept_states,
            verified_depth=shapes.verified_depth,
            has_adapters=shapes.max_loras > 0,
        )
        if check is not None:
            check(self.config, shapes)
        self.has_constrained, self.place, self._folder = has_constrained, place or Placement(mesh), folder
        self.eos_ids = frozenset(target.eos_ids)
        layouts = make_layouts(target, head if shapes.uses_head else None, mesh)
        if shapes.max_loras:
            layouts = layouts.with_adapters(self.config.target, [None] * shapes.max_loras, shapes.max_lora_rank)
        self._bind(layouts)
        if place is None:
            self.compiled.compile(self.call(EMPTY_STATE))
            self.reset()

    def _bind(self, layouts: Layouts) -> None:
        """Bind the programs to this config and these shapes. Nothing is compiled; the state is one of shapes."""
        shapes, config = self.shapes, self.config
        sizes = {"num_slots": shapes.num_slots, "num_pages": shapes.num_pages, "page_size": shapes.page_size}
        sizes |= {"max_pages": shapes.max_pages, "num_ranks": shapes.num_ranks, "windows": shapes.windows}
        make = functools.partial(slot_state.init_state, config, **sizes)
        self.state: Any = self.place.shapes(make)
        self._empty = self.state
        state = self.place.state(make)
        self._calls = Calls(config, self.place, state, sizes=sizes, most_steps=shapes.most_steps)
        self.inputs = self._inputs(layouts)
        facts = repr(config), str(self.place)
        self.compiled = CompiledPrograms(self._folder and ProgramCache(self._folder, facts, self.place.devices))
        self.left_out: set[StepProgram] = set()  # for which the process has no room
        # plain steps that are dispatched at once where the draft follows: behind them it can read all that is pending
        self.most_followed = min(shapes.most_steps, config.max_pending - 1) if config.max_pending else shapes.most_steps
        self.remembers = config.drafter is not None and config.drafter.remembers  # finished answers

    def described(self) -> tuple[Any, ...]:
        """Return what `of_described` takes, to be sent to another process."""
        return self.shapes, self.config, self.place, self._folder, self.eos_ids, self.inputs.layouts.described()

    @classmethod
    def of_described(cls, shapes: Shapes, config: StepConfig, place: Placement, *rest: Any) -> "Runner":
        """Make a runner of shapes in place of arrays, whose programs are those of the runner that was `described`, and
        cannot be run."""
        runner = cls.__new__(cls)
        runner.shapes, runner.config, runner.place = shapes, config, place
        runner._folder, runner.eos_ids, layouts = rest
        runner._bind(layouts)
        return runner

    def _inputs(self, layouts: Layouts) -> Inputs:
        vocab_size, eos_ids = self.config.target.vocab_size, sorted(self.eos_ids)
        return Inputs(self.shapes, layouts, self.place, vocab_size=vocab_size, eos_ids=eos_ids)

    def call(self, program: StepProgram, *values: Any) -> Call:
        """Make the call of a program over the present state. `values` are those of the method of `Inputs` for its kind;
        without any it works on nothing but padding."""
        return self._calls.make(program, self.inputs.of(program, self.state, values))

    def compile(self, program: StepProgram) -> None:
        """Compile a program, on any thread. One that only adds a choice of steps is left out where the process can
        hardly map more memory."""
        free = host.free_memory_maps()
        is_choice = program.kind == "step" and program.tree not in (self.shapes.trees[0], self.shapes.plain)
        if (is_choice or program.kind == "mixed") and free is not None and free <= RESERVED_MAPS:
            if not self.left_out:
                logger.warning(
                    "this process may map only %d more pieces of memory, so no more ways to speculate are compiled; "
                    "raise the limit with: sysctl vm.max_map_count=1000000",
                    free,
                )
            self.left_out.add(program)
            self.compiled.drop(program)
            return
        self.compiled.compile(self.call(program))

    def temporary_bytes(self, program: StepProgram) -> int:
        """Return the bytes that a program, which is compiled if it is not yet, takes on each device beside its
        arguments; 0 where the compiler does not say."""
        memory = self.compiled.compile(self.call(program)).memory_analysis()
        if memory is None:
            return 0
        return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def run(self, program: StepProgram, *values: Any) -> Any:
        """Dispatch a program, and go on with the state that it returns; `values` as for `call`. Returns its other
        results."""
        returned = self.compiled.run(self.call(program, *values))
        state, result = returned if isinstance(returned, tuple) else (returned, None)
        if program.is_alone:
            state = dataclasses.replace(state, draft=self.state.draft)
        if program.kind == "recall":
            self.state = dataclasses.replace(self.state, draft=state)
        else:
            self.state = state.put_into(self.state) if isinstance(state, PageTables) else state
        return result

    def reset(self) -> None:
        """Forget every sequence and every cached page: after a device error the donated buffers are gone."""
        self.state = self.place.with_pages(self.compiled.run(self.call(EMPTY_STATE)), self._empty)
        self.bounds = SlotBounds(self.shapes, self.config.max_pending)
        self._num_remembered = 0

    def take_off(self, parts: Collection[str]) -> None:
        """Take "weights" or "kv_cache" off the devices, on which no program may be run then: the host keeps the
        weights, and the state is forgotten. Nothing may be in flight."""
        if "kv_cache" in parts:
            self.state = jax.tree.map(shape_of, self.state)
        if "weights" in parts:
            self.inputs = self._inputs(self.inputs.layouts.on_host())

    def bring_back(self, part: str) -> None:
        """Bring back what was taken off: the weights as they were, or an empty state. Raises JaxRuntimeError where the
        devices have no room."""
        if part == "weights":
            layouts = self.inputs.layouts.on_devices()
            jax.block_until_ready(layouts.distinct)
            self.inputs = self._inputs(layouts)
        else:
            self.reset()
            jax.block_until_ready(self.state)

    def beyond_repair(self, error: Exception | None = None) -> Exception | None:
        """Return why no `reset` can help any more, `error` being that of a step that has just failed. None: it can."""
        del error
        return None

    def with_head(self, head: Head, trees: Sequence[Tree | None] = ()) -> "Runner":
        """Return a runner of the same target beside another head, whose ways to make a step are `trees`; none: the
        same. It has no state until it `takes_over`. The compiled programs are the same ones where the head is of the
        same shape and in as many bits; else nothing is compiled yet. Raises ConfigError where no way asks for a head,
        or one is too deep for it."""
        shapes = dataclasses.replace(self.shapes, trees=tuple(trees) or self.shapes.trees)
        if not shapes.uses_head:
            raise ConfigError("this server speculates without a head, so there is none to replace")
        drafter, other = _drafter(shapes, head), copy.copy(self)
        if shapes.windows:
            shapes = shapes.with_windows(self.config.target, drafter)
        layouts = self.inputs.layouts.with_weights(None, head)
        if (layouts.forms(), drafter, shapes) == (self.inputs.layouts.forms(), self.config.drafter, self.shapes):
            other.inputs = self._inputs(layouts)
        else:
            other.config = dataclasses.replace(self.config, drafter=drafter, max_depth=shapes.max_depth)
            other.shapes = shapes
            other._bind(layouts)
        return other

    def with_weights(self, target: TargetParams | None, head: Head | None) -> "Runner":
        """Return a runner with other weights of the same models, of which None are the same ones; as `with_head`, but
        for the ways to make a step. The compiled programs are the same ones where the matrices are packed alike: on
        CPUs those of bfloat16 numbers take half of what others take."""
        other, layouts = copy.copy(self), self.inputs.layouts.with_weights(target, head)
        if layouts.forms() == self.inputs.layouts.forms():
            other.inputs = self._inputs(layouts)
        else:
            other._bind(layouts)
        return other

    def with_adapters(self, adapters: "Sequence[Adapter | None]") -> Layouts:
        """Return the weights beside these adapters of the target, as many as `shapes.max_loras`, for `use`."""
        return self.inputs.layouts.with_adapters(self.config.target, adapters, self.shapes.max_lora_rank)

    def use(self, layouts: Layouts) -> None:
        """Go on with other weights of the same shapes, which change nothing that the state has of present sequences."""
        self.inputs = self._inputs(layouts)

    def take_over(self, other: "Runner") -> None:
        """Go on in place of another runner, on whose cache nothing may depend any more: two states are never there at
        once. Where the programs are other ones, the state is empty, and the ways to step are tried over padding. Raises
        ConfigError where the device cannot run that; then the other one is there again, with an empty state."""
        if self.compiled is other.compiled:
            self.state, self.bounds, self._num_remembered = other.state, other.bounds, other._num_remembered
            return
        other.state = None
        try:
            self.reset()
            for tree in self.shapes.trees_for(1):
                self.run(self.ready_step(self.shapes.step(min(self.shapes.batch_sizes), self.shapes.widths[0], tree)))
            jax.block_until_ready(self.state)
        except Exception as error:
            self.state = None
            other.reset()
            raise ConfigError(
                f"the device cannot run the new weights, so the old ones stay: {first_line(error)}"
            ) from error

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
        kept: int = -1,  # the place of the recurrent state behind the cached tokens
        adapter_id: int = -1,  # the target's adapter that it runs through; -1: none
    ) -> None:
        """Start a sequence, of which the first `num_cached` tokens are in its pages already."""
        ids, own_pages = (np.array(numbers, np.int32) for numbers in (token_ids, pages))  # sent faster than lists
        self.run(ADMISSION, slot, ids, own_pages, num_cached, rows, tokens, promise, ends, kept, adapter_id)
        self.bounds.begin(slot, num_cached)

    def keep_state(self, slot: int, place: int) -> None:
        """Copy the recurrent state of a sequence to a place, where `admit` finds it."""
        self.run(KEEPING, slot, place)

    def extend(self, new_pages: Sequence[tuple[int, ...]]) -> None:
        """Give sequences more pages: (slot, which page of the sequence, page), and behind them the page's window page
        for each of the windows, -1 where it is to have none."""
        for start in range(0, len(new_pages), PAGES_AT_ONCE):
            entries = np.full((3 + len(self.shapes.windows), PAGES_AT_ONCE), -1, np.int32)
            entries[0] = self.shapes.num_slots
            part = np.array(new_pages[start : start + PAGES_AT_ONCE], np.int32).T
            entries[:, : part.shape[1]] = part
            self.run(PAGE_TABLE, entries)

    def prefill(
        self,
        parts: Sequence[PromptPart],
        *,
        has_logprobs: bool = False,
        is_scored: bool = False,
        has_states: bool = False,
        is_alone: bool = False,
        allowed: np.ndarray | None = None,
    ) -> StepHandle:
        """Run the next tokens of prompts, of each data rank at most as many as there is a program for. The drawn token
        counts after the last. With `is_scored` the result has the log-probabilities of the prompts' own tokens, with
        `has_states` the hidden states of the kept layers too. `allowed` ([part, 1, bytes] uint8, as `TokenMask.masks`)
        are the tokens that may be drawn. The target may run `is_alone` where `can_prefill_alone`."""
        slots, batches = [slot for slot, _, _ in parts], self.shapes.batches
        program = self.compiled.first(self._prefills(parts, is_scored=is_scored, is_alone=is_alone))
        bits = batches.fill_masks(slots, allowed, program.batch)
        result = self.run(program, *self._in_rows(parts, program.batch), bits)
        if not has_states:
            result = dataclasses.replace(result, hidden_states=None)
        return self._prefilled(parts, program.batch, result, has_logprobs=has_logprobs)

    def can_prefill_alone(self, parts: Sequence[PromptPart]) -> bool:
        """Return whether the target can run these parts alone now, with no more padding than else."""
        alone = self.compiled.first(self._prefills(parts, is_alone=self.shapes.has_alone))
        followed = next((each.chunk for each in self._prefills(parts) if each in self.compiled), alone.chunk)
        return alone.is_alone and alone in self.compiled and alone.chunk <= followed

    def _prefills(
        self, parts: Sequence[PromptPart], *, is_scored: bool = False, is_alone: bool = False
    ) -> Iterator[StepProgram]:
        """Yield the programs that prefill these parts, the smallest first."""
        shapes = self.shapes
        chunks = [chunk for chunk in shapes.chunks if all(chunk >= number for _, number, _ in parts)]
        of_rank = shapes.batches.most_of_a_rank([slot for slot, _, _ in parts])
        widths = shapes.widths_for(max(self.bounds.num_entries((slot,)) + number for slot, number, _ in parts))
        if is_scored:  # there is one program for all
            widths, chunks = shapes.widths[-1:], shapes.chunks[-1:]
        for width, chunk in itertools.product(widths, chunks):
            if of_rank <= shapes.most_prompts(chunk):
                prompts = 1 if of_rank == 1 else shapes.most_prompts(chunk)
                yield shapes.prefill(width, chunk, prompts, is_scored=is_scored, is_alone=is_alone)

    def _in_rows(self, parts: Sequence[PromptPart], size: int) -> Iterator[tuple[Any, ...]]:
        """Yield the slots, tokens and ends of parts, each in the rows of a batch of this size."""
        batches, slots = self.shapes.batches, [slot for slot, _, _ in parts]
        yield batches.pad(slots, size)
        for column in zip(*((number, is_last) for _, number, is_last in parts), strict=True):
            yield tuple(batches.fill(slots, column, size, 0).tolist())

    def _prefilled(
        self, parts: Sequence[PromptPart], size: int, result: StepResult, *, has_logprobs: bool
    ) -> StepHandle:
        for slot, number, _ in parts:
            self.bounds.prefilled(slot, number)
        rows = self.shapes.batches.rows([slot for slot, _, _ in parts], size)
        return StepHandle(asked_parts(result, has_logprobs=has_logprobs), rows)

    def mixed_program(self, slots: Sequence[int], tree: Tree | None, parts: Sequence[PromptPart]) -> StepProgram | None:
        """Return the smallest program that is compiled of those that make a step of these slots and prefill these parts
        of other slots' prompts; None: there is none."""
        shapes = self.shapes
        sizes = [size for size in shapes.mixed_sizes if size >= shapes.batches.size_for(slots)]
        programs = (shapes.mixed(size, tree, each) for each in self._prefills(parts) for size in sizes)
        return next((program for program in programs if program in self.compiled), None)

    def mixed(
        self,
        program: StepProgram,  # see `mixed_program`
        slots: Sequence[int],
        parts: Sequence[PromptPart],  # of other slots
        *,
        has_logprobs: bool = False,
        has_tree: bool = False,
        is_following: bool = True,
    ) -> tuple[StepHandle, StepHandle]:
        """Dispatch one program that makes a step of some slots and prefills parts of other slots' prompts, as `step`
        and `prefill` do one after the other. Returns the results of each."""
        if program.tree is not None or is_following:
            self._catch_up(slots, program.tree, 1)
        batches = self.shapes.batches
        result, of_prompts = self.run(
            program, batches.pad(slots, program.batch), *self._in_rows(parts, program.prompts)
        )
        asked = asked_parts(result, has_logprobs=has_logprobs, has_tree=has_tree)
        step = StepHandle(asked, batches.rows(slots, program.batch), self.bounds.stepped(slots, program.tree))
        return step, self._prefilled(parts, program.prompts, of_prompts, has_logprobs=has_logprobs)

    def most_steps(self, program: StepProgram) -> int:
        """Return how many such steps one call makes, at most."""
        return self.most_followed if program.tree is None and not program.is_alone else self.shapes.most_steps

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
        Where the draft need not follow, plain steps do not wait for it (`speculative.step.decode`), or are the target's
        alone, where there are such programs, and leave it behind until it `reads`. Plain steps draw `allowed` tokens
        ([batch, 1, bytes] uint8)."""
        assert tree is None or allowed is None, "masks of a tree's nodes are known once it is proposed: use `propose`"
        if tree is not None or is_following:
            self._catch_up(slots, tree, num_steps)
        batches = self.shapes.batches
        width = self.bounds.width_of(slots, (num_steps - 1) * (1 + depth_of(tree)))
        is_alone = tree is None and self.shapes.has_alone and not is_following
        program = self.ready_step(StepProgram(batches.size_for(slots), width, tree, is_alone=is_alone))
        bits = batches.fill_masks(slots, allowed, program.batch)
        result = self.run(program, batches.pad(slots, program.batch), num_steps, bits)
        rows, on_read = batches.rows(slots, program.batch), self.bounds.stepped(slots, tree, num_steps)
        asked = asked_parts(result, has_logprobs=has_logprobs, has_tree=has_tree)
        return StepHandle(asked, rows, on_read, num_steps)

    def read(self, slot: int, start: int, end: int, promise: float) -> None:
        """Have the draft read the committed tokens of a sequence from `start`, a whole number of pages, to `end`, which
        the target has run alone."""
        programs = [each for each in self.shapes.readings() if each in self.compiled] or [*self.shapes.readings()]
        while start < end:
            chunk = chunk_size([each.chunk for each in programs[::-1]], end - start, self.shapes.extra_tokens)
            self.run(next(each for each in programs if each.chunk == chunk), slot, start, promise)
            start += chunk
        self.bounds.caught_up((slot,))

    def propose(self, slots: Sequence[int], tree: Tree) -> tuple[np.ndarray, np.ndarray, Proposal]:
        """The first half of a step with constrained sequences: token ids and parents of the proposed nodes, [batch,
        node], on the host; and the proposal for `verify`. A proposal changes nothing that a later step depends on."""
        self._catch_up(slots, tree, 1)
        padded = self.shapes.batches.pad(slots)
        program, _ = self.shapes.constrained_step(len(padded), tree)
        proposal = self.run(program, padded)
        rows = self.shapes.batches.rows(slots, program.batch)
        return np.asarray(proposal.token_ids)[rows], np.asarray(proposal.parents)[rows], proposal

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
        batches = self.shapes.batches
        padded = batches.pad(slots)
        _, program = self.shapes.constrained_step(len(padded), tree)
        result = self.run(program, padded, proposal, batches.fill_masks(slots, allowed, program.batch))
        rows, on_read = batches.rows(slots, program.batch), self.bounds.stepped(slots, tree)
        return StepHandle(asked_parts(result, has_logprobs=has_logprobs, has_tree=has_tree), rows, on_read)

    def remember(self, slot: int, num_prompt: int, last: int) -> None:
        """Have a drafter that `remembers` keep a finished answer, whose last token is at the index `last`. Steps that
        were dispatched before its end was known have written on behind it."""
        if self.remembers:
            self.run(RECALL, slot, num_prompt, last, self._num_remembered)
            self._num_remembered += 1

    def forget_answers(self) -> None:
        """Forget all finished answers: lookups find nothing of them any more."""
        if self.config.drafter:
            draft = self.config.drafter.forget(self.state.draft)
            self.state = dataclasses.replace(self.state, draft=draft)

    def catch_up_before(self, slots: Sequence[int], tree: Tree | None, num_steps: int) -> StepProgram | None:
        """Return the program by which the drafter reads what is pending, where it must before so many steps."""
        if not self.bounds.must_catch_up(slots, tree, num_steps):
            return None
        return self.inputs.catch_up_for(self.shapes.batches.size_for(slots), tree)

    def _catch_up(self, slots: Sequence[int], tree: Tree | None, num_steps: int) -> None:
        if program := self.catch_up_before(slots, tree, num_steps):
            self.run(program, self.shapes.batches.pad(slots))
            self.bounds.caught_up(slots)

    def ready_step(self, least: StepProgram) -> StepProgram:
        """Return the smallest step that is here of those that do what this one does; itself where there is none."""
        widths = [width for width in self.shapes.widths if width >= least.width]
        sizes = [size for size in self.shapes.batch_sizes if size >= least.batch]
        programs = (
            dataclasses.replace(least, batch=size, width=width) for width, size in itertools.product(widths, sizes)
        )
        return self.compiled.first(programs)


def _drafter(shapes: Shapes, head: Head | None) -> Drafter | None:
    """Return what proposes the trees of these shapes. Raises ConfigError where one is too deep for the head."""
    if head is None:
        return drafter_for(shapes.trees, None)
    if shapes.uses_head and head.drafter.max_len < shapes.max_model_len:
        logger.warning(
            "the draft is made for sequences of %s tokens, and they may have %s: behind that, less may be accepted",
            *(f"{number:,}" for number in (head.drafter.max_len, shapes.max_model_len)),
        )
    return drafter_for(shapes.trees, head.drafter.for_length(shapes.max_model_len))
