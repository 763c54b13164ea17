"""Acceptance and speed of a head: the same questions through a plain and a speculative engine, side by side.

The arms are interleaved (a group of questions plain, then the same group speculative), so that a noisy machine is
noisy for both, and their answers are compared: speculation may not change a token."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve.errors import DataError, RequestError
from specserve.eval.bench_cells import PLAIN, ArmResult, Cell, EngineArm, run_round
from specserve.eval.prompts import Question
from specserve.serve.engine import Engine
from specserve.serve.request import SamplingParams
from specserve.speculative.acceptance import Acceptance


@dataclass
class Report:
    """What an evaluation found: both arms, and the speculative one's acceptance by category of question."""

    bench: str
    speculation: str
    temperature: float
    concurrency: int
    plain: ArmResult = field(default_factory=ArmResult)
    speculative: ArmResult = field(default_factory=ArmResult)
    by_category: dict[str, Acceptance] = field(default_factory=lambda: defaultdict(Acceptance))
    num_skipped: int = 0  # prompts that do not fit the context

    def to_json(self) -> dict[str, Any]:
        found = self.speculative.acceptance
        return {
            "bench": self.bench,
            "speculation": self.speculation,
            "temperature": self.temperature,
            "concurrency": self.concurrency,
            "tau": found.tau,
            "accept_rate": found.accept_rate,
            "accepted_per_depth": found.accepted_per_depth,
            "num_steps": found.num_steps,
            "tau_by_category": {name: found.tau for name, found in self.by_category.items()},
            "plain_tokens_per_second": self.plain.tokens_per_second,
            "speculative_tokens_per_second": self.speculative.tokens_per_second,
            "speedup_median": self.speculative.ratio,
            "answers": self.speculative.num_answers,
            "identical_answers": self.speculative.num_identical,
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
    """Have every conversation twice, through two engines that run over the same target. Fills and returns `report`, of
    which `on_answer` hears after every group of questions. Raises DataError where the target has no chat template, or
    no prompt fits its context, and SpecServeError where an engine fails on an answer."""
    arms = {PLAIN: EngineArm(plain), report.speculation: EngineArm(speculative)}
    results = {PLAIN: report.plain, report.speculation: report.speculative}
    cell = Cell(report.temperature, report.concurrency, results)
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
            if not group:
                continue
            rooms = [min(max_tokens, plain.max_model_len - len(prompt)) for _, prompt in group]
            params = [
                SamplingParams(max_tokens=room, temperature=report.temperature, seed=seed + i)
                for i, room in enumerate(rooms)
            ]
            answers = run_round(arms, [prompt for _, prompt in group], params, cell)
            for (chat, _), said, got in zip(group, answers[PLAIN], answers[report.speculation], strict=True):
                report.by_category[chat.question.category] += got.acceptance
                chat.messages.append({"role": "assistant", "content": said.text})
            on_answer(report)
    if not report.plain.num_answers:
        raise DataError(f"{report.bench}: none of the prompts fits a context of {plain.max_model_len} tokens")
    return report


def _render(engine: Engine, messages: list[dict[str, str]]) -> list[int]:
    try:
        return engine.tokenizer.render_chat(messages)
    except RequestError as error:
        raise DataError(f"the target cannot be asked: {error}") from error
