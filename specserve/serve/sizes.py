"""The sizes of a server: sequences at once, tokens of each, pages of the cache.

What is set decides. Where neither slots nor cache are set, a CPU, which has other work to do, gets a few slots with
pages for a whole sequence each. An accelerator is there to be filled: the cache takes what the weights, the slots and
the programs' intermediate results leave of its memory, there are as many slots as that has tokens for, and a sequence
may be as long as the target allows.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.speculation import drafter_for
from specserve.errors import ConfigError
from specserve.kernels.pages import default_page_size
from specserve.mesh import (
    LOGICAL_TO_MESH,
    SERVING_AXES,
    free_memory,
    in_equal_parts,
    mesh_sizes,
    num_parts,
    on_each_device,
    program_platform,
)
from specserve.models.config import ModelConfig
from specserve.models.mixers import compressed, indexer
from specserve.serve.programs.placement import bytes_per_page, pages_in, state_bytes
from specserve.serve.programs.shapes import LEAST_BATCH, Shapes, make_shapes
from specserve.serve.settings import ServeRun
from specserve.speculative.program import StepProgram
from specserve.speculative.slot_state import StepConfig
from specserve.speculative.tree import Tree

FEW_SLOTS = 8  # of a CPU, and beside a cache of a size that was set
LARGEST_DEFAULT_CONTEXT = 4096  # where each slot has pages of its own
MOST_SLOTS = 256  # of a data rank of accelerators
TOKENS_EACH = 1024  # of the cache, for each of its slots; where there are fewer, so are the slots
UNPLANNED = 0.02  # of the free memory: the programs themselves, and gaps between arrays
KEPT_BITS = 6  # of the number of pages: a little less memory at the next start takes the programs of this one
# arrays of the size of a step's logits that stand beside one another (as they are, constrained, counts of what was
# seen, left by top-k, probabilities, the bits of both in their order, noise), and of a layer's scores of a chunk of a
# prompt
LOGITS_AT_ONCE, SCORES_AT_ONCE = 8, 4
HIDDEN_AT_ONCE = 8  # arrays in float32 of the size of a chunk's hidden states
TILE_ROWS = 8  # of float32 on a TPU, at most; a sequence's rows of logits are filled up to whole tiles


@dataclass(frozen=True)
class ServerSizes:
    """The sizes that were chosen."""

    num_slots: int
    max_model_len: int  # tokens of a sequence, prompt and answer together
    num_pages: int  # of all data ranks together
    set_aside: int = 0  # bytes of each device that programs may take beside the state, where the cache fills the rest


@dataclass(frozen=True)
class Served:
    """The models that sizes are chosen for, and the ways to make a step with them."""

    target: ModelConfig
    drafter: TrainedDrafter | None
    trees: Sequence[Tree | None]
    mesh: Mesh | None

    @property
    def num_ranks(self) -> int:
        """The number of data ranks, which share out slots and pages evenly."""
        return num_parts(self.mesh, "batch")

    def shapes(self, run: ServeRun, sizes: ServerSizes) -> Shapes:
        """The shapes of the steps of a server of these sizes. Raises ConfigError."""
        shapes = make_shapes(
            self.trees,
            self.target,
            self.mesh,
            num_slots=sizes.num_slots,
            max_model_len=sizes.max_model_len,
            page_size=page_size(run),
            num_pages=sizes.num_pages,
            is_deterministic=run.deterministic,
            kept_layers=run.hidden_states,
            kept_states=num_kept_states(self.target, sizes.num_slots, run.kept_states) if run.prefix_cache else 0,
        )
        if run.max_loras:
            shapes = dataclasses.replace(shapes, max_loras=run.max_loras, max_lora_rank=run.max_lora_rank)
        return shapes.with_windows(self.target, drafter_for(self.trees, self.drafter))


def num_kept_states(target: ModelConfig, num_slots: int, asked: int = 0) -> int:
    """Return how many recurrent states of prefixes a server of so many slots keeps where prefixes are cached: as many
    as its settings ask for, unless these are 0."""
    return (asked or max(FEW_SLOTS, num_slots // 4)) if target.is_recurrent else 0


def page_size(run: ServeRun) -> int:
    """Return the tokens of a page."""
    return run.page_size or default_page_size(program_platform())


def is_filled(run: ServeRun) -> bool:
    """Return whether the cache takes all memory that is left."""
    return program_platform() != "cpu" and not (run.max_slots or run.cache_tokens or run.cache_gb or run.cache_fraction)


def most_slots(run: ServeRun) -> int:
    """Return the slots that a server of these settings has at most, on whatever devices. Raises ConfigError where
    `--mesh` names none."""
    devices = mesh_sizes(run.mesh, SERVING_AXES)
    return run.max_slots or MOST_SLOTS * math.prod(devices.get(axis, 1) for axis in LOGICAL_TO_MESH["batch"])


def longest_sequence(config: ModelConfig, max_model_len: int) -> int:
    """Return the most tokens that a sequence may have where each slot has pages of its own: as many as the settings
    say, or 0 for the target's own limit."""
    return max_model_len or min(config.max_len, LARGEST_DEFAULT_CONTEXT)


def choose_sizes(served: Served, run: ServeRun, set_aside: int | None = None) -> ServerSizes:
    """Choose the sizes for models that are loaded. `set_aside` is what programs need beside the state on each device,
    where the cache fills the rest; None: an estimate. Raises ConfigError."""
    context = served.target.max_len
    longest = run.max_model_len or (context if is_filled(run) else longest_sequence(served.target, 0))
    if longest > context:
        raise ConfigError(f"--max-model-len {longest}: the target's context is {context}")
    if longest < 2:
        raise ConfigError("--max-model-len must be at least 2: one token to ask, one to answer")
    if is_filled(run):
        return _filled(served, run, longest, set_aside)
    num_slots = run.max_slots or in_equal_parts(served.mesh, "batch", FEW_SLOTS)
    return ServerSizes(num_slots, longest, _num_pages(served, run, num_slots, longest))


def largest_programs(shapes: Shapes) -> Iterator[StepProgram]:
    """Yield the programs that need most memory beside the state: the step of most rows, the longest prompt's, and both
    in one where there are such programs."""

    def size(program: StepProgram) -> tuple[int, int]:
        rows = program.batch * shapes.num_nodes(program.tree) + program.prompts * program.chunk
        return rows, program.width

    yield max(itertools.chain.from_iterable(shapes.step_programs.values()), key=size)
    yield shapes.prefill(shapes.widths[-1], shapes.chunks[-1])
    if shapes.is_mixing:
        yield max(shapes.mixed_programs(), key=size)


def estimated_temporaries(target: ModelConfig, shapes: Shapes, mesh: Mesh | None) -> int:
    """Estimate the bytes that programs of these shapes need on each device beside their arguments. Accelerators read
    pages where they are, so no prompt's scores are of more than its own chunk. The entries of all layers stay until the
    last one has run (`speculative.step`)."""
    step, prefill, *_ = largest_programs(shapes)
    nodes = shapes.num_nodes(step.tree)
    if program_platform() == "tpu":
        tile = min(TILE_ROWS, 1 << (nodes - 1).bit_length())
        nodes = -(-nodes // tile) * tile
    rows = step.batch // shapes.num_ranks * nodes
    heads, chunk = on_each_device(mesh, "heads", target.num_heads), prefill.chunk
    logits, scores = LOGITS_AT_ONCE * rows * target.vocab_size, SCORES_AT_ONCE * chunk * chunk * heads
    entries = bytes_per_page(target, None, rows + chunk, mesh)
    if width := copied_width(target):  # a copy of the pages of a layer, and scores of all heads
        copied = step.batch // shapes.num_ranks * shapes.max_pages * shapes.page_size * width
        entries += 4 * (copied + 2 * indexer.SCORES_AT_ONCE)
    return 4 * max(logits, scores, HIDDEN_AT_ONCE * chunk * target.num_streams * target.d_model) + entries


def copied_width(target: ModelConfig) -> int:
    """Return the numbers of a token in the pages of layers that take a copy of them; 0: none does."""
    kinds = [target.kind(i) for i in range(target.num_layers)]
    pooled = [kind for kind in kinds if kind.mixer == "compressed" and kind.pool]
    # beside the copy, keys and gates of the pools, twice where these overlap
    found = [(4 if kind.has_indexer else 3) * compressed.entry_dim(target, kind) for kind in pooled]
    if target.latent and target.latent.index_topk:
        found.append(target.latent.entry_dim)
    if target.block_index and target.block_index.top:
        found.append(target.num_kv_heads * (target.key_dim + target.value_dim))
    return max(found, default=0)


def _free(served: Served, run: ServeRun) -> int:
    """Return the bytes of each device that are free once adapters have theirs, twice while one is loaded."""
    free = free_memory(served.mesh)
    if not run.max_loras:
        return free
    from specserve.models.adapters import bytes_of  # no other server needs it

    return free - 2 * bytes_of(served.target, run.max_loras, run.max_lora_rank)


def _filled(served: Served, run: ServeRun, longest: int, set_aside: int | None) -> ServerSizes:
    """The most slots of which each has a share of the cache, and the cache in all the memory that is left."""
    ranks, tokens, target = served.num_ranks, page_size(run), served.target.for_length(longest)
    whole, free = -(-longest // tokens), _free(served, run)
    drafter, each = drafter_for(served.trees, served.drafter and served.drafter.for_length(longest)), MOST_SLOTS
    models = target, drafter, served.mesh
    while True:
        sizes, aside = ServerSizes(each * ranks, longest, each * ranks * whole), set_aside
        shapes = served.shapes(run, sizes)
        if aside is None:
            aside = estimated_temporaries(target, shapes, served.mesh)
        config = StepConfig(
            target,
            drafter,
            shapes.max_depth,
            kept_states=shapes.kept_states,
            verified_depth=shapes.verified_depth,
        )
        of_slots = state_bytes(config, served.mesh, each * ranks, 0, page_size=tokens, max_pages=whole)
        left = free - round(UNPLANNED * free) - aside - of_slots
        pages = pages_in(left, *models, page_size=tokens, windows=shapes.windows, most=each * whole)
        if each <= LEAST_BATCH or pages * tokens >= each * min(longest, TOKENS_EACH):
            break
        each //= 2
    pages = max(1, min(pages, sizes.num_pages // ranks))  # `check_state_fits` refuses what does not fit
    unkept = max(0, pages.bit_length() - KEPT_BITS)
    pages = pages >> unkept << unkept
    if not run.max_model_len:
        longest = min(longest, pages * tokens)
    return ServerSizes(each * ranks, longest, pages * ranks, aside)


def _num_pages(served: Served, run: ServeRun, num_slots: int, longest: int) -> int:
    """Return the pages of all data ranks together, each of which has the same number. By default every slot can have
    a sequence of the longest, which ends in the middle of a page where the pages' size does not divide it."""
    tokens, whole = page_size(run), in_equal_parts(served.mesh, "batch", num_slots * -(-longest // page_size(run)))
    if run.cache_tokens or not (run.cache_gb or run.cache_fraction):
        return in_equal_parts(served.mesh, "batch", -(-run.cache_tokens // tokens)) or whole
    available = int(run.cache_gb * 1e9) if run.cache_gb else int(run.cache_fraction * _free(served, run))
    target, drafter = served.target.for_length(longest), served.drafter and served.drafter.for_length(longest)
    per_page = bytes_per_page(target, drafter, tokens, served.mesh)
    slots, ranks = in_equal_parts(served.mesh, "batch", num_slots), served.num_ranks
    shapes = served.shapes(run, ServerSizes(slots, longest, available // max(1, per_page) * ranks))
    models, sizes = (target, drafter, served.mesh), {"page_size": tokens, "windows": shapes.windows}
    pages = pages_in(available, *models, **sizes, most=whole // ranks)
    if pages < 1:
        raise ConfigError(
            f"the cache may take {available:,} bytes, and one page of {tokens} tokens takes {per_page:,}: "
            "raise --cache-gb or --cache-fraction, or lower --page-size"
        )
    return pages * served.num_ranks
