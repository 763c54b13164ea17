"""The `specserve` command: a table of all commands, with their help, and where their code is."""

import sys
from collections.abc import Mapping
from typing import ClassVar

import typer

from specserve import __version__, host
from specserve.cli.lazy import Lazy, LazyGroup
from specserve.errors import SpecServeError


class Root(LazyGroup):
    """The commands of `specserve` itself; `bench`, `plan` and `data` are groups of their own."""

    lazy: ClassVar[Mapping[str, Lazy]] = {
        "quickstart": Lazy(
            "specserve.cli.quickstart:quickstart",
            "Train a head on the bundled target, evaluate it on held-out prompts, serve it, and ask it something.",
        ),
        "doctor": Lazy(
            "specserve.cli.doctor:doctor",
            "Show what this machine has, what is wrong with it, and the fix. Exit status 1 where there are errors.",
        ),
        "train": Lazy(
            "specserve.cli.train:train",
            "Train a draft head for a target, on its own answers, and write it to a folder that `serve --draft` takes.",
            "specserve.train.settings:TrainRun",
            "specserve.train.run.recipe:fill",
        ),
        "serve": Lazy(
            "specserve.cli.serve:serve",
            "Serve a target with a draft head over HTTP. Without arguments: the bundled target with the bundled head.",
            "specserve.serve.settings:ServeRun",
        ),
        "serve config": Lazy(
            "specserve.cli.serve:config",
            "Print the YAML by which Ray Serve runs the same as `serve --ray` does: for `serve deploy` or KubeRay.",
            "specserve.serve.settings:ServeRun",
        ),
        "chat": Lazy(
            "specserve.cli.chat:chat",
            "Talk with a target in the terminal. Accepted draft tokens are coloured by their depth.",
        ),
        "eval": Lazy(
            "specserve.cli.evaluate:evaluate",
            "Measure tau, acceptance by depth and category, and the gain over plain decoding, of heads or a server.",
            "specserve.eval.settings:EvalRun",
        ),
        "verify": Lazy(
            "specserve.cli.verify:verify",
            "Prove on your own target and head that speculation changes no token. Exit status 1 where there are bugs.",
            "specserve.eval.settings:VerifyRun",
        ),
        "targets": Lazy(
            "specserve.cli.targets:targets",
            "List the targets that have a name here: their size, memory in bfloat16 and the head to train.",
        ),
        "export": Lazy(
            "specserve.cli.checkpoints:export",
            "Write a head as another engine reads it, its weights bit for bit.",
        ),
        "import": Lazy(
            "specserve.cli.checkpoints:import_",
            "Read a head from elsewhere and write it as ours. What is wrong and can be repaired without guessing "
            "is repaired.",
        ),
        "inspect": Lazy(
            "specserve.cli.checkpoints:inspect",
            "Say what is wrong with a head's files, what it costs and how to mend it. Exit status 1 where there are "
            "errors.",
        ),
    }


class BenchCommands(LazyGroup):
    """The commands of `specserve bench`."""

    lazy: ClassVar[Mapping[str, Lazy]] = {
        "engine": Lazy(
            "specserve.cli.bench:engine",
            "Measure plain decoding, fixed speculations and `auto` on the same questions in one process, in turns.",
            "specserve.eval.settings:BenchRun",
        ),
        "latency": Lazy(
            "specserve.cli.bench_offline:latency",
            "Time one batch again and again, its steps in parts, and their share of what the machine can do.",
            "specserve.eval.settings:LatencyRun",
        ),
        "throughput": Lazy(
            "specserve.cli.bench_offline:throughput",
            "Time many prompts that are all there from the beginning, and the engine's steps as `latency` does.",
            "specserve.eval.settings:ThroughputRun",
        ),
        "quantization": Lazy(
            "specserve.cli.bench_quantization:quantization",
            "Measure what weights in few bits change: KL divergence, perplexity, answers, and the head's tau.",
            "specserve.eval.settings:QuantizationRun",
        ),
    }


class PlanCommands(LazyGroup):
    """The commands of `specserve plan`."""

    lazy: ClassVar[Mapping[str, Lazy]] = {
        "serve": Lazy(
            "specserve.cli.plan:serve",
            "Say what a load takes on given devices: replicas, memory, tokens per second, the tau that pays.",
            "specserve.plan.settings:PlanServeRun",
        ),
        "devices": Lazy(
            "specserve.cli.plan:devices",
            "List the devices that plans know: memory, bandwidth, operations, links, and where figures are from.",
        ),
    }


class DataCommands(LazyGroup):
    """The commands of `specserve data`."""

    lazy: ClassVar[Mapping[str, Lazy]] = {
        "prepare": Lazy(
            "specserve.cli.data_view:prepare",
            "Read, tokenise and pack a mixture once, into the cache that training reads; account for every row of it.",
            "specserve.data.settings:PrepareRun",
        ),
        "inspect": Lazy(
            "specserve.cli.data_view:inspect",
            "Show what training will see: rows with the loss-bearing tokens coloured, counts, lengths, vocabulary "
            "coverage.",
            "specserve.data.settings:InspectRun",
        ),
        "regenerate": Lazy(
            "specserve.cli.data:regenerate",
            "Have the target answer the questions of a data set itself: its own answers are what a draft must predict.",
            "specserve.answers.settings:RegenerateRun",
        ),
        "capture": Lazy(
            "specserve.cli.data:capture",
            "Capture the target's hidden states for a run, which then trains without the target; with --ray by many.",
            "specserve.train.settings:TrainRun",
            "specserve.train.run.recipe:fill",
        ),
    }


app = typer.Typer(
    cls=Root,
    name="specserve",
    help="Speculative decoding, trained and served by the same code.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(
    typer.Typer(cls=BenchCommands, help="Measurements of speed, and of what few bits cost.", no_args_is_help=True),
    name="bench",
)
app.add_typer(typer.Typer(cls=PlanCommands, help="Fleets of servers on paper.", no_args_is_help=True), name="plan")
app.add_typer(typer.Typer(cls=DataCommands, help="Training data.", no_args_is_help=True), name="data")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True)) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line. An error that a user can mend is one message without a traceback, and exit status 2."""
    status: int | str | None = 0
    host.own_process()
    host.take_gpu_memory()
    try:
        app()
    except SpecServeError as error:
        from specserve.cli.options import show_error  # imports pydantic, which `specserve --help` does not wait for

        show_error(error)
        status = 2
    except SystemExit as end:
        status = end.code
    if host.is_compiling():
        host.leave(status if isinstance(status, int) else int(status is not None))
    sys.exit(status)


if __name__ == "__main__":
    main()
