"""docs/commands.md as the command line describes itself: every command of `specserve.cli.main`, with its arguments and
options. `python tests/house/test_docs.py` writes it."""

import importlib
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any

from typer.models import ArgumentInfo

from specserve import config
from specserve.cli.lazy import Lazy
from specserve.cli.main import BenchCommands, DataCommands, PlanCommands, Root

GROUPS = {"": Root, "data": DataCommands, "bench": BenchCommands, "plan": PlanCommands}
OF_ALL_SETTINGS = "Also `--config FILE`, `--set section.name=value` and `--log-level LEVEL`."


def commands(with_settings: dict[type, str]) -> str:
    """Return a list of all commands, then a section for each. `with_settings`: the page that has the table of a
    schema's settings, to which a command of this schema leads instead of repeating it."""
    every = [(f"{group} {name}".strip(), lazy) for group, of in GROUPS.items() for name, lazy in of.lazy.items()]
    rows = [
        f"| [`specserve {name}`](#specserve-{name.replace(' ', '-')}) | {_cell(lazy.help)} |" for name, lazy in every
    ]
    sections = [f"## specserve {name}\n\n{lazy.help}\n\n{_options(lazy, with_settings)}" for name, lazy in every]
    return "\n".join(["| command | |", "|---|---|", *rows, "", *sections])


def settings_table(schema: type) -> str:
    rows = ["| setting | flag | default | takes | |", "|---|---|---|---|---|"]
    for leaf in config.leaves(schema):
        rows.append(f"| `{leaf.name}` | `{leaf.flag}` | {default_text(leaf)} | {_cell(leaf.expected)} | {leaf.help} |")
    return "\n".join(rows) + "\n"


def default_text(leaf: config.Leaf) -> str:
    return "required" if leaf.field.is_required() else _value(leaf.default)


def _options(lazy: Lazy, with_settings: dict[type, str]) -> str:
    if not lazy.settings:
        rows = [f"| {' | '.join(row)} |" for row in _of_signature(_load(lazy.body))]
        return "\n".join(["| option | default | takes | |", "|---|---|---|---|", *rows]) + "\n"
    schema = _load(lazy.settings)
    if schema in with_settings:
        return f"Its settings have [a table of their own]({with_settings[schema]}). {OF_ALL_SETTINGS}\n"
    return f"{settings_table(schema)}\n{OF_ALL_SETTINGS}\n"


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _of_signature(body: Any) -> Iterator[tuple[str, str, str, str]]:
    hints = typing.get_type_hints(body, include_extras=True)
    for name, parameter in inspect.signature(body).parameters.items():
        kind, info = typing.get_args(hints[name])
        dashed = name.replace("_", "-")
        if isinstance(info, ArgumentInfo):
            written = dashed.upper()
        elif flags := [each for each in (info.default, *(info.param_decls or ())) if str(each).startswith("--")]:
            written = flags[0]
        else:
            written = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
        default = "required" if parameter.default in (inspect.Parameter.empty, ...) else _value(parameter.default)
        yield f"`{written}`", default, _cell(_kind(kind)), _cell(info.help or "")


def _kind(kind: Any) -> str:
    if isinstance(kind, UnionType) or typing.get_origin(kind) is typing.Union:
        return _kind(next(each for each in typing.get_args(kind) if each is not type(None)))
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    if typing.get_origin(kind) is list:
        return f"{_kind(typing.get_args(kind)[0])}, repeatable"
    return {bool: "true or false", int: "an integer", float: "a number", Path: "a path"}.get(kind, "text")


def _value(value: Any) -> str:
    if value is None or value in ("", ()):
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
