"""Results on their way from the device to the host."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from specserve.speculative.slot_state import StepResult


@dataclass(frozen=True)
class StepHandle:
    """Steps that have been dispatched to the device together, or a prompt's chunk. `read` or `read_each` waits for the
    result, and one of them may be called once."""

    result: StepResult  # the parts that are to be read
    rows: list[int] | slice  # of the batch, those of the slots that were asked for
    on_read: Callable[[np.ndarray], None] = lambda _n_accepted: None  # called with what all steps accepted, [slot]
    num_steps: int = 0  # steps that the result has an axis of, before all others; 0: it has no such axis

    @property
    def is_done(self) -> bool:
        """Return whether the device has made them, so that to read them is not to wait."""
        counts: Any = self.result.counts
        return isinstance(counts, np.ndarray) or counts.is_ready()

    def read(self) -> StepResult:
        """Wait for the only step, and copy its result to the host. It is one copy, and others where the drafter gives
        a confidence, or where log-probabilities or the proposed tree were asked for. Raises what the device raises."""
        [result] = self.read_each()
        return result

    def read_each(self) -> list[StepResult]:
        """The same of each step that was made, the first one first: none is, once all sequences have stopped."""
        host = jax.tree.map(np.asarray, self.result)
        if not self.num_steps:
            host = jax.tree.map(lambda array: array[None], host)
        num_made = int(np.count_nonzero(host.counts[: max(self.num_steps, 1), 0, 0] >= 0))
        made = jax.tree.map(lambda array: array[:num_made, self.rows], host)
        if num_made:
            self.on_read(made.n_accepted.sum(axis=0))
        leaves, form = jax.tree.flatten(made)
        return [jax.tree.unflatten(form, each) for each in zip(*leaves, strict=True)]


def asked_parts(result: StepResult, *, has_logprobs: bool = False, has_tree: bool = False) -> StepResult:
    """Return a result without the parts that nobody has asked for, which the host then does not copy."""
    if not has_logprobs:
        result = dataclasses.replace(result, logprobs=None)
    if not has_tree:
        result = dataclasses.replace(result, node_ids=None, parents=None)
    return result
