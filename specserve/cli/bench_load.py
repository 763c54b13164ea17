"""`specserve bench serve` and `bench startup`: a server as its clients and its operator see it."""

import math
import os
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from specserve.checkpoints.tensors import write_json
from specserve.cli.progress import Bars, console
from specserve.eval.bench import serve as bench_serve
from specserve.eval.bench.server_process import Moment, ServerProcess, moments_of_a_start, serve_flags
from specserve.eval.bench.streams import Streams
from specserve.eval.client import Client
from specserve.eval.report import table
from specserve.eval.settings import ServeBenchRun, StartupRun
from specserve.provenance import collect

PERCENTILES = (10, 25, 50, 75, 90, 99)


def serve(run: ServeBenchRun) -> None:
    """Put a server under load and say what its clients saw. Without an address a server is started for it."""
    bench_serve.parse_rate(run.request_rate)  # a wrong one is said before a server starts
    url = bench_serve.address_of(run)
    prompts = bench_serve.load_prompts(run)
    with ExitStack() as stack:
        if url:
            client = stack.enter_context(Client(url, run.api_key or os.environ.get("OPENAI_API_KEY", "")))
        else:
            flags = serve_flags(run.target, run.draft, run.speculation, run.max_slots, run.max_model_len)
            server = stack.enter_context(ServerProcess([*flags, "--no-early-ready"]))
            _wait(server)
            client = server.client
        result = _measure(run, client, prompts)
    _show(result, run)
    if run.output:
        write_json(Path(run.output), {**result, "settings": _without_key(run), "provenance": collect()})
        console.print(f"results written to {escape(run.output)}")


def _wait(server: ServerProcess) -> None:
    """Wait until a server of our own has compiled its programs, which takes minutes the first time."""
    with Bars() as progress:
        task = progress.add("starting a server")
        server.wait_until_ready(lambda said: progress.update(task, note=escape(said)))


def _without_key(run: ServeBenchRun) -> dict[str, Any]:
    return {name: value for name, value in asdict(run).items() if name != "api_key"}


def _measure(run: ServeBenchRun, client: Client, prompts: list[Any]) -> dict[str, Any]:
    model, streams = run.model or client.first_model(), Streams(client)
    bench_serve.warm_up(streams, model, prompts, run)
    before = bench_serve.read_counters(client)
    with Bars() as progress:
        task = progress.add("answering", total=len(prompts))
        sent, seconds = bench_serve.run_load(
            streams, model, prompts, run, lambda _reply: progress.update(task, advance=1)
        )
    after = bench_serve.read_counters(client)
    accepted = after - before if after and before else None
    return {
        **bench_serve.facts_of(run, model, client),
        **bench_serve.result_of(sent, seconds, run.metric_percentiles, accepted),
    }


def _show(result: dict[str, Any], run: ServeBenchRun) -> None:
    ends = [f"p{p:g}" for p in run.metric_percentiles]
    shown = table(f"{result['model_id']}: milliseconds", ("",), ("mean", "median", "std", *ends))
    names = {
        "ttft": "to the first token",
        "tpot": "per token after it",
        "itl": "between two pieces",
        "e2el": "to the last token",
    }
    for name, what in names.items():
        values = [result[f"{kind}_{name}_ms"] for kind in ("mean", "median", "std", *ends)]
        shown.add_row(what, *[f"{value:,.1f}" for value in values])
    console.print(
        f"{result['completed']} requests answered, {result['failed']} failed, in {result['duration']:.1f} s; at most "
        f"{result['max_concurrent_requests']} at once\n{result['request_throughput']:.2f} requests/s, "
        f"{result['output_throughput']:,.1f} tokens/s ({result['total_output_tokens']:,}), with prompts "
        f"{result['total_token_throughput']:,.1f} tokens/s; in the best second "
        f"{result['max_output_tokens_per_s']:,.0f}",
        highlight=False,
    )
    console.print(shown)
    if "spec_decode_acceptance_length" in result:
        by_depth = " ".join(f"{rate:.2f}" for rate in result["spec_decode_per_position_acceptance_rates"])
        console.print(
            f"speculation: {result['spec_decode_acceptance_length']:.2f} tokens per step, "
            f"{result['spec_decode_acceptance_rate']:.0f}% of the draft tokens accepted; by depth {by_depth}",
            highlight=False,
        )
    if result["failed"]:
        error = next(error for error in result["errors"] if error)
        console.print(f"[yellow]the first failure: {escape(error)}[/]")


def startup(run: StartupRun) -> None:
    """Start a server with nothing kept and from kept programs, and say when it could do what, and its memory."""
    flags = serve_flags(run.target, run.draft, run.speculation, run.max_slots, run.max_model_len)
    starts: dict[str, list[list[Moment]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(run.num_iters_cold):
            with console.status(f"a first start ({number + 1} of {run.num_iters_cold})"):
                starts["cold"].append(list(moments_of_a_start(flags, Path(name) / str(number))))
        for number in range(run.num_iters_warm):
            with console.status(f"a start from kept programs ({number + 1} of {run.num_iters_warm})"):
                starts["warm"].append(list(moments_of_a_start(flags, Path(name) / "0")))
    shown = table("seconds and MiB since the process began, means", ("",), ("first start", "from kept programs"))
    for moments in zip(*(zip(*starts[kind], strict=True) for kind in starts), strict=True):
        shown.add_row(moments[0][0].what, *[_mean(of_kind) for of_kind in moments])
    console.print(shown)
    if run.output:
        facts = {"settings": asdict(run), "provenance": collect()}
        write_json(Path(run.output), {**startup_result(starts), **facts})
        console.print(f"results written to {escape(run.output)}")


def _mean(moments: tuple[Moment, ...]) -> str:
    seconds = math.fsum(moment.seconds for moment in moments) / len(moments)
    return f"{seconds:.1f} s, {sum(moment.num_bytes for moment in moments) / len(moments) / 2**20:,.0f} MiB"


def startup_result(starts: dict[str, list[list[Moment]]]) -> dict[str, Any]:
    """The results under the keys of `vllm bench startup`, whose start ends when the server can answer; and every
    moment of every start. A start that is measured ends with all programs, so that is vLLM's compilation time."""
    result: dict[str, Any] = {}
    for kind, of_kind in starts.items():
        for what, which in (("startup", 0), ("compilation", -1)):
            seconds = [moments[which].seconds for moments in of_kind]
            percentiles = dict(zip(map(str, PERCENTILES), np.percentile(seconds, PERCENTILES).tolist(), strict=True))
            result |= {
                f"avg_{kind}_{what}_time": math.fsum(seconds) / len(seconds),
                f"{kind}_{what}_times": seconds,
                f"{kind}_{what}_percentiles": percentiles,
            }
        result[f"{kind}_moments"] = [[asdict(moment) for moment in moments] for moments in of_kind]
    return result
