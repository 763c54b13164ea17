"""The types that a tool's JSON schema gives its arguments, and tagged text as JSON by them."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from specserve.serve.http.formats.written import read_value

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}
# names that are not JSON Schema's, of tools that were described by hand or from Python
_SPELLED = {"str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean"}
_SPELLED |= {"dict": "object", "list": "array", "none": "null"}
_MOST_NESTED = 8  # schemas within schemas that are looked into


def typed(schema: Mapping[str, Any], name: str, text: str) -> str:
    """Return the text of a tagged argument as JSON: by its tool's schema `1` is a number or text. What is no value of
    another type is text."""
    types = argument_types(schema, name)
    if "string" not in types or (text.strip() == "null" and "null" in types):
        try:
            return json.dumps(read_value(text), ensure_ascii=False)
        except (ValueError, SyntaxError):
            pass
    return json.dumps(text, ensure_ascii=False)


def fits(schema: Mapping[str, Any], name: str, text: str) -> bool:
    """Return whether the text of a tagged argument is a value of one of the types that its schema allows."""
    types = argument_types(schema, name)
    return not types or "string" in types or not typed(schema, name, text).startswith('"')


def argument_types(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the JSON types that a tool's schema lets an argument have. They are empty where it says nothing."""
    found: set[str] = set()
    for own in _arguments_named(schema, name, schema, 0):
        found = _both(found, _types(own, schema, 0))
    return found


def _arguments_named(schema: Any, name: str, root: Mapping[str, Any], depth: int) -> Iterator[Any]:
    """Yield every schema that an argument of that name must follow, or may."""
    for part in _parts(schema, root, depth):
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        elif matching := _matching(part, name):
            yield from matching
        elif part.get("additionalProperties"):
            yield part["additionalProperties"]
        for each in _listed(part, "allOf", "anyOf", "oneOf"):
            yield from _arguments_named(each, name, root, depth + 1)


def _matching(schema: Mapping[str, Any], name: str) -> list[Any]:
    """Return what `patternProperties` has for an argument of that name. Expressions that are no Python's are left."""
    found, patterns = list[Any](), schema.get("patternProperties")
    for pattern, own in patterns.items() if isinstance(patterns, Mapping) else ():
        with contextlib.suppress(re.error):
            found += [own] if re.search(pattern, name) else []
    return found


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    found: set[str] = set()
    for part in _parts(schema, root, depth):
        kinds, values = part.get("type"), part.get("enum")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        kinds = [each.lower() for each in kinds if isinstance(each, str)]  # Google's clients have them in capitals
        found = _both(found, {_SPELLED.get(each, each) for each in kinds})
        values = [*(values if isinstance(values, list) else []), *([part["const"]] if "const" in part else [])]
        found = _both(found, {_TYPES.get(type(value), "object") for value in values})
        for name in ("anyOf", "oneOf"):
            found = _both(found, set().union(*(_types(each, root, depth + 1) for each in _listed(part, name))))
        for each in _listed(part, "allOf"):
            found = _both(found, _types(each, root, depth + 1))
    return found


def _parts(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, and those that it refers to: all of them hold."""
    for _ in range(depth, _MOST_NESTED):
        if not isinstance(schema, Mapping):
            return
        yield schema
        schema = _referred(schema.get("$ref", schema.get("$dynamicRef")), root)


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return what a reference within the tool's own schema points to. None where there is nothing."""
    found: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _listed(schema: Mapping[str, Any], *names: str) -> Iterator[Any]:
    for name in names:
        each = schema.get(name)
        yield from each if isinstance(each, list) else ()


def _both(types: set[str], others: set[str]) -> set[str]:
    """Return the types that two schemas allow together. No types say nothing."""
    if not (types and others):
        return types or others
    if "number" in types | others:  # of which integers are some
        types, others = (each | {"integer"} if "number" in each else each for each in (types, others))
    return types & others or types
