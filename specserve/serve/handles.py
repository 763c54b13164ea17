"""A step on its way, and what it brings back to the host."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specserve.speculative.step import StepResult


@dataclass(frozen=True)
class HostResult:
    """One step's outcome on the host; row i belongs to the i-th slot asked for."""

    token_ids: np.ndarray  # [batch, depth + 1] int32
    n_accepted: np.ndarray  # [batch] int32
    source: np.ndarray  # [batch] int32, who proposed: the head (0) or a lookup
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # chosen, top, top_ids; see `sampling.Logprobs`

    def emitted(self, row: int) -> list[int]:
        return self.token_ids[row, : self.n_accepted[row] + 1].tolist()


class StepHandle:
    """A step on its way. `read` waits for it, once."""

    def __init__(self, result: StepResult, on_read: Callable[[np.ndarray], None], *, has_logprobs: bool) -> None:
        self._result, self._on_read, self._has_logprobs = result, on_read, has_logprobs

    def read(self) -> HostResult:
        """The one device-to-host copy of a step; a second one when somebody asked for log-probabilities."""
        counts = np.asarray(self._result.counts)
        logprobs = None
        if self._has_logprobs:
            out = self._result.logprobs
            logprobs = np.asarray(out.chosen), np.asarray(out.top), np.asarray(out.top_ids)
        self._on_read(counts[:, 0])
        return HostResult(counts[:, 2:], counts[:, 0], counts[:, 1], logprobs)
