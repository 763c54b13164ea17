"""Acceptance measured by the code that serves: prefill and speculative steps of `speculative.step`, greedily, over a
small state of its own. Tau here is tau in production (a test holds the two equal)."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.errors import DataError
from specserve.mesh import on_mesh, whole
from specserve.models.config import DraftConfig
from specserve.models.draft import DraftParams, token_embedding
from specserve.speculative import step
from specserve.speculative.propose import Draft
from specserve.speculative.step import SlotState, StepConfig, StepResult, Weights
from specserve.speculative.tree import Tree
from specserve.speculative.vocab import DraftVocab

PAGE_SIZE = 32


@dataclass(frozen=True)
class Acceptance:
    """Pooled over all steps of all prompts."""

    num_steps: int
    accepted_per_depth: tuple[int, ...]

    @property
    def tau(self) -> float:
        """Tokens per target forward, the bonus included."""
        return 1.0 + sum(self.accepted_per_depth) / max(1, self.num_steps)

    @property
    def accept_rate(self) -> tuple[float, ...]:
        """Conditional acceptance at each depth: accepted there over accepted one depth above."""
        above = (self.num_steps, *self.accepted_per_depth[:-1])
        return tuple(n / max(1, m) for n, m in zip(self.accepted_per_depth, above, strict=True))


class AcceptanceMeter:
    """Greedy speculative decoding of fixed prompts with whatever head it is given."""

    def __init__(
        self,
        target: Target,
        config: DraftConfig,
        tree: Tree,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        mesh: Mesh | None = None,  # what the target is spread over
    ) -> None:
        """Compiles on first use, for all prompts as one batch."""
        if not prompts:
            raise DataError("acceptance needs at least one prompt")
        self._target, self._tree, self._prompts = target, tree, prompts
        self._max_new_tokens = max_new_tokens
        self._config = StepConfig(target.config, config, tree.depth)
        longest = max(map(len, prompts))
        self._max_pages = -(-(longest + max_new_tokens + tree.depth + 1) // PAGE_SIZE)
        prefill = functools.partial(on_mesh(mesh, _prefill), self._config)
        # over a mesh a part of the state may be made in one place and returned in another: nothing to reuse there
        donated = () if mesh is not None else (1,)
        self._prefill = jax.jit(prefill, donate_argnums=donated, static_argnames="chunk", out_shardings=whole(mesh))
        run = functools.partial(on_mesh(mesh, _step), self._config, tree)
        self._step = jax.jit(run, donate_argnums=donated, out_shardings=whole(mesh))

    def measure(self, params: DraftParams, target_ids: np.ndarray) -> Acceptance:
        embedding = token_embedding(params, self._target.params.embedding)
        weights = Weights(self._target.params, Draft(params, DraftVocab(jnp.asarray(target_ids)), embedding))
        count = len(self._prompts)
        state = step.init_state(
            self._config,
            num_slots=count,
            num_pages=count * self._max_pages,
            page_size=PAGE_SIZE,
            max_pages=self._max_pages,
        )
        pages = jnp.arange(count * self._max_pages, dtype=jnp.int32).reshape(count, self._max_pages)
        slots = jnp.arange(count, dtype=jnp.int32)
        lens = np.array([len(prompt) for prompt in self._prompts], np.int32)
        padded = np.zeros((count, lens.max()), np.int32)
        for row, prompt in enumerate(self._prompts):
            padded[row, : len(prompt)] = prompt
        history = state.history.at[:, : padded.shape[1]].set(padded)
        state = dataclasses.replace(state, page_table=pages, history=history)
        state, result = self._prefill(weights, state, slots, jnp.asarray(lens), chunk=padded.shape[1])
        eos = np.array(self._target.eos_ids)
        first = np.asarray(result.counts)[:, 2]
        num_new = np.ones(count, np.int64)
        is_open = ~np.isin(first, eos) & (num_new < self._max_new_tokens)
        num_steps, accepted = 0, np.zeros(self._tree.depth, np.int64)
        while is_open.any():
            # a finished sequence becomes a padded slot
            active = np.where(is_open, np.arange(count), count).astype(np.int32)
            state, result = self._step(weights, state, jnp.asarray(active))
            counts = np.asarray(result.counts)
            n_accepted, token_ids = counts[:, 0], counts[:, 2:]
            num_steps += int(is_open.sum())
            for row in np.flatnonzero(is_open):
                accepted[: n_accepted[row]] += 1
                emitted = token_ids[row, : n_accepted[row] + 1]
                num_new[row] += len(emitted)
                is_open[row] = not np.isin(emitted, eos).any() and num_new[row] < self._max_new_tokens
        return Acceptance(num_steps, tuple(int(n) for n in accepted))


def _prefill(
    config: StepConfig, weights: Weights, state: SlotState, slots: jax.Array, lens: jax.Array, chunk: int
) -> tuple[SlotState, StepResult]:
    is_last = jnp.ones(slots.shape, bool)
    return step.prefill(weights, config, state, slots, lens, is_last, chunk, state.page_table.shape[1])


def _step(
    config: StepConfig, tree: Tree, weights: Weights, state: SlotState, slots: jax.Array
) -> tuple[SlotState, StepResult]:
    return step.speculate(weights, config, tree, state, slots, state.page_table.shape[1])
