"""A step that has been dispatched, and the result that it brings back to the host."""

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
    source: np.ndarray  # [batch] int32, who proposed: the head (0) or a lookup
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # chosen, top, top_ids; see `sampling.Logprobs`
    prompt: Scores | None = None  # of a scored chunk, arrays of NumPy
    node_ids: np.ndarray | None = None  # [batch, node] int32, the root and the proposed tokens, when asked for
    parents: np.ndarray | None = None  # [batch, node] int32, of the nodes
    confidence: np.ndarray | None = None  # [batch, depth] float32, see `tree.Proposal`; None where the draft says none

    def emitted(self, row: int) -> list[int]:
        """The tokens that the step adds to a sequence: the accepted ones and the bonus token."""
        return self.token_ids[row, : self.n_accepted[row] + 1].tolist()

    def confidence_of(self, row: int) -> np.ndarray | None:  # [depth] float32
        """Return how sure the drafter was of a sequence's tree, or None where it does not say."""
        return None if self.confidence is None else self.confidence[row]


class StepHandle:
    """A step that has been dispatched to the device. `read` waits for its result and may be called once."""

    def __init__(
        self,
        result: StepResult,
        on_read: Callable[[np.ndarray], None],
        *,
        has_logprobs: bool,
        has_tree: bool = False,
    ) -> None:
        self._result, self._on_read = result, on_read
        self._has_logprobs, self._has_tree = has_logprobs, has_tree

    def read(self) -> HostResult:
        """Wait for the step and copy its result to the host. It is one copy, and others where the drafter says how
        sure it is, or where log-probabilities or the proposed tree were asked for. Raises what the device raises."""
        counts = np.asarray(self._result.counts)
        logprobs = None
        if self._has_logprobs:
            out = self._result.logprobs
            logprobs = np.asarray(out.chosen), np.asarray(out.top), np.asarray(out.top_ids)
        node_ids, parents = self._tree() if self._has_tree else (None, None)
        prompt = jax.tree.map(np.asarray, self._result.prompt)
        confidence = None if self._result.confidence is None else np.asarray(self._result.confidence)
        self._on_read(counts[:, 0])
        return HostResult(
            counts[:, 2:], counts[:, 0], counts[:, 1], logprobs, prompt, node_ids, parents, confidence=confidence
        )

    def _tree(self) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """Token ids and parents of the proposed nodes, [batch, node] int32; None of a plain step."""
        if self._result.node_ids is None:
            return None, None
        node_ids = np.asarray(self._result.node_ids)
        if self._result.parents is None:
            above = np.maximum(np.arange(node_ids.shape[1], dtype=np.int32) - 1, 0)
            return node_ids, np.broadcast_to(above, node_ids.shape)
        return node_ids, np.asarray(self._result.parents)
