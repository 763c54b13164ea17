"""`specserve bench latency` and `bench throughput`: one engine in this process, and what its steps cost."""

from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from specserve.checkpoints.tensors import write_json
from specserve.cli.progress import console
from specserve.drafters.speculation import parse_speculation
from specserve.eval.bench import offline as bench_offline
from specserve.eval.bench.offline import Measured
from specserve.eval.bench.synthetic import bench_models
from specserve.eval.bench.trace import newest_trace, read_operations
from specserve.eval.report import table
from specserve.eval.settings import LatencyRun, ThroughputRun
from specserve.provenance import collect
from specserve.serve.progress import Bars

TOP = 12  # operations of a trace that are shown


def latency(run: LatencyRun) -> None:
    """Answer one batch again and again, and print how long it takes and where the time goes."""
    found = _measure(run)
    result = found.result
    ends = ", ".join(f"p{p} {seconds:.3f}" for p, seconds in result["percentiles"].items())
    console.print(
        f"a batch of {run.batch_size} takes {result['avg_latency']:.3f} s on average ({ends}): {run.output_len} tokens "
        f"after prompts of {run.input_len}, {result['output_throughput']:,.1f} tokens/s",
        highlight=False,
    )
    _show(run, found)


def throughput(run: ThroughputRun) -> None:
    """Answer many prompts as fast as the engine can, and print how fast that is and where the time goes."""
    run = bench_offline.with_length(run)
    found = _measure(run)
    result = found.result
    console.print(
        f"{result['num_requests']} requests in {result['elapsed_time']:.1f} s: "
        f"{result['requests_per_second']:.2f} requests/s, {result['output_tokens_per_second']:,.1f} tokens/s, with "
        f"prompts {result['tokens_per_second']:,.1f} tokens/s",
        highlight=False,
    )
    _show(run, found)


def _measure(run: LatencyRun | ThroughputRun) -> Measured:
    if run.speculation != "auto":
        parse_speculation(run.speculation)  # a wrong one is reported before minutes of work
    models = bench_models(run)
    with Bars() as progress:
        if isinstance(run, LatencyRun):
            return bench_offline.latency(models, run, progress.reporter())
        return bench_offline.throughput(models, run, progress.reporter())


def _show(run: LatencyRun | ThroughputRun, found: Measured) -> None:
    result = found.result
    numbers = ("steps", "ms", "draft", "verify", "MB", "GFLOP", "MBU", "MFU")
    title = f"steps of {found.rooflines[0].batch_size} sequences with {found.rooflines[0].context} tokens each"
    shown = table(title, ("speculation",), numbers)
    for roofline in found.rooflines:
        shown.add_row(
            roofline.speculation,
            str(result["steps_by_speculation"][roofline.speculation]),
            f"{1e3 * roofline.seconds:.2f}",
            f"{1e3 * roofline.draft_seconds:.2f}" if roofline.draft_seconds else "",
            f"{1e3 * (roofline.seconds - roofline.draft_seconds):.2f}",
            f"{roofline.work.read / 1e6:,.0f}",
            f"{roofline.work.flops / 1e9:,.2f}",
            f"{roofline.mbu:.0%}",
            f"{roofline.mfu:.0%}",
        )
    console.print(shown)
    console.print(
        f"tau {result['tau']:.2f}; in the run a step took {result['step_ms']:.2f} ms, prompts included, of them "
        f"{result['host_ms']:.2f} on the host beside the device; measured peaks: "
        f"{result['peak_bytes_per_second'] / 1e9:,.1f} GB/s read, "
        f"{result['peak_flops_per_second'] / 1e12:,.2f} TFLOP/s multiplied",
        highlight=False,
    )
    facts = {"settings": asdict(run), "provenance": collect()}
    if run.profile:
        facts["top_operations"] = _show_trace(Path(run.profile).expanduser())
    if run.output:
        write_json(Path(run.output), {**result, **facts})
        console.print(f"results written to {escape(run.output)}")


def _show_trace(folder: Path) -> list[dict[str, object]]:
    file = newest_trace(folder)
    found = read_operations(file)
    total = sum(operation.seconds for operation in found) or 1.0
    shown = table("longest operations: own time", ("program", "operation"), ("runs", "ms", "share"))
    for operation in found[:TOP]:
        milliseconds, share = f"{1e3 * operation.seconds:,.1f}", f"{operation.seconds / total:.0%}"
        shown.add_row(escape(operation.program), escape(operation.name), str(operation.count), milliseconds, share)
    console.print(shown)
    console.print(f"trace written to {escape(str(file.parent))}; open it with XProf: xprof {escape(str(folder))}")
    return [asdict(operation) for operation in found[:TOP]]
