"""What a drafter with weights says of itself beyond its steps (`speculative.drafter`): which parameters it has, how it
learns, what that costs, and how it lies on disk. A new drafter is a folder beside `eagle3` that says all this, and a
line in `registry`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.findings import Repair, Report
from specserve.drafters.settings import DraftSettings
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.pytree import pytree
from specserve.speculative.drafter import Drafter

Dialect = Literal["sglang", "vllm", "speculators", "sglang-jax"]  # engines whose layouts heads are written in
DIALECTS: tuple[Dialect, ...] = ("sglang", "vllm", "speculators", "sglang-jax")


@pytree
class Rows:
    """A batch of packed rows to learn from."""

    token_ids: jax.Array  # [batch, seq] int32
    loss_mask: jax.Array  # [batch, seq] bool, True where the token is the assistant's
    document_ids: jax.Array  # [batch, seq] int32, 0 is padding
    position_ids: jax.Array  # [batch, seq] int32, restarting with each document
    features: Any = None  # what the target has to say about them, where that was captured (`train.features`)


@dataclass(frozen=True)
class Rollout:
    """How many tokens ahead a drafter learns to look, and what of it is kept for the backward pass."""

    length: int
    remat: bool  # each step is computed again in the backward pass


@dataclass(frozen=True)
class Flops:
    """Floating point operations: those that any implementation must do, and those of this one."""

    useful: float
    executed: float

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.useful + other.useful, self.executed + other.executed)

    def __mul__(self, factor: float) -> "Flops":
        return Flops(self.useful * factor, self.executed * factor)


@dataclass(frozen=True)
class Costs:
    """What it takes to learn from one position of a row, the output head left out."""

    flops: Flops  # forward and backward
    kept: int  # numbers that stay until the backward pass
    workspace: int  # numbers that one layer needs at once, attention's scores left out
    num_heads: int  # of attention
    num_kv_heads: int


class TrainedDrafter(Drafter, Protocol):
    """A drafter with weights: its shape and its switches, static and hashable."""

    @property
    def name(self) -> str:
        """The name of its kind in `registry`."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype that it is computed in."""
        ...

    @property
    def d_model(self) -> int:
        """Width of the hidden states that its logits are made of."""
        ...

    @property
    def max_len(self) -> int:
        """Tokens of a sequence that it can follow."""
        ...

    @property
    def vocab_size(self) -> int:
        """The target's."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that it can propose."""
        ...

    def with_dtype(self, dtype: str) -> "TrainedDrafter":
        """The same, computed in another dtype."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Its shape and its switches by the names of `DraftSettings`, and what else is worth showing."""
        ...

    def spec(self) -> Any:
        """Its parameters as `ParamSpec`s, with their names in our own layout."""
        ...

    def place(self, mesh: Mesh) -> Any:
        """Where each parameter lives; what does not divide is whole on every device."""
        ...

    def first_params(self, target: Target, target_ids: np.ndarray, seed: int) -> Any:
        """Parameters to begin training with. `target_ids` [draft_vocab] int32 are the tokens that it can propose."""
        ...

    def weights(self, params: Any, target: TargetParams, target_ids: jax.Array) -> Any:
        """What its steps take as `Weights.draft`: its parameters, what it shares of the target's, its vocabulary."""
        ...

    def loss_weights(self, rows: Rows, length: int) -> jax.Array:  # [rollout, batch, seq] float32
        """For each step of a rollout, where it foresees a token that bears loss: 1 at the position whose next token
        that is, 0 elsewhere."""
        ...

    def learn(
        self,
        params: Any,  # in the drafter's dtype
        target: TargetParams,
        rows: Rows,
        aux_hidden_states: jax.Array,  # [batch, seq, taps * target_d_model], in the drafter's dtype
        rollout: Rollout,
    ) -> list[jax.Array]:  # rollout x [batch, seq, d_model], what `logits` takes
        """The hidden states of every step of a rollout, each at the position whose next token it foresees."""
        ...

    def output(self, params: Any) -> Any:
        """The parameters that make logits of hidden states: a tuple of matrices and vectors."""
        ...

    def logits(self, output: Any, hidden_states: jax.Array) -> jax.Array:
        """The logits [..., draft_vocab] float32 of hidden states [..., d_model]."""
        ...

    def costs(self, rollout: Rollout, seq_len: int) -> Costs:
        """What learning costs for one position of a row of `seq_len`."""
        ...


@dataclass(frozen=True)
class Head:
    """A drafter with its weights, for one target."""

    drafter: TrainedDrafter
    params: Any  # arrays in place of the `ParamSpec`s of `drafter.spec()`
    target_ids: np.ndarray  # [draft_vocab] int32, sorted


class Kind(Protocol):
    """A kind of drafter: how it is made, and its files."""

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        """Whether a config.json is of a head of this kind."""
        ...

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> TrainedDrafter:
        """A drafter of the shape that the settings ask for, and of the target's where they say nothing. Raises
        ConfigError."""
        ...

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        """What the files of a head say of its shape; no weights are read. Raises ConfigError or CheckpointError, also
        where it belongs to another target."""
        ...

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None) -> Head:
        """A head in any dialect. Raises as `read` does."""
        ...

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The tensors and the config.json of a head in a dialect. Raises CheckpointError."""
        ...

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        """What of a head the engine that a dialect is for does not compute."""
        ...

    def has_own_embedding(self, folder: Path) -> bool:
        """Whether a head brings a token embedding along."""
        ...

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        """The head without what it has of the target's own, and what that was, one line each."""
        ...

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        """What a head's files might mean instead of what they say, to be tried by running it."""
        ...

    def examine(self, folder: Path, target: Target | None) -> Report:
        """What is wrong with a head's files. Raises CheckpointError where there is nothing to look at."""
        ...


def shift(x: jax.Array, by: int) -> jax.Array:
    """x[t + by] at t along axis 1, zero past the ends."""
    ahead, behind = max(by, 0), max(-by, 0)
    return jnp.pad(x[:, ahead : x.shape[1] - behind], [(0, 0), (behind, ahead)] + [(0, 0)] * (x.ndim - 2))
