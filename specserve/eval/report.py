"""Evaluation results as tables for people."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from specserve.eval.acceptance import Report
from specserve.eval.bench_cells import ArmResult, Cell
from specserve.eval.bench_engine import AUTO, BenchReport, Coupling
from specserve.eval.bench_kernels import KernelTimes
from specserve.eval.step_times import StepTimes
from specserve.speculative.acceptance import Acceptance


def summary_table(rows: Sequence[tuple[str, Report]], title: str) -> Table:
    """One row per head: tau, acceptance by depth, and the two arms' speed."""
    names = ("tau", "accepted\nby depth", "plain\ntokens/s", "speculative\ntokens/s", "gain", "same\nanswers")
    shown = table(title, ("head",), names)
    for name, report in rows:
        shown.add_row(
            escape(name),
            f"{report.speculative.acceptance.tau:.2f}",
            _by_depth(report.speculative.acceptance),
            f"{report.plain.tokens_per_second:.0f}",
            f"{report.speculative.tokens_per_second:.0f}",
            f"{report.speculative.ratio:.2f}x",
            f"{report.speculative.num_identical}/{report.speculative.num_answers}",
        )
    return shown


def _by_depth(found: Acceptance) -> str:
    return " ".join(f"{rate:.2f}" for rate in found.accept_rate)


def category_table(report: Report) -> Table:
    shown = table("by category", ("category",), ("tau", "acceptance by depth", "steps"))
    for name, found in sorted(report.by_category.items()):
        shown.add_row(escape(name), f"{found.tau:.2f}", _by_depth(found), str(found.num_steps))
    return shown


def bench_table(cells: Sequence[Cell], temperature: float) -> Table:
    """One row per arm and concurrency; latencies in milliseconds, median and 99th percentile."""
    numbers = ("tokens/s", "to plain", "tau", "first token\np50  p99", "next tokens\np50  p99", "host", "same\nanswers")
    shown = table(f"temperature {temperature:g}", ("clients", "speculation"), numbers)
    for cell in cells:
        if cell.temperature == temperature:
            for i, (name, result) in enumerate(cell.arms.items()):
                shown.add_row("" if i else str(cell.concurrency), name, *_bench_row(result))
            shown.add_section()
    return shown


def _bench_row(result: ArmResult) -> tuple[str, ...]:
    found = result.to_json()
    host = "" if found["host_share"] is None else f"{found['host_share']:.0%}"

    def latency(name: str) -> str:
        p50, p99 = found[name]["p50"], found[name]["p99"]
        return "" if p50 is None else f"{p50:.1f}  {p99:.1f}"

    return (
        f"{found['tokens_per_second']:.0f}",
        f"{result.ratio:.2f}x",
        f"{result.acceptance.tau:.2f}",
        latency("ttft_ms"),
        latency("itl_ms"),
        host,
        f"{result.num_identical}/{result.num_answers}",
    )


def coupling_table(couplings: Sequence[Coupling]) -> Table:
    """What ranking the draft's candidates with the target's noise brings, one stream."""
    title = f"temperature {couplings[0].temperature:g}: the draft ranks with the target's noise, and without"
    numbers = ("tau with", "tau without", "tokens/s,\nwith / without", "by depth with", "without", "same\nanswers")
    shown = table(title, ("speculation",), numbers)
    for found in couplings:
        shown.add_row(
            found.arm,
            f"{found.coupled.acceptance.tau:.2f}",
            f"{found.uncoupled.acceptance.tau:.2f}",
            f"{found.coupled.ratio:.2f}x",
            _by_depth(found.coupled.acceptance),
            _by_depth(found.uncoupled.acceptance),
            f"{found.coupled.num_identical}/{found.coupled.num_answers}",
        )
    return shown


def bench_lines(report: BenchReport) -> list[str]:
    """What the tables do not hold."""
    lines = [f"{name}: {step_line(times)}" for name, times in report.steps.items()]
    gigabytes = {name: num_bytes / 1e9 for name, num_bytes in report.memory.items()}
    lines.append(
        f"memory: peak {gigabytes['peak_rss']:.2f} GB, of it weights in all layouts {gigabytes['weights']:.2f}, caches "
        f"{gigabytes['cache']:.2f}; read bandwidth {report.read_bandwidth / 1e9:.1f} GB/s"
    )
    lines.append(f"late compiles: {report.num_late_compiles}; answers unlike the plain arm's: {report.num_different}")
    if (worst := report.worst(AUTO)) is not None:
        ratio, cell = worst
        lines.append(f"auto at its worst: {ratio:.2f}x plain ({cell.concurrency} clients, T={cell.temperature:g})")
    return lines


def table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """In a narrow terminal the widest columns are folded, such as the names of folders; nothing is cut off."""
    shown = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in texts:
        shown.add_column(name, overflow="fold")
    for name in numbers:
        shown.add_column(name, justify="right", overflow="fold")
    return shown


def step_line(times: StepTimes) -> str:
    return (
        f"one sequence, median: plain step {times.plain:.2f} ms ({times.plain / times.bound:.2f}x the bandwidth "
        f"bound of {times.bound:.2f} ms); speculative step {times.step:.2f} ms "
        f"= draft {times.draft:.2f} + verify {times.verify:.2f}"
    )


def kernels_table(rows: Sequence[KernelTimes]) -> Table:
    """One row per shape of one kernel; times in milliseconds."""
    shape = list(rows[0].work.shape)
    numbers = (*shape, "own", "XLA", "to XLA", "MB", "of bound")
    shown = table(rows[0].work.kernel, ("path",), numbers)
    for row in rows:
        own = row.own_ms
        shown.add_row(
            row.work.path or "XLA",
            *[f"{row.work.shape[key]:,}" for key in shape],
            "" if own is None else f"{own:.3f}",
            f"{row.xla_ms:.3f}",
            "" if own is None else f"{row.xla_ms / own:.2f}x",
            f"{row.work.num_bytes / 1e6:,.1f}",
            f"{row.bound_ms / (row.xla_ms if own is None else own):.0%}",
        )
    return shown
