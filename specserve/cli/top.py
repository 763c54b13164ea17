"""`specserve top`: a running server, watched in the terminal."""

import math
import time
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specserve.cli.scrape import Readings, Span, parse
from specserve.errors import ConfigError
from specserve.eval.client import Client, RefusedError, UnreachableError

BAR = 30
ANSWER_SECONDS = 10.0


def top(
    url: Annotated[str, typer.Argument(help="Address of a server of specserve, or of vLLM.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    api_key: Annotated[str, typer.Option(help="Of the server.", envvar="SPECSERVE_API_KEY")] = "",
) -> None:
    """Read /metrics again and again and show what happened meanwhile, until Ctrl-C. A server that does not answer is
    waited for; with `--once` it is an error."""
    with Client(url, api_key, seconds=ANSWER_SECONDS) as client:
        _watch(client, interval, once)


def _watch(client: Client, interval: float, once: bool) -> None:
    watch, console = Readings(), Console(highlight=False)
    if once:
        for wait in (interval, 0.0):
            watch.push(parse(_read(client), time.monotonic()))
            time.sleep(wait)
        console.print(picture(client.url, watch))
        return
    gone = 0.0
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                now = time.monotonic()
                try:
                    watch.push(parse(_read(client), now))
                    gone = 0.0
                except UnreachableError:
                    gone = gone or now
                live.update(picture(client.url, watch, now - gone if gone else None), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _read(client: Client) -> str:
    try:
        return client.text("/metrics")
    except RefusedError as error:
        raise ConfigError(
            f"{client.url}/metrics: {error}; give the key of a server that wants one with --api-key"
        ) from None


def picture(url: str, watch: Readings, seconds_gone: float | None = None) -> RenderableType:
    """Draw what is known of the server now. `seconds_gone`: for how long it has not answered."""
    gone = Text()
    if seconds_gone is not None:
        gone = Text(f"{url} has not answered for {seconds_gone:.0f} s; waiting for it. Ctrl-C leaves", "bold red")
    if not watch:
        return gone
    span = watch.span()
    head = Text.assemble((span.last.model, "bold"), (f"  {url}", "dim"))
    if span.last.programs_left:
        number = f"{span.last.programs_left:.0f}"
        head.append(f"  {number} program{'' if number == '1' else 's'} left to compile", "yellow")
    parts: list[RenderableType] = [head, _numbers(span), Text(), _latency(span)]
    return Group(*parts, gone) if seconds_gone is not None else Group(*parts)


def _numbers(span: Span) -> Table:
    last = span.last
    held = f"{last.usage:.0%} held"
    if last.pages is not None:
        held = f"{last.usage * last.pages:,.0f} of {last.pages:,.0f} held, {last.pages_cached or 0:,.0f} cached"
    grid = Table.grid(padding=(0, 2))
    rows = {
        "tokens/s": f"{span.tokens_per_second:,.0f}, and {span.prompt_tokens_per_second:,.0f} of prompts",
        "sequences": f"{last.running:,.0f} running, {last.waiting:,.0f} waiting, {last.num_ended:,.0f} ended",
        "pages": held,
    }
    steps = {name: count for name, count in span.steps.items() if count > 0}
    if steps:
        most = sorted(steps.items(), key=lambda item: -item[1])
        total = sum(steps.values())
        rows[f"steps, {span.name}"] = ", ".join(f"{name} {count / total:.0%}" for name, count in most)
    for name, value in rows.items():
        grid.add_row(f"[dim]{name}[/]", escape(value))
    _add_acceptance(grid, span)
    return grid


def _add_acceptance(grid: Table, span: Span) -> None:
    found = span.acceptance
    if not found.num_steps:
        grid.add_row("[dim]tau[/]", "[dim]none yet; it is counted when a sequence ends[/]")
        return
    of = "of all steps" if span.last.has_all_steps else "of steps with draft tokens"
    grid.add_row(f"[dim]tau, {span.name}[/]", f"[bold]{found.tau:.2f}[/] {of}")
    for depth, rate in enumerate(found.accept_rate, 1):
        filled = round(BAR * rate)
        bar = Text.assemble(f"{depth}  {rate:.2f} ", ("█" * filled, "green"), ("░" * (BAR - filled), "dim"))
        grid.add_row("[dim]accepted at depth[/]" if depth == 1 else "", bar)


def _latency(span: Span) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"milliseconds, {span.name}")
    for name in ("p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name, histogram in span.latencies.items():
        values = [histogram.quantile(share) for share in (0.5, 0.9, 0.99)]
        table.add_row(name, *("" if math.isnan(value) else f"{1e3 * value:,.0f}" for value in values))
    return table
