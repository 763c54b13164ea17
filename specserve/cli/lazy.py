"""Commands that are imported when they run, so that `--help` answers at once however much a command needs."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from specserve import host


@dataclass(frozen=True)
class Lazy:
    """The place of a command's code, and the help that the list of commands shows. All but `help` are written
    `module:name`."""

    body: str
    help: str
    settings: str = ""  # the schema of a body that takes resolved settings; without one, typer reads its signature
    fill: str = ""  # gives the defaults that depend on the settings that were given (see `config.resolve`)

    def load(self, name: str) -> Any:
        """Make the click command. Where there are settings, the body is imported only once they are found right, so
        that their help and their errors do not wait for JAX."""
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name, help=self.help)(self._function())
        return typer.main.get_command(app)

    def _function(self) -> Callable[..., None]:
        if not self.settings:
            return _imported(self.body)
        from specserve.cli.options import command  # imports pydantic, which `specserve --help` does not wait for

        fill = (lambda given: _imported(self.fill)(given)) if self.fill else None
        return command(_imported(self.settings), fill)(lambda run: _imported(self.body)(run))


class LazyGroup(TyperGroup):
    """A group of commands that a subclass names in `lazy`. They are listed by name and help alone; a command is
    imported when it is called or its own help is asked for. A name may have two words, the first of which is a command
    too."""

    lazy: ClassVar[Mapping[str, Lazy]] = {}

    def __init__(self, *, commands: Mapping[str, Any] | None = None, **attrs: Any) -> None:
        listed = {name: TyperCommand(name, help=lazy.help) for name, lazy in self.lazy.items()}
        super().__init__(commands={**listed, **(commands or {})}, **attrs)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (both := " ".join(args[:2])) in self.lazy and len(args) > 1:
            args = [both, *args[2:]]
        name, command, rest = super().resolve_command(ctx, args)
        if name and name in self.lazy:
            command = self.lazy[name].load(name)
        return name, command, rest


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    host.keep_freed_memory()  # before JAX has threads
    with host.without_collecting():
        return getattr(importlib.import_module(module), name)
