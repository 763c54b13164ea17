"""Acceptance and speed of a head: the same questions put to plain decoding and to every way to speculate, in turns.

The arms are interleaved (a group of questions plain, then the same group in every other way, another arm first each
time), so that a noisy machine is noisy for all, and their answers are compared: speculation may not change a token.
Every count is that of `speculative.acceptance`, so tau here is that of the server and of the trainer."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve.errors import DataError
from specserve.eval.bench.comparison import ArmResult, BenchArm, Comparison, EngineArm, run_round
from specserve.eval.prompts import Question, render
from specserve.serve.engine.engine import Engine
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.intervals import Interval, median_interval, tau_difference, tau_interval

Messages = list[dict[str, str]]
Read = Callable[[Messages], tuple[Any, int] | None]  # a chat to a prompt and the room to answer it; None: it has none
Unit = tuple[int, ...]  # questions, by number, of which acceptance is known together; mostly it is one


@dataclass
class SpeculationReport:
    """The measurement of one way to speculate, at one temperature and concurrency, beside plain decoding."""

    bench: str
    speculation: str
    temperature: float
    concurrency: int
    plain: ArmResult = field(default_factory=ArmResult)
    speculative: ArmResult = field(default_factory=ArmResult)
    draft: str = ""  # the head, where there are several; or the server
    by_unit: dict[Unit, Acceptance] = field(default_factory=lambda: defaultdict(Acceptance))
    categories: dict[Unit, str] = field(default_factory=dict)  # of units of one category
    rounds: list[str] = field(default_factory=list)  # the category of each round, empty where there are several
    num_skipped: int = 0  # turns that do not fit the context
    detail: str = "all"  # of acceptance: all; "no depths"; "mean", without counts; "nothing". Engines report all
    is_per_answer: bool = True  # of each answer; else of what was asked together
    reported_mean: float | None = None  # tau, of an arm that reports a mean alone
    notes: list[str] = field(default_factory=list)  # a reader of the figures has to know them

    @property
    def name(self) -> str:
        """The name that this report alone has in an evaluation, at the same temperature and concurrency."""
        return ", ".join(filter(None, (self.draft, self.speculation)))

    @property
    def acceptance(self) -> Acceptance:
        return self.speculative.acceptance

    @property
    def has_counts(self) -> bool:
        """Return whether the arm reports how many steps and accepted tokens there were."""
        return self.detail in ("all", "no depths")

    @property
    def tau(self) -> float | None:
        """The mean number of tokens that a step emits, or None where the arm does not report it."""
        if self.has_counts:
            return self.acceptance.tau
        return self.reported_mean

    @property
    def accept_rate(self) -> tuple[float, ...]:
        """The acceptance at depth d given acceptance at depth d - 1. It is empty where the arm does not report it."""
        if self.detail != "all":
            return ()
        return self.acceptance.accept_rate

    @property
    def tau_interval(self) -> Interval | None:
        """The 95% interval of tau over questions, or None where there is one question or the arm reports no counts."""
        if not self.has_counts:
            return None
        return tau_interval([*self.by_unit.values()])

    @property
    def is_baseline(self) -> bool:
        """Return whether this is the arm that the others are compared with, as the first of several servers is. Then
        it has no gain."""
        return self.plain is self.speculative

    @property
    def gains(self) -> list[float]:
        """The ratio of tokens per second to those of plain decoding, by round. The baseline has none."""
        if self.is_baseline:
            return []
        return self.speculative.ratios

    @property
    def gain(self) -> float | None:
        """The median of the gains of all rounds, or None where there are none."""
        return _median(self.gains)

    @property
    def gain_interval(self) -> Interval | None:
        """The 95% interval of the gain over rounds."""
        return median_interval(self.gains)

    @property
    def by_category(self) -> dict[str, Acceptance]:
        """The acceptance of each category of questions, by name."""
        found: defaultdict[str, Acceptance] = defaultdict(Acceptance)
        for unit, category in self.categories.items():
            found[category] += self.by_unit[unit]
        return dict(sorted(found.items()))

    def of_category(self, category: str) -> "CategoryReport":
        """Return the figures of one category, whose speed is known only where whole rounds consisted of it."""
        units = [found for unit, found in self.by_unit.items() if self.categories.get(unit) == category]
        picks = [name == category for name in self.rounds]
        arms = self.plain.rates, self.speculative.rates, self.gains
        plain, speculative, gains = (list(itertools.compress(values, picks)) for values in arms)
        if not gains:  # nothing is compared
            plain = []
        return CategoryReport(
            sum(units, Acceptance()),
            tau_interval(units),
            _median(plain),
            _median(speculative),
            _median(gains),
            median_interval(gains),
        )

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON. Figures that an arm does not report are null."""
        by_category = {name: self.of_category(name).to_json() for name in self.by_category if self.has_counts}
        counts: dict[str, Any] = dict.fromkeys(("accepted_per_depth", "num_steps", "num_accepted", "num_cut"))
        if self.detail == "all":
            counts["accepted_per_depth"] = self.acceptance.accepted_per_depth
        if self.has_counts:
            counts |= {name: getattr(self.acceptance, name) for name in ("num_steps", "num_accepted", "num_cut")}
        return {
            "bench": self.bench,
            "draft": self.draft,
            "speculation": self.speculation,
            "temperature": self.temperature,
            "concurrency": self.concurrency,
            "tau": self.tau,
            "tau_interval": _json(self.tau_interval),
            "accept_rate": self.accept_rate,
            **counts,
            "by_category": by_category,
            "plain_tokens_per_second": None if self.is_baseline else self.plain.tokens_per_second,
            "tokens_per_second": self.speculative.tokens_per_second,
            "gain": self.gain,
            "gain_interval": _json(self.gain_interval),
            "gain_by_round": self.gains,
            "tokens": self.speculative.num_tokens,
            "answers": self.speculative.num_answers,
            "identical_answers": None if self.is_baseline else self.speculative.num_identical,
            "skipped_prompts": self.num_skipped,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class CategoryReport:
    """The figures of one category of questions. Speeds are medians over rounds, or None where no round consisted of it
    alone."""

    acceptance: Acceptance
    tau_interval: Interval | None
    plain_tokens_per_second: float | None
    tokens_per_second: float | None
    gain: float | None
    gain_interval: Interval | None

    def to_json(self) -> dict[str, Any]:
        return {
            "tau": self.acceptance.tau,
            "tau_interval": _json(self.tau_interval),
            "accept_rate": self.acceptance.accept_rate,
            "num_steps": self.acceptance.num_steps,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "gain": self.gain,
            "gain_interval": _json(self.gain_interval),
        }


@dataclass(frozen=True)
class Difference:
    """The difference between the taus of two heads, which answered the same questions in the same way."""

    of: SpeculationReport
    to: SpeculationReport

    @property
    def value(self) -> float:
        return self.of.acceptance.tau - self.to.acceptance.tau

    @property
    def interval(self) -> Interval | None:
        """The 95% interval over questions, which both heads answered. Where it holds 0, neither head is shown to be
        better."""
        return tau_difference([*self.of.by_unit.values()], [*self.to.by_unit.values()])

    def to_json(self) -> dict[str, Any]:
        names = {"of": self.of.draft, "to": self.to.draft, "speculation": self.of.speculation}
        comparison = {"temperature": self.of.temperature, "concurrency": self.of.concurrency}
        return {**names, **comparison, "difference": self.value, "interval": _json(self.interval)}


def differences(reports: Sequence[SpeculationReport]) -> list[Difference]:
    """Compare every head with the first one that was measured with the same speculation, temperature and
    concurrency."""
    first: dict[tuple[str, float, int], SpeculationReport] = {}
    found = []
    for report in reports:
        to = first.setdefault((report.speculation, report.temperature, report.concurrency), report)
        if to is not report and to.has_counts and report.has_counts and [*to.by_unit] == [*report.by_unit]:
            found.append(Difference(report, to))
    return found


def reader(engine: Engine, max_tokens: int) -> Read:
    """Return a function that makes prompts of chats for this engine, each with room for at most `max_tokens`. Raises
    DataError where the target has no chat template."""

    def read(messages: Messages) -> tuple[list[int], int] | None:
        prompt = render(engine.tokenizer, messages)
        room = min(max_tokens, engine.max_model_len - len(prompt))
        if room <= 0:
            return None
        return prompt, room

    return read


def converse(
    arms: Mapping[str, BenchArm],  # the first is the baseline, whose answers the conversations go on with
    questions: Sequence[Question],
    reports: Sequence[SpeculationReport],  # at one temperature and concurrency; each of an arm that it names
    read: Read,
    *,
    seed: int = 0,
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Have every conversation once with each arm, in turns, and fill the reports. Raises DataError where no prompt
    fits, SpecServeError where an arm fails."""
    baseline, size = next(iter(arms)), reports[0].concurrency
    comparison = _comparison(baseline, reports)
    for arm in arms.values():  # earlier comparisons must not help
        arm.forget()
    chats = [_Chat(i, question) for i, question in enumerate(questions)]
    for number, group in enumerate(_groups(chats, size)):
        prompts = [(chat, *found) for chat in group if (found := chat.next_turn(read))]
        params = [
            SamplingParams(max_tokens=room, temperature=comparison.temperature, seed=seed + i)
            for i, (_, _, room) in enumerate(prompts)
        ]
        num_answered, answers = 0, {}
        if prompts:
            answers = run_round(arms, [prompt for _, prompt, _ in prompts], params, comparison, number)
            for i, (chat, _, _) in enumerate(prompts):
                if any(given[i].error for given in answers.values()):
                    chat.is_over = True
                    continue
                num_answered += 1
                chat.messages.append({"role": "assistant", "content": answers[baseline][i].text})
        for report in reports:
            report.num_skipped += len(group) - num_answered
            if num_answered:
                _note(report, [chat for chat, _, _ in prompts], [each.acceptance for each in answers[report.name]])
            if len(report.speculative.ratios) > len(report.rounds):
                categories = {chat.question.category for chat, _, _ in prompts}
                report.rounds.append(categories.pop() if len(categories) == 1 else "")
        on_answer()
    if not comparison.arms[baseline].num_answers:
        raise DataError(f"{reports[0].bench}: none of the prompts fits the context, or all were refused")


def warm_up(arms: Iterable[EngineArm], question: Question, read: Read) -> None:
    """Answer a few tokens with each engine, so that no first touch of memory is measured."""
    if found := read([{"role": "user", "content": question.turns[0]}]):
        for arm in arms:
            arm.ask([found[0]], [SamplingParams(max_tokens=min(8, found[1]), temperature=0.0)], 1)


def _comparison(baseline: str, reports: Sequence[SpeculationReport]) -> Comparison:
    own = {report.name: report.speculative for report in reports}
    results = {baseline: own.get(baseline, reports[0].plain), **own}
    for report in reports:
        report.plain = results[baseline]
    return Comparison(reports[0].temperature, reports[0].concurrency, results, baseline)


def _groups(chats: Sequence["_Chat"], size: int) -> "itertools.chain[list[_Chat]]":
    """Group the chats that are asked together: first all first turns, then the second turns of those that have one."""
    turns = max(len(chat.question.turns) for chat in chats)

    def groups(turn: int) -> list[list[_Chat]]:
        asked = [chat for chat in chats if turn < len(chat.question.turns)]
        return [asked[start : start + size] for start in range(0, len(asked), size)]

    return itertools.chain.from_iterable(map(groups, range(turns)))


def _note(report: SpeculationReport, chats: Sequence["_Chat"], found: Sequence[Acceptance]) -> None:
    """Count the accepted draft tokens of one group of questions. The counts are kept for each question, or for the
    whole group where the arm reports no more."""
    units = [([chat], acceptance) for chat, acceptance in zip(chats, found, strict=True)]
    if not report.is_per_answer:
        units = [([*chats], sum(found, Acceptance()))]
    for unit, acceptance in units:
        key = tuple(chat.number for chat in unit)
        report.by_unit[key] += acceptance
        if len({chat.question.category for chat in unit}) == 1:
            report.categories[key] = unit[0].question.category


@dataclass
class _Chat:
    number: int
    question: Question
    messages: Messages = field(default_factory=list)
    num_asked: int = 0
    is_over: bool = False  # a turn had no room, so later ones have none

    def next_turn(self, read: Read) -> tuple[Any, int] | None:
        """Ask the next turn: the prompt and the room for its answer."""
        if self.is_over:
            return None
        self.messages.append({"role": "user", "content": self.question.turns[self.num_asked]})
        self.num_asked += 1
        found = read(self.messages)
        self.is_over = found is None
        return found


def _median(values: Sequence[float]) -> float | None:
    """Return the median, or None of no values."""
    if not values:
        return None
    return statistics.median(values)


def _json(interval: Interval | None) -> list[float] | None:
    return interval and interval.to_json()
