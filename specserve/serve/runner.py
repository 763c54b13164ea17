"""The compiled programs and the state they run over. The only file of the server that calls `jax.jit`.

Shapes come from short lists (batch buckets, page-table widths, prefill chunks, trees), so the set of programs is known
at start; everything a client sends is traced. A step over nothing but padding changes nothing, which is how programs
are compiled and timed early. Nothing here waits for the device but `StepHandle.read`.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specserve.checkpoints.head import Head
from specserve.checkpoints.load import Target
from specserve.host import free_memory_maps
from specserve.mesh import on_mesh
from specserve.serve.layouts import make_layouts
from specserve.serve.options import sampler_rows
from specserve.serve.placement import Placement
from specserve.serve.request import SamplingParams
from specserve.speculative import lookup, step
from specserve.speculative.sampling import SamplerRows, TokenRows
from specserve.speculative.step import Admission, SlotState, StepConfig, StepResult, Weights
from specserve.speculative.tree import Proposal, Tree, chain, describe

logger = logging.getLogger(__name__)

CPU_CHUNKS, DEVICE_CHUNKS = (64, 256), (64, 256, 1024)  # prompt tokens per prefill program
RECURRENT_CHUNK = 256  # at most, with recurrent layers: each keeps tens of kilobytes per token of the chunk
_FIRST_WIDTH, _WIDTH_GROWTH = 8, 4  # of the page-table widths; each costs a set of programs, each step reads < 4x
CPU_ROWS, DEVICE_ROWS = 8, 512  # with a choice of trees, none makes a step of several sequences larger than this,
CPU_CHAIN, CPU_CHAIN_ROWS = 3, 64  # but for one chain on CPU, which pays in larger batches too (docs/log)
RESERVED_MAPS = 6000  # memory maps that optional programs leave to others
_PAGES_AT_ONCE = 32  # page-table entries that one call of `_extend` sets
DETERMINISTIC_DEPTH = 7  # every step verifies a chain of this length, whatever was proposed


@dataclass(frozen=True)
class HostResult:
    """One step's outcome on the host; row i belongs to the i-th slot asked for."""

    token_ids: np.ndarray  # [batch, depth + 1] int32
    n_accepted: np.ndarray  # [batch] int32
    source: np.ndarray  # [batch] int32, who proposed: the head (0) or a lookup
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # chosen, top, top_ids; see `sampling.Logprobs`

    def emitted(self, row: int) -> list[int]:
        return self.token_ids[row, : self.n_accepted[row] + 1].tolist()


class StepHandle:
    """A step on its way. `read` waits for it, once."""

    def __init__(self, result: StepResult, on_read: Callable[[np.ndarray], None], *, has_logprobs: bool) -> None:
        self._result, self._on_read, self._has_logprobs = result, on_read, has_logprobs

    def read(self) -> HostResult:
        """The one device-to-host copy of a step; a second one when somebody asked for log-probabilities."""
        counts = np.asarray(self._result.counts)
        logprobs = None
        if self._has_logprobs:
            out = self._result.logprobs
            logprobs = np.asarray(out.chosen), np.asarray(out.top), np.asarray(out.top_ids)
        self._on_read(counts[:, 0])
        return HostResult(counts[:, 2:], counts[:, 0], counts[:, 1], logprobs)


@dataclass(frozen=True)
class Program:
    """One compiled program, and how to run it over nothing but padding."""

    name: str
    is_plain: bool  # needed before anything can be served
    run: Callable[[], object]
    compile: Callable[[], object] | None = None  # into the compilation cache alone; may be called from any thread
    step: tuple[int, int, Tree | None] | None = None  # of a step: batch size, width, tree
    is_optional: bool = False  # a choice more


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
    ) -> None:
        """`trees` are the ways to make a step, None being plain decoding; the head is used where one of them asks for
        it. Without `has_constrained` the programs that token masks need are not compiled."""
        assert trees, "a runner needs at least one way to make a step"
        uses_head = any(tree is not None and tree.uses_head for tree in trees)
        assert head is not None or not uses_head, "a tree that asks for a head needs one"
        self.num_slots, self.max_model_len, self.page_size, self.num_pages = (
            num_slots,
            max_model_len,
            page_size,
            num_pages,
        )
        self.trees = tuple(trees)
        self._left_out: set[str] = set()
        self.has_constrained, self.place = has_constrained, Placement(mesh)
        self.is_deterministic, self._accepts_nothing = is_deterministic, False
        deepest = max((tree.depth for tree in trees if tree is not None), default=0)
        if is_deterministic:
            assert len(self.trees) == 1, "deterministic steps have one shape"
            assert deepest <= DETERMINISTIC_DEPTH
            deepest = DETERMINISTIC_DEPTH
            # plain decoding is a chain of which nothing may be accepted
            self._accepts_nothing = self.trees[0] is None
            self.trees = (self.trees[0] or chain(DETERMINISTIC_DEPTH, "ngram"),)
        self.config = StepConfig(
            target.config.for_length(max_model_len),
            head.config if head and uses_head else None,
            deepest,
            is_coupled=is_coupled,
            verified_depth=DETERMINISTIC_DEPTH if is_deterministic else 0,
        )
        self.layouts = make_layouts(target, head if uses_head else None, mesh)
        self.max_pages = -(-max_model_len // page_size)
        self.max_rows = CPU_ROWS if jax.default_backend() == "cpu" else DEVICE_ROWS
        self.chunks = prefill_chunks(target.config.is_recurrent)
        self.batch_sizes = (*(1 << i for i in range((num_slots - 1).bit_length())), num_slots)
        self.widths = page_widths(self.max_pages)
        if is_deterministic:
            self.chunks, self.batch_sizes, self.widths = self.chunks[:1], (num_slots,), (self.max_pages,)
        self._blank_tokens = self.place.put(TokenRows.zeros(1, target.config.vocab_size))
        self._everything_allowed = self.place.put(np.full((1, 1, -(-target.config.vocab_size // 8)), 255, np.uint8))
        self._initial_gains = np.asarray(lookup.initial_gains(1))[0]
        self._init_state = functools.partial(
            step.init_state,
            self.config,
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            max_pages=self.max_pages,
        )
        state, whole = self.place.state(jax.eval_shape(self._init_state)), self.place.whole
        if mesh is not None:  # the cache must not be whole on one device, not for a moment
            self._init_state = jax.jit(self._init_state, out_shardings=state)

        def bind(function: Callable[..., Any]) -> Callable[..., Any]:
            # function objects of their own: jit's cache belongs to the function, and runners must not share it
            return functools.partial(on_mesh(mesh, function), self.config)

        both, chunked, grown = (state, whole), ("chunk", "width"), ("tree", "width")
        self._admit = jax.jit(bind(_admit), donate_argnums=0, out_shardings=state)
        self._extend = jax.jit(bind(_extend), donate_argnums=0, out_shardings=whole)
        self._remember = jax.jit(bind(_remember), donate_argnums=0, out_shardings=state)
        self._consume = jax.jit(bind(_consume), donate_argnums=1, out_shardings=state)
        self._prefill = jax.jit(bind(_prefill), donate_argnums=1, static_argnames=chunked, out_shardings=both)
        self._decode = jax.jit(bind(_decode), donate_argnums=1, static_argnames="width", out_shardings=both)
        self._speculate = jax.jit(bind(_speculate), donate_argnums=1, static_argnames=grown, out_shardings=both)
        self._propose = jax.jit(bind(_propose), donate_argnums=1, static_argnames=grown, out_shardings=both)
        self._verify = jax.jit(bind(_verify), donate_argnums=1, static_argnames=grown, out_shardings=both)
        self.reset()
        self._state_shape = jax.tree.map(_shape, self.state)

    def reset(self) -> None:
        """Forget every sequence and every cached page: after a device error the donated buffers are gone."""
        self.state = self._init_state()
        # what the host can say without reading: upper bounds, the last one belongs to padding
        self._lens = [0] * (self.num_slots + 1)
        self._pending = [1] * (self.num_slots + 1)
        self._generation = [0] * (self.num_slots + 1)
        self._num_remembered = 0

    @property
    def max_step(self) -> int:
        """Tokens that one step can emit for a sequence, at most."""
        return 1 + max(tree.depth if tree else 0 for tree in self.trees)

    @property
    def cache_lag(self) -> int:
        """The last committed entries of a growing sequence, whose draft entries may not be written yet."""
        return self.config.max_pending if self.config.draft else 0

    def admit(
        self,
        slot: int,
        token_ids: Sequence[int],  # the prompt, and the answer so far
        pages: Sequence[int],
        num_cached: int,
        rows: SamplerRows,  # [1], see `options`
        tokens: TokenRows | None,  # None: no option names a token
        head_gain: float = 0.0,  # accepted tokens per step that the head promises
    ) -> None:
        """Start a sequence, of which the first `num_cached` tokens are in its pages already."""
        page_row: Any = np.full(self.max_pages, self.num_pages, np.int32)
        page_row[: len(pages)] = pages
        history: Any = np.zeros(self.max_pages * self.page_size, np.int32)
        history[: len(token_ids)] = token_ids
        gains: Any = self._initial_gains.copy()
        gains[lookup.HEAD] = head_gain
        if self._accepts_nothing:
            nothing: Any = np.zeros(1, np.int32)
            rows = dataclasses.replace(rows, max_depth=nothing)
        cached: Any = np.int32(num_cached)
        new = Admission(page_row, history, cached, rows, tokens or self._blank_tokens, gains)
        self.state = self._admit(self.state, self.place.scalar(slot), self.place.put(new))
        self._lens[slot] = num_cached
        self._pending[slot] = 1
        self._generation[slot] += 1

    def extend(self, new_pages: Sequence[tuple[int, int, int]]) -> None:
        """Give sequences more pages: (slot, which page of the sequence, page)."""
        for start in range(0, len(new_pages), _PAGES_AT_ONCE):
            entries = np.full((3, _PAGES_AT_ONCE), self.num_slots, np.int32)
            part = np.array(new_pages[start : start + _PAGES_AT_ONCE], np.int32).T
            entries[:, : part.shape[1]] = part
            table = self._extend(self.state.page_table, self.place.put(entries))
            self.state = dataclasses.replace(self.state, page_table=table)

    def prefill(
        self,
        slot: int,
        num_tokens: int,
        *,
        is_last: bool,
        has_logprobs: bool = False,
        allowed: np.ndarray | None = None,
    ) -> StepHandle:
        """Run the next tokens of a prompt (at most the largest of `chunks`). The drawn token counts after the last.
        `allowed` ([1, vocab] bool) says which tokens it may be."""
        chunk = next(chunk for chunk in self.chunks if chunk >= num_tokens)
        width = self._width(self._lens[slot] + num_tokens)
        result = self._run_prefill(slot, num_tokens, is_last, chunk, width, allowed)
        self._lens[slot] += num_tokens
        self._pending[slot] = 1
        return StepHandle(result, lambda _n_accepted: None, has_logprobs=has_logprobs)

    def _run_prefill(
        self, slot: int, num_tokens: int, is_last: bool, chunk: int, width: int, allowed: np.ndarray | None = None
    ) -> StepResult:
        bits = self._everything_allowed if allowed is None else self.place.put(np.packbits(allowed[None], axis=-1))
        self.state, result = self._prefill(
            self.layouts.many,
            self.state,
            self.place.slots((slot,)),
            self.place.slots((num_tokens,)),
            self.place.flag(is_last),
            bits,
            chunk=chunk,
            width=width,
        )
        return result

    def step(
        self, slots: Sequence[int], tree: Tree | None, *, has_logprobs: bool = False, is_following: bool = True
    ) -> StepHandle:
        """Dispatch one step for these slots, with one of `trees`. Where the draft need not follow, plain steps do not
        wait for it (`speculative.step.decode`)."""
        result = self._run_step(self._pad(slots), tree, self._prepare(slots, tree, is_following=is_following))
        return self._handle(slots, tree, result, has_logprobs=has_logprobs)

    def propose(self, slots: Sequence[int], tree: Tree | None) -> tuple[np.ndarray, np.ndarray, Proposal | None]:
        """The first half of a step with constrained sequences: token ids and parents of the proposed nodes, [batch,
        node], on the host; and the proposal for `verify`."""
        padded = self._pad(slots)
        self._prepare(slots, tree)
        if tree is None:
            nothing = np.zeros((len(slots), 1), np.int32)
            return nothing, nothing, None
        self.state, proposal = self._propose(
            self.layout_for(len(padded), tree), self.state, self.place.slots(padded), tree=tree, width=self.max_pages
        )
        return np.asarray(proposal.token_ids)[: len(slots)], np.asarray(proposal.parents)[: len(slots)], proposal

    def verify(
        self,
        slots: Sequence[int],
        tree: Tree | None,
        proposal: Proposal | None,
        allowed: np.ndarray,  # [batch, node, vocab] bool
        *,
        has_logprobs: bool = False,
    ) -> StepHandle:
        """The second half: only allowed tokens are drawn."""
        padded = self._pad(slots)
        bits = np.full((len(padded), allowed.shape[1], -(-allowed.shape[2] // 8)), 255, np.uint8)
        bits[: len(slots)] = np.packbits(allowed, axis=-1)
        result = self._run_verify(padded, tree, proposal, self.place.put(bits))
        return self._handle(slots, tree, result, has_logprobs=has_logprobs)

    def remember(self, slot: int, num_prompt: int) -> None:
        """Keep the end of a finished answer for lookups by others."""
        if any(tree is not None and tree.uses_recall for tree in self.trees):
            start = max(num_prompt, self._lens[slot] - lookup.RECALL_LENGTH)
            row = self._num_remembered % lookup.RECALL_ROWS
            self.state = self._remember(self.state, *map(self.place.scalar, (slot, start, row)))
            self._num_remembered += 1

    def _prepare(self, slots: Sequence[int], tree: Tree | None, *, is_following: bool = True) -> int:
        """Let the draft catch up where this step could not hold what is pending; returns the width of the step."""
        if self.config.draft and slots and (tree is not None or is_following):
            room = self.config.max_pending - 1 if tree is None else tree.depth + 1
            if max(self._pending[slot] for slot in slots) > room:
                padded = self._pad(slots)
                self.state = self._consume(self.layout_for(len(padded), tree), self.state, self.place.slots(padded))
                for slot in slots:
                    self._pending[slot] = 1
        return self.width_of(slots)

    def _handle(self, slots: Sequence[int], tree: Tree | None, result: StepResult, *, has_logprobs: bool) -> StepHandle:
        most = 1 + (tree.depth if tree else 0)
        for slot in slots:
            self._lens[slot] += most
            self._pending[slot] = min(self._pending[slot] + 1, self.config.max_pending) if tree is None else most
        generations = [self._generation[slot] for slot in slots]

        def on_read(n_accepted: np.ndarray) -> None:
            for slot, generation, accepted in zip(slots, generations, n_accepted.tolist(), strict=False):
                if self._generation[slot] == generation:
                    self._lens[slot] -= most - 1 - accepted

        return StepHandle(result, on_read, has_logprobs=has_logprobs)

    def batch_size_of(self, num_slots: int) -> int:
        """The batch bucket of so many slots."""
        return next(size for size in self.batch_sizes if size >= num_slots)

    def width_of(self, slots: Sequence[int]) -> int:
        """The width of the next step of these slots."""
        return self._width(max((self._lens[slot] for slot in slots), default=0) + 1)

    @property
    def deepest_tree(self) -> Tree | None:
        return max(self.trees, key=lambda tree: tree.depth if tree else 0)

    def _pad(self, slots: Sequence[int]) -> tuple[int, ...]:
        return (*slots, *[self.num_slots] * (self.batch_size_of(len(slots)) - len(slots)))

    def _run_step(self, padded: tuple[int, ...], tree: Tree | None, width: int) -> StepResult:
        layout, slots = self.layout_for(len(padded), tree), self.place.slots(padded)
        if tree is None:
            self.state, result = self._decode(layout, self.state, slots, None, width=width)
        else:
            self.state, result = self._speculate(layout, self.state, slots, tree=tree, width=width)
        return result

    def _run_verify(
        self, padded: tuple[int, ...], tree: Tree | None, proposal: Proposal | None, bits: jax.Array
    ) -> StepResult:
        layout, slots, width = self.layout_for(len(padded), tree), self.place.slots(padded), self.max_pages
        if tree is None:
            self.state, result = self._decode(layout, self.state, slots, bits, width=width)
        else:
            self.state, result = self._verify(layout, self.state, slots, proposal, bits, tree=tree, width=width)
        return result

    def layout_for(self, batch: int, tree: Tree | None) -> Weights:
        """The weights that a step of so many sequences takes."""
        depth = self.config.verified_depth or (tree.num_nodes if tree else 0)
        return self.layouts.for_rows(batch * (1 + depth))

    def _width(self, needed: int) -> int:
        """The narrowest compiled page table that holds so many entries."""
        pages = -(-needed // self.page_size)
        return next((width for width in self.widths if width >= pages), self.max_pages)

    def trees_for(self, batch_size: int) -> tuple[Tree | None, ...]:
        """The ways to make a step of this batch bucket that are compiled: the first always, the others if they fit."""
        return (*self.trees[:1], *(tree for tree in self.trees[1:] if tree is None or self._fits(tree, batch_size)))

    def _fits(self, tree: Tree, batch_size: int) -> bool:
        rows = batch_size * (1 + tree.num_nodes)
        if batch_size == 1 or rows <= self.max_rows:
            return True
        return self.max_rows == CPU_ROWS and tree.num_nodes == CPU_CHAIN and rows <= CPU_CHAIN_ROWS

    def programs(self) -> list[Program]:
        """Every program, cheapest first: plain decoding can serve when those that are `is_plain` have run once."""
        padding = self.num_slots
        found: list[Program] = [
            Program("admission", True, lambda: self.admit(0, (), (), 0, sampler_rows(SamplingParams(), 0), None)),
            Program("page table", True, lambda: self.extend([(padding, 0, 0)])),
        ]
        if any(tree is not None and tree.uses_recall for tree in self.trees):
            found.append(Program("recall", False, lambda: self.remember(0, 0)))
        for width in self.widths:
            context = f"contexts up to {width * self.page_size}"
            for chunk in self.chunks:
                run = functools.partial(self._run_prefill, padding, chunk, True, chunk, width)
                found.append(Program(f"prefill of {chunk}, {context}", True, run))
            for size in self.batch_sizes:
                for tree in self.trees_for(size):
                    run = functools.partial(self._run_step, (padding,) * size, tree, width)
                    name = f"{describe(tree)} for {size}, {context}"
                    compile_it = functools.partial(self._compile_step, size, tree, width)
                    shape = size, width, tree
                    found.append(Program(name, tree is None, run, compile_it, shape, tree not in self.trees[:1]))
        for size in self.batch_sizes:
            if self.config.draft and len(self.trees) > 1:  # one tree alone never leaves more than it can take
                for layout in self.layouts.distinct:
                    run = functools.partial(self._warm_consume, size, layout)
                    found.append(Program(f"catching up for {size}", True, run))
            if self.has_constrained:
                tree = self.constrained_tree(size)
                run = functools.partial(self._warm_constrained, size, tree)
                found.append(Program(f"constrained {describe(tree)} for {size}", tree is None, run))
        kept = [program for program in found if program.name not in self._left_out]
        return sorted(kept, key=lambda program: (not program.is_plain, program.is_optional))

    def has_room_for(self, program: Program) -> bool:
        """False for an optional program when the process may hardly map more memory; it is left out from then on."""
        free = free_memory_maps()
        if not program.is_optional or free is None or free > RESERVED_MAPS:
            return True
        if not self._left_out:
            logger.warning(
                "this process may map only %d more pieces of memory, so no more ways to speculate are compiled; raise "
                "the limit with: sysctl vm.max_map_count=1000000",
                free,
            )
        self._left_out.add(program.name)
        return False

    def constrained_tree(self, batch_size: int) -> Tree | None:
        """How steps with a constrained sequence speculate: the first way that is no plain step."""
        return next((tree for tree in self.trees_for(batch_size) if tree is not None), None)

    def _compile_step(self, size: int, tree: Tree | None, width: int) -> None:
        slots = _shape(self.place.slots((self.num_slots,) * size))
        layout = self.layout_for(size, tree)
        if tree is None:
            self._decode.lower(layout, self._state_shape, slots, None, width=width).compile()
        else:
            self._speculate.lower(layout, self._state_shape, slots, tree=tree, width=width).compile()

    def _warm_consume(self, size: int, layout: Weights) -> None:
        self.state = self._consume(layout, self.state, self.place.slots((self.num_slots,) * size))

    def _warm_constrained(self, size: int, tree: Tree | None) -> StepResult:
        vocab = self.config.target.vocab_size
        padded = (self.num_slots,) * size
        proposal, nodes = None, 1
        if tree is not None:
            layout = self.layout_for(size, tree)
            self.state, proposal = self._propose(
                layout, self.state, self.place.slots(padded), tree=tree, width=self.max_pages
            )
            nodes = 1 + (self.config.verified_depth or tree.num_nodes)
        bits = np.full((size, nodes, -(-vocab // 8)), 255, np.uint8)
        return self._run_verify(padded, tree, proposal, self.place.put(bits))

    def warmup(self) -> Iterator[str]:
        """Compile every program, yielding a name after each."""
        for program in self.programs():
            program.run()
            yield program.name

    @property
    def num_programs(self) -> int:
        return len(self.programs())

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; it must not grow after `warmup`."""
        jitted: tuple[Any, ...] = (
            self._admit,
            self._extend,
            self._remember,
            self._prefill,
            self._consume,
            self._decode,
            self._speculate,
            self._propose,
            self._verify,
        )
        return sum(program._cache_size() for program in jitted)


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    place = x.sharding if isinstance(x.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def prefill_chunks(is_recurrent: bool) -> tuple[int, ...]:
    """How many prompt tokens the prefill programs take."""
    chunks = CPU_CHUNKS if jax.default_backend() == "cpu" else DEVICE_CHUNKS
    return tuple(size for size in chunks if size <= RECURRENT_CHUNK or not is_recurrent)


def page_widths(max_pages: int) -> tuple[int, ...]:
    """The page-table widths that programs are compiled for."""
    widths = [_FIRST_WIDTH]
    while widths[-1] < max_pages:
        widths.append(widths[-1] * _WIDTH_GROWTH)
    return (*(width for width in widths if width < max_pages), max_pages)


def _admit(_config: StepConfig, state: SlotState, slot: jax.Array, new: Admission) -> SlotState:
    return step.admit(state, slot, new)


def _extend(_config: StepConfig, page_table: jax.Array, entries: jax.Array) -> jax.Array:
    """`entries` [3, n]: slot, column and page; a slot out of range is padding."""
    return page_table.at[entries[0], entries[1]].set(entries[2], mode="drop")


def _remember(_config: StepConfig, state: SlotState, slot: jax.Array, start: jax.Array, row: jax.Array) -> SlotState:
    return step.remember(state, slot, start, row)


def _prefill(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    slots: jax.Array,
    num_tokens: jax.Array,
    is_last: jax.Array,
    allowed: jax.Array,
    chunk: int,
    width: int,
) -> tuple[SlotState, StepResult]:
    return step.prefill(weights, config, state, slots, num_tokens, is_last, chunk, width, allowed)


def _consume(config: StepConfig, weights: Weights, state: SlotState, slots: jax.Array) -> SlotState:
    return step.consume(weights, config, state, slots)


def _decode(
    config: StepConfig, weights: Weights, state: SlotState, slots: jax.Array, allowed: jax.Array | None, width: int
) -> tuple[SlotState, StepResult]:
    return step.decode(weights, config, state, slots, width, allowed)


def _speculate(
    config: StepConfig, weights: Weights, state: SlotState, slots: jax.Array, tree: Tree, width: int
) -> tuple[SlotState, StepResult]:
    return step.speculate(weights, config, tree, state, slots, width)


def _propose(
    config: StepConfig, weights: Weights, state: SlotState, slots: jax.Array, tree: Tree, width: int
) -> tuple[SlotState, Proposal]:
    return step.propose_tree(weights, config, tree, state, slots, width)


def _verify(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    slots: jax.Array,
    proposal: Proposal,
    allowed: jax.Array,
    tree: Tree,
    width: int,
) -> tuple[SlotState, StepResult]:
    return step.verify_tree(weights, config, tree, state, slots, proposal, width, allowed)
