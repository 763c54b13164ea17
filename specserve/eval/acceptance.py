"""Acceptance and speed of a head: the same questions through a plain and a speculative engine, side by side.

The arms are interleaved (a group of questions plain, then the same group speculative), so that a noisy machine is
noisy for both, and their answers are compared: speculation may not change a token."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve.errors import DataError, RequestError
from specserve.eval.prompts import Question
from specserve.serve.engine import Engine
from specserve.serve.request import SamplingParams
from specserve.speculative.acceptance import Acceptance


@dataclass
class Arm:
    """One way of decoding: what it produced and how long it took."""

    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)


@dataclass
class Report:
    """What an evaluation found."""

    bench: str
    speculation: str
    temperature: float
    concurrency: int
    acceptance: Acceptance = field(default_factory=Acceptance)
    by_category: dict[str, Acceptance] = field(default_factory=lambda: defaultdict(Acceptance))
    plain: Arm = field(default_factory=Arm)
    speculative: Arm = field(default_factory=Arm)
    speedups: list[float] = field(default_factory=list)  # one per group of questions
    num_answers: int = 0
    num_identical: int = 0
    num_skipped: int = 0  # prompts that do not fit the context

    @property
    def speedup(self) -> float:
        """Tokens per second of the speculative arm over the plain one: the median over groups."""
        return statistics.median(self.speedups) if self.speedups else float("nan")

    def to_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "speculation": self.speculation,
            "temperature": self.temperature,
            "concurrency": self.concurrency,
            "tau": self.acceptance.tau,
            "accept_rate": self.acceptance.accept_rate,
            "accepted_per_depth": self.acceptance.accepted_per_depth,
            "num_steps": self.acceptance.num_steps,
            "tau_by_category": {name: found.tau for name, found in self.by_category.items()},
            "plain_tokens_per_second": self.plain.tokens_per_second,
            "speculative_tokens_per_second": self.speculative.tokens_per_second,
            "speedup_median": self.speedup,
            "answers": self.num_answers,
            "identical_answers": self.num_identical,
            "skipped_prompts": self.num_skipped,
        }


@dataclass
class _Chat:
    question: Question
    messages: list[dict[str, str]] = field(default_factory=list)


def evaluate(
    plain: Engine,
    speculative: Engine,
    questions: Sequence[Question],
    report: Report,
    *,
    max_tokens: int,
    seed: int = 0,
    on_answer: Callable[[Report], None] = lambda _report: None,
) -> Report:
    """Have every conversation twice. Both engines run (started) over the same target. Fills and returns `report`."""
    chats = [_Chat(question) for question in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [chat for chat in chats if turn < len(chat.question.turns)]
        prompts = []
        for chat in asked:
            chat.messages.append({"role": "user", "content": chat.question.turns[turn]})
            prompts.append(_render(plain, chat.messages))
        for start in range(0, len(asked), report.concurrency):
            pairs = zip(asked[start : start + report.concurrency], prompts[start:], strict=False)
            group = [(chat, prompt) for chat, prompt in pairs if len(prompt) < plain.max_model_len]
            report.num_skipped += min(report.concurrency, len(asked) - start) - len(group)
            if group:
                _run_group(plain, speculative, group, report, max_tokens, seed)
                on_answer(report)
    if not report.num_answers:
        raise DataError(f"{report.bench}: none of the prompts fits a context of {plain.max_model_len} tokens")
    return report


def _render(engine: Engine, messages: list[dict[str, str]]) -> list[int]:
    try:
        return engine.tokenizer.render_chat(messages)
    except RequestError as error:
        raise DataError(f"the target cannot be asked: {error}") from error


def _run_group(
    plain: Engine,
    speculative: Engine,
    group: list[tuple[_Chat, list[int]]],
    report: Report,
    max_tokens: int,
    seed: int,
) -> None:
    params = [
        SamplingParams(
            max_tokens=min(max_tokens, plain.max_model_len - len(prompt)), temperature=report.temperature, seed=seed + i
        )
        for i, (_, prompt) in enumerate(group)
    ]
    rates, answers = [], []
    for engine, arm in ((plain, report.plain), (speculative, report.speculative)):
        begin = time.perf_counter()
        completions = engine.generate([prompt for _, prompt in group], params)
        seconds = time.perf_counter() - begin
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        arm.num_tokens += num_tokens
        arm.seconds += seconds
        rates.append(num_tokens / seconds)
        answers.append(completions)
    report.speedups.append(rates[1] / rates[0])
    for (chat, _), expected, got in zip(group, *answers, strict=True):
        report.num_answers += 1
        report.num_identical += expected.token_ids == got.token_ids
        report.acceptance += got.stats
        report.by_category[chat.question.category] += got.stats
        chat.messages.append({"role": "assistant", "content": expected.text})
