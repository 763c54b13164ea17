"""The interface of a drafter with weights, beyond its steps (`speculative.drafter`): which parameters it has, how it
learns, what that costs, and how it lies on disk. A new drafter is a folder beside `eagle3` that implements it, and a
line in `registry`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from specserve.checkpoints.load import Target
from specserve.drafters.findings import DoctorReport, Repair
from specserve.drafters.settings import DraftSettings
from specserve.drafters.words import KindName
from specserve.mesh import put
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.pytree import pytree
from specserve.speculative.drafter import Drafter, DraftWeights
from specserve.speculative.vocab import DraftVocab

State = TypeVar("State")
Dialect = Literal["sglang", "vllm", "speculators", "sglang-jax"]  # engines whose layouts heads are written in


@pytree
class Rows:
    """A batch of packed rows to learn from."""

    token_ids: jax.Array  # [batch, seq] int32
    loss_mask: jax.Array  # [batch, seq] bool, True where the token is the assistant's
    document_ids: jax.Array  # [batch, seq] int32, 0 is padding
    position_ids: jax.Array  # [batch, seq] int32, restarting with each document
    features: Any = None  # what the target has to say about them, where that was captured (`train.features`)
    seeds: jax.Array | None = None  # [batch] uint32, other ones at every training step, for what is drawn at random


@dataclass(frozen=True)
class Rollout:
    """The settings of a rollout: how many tokens ahead a drafter learns to look, and what of it is kept for the
    backward pass."""

    length: int  # what `TrainedDrafter.num_steps` makes of the setting
    remat: bool  # each step is computed again in the backward pass
    anchors: int = 0  # of a drafter that learns at some positions of a row: at how many; 0: as many as suit it


@pytree
class Aims:
    """The tokens that the hidden states of a rollout predict, and the weights of these predictions. Column j of step k
    is one state."""

    weights: jax.Array  # [rollout, batch, n] float32, what a state counts in the loss of its step; 0: nothing
    # [rollout, batch, n] int32, the position of the row whose next token a state foresees; None: column j is about
    # position j in every step. Where there are positions, a column holds the guesses of one moment, in order
    positions: jax.Array | None = None


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
    """The costs of learning from one position of a row, without the output head."""

    flops: Flops  # forward and backward
    kept: int  # numbers that stay until the backward pass
    workspace: int  # numbers that one layer needs at once, attention's scores left out
    num_heads: int  # of attention
    num_kv_heads: int
    states: float = 1.0  # that each step of the rollout has for a position
    shares_output: bool = False  # its logits are made by the target's output head, which does not learn
    kv: float = 0.0  # numbers of the keys and values that queries of other positions see
    summed: float = 0.0  # numbers that devices with parts of the matrices add up, forward and backward
    routed: float = 0.0  # numbers that go to experts and come back, forward and backward
    has_one_teacher: bool = True  # the states of all steps about a position are compared with one distribution


class TrainedDrafter(Drafter, Protocol):
    """A drafter with weights: its shape and its switches, static and hashable."""

    @property
    def name(self) -> KindName:
        """The name of its kind in `registry`."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype that it is computed in."""
        ...

    @property
    def d_model(self) -> int:
        """The width of the hidden states that its logits are made of."""
        ...

    @property
    def max_len(self) -> int:
        """The number of tokens that a sequence can have at most."""
        ...

    @property
    def vocab_size(self) -> int:
        """The size of the target's vocabulary."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that it can propose."""
        ...

    def with_dtype(self, dtype: str) -> "TrainedDrafter":
        """Return the same drafter, computed in another dtype."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Return its shape and its switches by the names of `DraftSettings`, and other facts that are worth
        showing."""
        ...

    def spec(self) -> Any:
        """Return its parameters as `ParamSpec`s, with their names in our own layout."""
        ...

    def place(self, mesh: Mesh) -> Any:
        """Return where each parameter lives. A parameter that the mesh does not divide is whole on every device."""
        ...

    def first_params(self, target: Target, target_ids: np.ndarray, seed: int) -> Any:
        """Parameters to begin training with. `target_ids` [draft_vocab] int32 are the tokens that it can propose."""
        ...

    def num_steps(self, rollout: int) -> int:
        """Return how many tokens ahead it learns to look, where the settings ask for `rollout`."""
        ...

    def aims(self, rows: Rows, rollout: Rollout) -> Aims:
        """Return which tokens the states of `learn` predict, and which of these bear loss."""
        ...

    def learn(
        self,
        params: Any,  # in the drafter's dtype
        target: TargetParams,
        rows: Rows,
        aux_hidden_states: jax.Array,  # [batch, seq, taps * target_d_model], in the drafter's dtype
        rollout: Rollout,
    ) -> list[jax.Array]:  # rollout x [batch, n, d_model], what `logits` takes
        """The hidden states of every step of a rollout, as `aims` places them. A step may have states for the first
        columns alone, and later steps for fewer of them."""
        ...

    def output(self, params: Any) -> Any:
        """The parameters that make logits of hidden states: a tuple of matrices and vectors."""
        ...

    def logits(self, output: Any, target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        """The logits [..., draft_vocab] float32 of hidden states [..., d_model]. Some share the target's output
        head."""
        ...

    def also_learned(
        self,
        output: Any,
        target: TargetParams,
        hidden_states: jax.Array,  # [rollout, n, d_model]
        logits: jax.Array,  # [rollout, n, draft_vocab] float32, of them
        p: jax.Array,  # [rollout or 1, n, draft_vocab] float32, the target's distribution
    ) -> jax.Array | None:  # [rollout, n] float32, nats
        """Compute a loss of states beside that of their distribution, which counts where theirs does. None means that
        there is none."""
        ...

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        """Return what learning costs for one position of a row of `seq_len`; with a mesh the operations of each device
        that has the position."""
        ...


class Forgetful:
    """The part of `speculative.drafter.Drafter` that is alike in all drafters which keep no finished answers."""

    remembers = False

    def remember(self, state: State, history: jax.Array, start: jax.Array, last: jax.Array, number: jax.Array) -> State:
        del history, start, last, number
        return state

    def forget(self, state: State) -> State:
        return state


@dataclass(frozen=True)
class Head:
    """A drafter with its weights, for one target."""

    drafter: TrainedDrafter
    params: Any  # arrays in place of the `ParamSpec`s of `drafter.spec()`
    target_ids: np.ndarray  # [draft_vocab] int32, sorted

    def weights(self, place: Sharding | None = None) -> DraftWeights:
        """Return the weights and the vocabulary as steps take them."""
        return DraftWeights(self.params, DraftVocab(put(self.target_ids, place)))


class Kind(Protocol):
    """A kind of drafter: how it is made, and its files."""

    def suits(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Settings of training by dotted name that suit it better than the target's recipe does, beside those that the
        user has given."""
        ...

    @property
    def understands(self) -> frozenset[str]:
        """Return the `DraftSettings` that have a meaning for it, beside those that every kind has
        (`settings.COMMON`)."""
        ...

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        """Return whether a config.json is of a head of this kind."""
        ...

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> TrainedDrafter:
        """Make a drafter of the shape that the settings ask for, and of the target's where they say nothing. Raises
        ConfigError."""
        ...

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        """Read the shape of a head from its files, without its weights. Raises ConfigError or CheckpointError, also
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
        """List the properties of a head that the engine of a dialect does not compute."""
        ...

    def has_own_embedding(self, folder: Path) -> bool:
        """Return whether a head brings a token embedding along."""
        ...

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        """Return the head without the tensors that are the target's own, and a line for each of these."""
        ...

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        """List other readings of a head's files, which are tried by running the head."""
        ...

    def examine(self, folder: Path, target: Target | None) -> DoctorReport:
        """Check a head's files. Raises CheckpointError where there is nothing to look at."""
        ...


class HeadFiles(Protocol):
    """A module that reads and writes the files of heads; `Kind` says what its functions are for. Parameters come with
    the config of their drafter, and `target_ids` [draft_vocab] int32 with them."""

    def read_config(self, folder: Path, target: ModelConfig, target_name: str, /, *, dtype: str) -> Any: ...

    def load(
        self, folder: Path, target: Target, /, *, dtype: str, mesh: Mesh | None
    ) -> tuple[Any, Any, np.ndarray]: ...

    def head_files(
        self,
        config: Any,
        params: Any,
        target_ids: np.ndarray,
        target: Target,
        /,
        *,
        dtype: str,
        dialect: Dialect,
        target_name: str,
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]: ...

    def has_own_embedding(self, folder: Path, /) -> bool: ...

    def without_copies(self, config: Any, params: Any, target: Target, dtype: str, /) -> tuple[Any, Any, list[str]]: ...


class Configured(TrainedDrafter, Protocol):
    """A drafter that is made of its config alone."""

    def __init__(self, config: Any) -> None: ...

    @property
    def config(self) -> Any: ...


Own = TypeVar("Own", bound=Configured)


class FileKind(Generic[Own]):
    """The part of a `Kind` that is about files, where its drafters are made of a config alone."""

    def __init__(
        self,
        drafter: type[Own],
        files: HeadFiles,
        examine: Callable[[Path, Target | None], DoctorReport],
        list_repairs: Callable[[Path, Target], Iterable[Repair]],
        unknown_to: Callable[[Dialect, Any], list[str]],  # with the config of a drafter
    ) -> None:
        self._drafter, self._files = drafter, files
        self._examine, self._list_repairs, self._unknown_to = examine, list_repairs, unknown_to

    def own(self, drafter: TrainedDrafter) -> Own:
        """A drafter of this kind."""
        assert isinstance(drafter, self._drafter), f"a head of another kind: {drafter.name}"
        return drafter

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> Own:
        return self._drafter(self._files.read_config(folder, target, target_name, dtype=dtype))

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None) -> Head:
        config, params, target_ids = self._files.load(folder, target, dtype=dtype, mesh=mesh)
        return Head(self._drafter(config), params, target_ids)

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        parts = self.own(head.drafter).config, head.params, head.target_ids
        return self._files.head_files(*parts, target, dtype=dtype, dialect=dialect, target_name=target_name)

    def has_own_embedding(self, folder: Path) -> bool:
        return self._files.has_own_embedding(folder)

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        config = self.own(head.drafter).config
        config, params, changes = self._files.without_copies(config, head.params, target, dtype)
        return Head(self._drafter(config), params, head.target_ids), changes

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        return self._unknown_to(dialect, self.own(drafter).config)

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        return list(self._list_repairs(folder, target))

    def examine(self, folder: Path, target: Target | None) -> DoctorReport:
        return self._examine(folder, target)


def shift(x: jax.Array, by: int) -> jax.Array:
    """Return x[t + by] at t along axis 1, zero past the ends."""
    ahead, behind = max(by, 0), max(-by, 0)
    return jnp.pad(x[:, ahead : x.shape[1] - behind], [(0, 0), (behind, ahead)] + [(0, 0)] * (x.ndim - 2))
