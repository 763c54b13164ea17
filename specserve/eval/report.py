"""Evaluation results as tables for people."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from specserve.eval.acceptance import Difference, SpeculationReport
from specserve.eval.bench.comparison import AUTO, ArmResult, Comparison
from specserve.eval.bench.engine import BenchReport, Coupling
from specserve.eval.bench.quantization import QuantizationLoss
from specserve.eval.bench.step_times import StepTimes
from specserve.speculative.intervals import Interval


def summary_table(rows: Sequence[tuple[str, SpeculationReport]], title: str) -> Table:
    """Make a table with a row for each head and way to speculate: tau, acceptance by depth, the speed of both arms and
    the gain, and below tau and the gain their 95% intervals. Temperature and concurrency are shown where there are
    several."""
    comparisons = {(report.temperature, report.concurrency) for _, report in rows}
    where = [("T", [r.temperature for _, r in rows]), ("at\nonce", [r.concurrency for _, r in rows])]
    where = [(name, values) for name, values in where if len(comparisons) > 1 and len(set(values)) > 1]
    names = ("tau", "accepted\nby depth", "plain\ntokens/s", "tokens/s", "gain", "same\nanswers")
    shown = table(title, ("head",), (*(name for name, _ in where), *names))
    for i, (name, report) in enumerate(rows):
        plain = gain = same = ""
        if not report.is_baseline:
            plain = f"{report.plain.tokens_per_second:.0f}"
            gain = _with_interval(report.gain, report.gain_interval, "x")
            same = f"{report.speculative.num_identical}/{report.speculative.num_answers}"
        shown.add_row(
            escape(name),
            *[f"{values[i]:g}" for _, values in where],
            _with_interval(report.tau, report.tau_interval),
            _by_depth(report.accept_rate),
            plain,
            f"{report.speculative.tokens_per_second:.0f}",
            gain,
            same,
        )
    return shown


def _with_interval(value: float | None, interval: Interval | None, unit: str = "") -> str:
    if value is None:
        return "unknown"
    if interval is None:
        return f"{value:.2f}{unit}"
    return f"{value:.2f}{unit}\n{interval.low:.2f}-{interval.high:.2f}"


def _by_depth(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def category_table(report: SpeculationReport) -> Table:
    """Make a table with a row for each category of questions, with its gain where whole rounds consisted of it."""
    title = f"by category: {report.name}, T={report.temperature:g}, {report.concurrency} at once"
    shown = table(title, ("category",), ("tau", "acceptance by depth", "gain", "steps"))
    for name in report.by_category:
        found = report.of_category(name)
        by_depth = gain = ""
        if report.accept_rate:
            by_depth = _by_depth(found.acceptance.accept_rate)
        if found.gain is not None:
            gain = _with_interval(found.gain, found.gain_interval, "x")
        tau = _with_interval(found.acceptance.tau, found.tau_interval)
        shown.add_row(escape(name), tau, by_depth, gain, str(found.acceptance.num_steps))
    return shown


def difference_table(found: Sequence[Difference]) -> Table:
    """Make a table of the differences between each head's tau and the first one's, over the same questions."""
    shown = table("tau, to the first head on the same questions", ("head", "than"), ("T", "difference", "95%"))
    for each in found:
        between = ""
        if interval := each.interval:
            between = f"{interval.low:+.3f} to {interval.high:+.3f}"
        shown.add_row(
            escape(each.of.name), escape(each.to.name), f"{each.of.temperature:g}", f"{each.value:+.3f}", between
        )
    return shown


def bench_table(comparisons: Sequence[Comparison], temperature: float) -> Table:
    """Make a table with a row for each arm and concurrency. Latencies are in milliseconds, as median and 99th
    percentile."""
    numbers = ("tokens/s", "to plain", "tau", "first token\np50  p99", "next tokens\np50  p99", "host", "same\nanswers")
    shown = table(f"temperature {temperature:g}", ("clients", "speculation"), numbers)
    for comparison in comparisons:
        if comparison.temperature == temperature:
            for i, (name, result) in enumerate(comparison.arms.items()):
                shown.add_row("" if i else str(comparison.concurrency), name, *_bench_row(result))
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
    """Make a table of what it brings to rank the draft's candidates with the target's noise, for one stream."""
    title = f"temperature {couplings[0].temperature:g}: the draft ranks with the target's noise, and without"
    numbers = ("tau with", "tau without", "tokens/s,\nwith / without", "by depth with", "without", "same\nanswers")
    shown = table(title, ("speculation",), numbers)
    for found in couplings:
        shown.add_row(
            found.arm,
            f"{found.coupled.acceptance.tau:.2f}",
            f"{found.uncoupled.acceptance.tau:.2f}",
            f"{found.coupled.ratio:.2f}x",
            _by_depth(found.coupled.acceptance.accept_rate),
            _by_depth(found.uncoupled.acceptance.accept_rate),
            f"{found.coupled.num_identical}/{found.coupled.num_answers}",
        )
    return shown


def bench_lines(report: BenchReport) -> list[str]:
    """List the results that the tables do not hold, as lines of text."""
    lines = [f"{name}: {step_line(times)}" for name, times in report.steps.items()]
    gigabytes = {name: num_bytes / 1e9 for name, num_bytes in report.memory.items()}
    lines.append(
        f"memory: peak {gigabytes['peak_rss']:.2f} GB, of it weights in all layouts {gigabytes['weights']:.2f}, caches "
        f"{gigabytes['cache']:.2f}; read bandwidth {report.read_bandwidth / 1e9:.1f} GB/s"
    )
    lines.append(f"late compiles: {report.num_late_compiles}; answers unlike the plain arm's: {report.num_different}")
    if (worst := report.worst(AUTO)) is not None:
        ratio, found = worst
        lines.append(f"auto at its worst: {ratio:.2f}x plain ({found.concurrency} clients, T={found.temperature:g})")
    return lines


def loss_table(losses: Sequence[QuantizationLoss], title: str) -> Table:
    """Make a table with a row for each form of the weights, the floats first; below KL and tau their 95% intervals."""
    numbers = ("KL, nats", "same\ntop token", "perplexity\nratio", "same\nanswers", "equal\nbeginning", "tau")
    shown = table(title, ("weights",), numbers)
    for loss in losses:
        found, interval = loss.to_json(), loss.kl_interval
        between = f"\n{interval.low:.2g} to {interval.high:.2g}" if interval else ""
        shown.add_row(
            loss.quantization,
            f"{found['kl']:.2g}{between}",
            f"{found['same_top_token']:.2%}",
            f"{loss.perplexity_ratio:.4f}",
            f"{loss.num_same}/{found['answers']}",
            f"{found['mean_equal_beginning']:.1f}",
            "" if loss.tau is None else _with_interval(loss.tau, loss.tau_interval),
        )
    return shown


def table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Make an empty table. In a narrow terminal its widest columns, such as the names of folders, are folded, and
    nothing is cut off."""
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
