"""Evaluation results as tables for people."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specserve.eval.acceptance import Report, Tally
from specserve.eval.step_times import StepTimes


def summary_table(rows: Sequence[tuple[str, Report]], title: str) -> Table:
    """One row per head: tau, acceptance by depth, and the two arms' speed."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in (
        "head",
        "tau",
        "accepted\nby depth",
        "plain\ntokens/s",
        "speculative\ntokens/s",
        "gain",
        "same\nanswers",
    ):
        table.add_column(name, justify="left" if name == "head" else "right", no_wrap=True)
    for name, report in rows:
        table.add_row(
            name,
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
    table = Table(title="by category", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("category", "tau", "acceptance by depth", "steps"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for name, tally in sorted(report.by_category.items()):
        table.add_row(name, f"{tally.tau:.2f}", _by_depth(tally), str(tally.num_steps))
    return table


def step_line(times: StepTimes) -> str:
    return (
        f"one sequence, median: plain step {times.plain:.2f} ms ({times.plain / times.bound:.2f}x the bandwidth "
        f"bound of {times.bound:.2f} ms); speculative step {times.step:.2f} ms "
        f"= draft {times.draft:.2f} + verify {times.verify:.2f}"
    )
