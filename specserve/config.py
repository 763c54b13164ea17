"""Settings: one schema per command, from which the YAML file, the `a.b=value` overrides and the CLI flags all follow.

A schema is a pydantic dataclass, `@dataclass(frozen=True, config=RULES)`. Its leaves are made with `setting`, and its
sections are other such dataclasses. pydantic checks and converts values; this file adds the layers (defaults < YAML <
overrides < flags) and reports in which of them a wrong value stands. It knows no setting by name.

A command may have defaults that depend on what was given, such as those of a named target: `resolve` asks for them
(`fill`) once everything given is known to be right. They are weaker than anything given.
"""

import difflib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_origin

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from specserve.errors import ConfigError

T = TypeVar("T")

RULES = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True)
WORDS = {"boolean": "true or false", "integer": "an integer", "number": "a number", "string": "text"}
SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def setting(
    default: Any = ..., *, help: str, rank: int = 0, scope: str = "", is_early: bool = False, **bounds: float
) -> Any:
    """A leaf of a schema: a pydantic field with its one-line help and its bounds (ge, gt, le, lt). Without a default it
    is required. Settings with a `rank` are listed before the others in a command's help, 1 first. A `scope` is a word
    of the schema's own for those that concern the same thing. One that `is_early` is read before all others, because it
    decides about which values they take."""
    extra = {"rank": rank, "scope": scope, "is_early": is_early}
    return Field(default, description=help, json_schema_extra=extra, **bounds)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Leaf:
    """A setting of a schema, by its dotted name: `train.lr`."""

    name: str
    field: FieldInfo

    @property
    def default(self) -> Any:
        return self.field.default

    @property
    def help(self) -> str:
        return self.field.description or ""

    @property
    def section(self) -> str:
        """`train` of `train.lr`; empty at the root."""
        return self.name.rpartition(".")[0]

    @property
    def rank(self) -> int:
        """The setting's place among those that a command's help lists first; 0 where it is none of them."""
        return int(str(self._extra.get("rank", 0)))

    @property
    def scope(self) -> str:
        """The word that the schema gives to settings that concern the same thing; empty where it gives none."""
        return str(self._extra.get("scope", ""))

    @property
    def is_early(self) -> bool:
        """Return whether the setting is read before all others."""
        return bool(self._extra.get("is_early"))

    @property
    def _extra(self) -> Mapping[str, object]:
        extra = self.field.json_schema_extra
        return extra if isinstance(extra, dict) else {}

    @property
    def flag(self) -> str:
        """`--muon-lr` of `train.muon_lr`."""
        return "--" + self.name.rpartition(".")[2].replace("_", "-")

    @property
    def expected(self) -> str:
        """The values it takes, in words: "a number > 0"."""
        return _in_words(self._type.json_schema())

    @property
    def is_list(self) -> bool:
        return get_origin(self.field.annotation) is tuple

    def read(self, raw: Any) -> Any:
        """Return the value that `raw` stands for. Text is converted; anything else must already have the right type,
        so that true is not 1. Raises pydantic's ValidationError."""
        if self.is_list and isinstance(raw, str):  # also in a file: a list of one is often written without brackets
            has_brackets = raw.startswith("[") and raw.endswith("]")  # an item may end with one: gsm8k:train[:5%]
            if has_brackets:
                raw = raw[1:-1]
            raw = [part.strip() for part in raw.split(",") if raw.strip()]
        return self._type.validate_python(raw, strict=not isinstance(raw, str | list))

    @property
    def _type(self) -> TypeAdapter[Any]:
        kind: Any = Annotated[self.field.annotation, self.field]
        return TypeAdapter(kind, config=RULES)


def leaves(schema: type, prefix: str = "") -> list[Leaf]:
    """List every setting of the schema, in the order of definition."""
    found: list[Leaf] = []
    for name, field in schema.__pydantic_fields__.items():
        if is_pydantic_dataclass(field.annotation):  # type: ignore[arg-type]
            found += leaves(field.annotation, f"{prefix}{name}.")
        else:
            found.append(Leaf(prefix + name, field))
    return found


def values(settings: Any) -> dict[str, Any]:
    """Return the value of every setting by its dotted name, in the order of definition."""
    return {leaf.name: operator.attrgetter(leaf.name)(settings) for leaf in leaves(type(settings))}


def defaults(schema: type) -> dict[str, Any]:
    """Return the default of every setting of the schema by its dotted name."""
    return {leaf.name: leaf.default for leaf in leaves(schema)}


def changed(settings: Any) -> dict[str, Any]:
    """Return the values that are not the defaults, by dotted name."""
    default = defaults(type(settings))
    return {name: value for name, value in values(settings).items() if value != default[name]}


def resolve(
    schema: type[T],
    *,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    arguments: Mapping[str, object] | None = None,
    fill: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> T:
    """Fill the schema from its defaults, then what `fill` returns, then the YAML file, then `a.b=value` texts, then
    flags or arguments.

    `fill` is called with all values that were given, by dotted name, and returns values of settings in the same way;
    those that were given win over them. `flags` maps dotted names to values; None means that the flag was not given.
    `arguments` are those of a Python call, where None is a value. An unknown name and a wrong value are errors in every
    layer, also where a stronger layer overrules them. Raises ConfigError.
    """
    known = {leaf.name: leaf for leaf in leaves(schema)}
    values: dict[str, Any] = {}
    given = _layers(known, file, overrides, flags or {}, arguments or {})
    for name, raw, where in sorted(given, key=lambda each: not (each[0] in known and known[each[0]].is_early)):
        if name not in known:
            raise ConfigError(f"{where}: {_unknown(name, known)}")
        try:
            values[name] = known[name].read(raw)
        except ValidationError:
            raise ConfigError(f"{where}: {name} must be {known[name].expected}, got {_shown(raw)}") from None
    if fill is not None:
        values = {**fill(values), **values}
    missing = [leaf for leaf in known.values() if leaf.field.is_required() and leaf.name not in values]
    if missing:
        raise ConfigError("; ".join(f"{leaf.flag} ({leaf.name}) must be given: {leaf.help}" for leaf in missing))
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        functools.reduce(lambda inside, section: inside.setdefault(section, {}), sections, nested)[last] = value
    return schema(**nested)


def to_yaml(config: Any) -> str:
    """Write the settings as YAML text that `resolve` reads back to the same settings."""
    plain = TypeAdapter(type(config)).dump_python(config, mode="json")
    return yaml.safe_dump(plain, sort_keys=False, width=100)


def _layers(
    known: Mapping[str, Leaf],
    file: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, object],
    arguments: Mapping[str, object],
) -> Iterator[tuple[str, Any, str]]:
    """(dotted name, raw value, where it stands) of everything given, weakest first."""
    if file is not None:
        sections = {name[:i] for name in known for i, char in enumerate(name) if char == "."}
        for name, raw in _flatten(_read_yaml(file), "", sections):
            yield name, raw, str(file)
    for text in overrides:
        name, equals, raw = text.partition("=")
        if not equals:
            raise ConfigError(f"override {text!r}: expected name=value, as in {next(iter(known))}=...")
        yield name.strip(), raw.strip(), f"override {text!r}"
    for name, raw in flags.items():
        if raw is not None:
            yield name, raw, f"flag {known[name].flag if name in known else name}"
    for name, raw in arguments.items():
        yield name, raw, "argument"


class _Loader(yaml.SafeLoader):
    """Scalars stay the text that was written, for pydantic to read by the type of the setting: to YAML alone `off` is
    False and `3e-4` is text. Null and merge keys keep their meaning. A key that is repeated, of which PyYAML keeps the
    last without a word, is an error."""

    yaml_implicit_resolvers: ClassVar[Any] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if repeated := [key for i, key in enumerate(keys) if key in keys[:i] and key != "<<"]:
            raise yaml.constructor.ConstructorError(None, None, f"{repeated[0]!r} is set twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(file: Path) -> Mapping[Any, Any]:
    try:
        raw = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the settings: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{file}: expected settings as `name: value` lines, got {_shown(raw)}")
    return raw


def _flatten(raw: Mapping[Any, Any], prefix: str, sections: set[str]) -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and (value or name in sections):
            yield from _flatten(value, f"{name}.", sections)
        elif name not in sections or value is not None:  # a section with nothing in it is fine
            yield name, value


def _unknown(name: str, known: Mapping[str, Leaf]) -> str:
    inside = [other for other in known if other.startswith(f"{name}.")]
    if inside:
        return f"{name} is a section, not a setting; it has {', '.join(inside)}"
    last = name.rpartition(".")[2]
    near = [other for other in known if other.rpartition(".")[2] == last] or difflib.get_close_matches(name, known, 1)
    near = near or [n for n in known if difflib.get_close_matches(last, [n.rpartition(".")[2]], 1)]
    hint = f"the settings are {', '.join(known)}"
    if near:
        hint = f"did you mean {near[0]}?"
    return f"there is no setting {name}; {hint}"


def _in_words(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema takes: "an integer >= 1"."""
    if schema["type"] == "array":
        return f"a list, each {_in_words(schema['items'])}"
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    bounds = " and ".join(f"{sign} {schema[bound]:g}" for bound, sign in SIGNS.items() if bound in schema)
    return f"{WORDS[schema['type']]} {bounds}".rstrip()


def _shown(raw: Any) -> str:
    """The value as the user may have written it, with its type where that may surprise."""
    text = repr(raw)
    if len(text) > 60:
        text = f"{text[:57]}..."
    if not isinstance(raw, str):
        text += f" ({type(raw).__name__})"
    return text
