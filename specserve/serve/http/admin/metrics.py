"""Prometheus series of one server, under vLLM's names: existing dashboards and `vllm bench serve` can read them. What
vLLM has no name for is called specserve:.

Owns the registry (one per app): the deltas of a sequence become counts, and the engine's own state is read when a
scraper asks. Knows nothing of HTTP.
"""

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from specserve.serve.engine.interface import ROUND_SIZES, EngineStats
from specserve.serve.requests.request import Delta, SamplingParams, SpeculationStats
from specserve.speculative.acceptance import Acceptance

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FIRST_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_LATENCY_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKEN_BUCKETS = tuple(digit * 10**exponent for exponent in range(6) for digit in (1, 2, 5))
_SEQUENCE_SECONDS = {  # the histograms of a sequence's stats
    "queue": ("In the queue, of a sequence.", lambda stats: stats.queue_seconds),
    "prefill": ("From a slot to the first token.", lambda stats: stats.prefill_seconds),
    "decode": ("From the first token to the last.", lambda stats: stats.decode_seconds),
    "inference": ("From a slot to the last token.", lambda stats: stats.prefill_seconds + stats.decode_seconds),
}


class Metrics:
    """The series of one served model. Speculation is counted when a sequence ends."""

    def __init__(self, model_name: str, read_stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, read_stats))
        ProcessCollector(registry=self.registry)
        self._model_name = model_name
        self._num_prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of all sequences.")
        self._num_generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.acceptance = Acceptance()  # of all sequences that have ended
        self._of_loras: dict[str, Acceptance] = {}
        self.registry.register(LoraCollector(model_name, self._of_loras))
        self.unknown_fields = self._counter("specserve:unknown_fields", "Fields of requests that were not read.")
        self._num_drafts = self._counter("vllm:spec_decode_num_drafts", "Steps that verified draft tokens.")
        self._num_sequence_steps = self._counter(
            "specserve:sequence_steps", "Target forwards after prefill, of all sequences; plain ones are among them."
        )
        self._num_cut_steps = self._counter(
            "specserve:sequence_cut_steps", "Of the sequence steps, those whose own token lay behind an answer's end."
        )
        self._num_draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens that the draft proposed.")
        self._num_accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Proposed tokens accepted.")
        self._num_accepted_per_pos = self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens accepted, by depth (0 is the first proposed token).",
            "position",
        )
        self._num_finished = self._counters(
            "vllm:request_success", "Sequences that ended, by reason.", "finished_reason"
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Submission to first token.", _FIRST_BUCKETS
        )
        self._inter_token = TokenGaps(model_name)
        self.registry.register(self._inter_token)
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Submission to the end of a sequence.", _LATENCY_BUCKETS
        )
        self._seconds = {
            name: self._histogram(f"vllm:request_{name}_time_seconds", text, _LATENCY_BUCKETS)
            for name, (text, _) in _SEQUENCE_SECONDS.items()
        }
        self._seconds_per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean gap between the tokens of a sequence, of those with more than one.",
            _INTER_TOKEN_BUCKETS,
        )
        self._prompt_sizes = self._histogram("vllm:request_prompt_tokens", "Prompts.", _TOKEN_BUCKETS)
        self._answer_sizes = self._histogram("vllm:request_generation_tokens", "Answers.", _TOKEN_BUCKETS)
        self._most_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens, as sent.", _TOKEN_BUCKETS)
        self._num_choices = self._histogram("vllm:request_params_n", "n, as sent.", (1, 2, 5, 10, 20, 50, 100))

    def render(self) -> bytes:
        """Return the text exposition. Creation times are left out: scrapers that match `num_drafts` by substring, as
        `vllm bench serve` does, would add them to the counts."""
        lines = generate_latest(self.registry).splitlines(keepends=True)
        return b"".join(line for line in lines if b"_created" not in line.split(b"{")[0])

    def count_request(self, params: SamplingParams) -> None:
        """Count one request, of any number of sequences."""
        self._num_choices.observe(params.n)
        if params.max_tokens is not None:
            self._most_tokens.observe(params.max_tokens)

    def of_lora(self, name: str) -> Acceptance:
        """Return the acceptance of the sequences that a LoRA adapter has answered."""
        return self._of_loras.get(name, Acceptance())

    def start_sequence(self, num_prompt_tokens: int, lora: str = "") -> "SequenceMetrics":
        """Count one submitted sequence, of the LoRA adapter `lora`; empty: of the target alone. Returns the meter that
        takes every delta of it."""
        self._num_prompt_tokens.inc(num_prompt_tokens)
        self._prompt_sizes.observe(num_prompt_tokens)
        return SequenceMetrics(self, lora)

    def _observe_tokens(self, num_tokens: int, seconds: float, *, is_first: bool) -> None:
        self._num_generation_tokens.inc(num_tokens)
        if is_first:
            self._first_token.observe(seconds)
        else:
            self._inter_token.observe(seconds, num_tokens)

    def _observe_end(self, delta: Delta, num_tokens: int, seconds: float, lora: str) -> None:
        self._num_finished.labels(self._model_name, str(delta.finish_reason)).inc()
        self._latency.observe(seconds)
        self._answer_sizes.observe(num_tokens)
        if delta.stats is not None:
            for name, (_, read) in _SEQUENCE_SECONDS.items():
                self._seconds[name].observe(read(delta.stats))
            if num_tokens > 1:
                self._seconds_per_token.observe(delta.stats.decode_seconds / (num_tokens - 1))
            self._observe_speculation(delta.stats, lora)

    def _observe_speculation(self, stats: SpeculationStats, lora: str) -> None:
        self.acceptance += stats
        if lora:
            self._of_loras[lora] = self.of_lora(lora) + stats
        self._num_sequence_steps.inc(stats.num_steps)
        self._num_cut_steps.inc(stats.num_cut)
        self._num_drafts.inc(stats.num_drafts)
        self._num_draft_tokens.inc(stats.num_draft_tokens)
        self._num_accepted.inc(stats.num_accepted)
        for depth, num_accepted in enumerate(stats.accepted_per_depth):
            self._num_accepted_per_pos.labels(self._model_name, str(depth)).inc(num_accepted)

    def _counters(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, ["model_name", label], registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(self._model_name)


class LoraCollector(Collector):
    """The acceptance of LoRA adapters that have answered something. Where none has, there are no series."""

    def __init__(self, model_name: str, of_loras: Mapping[str, Acceptance]) -> None:
        self._model_name, self._of_loras = model_name, of_loras

    def collect(self) -> Iterator[Metric]:
        series = (
            ("steps", "Target forwards after prefill, of an adapter's sequences.", lambda own: own.num_steps),
            ("accepted_tokens", "Proposed tokens accepted, of an adapter.", lambda own: own.num_accepted),
            ("draft_tokens", "Tokens that the draft proposed to an adapter.", lambda own: own.num_draft_tokens),
            ("cut_steps", "Of an adapter's steps, those whose own token lay behind an answer's end.",
             lambda own: own.num_cut),
        )  # fmt: skip
        found = sorted(dict(self._of_loras).items())
        for name, text, read in series if found else ():
            family = CounterMetricFamily(f"specserve:adapter_{name}", text, labels=["model_name", "adapter"])
            for lora, own in found:
                family.add_metric([self._model_name, lora], read(own))
            yield family


class TokenGaps(Collector):
    """Gaps between tokens. There is one at every token, so it is counted without the locks of a `Histogram`, by the
    event loop alone."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._numbers, self._seconds = [0] * (len(_INTER_TOKEN_BUCKETS) + 1), 0.0

    def observe(self, seconds: float, num_tokens: int) -> None:
        """Count the gap before a delta, divided evenly over its tokens."""
        self._numbers[bisect.bisect_left(_INTER_TOKEN_BUCKETS, seconds / num_tokens)] += num_tokens
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        text = "Gap between deltas, divided evenly over the tokens of the later one."
        name = "vllm:inter_token_latency_seconds"
        yield _histogram(name, text, self._model_name, _INTER_TOKEN_BUCKETS, self._numbers, self._seconds)


def _histogram(
    name: str, text: str, model_name: str, bounds: Sequence[float], numbers: Sequence[int], total: float
) -> Metric:
    """Make a histogram of the numbers in each bucket; the last one has no bound."""
    family = HistogramMetricFamily(name, text, labels=["model_name"])
    names = map(floatToGoString, (*bounds, math.inf))
    family.add_metric([model_name], list(zip(names, itertools.accumulate(numbers), strict=True)), total)
    return family


def _usage(stats: EngineStats) -> float:
    return stats.num_pages_held / stats.num_pages if stats.num_pages else 0.0


_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_Series = tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[EngineStats], float]]
# fmt: off
_OF_ENGINE: Sequence[_Series] = (
    (_GAUGE, "vllm:num_requests_running", "Sequences in a slot.", lambda s: s.num_running),
    (_GAUGE, "vllm:num_requests_waiting", "Sequences that wait for a slot or pages.", lambda s: s.num_waiting),
    (_GAUGE, "vllm:kv_cache_usage_perc", "Pages that running sequences hold; 1 is all of them.", _usage),
    (_GAUGE, "vllm:gpu_cache_usage_perc", "The same under its former name, which routers read.", _usage),
    (_GAUGE, "specserve:pages", "Pages of the cache.", lambda s: s.num_pages),
    (_GAUGE, "specserve:pages_cached", "Pages in the prefix cache, held or idle.", lambda s: s.num_pages_cached),
    (_GAUGE, "specserve:programs_left", "Programs still to be compiled, while others serve.",
     lambda s: s.num_programs_left),
    (_GAUGE, "specserve:estimated_speedup",
     "Tokens emitted over what plain steps of the same measured cost would have emitted.",
     lambda s: s.estimated_speedup),
    (_COUNTER, "specserve:draft_catch_up_tokens",
     "Tokens that the draft read after the target had run them alone.", lambda s: s.num_caught_up),
    (_COUNTER, "specserve:confidence_promised_tokens",
     "Draft tokens that the head's confidence expected to be accepted.", lambda s: s.num_promised),
    (_COUNTER, "specserve:confidence_kept_tokens", "Of them, accepted.", lambda s: s.num_kept),
    (_GAUGE, "specserve:confidence_trust",
     "How much of the head's confidence the choice of trees takes over; 0 is nothing.", lambda s: s.confidence_trust),
    (_GAUGE, "specserve:seconds_in_step", "Age of the step that is being waited for.", lambda s: s.seconds_in_step),
    (_COUNTER, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
     lambda s: s.num_prefix_queries),
    (_COUNTER, "vllm:prefix_cache_hits", "Prompt tokens found there.", lambda s: s.num_prefix_hits),
    (_COUNTER, "vllm:gpu_prefix_cache_queries", "The same under its former name.", lambda s: s.num_prefix_queries),
    (_COUNTER, "vllm:gpu_prefix_cache_hits", "The same under its former name.", lambda s: s.num_prefix_hits),
    (_COUNTER, "vllm:num_preemptions", "Sequences sent back to the queue.", lambda s: s.num_preemptions),
    (_COUNTER, "specserve:rebuilds", "Rebuilt caches after a device error.", lambda s: s.num_rebuilds),
    (_COUNTER, "specserve:busy_seconds", "Of the engine's thread, with work to do.", lambda s: s.busy_seconds),
    (_COUNTER, "specserve:host_seconds", "Of them, not waiting for the device.", lambda s: s.host_seconds),
    (_COUNTER, "specserve:late_compiles", "Programs that a step had to wait for; more than 0 is a bug.",
     lambda s: s.num_late_compiles),
)
# fmt: on


class EngineCollector(Collector):
    """Reads the engine's state at the moment of a scrape."""

    def __init__(self, model_name: str, read_stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        for family_type, name, text, read in _OF_ENGINE:
            family = family_type(name, text, labels=["model_name"])
            family.add_metric([self._model_name], read(stats))
            yield family
        steps = CounterMetricFamily("specserve:steps", "Target forwards.", labels=["model_name", "speculation"])
        for speculation, num_steps in stats.num_steps_by_speculation.items():
            steps.add_metric([self._model_name, speculation], num_steps)
        yield steps
        name, text = "vllm:iteration_tokens_total", "Prompt and new tokens of a step."
        yield _histogram(name, text, self._model_name, ROUND_SIZES, stats.round_sizes, stats.num_round_tokens)
        if stats.max_loras:
            loras = {"max_lora": str(stats.max_loras), "running_lora_adapters": ",".join(stats.running_loras)}
            loras["waiting_lora_adapters"] = ",".join(stats.waiting_loras)
            now = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use, at this time.", labels=[*loras])
            now.add_metric([*loras.values()], time.time())
            yield now
        facts = {"block_size": str(stats.page_size), "num_gpu_blocks": str(stats.num_pages)}
        facts |= {"cache_dtype": stats.cache_dtype, "enable_prefix_caching": str(stats.is_caching)}
        info = GaugeMetricFamily("vllm:cache_config_info", "The cache.", labels=["model_name", *facts])
        info.add_metric([self._model_name, *facts.values()], 1)
        yield info


class SequenceMetrics:
    """Measures the latencies of one sequence, and counts its tokens, from its deltas."""

    def __init__(self, metrics: Metrics, lora: str) -> None:
        self._metrics, self._lora = metrics, lora
        self._start_time = self._last_time = time.monotonic()
        self.num_tokens = 0  # so far

    def observe(self, delta: Delta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            self._metrics._observe_tokens(len(delta.token_ids), now - self._last_time, is_first=not self.num_tokens)
            self._last_time = now
            self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._metrics._observe_end(delta, self.num_tokens, now - self._start_time, self._lora)
