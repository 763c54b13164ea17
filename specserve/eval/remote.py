"""A server as an arm of an evaluation: any that speaks OpenAI's chat completions (ours, vLLM, SGLang, llama.cpp), asked
over HTTP like a client, and what it tells of acceptance, wherever its kind of server tells it. What a server does not
tell is not made up."""

import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from specserve.errors import ConfigError, SpecServeError
from specserve.eval.acceptance import Messages, Read, Report
from specserve.eval.bench_cells import Answer
from specserve.eval.series import DRAFTS, OWN_STEPS, TOKENS, Series
from specserve.serve.interface import EngineStats
from specserve.serve.request import SamplingParams
from specserve.speculative.acceptance import Acceptance

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0  # between two pieces of an answer
COUNT_SECONDS = 2.0  # how long counters may lag behind an answer


@dataclass(frozen=True)
class Counts:
    """What /metrics has counted since the server started."""

    num_tokens: int
    acceptance: Acceptance


def parse_counts(text: str) -> Counts | None:
    """Read the counters of speculation; None where there are none. Only a server of ours counts plain steps too."""
    series = Series.parse(text)
    acceptance = series.acceptance(OWN_STEPS, DRAFTS)
    return acceptance and Counts(int(series.total(TOKENS) or 0), acceptance)


class ServerArm:
    """An arm that asks one server. `kind` says where its acceptance comes from: `counters` of /metrics, `timings` of
    each answer (llama.cpp), the `mean` that SGLang keeps, or `nothing`."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Finds out what the server is. Raises ConfigError where it cannot be asked."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, limits=httpx.Limits())
            reply = self._http.get("/v1/models")
            reply.raise_for_status()
            self.model = str(reply.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"--server {url}: GET {self.url}/v1/models failed ({error or type(error).__name__}); expected the "
                "address of a running server that speaks OpenAI's API, and its --api-key where it has one"
            ) from error
        self.kind = "nothing"
        self.told_mean: float | None = None
        self.num_refused, self.refusal = 0, ""  # questions that do not fit the context
        if self._counts() is not None:
            self.kind = "counters"
        else:  # what an answer tells is only known from one, which also warms the server up
            self._answer([{"role": "user", "content": "Count to twenty."}], SamplingParams(max_tokens=32, seed=0))
            self._look_for_mean()
            self.num_refused = 0

    def can_run(self, _temperature: float, _concurrency: int, /) -> bool:
        return True

    def forget(self) -> None:
        """Ask the server to forget its prefixes; not every server can."""
        with contextlib.suppress(httpx.HTTPError):
            self._http.post("/flush_cache")

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        self._http.close()

    def ask(
        self, prompts: Sequence[Messages], params: Sequence[SamplingParams], concurrency: int, /
    ) -> tuple[list[Answer], float]:
        """Answer the chats. What the counters say of all together is counted with the first answer."""
        before = self._counts() if self.kind == "counters" else None
        begin = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            try:
                answers = list(pool.map(self._answer, prompts, params))
            except BaseException:  # an interrupt, or one answer that failed: the others are not waited for
                pool.shutdown(wait=False, cancel_futures=True)
                self._http.close()
                raise
        seconds = time.perf_counter() - begin
        if before is not None:
            after = self._settled(before, sum(answer.num_tokens for answer in answers))
            answers[0].acceptance = after.acceptance - before.acceptance
        else:
            self._look_for_mean()
        return answers, seconds

    def describe(self, report: Report) -> None:
        """Say in the report what the server tells of acceptance."""
        report.tells = {"counters": "all", "timings": "no depths"}.get(self.kind, self.kind)
        report.tells_each = self.kind == "timings"
        report.told_mean = self.told_mean
        notes = {
            "mean": "tau is the server's own mean over all that it has answered, so there is no interval",
            "nothing": "the server does not tell its acceptance: no counters in /metrics, no timings in its answers",
        }
        report.notes = [notes[self.kind]] if self.kind in notes else []
        if self.kind == "counters" and report.concurrency > 1:
            report.notes.append(
                "the server counts all clients together, so the interval is that of groups of questions"
            )
        if self.num_refused:
            report.notes.append(f"{self.num_refused} questions were refused, the last with: {self.refusal}")

    def _answer(self, messages: Messages, params: SamplingParams) -> Answer:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer(begin=time.perf_counter(), num_told=0)
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code == 400:  # it does not fit the context
                    answer.error = self.refusal = reply.read().decode(errors="replace")[:300]
                    self.num_refused += 1
                    return answer
                if reply.is_error:
                    said = reply.read().decode(errors="replace")[:300]
                    raise SpecServeError(f"{self.url}: {reply.status_code} {said}")
                for line in reply.iter_lines():
                    if line.startswith("data:") and line != "data: [DONE]":
                        self._take(answer, json.loads(line[5:]))
        except (httpx.HTTPError, ValueError, RuntimeError) as error:  # the last where the client was closed meanwhile
            raise SpecServeError(f"{self.url}: an answer broke off: {error or type(error).__name__}") from error
        if answer.arrivals and not answer.num_told:
            raise SpecServeError(f"{self.url}: an answer has no usage, so nobody knows how many tokens it took")
        answer.arrivals = answer.arrivals or [time.perf_counter() - answer.begin]
        return answer

    def _take(self, answer: Answer, chunk: dict[str, Any]) -> None:
        """Read one event of a stream."""
        if "error" in chunk:
            raise SpecServeError(f"{self.url}: {str(chunk['error'])[:300]}")
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if any(delta.get(field) for field in ("content", "reasoning_content", "reasoning")):
                answer.arrivals.append(time.perf_counter() - answer.begin)
            answer.text += delta.get("content") or ""
        if usage := chunk.get("usage"):
            answer.num_told = int(usage["completion_tokens"])
        timings = chunk.get("timings") or {}
        if "draft_n" in timings and self.kind in ("nothing", "timings"):  # llama.cpp, where it has drafted
            self.kind = "timings"
            accepted, emitted = int(timings["draft_n_accepted"]), int(timings["predicted_n"])
            # the first token comes from the prompt's forward, and each step emits one token of the target's own
            answer.acceptance = Acceptance(max(0, emitted - 1 - accepted), int(timings["draft_n"]), (accepted,))

    def _settled(self, before: Counts, num_tokens: int) -> Counts:
        """The counters once they hold the answers that have come: some servers count a moment later."""
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
            reply = self._http.get("/metrics")
            return parse_counts(reply.text) if reply.is_success else None
        except (httpx.HTTPError, ValueError):
            return None

    def _look_for_mean(self) -> None:
        if self.kind in ("nothing", "mean") and (mean := self._mean()) is not None:
            self.kind, self.told_mean = "mean", mean

    def _mean(self) -> float | None:
        """SGLang's mean; None where there is none, as before its first answer."""
        try:
            reply = self._http.get("/get_server_info")
            states = reply.json()["internal_states"] if reply.is_success else []
            return float(states[0]["avg_spec_accept_length"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None


def read_chats(max_tokens: int) -> Read:
    """What makes prompts of chats for servers: the messages as they are, since the server renders them."""
    return lambda messages: ([dict(message) for message in messages], max_tokens)
