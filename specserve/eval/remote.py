"""A server as an arm of an evaluation. It may be any that speaks OpenAI's chat completions (ours, vLLM, SGLang,
llama.cpp), and is asked over HTTP as a client would. Its acceptance is read from wherever its kind of server reports
it; figures that a server does not report are left empty."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specserve.errors import ConfigError, SpecServeError
from specserve.eval.acceptance import Messages, Read, SpeculationReport
from specserve.eval.bench.comparison import TimedAnswer
from specserve.eval.client import Client, RefusedError, UnreachableError
from specserve.serve.engine.interface import EngineStats
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.acceptance import Acceptance

COUNT_SECONDS = 2.0  # how long counters may lag behind an answer
SPEC = "vllm:spec_decode_num"  # series have the names that vLLM gives them, where vLLM has them
STEPS = ("specserve:sequence_steps_total", f"{SPEC}_drafts_total")  # our own count plain steps too, so they come first
CUT_STEPS = "specserve:sequence_cut_steps_total"  # others' servers count none, so their tau of short answers is higher
NOTES = {  # on acceptance, by where it comes from (`ServerArm.kind`)
    "mean": ("tau is the server's own mean over all that it has answered, so there is no interval",),
    "nothing": ("the server does not report its acceptance: no counters in /metrics, no timings in its answers",),
}


@dataclass(frozen=True)
class Counts:
    """The counts in /metrics since the server started."""

    num_tokens: int
    acceptance: Acceptance


def parse_counts(text: str) -> Counts | None:
    """Read the counters of speculation, added up over the models and engines behind one address, or None where there
    are none. Raises ValueError for what is no text of Prometheus."""
    totals, by_depth = Counter[str](), Counter[int]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] += sample.value  # type: ignore[assignment]
            if sample.name == f"{SPEC}_accepted_tokens_per_pos_total":
                by_depth[int(sample.labels.get("position", ""))] += int(sample.value)
    steps = next((name for name in STEPS if name in totals), None)
    if steps is None:
        return None
    per_depth = tuple(by_depth[depth] for depth in range(max(by_depth, default=-1) + 1))
    per_depth = per_depth or (int(totals[f"{SPEC}_accepted_tokens_total"]),)
    counts = int(totals[steps]), int(totals[f"{SPEC}_draft_tokens_total"]), per_depth, int(totals[CUT_STEPS])
    acceptance = Acceptance(*counts)
    return Counts(int(totals["vllm:generation_tokens_total"]), acceptance)


class ServerArm:
    """An arm that asks one server. `kind` names where its acceptance comes from: `counters` of /metrics, `timings` of
    each answer (llama.cpp), the `mean` that SGLang keeps, or `nothing`."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Find out which kind of server it is. Raises ConfigError where it cannot be asked."""
        try:
            self._client = Client(url, api_key)
            self.url, self.model = self._client.url, self._client.first_model()
        except ConfigError as error:
            raise ConfigError(f"--server {url}: {error}") from error
        self.kind = "nothing"
        self.reported_mean: float | None = None
        self.num_refused, self.refusal = 0, ""  # questions that do not fit the context
        if self._counts() is not None:
            self.kind = "counters"
        else:  # only an answer shows what answers report; it also warms the server up
            self._answer([{"role": "user", "content": "Count to twenty."}], SamplingParams(max_tokens=32, seed=0))
            self._look_for_mean()
            self.num_refused = 0

    def can_run(self, _temperature: float, _concurrency: int, /) -> bool:
        return True

    def forget(self) -> None:
        """Ask the server to drop its prefix cache. Not every server can."""
        with contextlib.suppress(UnreachableError, RefusedError):
            self._client.json("/flush_cache", {})

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        self._client.close()

    def ask(
        self, prompts: Sequence[Messages], params: Sequence[SamplingParams], concurrency: int, /
    ) -> tuple[list[TimedAnswer], float]:
        """Answer the chats, `concurrency` of them at a time, and return the answers with the seconds that all
        took. A server's counters count all answers together, so their difference over the call is noted in the
        first answer."""
        before = self._counts() if self.kind == "counters" else None
        begin = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            try:
                answers = list(pool.map(self._answer, prompts, params))
            except BaseException:  # an interrupt, or one answer that failed: the others are not waited for
                pool.shutdown(wait=False, cancel_futures=True)
                self._client.close()
                raise
        seconds = time.perf_counter() - begin
        if before is not None:
            after = self._settled(before, sum(answer.num_tokens for answer in answers))
            answers[0].acceptance = after.acceptance - before.acceptance
        else:
            self._look_for_mean()
        return answers, seconds

    def describe(self, report: SpeculationReport) -> None:
        """Describe in the report what acceptance figures the server gives."""
        report.detail = {"counters": "all", "timings": "no depths"}.get(self.kind, self.kind)
        report.is_per_answer = self.kind == "timings"
        report.reported_mean = self.reported_mean
        report.notes = [*NOTES.get(self.kind, ())]
        if self.kind == "counters" and report.concurrency > 1:
            report.notes.append(
                "the server counts all clients together, so the interval is that of groups of questions"
            )
        if self.num_refused:
            report.notes.append(f"{self.num_refused} questions were refused, the last with: {self.refusal}")

    def _answer(self, messages: Messages, params: SamplingParams) -> TimedAnswer:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = TimedAnswer(begin=time.perf_counter(), num_reported=0)
        try:
            for chunk in self._client.events("/v1/chat/completions", body):
                self._take(answer, chunk)
        except RefusedError as error:
            if error.status != 400:
                raise SpecServeError(f"{self.url}: {error.status} {error}") from error
            answer.error = self.refusal = str(error)  # it does not fit the context
            self.num_refused += 1
            return answer
        if answer.arrivals and not answer.num_reported:
            raise SpecServeError(f"{self.url}: an answer has no usage, so the number of its tokens is unknown")
        answer.arrivals = answer.arrivals or [time.perf_counter() - answer.begin]
        return answer

    def _take(self, answer: TimedAnswer, chunk: dict[str, Any]) -> None:
        """Read one event of a stream."""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if any(delta.get(field) for field in ("content", "reasoning_content", "reasoning")):
                answer.arrivals.append(time.perf_counter() - answer.begin)
            answer.text += delta.get("content") or ""
        if usage := chunk.get("usage"):
            answer.num_reported = int(usage["completion_tokens"])
        timings = chunk.get("timings") or {}
        if "draft_n" in timings and self.kind in ("nothing", "timings"):  # llama.cpp, where it has drafted
            self.kind = "timings"
            accepted, emitted = int(timings["draft_n_accepted"]), int(timings["predicted_n"])
            # the first token comes from the prompt's forward, and each step emits one token of the target's own
            answer.acceptance = Acceptance(max(0, emitted - 1 - accepted), int(timings["draft_n"]), (accepted,))

    def _settled(self, before: Counts, num_tokens: int) -> Counts:
        """Return the counters once they hold the answers that have come, since some servers count a moment later."""
        deadline = time.monotonic() + COUNT_SECONDS
        while True:
            found = self._counts()
            if found is None:
                raise SpecServeError(f"{self.url}/metrics: the counters of speculation are gone")
            if found.num_tokens - before.num_tokens >= num_tokens or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def _counts(self) -> Counts | None:
        try:
            return parse_counts(self._client.text("/metrics"))
        except (UnreachableError, RefusedError, ValueError):
            return None

    def _look_for_mean(self) -> None:
        if self.kind in ("nothing", "mean") and (mean := self._mean()) is not None:
            self.kind, self.reported_mean = "mean", mean

    def _mean(self) -> float | None:
        """Return SGLang's mean, or None where there is none, as before its first answer."""
        try:
            return float(self._client.json("/get_server_info")["internal_states"][0]["avg_spec_accept_length"])
        except (UnreachableError, RefusedError, ValueError, LookupError, TypeError):
            return None


def read_chats(max_tokens: int) -> Read:
    """Return a function that makes prompts of chats for servers: the messages as they are, since the server renders
    them."""
    return lambda messages: ([dict(message) for message in messages], max_tokens)
