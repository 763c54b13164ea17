"""A target in a process of its own, as Ray runs it (`target_service` asks it).

Nothing here imports JAX before the target is wanted: so a process that Ray starts gives signs of life within a second
or two, and goes on giving them while it imports, loads and compiles.
"""

import os
from typing import TYPE_CHECKING

import numpy as np

from specserve.cluster import Driver
from specserve.train.remote.messages import PrefillSpec, Sample

if TYPE_CHECKING:
    from specserve.train.remote.prefill import Prefill


class TargetActor:
    """The class of Ray's actor for a target. Calls run one after the other, but for `beat`."""

    def __init__(self, spec: PrefillSpec, driver: Driver) -> None:
        self._spec, self._driver = spec, driver
        self._prefill: Prefill | None = None

    def beat(self) -> None:
        """Answer, as a sign of life."""

    def prefill(self, token_ids: np.ndarray, document_ids: np.ndarray, position_ids: np.ndarray) -> Sample:
        """Run the target over packed rows [batch, seq]. The first call loads it, and raises ConfigError or
        CheckpointError where it cannot."""
        if self._prefill is None:
            from specserve.train.remote.prefill import Prefill

            self._driver.enter()
            self._prefill = Prefill(self._spec)
        return Sample(os.getpid(), token_ids, self._prefill(token_ids, document_ids, position_ids))
