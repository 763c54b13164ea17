"""The text that `specserve train` prints before it begins, and what `--dry-run` prints besides."""

import itertools
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from specserve import config
from specserve.devices import DEVICES, SHARE_OF_PEAK
from specserve.plan.collectives import span
from specserve.plan.outline import Outline, answer_tokens, outline
from specserve.plan.taus import Reached
from specserve.plan.training import RunPlan
from specserve.plan.work import MemoryPart
from specserve.train.flops import Flops
from specserve.train.speed import this_device


def show_plan(plan: RunPlan) -> None:
    """Print a run's settings, and its sizes, memory, operations and what they mean on some accelerators."""
    console = Console()
    here = show_outline(plan, console)
    console.print(Syntax(config.to_yaml(plan.run).rstrip(), "yaml", theme="ansi_dark", background_color="default"))
    tables = [_sizes(plan), _memory(here), _operations(here), _devices(plan)]
    if plan.collectives:
        tables.insert(3, _collectives(plan))
    for table in tables:
        console.print()
        console.print(table, highlight=False)


def show_outline(plan: RunPlan, console: Console) -> RunPlan:
    """Print in a few lines what the run will do, take and bring. Returns the plan for the device found here, or for
    others where the run makes no sense here."""
    found = outline(plan, this_device())
    console.print(_outline(found), highlight=False)
    return found.plan


def _outline(found: Outline) -> Table:
    plan, run, reached = found.plan, found.plan.run, found.expected
    table, on, each = make_table("The plan", "", ""), f"on {plan.num_devices} x {found.device.name}", ""
    if found.device.is_measured:
        on = f"on {found.device.name}"
    if found.conversations:
        count = f"{'about ' * bool(run.budget)}{found.conversations:,}"
    else:
        count, each = "all", " for each conversation"
    sources = ", ".join(run.data.source)
    table.add_row("data", escape(f"{count} conversations of {sources}; held-out questions are left out of them"))
    if run.data.regenerate:
        manner, temperature = "greedily", run.data.answer_temperature
        if temperature:
            manner = f"at temperature {temperature:g}"
        hours = f"about {_hours(found.answer_hours)}{each} {on}"
        tokens = _count(answer_tokens(plan, found.conversations))
        table.add_row("answers", f"of the target itself, {manner}, {tokens} tokens{each}; {hours}")
    else:
        table.add_row("answers", "as they stand in the data (--regenerate: the target's own)")
    steps = f"{found.steps:,} steps of {plan.positions:,} positions, {found.step_seconds:,.2g} s each"
    table.add_row("training", f"{steps}; about {_hours(found.train_hours)} {on}")
    if run.budget:
        shares = "half for answers, where there are any, and a tenth for measuring"
        table.add_row("budget", f"{escape(run.budget)}: {shares}")
    if found.advice:
        table.add_row("here", f"[yellow]this run makes little sense on this machine:[/] {found.advice}")
    table.add_row("memory", f"{in_bytes(plan.device_bytes)} of {in_bytes(found.device.memory)} on each device")
    table.add_row("disk", ", ".join(f"{in_bytes(size)} for {name}" for name, size in found.disk))
    of_kind = ""
    if reached.drafter != run.drafter:
        of_kind = f"nothing is known of {run.drafter} heads; of {reached.drafter} heads "
    table.add_row("expected tau", f"{of_kind}about {reached.tau}{escape(whose(reached, run.target))}")
    return table


def whose(reached: Reached, target: str) -> str:
    """Return of which target a published tau is, if it is another one, and where it stands."""
    other = ""
    if reached.target != target:
        other = f" for {reached.target}, the nearest in size that is known"
    return f"{other} ({reached.bench}, {reached.how}; {reached.source})"


def _hours(hours: float) -> str:
    if hours >= 0.95:
        return f"{hours:,.1f} h"
    return f"{max(1, 60 * hours):,.0f} min"


def _sizes(plan: RunPlan) -> Table:
    target, drafter, size = plan.target, plan.drafter, plan.target_size
    active = f", {size.active:,} active" if size.active < size.total else ""
    table = make_table("Models", "", "parameters", "")
    shape = f"{target.family}, {target.num_layers} layers of {target.d_model}, vocabulary {target.vocab_size:,}{active}"
    table.add_row("target", f"{size.total:,}", f"{shape}; from {escape(plan.config_from)}")
    taps = ", ".join(map(str, drafter.aux_layers))
    facts = drafter.facts()
    shape = f"{facts['num_layers']} x {drafter.d_model}, MLP {facts['d_ff']}, vocabulary {drafter.draft_vocab_size:,}"
    table.add_row("head", f"{plan.head_size:,}", f"{shape}, taps after layers {taps}; all trained")
    return table


def _memory(plan: RunPlan) -> Table:
    table = memory_table(f"Memory of each device ({_mesh(plan)})", plan.memory)
    notes = []
    if plan.host_bytes:
        notes.append(f"and {in_bytes(plan.host_bytes)} of moments in the host's memory")
    change, sign = ("false", "more") if plan.run.train.remat else ("true", "less")
    notes.append(f"train.remat={change} would need {in_bytes(plan.without_remat)} {sign}")
    if plan.answering:
        notes.append(f"before it the target's answers take {in_bytes(sum(part.num_bytes for part in plan.answering))}")
    if plan.run.features.capture:
        num_bytes, plain = plan.captured_bytes
        notes.append(
            f"{num_bytes:,} bytes on disk for each position of the data, {plain / num_bytes:.2f} times smaller than "
            "bfloat16"
        )
    table.caption = "; ".join(notes)
    return table


def memory_table(title: str, parts: Sequence[MemoryPart]) -> Table:
    """Make a table of the parts of a device's memory and their sum."""
    total = in_bytes(sum(part.num_bytes for part in parts))
    table = make_table(title, "", "bytes", "", footers=("sum", total, ""))
    for part in parts:
        table.add_row(part.name, in_bytes(part.num_bytes), part.what)
    return table


def _mesh(plan: RunPlan) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "one device"


def _operations(plan: RunPlan) -> Table:
    flops = plan.flops
    table = make_table("Operations of a step", "", "useful", "executed", "", footers=("sum", *_flops(flops.total), ""))
    rows = (
        (flops.target, "target", "forward" if flops.target.useful else "none: runs elsewhere"),
        (flops.rollout, "rollout", "the head's layers, forward and backward"),
        (flops.loss, "loss", "both output heads"),
    )
    for part, name, what in rows:
        table.add_row(name, *_flops(part), what)
    each = flops.total.executed / plan.positions
    table.caption = f"{plan.positions:,} positions, {_count(each)}FLOP each; products alone, by shape"
    if plan.num_devices > 1:
        own, useful = flops.total.executed / plan.num_devices, flops.total.useful / flops.total.executed
        table.caption += f"; {_count(own)}FLOP on each device, {useful:.0%} of them useful"
    return table


def _collectives(plan: RunPlan) -> Table:
    whole = in_bytes(sum(each.num_bytes for each in plan.collectives))
    table = make_table(
        f"Sent by each device in a step ({_mesh(plan)})", "", "bytes", "along", "within", footers=("sum", whole, "", "")
    )
    for each in plan.collectives:
        axes = ", ".join(axis for axis in each.axes if axis in plan.mesh)
        table.add_row(each.what, in_bytes(each.num_bytes), axes, f"{span(plan.mesh, each.axes):,} devices")
    table.caption = "as rings send it, by shape: over NVLink or ICI where these join so many, else over the network"
    return table


def _devices(plan: RunPlan) -> Table:
    steps, is_sending = plan.run.train.max_steps, bool(plan.collectives)
    sending = ("sending",) * is_sending
    columns = ("memory", "", *sending, "positions/s at peak", f"at {SHARE_OF_PEAK:.0%}", "the run")
    table = make_table(f"On {plan.num_devices} of", "", *columns)
    for device in DEVICES:
        room = device.memory - plan.device_bytes
        fits = f"[green]{in_bytes(room)} left[/]" if room >= 0 else f"[red]{in_bytes(-room)} too few[/]"
        peak, rate = plan.positions_per_second(device), plan.positions_per_second(device, SHARE_OF_PEAK)
        hours = f"{steps * plan.positions / rate / 3600:,.1f} h" if steps else ""
        sent = (f"{plan.sending_seconds(device):,.2f} s",) * is_sending
        table.add_row(device.name, in_bytes(device.memory), fits, *sent, f"{peak:,.0f}", f"{rate:,.0f}", hours)
    if steps:
        table.caption = f"the run: {steps:,} steps at {SHARE_OF_PEAK:.0%}, without measurements"
        if is_sending:
            table.caption += "; sending: in a step, while nothing is computed"
    return table


def make_table(title: str, *columns: str, footers: Sequence[str] = ()) -> Table:
    """Make an empty table. The first column and what has no heading are words, to the left; numbers stand to the
    right."""
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left", box=box.SIMPLE_HEAD)
    table.show_header, table.show_footer, table.pad_edge = any(columns), bool(footers), False
    for i, (name, footer) in enumerate(itertools.zip_longest(columns, footers, fillvalue="")):
        table.add_column(name, footer, justify="right" if name and i else "left", footer_style="bold")
    return table


def _flops(flops: Flops) -> tuple[str, str]:
    return _count(flops.useful), _count(flops.executed)


def _count(number: float) -> str:
    """Write a number with the letter of its power of 1000: 1.23 T."""
    power = min(len(f"{number:.0f}") - 1, 15) // 3
    return f"{number / 1000**power:,.3g} {' KMGTP'[power]}".rstrip()


def in_bytes(number: float) -> str:
    """Write a number of bytes in MB or GB."""
    if number >= 1e9:
        return f"{number / 1e9:,.2f} GB"
    return f"{number / 1e6:,.1f} MB"
