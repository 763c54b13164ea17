"""JSON as it is read and written here: in C where it is short, and in Python where it has many values. The codecs in C
let no other thread run before they are done, which takes seconds for millions of values, and other clients' streams are
sent by another thread."""

import itertools
import json
import json.scanner
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined] (of one string: it has no end of values in it)
from typing import Any

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

Json = dict[str, Any]

MAX_VALUES = 2**19  # about; more are refused, as making and freeing them holds all threads as well
MAX_CONTAINERS = 2**17  # lists and objects, all of which Python's garbage collector may have to walk at once
MAX_AT_ONCE = 2**15  # for what is done in C: some milliseconds
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))  # of all that is sent


@with_config(ConfigDict(extra="forbid", strict=True))
class ReplyObject(TypedDict):
    """The base of the JSON objects that the server sends. /openapi.json has its schemas from them. An object has the
    members named in its type and no others, unless its docstring gives a reason."""


def encoded(value: Any, *, is_long: bool) -> str:
    """Return a part of a stream as JSON. `is_long`: it may have many values."""
    return write_json(value) if is_long else ENCODER.encode(value)  # in C, for there are many parts


def is_long(raw: bytes) -> bool:
    """Return whether a text may have more than `MAX_AT_ONCE` values. Raises ValueError where it has more than
    `MAX_VALUES`, or `MAX_CONTAINERS`."""
    num_commas, num_containers = raw.count(b","), raw.count(b"[") + raw.count(b"{")
    if num_commas > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES} values, by its commas")
    if num_containers > MAX_CONTAINERS:
        raise ValueError(f"it has more than {MAX_CONTAINERS} lists and objects, by its brackets")
    return num_commas > MAX_AT_ONCE


def read_json(raw: bytes, refuse_duplicates: Callable[[list[tuple[str, Any]]], None]) -> Any:
    """Read a text as pydantic's strict reader does. `refuse_duplicates` raises ValueError for the members of an object
    that has two of one name. Raises ValueError for everything that is no strict JSON."""

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        refuse_duplicates(pairs)
        return dict(pairs)

    decoder = json.JSONDecoder(object_pairs_hook=as_dict, parse_constant=_refuse_constant)
    decoder.parse_string = _parse_string  # type: ignore[attr-defined]
    decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    text = raw.decode("utf-8")
    try:
        return decoder.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(value: Any) -> str:
    """Return what `ENCODER` makes of a value, without making other threads wait for it."""
    pieces, parts = ENCODER.iterencode(value), []
    while part := "".join(itertools.islice(pieces, MAX_AT_ONCE)):
        parts.append(part)
    return "".join(parts)


def _parse_string(text: str, end: int, strict: bool = True) -> tuple[str, int]:
    found, end = scanstring(text, end, strict)
    found.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
    return found, end


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
