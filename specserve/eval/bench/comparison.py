"""Ways of decoding side by side: the same questions through every one of them, taking turns in one process.

A comparison is one temperature at one concurrency. In each of its rounds every arm answers the same questions, which no
other round asks, so no arm can profit from what it has seen; ratios are taken within a round, so a noisy machine is
noisy for all. Answers are compared: speculation may not change a token.
"""

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from specserve.drafters.speculation import parse_speculation
from specserve.errors import SpecServeError
from specserve.eval.settings import BenchRun
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.interface import EngineStats
from specserve.serve.requests.completion import answer_all
from specserve.serve.requests.request import Delta, FinishReason, Request, SamplingParams
from specserve.speculative.acceptance import Acceptance

PLAIN, AUTO = "off", "auto"
ENDS = (FinishReason.STOP, FinishReason.LENGTH)  # of answers that are whole


def has_draft(speculation: str) -> bool:
    """Return whether it is one tree that a head proposes. Raises ConfigError."""
    if speculation == AUTO:
        return False
    tree = parse_speculation(speculation)
    return tree is not None and tree.uses_head


def requests_at(run: BenchRun, concurrency: int) -> int:
    """Return how many questions each arm answers in a round with so many clients: never fewer than run at once."""
    return max(run.requests, concurrency)


def num_prompts(run: BenchRun) -> int:
    """Return how many prompts it takes to ask none of them twice."""
    return len(run.temperature) * run.rounds * sum(requests_at(run, concurrency) for concurrency in run.concurrency)


@dataclass(eq=False)
class TimedAnswer:
    """An answer as its client saw it arrive. Seconds count from its submission."""

    begin: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # empty where the engine has no tokenizer
    arrivals: list[float] = field(default_factory=list)  # of deltas with tokens
    sizes: list[int] = field(default_factory=list)  # how many tokens each of these brought
    acceptance: Acceptance = field(default_factory=Acceptance)
    error: str | None = None
    num_reported: int | None = None  # tokens, where a server reports their number and not their ids

    @property
    def num_tokens(self) -> int:
        if self.num_reported is None:
            return len(self.token_ids)
        return self.num_reported

    def agrees(self, other: "TimedAnswer") -> bool:
        """Return whether both answers are the same: token for token, or letter for letter where token ids are not
        known."""
        if self.num_reported is None and other.num_reported is None:
            return self.token_ids == other.token_ids
        return self.text == other.text

    def take(self, token_ids: Sequence[int]) -> None:
        """Note tokens that have just arrived."""
        if token_ids:
            self.token_ids += token_ids
            self.arrivals.append(time.perf_counter() - self.begin)
            self.sizes.append(len(token_ids))

    @property
    def gaps(self) -> list[float]:
        """The seconds between each delta and the next; with speculation a delta may hold several tokens."""
        return [late - early for early, late in itertools.pairwise(self.arrivals)]

    @property
    def seconds_per_token(self) -> float | None:
        """The mean seconds for each token after the first, which is vLLM's TPOT; None for an answer of one token."""
        if self.num_tokens <= 1:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1) if self.arrivals else 0.0


class BenchArm(Protocol):
    """A way of decoding that a benchmark measures."""

    def can_run(self, temperature: float, concurrency: int, /) -> bool:
        """Return whether the arm takes part at this temperature, with so many clients."""
        ...

    def forget(self) -> None:
        """Drop the arm's memory of earlier questions, such as its prefix cache, so that none of it helps from
        now on."""
        ...

    def stats(self) -> EngineStats:
        """The counters of its engine; all zero where there is none."""
        ...

    def ask(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], concurrency: int, /
    ) -> tuple[list[TimedAnswer], float]:
        """Answer the prompts (token ids, or chats where the arm is a server), `concurrency` of them at a time; also
        returns the seconds that all of them took."""
        ...


class EngineArm:
    """An arm that asks a running engine of ours. `on_done` is called on the engine's thread as each answer to a call of
    `ask` ends, with how many of them have."""

    def __init__(self, engine: Engine, on_done: Callable[[int], None] = lambda _number: None) -> None:
        self.engine, self._on_done = engine, on_done

    def can_run(self, _temperature: float, concurrency: int, /) -> bool:
        return concurrency <= self.engine.runner.shapes.num_slots

    def forget(self) -> None:
        self._settle()
        self.engine.flush_cache()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def ask(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], concurrency: int, /
    ) -> tuple[list[TimedAnswer], float]:
        answers = [TimedAnswer() for _ in prompts]
        numbers = itertools.count(1)

        def submit(i: int, collect: Callable[[Delta], None]) -> Request:
            answer = answers[i]

            def on_delta(delta: Delta) -> None:
                answer.take(delta.token_ids)
                collect(delta)

            answer.begin = time.perf_counter()
            return self.engine.submit(prompts[i], params[i], on_delta)

        begin = time.perf_counter()
        found = answer_all(submit, len(prompts), lambda _i, _found: self._on_done(next(numbers)), most=concurrency)
        seconds = time.perf_counter() - begin
        if failed := [each.error or each.finish_reason for each in found if each.finish_reason not in ENDS]:
            raise SpecServeError(f"{self.engine.speculation}: {len(failed)} answers failed, the first with {failed[0]}")
        for answer, each in zip(answers, found, strict=True):
            answer.text, answer.acceptance = each.text, each.stats
        self._settle()
        return answers, seconds

    def _settle(self) -> None:
        """Wait until the engine's thread has nothing left to do."""
        while (stats := self.engine.stats()).num_running or stats.num_waiting:
            time.sleep(0.001)


@dataclass
class ArmResult:
    """The results of one arm in one comparison, over all its rounds."""

    rates: list[float] = field(default_factory=list)  # tokens per second, by round
    ratios: list[float] = field(default_factory=list)  # of them to the baseline's, by round
    first: list[float] = field(default_factory=list)  # seconds to the first token, by answer
    gaps: list[float] = field(default_factory=list)  # seconds between deltas
    per_token: list[float] = field(default_factory=list)  # seconds per token after the first, by answer
    acceptance: Acceptance = field(default_factory=Acceptance)
    steps: Counter[str] = field(default_factory=Counter)  # by speculation
    busy_seconds: float = 0.0
    host_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)  # by round
    num_tokens: int = 0
    num_answers: int = 0
    num_identical: int = 0  # to the baseline's, token for token
    must_agree: bool = True  # it is one of ours

    def add_round(
        self,
        arm: BenchArm,
        prompts: Sequence[Any],  # as the arm takes them
        params: Sequence[SamplingParams],
        concurrency: int,
    ) -> list[TimedAnswer]:
        """Have the arm answer the prompts, and add what that takes. Returns its answers."""
        before = arm.stats()
        answers, seconds = arm.ask(prompts, params, concurrency)
        after = arm.stats()
        measured = [answer for answer in answers if not answer.error]  # of refused questions nothing is measured
        num_tokens = sum(answer.num_tokens for answer in measured)
        self.seconds.append(seconds)
        self.rates.append(num_tokens / seconds)
        self.num_tokens += num_tokens
        self.num_answers += len(measured)
        for answer in measured:
            self.first.append(answer.arrivals[0])
            self.gaps += answer.gaps
            if answer.seconds_per_token is not None:
                self.per_token.append(answer.seconds_per_token)
            self.acceptance += answer.acceptance
        self.busy_seconds += after.busy_seconds - before.busy_seconds
        self.host_seconds += after.host_seconds - before.host_seconds
        self.steps += Counter(after.num_steps_by_speculation) - Counter(before.num_steps_by_speculation)
        return answers

    @property
    def ratio(self) -> float:
        """The ratio of tokens per second to those of the plain arm in the same round, as the median over the
        rounds."""
        return statistics.median(self.ratios)

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all rounds over the seconds of all rounds."""
        return self.num_tokens / max(sum(self.seconds), 1e-9)

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_second": statistics.median(self.rates),
            "tokens_per_second_by_round": self.rates,
            "ratio_to_plain": self.ratio,
            "ratio_to_plain_by_round": self.ratios,
            "ttft_ms": _percentiles(self.first),
            "itl_ms": _percentiles(self.gaps),
            "tpot_ms": _percentiles(self.per_token),
            "tau": self.acceptance.tau,
            "accept_rate": self.acceptance.accept_rate,
            "steps_by_speculation": dict(self.steps),
            "host_share": self.host_seconds / self.busy_seconds if self.busy_seconds else None,
            "tokens": self.num_tokens,
            "answers": self.num_answers,
            "identical_answers": self.num_identical,
        }


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    return {f"p{p}": float(np.percentile(seconds, p)) * 1e3 if seconds else None for p in (50, 99)}


@dataclass
class Comparison:
    """The results of all arms at one temperature and one concurrency."""

    temperature: float
    concurrency: int
    arms: dict[str, ArmResult]
    baseline: str = PLAIN  # the arm that all are compared with

    def to_json(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "concurrency": self.concurrency,
            "arms": {name: result.to_json() for name, result in self.arms.items()},
        }


def run_comparisons(
    arms: Mapping[str, BenchArm],
    prompts: Sequence[Sequence[int]],
    run: BenchRun,
    on_round: Callable[[Comparison], None] = lambda _comparison: None,
) -> list[Comparison]:
    """Make every comparison. The arm named "off" is the baseline; every prompt must leave room for `max_tokens`."""
    assert PLAIN in arms, "ratios are to plain decoding"
    supply = itertools.cycle(prompts)
    for arm in arms.values():  # first touches of memory are not measured
        arm.ask(prompts[:1], [params_of(run, 0.0, 0)], 1)
    comparisons = []
    for temperature, concurrency in itertools.product(run.temperature, run.concurrency):
        taking_part = {name: arm for name, arm in arms.items() if arm.can_run(temperature, concurrency)}
        results = {name: ArmResult(must_agree=isinstance(arm, EngineArm)) for name, arm in taking_part.items()}
        comparison = Comparison(temperature, concurrency, results)
        for number in range(run.rounds):
            if number == 0 or len(prompts) < num_prompts(run):  # where prompts come again, no arm may know them
                for arm in taking_part.values():
                    arm.forget()
            asked = list(itertools.islice(supply, requests_at(run, concurrency)))
            params = [params_of(run, temperature, i) for i in range(len(asked))]
            run_round(taking_part, asked, params, comparison, number)
            on_round(comparison)
        comparisons.append(comparison)
    return comparisons


def run_round(
    arms: Mapping[str, BenchArm],
    prompts: Sequence[Any],  # as the arms take them
    params: Sequence[SamplingParams],
    comparison: Comparison,
    number: int = 0,
) -> dict[str, list[TimedAnswer]]:
    """Ask every arm the same, and record the results in the comparison. In round `number` the arm with that index,
    counted around, goes first, so no arm always does. Returns the answers of each arm."""
    answers: dict[str, list[TimedAnswer]] = {}
    names = list(arms)
    for i in range(len(names)):
        name = names[(i + number) % len(names)]
        answers[name] = comparison.arms[name].add_round(arms[name], prompts, params, comparison.concurrency)
    baseline = comparison.arms[comparison.baseline].rates[-1]
    for name, result in comparison.arms.items():
        if baseline:  # else every question was refused
            result.ratios.append(result.rates[-1] / baseline)
        pairs = zip(answers[comparison.baseline], answers[name], strict=True)
        result.num_identical += sum(expected.agrees(got) for expected, got in pairs if not got.error)
    return answers


def params_of(run: BenchRun, temperature: float, i: int) -> SamplingParams:
    """Return the sampling parameters of question `i` of a round, which are the same for every arm."""
    return SamplingParams(max_tokens=run.max_tokens, temperature=temperature, seed=run.seed + i)
