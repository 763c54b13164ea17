"""The interface of a drafter with weights, beyond its steps (`speculative.drafter`): which parameters it has, how it
learns, what that costs, and how it lies on disk. A new drafter is a folder beside `eagle3` that implements it, and a
line in `registry`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from specserve.checkpoints.load import Target
from specserve.drafters.words import KindName
from specserve.mesh import put
from specserve.models.target import TargetParams
from specserve.pytree import pytree
from specserve.speculative.drafter import Drafter, DraftWeights
from specserve.speculative.vocab import DraftVocab

State = TypeVar("State")


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


def shift(x: jax.Array, by: int) -> jax.Array:
    """Return x[t + by] at t along axis 1, zero past the ends."""
    ahead, behind = max(by, 0), max(-by, 0)
    return jnp.pad(x[:, ahead : x.shape[1] - behind], [(0, 0), (behind, ahead)] + [(0, 0)] * (x.ndim - 2))
