"""`specserve bench serve`: a server under load from outside, by the rules and with the result keys of `vllm bench
serve`, so that whoever reads the one's results reads the other's.

Requests are sent when their time has come (a Poisson process, or all at once), whether or not earlier ones are
answered; `max_concurrency` bounds how many are under way, and what waits for that is told apart (`queue_times`).
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from specserve.errors import ConfigError, SpecServeError
from specserve.eval.bench.streams import Reply, Streams, stream_body
from specserve.eval.client import Client, RefusedError, UnreachableError
from specserve.eval.prompts import RANDOM, load_chats, random_length, random_prompts
from specserve.eval.series import DRAFTS, Series
from specserve.eval.settings import ServeBenchRun
from specserve.speculative.acceptance import Acceptance

OWN_SERVER = ("target", "draft", "speculation", "max_slots", "max_model_len")  # settings of a server of its own
RANDOM_IDS = range(100, 1000)  # token ids of random prompts: every vocabulary has them
METRICS = ("ttft", "tpot", "itl", "e2el")
MOST_THREADS = 1024  # requests under way; more wait, and are told to have waited


@dataclass(frozen=True)
class Sent:
    """A request that was sent, and how long it had waited for its place among those under way."""

    reply: Reply
    queued: float


def request_times(count: int, rate: float, burstiness: float, seed: int) -> np.ndarray:  # [count] seconds
    """Return when to send each request, in seconds from the beginning. Gaps follow a gamma distribution of this shape,
    1 being a Poisson process, scaled so that the last is sent after count / rate seconds; an infinite rate sends all
    at once."""
    if math.isinf(rate):
        return np.zeros(count)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return times * (count / rate / times[-1])


def address_of(run: ServeBenchRun) -> str:
    """Return the address of the running server that is to be asked, or an empty string for a server of our own. Raises
    ConfigError where settings contradict each other, since none of them is to be ignored."""
    if run.base_url and (run.host or run.port):
        raise ConfigError("--base-url says it all: leave out --host and --port")
    url = run.base_url or (f"http://{run.host or '127.0.0.1'}:{run.port or 8000}" if run.host or run.port else "")
    usual = ServeBenchRun()
    for name in OWN_SERVER if url else ():
        if getattr(run, name) != getattr(usual, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for a server of its own, and {url} is one that runs already: leave "
                "either out"
            )
    return url


def load_prompts(run: ServeBenchRun) -> list[Any]:
    """Load the prompts: chats, or lists of token ids. Raises DataError or ConfigError."""
    if length := random_length(run.dataset_name, run.input_len, flag="--dataset-name"):
        return random_prompts(RANDOM_IDS, run.num_prompts, length, run.seed)
    chats: list[Any] = list(load_chats(run.dataset_name, run.num_prompts))
    return [chats[i % len(chats)] for i in range(run.num_prompts)]


def parse_rate(text: str) -> float:
    """Read a request rate: a number above 0, or inf. Raises ConfigError."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ConfigError(f"--request-rate {text}: expected requests per second, a number above 0, or inf")
    return rate


def run_load(
    streams: Streams,
    model: str,
    prompts: Sequence[Any],
    run: ServeBenchRun,
    on_answer: Callable[[Reply], None] = lambda _reply: None,
) -> tuple[list[Sent], float]:
    """Send all requests at their times and wait for every answer; also returns the seconds that all took."""
    times = request_times(len(prompts), parse_rate(run.request_rate), run.burstiness, run.seed)
    most = min(run.max_concurrency or MOST_THREADS, MOST_THREADS, len(prompts))
    begin, is_over = time.perf_counter(), threading.Event()

    def send(i: int) -> Sent:
        if is_over.is_set():
            return Sent(Reply(error="not sent: the benchmark was interrupted"), 0.0)
        queued = max(0.0, time.perf_counter() - begin - times[i])
        path, body = stream_body(
            model,
            prompts[i],
            max_tokens=run.output_len,
            temperature=run.temperature,
            seed=run.seed + i,
            **({"ignore_eos": True} if run.ignore_eos else {}),
        )
        reply = streams.ask(path, body)
        on_answer(reply)
        return Sent(reply, queued)

    with ThreadPoolExecutor(most) as pool:
        futures: list[Future[Sent]] = []
        try:
            for i, at in enumerate(times):
                time.sleep(max(0.0, begin + at - time.perf_counter()))
                futures.append(pool.submit(send, i))
            sent = [future.result() for future in futures]
        except BaseException:  # an interrupt: what has not been sent stays so
            is_over.set()
            streams.hang_up()  # whoever waits for a piece need not wait for it any more
            raise
    return sent, time.perf_counter() - begin


def result_of(
    sent: Sequence[Sent], seconds: float, percentiles: Sequence[float] = (99,), accepted: Acceptance | None = None
) -> dict[str, Any]:
    """Return the results of a load, under the keys of `vllm bench serve --save-result`. Times of metrics are in
    milliseconds. `accepted` is what the server has counted of its speculation meanwhile. Raises SpecServeError where
    nothing was answered."""
    replies = [each.reply for each in sent]
    good = [reply for reply in replies if not reply.error]
    if not good:
        raise SpecServeError(f"none of {len(replies)} requests was answered, the first with: {replies[0].error}")
    num_input, num_output = sum(reply.num_prompt for reply in good), sum(reply.num_tokens for reply in good)
    most_tokens, most_requests = _peaks(good)
    result = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(replies) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "input_lens": [reply.num_prompt for reply in replies],
        "output_lens": [0 if reply.error else reply.num_tokens for reply in replies],
        "ttfts": [reply.ttft for reply in replies],
        "itls": [reply.itl for reply in replies],
        "latencies": [reply.latency for reply in replies],
        "start_times": [reply.start for reply in replies],
        "queue_times": [each.queued for each in sent],
        "generated_texts": [reply.text for reply in replies],
        "errors": [reply.error for reply in replies],
        "max_output_tokens_per_s": most_tokens,
        "max_concurrent_requests": most_requests,
        "rtfx": 0.0,  # of speech
    }
    values = {
        "ttft": [reply.ttft for reply in good],
        "tpot": [reply.tpot for reply in good if reply.tpot is not None],
        "itl": [gap for reply in good for gap in reply.itl],
        "e2el": [reply.latency for reply in good],
    }
    for name in METRICS:
        result |= _summary(name, values[name], percentiles)
    if accepted is not None and accepted.num_steps:
        result |= {
            "spec_decode_acceptance_rate": 100 * accepted.num_accepted / max(1, accepted.num_draft_tokens),
            "spec_decode_acceptance_length": accepted.tau,
            "spec_decode_num_drafts": accepted.num_steps,
            "spec_decode_draft_tokens": accepted.num_draft_tokens,
            "spec_decode_accepted_tokens": accepted.num_accepted,
            "spec_decode_per_position_acceptance_rates": [
                count / accepted.num_steps for count in accepted.accepted_per_depth
            ],
        }
    return result


def _summary(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = 1e3 * np.array(seconds or [0.0])
    found = {"mean": float(values.mean()), "median": float(np.median(values)), "std": float(values.std())}
    found |= {f"p{p:g}": float(np.percentile(values, p)) for p in percentiles}
    return {f"{what}_{name}_ms": value for what, value in found.items()}


def _peaks(replies: Sequence[Reply]) -> tuple[float, int]:
    """The most tokens that came within one second of the clock that begins with the first request, and the most
    requests that were under way at once. The tokens of an answer are spread evenly over its pieces."""
    begin = min(reply.start for reply in replies)
    tokens: dict[int, float] = {}
    events = []
    for reply in replies:
        for at in reply.arrivals:
            tokens[int(at - begin)] = tokens.get(int(at - begin), 0.0) + reply.num_tokens / len(reply.arrivals)
        events += [(reply.start, 1), (reply.start + reply.latency, -1)]
    under_way = np.cumsum([change for _, change in sorted(events)])  # who leaves does so before who comes
    return max(tokens.values()), int(under_way.max())


def read_counters(client: Client) -> Acceptance | None:
    """Read what the server has counted of its speculation since it started, under vLLM's names in /metrics. None means
    that it counts nothing."""
    try:
        return Series.parse(client.text("/metrics")).acceptance(DRAFTS)
    except (UnreachableError, RefusedError):
        return None


def facts_of(run: ServeBenchRun, model: str, client: Client) -> Mapping[str, Any]:
    """Return the keys of a result that say what was measured."""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai" if run.dataset_name == RANDOM else "openai-chat",
        "backend": "openai" if run.dataset_name == RANDOM else "openai-chat",
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": run.num_prompts,
        "base_url": client.url,
        "request_rate": run.request_rate if math.isinf(parse_rate(run.request_rate)) else parse_rate(run.request_rate),
        "burstiness": run.burstiness,
        "max_concurrency": run.max_concurrency or None,
    }


def warm_up(streams: Streams, model: str, prompts: Sequence[Any], run: ServeBenchRun) -> None:
    """Ask one prompt, so that the first request of the load finds programs warm. Raises SpecServeError where that
    fails, because the others would fail too."""
    path, body = stream_body(model, prompts[0], max_tokens=run.output_len, temperature=run.temperature)
    reply = streams.ask(path, body)
    if reply.error:
        raise SpecServeError(f"{streams.url}{path} does not answer: {reply.error}")
