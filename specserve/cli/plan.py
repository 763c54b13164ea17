"""`specserve plan`: a fleet of servers on paper, and the devices that are known."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specserve.cli.plan_view import in_bytes, make_table, memory_table, whose
from specserve.cli.targets import short
from specserve.devices import DEVICES
from specserve.drafters.speculation import describe
from specserve.models.presets import target_size
from specserve.plan.compiled import CompiledStep, compile_steps
from specserve.plan.serving import ServePlan, make_serve_plan
from specserve.plan.settings import PlanServeRun

OTHERS = 5  # meshes that are shown besides


def serve(run: PlanServeRun) -> None:
    """Print what a load takes and brings. Raises ConfigError or CheckpointError."""
    if run.compile:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns of facts that only a device has
    plan = make_serve_plan(run)
    steps = compile_steps(plan) if run.compile else ()
    if run.json:
        found = plan.to_json() | ({"compiled": [step.to_json() for step in steps]} if run.compile else {})
        print(json.dumps(found, indent=2))
        return
    tables = [_outline(plan), memory_table("Memory of each device", plan.fleet.fit.memory), _load(plan)]
    if steps:
        tables.append(_compiled(steps))
    if plan.others:
        tables.append(_others(plan))
    console = Console()
    for table in tables:
        console.print(table, highlight=False)
        console.print()


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


def _outline(plan: ServePlan) -> Table:
    order, fleet = plan.order, plan.fleet
    run, reached, size = order.run, order.reached, target_size(order.target)
    shown = make_table("The plan", "", "")
    active = f", {short(size.active)} active" if size.active < size.total else ""
    dtype = f"{run.quantization} matrices" if order.is_quantized else order.target.dtype
    shown.add_row("target", escape(f"{run.target}, {short(size.total)} parameters{active}; {dtype}"))
    shared = f", of which {run.shared_prompt:,} are shared and cached" if run.shared_prompt else ""
    load = f"{run.qps:g} requests a second, each of {run.prompt:,} tokens{shared}, and {run.answer:,} to answer"
    shown.add_row("load", load)
    on, left = fleet.mesh or "one device", order.num_devices - fleet.replicas * fleet.devices
    if left:
        on += f"; {left} devices are left over"
    shown.add_row("replicas", f"{fleet.replicas} on {fleet.devices} x {order.device.name} each: {on}")
    shown.add_row("step costs", escape(fleet.costs.source))
    if reached is not None:
        published = f"{reached.tau}{whose(reached, run.target)}"
        shown.add_row("expected tau", escape(f"{order.tau:.2f} with {run.speculation}; published: {published}"))
    if order.tree is not None:
        plain = fleet.states["plain"].batch
        batch = f"{plain:.1f}" if plain >= 0.05 else "fewer than 0.1"
        shown.add_row(
            "break-even tau", f"{fleet.break_even_tau:.2f} at {batch} sequences at once, as many as plain decoding has"
        )
    return shown


def _load(plan: ServePlan) -> Table:
    columns = ("tau", "tokens/s", "requests/s at most", "at once", "step ms", "ms per token", "first token ms")
    shown = make_table("The load on all replicas", "", *columns)
    for tree, state in zip((None, plan.order.tree), plan.fleet.states.values(), strict=False):
        replicas = plan.fleet.replicas
        full = "  [red]full[/]" if state.is_full else ""
        shown.add_row(
            *(f"{describe(tree)}{full}", f"{state.tau:.2f}", f"{replicas * state.tokens_per_second:,.0f}"),
            *(f"{replicas * state.most_requests:,.1f}", f"{state.batch:,.1f}", f"{1e3 * state.step_seconds:.2f}"),
            *(f"{1e3 * state.token_seconds:.2f}", f"{1e3 * state.first_token_seconds:,.1f}"),
        )
    shown.caption = "at once: sequences that decode in a replica; first token: before any queue"
    return shown


def _compiled(steps: Sequence[CompiledStep]) -> Table:
    columns = ("at once", "reads", "beside its arguments", "launches", "in parts", "ms at least", "of the bound")
    shown = make_table("Steps as XLA compiles them for these devices", "", *columns)
    for step in steps:
        shown.add_row(
            *(step.way, str(step.batch), in_bytes(step.read), in_bytes(step.counted.temporary_bytes)),
            *(str(step.counted.launches or "-"), str(step.counted.parts or "-")),
            *(f"{1e3 * step.seconds:.2f}", f"{step.bound / step.seconds:.0%}"),
        )
    shown.caption = (
        "of each device; at once: sequences and padding; launches: kernels and copies; in parts: what the host starts; "
        "the bound: weights, keys and values at the memory's full bandwidth"
    )
    return shown


def _others(plan: ServePlan) -> Table:
    shown = make_table("Other meshes that carry it", "", "replicas", "requests/s at most", "at once", "ms per token")
    for fleet in plan.others[:OTHERS]:
        shown.add_row(
            *(fleet.mesh or "one device", str(fleet.replicas), f"{fleet.most_requests:,.1f}"),
            *(f"{fleet.best.batch:,.1f}", f"{1e3 * fleet.best.token_seconds:.2f}"),
        )
    return shown
