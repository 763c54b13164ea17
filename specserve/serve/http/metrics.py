"""Prometheus series of one server, under vLLM's names: existing dashboards and `vllm bench serve` can read them. What
vLLM has no name for is called specserve:.

Owns the registry (one per app): the deltas of a sequence become counts, and the engine's own state is read when a
scraper asks. Knows nothing of HTTP.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve.serve.interface import EngineStats
from specserve.serve.request import Delta
from specserve.speculative.acceptance import Acceptance

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_LATENCY_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """The series of one served model. Speculation is counted when a sequence ends."""

    def __init__(self, model_name: str, read_stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, read_stats))
        self._model_name = model_name
        self._num_prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of all sequences.")
        self._num_generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.acceptance = Acceptance()  # of all sequences that have ended
        self.unknown_fields = self._counter("specserve:unknown_fields", "Fields of requests that were not read.")
        self._num_drafts = self._counter("vllm:spec_decode_num_drafts", "Target forwards after prefill.")
        self._num_draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens that the draft proposed.")
        self._num_accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Proposed tokens accepted.")
        self._num_accepted_per_pos = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens accepted, by depth (0 is the first proposed token).",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._num_finished = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Submission to first token.", _FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Gap between deltas, divided evenly over the tokens of the later one.",
            _INTER_TOKEN_BUCKETS,
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Submission to the end of a sequence.", _LATENCY_BUCKETS
        )

    def render(self) -> bytes:
        """The text exposition. Creation times are left out: scrapers that match `num_drafts` by substring, as
        `vllm bench serve` does, would add them to the counts."""
        lines = generate_latest(self.registry).splitlines(keepends=True)
        return b"".join(line for line in lines if b"_created" not in line.split(b"{")[0])

    def start_sequence(self, num_prompt_tokens: int) -> "SequenceMetrics":
        """Count one submitted sequence. Feed the result every delta of it."""
        self._num_prompt_tokens.inc(num_prompt_tokens)
        return SequenceMetrics(self)

    def _observe_tokens(self, num_tokens: int, seconds: float, *, is_first: bool) -> None:
        self._num_generation_tokens.inc(num_tokens)
        if is_first:
            self._first_token.observe(seconds)
        else:
            for _ in range(num_tokens):
                self._inter_token.observe(seconds / num_tokens)

    def _observe_end(self, delta: Delta, seconds: float) -> None:
        self._num_finished.labels(self._model_name, str(delta.finish_reason)).inc()
        self._latency.observe(seconds)
        if delta.stats is not None:
            self._observe_speculation(delta.stats)

    def _observe_speculation(self, stats: Acceptance) -> None:
        self.acceptance += stats
        self._num_drafts.inc(stats.num_steps)
        self._num_draft_tokens.inc(stats.num_draft_tokens)
        self._num_accepted.inc(stats.num_accepted)
        for depth, num_accepted in enumerate(stats.accepted_per_depth):
            self._num_accepted_per_pos.labels(self._model_name, str(depth)).inc(num_accepted)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(self._model_name)


class EngineCollector(Collector):
    """Reads the engine's state at the moment of a scrape."""

    def __init__(self, model_name: str, read_stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        usage = stats.num_pages_held / stats.num_pages if stats.num_pages else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences in a slot.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for a slot or pages.", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Pages that running sequences hold; 1 is all of them.", usage)
        yield self._gauge("specserve:pages", "Pages of the cache.", stats.num_pages)
        yield self._gauge("specserve:pages_cached", "Pages in the prefix cache, held or idle.", stats.num_pages_cached)
        yield self._gauge(
            "specserve:programs_left", "Programs still to be compiled, while others serve.", stats.num_programs_left
        )
        yield self._gauge(
            "specserve:estimated_speedup",
            "Tokens emitted over what plain steps of the same measured cost would have emitted.",
            stats.estimated_speedup,
        )
        yield self._gauge(
            "specserve:seconds_in_step", "Age of the step that is being waited for.", stats.seconds_in_step
        )
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.", stats.num_prefix_hits)
        yield self._counter("vllm:num_preemptions", "Sequences sent back to the queue.", stats.num_preemptions)
        yield self._counter("specserve:rebuilds", "Rebuilt caches after a device error.", stats.num_rebuilds)
        yield self._counter("specserve:busy_seconds", "Of the engine's thread, with work to do.", stats.busy_seconds)
        yield self._counter("specserve:host_seconds", "Of them, not waiting for the device.", stats.host_seconds)
        yield self._counter(
            "specserve:late_compiles",
            "Programs that a step had to wait for; more than 0 is a bug.",
            stats.num_late_compiles,
        )
        steps = CounterMetricFamily("specserve:steps", "Target forwards.", labels=["model_name", "speculation"])
        for speculation, num_steps in stats.num_steps_by_speculation.items():
            steps.add_metric([self._model_name, speculation], num_steps)
        yield steps

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class SequenceMetrics:
    """Measures the latencies of one sequence, and counts its tokens, from its deltas."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start_time = self._last_time = time.monotonic()
        self._has_started = False

    def observe(self, delta: Delta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            self._metrics._observe_tokens(len(delta.token_ids), now - self._last_time, is_first=not self._has_started)
            self._last_time = now
            self._has_started = True
        if delta.finish_reason is not None:
            self._metrics._observe_end(delta, now - self._start_time)
