"""`specserve eval`: every head with every speculation setting, or every server, at every temperature and concurrency;
and how the results compare with published figures."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import TaskID

from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.eval.acceptance import Difference, Read, SpeculationReport, converse, differences, reader, warm_up
from specserve.eval.bench.comparison import AUTO, PLAIN, BenchArm, EngineArm, has_draft
from specserve.eval.bench.step_times import StepTimes, measure_steps
from specserve.eval.prompts import Question, load_questions
from specserve.eval.remote import ServerArm, read_chats
from specserve.eval.settings import EvalRun
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import load, measured_engine, with_draft
from specserve.serve.launch import Models
from specserve.serve.progress import Bars
from specserve.speculative.intervals import Interval

SPECULATIONS = ("chain:3", AUTO)  # where the settings name none
BUNDLED_NAME = "bundled"
CONTEXT = 128  # committed tokens where steps are timed
OF_A_SERVER = ("draft", "target", "quantization", "draft_quantization", "mesh", "speculation", "max_model_len")


@dataclass(frozen=True)
class Evaluation:
    """The bench that was asked, and a report for every head (or server), speculation, temperature and concurrency."""

    bench: str
    num_questions: int
    target: str
    reports: Sequence[SpeculationReport]
    steps: Mapping[str, StepTimes]  # by name, where a head proposes one tree

    @property
    def differences(self) -> list[Difference]:
        """The differences in tau: of each further head less the first one, on the same questions."""
        return differences(self.reports)

    def to_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "questions": self.num_questions,
            "target": self.target,
            "reports": [report.to_json() for report in self.reports],
            "differences": [difference.to_json() for difference in self.differences],
            "steps": {name: times.to_json() for name, times in self.steps.items()},
        }


def evaluate(run: EvalRun) -> Evaluation:
    """Have all conversations. Raises ConfigError for settings that cannot be measured, before minutes of work, and
    CheckpointError, DataError or SpecServeError where a model, a bench or an arm fails."""
    _check(run)
    if run.server:
        return _evaluate_servers(run)
    return _evaluate_heads(run)


def _check(run: EvalRun) -> None:
    given = [f"--{name.replace('_', '-')}" for name in OF_A_SERVER if getattr(run, name)]
    if run.server and given:
        raise ConfigError(f"{given[0]} with --server: the server has its own already; leave {given[0]} out")
    if run.api_key and not run.server:
        raise ConfigError("--api-key is for a --server; give that too, or leave it out")
    for name in ("temperature", "concurrency"):
        if not getattr(run, name):
            raise ConfigError(f"--{name} is empty; give at least one")
    for speculation in run.speculation:
        if speculation != AUTO and parse_speculation(speculation) is None:
            raise ConfigError(f"--speculation {speculation}: there is nothing to evaluate; give a chain or a tree")
    number = len(_conditions(run)) * len(dict.fromkeys(run.server) or _pairs(run))
    if run.expect and len(run.expect) != number:
        raise ConfigError(
            f"--expect has {len(run.expect)} numbers, and this evaluation has {number} rows; give one for each, or "
            "narrow it with --speculation, --temperature and --concurrency"
        )


def _conditions(run: EvalRun) -> list[tuple[float, int]]:
    """List the temperatures with the concurrencies."""
    return list(itertools.product(dict.fromkeys(run.temperature), dict.fromkeys(run.concurrency)))


def _uses_head(speculation: str) -> bool:
    """Return whether it needs a head. `auto` has one where there is one."""
    return speculation == AUTO or has_draft(speculation)


def _pairs(run: EvalRun) -> list[tuple[str, str]]:
    """List every head, as it was given, with every speculation setting; one that needs no head once, with none."""
    pairs = itertools.product(dict.fromkeys(run.draft) or [""], run.speculation or SPECULATIONS)
    return list(dict.fromkeys((head if _uses_head(text) else "", text) for head, text in pairs))


def _evaluate_servers(run: EvalRun) -> Evaluation:
    questions = load_questions(run.bench, run.limit)
    with contextlib.ExitStack() as stack:
        arms = {url: stack.enter_context(contextlib.closing(ServerArm(url, run.api_key))) for url in run.server}

        def describe(reports: Sequence[SpeculationReport]) -> None:
            for each in reports:
                arms[each.name].describe(each)

        reports = [
            [SpeculationReport(run.bench, "", *where, draft=name) for name in arms] for where in _conditions(run)
        ]
        found = _converse_all(run, questions, arms, reports, read_chats(run.max_tokens), describe)
    return Evaluation(run.bench, len(questions), " and ".join(arm.model for arm in arms.values()), found, {})


@dataclass(frozen=True)
class _HeadArm:
    """The models that an engine runs, and the names of its head and of its speculation setting."""

    models: Models
    head: str
    speculation: str


def _evaluate_heads(run: EvalRun) -> Evaluation:
    questions = load_questions(run.bench, run.limit)
    first, *others = dict.fromkeys(run.draft or ("",))
    models = {first: load(run, first)}
    models |= {head: with_draft(models[first], head) for head in others}
    arms: dict[str, _HeadArm] = {}
    for head, speculation in _pairs(run):
        if models[first].head is None and has_draft(speculation):
            raise ConfigError(
                f"--speculation {speculation}: there is no head for {models[first].name}; give one with --draft"
            )
        label = head
        if not head and _uses_head(speculation) and models[first].head is not None:
            label = BUNDLED_NAME
        name = ", ".join(filter(None, (label, speculation)))
        arms[name] = _HeadArm(models[head or first], label, speculation)
    engines, steps = _engines(run, {PLAIN: _HeadArm(models[first], "", PLAIN), **arms})
    with contextlib.ExitStack() as stack:
        running = {name: EngineArm(stack.enter_context(engine)) for name, engine in engines.items()}
        reports = [
            [SpeculationReport(run.bench, arm.speculation, *where, draft=arm.head) for arm in arms.values()]
            for where in _conditions(run)
        ]
        read = reader(engines[PLAIN], run.max_tokens)
        warm_up(running.values(), questions[0], read)
        found = _converse_all(run, questions, running, reports, read)
    return Evaluation(run.bench, len(questions), models[first].name, found, steps)


def _engines(run: EvalRun, arms: Mapping[str, _HeadArm]) -> tuple[dict[str, Engine], dict[str, StepTimes]]:
    """Make an engine for each arm, over the same loaded target, the plain one first; and measure where the time of a
    step goes, where a head proposes one tree. Each setting has an engine of its own, as a server that was started with
    it: in a shared one, plain decoding would keep a draft up to date, and lookups would find the answers of others."""
    engines: dict[str, Engine] = {}
    steps: dict[str, StepTimes] = {}
    with Bars() as bars:
        for name, arm in arms.items():
            task = bars.add(f"{name}: compiling")

            engines[name] = measured_engine(
                arm.models,
                arm.speculation,
                num_slots=max(run.concurrency),
                max_model_len=run.max_model_len,
                on_warmup=lambda done, total, text, task=task: bars.update(
                    task, completed=done, total=total, note=text
                ),
            )
            if has_draft(arm.speculation):
                steps[name] = measure_steps(engines[PLAIN].runner, engines[name].runner, context=CONTEXT)
    return engines, steps


def _converse_all(
    run: EvalRun,
    questions: Sequence[Question],
    arms: Mapping[str, BenchArm],
    reports: Sequence[Sequence[SpeculationReport]],  # of each condition
    read: Read,
    describe: Callable[[Sequence[SpeculationReport]], None] = lambda _reports: None,
) -> list[SpeculationReport]:
    """Have every conversation at every temperature and concurrency, and fill the reports."""
    with Bars() as bars:
        for some in reports:
            describe(some)
            total = sum(len(question.turns) for question in questions)
            task = bars.add(f"T={some[0].temperature:g}, {some[0].concurrency} at once: answering", total=total)

            def on_answer(some: Sequence[SpeculationReport] = some, task: TaskID = task) -> None:
                describe(some)
                taus = " ".join(f"{each.tau:.2f}" for each in some if each.tau is not None)
                done = some[0].speculative.num_answers + some[0].num_skipped
                bars.update(task, completed=done, note=f"tau {taus}")

            converse(arms, questions, some, read, seed=run.seed, on_answer=on_answer)
    return list(itertools.chain.from_iterable(reports))


@dataclass(frozen=True)
class TauVerdict:
    """A published tau beside the measured one, and whether it is within the interval of the measurement."""

    name: str
    expected: float
    tau: float | None
    interval: Interval | None

    @property
    def holds(self) -> bool:
        """Return whether the published tau is within the interval. It is False also where there is no interval."""
        return self.interval is not None and self.expected in self.interval

    @property
    def text(self) -> str:
        """The verdict in a sentence."""
        if self.tau is None or self.interval is None:
            return f"{self.name}: {self.expected:g} cannot be judged, because there is no interval of tau"
        where = "within" if self.holds else "outside"
        return (
            f"{self.name}: tau {self.tau:.3f}; the published {self.expected:g} is {where} the interval "
            f"{self.interval.low:.3f} to {self.interval.high:.3f}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "expected": self.expected,
            "tau": self.tau,
            "interval": self.interval and self.interval.to_json(),
            "holds": self.holds,
        }


def verdicts(reports: Sequence[SpeculationReport], expected: Sequence[float]) -> list[TauVerdict]:
    """Compare each report with its own published tau. The list is empty where no taus are given."""
    if not expected:
        return []
    found = []
    for each, value in zip(reports, expected, strict=True):
        name = f"{each.name}, T={each.temperature:g}, {each.concurrency} at once"
        found.append(TauVerdict(name, value, each.tau, each.tau_interval))
    return found
