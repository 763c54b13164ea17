"""The compiled programs and the state they run over. The only file of the server that calls `jax.jit`.

Shapes come from short lists (batch buckets, prefill chunks), so the set of programs is known at start; everything a
client sends is traced. A step over nothing but padding changes nothing, which is how programs are compiled early.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.head import Head
from specserve.checkpoints.load import Target
from specserve.kernels.matmul import Weight, block
from specserve.models.draft import DraftParams, token_embedding
from specserve.models.target import TargetParams, fuse_for_cpu
from specserve.serve.request import SamplingParams
from specserve.speculative import step
from specserve.speculative.propose import Draft
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.step import SlotState, StepConfig, StepResult, Weights
from specserve.speculative.tree import Tree
from specserve.speculative.vocab import DraftVocab

Params = TypeVar("Params", TargetParams, DraftParams)

PREFILL_CHUNKS = (64, 256)
_FIRST_WIDTH, _WIDTH_GROWTH = 8, 4  # of the page-table widths; each costs a set of programs, each step reads < 4x


@dataclass(frozen=True)
class HostResult:
    """One step's outcome on the host; row i belongs to the i-th slot asked for."""

    token_ids: np.ndarray  # [batch, depth + 1] int32
    n_accepted: np.ndarray  # [batch] int32

    def emitted(self, row: int) -> list[int]:
        return self.token_ids[row, : self.n_accepted[row] + 1].tolist()


class Runner:
    """A target, perhaps a head with a tree, and the paged state of `num_slots` sequences."""

    def __init__(
        self,
        target: Target,
        head: Head | None,
        tree: Tree | None,
        *,
        num_slots: int,
        max_model_len: int,
        page_size: int,
        num_pages: int,
    ) -> None:
        assert (head is None) == (tree is None), "a head needs a tree, and a tree a head"
        self.num_slots, self.max_model_len, self.page_size, self.num_pages = (
            num_slots,
            max_model_len,
            page_size,
            num_pages,
        )
        self.tree = tree
        self.config = StepConfig(target.config, head.config if head else None, tree.depth if tree else 0)
        self.weights = make_weights(target, head)
        self.max_pages = -(-max_model_len // page_size)
        self.batch_sizes = (*(1 << i for i in range((num_slots - 1).bit_length())), num_slots)
        self.widths = page_widths(self.max_pages)
        self._seq_lens = np.zeros(num_slots + 1, np.int64)  # host mirror of the state's; the last one is padding
        # a function object of its own, like the other two: jit's cache belongs to the function, and runners share it
        self._admit = jax.jit(functools.partial(step.admit), donate_argnums=0)
        self._prefill = jax.jit(functools.partial(_prefill, self.config), donate_argnums=1, static_argnames="width")
        self._step = jax.jit(functools.partial(_step, self.config, tree), donate_argnums=1, static_argnames="width")
        self.state = self._new_state()

    def _new_state(self) -> SlotState:
        return step.init_state(
            self.config,
            num_slots=self.num_slots,
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_pages=self.max_pages,
        )

    def reset(self) -> None:
        """Forget every sequence: after a device error the donated buffers are gone."""
        self.state = self._new_state()

    def admit(self, slot: int, pages: list[int], params: SamplingParams, seed: int) -> None:
        row = np.full(self.max_pages, self.num_pages, np.int32)
        row[: len(pages)] = pages
        self._seq_lens[slot] = 0
        self.state = self._admit(self.state, jnp.int32(slot), jnp.asarray(row), sampler_row(params, seed))

    def prefill(self, slot: int, token_ids: tuple[int, ...]) -> HostResult:
        """Run one chunk of a prompt (at most the largest of PREFILL_CHUNKS); the drawn token counts after the last."""
        chunk = next(chunk for chunk in PREFILL_CHUNKS if chunk >= len(token_ids))
        result = self._run_prefill(slot, token_ids, chunk, self.width_of([slot]))
        self._seq_lens[slot] += len(token_ids)
        return result

    def _run_prefill(self, slot: int, token_ids: tuple[int, ...], chunk: int, width: int) -> HostResult:
        padded = np.zeros((1, chunk), np.int32)
        padded[0, : len(token_ids)] = token_ids
        lens = jax.device_put(np.array([len(token_ids)], np.int32))
        chunk_ids = jax.device_put(padded)
        self.state, result = self._prefill(self.weights, self.state, _slot_array((slot,)), chunk_ids, lens, width=width)
        return _to_host(result)

    def step(self, slots: list[int]) -> HostResult:
        """One decoding step for these slots: speculative when there is a tree, plain otherwise."""
        batch_size = next(size for size in self.batch_sizes if size >= len(slots))
        result = self._run_step(slots, batch_size, self.width_of(slots))
        self._seq_lens[slots] += result.n_accepted[: len(slots)] + 1
        return result

    def _run_step(self, slots: list[int], batch_size: int, width: int) -> HostResult:
        padded = (*slots, *[self.num_slots] * (batch_size - len(slots)))
        self.state, result = self._step(self.weights, self.state, _slot_array(padded), width=width)
        return _to_host(result)

    def width_of(self, slots: list[int]) -> int:
        """The narrowest page table that holds all these slots have committed, and the draft's entry of the root."""
        needed = -(-(int(self._seq_lens[slots].max()) + 1) // self.page_size)
        return next((width for width in self.widths if width >= needed), self.max_pages)

    def warmup(self) -> Iterator[str]:
        """Compile every program, yielding a name after each."""
        self.admit(0, [], SamplingParams(), 0)
        yield "admission"
        for width in self.widths:
            context = f"contexts up to {width * self.page_size}"
            for chunk in PREFILL_CHUNKS:  # on a padded slot: the step computes, and writes nothing
                self._run_prefill(self.num_slots, (0,) * chunk, chunk, width)
                yield f"prefill of {chunk}, {context}"
            for size in self.batch_sizes:
                self._run_step([], size, width)
                yield f"step of {size}, {context}"

    @property
    def num_programs(self) -> int:
        return 1 + len(self.widths) * (len(PREFILL_CHUNKS) + len(self.batch_sizes))

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; it must not grow after `warmup`."""
        programs: tuple[Any, ...] = (self._admit, self._prefill, self._step)
        return sum(program._cache_size() for program in programs)


def make_weights(target: Target, head: Head | None) -> Weights:
    """Parameters as the step takes them. On CPU the layout follows the number of rows of a step: one row per sequence
    streams plain matrices best, a tree's rows stream blocked ones (see `kernels.matmul`)."""
    is_cpu = jax.default_backend() == "cpu"
    params = fuse_for_cpu(target.params) if is_cpu else target.params
    if head is None:
        return Weights(params, None)
    embedding = token_embedding(head.params, target.params.embedding)
    draft = head.params
    if is_cpu:
        params, draft = _block_matrices(params), _block_matrices(draft)
    return Weights(params, Draft(draft, DraftVocab(jnp.asarray(head.target_ids)), embedding))


def _block_matrices(params: Params) -> Params:
    """Block every matrix that is multiplied by; embeddings are looked up."""

    def cut(path: tuple, leaf: jax.Array) -> Weight:
        is_embedding = jax.tree_util.keystr(path[:1], simple=True) == "embedding"
        return block(leaf) if leaf.ndim == 2 and not is_embedding else leaf

    return jax.tree_util.tree_map_with_path(cut, params)


def sampler_row(params: SamplingParams, seed: int) -> SamplerRows:
    """One sequence's options, [1]. Negative seeds count as their two's complement."""
    word = 0xFFFFFFFF
    return SamplerRows(
        temperature=jnp.asarray([params.temperature], jnp.float32),
        top_k=jnp.asarray([params.top_k], jnp.int32),
        top_p=jnp.asarray([params.top_p], jnp.float32),
        min_p=jnp.asarray([params.min_p], jnp.float32),
        seed=jnp.asarray([[seed & word, seed >> 32 & word]], jnp.uint32),
    )


@functools.lru_cache(maxsize=4096)
def _slot_array(slots: tuple[int, ...]) -> jax.Array:
    """The same slots run step after step: their array is made once, and a step then sends nothing to the device."""
    return jax.device_put(np.array(slots, np.int32))


def page_widths(max_pages: int) -> tuple[int, ...]:
    """The page-table widths that programs are compiled for."""
    widths = [_FIRST_WIDTH]
    while widths[-1] < max_pages:
        widths.append(widths[-1] * _WIDTH_GROWTH)
    return (*(width for width in widths if width < max_pages), max_pages)


def _prefill(
    config: StepConfig,
    weights: Weights,
    state: SlotState,
    slots: jax.Array,
    token_ids: jax.Array,
    lens: jax.Array,
    width: int,
) -> tuple[SlotState, StepResult]:
    return step.prefill(weights, config, state, slots, token_ids, lens, width)


def _step(
    config: StepConfig, tree: Tree | None, weights: Weights, state: SlotState, slots: jax.Array, width: int
) -> tuple[SlotState, StepResult]:
    if tree is None:
        return step.decode(weights, config, state, slots, width)
    return step.speculate(weights, config, tree, state, slots, width)


def _to_host(result: StepResult) -> HostResult:
    """The one device-to-host read of a step."""
    return HostResult(np.asarray(result.token_ids), np.asarray(result.n_accepted))
