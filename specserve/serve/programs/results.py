"""The results of steps: in flight between the device and the host, and read."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from specserve.speculative.sampling import Scores
from specserve.speculative.step import StepResult


@dataclass(frozen=True)
class HostResult:
    """The result of one step, on the host. Row i belongs to the i-th slot that the step was asked for."""

    token_ids: np.ndarray  # [batch, depth + 1] int32
    n_accepted: np.ndarray  # [batch] int32
    source: np.ndarray  # [batch] int32, the source of the proposal: the head (0) or a lookup
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # chosen, top, top_ids; see `sampling.Logprobs`
    prompt: Scores | None = None  # of a scored chunk, arrays of NumPy
    node_ids: np.ndarray | None = None  # [batch, node] int32, the root and the proposed tokens, when asked for
    parents: np.ndarray | None = None  # [batch, node] int32, of the nodes
    confidence: np.ndarray | None = None  # [batch, depth] float32, see `tree.Proposal`; None where the draft gives none

    def emitted(self, row: int) -> list[int]:
        """The tokens that the step adds to a sequence: the accepted ones and the bonus token."""
        return self.token_ids[row, : self.n_accepted[row] + 1].tolist()


class StepHandle:
    """Steps that have been dispatched to the device together, or a prompt's chunk. `read` or `read_each` waits for the
    result, and one of them may be called once."""

    def __init__(
        self,
        result: StepResult,
        on_read: Callable[[np.ndarray], None],
        rows: Callable[[int], list[int] | slice],  # of a batch of this size, those of the slots that were asked for
        *,
        num_steps: int = 0,  # steps that the result has an axis of, before all others; 0: it has no such axis
        has_logprobs: bool,
        has_tree: bool = False,
    ) -> None:
        """`on_read` is called with the draft tokens that each of the slots accepted in all steps together, [slot]."""
        self._result, self._on_read, self._rows, self._num_steps = result, on_read, rows, num_steps
        self._has_logprobs, self._has_tree = has_logprobs, has_tree

    def read(self) -> HostResult:
        """Wait for the only step, and copy its result to the host. It is one copy, and others where the drafter says
        how sure it is, or where log-probabilities or the proposed tree were asked for. Raises what the device
        raises."""
        [result] = self.read_each()
        return result

    def read_each(self) -> list[HostResult]:
        """The same of each step that was made, the first one first: none is, once all sequences have stopped."""
        if not self._num_steps:
            results = [self._read(lambda x: x)]
        else:
            num_made = np.count_nonzero(np.asarray(self._result.counts)[: self._num_steps, 0, 0] >= 0)
            results = [self._read(operator.itemgetter(number)) for number in range(num_made)]
        if results:
            self._on_read(np.sum([result.n_accepted for result in results], axis=0))
        return results

    def _read(self, of_step: Callable[[np.ndarray], np.ndarray]) -> HostResult:
        def own(x: jax.Array) -> np.ndarray:  # the rows of the slots that were asked for
            host = of_step(np.asarray(x))  # JAX keeps its copy
            return host[self._rows(len(host))]

        result, logprobs = self._result, None
        counts = own(result.counts)
        if self._has_logprobs:
            logprobs = own(result.logprobs.chosen), own(result.logprobs.top), own(result.logprobs.top_ids)
        node_ids = parents = None
        if self._has_tree and result.node_ids is not None:
            node_ids = own(result.node_ids)
            above = np.maximum(np.arange(node_ids.shape[1], dtype=np.int32) - 1, 0)  # of a chain
            parents = np.broadcast_to(above, node_ids.shape) if result.parents is None else own(result.parents)
        prompt = jax.tree.map(own, result.prompt)
        confidence = None if result.confidence is None else own(result.confidence)
        return HostResult(
            counts[:, 2:], counts[:, 0], counts[:, 1], logprobs, prompt, node_ids, parents, confidence=confidence
        )
