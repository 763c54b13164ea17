"""The frozen target's outputs on rows, small enough to be kept. Tapped hidden states are in 8 or 4 bits, with a scale
for each tap of a token. The distribution over the draft vocabulary is kept as its likeliest tokens and the mass of the
rest."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from specserve.data.loader import Loader
from specserve.drafters.learning import Rows
from specserve.kernels.rows import Documents
from specserve.mesh import program_platform
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams, forward
from specserve.pytree import pytree, static
from specserve.speculative.vocab import DraftVocab
from specserve.train.chunked_loss import HiddenStates, chunk_length

Format = Literal["int8", "int4", "fp8"]
Transport = Literal["exact", "int8", "fp8"]
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}  # of a code


def states_of_rows(
    params: TargetParams, config: ModelConfig, rows: Rows, aux_layers: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:  # [batch, seq, taps * d_model] and [batch, seq, d_model]
    """Run the frozen target over packed rows: its taps at these layers, and its last hidden states."""
    documents = Documents(rows.document_ids)
    out = forward(params, config, rows.token_ids, rows.position_ids, documents, aux_layers=aux_layers)
    assert out.aux_hidden_states is not None
    return out.aux_hidden_states, out.hidden_states


class FeatureSource(Protocol):
    """A source from which training takes the frozen target's outputs, instead of running the target's layers."""

    @property
    def needs_head(self) -> bool:
        """Return whether the target's output head is needed to make a teacher of the features."""
        ...

    def next_features(self, loader: Loader) -> Any:
        """Return the features of the rows that the loader hands out next, as NumPy arrays in a pytree with an
        `aux_hidden_states()` and a `teacher`. Raises a SpecServeError where they are missing or wrong."""
        ...

    def close(self) -> None:
        """Free the files, processes or memory that the source holds."""
        ...


@pytree
class TopK:
    """A teacher whose likeliest tokens are known, and of the others in the draft vocabulary only their mass, which is
    spread evenly over them."""

    draft_ids: jax.Array  # [batch, seq, k], likeliest first
    probs: jax.Array  # [batch, seq, k]
    rest: jax.Array  # [batch, seq]
    is_drafted: jax.Array  # [batch, seq] bool: the target's best token is the first of them

    def distribution(
        self, target: TargetParams, config: ModelConfig, vocab: DraftVocab
    ) -> tuple[jax.Array, jax.Array]:  # see `chunked_loss.Teacher`
        del target, config
        draft_ids, size = self.draft_ids.astype(jnp.int32), vocab.target_ids.shape[0]
        num_others = max(size - draft_ids.shape[-1], 1)
        p = jnp.broadcast_to(self.rest.astype(jnp.float32)[..., None] / num_others, (*draft_ids.shape[:-1], size))
        p = jnp.put_along_axis(p, draft_ids, self.probs.astype(jnp.float32), axis=-1, inplace=False)
        return p, jnp.where(self.is_drafted, draft_ids[..., 0], -1)


@pytree
class Features:
    """The captured features of a batch of rows."""

    codes: jax.Array  # [batch, seq, tap, d_model] int8 or float8; int4: uint8, channel i and i + d_model / 2 in one
    scale: jax.Array  # [batch, seq, tap] float32
    teacher: TopK
    format: Format = static()

    def aux_hidden_states(self) -> jax.Array:  # [batch, seq, taps * d_model] float32
        states = decode(self.codes, self.scale, self.format)
        return states.reshape(*states.shape[:2], -1)


@pytree
class States:
    """The target's outputs on a batch of rows that a training step needs: hidden states as they were, or in 8 bits
    with a scale for each token's tap and last state."""

    taps: jax.Array  # [batch, seq, tap, d_model] of the target's dtype, int8 or float8
    hidden_states: jax.Array  # [batch, seq, d_model] likewise, after the final norm
    tap_scale: jax.Array | None  # [batch, seq, tap] float32; None: exact
    hidden_scale: jax.Array | None  # [batch, seq] float32
    format: Transport = static()
    dtype: str = static()  # the target's

    @classmethod
    def of(
        cls,
        aux_hidden_states: jax.Array,  # [batch, seq, taps * d_model]
        hidden_states: jax.Array,  # [batch, seq, d_model]
        how: Transport,
    ) -> "States":
        dtype = str(hidden_states.dtype)
        taps = aux_hidden_states.reshape(*hidden_states.shape[:2], -1, hidden_states.shape[-1])
        if how == "exact":
            return cls(taps, hidden_states, None, None, how, dtype)
        (taps, tap_scale), (codes, scale) = encode(taps, how), encode(hidden_states, how)
        return cls(taps, codes, tap_scale, scale, how, dtype)

    def aux_hidden_states(self) -> jax.Array:  # [batch, seq, taps * d_model] of the target's dtype
        states = self._decoded(self.taps, self.tap_scale)
        return states.reshape(*states.shape[:2], -1)

    @property
    def teacher(self) -> HiddenStates:
        return HiddenStates(self._decoded(self.hidden_states, self.hidden_scale))

    def _decoded(self, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return codes
        assert self.format != "exact"
        return decode(codes, scale, self.format).astype(self.dtype)


def encode(states: jax.Array, how: Format) -> tuple[jax.Array, jax.Array]:  # [..., d] -> codes [..., d], scale [...]
    """Quantise each row on its own and symmetrically: its largest magnitude becomes the largest code. An element is
    off by half a step at most: 1/254 (int8) or 1/14 (int4) of its row's largest magnitude, or 1/16 of itself (fp8,
    e4m3; below 1/28,672 of the largest half a subnormal step)."""
    states = states.astype(jnp.float32)
    magnitude = jnp.max(jnp.abs(states), axis=-1)
    scale = jnp.where(magnitude > 0, magnitude / LARGEST[how], 1.0)
    codes = states / scale[..., None]
    if how == "fp8":
        return codes.astype(jnp.float8_e4m3fn), scale
    codes = jnp.round(codes).astype(jnp.int8)
    return (pack(codes) if how == "int4" else codes), scale


def decode(codes: jax.Array, scale: jax.Array, how: Format) -> jax.Array:  # float32
    values = unpack(codes) if how == "int4" else codes
    return values.astype(jnp.float32) * scale[..., None]


def pack(codes: jax.Array) -> jax.Array:  # [..., d] int8 in -8..7 -> [..., d / 2] uint8
    assert codes.shape[-1] % 2 == 0, "two codes share a byte"
    low, high = jnp.split((codes + 8).astype(jnp.uint8), 2, axis=-1)
    return low | (high << 4)


def unpack(packed: jax.Array) -> jax.Array:  # [..., d / 2] uint8 -> [..., d] int8
    return jnp.concatenate([packed & 15, packed >> 4], axis=-1).astype(jnp.int8) - 8


def make_features(
    params: TargetParams,
    config: ModelConfig,
    vocab: DraftVocab,
    aux_hidden_states: jax.Array,  # [batch, seq, taps * d_model]
    hidden_states: jax.Array,  # [batch, seq, d_model], after the final norm
    how: Format,
    top_k: int,
) -> Features:
    """Return the part of a target's outputs that is kept. The distribution is computed a chunk of positions
    at a time."""
    batch, seq, d_model = hidden_states.shape
    codes, scale = encode(aux_hidden_states.reshape(batch, seq, -1, d_model), how)
    id_dtype = jnp.uint16 if vocab.target_ids.shape[0] <= 1 << 16 else jnp.uint32

    def teach(hidden_states: jax.Array) -> TopK:  # [position, d_model]
        p, best = HiddenStates(hidden_states).distribution(params, config, vocab)
        probs, draft_ids = jax.lax.top_k(p, top_k)
        rest = jnp.maximum(jnp.sum(p, axis=-1) - jnp.sum(probs, axis=-1), 0.0)
        return TopK(draft_ids.astype(id_dtype), probs.astype(jnp.float16), rest.astype(jnp.float16), best >= 0)

    return Features(codes, scale, by_chunk(teach, hidden_states, config.vocab_size), how)


def by_chunk(
    function: Callable[[jax.Array], Any],  # [position, d_model] -> a pytree of [position, ...]
    hidden_states: jax.Array,  # [batch, seq, d_model]
    num_logits: int,  # that it makes of each
) -> Any:  # [batch, seq, ...]
    """Apply a function to a chunk of positions at a time. The last chunk is filled up with copies of the last
    position, so that whatever is computed of the others can be computed of them."""
    batch, seq = hidden_states.shape[:2]
    length = chunk_length(batch * seq, num_logits, program_platform())
    positions = hidden_states.reshape(batch * seq, -1)
    if missing := -batch * seq % length:
        positions = jnp.pad(positions, ((0, missing), (0, 0)), mode="edge")
    found = jax.lax.map(function, positions.reshape(-1, length, positions.shape[-1]))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: batch * seq].reshape(batch, seq, *x.shape[2:]), found)


def bytes_per_position(
    target: ModelConfig, num_taps: int, draft_vocab_size: int, how: Format, top_k: int
) -> tuple[int, int]:
    """Return two numbers of bytes for each position: those that are kept, and those that its taps and last hidden
    state would take in bfloat16."""
    states = num_taps * (target.d_model // (2 if how == "int4" else 1) + 4)
    id_bytes = 2 if draft_vocab_size <= 1 << 16 else 4
    return states + top_k * (id_bytes + 2) + 2 + 1, 2 * (num_taps + 1) * target.d_model
