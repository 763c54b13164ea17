"""The keys of config.json that a kind of head knows, as a table, and a config.json read by that table.

Loaders and the draft doctor read by the same table. A key that is not in it, one that two places state differently, a
size that is no count, a value that is not computed here: `Stated` lists them, and the rows of the kind's checks decide
which of them a loader refuses (`findings.Check.refusal`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specserve.errors import ConfigError

LAYER = "transformer_layer_config"  # the object in which speculators keeps the settings of a head's layers
ACTIVATION = "silu"  # of the MLP; every engine that runs draft heads computes this one
SIZES: Mapping[str, str] = {  # keys of a layer's settings, and our names
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}


@dataclass(frozen=True)
class Key:
    """A key of config.json that is known. Where it has no more than a name, nothing here follows from it, or code of
    its own reads it."""

    name: str
    aliases: tuple[str, ...] = ()  # other names of it, which count in this order where it is not stated itself
    sets: str = ""  # the field of the head's config that takes its value
    default: Any = None  # the value where nothing is stated; a value that is stated is made one of its type
    is_count: bool = False  # a whole number above 0
    is_required: bool = False
    computed: tuple[object, ...] = ()  # the values that are computed here, the usual one last; empty: all


def known(*names: str) -> list[Key]:
    """Return the rows of keys that have no more than a name."""
    return [Key(name) for name in names]


def counts(*names: str, is_required: bool = False) -> list[Key]:
    """Return the rows of keys that are whole numbers above 0."""
    return [Key(name, is_count=True, is_required=is_required) for name in names]


# A config class of transformers writes these of its own accord. They change nothing here.
TRANSFORMERS_KEYS = known(
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "initializer_range", "problem_type"),
    *("attention_dropout", "pretraining_tp", "_attn_implementation", "attn_implementation", "return_dict"),
    *("output_hidden_states", "output_attentions", "is_encoder_decoder", "is_decoder", "chunk_size_feed_forward"),
    *("id2label", "label2id"),
)


@dataclass(frozen=True)
class KeyTable:
    """The keys that a kind of head knows, and the objects inside config.json that state them too."""

    keys: Sequence[Key]
    over: Mapping[str, frozenset[str]]  # objects that come before the top, each with the keys that are read in it
    # places in which other keys than these are unknown, "" being the top; in other places they are passed over
    strict: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """The other names of each key that has some."""
        return {key.name: key.aliases for key in self.keys if key.aliases}

    def read(self, raw: Mapping[str, Any], where: str) -> "Stated":
        """Read a config.json; `where` names it in errors. Raises ConfigError where a part of it is no object."""
        places: dict[str, Mapping[str, Any]] = {}
        for place, keys in self.over.items():
            places[place] = {key: value for key, value in inner(raw, place).items() if key in keys}
        return Stated(self, raw, where, {**places, "": {**inner(raw, LAYER), **raw}})


@dataclass(frozen=True)
class Stated:
    """A config.json without its nesting."""

    table: KeyTable
    raw: Mapping[str, Any]
    where: str
    places: Mapping[str, Mapping[str, Any]]  # in the order in which they count; the last is the top, beside the layers'

    @property
    def is_nested(self) -> bool:
        """Return whether it is in the layout of speculators."""
        return LAYER in self.raw or "speculators_model_type" in self.raw

    @property
    def top(self) -> Mapping[str, Any]:
        """The keys at the top, and after them those that the layers' own settings state."""
        return self.places[""]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key from wherever it stands, by its own name or an alias; null is no value."""
        for spelled in (name, *self.table.aliases.get(name, ())):
            for place in self.places.values():
                if (value := place.get(spelled)) is not None:
                    return value
        return default

    def fields(self, *names: str) -> dict[str, Any]:
        """Return these fields of the head's config, as the keys that set them state."""
        keys = [key for key in self.table.keys if key.sets in names]
        return {key.sets: type(key.default)(self.get(key.name, key.default)) for key in keys}

    def with_values(self, **values: Any) -> "Stated":
        """Return a config.json that states these values, at the top, in the place of others."""
        return replace(self, places={**self.places, "": {**self.top, **values}})

    def bad_counts(self) -> dict[str, Any]:
        """Return the keys that must be counts and are not, or that are missing where nothing else states them."""
        given = {key: self.get(key.name) for key in self.table.keys if key.is_count}
        return {
            key.name: value
            for key, value in given.items()
            if not is_count(value) and (key.is_required or value is not None)
        }

    def uncomputed(self) -> dict[str, tuple[Any, Any]]:
        """Return the keys that ask for what is not computed here, each with its value and the usual one."""
        asked = {key: self.get(key.name) for key in self.table.keys if key.computed}
        return {key.name: (value, key.computed[-1]) for key, value in asked.items() if value not in key.computed}

    def unknown(self) -> dict[str, Any]:
        """Return the keys that the table does not have, each after its place, as `place.key`. The layers' settings are
        taken as part of the top, unless the table has keys for them alone."""
        parts = dict(self.raw) | {"": self.raw if LAYER in self.table.strict else self.top}
        found = {}
        for place, keys in self.table.strict.items():
            part = parts.get(place)
            if isinstance(part, Mapping):
                found |= {f"{place}.{name}".removeprefix("."): part[name] for name in sorted(part.keys() - keys)}
        return found

    def contradictions(self) -> dict[str, dict[str, Any]]:
        """Return the keys that places state differently, each with its values by place."""
        found = {}
        for name in sorted({name for part in self.places.values() for name in part}):
            values = {place: part[name] for place, part in self.places.items() if part.get(name) is not None}
            if any(value != self.get(name) for value in values.values()):
                found[name] = values
        return found


def inner(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Read an object inside a config.json; empty where there is none. Raises ConfigError."""
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {key} must be an object, got {value!r}")
    return value


def within(value: Any, *path: str | int) -> Any:
    """Return what stands at a path of keys and places in lists, inside a value of any kind; None where nothing does."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def architectures(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of model classes that a config.json states."""
    stated = raw.get("architectures")
    if not isinstance(stated, list):
        return frozenset()
    return frozenset(map(str, stated))


def is_count(value: object) -> bool:
    """Return whether the value is a whole number above 0."""
    return type(value) is int and value > 0


def is_eps(value: object) -> bool:
    """Return whether the value can be the epsilon of a norm. Above 1e-2 it would not only protect from division by
    zero, but change what is computed."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e-2
