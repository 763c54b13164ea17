"""`specserve export`, `import` and `inspect`: heads from and for other engines, and what is wrong with them."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from specserve.checkpoints.load import Target
from specserve.checkpoints.source import GGUF, resolve_target
from specserve.errors import CheckpointError, ConfigError, SpecServeError
from specserve.interop import convert as exchange
from specserve.interop import doctor
from specserve.interop.bundled import find_head
from specserve.interop.convert import describe_target
from specserve.interop.findings import Dialect, DoctorReport, Finding
from specserve.interop.formats import format_for, format_of
from specserve.interop.notes import read_notes
from specserve.mesh import default_dtype
from specserve.provenance import collect

Dtype = Literal["", "bfloat16", "float16", "float32"]
TARGET_HELP = (
    "Preset, folder, GGUF file or hub id; left out: the one that the head was trained for. Its config.json is enough."
)
RUN_LIMIT, RUN_TOKENS = 16, 64  # questions and tokens of an answer, where a head is run
COLORS = {"error": "red", "warning": "yellow"}
LIMIT_HELP = f"With --prompts: so many questions, evenly spread (default: {RUN_LIMIT})."
FACTOR_HELP = "Stretch its rotary embedding by YaRN, for texts so many times longer than it was trained on."
LENGTH_HELP = "With --rope-factor: tokens of the rows that it was trained on."
LONGEST_HELP = f"With --prompts: longest answer (default: {RUN_TOKENS})."


def export(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A head: what `specserve train` wrote, or any that `serve` takes, a bundled one by its name."
        ),
    ],
    to: Annotated[Dialect, typer.Option("--to", help="The engine that is to read it.")],
    output: Annotated[Path | None, typer.Option(help="Folder to write; left out: FOLDER-TO.")] = None,
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "",
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; left out: as they are stored.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    rope_factor: Annotated[float | None, typer.Option(help=FACTOR_HELP, min=1.0)] = None,
    rope_length: Annotated[int | None, typer.Option(help=LENGTH_HELP, min=1)] = None,
) -> None:
    """Write `folder` in the layout of the engine `to`, and warn of what that engine does not compute."""
    if (rope_factor is None) != (rope_length is None):
        raise ConfigError("--rope-factor and --rope-length go together: give both, or neither")
    stretch = None if rope_factor is None or rope_length is None else (rope_factor, rope_length)
    given, folder = folder, _existing(folder)
    name, described = _target(folder, target, needs_weights=to == "speculators" and not _has_embedding(folder))
    stem = given.stem if given.suffix == GGUF else folder.resolve().name
    output = output or given.expanduser().with_name(f"{stem}-{to}")
    head = exchange.export_head(
        folder, output, described, target_name=name, dialect=to, dtype=dtype, is_forced=force, stretch=stretch
    )
    console = Console(soft_wrap=True)
    for what in format_for(head.drafter.name).unknown_to(to, head.drafter):
        console.print(f"[yellow]warning:[/] {to} does not compute {what}: it will accept less", highlight=False)
    console.print(f"{escape(str(output))}: for {to}", highlight=False)


def import_(
    folder: Annotated[Path, typer.Argument(help="A head as SGLang, vLLM, speculators or SpecForge have it.")],
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "",
    output: Annotated[Path, typer.Option(help="Folder to write, for `serve --draft` and for training.")] = Path("ckpt"),
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; left out: as they are stored.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
) -> None:
    """Write `folder` in our own layout, and print what was mended on the way."""
    folder = _existing(folder)
    name, described = _target(folder, target, needs_weights=_has_embedding(folder))
    found = exchange.import_head(folder, output, described, target_name=name, dtype=dtype, is_forced=force)
    console = Console(soft_wrap=True)
    for change in found.changes:
        console.print(f"[green]mended:[/] {escape(change)}", highlight=False)
    drafter = found.head.drafter
    console.print(
        f"{escape(str(output))}: read as {found.dialect}, taps {drafter.aux_layers}, draft vocabulary "
        f"{drafter.draft_vocab_size:,} of {drafter.vocab_size:,}; next: "
        f"[bold]specserve serve --draft {escape(shlex.quote(str(output)))}[/]",
        highlight=False,
    )


def inspect(
    folder: Annotated[Path, typer.Argument(help="A head in any layout, or a bundled one's name.")],
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    fix: Annotated[Path | None, typer.Option(help="Write a mended copy to this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="With --fix: into a folder that is not empty.")] = False,
    prompts: Annotated[str, typer.Option(help="Run it too, on these questions: pydoc, or any bench of `eval`.")] = "",
    limit: Annotated[int | None, typer.Option(help=LIMIT_HELP, min=1)] = None,
    max_tokens: Annotated[int | None, typer.Option(help=LONGEST_HELP, min=4)] = None,
) -> None:
    """Print the findings about `folder`, and with `fix` what is left of them in the mended copy. Errors exit with 1."""
    folder = _existing(folder)
    for name, value in (("--limit", limit), ("--max-tokens", max_tokens)):
        if value is not None and not prompts:
            raise ConfigError(f"{name} is for running the head: give --prompts with it")
    if force and fix is None:
        raise ConfigError("--force is for a folder that --fix writes: give --fix with it")
    noted = str(read_notes(folder).get("target", ""))
    described, unchecked = None, "no target given (--target)"
    if target or noted:
        try:
            described = _target(folder, target, needs_weights=False)[1]
        except SpecServeError:
            if target:
                raise
            unchecked = f"its target, {noted}, cannot be read here (--target)"
    report = doctor.examine(folder, described)
    running: dict[str, Any] = {}
    if prompts:
        sizes = limit or RUN_LIMIT, max_tokens or RUN_TOKENS
        report, running = _run(folder, target or noted, report, prompts, *sizes)
    after: DoctorReport | None = None
    if fix is not None:
        exchange.check_output(folder, fix, is_forced=force)
        tensors, raw = report.repaired()
        notes = read_notes(folder)
        exchange.write_folder(fix, lambda partial: exchange.write_head(partial, tensors, raw, notes))
        after = doctor.examine(fix, described)
    if described:
        unchecked = ""
    if as_json:
        shown = report.to_json() | {"unchecked": unchecked}
        if running:
            shown |= {"running": running, "provenance": collect()}
        if after:
            shown |= {"changes": report.changes, "mended": after.to_json()}
        print(json.dumps(shown, indent=2))
    else:
        _show(report, unchecked)
        if after:
            _show_repaired(report, after)
    if (after or report).errors:
        raise typer.Exit(1)


def _run(
    folder: Path, target: str, report: DoctorReport, prompts: str, limit: int, max_tokens: int
) -> tuple[DoctorReport, dict[str, Any]]:
    """Run the head over prompts, and add the results to the report. Where its files cannot be loaded, that is
    reported instead: their findings show why."""
    if not target:
        raise ConfigError(f"{folder} does not say which target it was trained for; give it with --target to run it")
    from specserve.eval import trial  # models and their code, which nothing else here needs

    loaded = trial.load_target_of(folder, target)
    asked = trial.render_prompts(loaded, prompts, limit)
    with Console(stderr=True).status("running it") as status:
        try:
            found = trial.run_head(
                folder,
                loaded,
                asked,
                max_tokens=max_tokens,
                dtype=default_dtype(),
                on_repair=lambda done, total, what: status.update(f"trying {done + 1} of {total}: {escape(what)}"),
            )
        except (CheckpointError, ConfigError) as error:
            facts = report.facts | {"running": f"it cannot be loaded: {error}"}
            return dataclasses.replace(report, facts=facts), {"error": str(error)}
    report = dataclasses.replace(report, findings=[*report.findings, *found.findings])
    return dataclasses.replace(report, facts=report.facts | {"running": found.summary()}), found.to_json()


def _existing(folder: Path) -> Path:
    found = find_head(str(folder), "FOLDER")
    if found is None:
        raise ConfigError(f"{folder.expanduser()}: no such folder; expected one with config.json and model.safetensors")
    folder = found
    if (folder / "pytorch_model.bin").is_file() and not list(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder}: pytorch_model.bin is a pickle, which can run code when opened. Convert it where torch is, "
            'in that folder: python -c "import torch, safetensors.torch as s; s.save_file({k: v.contiguous() for k, v '
            "in torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')\""
        )
    return folder


def _has_embedding(folder: Path) -> bool:
    """Return whether the head brings its own embedding along. An import compares it with the target's. An export to a
    layout in which every head has one takes the target's where it is missing. No other weight of the target is ever
    read."""
    return format_of(folder).has_own_embedding(folder)


def _target(folder: Path, name: str, *, needs_weights: bool) -> tuple[str, Target]:
    """Resolve the target that was asked for, else the one that the head's notes name. Raises ConfigError where neither
    is known."""
    name = name or str(read_notes(folder).get("target", ""))
    if not name:
        raise ConfigError(f"{folder} does not say which target it was trained for; give it with --target")
    source = resolve_target(name, needs_weights=needs_weights)
    return source.name, describe_target(source.folder)


def _show(report: DoctorReport, unchecked: str) -> None:
    """Print the facts, tensors and findings. `unchecked` says why nothing was compared with a target; empty: it was."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(str(report.folder))}[/]")
    facts = Table.grid(padding=(0, 2))
    for name, value in report.facts.items():
        facts.add_row(f"[dim]{name}[/]", escape(value))
    console.print(facts)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", justify="right")
    table.add_column("dtype")
    for name, shape, dtype in report.tensors:
        table.add_row(escape(name), " x ".join(f"{size}" for size in shape), dtype)
    console.print()
    console.print(table)
    console.print()
    for finding in report.findings:
        _show_finding(console, finding)
    if unchecked:
        console.print(f"[dim]{escape(unchecked)}: taps, rotary settings, lengths and tokens went unchecked[/]")
    num_errors = len(report.errors)
    num_warnings = len(report.findings) - num_errors
    if report.findings:
        console.print(f"[bold]{_count(num_errors, 'error')}, {_count(num_warnings, 'warning')}[/]")
    else:
        console.print("[bold green]nothing is wrong with it[/]")


def _show_finding(console: Console, finding: Finding) -> None:
    color = COLORS[finding.level]
    console.print(f"[bold {color}]{finding.level}[/] {finding.code}: [bold]{escape(finding.what)}[/]")
    how = finding.mend + (" (--fix does)" if finding.fix else " (by hand)")
    grid = Table.grid(padding=(0, 1))
    for name, value in (
        ("where", finding.where),
        ("expected", finding.expected),
        ("got", finding.got),
        ("so", finding.consequence),
        ("to mend", how),
    ):
        grid.add_row(f"[dim]{name}[/]", escape(value))
    console.print(Padding(grid, (0, 0, 1, 2)))


def _show_repaired(report: DoctorReport, after: DoctorReport) -> None:
    console = Console(highlight=False)
    console.print()
    console.print(f"[bold]{escape(str(after.folder))}[/]: a mended copy")
    grid = Table.grid(padding=(0, 1))
    for change in report.changes:
        grid.add_row("[green]changed[/]", escape(change))
    for finding in after.findings:
        grid.add_row("[yellow]left[/]", escape(f"{finding.where}: {finding.what}"))
    console.print(Padding(grid, (0, 0, 0, 2)))
    if not report.changes:
        console.print("  nothing could be mended without guessing" if report.findings else "  nothing was to be mended")


def _count(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"
