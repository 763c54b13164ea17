"""The simulator beside reality: plain `specserve serve` processes of the bundled target under a seeded load, and what
`specserve.plan.simulate` says of the same load.

Run from the checkout: `python benchmarks/simulator.py --replicas 2 --seconds 60`. Each replica is pinned to one core,
the first to the first, and so on in turn. The costs of steps and prompts, and the acceptance by depth, are measured
first, with all replicas busy at once, so that what cores and memory share is among the costs, and what the host does
for a step and its tokens: prompts of each chunk alone, then each batch size in a closed loop, then requests like those
of the loads, whose drafts are counted; and again at the end, since machines do not stay the same. In between, requests
arrive as a Poisson process, with prompts and answers of many lengths: more than the replicas can answer, which shows
throughput, and fewer, which shows latency. The simulator is given the costs, the acceptance and the arrivals, and
nothing else of these runs. Linux only.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from over_http import processor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from specserve.checkpoints.source import BUNDLED_FOLDER  # noqa: E402
from specserve.eval.bench.server_process import ServerProcess  # noqa: E402
from specserve.eval.bench.streams import Reply, Streams, stream_body  # noqa: E402
from specserve.eval.client import Client  # noqa: E402
from specserve.eval.prompts import load_chats  # noqa: E402
from specserve.eval.series import DRAFTS, TOKENS, Series  # noqa: E402
from specserve.plan.simulate import NANO, Arrival, Replica, Router, SimulationReport, simulate  # noqa: E402
from specserve.plan.step_costs import StepCosts  # noqa: E402
from specserve.serve.programs.shapes import CPU_CHUNKS  # noqa: E402
from specserve.tokenizer import Tokenizer  # noqa: E402

SLOTS, PAGE_SIZE, CONTEXT = 8, 32, 1024
BATCHES = (1, 2, 4, 8)
DEPTH = 3
STEADY_PROMPT, STEADY_ANSWER = 64, 160  # of the closed loops in which steps are measured
SHARED, GROUPS = 128, 6  # tokens of a system prompt, and how many there are, with --routing prefix
PROMPTS, ANSWERS = (24, 320), (32, 128)  # own tokens of a request
OVERLOAD, LIGHT = 1.5, 0.6  # of what the replicas can answer
ENOUGH, PATIENCE = 10, 60.0  # of prompts or steps, in each measurement; seconds to wait for them
STEPS, BUSY = "specserve:steps_total", "specserve:busy_seconds_total"
FIRST, HITS, QUERIES = (
    "vllm:time_to_first_token_seconds_count",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
)


@dataclasses.dataclass(eq=False)
class Server:
    """A replica that runs."""

    client: Client
    streams: Streams
    model: str = ""
    load: int = 0  # requests under way, as routers see it

    def read(self) -> Series:
        return Series.parse(self.client.text("/metrics"))


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a load came to, in reality or simulated."""

    tokens_per_second: float
    ttft: tuple[float, float]  # seconds: 50, 90 %
    tpot: tuple[float, float]
    hit_rate: float
    tau: float


def main() -> int:
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    os.environ["JAX_PLATFORMS"] = "cpu"
    begin = time.monotonic()
    with _servers(options.replicas) as servers:
        supply = _Supply(options.seed)
        is_grouped = options.routing == "prefix"
        before, accepted = _calibrate(servers, supply, options.calibrate, is_grouped)
        _say(_described(before, accepted))
        capacity = _capacity(_replica(before, accepted), options, supply)
        runs = []
        for name, share, seconds in (("overload", OVERLOAD, options.seconds), ("light", LIGHT, options.seconds / 2)):
            rate = share * capacity
            _say(f"{name}: {rate:.2f} requests a second for {seconds:g} s, {options.routing}")
            load = supply.load(rate, seconds, is_grouped)
            real = _run(servers, load, options, seconds)
            runs.append((name, rate, seconds, [each for each, _ in load], real))
        after, accepted_after = _calibrate(servers, supply, options.calibrate, is_grouped)
        _say(_described(after, accepted_after))
    accepted += accepted_after
    replica = _replica(_mean(before, after), accepted)
    found = {}
    for name, rate, seconds, arrivals, real in runs:
        report = simulate(replica, options.replicas, arrivals, routing=options.routing, seed=options.seed)
        found[name] = rate, real, _of_report(report, seconds, _tau(accepted))
    print(_table(options, found))
    drift = [
        late / early - 1 for early, late in zip(before.step + before.prefill, after.step + after.prefill, strict=True)
    ]
    print(f"costs at the end, over those at the beginning: {min(drift):+.0%} to {max(drift):+.0%}")
    print(f"{processor()}, {len(os.sched_getaffinity(0))} cores; {time.monotonic() - begin:.0f} s in all")
    if options.output:
        result = {
            "settings": vars(options) | {"output": str(options.output)},
            "machine": processor(),
            "costs": [dataclasses.asdict(before), dataclasses.asdict(after)],
            "acceptance": replica.acceptance,
            "loads": {
                name: {"rate": rate, "real": dataclasses.asdict(real), "simulated": dataclasses.asdict(simulated)}
                for name, (rate, real, simulated) in found.items()
            },
        }
        options.output.write_text(json.dumps(result, indent=2))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--replicas", type=int, default=2)
    add("--seconds", type=float, default=60.0, help="of the overload; the light load takes half as long (60)")
    add("--calibrate", type=float, default=6.0, help="seconds of each measurement of costs (6)")
    add("--routing", choices=("round-robin", "prefix"), default="round-robin")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="write everything that was measured to this JSON file")
    options = parser.parse_args()
    if sys.platform != "linux":
        parser.error("cores are pinned by Linux's means")
    if options.replicas < 1 or min(options.seconds, options.calibrate) < 1:
        parser.error("--replicas, --seconds and --calibrate must be at least 1")
    return options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _servers(count: int) -> Iterator[list[Server]]:
    """Start the replicas, one after the other, each on a core of its own or shared with as few as can be."""
    cores = sorted(os.sched_getaffinity(0))
    flags = ["--target", "pydoc", "--speculation", f"chain:{DEPTH}", "--max-slots", str(SLOTS)]
    flags += ["--max-model-len", str(CONTEXT), "--page-size", str(PAGE_SIZE), "--max-queue", "4096"]
    flags += ["--no-early-ready", "--no-constrained", "--log-level", "warning"]
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(count):
            core = cores[number % len(cores)]
            _say(f"starting replica {number} on core {core}")
            os.sched_setaffinity(0, {core})  # it inherits this
            try:
                process = stack.enter_context(ServerProcess(flags))
            finally:
                os.sched_setaffinity(0, cores)
            process.wait_until_ready()
            servers.append(Server(process.client, Streams(process.client), process.client.first_model()))
        yield servers


class _Supply:
    """Prompts that never come twice: held-out questions, cut and salted by other tokens in front."""

    def __init__(self, seed: int) -> None:
        tokenizer = Tokenizer.load(BUNDLED_FOLDER)
        chats = load_chats("pydoc", 400)
        self._texts = [
            ids for chat in chats if len(ids := tokenizer.render_chat(chat, add_generation_prompt=True)) > 48
        ]
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._systems = [[*(self._texts[i] * 8)[: SHARED - 1], 100 + i] for i in range(GROUPS)]

    def prompt(self, length: int) -> list[int]:
        """So many token ids, the last ones of a question; the first two differ from everybody else's."""
        with self._lock:
            text = self._texts[int(self._rng.integers(len(self._texts)))]
            salt = self._rng.integers(100, 8000, 2).tolist()
        return (salt + (text * (1 + length // len(text)))[-(length - 2) :])[:length]

    def request(self, time: int, is_grouped: bool) -> tuple[Arrival, list[int]]:
        """A request of the loads, with its prompt."""
        with self._lock:
            length, answer = (int(self._rng.integers(*bounds)) for bounds in (PROMPTS, ANSWERS))
            group = int(self._rng.integers(GROUPS))
        own, shared = self.prompt(length), SHARED if is_grouped else 0
        prompt = self._systems[group] + own if is_grouped else own
        return Arrival(time, length + shared, answer, group, shared), prompt

    def load(self, rate: float, seconds: float, is_grouped: bool) -> list[tuple[Arrival, list[int]]]:
        """A Poisson process of requests with their prompts."""
        load, now = [], 0.0
        while (now := now + self._rng.exponential(1 / rate)) < seconds:
            load.append(self.request(int(now * NANO), is_grouped))
        return load


def _ask(server: Server, prompt: list[int], max_tokens: int) -> Reply:
    path, body = stream_body(server.model, prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return server.streams.ask(path, body)


def _closed_loop(
    servers: Sequence[Server], batch: int, seconds: float, draw: Callable[[], tuple[list[int], int]], enough: str
) -> list[dict[str, float]]:
    """Keep so many requests under way on every replica, prompts and tokens to answer as drawn; what each counted in the
    time after the first second. That time is longer on a busy machine: until each has counted a few of what is to be
    measured."""
    is_over, started = threading.Event(), time.monotonic()

    def client(server: Server) -> None:
        while not is_over.is_set():
            reply = _ask(server, *draw())
            if reply.error and not is_over.is_set():
                raise SystemExit(f"{server.client.url}: {reply.error}")

    with ThreadPoolExecutor(batch * len(servers)) as pool:
        futures = [pool.submit(client, server) for server in servers for _ in range(batch)]
        time.sleep(1.0)
        before = [_counts(server) for server in servers]
        while True:
            time.sleep(seconds)
            counts = [
                {name: value - early[name] for name, value in _counts(server).items()}
                for server, early in zip(servers, before, strict=True)
            ]
            if min(each[enough] for each in counts) >= ENOUGH or any(future.done() for future in futures):
                break
            if time.monotonic() - started > PATIENCE:
                raise SystemExit(f"the machine is too busy: {counts} in {PATIENCE} seconds; free some of its cores")
        is_over.set()
        for server in servers:
            server.streams.hang_up()
        for future in futures:
            future.result()
    _wait_until_idle(servers)
    return counts


def _counts(server: Server) -> dict[str, float]:
    series = server.read()
    return {name: series.total(name) or 0.0 for name in (STEPS, BUSY, FIRST)}


def _wait_until_idle(servers: Sequence[Server]) -> None:
    """Wait for requests to be cancelled that nobody reads any more."""
    while any(server.read().total("vllm:num_requests_running") for server in servers):
        time.sleep(0.1)


def _calibrate(
    servers: Sequence[Server], supply: _Supply, seconds: float, is_grouped: bool
) -> tuple[StepCosts, np.ndarray]:
    """What chunks and steps take while all replicas are busy, and what is accepted (as `_accepted` counts it)."""
    prefill = []
    for chunk in CPU_CHUNKS:
        _say(f"timing prompts of {chunk}")
        counts = _closed_loop(servers, 2, seconds / 2, lambda chunk=chunk: (supply.prompt(chunk), 1), FIRST)
        prefill.append(statistics.mean(each[BUSY] / each[FIRST] for each in counts))
    steps = []
    of_prompt = prefill[CPU_CHUNKS.index(STEADY_PROMPT)]
    for batch in BATCHES:
        _say(f"timing steps of {batch}")
        counts = _closed_loop(servers, batch, seconds, lambda: (supply.prompt(STEADY_PROMPT), STEADY_ANSWER), STEPS)
        steps.append(statistics.mean((each[BUSY] - each[FIRST] * of_prompt) / each[STEPS] for each in counts))
    _say("counting what is accepted")  # of such requests: long answers repeat themselves, and are foreseen better
    before = _accepted(servers)

    def draw() -> tuple[list[int], int]:
        arrival, prompt = supply.request(0, is_grouped)
        return prompt, arrival.answer

    _closed_loop(servers, SLOTS, 2 * seconds, draw, STEPS)
    costs = StepCosts(BATCHES, tuple(steps), tuple(steps), CPU_CHUNKS, tuple(prefill), "measured here")
    return costs, _accepted(servers) - before


def _accepted(servers: Sequence[Server]) -> np.ndarray:
    """Steps of the sequences that have ended, and how many of them accepted a draft token, by depth: [1 + DEPTH]."""
    counts = np.zeros(1 + DEPTH)
    for server in servers:
        found = server.read().acceptance(DRAFTS)
        assert found is not None, "a server of ours counts its drafts"
        by_depth = [*found.accepted_per_depth, *[0] * DEPTH][:DEPTH]
        counts += [found.num_steps, *by_depth]
    return counts


def _rates(counts: np.ndarray) -> tuple[float, ...]:
    """The acceptance by depth."""
    return tuple((counts[1:] / np.maximum(counts[:-1], 1)).tolist())


def _tau(counts: np.ndarray) -> float:
    """The tokens of a step."""
    return 1.0 + float(counts[1:].sum()) / max(1.0, float(counts[0]))


def _mean(before: StepCosts, after: StepCosts) -> StepCosts:
    """The costs between two measurements."""
    step, prefill = (
        tuple(map(statistics.mean, zip(*each, strict=True)))
        for each in ((before.step, after.step), (before.prefill, after.prefill))
    )
    return dataclasses.replace(before, plain=step, step=step, prefill=prefill)


def _replica(costs: StepCosts, accepted: np.ndarray) -> Replica:
    """What the servers are, to the simulator."""
    return Replica(costs, SLOTS, SLOTS * CONTEXT // PAGE_SIZE, PAGE_SIZE, _rates(accepted), DEPTH + 1)


def _described(costs: StepCosts, accepted: np.ndarray) -> str:
    steps = ", ".join(f"{size}: {1e3 * each:.1f}" for size, each in zip(costs.batch_sizes, costs.step, strict=True))
    chunks = ", ".join(f"{size}: {1e3 * each:.1f}" for size, each in zip(costs.chunks, costs.prefill, strict=True))
    rates = " ".join(f"{rate:.2f}" for rate in _rates(accepted))
    return (
        f"ms of a step by batch {steps}; of a prompt by chunk {chunks}; accepted by depth {rates}, "
        f"tau {_tau(accepted):.2f}"
    )


def _capacity(replica: Replica, options: argparse.Namespace, supply: _Supply) -> float:
    """How many such requests a second the simulator thinks the replicas can answer."""
    asked = [each for each, _ in supply.load(100.0, 4.0, options.routing == "prefix")]
    at_once = [dataclasses.replace(each, time=0) for each in asked]
    report = simulate(replica, options.replicas, at_once, routing="round-robin", seed=options.seed)
    return len(asked) / (report.end / NANO)


def _run(
    servers: Sequence[Server], load: Sequence[tuple[Arrival, list[int]]], options: argparse.Namespace, seconds: float
) -> Measured:
    """Send all requests at their times, and count what comes in the last three quarters. What is not answered by the
    end is dropped; latencies are of the requests that were."""
    router = Router(servers, options.routing, PAGE_SIZE, options.seed)
    lock, is_over = threading.Lock(), threading.Event()
    replies: list[Reply] = []

    def send(server: Server, arrival: Arrival, prompt: list[int]) -> None:
        reply = _ask(server, prompt, arrival.answer)
        with lock:
            server.load -= 1
            if not is_over.is_set():
                if reply.error:
                    raise SystemExit(f"{server.client.url}: {reply.error}")
                replies.append(reply)

    early: list[Series] = []
    start, drafted = [server.read() for server in servers], _accepted(servers)
    with ThreadPoolExecutor(max(1, len(load))) as pool:
        begin = time.perf_counter()
        watch = pool.submit(lambda: (time.sleep(seconds / 4), early.extend(server.read() for server in servers)))
        futures = []
        for arrival, prompt in load:
            time.sleep(max(0.0, begin + arrival.time / NANO - time.perf_counter()))
            with lock:
                server = router.choose(arrival)
                server.load += 1
            futures.append(pool.submit(send, server, arrival, prompt))
        time.sleep(max(0.0, begin + seconds - time.perf_counter()))
        late = [server.read() for server in servers]
        is_over.set()
        for server in servers:
            server.streams.hang_up()
        for future in (watch, *futures):
            future.result()
    _wait_until_idle(servers)
    tokens = sum((b.total(TOKENS) or 0) - (a.total(TOKENS) or 0) for a, b in zip(early, late, strict=True))
    hits, asked = (
        sum((b.total(name) or 0) - (a.total(name) or 0) for a, b in zip(start, late, strict=True))
        for name in (HITS, QUERIES)
    )
    ttft = [reply.ttft for reply in replies]
    tpot = [reply.tpot for reply in replies if reply.tpot is not None]
    tau = _tau(_accepted(servers) - drafted)
    return Measured(tokens / (0.75 * seconds), _middle(ttft), _middle(tpot), hits / max(1.0, asked), tau)


def _of_report(report: SimulationReport, seconds: float, tau: float) -> Measured:
    done = [answer for answer in report.answers if answer.last <= seconds * NANO]
    cached, asked = sum(a.cached for a in done), sum(a.arrival.prompt for a in done)
    return Measured(
        report.tokens_between(seconds / 4, seconds),
        _middle([answer.ttft for answer in done]),
        _middle([answer.tpot for answer in done]),
        cached / max(1, asked),
        tau,
    )


def _middle(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values or [0.0], (50, 90)).tolist()
    return low, high


def _table(options: argparse.Namespace, found: dict[str, tuple[float, Measured, Measured]]) -> str:
    lines = [
        f"| {options.replicas} replicas, {options.routing} | requests/s | tokens/s | simulated | off | TTFT 50, 90 % | "
        "simulated | ms per token 50, 90 % | simulated | cached | simulated | tau | counted before |",
        "|" + "---|" * 13,
    ]
    for name, (rate, real, simulated) in found.items():
        off = simulated.tokens_per_second / real.tokens_per_second - 1
        times = [
            f"{1e3 * low:,.0f}, {1e3 * high:,.0f}"
            for low, high in (real.ttft, simulated.ttft, real.tpot, simulated.tpot)
        ]
        lines.append(
            f"| {name} | {rate:.2f} | {real.tokens_per_second:.0f} | {simulated.tokens_per_second:.0f} | {off:+.1%} | "
            f"{times[0]} | {times[1]} | {times[2]} | {times[3]} | {real.hit_rate:.0%} | {simulated.hit_rate:.0%} | "
            f"{real.tau:.2f} | {simulated.tau:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
