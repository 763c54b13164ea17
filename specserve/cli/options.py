"""What commands share: settings as flags, start-up (logging, memory), and how an error is said."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from specserve import config, host, log
from specserve.errors import SpecServeError

Schema = TypeVar("Schema")


def command(schema: type[Schema]) -> Callable[[Callable[[Schema], None]], Callable[..., None]]:
    """Make a command of a function that takes resolved settings: every setting is a flag, `--config` reads YAML,
    `--set a.b=c` overrides it."""

    def wrap(run: Callable[[Schema], None]) -> Callable[..., None]:
        def invoke(config_file: Path | None, overrides: list[str] | None, log_level: str, **flags: Any) -> None:
            start(log_level)
            run(config.resolve(schema, file=config_file, overrides=overrides or (), flags=config.flags_from(flags)))

        common = {
            "config_file": Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")],
            "overrides": Annotated[list[str] | None, typer.Option("--set", help="section.name=value, repeatable.")],
            "log_level": Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")],
        }
        kind = inspect.Parameter.KEYWORD_ONLY
        defaults: dict[str, Any] = {"config_file": None, "overrides": None, "log_level": "info"}
        parameters = [
            inspect.Parameter(name, kind, default=defaults[name], annotation=annotation)
            for name, annotation in common.items()
        ]
        invoke.__signature__ = inspect.Signature(parameters + config.cli_parameters(schema))  # type: ignore[attr-defined]
        invoke.__doc__ = run.__doc__
        invoke.__name__ = run.__name__
        return invoke

    return wrap


def start(log_level: str = "info") -> None:
    """Logging, and how memory is kept."""
    log.setup(log_level)
    host.keep_freed_memory()  # before there are threads


def show_error(error: SpecServeError) -> None:
    """One line on stderr, whatever brackets a path or an advice in it has."""
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
