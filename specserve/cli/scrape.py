"""The counts of a server's /metrics, ours or vLLM's, and what happened between two readings of it."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, nan

from specserve.errors import ConfigError
from specserve.eval.series import DRAFTS, OWN_STEPS, TOKENS, Series
from specserve.speculative.acceptance import Acceptance

SECONDS = 60.0  # that a watch looks back
LATENCIES = {  # what is shown -> the series, and the name that it had in older versions of vLLM
    "first token": ("vllm:time_to_first_token_seconds",),
    "next tokens": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "whole answer": ("vllm:e2e_request_latency_seconds",),
}


@dataclass(frozen=True)
class Histogram:
    """The number of values that were at most each bound."""

    counts: Mapping[float, float] = field(default_factory=dict)  # bound -> values up to it; the last bound is infinite

    def since(self, earlier: "Histogram") -> "Histogram":
        """The values that came after the earlier reading."""
        return Histogram({bound: count - earlier.counts.get(bound, 0) for bound, count in self.counts.items()})

    def quantile(self, share: float) -> float:
        """Return the value that this share of all values are below, interpolated within a bucket as Prometheus does.
        It is the last finite bound where the value is beyond that, and nan without values."""
        total = self.counts.get(inf, 0)
        if not total:
            return nan
        wanted = share * total
        for (low, below), (high, up_to) in pairwise([(0.0, 0.0), *sorted(self.counts.items())]):
            if up_to >= wanted:
                return low if high == inf else low + (high - low) * (wanted - below) / max(up_to - below, 1e-12)
        return nan


@dataclass(frozen=True)
class ServerReading:
    """A reading of /metrics. Counts are since the server's start, over all models and engines that it has."""

    time: float = 0.0
    model: str = ""
    running: float = 0.0
    waiting: float = 0.0
    usage: float = 0.0  # share of the pages that is held
    pages: float | None = None  # None: the server does not tell
    pages_cached: float | None = None
    programs_left: float = 0.0
    num_prompt_tokens: float = 0.0
    num_tokens: float = 0.0
    num_ended: float = 0.0  # sequences
    acceptance: Acceptance = field(default_factory=Acceptance)
    has_all_steps: bool = False  # plain steps are among those of `acceptance`; vLLM counts those with drafts alone
    steps: Mapping[str, float] = field(default_factory=dict)  # target forwards by speculation
    latencies: Mapping[str, Histogram] = field(default_factory=dict)  # seconds


def parse(text: str, time: float) -> ServerReading:
    """Read the exposition of a server. Raises ConfigError where it is none of a server of this kind."""
    try:
        series = Series.parse(text)
    except ValueError as error:
        raise ConfigError(f"/metrics is no text of Prometheus: {error}") from None
    total, running = series.total, series.samples.get("vllm:num_requests_running")
    if running is None:
        raise ConfigError("/metrics has no vllm:num_requests_running; expected a server of specserve or vLLM")
    histograms = {}
    for name, series_names in LATENCIES.items():
        known = next((f"{each}_bucket" for each in series_names if f"{each}_bucket" in series.samples), "")
        histograms[name] = Histogram({float(bound): count for bound, count in series.by(known, "le").items()})
    return ServerReading(
        time=time,
        model=running[0][0].get("model_name", ""),
        running=total("vllm:num_requests_running") or 0,
        waiting=total("vllm:num_requests_waiting") or 0,
        usage=(total("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc") or 0) / len(running),
        pages=total("specserve:pages"),
        pages_cached=total("specserve:pages_cached"),
        programs_left=total("specserve:programs_left") or 0,
        num_prompt_tokens=total("vllm:prompt_tokens_total") or 0,
        num_tokens=total(TOKENS) or 0,
        num_ended=total("vllm:request_success_total") or 0,
        acceptance=series.acceptance(OWN_STEPS, DRAFTS) or Acceptance(),
        has_all_steps=OWN_STEPS in series.samples,
        steps=series.by("specserve:steps_total", "speculation"),
        latencies=histograms,
    )


@dataclass(frozen=True)
class Span:
    """The counts between two readings, or since the server's start where nothing ended in between."""

    last: ServerReading
    tokens_per_second: float
    prompt_tokens_per_second: float
    name: str  # of the time that the counts below are of
    acceptance: Acceptance
    num_ended: float
    steps: Mapping[str, float]
    latencies: Mapping[str, Histogram]


class Readings:
    """The readings of the last minute."""

    def __init__(self) -> None:
        self._samples: deque[ServerReading] = deque()

    def push(self, sample: ServerReading) -> None:
        """Add a reading. One with fewer tokens is of a server that has begun anew, and forgets the others."""
        if self._samples and sample.num_tokens < self._samples[-1].num_tokens:
            self._samples.clear()
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.time - self._samples[0].time > SECONDS:
            self._samples.popleft()

    def __bool__(self) -> bool:
        return bool(self._samples)

    def span(self) -> Span:
        """Return what the readings say together. Speeds are those since the reading before, counts of the last
        minute."""
        last = self._samples[-1]
        before = self._samples[-2] if len(self._samples) > 1 else last
        first = self._samples[0]
        is_recent = last.num_ended > first.num_ended
        start = first if is_recent else ServerReading()

        def rate(read: Callable[[ServerReading], float]) -> float:
            seconds = last.time - before.time
            return (read(last) - read(before)) / seconds if seconds > 0 else 0.0

        return Span(
            last=last,
            tokens_per_second=rate(lambda sample: sample.num_tokens),
            prompt_tokens_per_second=rate(lambda sample: sample.num_prompt_tokens),
            name=f"last {last.time - first.time:.0f} s" if is_recent else "since its start",
            acceptance=last.acceptance - start.acceptance,
            num_ended=last.num_ended - start.num_ended,
            steps={name: count - start.steps.get(name, 0) for name, count in last.steps.items()},
            latencies={
                name: histogram.since(start.latencies.get(name, Histogram()))
                for name, histogram in last.latencies.items()
            },
        )
