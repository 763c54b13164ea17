"""`specserve plan`: a fleet of servers on paper and in simulation, and the devices that are known."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specserve.cli.plan_view import in_bytes, make_table
from specserve.cli.targets import short
from specserve.devices import DEVICES
from specserve.drafters.speculation import describe
from specserve.models.presets import target_size
from specserve.plan.serving import PlannedFleet, ServePlan, make_serve_plan
from specserve.plan.settings import PlanServeRun
from specserve.plan.simulate import SimulationReport

SHARES = (50, 90, 99)  # percentiles of what is simulated
OTHERS = 5  # meshes that are shown besides


def serve(run: PlanServeRun) -> None:
    """Print what a load takes and brings. Raises ConfigError or CheckpointError."""
    plan = make_serve_plan(run)
    kinds = (False, True) if plan.tree and run.simulate else (False,) if run.simulate else ()
    reports = {_name(plan, is_speculative): plan.simulate(is_speculative=is_speculative) for is_speculative in kinds}
    if run.json:
        found = plan.to_json()
        found["simulated"] = {name: _summary(plan, report) for name, report in reports.items()} or None
        print(json.dumps(found, indent=2))
        return
    console = Console()
    for shown in (_outline(plan), _memory(plan), _ways(plan), *(_others(plan) if plan.others else ())):
        console.print(shown, highlight=False)
        console.print()
    if reports:
        console.print(_simulated(plan, reports), highlight=False)


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False,
) -> None:
    """Print the table of devices."""
    if as_json:
        print(json.dumps([asdict(device) for device in DEVICES], indent=2))
        return
    shown = make_table(
        "What JAX calls one device, as its maker describes it",
        *("", "memory", "reads", "bfloat16", "8 bits", "links", "beyond"),
    )
    for device in DEVICES:
        shown.add_row(
            *(device.id, in_bytes(device.memory), f"{device.bandwidth / 1e12:.2f} TB/s"),
            *(f"{device.peak / 1e12:,.0f} T", f"{device.peak_8bit / 1e12:,.0f} T"),
            *(f"{device.link / 1e9:,.0f} GB/s", f"{device.network / 1e9:.1f} GB/s"),
        )
    console = Console()
    console.print(shown, highlight=False)
    console.print(
        "Operations per second are dense; links and the network beyond them count one direction. `--devices` takes "
        "chips: a tpu-v7x chip is two devices.",
        style="dim",
        highlight=False,
    )
    for device in DEVICES:
        console.print(f"{device.id}: {escape(device.source)}", style="dim", highlight=False)


def _name(plan: ServePlan, is_speculative: bool) -> str:
    return describe(plan.tree if is_speculative else None)


def _outline(plan: ServePlan) -> Table:
    run, fleet, size = plan.run, plan.fleet, target_size(plan.target)
    shown = make_table("The plan", "", "")
    active = f", {short(size.active)} active" if size.active < size.total else ""
    dtype = f"{run.quantization} matrices" if run.quantization != "none" else plan.target.dtype
    shown.add_row("target", escape(f"{run.target}, {short(size.total)} parameters{active}; {dtype}"))
    shared = f", of which {run.shared_prompt:,} are shared and cached" if run.shared_prompt else ""
    load = f"{run.qps:g} requests a second, each of {run.prompt:,} tokens{shared}, and {run.answer:,} to answer"
    shown.add_row("load", load)
    left = plan.num_devices - fleet.replicas * fleet.devices
    on = f"{fleet.mesh or 'one device'}" + (f"; {left} devices are left over" if left else "")
    shown.add_row("replicas", f"{fleet.replicas} on {fleet.devices} x {plan.device} each: {on}")
    shown.add_row("step costs", escape(fleet.costs.source))
    if plan.reached is not None:
        reached = plan.reached
        whose = "" if reached.target == run.target else f" for {reached.target}, the nearest in size that is known"
        text = f"published: {reached.tau}{whose} ({reached.bench}, {reached.how}; {reached.source})"
        shown.add_row("expected tau", escape(f"{plan.tau:.2f} with {run.speculation}; {text}"))
    if plan.tree is not None:
        batch = f"{fleet.plain.batch:.1f}" if fleet.plain.batch >= 0.05 else "fewer than 0.1"
        shown.add_row(
            "break-even tau", f"{fleet.break_even_tau:.2f} at {batch} sequences at once, as many as plain decoding has"
        )
    return shown


def _memory(plan: ServePlan) -> Table:
    total = in_bytes(sum(part.num_bytes for part in plan.fleet.fit.memory))
    shown = make_table("Memory of each device", "", "bytes", "", footers=("sum", total, ""))
    for part in plan.fleet.fit.memory:
        shown.add_row(part.name, in_bytes(part.num_bytes), part.what)
    return shown


def _ways(plan: ServePlan) -> Table:
    columns = ("tau", "tokens/s", "requests/s at most", "at once", "step ms", "ms per token", "first token ms")
    shown = make_table("The load on all replicas", "", *columns)
    for is_speculative, way in enumerate(plan.fleet.ways):
        replicas = plan.fleet.replicas
        full = "  [red]full[/]" if way.is_full else ""
        shown.add_row(
            f"{_name(plan, bool(is_speculative))}{full}",
            *(f"{way.tau:.2f}", f"{replicas * way.tokens_per_second:,.0f}", f"{replicas * way.most_requests:,.1f}"),
            *(f"{way.batch:,.1f}", f"{1e3 * way.step_seconds:.2f}", f"{1e3 * way.token_seconds:.2f}"),
            f"{1e3 * way.first_token_seconds:,.1f}",
        )
    shown.caption = "at once: sequences that decode in a replica; first token: before any queue"
    return shown


def _others(plan: ServePlan) -> tuple[Table]:
    shown = make_table("Other meshes that carry it", "", "replicas", "requests/s at most", "at once", "ms per token")
    for fleet in plan.others[:OTHERS]:
        shown.add_row(fleet.mesh or "one device", *_row(fleet))
    return (shown,)


def _row(fleet: PlannedFleet) -> Sequence[str]:
    best = fleet.best
    numbers = f"{fleet.most_requests:,.1f}", f"{best.batch:,.1f}", f"{1e3 * best.token_seconds:.2f}"
    return str(fleet.replicas), *numbers


def _summary(plan: ServePlan, report: SimulationReport) -> dict[str, Any]:
    """Summarise a simulation."""
    late = plan.run.seconds / 4  # the fleet begins empty
    pages = plan.fleet.fit.num_pages
    ttft = report.percentiles(lambda answer: 1e3 * answer.ttft, SHARES)
    tpot = report.percentiles(lambda answer: 1e3 * answer.tpot, SHARES)
    return {
        "requests": len(report.answers),
        "tokens_per_second": report.tokens_between(late, plan.run.seconds),
        "tau": report.tau,
        "ttft_ms": dict(zip(map(str, SHARES), ttft, strict=True)),
        "tpot_ms": dict(zip(map(str, SHARES), tpot, strict=True)),
        "prefix_hit_rate": report.hit_rate,
        "preemptions": report.num_preemptions,
        "busy": [busy / max(1, report.end) for busy in report.busy],
        "pages_mean": [held / pages for held in report.mean_pages],
        "pages_most": [held / pages for held in report.most_pages],
        "seconds_until_empty": report.end / 1e9,
    }


def _simulated(plan: ServePlan, reports: dict[str, SimulationReport]) -> Table:
    run = plan.run
    columns = ("tokens/s", "TTFT ms 50, 90, 99 %", "ms per token 50, 90, 99 %", "cached", "busy", "pages, most")
    shown = make_table(f"Simulated: {run.seconds:g} s of load, {run.routing}, seed {run.seed}", "", *columns)
    for name, report in reports.items():
        found = _summary(plan, report)
        spread = [" ".join(f"{value:,.1f}" for value in found[key].values()) for key in ("ttft_ms", "tpot_ms")]
        busy, pages = found["busy"], found["pages_most"]
        shown.add_row(
            *(name, f"{found['tokens_per_second']:,.0f}", *spread, f"{found['prefix_hit_rate']:.0%}"),
            *(f"{min(busy):.0%} to {max(busy):.0%}", f"{max(pages):.0%}"),
        )
    shown.caption = (
        "tokens/s: after the first quarter, as the fleet begins empty; busy: the least and most of a replica"
    )
    return shown
