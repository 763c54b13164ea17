"""The parts that commands share: settings as flags, the start of logging, how memory is kept, and how an error is
shown."""

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from specserve import config, host, log
from specserve.errors import SpecServeError

Schema = TypeVar("Schema")
OTHERS = "run"  # the panel of root settings that are not listed first
LEVELS = f"{', '.join(log.LEVELS[:-1])} or {log.LEVELS[-1]} (default: info)"
SEPARATOR = "__"  # stands for the dot of a setting's name in the name of a Python parameter


def command(
    schema: type[Schema], fill: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
) -> Callable[[Callable[[Schema], None]], Callable[..., None]]:
    """Make a command of a function that takes resolved settings: every setting is a flag, `--config` reads YAML,
    `--set a.b=c` overrides it. `fill` gives what nobody has given (see `config.resolve`)."""

    def wrap(run: Callable[[Schema], None]) -> Callable[..., None]:
        def invoke(config_file: Path | None, overrides: list[str] | None, log_level: str, **flags: Any) -> None:
            start(log_level)
            given = flags_from(flags)
            run(config.resolve(schema, file=config_file, overrides=overrides or (), flags=given, fill=fill))

        common: list[tuple[str, Any, Any]] = [
            ("config_file", Path | None, typer.Option(None, "--config", help="YAML file of settings.")),
            ("overrides", list[str] | None, typer.Option(None, "--set", help="section.name=value, repeatable.")),
            ("log_level", str, typer.Option("info", "--log-level", help=LEVELS, show_default=False)),
        ]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, kind, default=how, annotation=what) for name, what, how in common]
        settings = cli_parameters(schema)
        # the common options come after what people use first: the ranked settings, else all
        number = sum(leaf.rank > 0 for leaf in config.leaves(schema)) or len(settings)
        ordered = [*settings[:number], *parameters, *settings[number:]]
        invoke.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        invoke.__doc__ = run.__doc__
        invoke.__name__ = run.__name__
        return invoke

    return wrap


def cli_parameters(schema: type) -> list[inspect.Parameter]:
    """Make a keyword-only parameter for each setting, for the `__signature__` of a typer command.

    The flag is the last part of the setting's name, so two settings of one schema may not share it (an AssertionError).
    Settings with a rank come first and stand in the first panel of the help; where a schema has such, the
    others of its root have a panel of their own.
    Each defaults to None, "not given"; pass what the command receives through `flags_from` to `config.resolve`.
    """
    parameters: dict[str, inspect.Parameter] = {}
    leaves = sorted(config.leaves(schema), key=lambda leaf: leaf.rank or sys.maxsize)
    root = OTHERS if leaves[0].rank else None
    for leaf in leaves:
        assert leaf.flag not in parameters, f"{schema.__name__}: {leaf.name} and another setting share {leaf.flag}"
        parameters[leaf.flag] = _parameter(leaf, root)
    return list(parameters.values())


def _parameter(leaf: config.Leaf, root: str | None) -> inspect.Parameter:
    """Make the parameter of a setting. `root` is the panel of those of the schema's root that have no rank."""
    flag, kind, metavar, panel, shown = leaf.flag, leaf.field.annotation, None, leaf.section or root, leaf.help
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    if leaf.is_list:  # typed as one text, or its flag repeats
        kind, metavar = list[str], "A,B,..."
    if leaf.rank:
        panel = None
    if not leaf.field.is_required() and leaf.default not in ("", ()):  # the help text explains an empty default
        shown = f"{shown} (default: {_default_text(leaf.default)})"
    # the parameter's own default is None, "not given"
    option = typer.Option(flag, help=shown, rich_help_panel=panel, show_default=False, metavar=metavar)
    return inspect.Parameter(
        leaf.name.replace(".", SEPARATOR),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],  # type: ignore[operator]
    )


def flags_from(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments that a command got for `cli_parameters`, by dotted name."""

    def given(value: object) -> object:
        if not isinstance(value, list):
            return value
        return ",".join(value) or None

    return {name.replace(SEPARATOR, "."): given(value) for name, value in arguments.items()}


def start(log_level: str = "info") -> None:
    """Set up logging, and let the process keep the memory that it frees (see `host`)."""
    log.setup(log_level)
    host.keep_freed_memory()  # before there are threads


def show_error(error: SpecServeError) -> None:
    """Print the error as one line on stderr. Brackets in it are text, not markup."""
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)


def report_error(error: Exception) -> None:
    """Show an error at once, where the process ends without unwinding."""
    if isinstance(error, SpecServeError):
        show_error(error)
    else:
        traceback.print_exception(error)


def _default_text(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, bool):
        return str(default).lower()
    return str(default)
