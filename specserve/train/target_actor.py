"""A target in a process of its own, as Ray runs it (`target_service` asks it).

Nothing here imports JAX before the target is wanted: so a process that Ray starts gives signs of life within a second
or two, and goes on giving them while it imports, loads and compiles.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specserve.cluster import Driver

if TYPE_CHECKING:
    from specserve.train.prefill import Prefill

LIFE = "life"  # the group of calls that are answered while others run


@dataclass(frozen=True)
class Wanted:
    """The target that an actor is to load, and the outputs that it is to send."""

    target: str  # name, folder or hub id
    fingerprint: str  # of its files
    dtype: str
    quantization: str
    mesh: str
    is_checked: bool  # that all of its weights are numbers
    aux_layers: tuple[int, ...]
    accumulate: int  # parts of a batch, one after the other, as the training step would run them
    transport: str


@dataclass(frozen=True)
class Sample:
    """The target's outputs on some rows, and the process that computed them."""

    process: int  # its id: another one after a restart
    token_ids: np.ndarray  # [batch, seq] int32, of which it was computed
    states: dict[str, np.ndarray]  # the fields of `features.States`, as bytes where NumPy has no such dtype


class TargetActor:
    """The class of Ray's actor for a target. Calls run one after the other, but for `beat`."""

    def __init__(self, wanted: Wanted, driver: Driver) -> None:
        self._wanted, self._driver = wanted, driver
        self._prefill: Prefill | None = None

    def beat(self) -> None:
        """Answer, as a sign of life."""

    def prefill(self, token_ids: np.ndarray, document_ids: np.ndarray, position_ids: np.ndarray) -> Sample:
        """Run the target over packed rows [batch, seq]. The first call loads it, and raises ConfigError or
        CheckpointError where it cannot."""
        if self._prefill is None:
            from specserve.train.prefill import Prefill

            self._driver.enter()
            self._prefill = Prefill(self._wanted)
        return Sample(os.getpid(), token_ids, self._prefill(token_ids, document_ids, position_ids))
