"""The messages between training and the processes that run its target. They import no JAX (see `target_actor`)."""

from dataclasses import dataclass

import numpy as np

LIFE = "life"  # the group of calls that are answered while others run


@dataclass(frozen=True)
class PrefillSpec:
    """The target that an actor is to load, and the outputs that it is to send."""

    target: str  # name, folder or hub id
    fingerprint: str  # of its files
    dtype: str
    quantization: str
    mesh: str
    is_checked: bool  # all of its weights are numbers
    aux_layers: tuple[int, ...]
    accumulate: int  # parts of a batch, one after the other, as the training step would run them
    transport: str


@dataclass(frozen=True)
class Sample:
    """The target's outputs on some rows, and the process that computed them."""

    process: int  # its id: another one after a restart
    token_ids: np.ndarray  # [batch, seq] int32, of which it was computed
    states: dict[str, np.ndarray]  # the fields of `features.States`, as bytes where NumPy has no such dtype
