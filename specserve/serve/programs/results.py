"""Results on their way from the device to the host."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from specserve.speculative.step import StepResult


@dataclass(frozen=True)
class StepHandle:
    """Steps that have been dispatched to the device together, or a prompt's chunk. `read` or `read_each` waits for the
    result, and one of them may be called once."""

    result: StepResult
    rows: Callable[[int], list[int] | slice]  # of a batch of this size, those of the slots that were asked for
    on_read: Callable[[np.ndarray], None] = lambda _n_accepted: None  # called with what all steps accepted, [slot]
    num_steps: int = 0  # steps that the result has an axis of, before all others; 0: it has no such axis
    has_logprobs: bool = False
    has_tree: bool = False

    def read(self) -> StepResult:
        """Wait for the only step, and copy its result to the host. It is one copy, and others where the drafter gives
        a confidence, or where log-probabilities or the proposed tree were asked for. Raises what the device raises."""
        [result] = self.read_each()
        return result

    def read_each(self) -> list[StepResult]:
        """The same of each step that was made, the first one first: none is, once all sequences have stopped."""
        if not self.num_steps:
            results = [self._read(lambda x: x)]
        else:
            num_made = np.count_nonzero(np.asarray(self.result.counts)[: self.num_steps, 0, 0] >= 0)
            results = [self._read(operator.itemgetter(number)) for number in range(num_made)]
        if results:
            self.on_read(np.sum([result.n_accepted for result in results], axis=0))
        return results

    def _read(self, of_step: Callable[[np.ndarray], np.ndarray]) -> StepResult:
        def own(x: jax.Array) -> np.ndarray:  # the rows of the slots that were asked for
            host = of_step(np.asarray(x))  # JAX keeps its copy
            return host[self.rows(len(host))]

        result, logprobs, node_ids, parents = self.result, None, None, None
        if self.has_logprobs:
            logprobs = result.logprobs
        if self.has_tree:
            node_ids, parents = result.node_ids, result.parents
        asked = StepResult(result.counts, logprobs, result.prompt, node_ids, parents, result.confidence)
        return jax.tree.map(own, asked)
