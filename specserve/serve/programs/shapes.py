"""The shapes that programs are compiled for: short lists, so that all of them are known at start.

A step exists for each batch bucket, page-table width and tree; a prompt is prefilled in chunks of a few sizes.
Deterministic serving is the case in which every list has one entry.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from specserve.drafters.layers import windows_of
from specserve.drafters.speculation import describe
from specserve.drafters.words import OWN_TEXT
from specserve.errors import ConfigError
from specserve.kernels import native
from specserve.mesh import num_parts, program_kind, program_platform
from specserve.models.cache import WindowSizes
from specserve.models.config import ModelConfig
from specserve.serve.engine.pages import PagePool, Watcher
from specserve.serve.engine.state_places import StatePlaces
from specserve.serve.engine.windows import Windows, window_sizes
from specserve.serve.programs.batches import Batches
from specserve.serve.programs.placement import reads_by_page
from specserve.speculative.drafter import Drafter
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree, chain, depth_of

# Prompt tokens per prefill program. Native kernels leave padding out; where XLA multiplies on a CPU, it costs as much
# as tokens do.
NATIVE_CHUNKS, CPU_CHUNKS, DEVICE_CHUNKS = (64, 256), (16, 32, 64, 128, 256), (64, 256, 1024)
# Padding that is better than one program more: tokens of a prompt whose multiply-adds take as long as reading two bytes
# of each weight, 5 to 13 by the peaks and bandwidths of processors, 100 to 600 of accelerators.
CPU_EXTRA, DEVICE_EXTRA = 8, 256
RECURRENT_CHUNK = 256  # at most, with recurrent layers: each keeps tens of kilobytes per token of the chunk
_FIRST_WIDTH, _WIDTH_GROWTH = 8, 4  # of the page-table widths; each costs a set of programs, each step reads < 4x
CPU_ROWS, DEVICE_ROWS = 8, 512  # with a choice of trees, none makes a step of several sequences larger than this,
CPU_CHAIN, CPU_CHAIN_ROWS = 3, 64  # but for one chain on CPU, which pays in larger batches too (docs/log)
LEAST_BATCH = 8  # sequences of a step on an accelerator, padding among them (`make_batch_sizes`)
ONLY_DEPTH = 3  # of steps beside prompts or with masks: programs of their own, so one way to speculate for each batch
STEPS_AT_ONCE = 32  # of one kind; what the host does once for all of them is then little beside them
DEEP_AT_ONCE = 8  # of those over the deepest tree: pages are kept free for the tokens of so many
DETERMINISTIC_DEPTH = 7  # every step verifies a chain of this length, whatever was proposed


@dataclass(frozen=True)
class Shapes:
    """The static shapes of the steps of a server."""

    trees: tuple[Tree | None, ...]  # the ways to make a step; None is plain decoding
    num_slots: int
    max_model_len: int  # tokens of a sequence
    page_size: int  # tokens
    num_pages: int  # of all sequences together
    batch_sizes: tuple[int, ...]  # of the programs
    widths: tuple[int, ...]  # pages of each sequence that attention reads, the narrowest first
    chunks: tuple[int, ...]  # prompt tokens, the smallest first
    extra_tokens: int  # of a prompt, that take as long as each of its programs takes whatever its size
    max_rows: int  # nodes of a step of several sequences, where there is a choice of trees
    verified_depth: int = 0  # deterministic: every step verifies a chain of this length
    accepts_nothing: bool = False  # deterministic plain decoding: a chain of which nothing may be accepted
    num_ranks: int = 1  # data ranks: it divides slots, pages and every batch
    most_steps: int = 1  # steps that one call of a program makes, one after another
    prompt_tokens: int = 0  # of prompts side by side on a device, in one program; 0: one prompt
    kept_layers: tuple[int, ...] = ()  # layers of which requests may ask for hidden states
    kept_states: int = 0  # recurrent ones, of prefixes
    windows: WindowSizes = ()  # of the layers with a window that have pages of their own; none: no layer has
    leaves_draft: bool = False  # the target runs alone while speculation is far from paying, see `has_alone`
    is_mixing: bool = False  # there are programs that make a step and prefill prompts
    leaves_padding: bool = False  # out of products: it takes no time
    max_loras: int = 0  # adapters of the target that there is room for
    max_lora_rank: int = 0

    @property
    def is_deterministic(self) -> bool:
        return self.verified_depth > 0

    @property
    def uses_head(self) -> bool:
        """Return whether any of the ways to make a step asks for a head."""
        return any(tree is not None and tree.uses_head for tree in self.trees)

    @property
    def has_alone(self) -> bool:
        """Return whether there are plain steps and prefills of the target alone, beside a draft that reads later what
        they have run, if it is ever asked to propose."""
        is_simple = not self.windows and not self.is_mixing
        return self.leaves_draft and is_simple and self.trees[0] is None and self.uses_head

    @property
    def max_pages(self) -> int:
        """Pages of one sequence, at most."""
        return -(-self.max_model_len // self.page_size)

    @property
    def pages_of_rank(self) -> int:
        """Pages of each data rank, and so of all sequences that are bound to it together."""
        return self.num_pages // self.num_ranks

    def page_pool(self, watcher: Watcher | None = None, most: int | None = None) -> PagePool:
        """Return a pool of the pages, of which it hands out `most` in each data rank; None: all."""
        kept = None
        if self.kept_states:
            kept = StatePlaces(self.kept_states, math.lcm(self.chunks[-1], self.page_size))
        windows = Windows(self.windows, self.page_size, self.num_ranks)
        return PagePool(
            self.num_pages, self.page_size, watcher, num_ranks=self.num_ranks, most=most, kept=kept, windows=windows
        )

    def with_windows(self, target: ModelConfig, drafter: Drafter | None) -> "Shapes":
        """The shapes of a server that keeps only the pages of windows, in a target's layers that have one."""
        sizes = window_sizes(
            windows_of(target),
            num_slots=self.num_slots // self.num_ranks,
            num_pages=self.pages_of_rank,
            page_size=self.page_size,
            ahead=tokens_ahead(self.most_steps, self.max_step, drafter.max_pending(self.max_depth) if drafter else 0),
            chunks=self.chunks,
        )
        return dataclasses.replace(self, windows=sizes)

    @property
    def max_depth(self) -> int:
        """The depth of the deepest tree, or of the chain that every deterministic step verifies."""
        return max(self.verified_depth, *map(depth_of, self.trees))

    @property
    def max_step(self) -> int:
        """Tokens that one step can emit for a sequence, at most."""
        return 1 + max(map(depth_of, self.trees))

    @property
    def max_accepted(self) -> int:
        """Draft tokens that one step can accept, at most."""
        return 0 if self.accepts_nothing else self.max_step - 1

    @property
    def plain(self) -> Tree | None:
        """The way to step that serves before the others are compiled."""
        return None if None in self.trees else self.trees[0]

    @functools.cached_property
    def batches(self) -> Batches:
        """The rows that slots have in batches of these sizes."""
        return Batches(self.batch_sizes, self.num_slots, self.num_ranks)

    @functools.cached_property
    def step_sizes(self) -> tuple[int, ...]:
        """The numbers of sequences, rounded up, for which steps are chosen and timed: more than programs are made for
        where the padding of these takes no time."""
        return make_batch_sizes(self.num_slots) if self.leaves_padding else self.batch_sizes

    def made(self, step: StepProgram) -> StepProgram:
        """The program that makes a step of so many sequences."""
        return dataclasses.replace(step, batch=next(size for size in self.batch_sizes if size >= step.batch))

    def widths_for(self, num_entries: int) -> tuple[int, ...]:
        """The page-table widths that hold so many entries of a sequence, the narrowest first."""
        pages = -(-num_entries // self.page_size)
        return tuple(width for width in self.widths if width >= pages) or (self.max_pages,)

    def num_nodes(self, tree: Tree | None) -> int:
        """Nodes that the target runs over for each sequence, the root included."""
        return 1 + (self.verified_depth or (tree.num_nodes if tree else 0))

    def trees_for(self, batch_size: int) -> tuple[Tree | None, ...]:
        """The ways to make a step of so many sequences: the first always, the others if they fit."""
        return (*self.trees[:1], *(tree for tree in self.trees[1:] if tree is None or self._fits(tree, batch_size)))

    def _fits(self, tree: Tree, batch_size: int) -> bool:
        each = batch_size // self.num_ranks  # sequences that a device runs side by side
        rows = each * (1 + tree.num_nodes)
        if each == 1 or rows <= self.max_rows:
            return True
        return self.max_rows == CPU_ROWS and tree.num_nodes == CPU_CHAIN and rows <= CPU_CHAIN_ROWS

    @functools.cached_property
    def step_programs(self) -> Mapping[tuple[int, int], tuple[StepProgram, ...]]:
        """The steps that there are, one for each of `trees_for`, by their number of sequences and width."""
        sizes = itertools.product(self.step_sizes, self.widths)
        return {
            (size, width): tuple(self.step(size, width, tree) for tree in self.trees_for(size)) for size, width in sizes
        }

    def step(self, batch_size: int, width: int, tree: Tree | None) -> StepProgram:
        """The step over this tree; a plain one is the target's alone, where there is such a step."""
        return StepProgram(batch_size, width, tree, is_alone=tree is None and self.has_alone)

    @property
    def main_chunks(self) -> tuple[int, ...]:
        """The sizes of chunks that serve well enough, the largest first: every second one, where there are many."""
        return self.chunks[:: -2 if len(self.chunks) > 2 else -1]

    def readings(self) -> Iterator[StepProgram]:
        """Yield the programs by which the draft reads what the target has run alone, the largest chunks first, each of
        whole pages."""
        sizes = [-(-chunk // self.page_size) * self.page_size for chunk in self.main_chunks[:2]]
        for chunk in dict.fromkeys(sizes) if self.has_alone else ():
            yield StepProgram(1, self.widths[-1], kind="reading", chunk=chunk)

    def most_prompts(self, chunk: int) -> int:
        """The prompts of a data rank that one program runs chunks of this size of, at most."""
        return max(1, min(self.prompt_tokens // chunk, self.num_slots // self.num_ranks))

    def prefill(
        self, width: int, chunk: int, prompts: int = 1, *, is_scored: bool = False, is_alone: bool = False
    ) -> StepProgram:
        """The prefill of chunks of this size, of so many prompts for each data rank."""
        batch = prompts * self.num_ranks
        return StepProgram(batch, width, kind="prefill", chunk=chunk, is_scored=is_scored, is_alone=is_alone)

    def prefills(self, width: int, *, is_alone: bool = False) -> Iterator[StepProgram]:
        """Yield the prefills that are compiled: of each size of chunks for one prompt, and for as many as may be."""
        for chunk in self.chunks:
            for prompts in sorted({1, self.most_prompts(chunk)}):
                yield self.prefill(width, chunk, prompts, is_alone=is_alone)

    def mixed(self, batch_size: int, tree: Tree | None, prefill: StepProgram) -> StepProgram:
        """The program that makes a step of so many sequences, and does what a prefill does for others."""
        return dataclasses.replace(prefill, kind="mixed", batch=batch_size, tree=tree, prompts=prefill.batch)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """The batch buckets of steps beside prompts: every other one, since padding is little beside a prompt."""
        return self.batch_sizes[-1::-2][::-1] if self.is_mixing else ()

    def mixed_programs(self) -> Iterator[StepProgram]:
        """Yield the programs that make a step and prefill prompts, plainly and in the one other way (`only_tree`)."""
        for size in self.mixed_sizes:
            ways = dict.fromkeys((self.plain, self.only_tree(size) or self.plain))
            for tree, prefill in itertools.product(ways, self.prefills(self.widths[-1])):
                yield self.mixed(size, tree, prefill)

    def constrained_step(self, batch_size: int, tree: Tree) -> tuple[StepProgram, StepProgram]:
        """The proposal and the verification of a step with token masks."""
        sizes = batch_size, self.max_pages, tree
        return StepProgram(*sizes, kind="proposal"), StepProgram(*sizes, kind="verification")

    def is_plain(self, program: StepProgram) -> bool:
        """Return whether a program must always be there. The largest of plain decoding can serve everything; the
        smallest step serves one client without the rows of many, and every other size of chunks short prompts without
        the rows of long ones."""
        if program.kind == "prefill":
            return program in [self.prefill(self.widths[-1], chunk) for chunk in self.chunks[-1::-2]]
        if program.kind == "step":
            sizes = self.num_slots, min(self.batch_sizes)
            return program in [self.step(size, self.widths[-1], self.plain) for size in sizes]
        return program.kind in ("empty state", "admission", "page table", "recall", "kept state")

    def label(self, program: StepProgram) -> str:
        """Return the name of a program for people, in logs and in the files of costs."""
        way, contexts = describe(program.tree), f"contexts up to {program.width * self.page_size}"
        rows = program.prompts or program.batch
        prompts = f"{rows // self.num_ranks} x " if rows > self.num_ranks else ""
        if program.is_alone:
            contexts += ", the target alone"
        return {
            "step": f"{way} for {program.batch}, {contexts}",
            "prefill": f"prefill of {prompts}{program.chunk}, {contexts}",
            "reading": f"reading of {program.chunk} by the draft",
            "mixed": f"{way} for {program.batch} beside a prefill of {prompts}{program.chunk}, {contexts}",
            "scoring": "scoring of prompts",
            "catch-up": f"catching up for {program.batch}",
            "proposal": f"constrained {way} for {program.batch}: proposal",
            "verification": f"constrained {way} for {program.batch}: verification",
        }.get("scoring" if program.is_scored else program.kind, program.kind)

    def only_tree(self, batch_size: int) -> Tree | None:
        """Return the tree of steps that have programs of their own, beside a prompt or with a constrained sequence: the
        longest chain of up to ONLY_DEPTH, or else the first way that is no plain step."""
        trees = [tree for tree in self.trees_for(batch_size) if tree is not None]
        chains = [tree for tree in trees if tree.top_k == 1 and tree.depth <= ONLY_DEPTH]
        return max(chains, key=lambda tree: tree.depth) if chains else next(iter(trees), None)


def tokens_at_once(most_steps: int, max_step: int) -> int:
    """Return how many tokens the steps of one call may emit for a sequence: those of as many plain ones, or of
    DEEP_AT_ONCE of those that emit most, `max_step`."""
    return max(most_steps, min(most_steps, DEEP_AT_ONCE) * max_step)


def tokens_ahead(most_steps: int, max_step: int, cache_lag: int) -> int:
    """Return how far a sequence's pages reach beyond what of it could be cached, in tokens: the last entries that it
    has committed are not, the steps in flight may have brought more, and the next ones follow."""
    return cache_lag + 2 * tokens_at_once(most_steps, max_step)


def check_shared_out(what: str, number: int, num_ranks: int) -> None:
    """Check that each data rank can have as many of something as any other. Raises ConfigError."""
    if number % num_ranks:
        below = number // num_ranks * num_ranks
        raise ConfigError(
            f"{what} {number}: sequences and their pages are shared out over data x expert = {num_ranks} of the mesh, "
            f"so it must be a multiple of that; give {f'{below} or ' if below else ''}{below + num_ranks}"
        )


def make_shapes(
    trees: Sequence[Tree | None],
    target: ModelConfig,
    mesh: Mesh | None = None,
    *,
    num_slots: int,
    max_model_len: int,
    page_size: int,
    num_pages: int,
    is_deterministic: bool = False,
    kept_layers: tuple[int, ...] = (),
    kept_states: int = 0,
) -> Shapes:
    """Choose the shapes of a server's steps for a target on the default backend. `trees` are the ways to make a step,
    None being plain decoding. Deterministic steps take one tree at most, a chain of at most DETERMINISTIC_DEPTH. Raises
    ConfigError where the number of data ranks does not divide the slots or the pages."""
    num_ranks = num_parts(mesh, "batch")
    check_shared_out("--max-slots", num_slots, num_ranks)
    check_shared_out("number of cache pages", num_pages, num_ranks)
    assert trees, "a server needs at least one way to make a step"
    max_pages = -(-max_model_len // page_size)
    leaves_padding = native.is_available() and mesh is None and target.dtype == "float32" and target.keeps_zeros
    chunks, extra_tokens = prefill_chunks(max_model_len, leaves_padding, target.is_recurrent)
    batch_sizes = make_batch_sizes(num_slots, num_ranks, 1 if program_platform() == "cpu" else LEAST_BATCH)
    shapes = Shapes(
        trees=tuple(trees),
        num_slots=num_slots,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        batch_sizes=tuple(dict.fromkeys((*batch_sizes[::2], num_slots))) if leaves_padding else batch_sizes,
        widths=page_widths(max_pages),
        chunks=chunks,
        extra_tokens=extra_tokens,
        max_rows=CPU_ROWS if program_platform() == "cpu" else DEVICE_ROWS,
        num_ranks=num_ranks,
        kept_layers=kept_layers,
        kept_states=kept_states,
        most_steps=steps_at_once(program_platform(), is_v7x=program_kind() == "TPU7x"),
        # a CPU computes prompts one after another in the same time, and the first is done sooner
        prompt_tokens=0 if program_platform() == "cpu" else chunks[-1],
        leaves_padding=leaves_padding,
        # a run over tokens in the middle of a sequence then needs nothing but the entries before them
        leaves_draft=program_platform() == "cpu" and mesh is None and not (target.is_recurrent or target.chooses),
    )
    if is_deterministic:
        assert len(trees) == 1, "deterministic steps have one shape"
        tree = trees[0] or chain(DETERMINISTIC_DEPTH, OWN_TEXT)
        assert tree.depth <= DETERMINISTIC_DEPTH
        one_shape = {"trees": (tree,), "batch_sizes": (num_slots,), "widths": (max_pages,), "chunks": chunks[:1]}
        bounds = {"verified_depth": DETERMINISTIC_DEPTH, "accepts_nothing": trees[0] is None, "prompt_tokens": 0}
        return dataclasses.replace(shapes, **one_shape, **bounds)
    target = target.for_length(max_model_len)
    if not target.chooses and reads_by_page(target, num_pages, page_size, mesh):  # with any width
        # a CPU computes the rows of a prompt and of a step in the time of both
        is_mixing = program_platform() != "cpu" and not target.is_recurrent
        return dataclasses.replace(shapes, widths=(max_pages,), is_mixing=is_mixing)
    return shapes


def steps_at_once(platform: str, *, is_v7x: bool = False) -> int:
    """Return how many steps one call makes: several where they are made in a loop. XLA makes a GPU's host drive loops,
    unless its flags put them into CUDA graphs (+WHILE), which no GPU has timed; and before a loop of a TPU v7x it
    copies all weights into other tiles."""
    return 1 if platform == "gpu" or is_v7x else STEPS_AT_ONCE


def make_batch_sizes(num_slots: int, num_ranks: int = 1, least: int = 1) -> tuple[int, ...]:
    """The batch buckets of a server: powers of two for each data rank, and all slots. None is smaller than `least` for
    each rank, which costs accelerators nothing: they read the weights once for all rows, and XLA makes products of one
    row by other and slower operations, rounded otherwise than those of several."""
    each = num_slots // num_ranks
    return (*(num_ranks << i for i in range((each - 1).bit_length()) if 1 << i >= least), num_slots)


def prefill_chunks(max_model_len: int, leaves_padding: bool, is_recurrent: bool) -> tuple[tuple[int, ...], int]:
    """Return how many prompt tokens the prefill programs take, up to the size that holds the longest prompt; and
    `Shapes.extra_tokens`."""
    chunks, extra = (NATIVE_CHUNKS if leaves_padding else DEVICE_CHUNKS), DEVICE_EXTRA
    if program_platform() == "cpu" and not leaves_padding:
        chunks, extra = CPU_CHUNKS, CPU_EXTRA
    chunks = tuple(size for size in chunks if size <= RECURRENT_CHUNK or not is_recurrent)
    return tuple(size for i, size in enumerate(chunks) if not i or chunks[i - 1] < max_model_len), extra


def page_widths(max_pages: int) -> tuple[int, ...]:
    """The page-table widths that programs are compiled for."""
    widths = [_FIRST_WIDTH]
    while widths[-1] < max_pages:
        widths.append(widths[-1] * _WIDTH_GROWTH)
    return (*(width for width in widths if width < max_pages), max_pages)
