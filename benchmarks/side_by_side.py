"""What every comparison with another server shares: a server as a process, one answer over a stream, and the table.

Knows no engine by name: an arm is asked over OpenAI's `/v1/completions`. Only the standard library is needed.
"""

import contextlib
import http.client
import json
import math
import os
import statistics
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MIN_TOKENS = 16  # a shorter answer says nothing of the time between tokens
START_SECONDS = 3600  # a first start compiles every program
PLAIN = "off"


class BenchmarkError(Exception):
    """An error that the user can mend."""


@dataclass(frozen=True)
class Arm:
    engine: str
    weights: str  # the format that they are kept in
    speculation: str

    def __str__(self) -> str:
        return f"{self.engine} {self.weights} {self.speculation}"


@dataclass(frozen=True)
class Answer:
    prompt: int
    text: str
    num_prompt: int
    num_tokens: int
    num_accepted: int  # of them, proposed by a draft
    first: float  # seconds from asking to the first text
    last: float


@dataclass(frozen=True)
class Batch:
    """What is timed together: one answer, or all prompts where several clients ask."""

    arm: Arm
    clients: int
    round: int
    seconds: float
    answers: tuple[Answer, ...]
    num_forwards: int = 0  # of the target, after prompts, with drafts or without; 0 where the server reports none
    reported_accepted: int = 0  # by the server's metrics, where it does not report it of each answer

    @property
    def num_accepted(self) -> int:
        return sum(answer.num_accepted for answer in self.answers) or self.reported_accepted

    @property
    def num_emitted(self) -> int:
        """The tokens of the answers but their first ones, which the prompts' forwards emit."""
        return sum(answer.num_tokens - 1 for answer in self.answers)

    @property
    def forwards(self) -> int:
        return self.num_forwards or self.num_emitted - self.num_accepted

    @property
    def speed(self) -> float:
        """The speed in tokens per second: after the first token where one client asks, all of all clients where several
        do."""
        if self.clients > 1:
            return sum(answer.num_tokens for answer in self.answers) / self.seconds
        (answer,) = self.answers
        return math.nan if answer.num_tokens < MIN_TOKENS else (answer.num_tokens - 1) / (answer.last - answer.first)


@dataclass(frozen=True)
class Row:
    arm: Arm
    clients: int
    tokens_per_second: float
    to_peer: tuple[float, float, float] | None  # the median, and the lowest and highest of a round
    first_ms: float
    tau: float
    num_same: int  # answers that are those of specserve's plain decoding
    num_answers: int
    of_bound: float | None  # of reading the weights for every token; speculation may pass it
    peak_bytes: int


def summarize(
    batches: Sequence[Batch], bounds: Mapping[str, float], peak_bytes: Mapping[Arm, int], reference: Arm, peer: str
) -> list[Row]:
    """Make a row for every arm and number of clients. `bounds` are tokens per second by weight format; answers are
    compared with those of `reference`, and speeds with plain decoding by the engine `peer` from weights of the same
    format."""
    texts = {(b.clients, b.round, a.prompt): a.text for b in batches if b.arm == reference for a in b.answers}
    speeds = {(b.arm, b.clients, b.round, b.answers[0].prompt): b.speed for b in batches}
    rows = []
    for clients, arm in dict.fromkeys((batch.clients, batch.arm) for batch in batches):
        own = [batch for batch in batches if (batch.clients, batch.arm) == (clients, arm)]
        answers = [(batch.round, answer) for batch in own for answer in batch.answers]
        ratios: dict[int, list[float]] = {}
        for batch in own:
            other = speeds.get((Arm(peer, arm.weights, PLAIN), clients, batch.round, batch.answers[0].prompt), math.nan)
            if not math.isnan(batch.speed / other):
                ratios.setdefault(batch.round, []).append(batch.speed / other)
        by_round = [statistics.median(of_round) for of_round in ratios.values()]
        all_ratios = [ratio for of_round in ratios.values() for ratio in of_round]
        speed = median(batch.speed for batch in own)
        rows.append(
            Row(
                arm,
                clients,
                speed,
                (statistics.median(all_ratios), min(by_round), max(by_round)) if by_round else None,
                1e3 * median(a.first for _, a in answers),
                sum(batch.num_emitted for batch in own) / max(1, sum(batch.forwards for batch in own)),
                sum(a.text == texts[clients, number, a.prompt] for number, a in answers),
                len(answers),
                speed / bounds[arm.weights] if clients == 1 else None,
                peak_bytes[arm],
            )
        )
    return rows


def median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def table(rows: Sequence[Row], peer: str) -> str:
    lines = []
    for clients in dict.fromkeys(row.clients for row in rows):
        what = "one client, after the first token" if clients == 1 else f"{clients} clients together, prompts included"
        lines += ["", f"**{what}**", ""]
        lines += [f"| | weights | speculation | tokens/s | to {peer}, plain | first token | tau | same answers "]
        lines[-1] += "| of the bound | peak memory |"
        lines += ["|" + "---|" * 10]
        for row in (row for row in rows if row.clients == clients):
            ratio = "{:.2f} ({:.2f}-{:.2f})".format(*row.to_peer) if row.to_peer else "-"
            bound = "-" if row.of_bound is None else f"{row.of_bound:.0%}"
            cells = (row.arm.engine, row.arm.weights, row.arm.speculation, f"{row.tokens_per_second:.1f}", ratio)
            cells += (f"{row.first_ms:.0f} ms", f"{row.tau:.2f}", f"{row.num_same} of {row.num_answers}", bound)
            lines += [f"| {' | '.join(cells)} | {row.peak_bytes / 1e6:,.0f} MB |"]
    return "\n".join(lines[1:])


class Server:
    """A process that serves one arm; in a `with`."""

    def __init__(
        self,
        arm: Arm,
        port: int,
        command: Sequence[str],
        folder: Path,  # for its log
        environment: Mapping[str, str],
        *,
        has_salt: bool,  # it takes a `cache_salt`
    ) -> None:
        self.arm, self.port, self.has_salt = arm, port, has_salt
        self.log = folder / f"{str(arm).replace(' ', '-').replace(':', '')}.log"
        with self.log.open("wb") as out:
            everything = {**os.environ, **environment}
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=everything, cwd=folder)

    def __enter__(self) -> "Server":
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()

    def _wait(self) -> None:
        """Wait until every program is compiled: `/ready` says how many are left, and is not there on other servers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.failure("ended before it was ready")
            with contextlib.suppress(OSError):
                status, reply = self.get("/ready")
                if status == 404 and self.get("/health")[0] == 200:
                    return
                if status == 200 and not json.loads(reply).get("programs_left"):
                    return
            time.sleep(0.5)
        raise self.failure(f"is not ready after {START_SECONDS} s")

    def failure(self, what: str) -> BenchmarkError:
        return BenchmarkError(f"the server of {self.arm} {what}. The last lines of {self.log}:\n{tail(self.log)}")

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def ask(self, prompt: int, token_ids: Sequence[int], max_tokens: int) -> Answer:
        """Ask one prompt, greedily, over a stream. Nothing that was asked before helps."""
        body = {"prompt": token_ids, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.has_salt:
            body["cache_salt"] = uuid.uuid4().hex  # an answer under a salt is not drafted from later
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin = time.perf_counter()
        try:
            with contextlib.closing(connection):
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status != 200:
                    raise self.failure(f"answered {response.status}: {response.read(500).decode(errors='replace')}")
                lines = [(time.perf_counter() - begin, line) for line in response]
        except (OSError, http.client.HTTPException) as error:
            raise self.failure(f"broke off ({error!r})") from error
        events = [(at, json.loads(line[6:])) for at, line in lines if line.startswith(b"data: {")]
        if not events or "usage" not in events[-1][1]:
            raise self.failure(f"broke off: {lines[-1:]}")
        choices = [(at, event["choices"][0]) for at, event in events if event.get("choices")]
        last = events[-1][1]
        details = last["usage"].get("completion_tokens_details", {})
        if (num_prompt := last["usage"]["prompt_tokens"]) != len(token_ids):
            raise BenchmarkError(f"{self.arm} counts {num_prompt} tokens of a prompt of {len(token_ids)}")
        return Answer(
            prompt,
            "".join(choice["text"] for _, choice in choices),
            num_prompt,
            last["usage"]["completion_tokens"],
            details.get("accepted_prediction_tokens", last.get("timings", {}).get("draft_n_accepted", 0)),
            next((at for at, choice in choices if choice["text"]), choices[-1][0]),
            choices[-1][0],
        )

    def ask_all(
        self, prompts: Mapping[int, Sequence[int]], max_tokens: int, *, clients: int = 1, number: int = 0
    ) -> Batch:
        """Ask all prompts with so many clients, each taking the next prompt when its answer is complete, in round
        `number`."""
        counted = ("specserve:sequence_steps_total", "vllm:spec_decode_num_accepted_tokens_total")
        before = [self.total(series) for series in counted]
        begin = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = tuple(pool.map(lambda prompt: self.ask(prompt, prompts[prompt], max_tokens), prompts))
        seconds = time.perf_counter() - begin
        num_forwards, accepted = (self.total(series) - was for series, was in zip(counted, before, strict=True))
        return Batch(self.arm, clients, number, seconds, answers, num_forwards, accepted)

    def peak_bytes(self) -> int:
        return self._memory("VmHWM")

    def _memory(self, what: str) -> int:
        """Add up the memory of the process and of those that it has started."""
        total, left = 0, [self.process.pid]
        while left:
            folder = Path(f"/proc/{left.pop()}")
            lines = (folder / "status").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))
            left += map(int, (folder / "task" / folder.name / "children").read_text().split())
        return total

    def total(self, series: str) -> int:
        """The value of a counter of the server's metrics; 0 where there is none."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(series))


def tail(log: Path) -> str:
    return "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-12:])
