"""`specserve doctor`: what this machine has, and what is wrong with it."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from specserve.eval.installation import MachineCheck, examine, summary


def doctor(
    host: Annotated[str, typer.Option(help="Address that a server would listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that a server would listen on.", min=0, max=65535)] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Print what every check found, then each finding with its fix. Errors exit with 1."""
    checks: list[MachineCheck] = []
    console = Console(highlight=False)
    for check in examine((host, port)):
        checks.append(check)
        if not as_json:
            _show(console, check)
    if as_json:
        print(json.dumps(summary(checks), indent=2))
    findings = [finding for check in checks for finding in check.findings]
    errors = sum(finding.level == "error" for finding in findings)
    if not as_json:
        told = f"{errors} errors, {len(findings) - errors} warnings" if findings else "nothing is wrong"
        console.print(f"[bold {'red' if errors else 'yellow' if findings else 'green'}]{told}[/]")
    if errors:
        raise typer.Exit(1)


def _show(console: Console, check: MachineCheck) -> None:
    levels = {finding.level for finding in check.findings}
    mark, color = ("x", "red") if "error" in levels else ("!", "yellow") if levels else ("+", "green")
    line = Table.grid(padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True, width=14)
    line.add_column(overflow="fold")
    line.add_row(f"[{color}]{mark}[/]", f"[bold]{check.name}[/]", escape(check.text))
    console.print(line)
    for finding in check.findings:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(f"[{'red' if finding.level == 'error' else 'yellow'}]{finding.level}[/]", escape(finding.what))
        grid.add_row("[dim]fix[/]", escape(finding.fix))
        console.print(Padding(grid, (0, 0, 0, 17)))
