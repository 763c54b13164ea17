"""Evaluation results as tables for people."""

import statistics
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from specserve.eval.acceptance import Report, Tally
from specserve.eval.bench_cells import ArmResult, Cell
from specserve.eval.bench_engine import AUTO, BenchReport, Coupling
from specserve.eval.bench_train import MemoryCell, TrainBenchReport
from specserve.eval.step_times import StepTimes


def summary_table(rows: Sequence[tuple[str, Report]], title: str) -> Table:
    """One row per head: tau, acceptance by depth, and the two arms' speed."""
    names = ("tau", "accepted\nby depth", "plain\ntokens/s", "speculative\ntokens/s", "gain", "same\nanswers")
    table = _table(title, ("head",), names)
    for name, report in rows:
        table.add_row(
            escape(name),
            f"{report.tally.tau:.2f}",
            _by_depth(report.tally),
            f"{report.plain.tokens_per_second:.0f}",
            f"{report.speculative.tokens_per_second:.0f}",
            f"{report.speedup:.2f}x",
            f"{report.num_identical}/{report.num_answers}",
        )
    return table


def _by_depth(tally: Tally) -> str:
    return " ".join(f"{rate:.2f}" for rate in tally.accept_rate)


def category_table(report: Report) -> Table:
    table = _table("by category", ("category",), ("tau", "acceptance by depth", "steps"))
    for name, tally in sorted(report.by_category.items()):
        table.add_row(escape(name), f"{tally.tau:.2f}", _by_depth(tally), str(tally.num_steps))
    return table


def bench_table(cells: Sequence[Cell], temperature: float) -> Table:
    """One row per arm and concurrency; latencies in milliseconds, median and 99th percentile."""
    numbers = ("tokens/s", "to plain", "tau", "first token\np50  p99", "next tokens\np50  p99", "host", "same\nanswers")
    table = _table(f"temperature {temperature:g}", ("clients", "speculation"), numbers)
    for cell in cells:
        if cell.temperature == temperature:
            for i, (name, result) in enumerate(cell.arms.items()):
                table.add_row("" if i else str(cell.concurrency), name, *_bench_row(result))
            table.add_section()
    return table


def _bench_row(result: ArmResult) -> tuple[str, ...]:
    found = result.to_json()
    host = "" if found["host_share"] is None else f"{found['host_share']:.0%}"

    def latency(name: str) -> str:
        p50, p99 = found[name]["p50"], found[name]["p99"]
        return "" if p50 is None else f"{p50:.1f}  {p99:.1f}"

    return (
        f"{found['tokens_per_second']:.0f}",
        f"{result.ratio:.2f}x",
        f"{result.tally.tau:.2f}",
        latency("ttft_ms"),
        latency("itl_ms"),
        host,
        f"{result.num_identical}/{result.num_answers}",
    )


def coupling_table(couplings: Sequence[Coupling]) -> Table:
    """What ranking the draft's candidates with the target's noise brings, one stream."""
    title = f"temperature {couplings[0].temperature:g}: the draft ranks with the target's noise, and without"
    numbers = ("tau with", "tau without", "tokens/s,\nwith / without", "by depth with", "without", "same\nanswers")
    table = _table(title, ("speculation",), numbers)
    for found in couplings:
        table.add_row(
            found.arm,
            f"{found.coupled.tau:.2f}",
            f"{found.uncoupled.tau:.2f}",
            f"{found.speedup:.2f}x",
            _by_depth(found.coupled),
            _by_depth(found.uncoupled),
            f"{found.num_identical}/{found.num_answers}",
        )
    return table


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


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """In a narrow terminal the widest columns are folded, such as the names of folders; nothing is cut off."""
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def step_line(times: StepTimes) -> str:
    return (
        f"one sequence, median: plain step {times.plain:.2f} ms ({times.plain / times.bound:.2f}x the bandwidth "
        f"bound of {times.bound:.2f} ms); speculative step {times.step:.2f} ms "
        f"= draft {times.draft:.2f} + verify {times.verify:.2f}"
    )


def training_table(report: TrainBenchReport) -> Table:
    """One row per way to train, medians over the rounds."""
    table = _table("a training step", ("",), ("useful\ntokens/s", "slots/s", "share of\nmatmul peak"))
    for name, arm in report.arms.items():
        values = (statistics.median(rates) for rates in (arm.useful, arm.slots, arm.peak_share))
        useful, slots, share = values
        table.add_row(name, f"{useful:.0f}", f"{slots:.0f}", f"{share:.0%}")
    return table


def training_lines(report: TrainBenchReport) -> list[str]:
    ratios = sorted(report.ratios)
    return [
        f"useful tokens/s to the naive arm: {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        f"packed rows have {report.padding_share:.1%} padding; the peak is {report.peak_gflops:.0f} GFLOP/s",
    ]


def memory_table(cells: Sequence[MemoryCell]) -> Table:
    """Memory of a compiled step by sequence length: of the arguments, and of the rest with rollout steps computed
    again, with all kept, and of the naive formulation."""
    names = ("weights,\nmoments", "steps\nagain", "of\nnaive", "all\nkept", "of\nnaive", "naive")
    table = _table("memory of a training step, GB", ("rows x tokens",), names)
    for cell in cells:
        table.add_row(
            f"{cell.batch} x {cell.seq}",
            f"{cell.again.arguments / 1e9:.2f}",
            f"{cell.again.live / 1e9:.2f}",
            f"{cell.again.live / cell.naive.live:.0%}",
            f"{cell.kept.live / 1e9:.2f}",
            f"{cell.kept.live / cell.naive.live:.0%}",
            f"{cell.naive.live / 1e9:.2f}",
        )
    return table
