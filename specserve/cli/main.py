"""The `specserve` command. Commands are imported when they run, so that `--help` answers at once."""

import sys

import typer

from specserve import __version__, host
from specserve.cli import bench, checkpoints, data, evaluate, quickstart, serve, targets, train
from specserve.cli.options import show_error
from specserve.errors import SpecServeError

app = typer.Typer(
    name="specserve",
    help="Speculative decoding, trained and served by the same code.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quickstart")(quickstart.quickstart)
app.command("train")(train.train)
app.command("serve")(serve.serve)
app.command("eval")(evaluate.evaluate)
app.command("targets")(targets.targets)
app.command("export")(checkpoints.export)
app.command("import")(checkpoints.import_)
app.command("inspect")(checkpoints.inspect)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True)) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: an error a user can mend is one message, without a traceback, and exit status 2."""
    status: int | str | None = 0
    try:
        app()
    except SpecServeError as error:
        show_error(error)
        status = 2
    except SystemExit as end:
        status = end.code
    if host.is_compiling():
        host.leave(status if isinstance(status, int) else int(status is not None))
    sys.exit(status)


if __name__ == "__main__":
    main()
