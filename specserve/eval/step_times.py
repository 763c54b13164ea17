"""Where a speculative step's time goes: the draft's share is timed as a program of its own, the rest is the target's
forward, the draws and the commit."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specserve.errors import ConfigError
from specserve.serve.request import SamplingParams
from specserve.serve.runner import Runner
from specserve.speculative.propose import catch_up, propose
from specserve.speculative.step import SlotState, StepConfig, Weights
from specserve.speculative.tree import Proposal, Tree

COPY_BYTES = 256 << 20


@dataclass(frozen=True)
class StepTimes:
    """Medians, in milliseconds."""

    bound: float  # the target's weights over the copy bandwidth: no plain step of one sequence can be much faster
    step: float  # one whole speculative step, as the engine runs it
    draft: float  # catch up and propose
    plain: float  # one plain decoding step of the same batch

    @property
    def verify(self) -> float:
        return self.step - self.draft


def measure_steps(plain: Runner, speculative: Runner, *, context: int, repeats: int = 40) -> StepTimes:
    """Time steps of one sequence with `context` committed tokens, the three programs taking turns."""
    if speculative.tree is None or speculative.config.draft is None:
        raise ConfigError("there is no draft to time; give a head and a speculation other than off")
    needed = context + 3 * repeats * (speculative.tree.depth + 1)
    if needed > min(plain.max_model_len, speculative.max_model_len):
        raise ConfigError(f"timing at context {context} needs room for {needed} tokens")
    for runner in (plain, speculative):
        pages = list(range(-(-needed // runner.page_size)))
        runner.admit(0, pages, SamplingParams(temperature=0.0), 0)
        done = 0
        while done < context:
            chunk = min(context - done, 64)
            runner.prefill(0, tuple(range(1, chunk + 1)))
            done += chunk
    width = speculative.width_of([0])
    draft = jax.jit(functools.partial(_draft, speculative.config, speculative.tree, width))
    slots = jnp.zeros(1, jnp.int32)
    times: dict[str, list[float]] = {"plain": [], "step": [], "draft": []}
    for _ in range(repeats):
        times["plain"].append(_timed(lambda: plain.step([0])))
        times["step"].append(_timed(lambda: speculative.step([0])))
        times["draft"].append(
            _timed(lambda: jax.block_until_ready(draft(speculative.weights, speculative.state, slots)))
        )
    num_bytes = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(plain.weights.target)) - plain.weights.target.embedding.nbytes
    )
    bound = num_bytes / copy_bandwidth() * 1e3
    warm = {name: statistics.median(values[2:]) * 1e3 for name, values in times.items()}
    return StepTimes(bound=bound, step=warm["step"], draft=warm["draft"], plain=warm["plain"])


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of the best of ten passes over a large buffer."""
    buffer = jnp.ones(COPY_BYTES // 4, jnp.float32)
    update = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: fresh memory would time the page faults
    times = []
    for _ in range(11):
        begin = time.perf_counter()
        buffer = jax.block_until_ready(update(buffer))
        times.append(time.perf_counter() - begin)
    return 2 * COPY_BYTES / min(times[1:])


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _draft(
    config: StepConfig, tree: Tree, width: int, weights: Weights, state: SlotState, slots: jax.Array
) -> Proposal:
    """The draft's half of `speculative.step.speculate`."""
    assert config.draft
    assert weights.draft
    assert state.draft_pages
    table, seq_lens = state.page_table[slots], state.seq_lens[slots]
    pending = jax.tree.map(lambda x: x[slots], state.pending)
    rows = jax.tree.map(lambda x: x[slots], state.rows)
    read = table[:, :width]
    pages, hidden = catch_up(weights.draft, config.draft, state.draft_pages, table, read, seq_lens, pending)
    root_ids = pending.token_ids[:, 0]
    return propose(weights.draft, config.draft, tree, pages, read, seq_lens, root_ids, hidden, rows)
