"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and the ways of stretching them over longer texts."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from specserve.errors import ConfigError
from specserve.kernels.rowwise import cos_sin

Kind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
_LARGEST = 1e30  # far above every base and every stretch
KINDS: tuple[Kind, ...] = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True)
class Rope:
    """The settings of a rotary embedding: its base, the part of a head that is rotated, and the scaling of the
    frequencies, under transformers' names."""

    theta: float = 10_000.0
    kind: Kind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_len: int = 8192  # all but default, linear and proportional
    share: float = 1.0  # proportional: of the pairs of channels that turn, at the angles of all; the others stay
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()  # longrope
    magnitude: float = 1.0  # of the turned vectors: yarn's and longrope's attention factor
    rotary_dim: int = 0  # channels of a head that turn, from its first on; 0: all
    is_interleaved: bool = False  # neighbours turn against each other, not the two halves
    length: int = 0  # of the longest sequence, which dynamic and longrope go by; 0: within original_max_len

    def for_length(self, length: int) -> "Rope":
        """The embedding for a server whose longest sequence has `length` tokens. As in vLLM, that length decides and
        not the length at hand, because keys that are committed cannot be rotated again."""
        if self.kind not in ("dynamic", "longrope"):
            return self
        return dataclasses.replace(self, length=length)


def plain_rope(rope: Rope) -> Rope:
    """The rotary embedding that a fresh draft head begins with: all channels of its heads turn, the first half against
    the second, whatever the target does."""
    if rope.kind in ("longrope", "proportional"):  # their factors are those of the target's channels
        return Rope(rope.theta)
    return dataclasses.replace(rope, rotary_dim=0, is_interleaved=False)


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:  # [rotary_dim // 2] float32
    """Radians per position of each pair of channels, computed as transformers' modeling_rope_utils does."""
    dim = rope.rotary_dim or head_dim
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    theta = rope.theta
    if rope.kind == "dynamic" and rope.length > rope.original_max_len:
        stretch = rope.factor * rope.length / rope.original_max_len - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    plain = theta**-exponents
    if rope.kind in ("linear", "proportional"):
        plain = plain / rope.factor
        if rope.kind == "proportional":
            plain[int(rope.share * dim // 2) :] = 0.0
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / plain
        span = rope.high_freq_factor - rope.low_freq_factor
        smooth = np.clip((rope.original_max_len / wavelength - rope.low_freq_factor) / span, 0.0, 1.0)
        plain = (1 - smooth) * plain / rope.factor + smooth * plain
    elif rope.kind == "yarn":
        plain = _yarn(rope, dim, plain)
    elif rope.kind == "longrope":
        factors = rope.short_factors
        if rope.length > rope.original_max_len:
            factors = rope.long_factors
        plain = plain / np.asarray(factors)
    return plain.astype(np.float32)


def _yarn(rope: Rope, dim: int, plain: np.ndarray) -> np.ndarray:
    """Frequencies by YaRN (Peng et al. 2023, arXiv 2309.00071): fast channels keep theirs, slow ones are stretched, and
    between both there is a ramp."""

    def channel(num_turns: float) -> float:  # the channel that turns so often over the original length
        return dim * math.log(rope.original_max_len / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return plain * (1 - stretched) + plain / rope.factor * stretched


def yarn_magnitude(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's attention factor (section 3.4). `coefficient` is DeepSeek's mscale."""
    return 0.1 * coefficient * math.log(max(factor, 1.0)) + 1.0


def rope_tables(
    rope: Rope,
    head_dim: int,
    position_ids: jax.Array,  # [batch, seq] int32
) -> tuple[jax.Array, jax.Array]:  # cos, sin: [batch, seq, 1, rotary_dim // 2] float32
    return cos_sin(position_ids, frequencies(rope, head_dim), rope.magnitude)


def rope_from_hf(raw: Mapping[str, Any], where: str, *, head_dim: int = 0) -> Rope:
    """Read the rotary settings of a config.json in both spellings, `rope_parameters` (new) and `rope_theta` with
    `rope_scaling` (old). `head_dim` is needed where only a part of a head is rotated (`partial_rotary_factor`,
    `rotary_dim`). Raises ConfigError."""
    try:
        rope = _read(raw, where, head_dim)
        if not 0 < rope.theta < _LARGEST or not 0 < rope.factor < _LARGEST:
            raise ValueError(f"theta {rope.theta:g}, factor {rope.factor:g}")
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: rotary settings that make no sense ({error})") from None
    return rope


def _read(raw: Mapping[str, Any], where: str, head_dim: int) -> Rope:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    share = float(scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)))
    if kind == "proportional":
        return Rope(theta, kind, float(scaling.get("factor", 1.0)), share=_share(share))
    rotary_dim = int(raw.get("rotary_dim") or head_dim * share)
    if head_dim and (rotary_dim % 2 or not 0 < rotary_dim <= head_dim):
        raise ConfigError(f"{where}: {rotary_dim} of {head_dim} channels turn; expected an even number of them")
    if rotary_dim == head_dim:
        rotary_dim = 0
    base = Rope(theta, rotary_dim=rotary_dim)
    if kind in ("default", "mrope"):  # mrope over text alone is the default
        return base
    if kind not in KINDS:
        raise ConfigError(f"{where}: rope type {kind!r} is not one of {', '.join(KINDS)}")
    try:
        return _scaled(base, kind, scaling, raw)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: rope of type {kind!r} lacks or misstates {error}") from None


def _share(share: float) -> float:
    if not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor {share:g}")
    return share


def _scaled(base: Rope, kind: Kind, scaling: Mapping[str, Any], raw: Mapping[str, Any]) -> Rope:
    max_len = raw.get("max_position_embeddings")
    stated = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    original = stated or max_len
    factor = scaling.get("factor")
    if factor is None:
        if kind not in ("yarn", "longrope") or not stated or not max_len:
            raise KeyError("factor")
        factor = max_len / stated
    rope = dataclasses.replace(base, kind=kind, factor=float(factor))
    if kind == "linear":
        return rope
    if not original:
        raise KeyError("original_max_position_embeddings")
    if kind == "dynamic":  # stretches from where it was trained, whatever else is stated
        return dataclasses.replace(rope, original_max_len=int(max_len or original))
    rope = dataclasses.replace(rope, original_max_len=int(original))
    if kind == "llama3":
        return dataclasses.replace(
            rope,
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
        )
    magnitude = scaling.get("attention_factor")
    if kind == "longrope":
        if magnitude is None:
            magnitude = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
        return dataclasses.replace(
            rope,
            short_factors=tuple(float(f) for f in scaling["short_factor"]),
            long_factors=tuple(float(f) for f in scaling["long_factor"]),
            magnitude=float(magnitude),
        )
    if magnitude is None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            magnitude = yarn_magnitude(rope.factor, mscale) / yarn_magnitude(rope.factor, mscale_all_dim)
        else:
            magnitude = yarn_magnitude(rope.factor)
    return dataclasses.replace(
        rope,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        magnitude=float(magnitude),
    )


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """The `rope_scaling` value of config.json, without its theta. It is empty for plain rotary embeddings."""
    if rope.kind == "default":
        return {}
    out: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "proportional":
        out["partial_rotary_factor"] = rope.share
    elif rope.kind != "linear":
        out["original_max_position_embeddings"] = rope.original_max_len
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    elif rope.kind == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        out["attention_factor"] = rope.magnitude
    elif rope.kind == "longrope":
        out |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
        out["attention_factor"] = rope.magnitude
    return out
