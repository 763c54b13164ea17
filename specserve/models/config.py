"""What a model is: `ModelConfig` for targets, `DraftConfig` for EAGLE-3 heads. Static, hashable, never edited.

A family is a row of `FAMILIES`: the flags that its name implies and the config keys it reads. There is no second
forward.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specserve.errors import ConfigError


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base and the scaling of its frequencies."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_len: int = 8192  # llama3


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention and a gated MLP."""

    family: str
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_len: int
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    dtype: str = "float32"

    @classmethod
    def from_hf_config(cls, raw: Mapping[str, Any], *, dtype: str, where: str = "config.json") -> "ModelConfig":
        """Read a Hugging Face config.json. Raises ConfigError for an unknown family or an unsupported feature."""
        family = raw.get("model_type")
        if family not in FAMILIES:
            near = difflib.get_close_matches(str(family), FAMILIES, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ConfigError(f"{where}: model_type {family!r} is not one of {', '.join(FAMILIES)}{hint}")
        get = _Reader(raw, where)
        num_heads = get.integer("num_attention_heads")
        d_model = get.integer("hidden_size")
        if raw.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"{where}: hidden_act is {raw['hidden_act']!r}, only 'silu' is supported")
        if raw.get("use_sliding_window"):
            raise ConfigError(f"{where}: use_sliding_window is true; sliding-window attention is not supported")
        return cls(
            family=family,
            vocab_size=get.integer("vocab_size"),
            d_model=d_model,
            num_layers=get.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=get.integer("num_key_value_heads", num_heads),
            head_dim=get.integer("head_dim", d_model // num_heads),
            d_ff=get.integer("intermediate_size"),
            max_len=get.integer("max_position_embeddings", 2048),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=rope_from_hf(raw, where),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            dtype=dtype,
            **FAMILIES[family](raw),
        )

    @property
    def default_aux_layers(self) -> tuple[int, int, int]:
        """EAGLE-3's taps: the outputs of layers 1, L//2-1 and L-4 (0-based), before the final norm."""
        if self.num_layers < 5:
            raise ConfigError(f"a target of {self.num_layers} layers has no default taps; give three layer indices")
        return (1, self.num_layers // 2 - 1, self.num_layers - 4)


@dataclass(frozen=True)
class DraftConfig:
    """An EAGLE-3 draft head: one transformer layer over (token embedding, fused target features)."""

    d_model: int
    target_d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    max_len: int
    aux_layers: tuple[int, ...]  # target layers whose outputs are tapped, 0-based
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    has_embedding: bool = False  # its own token embedding; otherwise the target's is shared
    norm_before_residual: bool = False  # the residual is the normed hidden state
    fc_norm: bool = False  # EAGLE-3.1: an RMS norm on each tapped state
    norm_before_fc: bool = False  # EAGLE-3.1: one RMS norm over the concatenated taps
    norm_output: bool = False  # EAGLE-3.1: the state handed on is the normed one
    dtype: str = "float32"


class _Reader:
    """Integers out of a config.json, with errors that name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw, self._where = raw, where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._where}: {key} is missing; is this the config.json of a language model?")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self._where}: {key} must be a positive integer, got {value!r}")
        return value


def rope_from_hf(raw: Mapping[str, Any], where: str) -> Rope:
    """Both spellings: `rope_parameters` (new) and `rope_theta` + `rope_scaling` (old)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(scaling["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            float(scaling["factor"]),
            float(scaling["low_freq_factor"]),
            float(scaling["high_freq_factor"]),
            int(scaling["original_max_position_embeddings"]),
        )
    raise ConfigError(f"{where}: rope type {kind!r} is not supported; supported are default, linear, llama3")


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """The `rope_scaling` value of config.json without its theta; empty for plain rotary embeddings."""
    if rope.kind == "default":
        return {}
    if rope.kind == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_len,
    }


def _llama(raw: Mapping[str, Any]) -> dict[str, bool]:
    bias = bool(raw.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(raw.get("mlp_bias", False))}


def _qwen2(_raw: Mapping[str, Any]) -> dict[str, bool]:
    return {"qkv_bias": True}


def _qwen3(raw: Mapping[str, Any]) -> dict[str, bool]:
    bias = bool(raw.get("attention_bias", False))
    return {"qk_norm": True, "qkv_bias": bias, "o_bias": bias}


FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, bool]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
