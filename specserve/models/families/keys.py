"""Readers of the values in a config.json, whose errors name the file and the key."""

import math
from collections.abc import Mapping
from typing import Any

from specserve.errors import ConfigError
from specserve.models.rope import Rope, rope_from_hf

Flags = dict[str, Any]  # fields of ModelConfig

# Far above every model that there is: what a damaged file states must not be counted up to.
_MOST_OF_ANY = 2**31 - 1
_MOST = {"num_hidden_layers": 2**11}
_MOST |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_attention_heads"), 2**13)


class Keys:
    """Reads values of a config.json; errors name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers")

    @property
    def head_dim(self) -> int:
        """The width of an attention head: the stated `head_dim`, or else d_model divided by the number of heads."""
        share = self.integer("hidden_size") // self.integer("num_attention_heads")
        return self.integer("head_dim", max(share, 1))

    def _get(self, key: str, default: Any) -> Any:
        """The value of a key; a key that is missing or null has the default."""
        value = self.raw.get(key)
        if value is None:
            return default
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._get(key, default)
        if value is None:
            raise ConfigError(f"{self.where}: {key} is missing; is this the config.json of a language model?")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ConfigError(f"{self.where}: {key} must be {kind}, got {value!r}")
        if value > (most := _MOST.get(key, _MOST_OF_ANY)):
            raise ConfigError(f"{self.where}: {key} must be at most {most}, got {value}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
            raise ConfigError(f"{self.where}: {key} must be a number, got {value!r}")
        return float(value)

    def positive(self, key: str, default: float) -> float:
        if (value := self.number(key, default)) <= 0:
            raise ConfigError(f"{self.where}: {key} must be more than 0, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def bias(self, default: bool = False) -> dict[str, bool]:
        """The flags of ModelConfig for a family that states one bias for all of attention's projections."""
        stated = self.flag("attention_bias", default)
        return {"qkv_bias": stated, "o_bias": stated}

    def rope(self, head_dim: int, changes: Mapping[str, Any] | None = None) -> Rope:
        """The rotary settings, with some keys changed. Raises ConfigError where both spellings state them, and
        differently."""
        self._check_spellings()
        return rope_from_hf({**self.raw, **(changes or {})}, self.where, head_dim=head_dim)

    def _check_spellings(self) -> None:
        """Raise ConfigError where `rope_scaling` says other than `rope_parameters`: transformers takes the former."""
        stated = [self.raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
        if not all(isinstance(each, Mapping) and each for each in stated):
            return
        new, old = ({key: value for key, value in each.items() if value is not None} for each in stated)
        if any(isinstance(each, Mapping) for each in new.values()):  # by kinds of layers
            return
        for each in (new, old):
            kind = each.pop("type", "default")
            kind = each.get("rope_type", kind)
            each["rope_type"] = "default" if kind == "mrope" else kind
        if differing := [key for key in sorted(old) if old[key] != new.get(key)]:
            key = differing[-1]
            raise ConfigError(
                f"{self.where}: the rotary settings are stated twice, and differently: rope_parameters.{key} is "
                f"{new.get(key)!r}, rope_scaling.{key} is {old[key]!r}; keep the right one"
            )

    def kinds(self, default: list[str]) -> list[str]:
        """Return each layer's entry of `layer_types`, or `default` where the config states none."""
        return self.strings("layer_types", self.num_layers) or default

    def kinds_in_groups(self, kind: str, size: int) -> list[str]:
        """Return each layer's entry of `layer_types`. By default each `size`-th layer has full attention, and the
        others are of this kind."""
        group = [kind] * (size - 1) + ["full_attention"]
        return self.kinds([group[i % size] for i in range(self.num_layers)])

    def integers(self, key: str, count: int) -> list[int] | None:
        """Return the entries of a list of whole numbers for each layer, or None where there is no list."""
        value = self.strings(key, count)
        if value is not None and not all(entry.lstrip("-").isdigit() for entry in value):
            raise ConfigError(f"{self.where}: {key} must list whole numbers, got {self.raw[key]!r}")
        return None if value is None else [int(entry) for entry in value]

    def strings(self, key: str, count: int) -> list[str] | None:
        value = self.raw.get(key)
        if value is not None and (not isinstance(value, list) or len(value) < count):
            raise ConfigError(f"{self.where}: {key} must list one entry for each of {count} layers, got {value!r}")
        if value is None:
            return None
        return [str(entry) for entry in value[:count]]

    def must_be(self, key: str, *values: object) -> None:
        """Refuse what is not built, rather than compute something else. A missing key is fine."""
        got = self.raw.get(key)
        if got is not None and got not in values:
            allowed = " or ".join(repr(value) for value in values or (None,))
            raise ConfigError(f"{self.where}: {key} is {got!r}; specserve computes only {allowed}")
