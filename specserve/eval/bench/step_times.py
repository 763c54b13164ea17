"""The parts of a step's time, and the least that the machine could take. The draft's share is timed as a program of
its own; the rest is the target's forward, the draws and the commit. The bound is the time that reading the weights
takes."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from specserve.errors import ConfigError
from specserve.host import num_cores
from specserve.models.target import TargetParams
from specserve.serve.engine.options import sampler_rows
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import DEEP_AT_ONCE
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.costs import within_burst
from specserve.speculative.program import StepProgram
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.tree import Tree

BUFFER_BYTES = 256 << 20
DEVICE_BUFFER_BYTES = 1 << 30
QUEUED = 16  # passes that an accelerator makes in a row: the host takes long to start one, and to hear of its end
PASSES = 7
STRETCH = 12  # steps in which nothing else runs
LEAD = 2  # of them, which find caches as another program has left them, and are not counted


@dataclass(frozen=True)
class StepTimes:
    """The median times of the steps of one sequence, in milliseconds."""

    bound: float  # the target's weights over the read bandwidth: no plain step can be faster
    step: float  # one whole speculative step, as the engine runs it
    draft: float  # catch up and propose
    plain: float  # one plain decoding step

    @property
    def verify(self) -> float:
        """The time of a speculative step without its draft."""
        return self.step - self.draft

    def to_json(self) -> dict[str, float]:
        return {
            "bound_ms": self.bound,
            "plain_ms": self.plain,
            "speculative_ms": self.step,
            "draft_ms": self.draft,
            "verify_ms": self.verify,
        }


def measure_steps(
    plain: Runner,
    speculative: Runner,
    *,
    context: int,
    repeats: int = 7,
    bandwidth: float | None = None,
) -> StepTimes:
    """Time steps of one sequence with about `context` committed tokens: `repeats` stretches of each of the three
    programs, in turns, or as many and as many tokens as fit. No engine may run over the runners; both forget all
    sequences. The speculative one's first tree is timed. Raises ConfigError."""
    tree = speculative.shapes.trees[0]
    if tree is None or not tree.uses_head:
        raise ConfigError("there is no draft to time; give a head, and a chain or a tree as the speculation")
    longest = min(plain.shapes.max_model_len, speculative.shapes.max_model_len)
    room = longest - tree.depth - 2
    repeats = max(1, min(repeats, room // 2 // steps_timed(0) - 1))
    context = min(context, room - steps_timed(repeats))
    if context < 1:
        raise _no_room(longest, repeats)
    for runner in (plain, speculative):
        fill(runner, context, context + longest - room + steps_timed(repeats))
    plain_step, draft, step = _medians(
        repeats,
        lambda: _run_ahead(plain, None, 1),
        lambda: _run_drafts(speculative, tree, 1),
        lambda: _run_ahead(speculative, tree, 1),
    )
    for runner in (plain, speculative):
        runner.reset()
    bound = bytes_read(plain.inputs.layout_for(1, None).target) / (bandwidth or read_bandwidth())
    return StepTimes(bound=bound * 1e3, step=step * 1e3, draft=draft * 1e3, plain=plain_step * 1e3)


def time_step(runner: Runner, tree: Tree | None, *, context: int, batch: int, repeats: int) -> tuple[float, float]:
    """The median seconds of a step with `batch` sequences of about `context` committed tokens each, each step being
    dispatched before the one before it is read; and of them, the draft's, timed as a program of its own (0 of a plain
    step): `repeats` stretches of each, or as many as fit. No engine may run over the runner, which forgets all
    sequences. Raises ConfigError."""
    depth, draft = 0, 0.0
    if tree is not None:
        depth = tree.depth
    longest = runner.shapes.max_model_len
    repeats = min(repeats, (longest - context - 2 - depth) // steps_timed(0) - 1)
    if repeats < 1:
        raise _no_room(longest, 1)
    fill(runner, context, context + steps_timed(repeats) + 2 + depth, batch)
    [step] = _medians(repeats, lambda: _run_ahead(runner, tree, batch))
    if tree is not None:
        fill(runner, context, context + 2 + depth, batch)
        [draft] = _medians(repeats, lambda: _run_drafts(runner, tree, batch))
    runner.reset()
    return step, draft


def _medians(repeats: int, *runs: Callable[[], float]) -> list[float]:
    """Return the median of what each run measures, in turns with the others. The first turn, which compiles or touches
    memory, does not count."""
    found = [[run() for run in runs] for _ in range(repeats + 1)]
    return [statistics.median(each) for each in zip(*found[1:], strict=True)]


def _no_room(longest: int, repeats: int) -> ConfigError:
    return ConfigError(f"timing steps takes {steps_timed(repeats)} tokens; --max-model-len {longest} is too little")


def steps_timed(repeats: int) -> int:
    """Return how many tokens so many timed stretches, and the one before them, add to their sequences."""
    return (repeats + 1) * (STRETCH + DEEP_AT_ONCE)


def _run_ahead(runner: Runner, tree: Tree | None, batch: int) -> float:
    """Seconds of a step, in a stretch of them: as many at once as the engine would dispatch, up to DEEP_AT_ONCE. It
    runs steps of one kind for long, and a step that follows another program takes longer than one that follows its
    like, a plain one by a fifth."""
    slots, begin = runner.shapes.batches.spread(batch), time.perf_counter()
    for _ in range(LEAD):
        runner.step(slots, tree).read()
    most = min(runner.most_steps(StepProgram(tree=tree)), DEEP_AT_ONCE)
    at_once = within_burst((time.perf_counter() - begin) / LEAD, most)
    number = max(1, (STRETCH - LEAD) // at_once)
    handle = runner.step(slots, tree, num_steps=at_once)
    for i in range(number):
        following = runner.step(slots, tree, num_steps=at_once)
        handle.read_each()
        if not i:
            begin = time.perf_counter()
        handle = following
    handle.read_each()
    return (time.perf_counter() - begin) / (number * at_once)


def _run_drafts(runner: Runner, tree: Tree, batch: int) -> float:
    """Seconds of a draft for the first slots, in a stretch of them."""
    slots, bounds = runner.shapes.batches.spread(batch), runner.bounds
    padded, width = runner.shapes.batches.pad(slots), bounds.width_of(slots)
    program = StepProgram(len(padded), width, tree, kind="proposal")
    runner.compile(program)  # so that it is not counted as a program that a step missed

    def run_draft() -> None:  # no later step depends on a proposal
        jax.block_until_ready(runner.run(program, padded))

    return statistics.mean([_timed(run_draft) for _ in range(STRETCH)][LEAD:])


def fill(runner: Runner, context: int, needed: int, batch: int = 1) -> None:
    """Bring sequences with room for `needed` tokens into the first slots. Their steps emit one token each, so that the
    context stays what it is."""
    num_pages, pool = -(-needed // runner.shapes.page_size), runner.shapes.page_pool()
    vocab_size = runner.config.target.vocab_size
    runner.reset()
    for slot in runner.shapes.batches.spread(batch):
        token_ids = [1 + (i + 17 * slot) % (vocab_size - 1) for i in range(context)]
        rows = sampler_rows(SamplingParams(temperature=0.0, speculation=0), 0, context)
        prefill(runner, slot, token_ids, pool.allocate(num_pages, rank=runner.shapes.batches.rank_of(slot)), rows)


def prefill(
    runner: Runner, slot: int, token_ids: Sequence[int], pages: Sequence[int], rows: SamplerRows
) -> int:  # the token after the prompt
    """Run a prompt through a slot, in chunks."""
    runner.admit(slot, token_ids, pages, 0, rows, None)
    done = 0
    while True:
        num_tokens = min(len(token_ids) - done, runner.shapes.chunks[-1])
        done += num_tokens
        result = runner.prefill([(slot, num_tokens, done == len(token_ids))]).read()
        if done == len(token_ids):
            return int(result.token_ids[0, 0])


def bytes_read(params: TargetParams) -> int:
    """Count the bytes of the target's weights that a step reads: all but an embedding that is only looked up."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if params.head is not None:
        total -= params.embedding.nbytes
    return total


def read_bandwidth(num_bytes: int = 0) -> float:
    """Measure how many bytes per second all cores together read from memory, or the first device does: the best pass
    over a large buffer, by the fastest of several reductions. 0 bytes: as many as suit the device."""
    on_cpu = jax.default_backend() == "cpu"
    num_bytes = num_bytes or (BUFFER_BYTES if on_cpu else DEVICE_BUFFER_BYTES)
    if not on_cpu:
        buffer = jnp.ones(num_bytes // 4, jnp.float32)
        total = jax.jit(jnp.sum)
        return QUEUED * num_bytes / _best([lambda: jax.block_until_ready([total(buffer) for _ in range(QUEUED)])])
    num_threads = num_cores()
    parts = np.ones((num_threads, num_bytes // num_threads // 8 * 2), np.float32)
    reductions: list[Callable[[np.ndarray], object]] = [
        np.max,
        lambda x: np.dot(x, x),
        lambda x: np.bitwise_or.reduce(x.view(np.uint64)),
    ]
    with ThreadPoolExecutor(num_threads) as pool:  # numpy reduces without the interpreter's lock
        return num_bytes / _best([lambda reduce=reduce: list(pool.map(reduce, parts)) for reduce in reductions])


def _best(runs: Sequence[Callable[[], object]]) -> float:
    return min(_timed(run) for _ in range(PASSES) for run in runs)


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
