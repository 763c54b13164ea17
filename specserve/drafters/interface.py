"""The interface of a drafter with weights: its shape and its parameters. `speculative.drafter` has what serving calls
and `learning` what training calls, with defaults. A new kind is a folder that implements what differs, and a line in
`registry` (docs/drafters.md has a whole one)."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from specserve.checkpoints.load import Quantization, Target, in_few_bits
from specserve.drafters.learning import Costs, Learning, Rollout, costs_of_matrices
from specserve.errors import ConfigError
from specserve.mesh import gathered, put, shardings
from specserve.models.config import ModelConfig
from specserve.models.params import on_device
from specserve.models.target import TargetParams
from specserve.speculative.drafter import Drafter, DraftWeights
from specserve.speculative.vocab import DraftVocab

Own = TypeVar("Own", bound="TrainedDrafter")


class TrainedDrafter(Learning, Drafter):
    """A drafter with weights: a frozen dataclass of its `config`, which is static and hashable."""

    config: Any
    # the field of `config` that has the sizes of its layers (d_model, vocab_size, max_len, dtype); empty: itself
    part: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The name of its kind in `registry`."""
        raise NotImplementedError

    @property
    def shape(self) -> Any:
        """The sizes of its layers."""
        return getattr(self.config, self.part) if self.part else self.config

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def dtype(self) -> str:
        """The dtype that it is computed in."""
        return self.shape.dtype

    @property
    def d_model(self) -> int:
        """The width of the hidden states that its logits are made of."""
        return self.shape.d_model

    @property
    def max_len(self) -> int:
        """The number of tokens that a sequence can have at most."""
        return self.shape.max_len

    @property
    def vocab_size(self) -> int:
        """The size of the target's vocabulary."""
        return self.shape.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that it can propose."""
        return self.config.draft_vocab_size

    def with_dtype(self: Own, dtype: str) -> Own:
        """Return the same drafter, computed in another dtype."""
        return self.with_shape(dtype=dtype)

    def with_shape(self: Own, **changes: Any) -> Own:
        """Return the drafter with other values of `shape`."""
        shape = dataclasses.replace(self.shape, **changes)
        return type(self)(dataclasses.replace(self.config, **{self.part: shape}) if self.part else shape)  # type: ignore[call-arg]

    def for_length(self: Own, length: int) -> Own:
        """Return the drafter for sequences of at most `length` tokens, which some rotary embeddings depend on."""
        return self

    def facts(self) -> Mapping[str, Any]:
        """Return its shape and its switches by the names of `registry.DraftSettings`, and other facts that are worth
        showing."""
        return dataclasses.asdict(self.shape) | {"vocab_size": self.draft_vocab_size}

    def spec(self) -> Any:
        """Return its parameters as `ParamSpec`s, with their names in our own layout."""
        raise NotImplementedError

    def place(self, mesh: Mesh) -> Any:
        """Return where each parameter lives. A parameter that the mesh does not divide is whole on every device."""
        counts = {"heads": "num_heads", "kv_heads": "num_kv_heads"}
        units = {axis: getattr(self.shape, name) for axis, name in counts.items() if hasattr(self.shape, name)}
        return shardings(self.spec(), mesh, units)

    def spec_on(self, mesh: Mesh | None) -> Any:
        """Return the `ParamSpec`s of the part of each parameter that one device of a mesh multiplies by; None: all of
        it."""
        return self.spec() if mesh is None else on_device(self.spec(), self.place(gathered(mesh)))

    def init_params(self, target: Target, target_ids: np.ndarray, seed: int) -> Any:
        """Return parameters to begin training with. `target_ids` [draft_vocab] int32 are the tokens that it can
        propose."""
        raise NotImplementedError

    def is_trained(self, target: Target) -> bool:
        """Return whether `init_params` takes what was trained with the target, which begins as it is."""
        return False

    def fit_states(self, params: Any, aux_hidden_states: jax.Array, is_token: jax.Array) -> Any:
        """Return new parameters that suit the sizes of the target's states: [batch, seq, taps * target_d_model] of the
        first rows, and which of these positions hold tokens [batch, seq] bool."""
        return params

    def scale_output(self, params: Any, scale: jax.Array) -> Any:
        """Return parameters whose logits are so many times as large, as a first loss needs it (`train.first`)."""
        return params

    def output(self, params: Any) -> Any:
        """Return the parameters that make logits of hidden states: a tuple of matrices and vectors."""
        return params.output

    def logits(self, output: Any, target: TargetParams, hidden_states: jax.Array) -> jax.Array:
        """Return the logits [..., draft_vocab] float32 of hidden states [..., d_model]. Some share the target's output
        head."""
        raise NotImplementedError

    def costs(self, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
        """Return what learning costs for one position of a row of `seq_len`; with a mesh the operations of each device
        that has the position. The default counts every matrix but those of the output once for each step."""
        return costs_of_matrices(self.spec_on(mesh), self.output(self.spec()), rollout)


@dataclass(frozen=True)
class Head:
    """A drafter with its weights, for one target."""

    drafter: TrainedDrafter
    params: Any  # arrays in place of the `ParamSpec`s of `drafter.spec()`
    target_ids: np.ndarray  # [draft_vocab] int32, sorted; see `DraftVocab` for this and the next
    draft_ids: np.ndarray | None = None

    def weights(self, place: Sharding | None = None) -> DraftWeights:
        """Return the weights and the vocabulary as steps take them."""
        return DraftWeights(self.params, put(DraftVocab(self.target_ids, self.draft_ids), place))  # type: ignore[arg-type]


def other_head(served: Head, params: Any, *, quantization: Quantization, mesh: Mesh | None) -> Head:
    """Return a head with other parameters in so many bits, as `checkpoints.update.other_target` does a target."""
    from specserve.checkpoints.update import checked  # needed where weights change alone

    if quantization == "stored":
        raise ConfigError("the head is served as its files store it, so give the folder of the new version")
    place = None if mesh is None else served.drafter.place(mesh)
    params = checked(params, served.drafter.spec(), "draft", served.drafter.dtype, place)
    if quantization != "none":
        params = in_few_bits(params, quantization)
    return dataclasses.replace(served, params=params)


def nothing(_given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no settings."""
    return {}


@dataclass(frozen=True)
class Kind:
    """A kind of drafter, as `registry` has it."""

    drafter: type[Any]  # a `TrainedDrafter`, made of its config alone
    # (settings, target's config, size of the draft vocabulary) -> the config of a drafter of the shape that the
    # settings ask for, and of the target's where they leave it open. Raises ConfigError
    new_config: Callable[[Any, ModelConfig, int], Any]
    # settings of training by dotted name that suit it better than the target's recipe does, beside those that are given
    suits: Callable[[Mapping[str, Any]], Mapping[str, Any]] = nothing

    def new(self, settings: Any, target: ModelConfig, draft_vocab_size: int) -> TrainedDrafter:
        """Make a drafter. Raises ConfigError."""
        return self.drafter(self.new_config(settings, target, draft_vocab_size))
