"""The keys of config.json that kinds of heads know, as tables, and the one reader of every head's config.json.

A setting stands at the top of a config.json or in an object inside it (`KeyTable.places`), and means the same in each
place. A key is known with its meaning, or known to say nothing of how a head is computed (`HARMLESS`); any other one is
unknown. `Stated` has all that was found, each value by its path, and lists what loaders refuse: unknown keys, keys that
several paths state differently, and values that are not computed here (`key_checks`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specserve.errors import ConfigError
from specserve.models.rope import Rope, rope_from_hf

LAYER = "transformer_layer_config"  # the object in which speculators keeps the settings of a head's layers
ROPE, OLD_ROPE = "rope_parameters", "rope_scaling"  # the objects of rotary settings, in the new and the old spelling
FULL, SLIDING = "full_attention", "sliding_attention"  # the kinds of layers


@dataclass(frozen=True)
class Key:
    """A key of config.json whose meaning is known. Code of its own reads those that set no field."""

    name: str
    aliases: tuple[str, ...] = ()  # other spellings of it
    sets: str = ""  # the field of the head's config that takes its value
    default: Any = None  # the value where nothing is stated
    is_count: bool = False  # a whole number above 0
    is_required: bool = False
    fits: Callable[[Any], bool] = lambda _value: True  # whether a value is computed here
    expected: str = ""  # the values that fit


SELECTOR: Mapping[str, str] = {  # keys of heads that choose among candidates, and the fields of our config
    "conv_kernel_size": "conv_taps",
    "conv_group_size": "conv_group",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
}


def counts(*names: str, is_required: bool = False) -> list[Key]:
    """Return the rows of keys that are whole numbers above 0."""
    return [Key(name, is_count=True, is_required=is_required) for name in names]


def flag(name: str, *aliases: str, sets: str = "") -> Key:
    """Return the row of a key that is true or false, and false where nothing is stated."""
    return Key(name, aliases, sets, default=False, fits=lambda value: isinstance(value, bool), expected="true or false")


def number(name: str, default: float, *, sets: str) -> Key:
    """Return the row of a key that is a number."""
    return Key(name, sets=sets, default=default, fits=_is_number, expected="a number")


def only(name: str, *values: object, aliases: tuple[str, ...] = ()) -> Key:
    """Return the row of a key of which only these values are computed here."""
    expected = " or ".join(map(repr, values))
    return Key(name, aliases, fits=lambda value: any(_is_same(value, each) for each in values), expected=expected)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(one: object, other: object) -> bool:
    return (one is other or one == other) and isinstance(one, bool) == isinstance(other, bool)


def is_count(value: object) -> bool:
    """Return whether the value is a whole number above 0, and not far above every size that there is."""
    return type(value) is int and 0 < value < 2**31


def _is_eps(value: Any) -> bool:
    """Return whether the value can be the epsilon of a norm. Above 1e-2 it would not only protect from division by
    zero, but change what is computed."""
    return _is_number(value) and 0 < value <= 1e-2


EPS = Key("rms_norm_eps", fits=_is_eps, expected="a number above 0 and at most 0.01, such as 1e-06")
QUANTIZATIONS = ("quantization_config", "compression_config")  # `published.stored_scales` holds them against tensors
# Rotary settings that stand in the objects of that name or beside them, and those that stand in them alone.
ROTARY = ("rope_theta", "partial_rotary_factor", "rotary_dim", "original_max_position_embeddings")
SCALING = (
    *("rope_type", "factor", "attention_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"),
)
_NO_NUMBERS = ("rope_type", "truncate", "short_factor", "long_factor")
COMMON = [
    EPS,
    Key(QUANTIZATIONS[0], QUANTIZATIONS[1:]),
    *map(Key, ROTARY),
    only("is_neox_style", True),
]  # of the heads of all kinds

_PARTS = (Path(__file__).parent / "harmless.txt").read_text("utf-8").split("\n== ")
OF_NOTHING = {name.partition(":")[0]: frozenset(keys.split()) for name, _, keys in (p.partition("\n") for p in _PARTS)}
HARMLESS = OF_NOTHING["all"]  # of which nothing follows in any kind of head


@dataclass(frozen=True)
class KeyTable:
    """The keys that a kind of head knows, and the objects inside config.json that state them too."""

    keys: Sequence[Key]
    classes: frozenset[str]  # the model classes that are computed as heads of this kind, by their names
    model_types: frozenset[str]  # the names of the kind in the layout of speculators
    places: frozenset[str]  # beside the layers' settings and the rotary ones
    harmless: frozenset[str] = HARMLESS
    # (config.json of one of the classes, its name in errors) -> the same in the keys of this table
    translate: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda raw, _where: raw

    def read(self, raw: Mapping[str, Any], where: str) -> "Stated":
        """Read a config.json; `where` names it in errors. Raises ConfigError where a part of it is no object."""
        found: dict[str, dict[str, Any]] = {}
        unknown: dict[str, Any] = {}
        beside = {spelled: key.name for key in self.keys for spelled in (key.name, *key.aliases)}
        within_ropes = {name: name for name in (*ROTARY, *SCALING)} | {"type": "rope_type"}
        is_own = not architectures(raw).isdisjoint(self.classes)
        plain = self.translate(raw, where) if is_own else raw
        for path, value in walk(plain, {LAYER, ROPE, OLD_ROPE, *self.places}, where):
            *places, name = path.split(".")
            known = within_ropes if places and places[-1] in (ROPE, OLD_ROPE) else beside
            if value is None or value == [] or value == {}:
                continue
            if name in known:
                found.setdefault(known[name], {})[path] = value
            elif name not in self.harmless:
                unknown[path] = value
        return Stated(self, raw, where, found, unknown)


@dataclass(frozen=True)
class Stated:
    """The values that a config.json states, by their keys. A null, an empty list and an empty object state nothing."""

    table: KeyTable
    raw: Mapping[str, Any]
    where: str
    found: Mapping[str, Mapping[str, Any]]  # the values of each key, by the paths at which they stand; the top first
    unknown: Mapping[str, Any]  # the values of unknown keys, by path

    @property
    def is_nested(self) -> bool:
        """Return whether it is in the layout of speculators."""
        return LAYER in self.raw or "speculators_model_type" in self.raw

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, wherever it stands."""
        return next(iter(self.found.get(name, {}).values()), default)

    def path(self, name: str) -> str:
        """Return where the value of a key stands."""
        return next(iter(self.found.get(name, {})), name)

    def fields(self, *names: str) -> dict[str, Any]:
        """Return these fields of the head's config, as the keys that set them state."""
        keys = [key for key in self.table.keys if key.sets in names]
        return {key.sets: type(key.default)(self.get(key.name, key.default)) for key in keys}

    def with_values(self, **values: Any) -> "Stated":
        """Return a config.json that states these values in the place of others; None states nothing."""
        return replace(self, found={**self.found, **{key: {} if v is None else {key: v} for key, v in values.items()}})

    def bad_counts(self) -> dict[str, Any]:
        """Return the keys that must be counts and are not, or that are missing where nothing else states them."""
        given = {key: self.get(key.name) for key in self.table.keys if key.is_count}
        return {
            key.name: value
            for key, value in given.items()
            if not is_count(value) and (key.is_required or value is not None)
        }

    def uncomputed(self) -> dict[str, tuple[Any, Key]]:
        """Return the values that are not computed here, by path, each with its key."""
        return {
            path: (value, key)
            for key in self.table.keys
            for path, value in self.found.get(key.name, {}).items()
            if not key.fits(value)
        }

    def contradictions(self) -> dict[str, Mapping[str, Any]]:
        """Return the keys that several paths state differently, each with its values by path."""
        return {
            name: values
            for name, values in sorted(self.found.items())
            if any(not _is_same(_plain(name, value), _plain(name, self.get(name))) for value in values.values())
        }

    @property
    def head_dim(self) -> int:
        """The width of an attention head: as stated, or else the heads' share of the layer's."""
        return self.get("head_dim") or self.get("hidden_size") // self.get("num_attention_heads")

    def rope(self) -> Rope:
        """Return the rotary settings, from both spellings together. Raises ConfigError where they cannot be read."""
        names = [name for name in (*ROTARY, *SCALING) if self.get(name) is not None]
        stated = {name: _plain(name, self.get(name)) for name in names}
        if odd := [name for name in stated if name not in _NO_NUMBERS and not _is_number(stated[name])]:
            raise ConfigError(f"{self.where}: {odd[0]} is {stated[odd[0]]!r}; expected a number")
        raw = {**stated, ROPE: stated, "max_position_embeddings": self.get("max_position_embeddings")}
        rope = rope_from_hf(raw, self.where, head_dim=self.head_dim)
        by_share = rope_from_hf(raw | {"rotary_dim": None}, self.where, head_dim=self.head_dim)
        if "partial_rotary_factor" in stated and rope != by_share:
            raise ConfigError(f"{self.where}: rotary_dim and partial_rotary_factor disagree: {stated}")
        return rope

    def ropes(self) -> list[Rope | None]:
        """Return the rotary settings as readers of one spelling alone find them, the new one first; None for one that
        cannot be read."""
        rotary = {name: self.found.get(name, {}) for name in (*ROTARY, *SCALING)}

        def read(is_new: bool) -> Rope | None:
            part = {k: {p: v for p, v in at.items() if (ROPE in p.split(".")) == is_new} for k, at in rotary.items()}
            return read_rope(replace(self, found={**self.found, **part}))

        return [read(True), read(False)]


def read_rope(stated: Stated) -> Rope | None:
    """Return the rotary settings; None where they cannot be read."""
    try:
        return stated.rope()
    except ConfigError:
        return None


def _plain(name: str, value: Any) -> Any:
    """Return what a value means: over text alone, the rotary embedding of three axes is the plain one."""
    return "default" if (name, value) == ("rope_type", "mrope") else value


def walk(part: Mapping[str, Any], inside: Iterable[str], where: str, place: str = "") -> Iterator[tuple[str, Any]]:
    """List the values in a config.json by their paths; those inside objects of these names come after those beside
    them. Raises ConfigError where such a name has no object."""
    inside = frozenset(inside)
    yield from ((place + name, value) for name, value in part.items() if name not in inside)
    for name in [name for name in part if name in inside]:
        value = part[name] or {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {place}{name} must be an object, got {value!r}")
        yield from walk(value, inside, where, f"{place}{name}.")


def find(raw: Mapping[str, Any], names: Collection[str], place: str = "") -> Iterator[tuple[str, Any]]:
    """List the values of these keys in a config.json, at any depth, by their paths."""
    for name, value in raw.items():
        if name in names and value is not None:
            yield place + name, value
        elif isinstance(value, Mapping):
            yield from find(value, names, f"{place}{name}.")


def without(raw: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a config.json without these keys, at any depth."""
    inside = {name: without(value, names) for name, value in raw.items() if isinstance(value, Mapping)}
    return {name: inside.get(name, value) for name, value in raw.items() if name not in names}


def inner(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object of that name inside a config.json; empty where there is none."""
    value = raw.get(name)
    return value if isinstance(value, Mapping) else {}


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
    stated = raw.get("architectures") or ()
    return frozenset(map(str, stated) if isinstance(stated, list) else [str(stated)] if stated else ())
