"""`specserve eval`: acceptance and speed of heads, of ways to speculate, and of servers."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import typer
from rich.markup import escape

from specserve.checkpoints.tensors import write_json
from specserve.cli.progress import Bars, console
from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.eval import report
from specserve.eval.acceptance import Read, SpeculationReport, converse, reader, warm_up
from specserve.eval.bench.cells import PLAIN, BenchArm, EngineArm
from specserve.eval.bench.step_times import StepTimes, measure_steps
from specserve.eval.evaluation import Evaluation, TauVerdict, verdicts
from specserve.eval.prompts import Question, load_questions
from specserve.eval.remote import ServerArm, read_chats
from specserve.eval.settings import EvalRun
from specserve.provenance import collect
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import load, measured_engine, with_draft
from specserve.serve.launch import Models

WAYS = ("chain:3", "auto")
BUNDLED_NAME = "bundled"
CONTEXT = 128  # committed tokens where steps are timed

Key = tuple[str, str]  # a head as it was given, empty where the way needs none, and a way to speculate


def evaluate(run: EvalRun) -> None:
    """Measure tau, acceptance by depth and category, and plain against speculative tokens/s in one run, for every
    head, speculation, temperature and concurrency that was asked for. Prints a table of each, and writes the JSON
    report with --output. Exit status 1 where a published tau is outside its interval."""
    _check(run)
    questions = load_questions(run.bench, run.limit)
    found = _evaluate_servers(run, questions) if run.server else _evaluate_heads(run, questions)
    _show(found, run.limit)
    judged = verdicts(found.reports, run.expect)
    for verdict in judged:
        console.print(f"[{'green' if verdict.holds else 'red'}]{escape(verdict.text)}[/]")
    if run.output:
        _write(run, found, judged)
    if not all(verdict.holds for verdict in judged):
        raise typer.Exit(1)


def _check(run: EvalRun) -> None:
    """Refuse what cannot be measured, before minutes of work. Raises ConfigError."""
    if run.server:
        own = ("draft", "target", "quantization", "draft_quantization", "mesh", "speculation", "max_model_len")
        given = [name for name in own if getattr(run, name)]
        if given:
            flag = f"--{given[0].replace('_', '-')}"
            raise ConfigError(f"{flag} with --server: the server has its own already; leave {flag} out")
    elif run.api_key:
        raise ConfigError("--api-key is what a --server is told; give that too, or leave it out")
    for name in ("temperature", "concurrency"):
        if not getattr(run, name):
            raise ConfigError(f"--{name} is empty; give at least one")
    for way in _ways(run):
        if way != "auto" and parse_speculation(way) is None:
            raise ConfigError(f"--speculation {way}: there is nothing to evaluate; give a chain or a tree")
    number = len(_cells(run)) * len(dict.fromkeys(run.server) if run.server else _keys(run))
    if run.expect and len(run.expect) != number:
        raise ConfigError(
            f"--expect has {len(run.expect)} numbers, and this evaluation has {number} rows; give one for each, or "
            "narrow it with --speculation, --temperature and --concurrency"
        )


def _ways(run: EvalRun) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run.speculation or WAYS))


def _cells(run: EvalRun) -> list[tuple[float, int]]:
    return list(itertools.product(dict.fromkeys(run.temperature), dict.fromkeys(run.concurrency)))


def _keys(run: EvalRun) -> list[Key]:
    """List what is measured: every way to speculate with every head, but once where it needs none."""
    heads = list(dict.fromkeys(run.draft)) or [""]

    def needs_head(way: str) -> bool:
        tree = None if way == "auto" else parse_speculation(way)
        return tree is None or tree.uses_head

    return list(dict.fromkeys((head if needs_head(way) else "", way) for head in heads for way in _ways(run)))


def _evaluate_servers(run: EvalRun, questions: Sequence[Question]) -> Evaluation:
    with contextlib.ExitStack() as stack:
        arms = {url: stack.enter_context(contextlib.closing(ServerArm(url, run.api_key))) for url in run.server}

        def report_of(name: str, temperature: float, concurrency: int) -> SpeculationReport:
            return SpeculationReport(run.bench, "", temperature, concurrency, draft=name)

        read = read_chats(run.max_tokens)
        found = _converse_all(run, questions, arms, list(arms), report_of, read, before_notes=_describe(arms))
    return Evaluation(run.bench, len(questions), " and ".join(arm.model for arm in arms.values()), found, {})


def _describe(arms: Mapping[str, ServerArm]) -> Callable[[Sequence[SpeculationReport]], None]:
    def describe(reports: Sequence[SpeculationReport]) -> None:
        for each in reports:
            arms[each.name].describe(each)

    return describe


def _evaluate_heads(run: EvalRun, questions: Sequence[Question]) -> Evaluation:
    first, *others = dict.fromkeys(run.draft or ("",))
    models = {first: load(run, first)}
    models |= {head: with_draft(models[first], head) for head in others}
    bundled = "" if models[first].head is None else BUNDLED_NAME
    wanted: dict[str, _Wanted] = {}
    for head, way in _keys(run):
        tree = None if way == "auto" else parse_speculation(way)
        if models[first].head is None and tree is not None and tree.uses_head:
            raise ConfigError(f"--speculation {way}: there is no head for {models[first].name}; give one with --draft")
        label = head or (bundled if tree is None or tree.uses_head else "")
        wanted[", ".join(filter(None, (label, way)))] = _Wanted(models[head or first], label, way)
    engines, steps = _engines(run, {PLAIN: _Wanted(models[first], "", PLAIN), **wanted})
    with contextlib.ExitStack() as stack:
        arms = {name: EngineArm(stack.enter_context(engine)) for name, engine in engines.items()}

        def report_of(name: str, temperature: float, concurrency: int) -> SpeculationReport:
            return SpeculationReport(run.bench, wanted[name].way, temperature, concurrency, draft=wanted[name].head)

        read = reader(engines[PLAIN], run.max_tokens)
        warm_up(arms.values(), questions[0], read)
        found = _converse_all(run, questions, arms, list(wanted), report_of, read)
    return Evaluation(run.bench, len(questions), models[first].name, found, steps)


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """An arm: what it runs, and the names of its head and of its way to speculate."""

    models: Models
    head: str
    way: str


def _engines(run: EvalRun, wanted: Mapping[str, _Wanted]) -> tuple[dict[str, Engine], dict[str, StepTimes]]:
    """An engine for each arm, over the same loaded target, the plain one first; and where the time of a step of each
    goes, where a head proposes one tree. Each way has an engine of its own, as a server that was started with it: in
    a shared one, plain decoding would keep a draft up to date, and lookups would find the answers of other arms."""
    engines: dict[str, Engine] = {}
    steps: dict[str, StepTimes] = {}
    with Bars() as progress:
        for name, arm in wanted.items():
            task = progress.add(f"{name}: compiling")
            engines[name] = measured_engine(
                arm.models,
                arm.way,
                num_slots=max(run.concurrency),
                max_model_len=run.max_model_len,
                on_warmup=lambda done, total, text, task=task: progress.update(
                    task, completed=done, total=total, note=text
                ),
            )
            tree = None if arm.way == "auto" else parse_speculation(arm.way)
            if tree is not None and tree.uses_head:
                steps[name] = measure_steps(engines[PLAIN].runner, engines[name].runner, context=CONTEXT)
    return engines, steps


def _converse_all(
    run: EvalRun,
    questions: Sequence[Question],
    arms: Mapping[str, BenchArm],
    names: Sequence[str],
    report_of: Callable[[str, float, int], SpeculationReport],
    read: Read,
    *,
    before_notes: Callable[[Sequence[SpeculationReport]], None] = lambda _reports: None,
) -> list[SpeculationReport]:
    """Have every conversation at every temperature and concurrency."""
    found: list[SpeculationReport] = []
    with Bars() as progress:
        for temperature, concurrency in _cells(run):
            reports = [report_of(name, temperature, concurrency) for name in names]
            before_notes(reports)
            total = sum(len(question.turns) for question in questions)
            task = progress.add(f"T={temperature:g}, {concurrency} at once: answering", total=total)

            def on_answer(task: object = task, reports: Sequence[SpeculationReport] = reports) -> None:
                before_notes(reports)
                done = reports[0].speculative.num_answers + reports[0].num_skipped
                told = [f"{each.tau:.2f}" for each in reports if each.tau is not None]
                progress.update(task, completed=done, note=f"tau {' '.join(told)}")  # type: ignore[arg-type]

            converse(arms, questions, reports, read, seed=run.seed, on_answer=on_answer)
            found += reports
    return found


def _show(found: Evaluation, limit: int) -> None:
    limited = ", evenly spread (--limit)" if found.num_questions == limit else ""
    for name, times in found.steps.items():
        console.print(f"{name}: {report.step_line(times)}")
    title = f"{found.target}: {found.bench}, {found.num_questions} questions{limited}; intervals of 95%"
    console.print(report.summary_table([(each.name, each) for each in found.reports], title))
    first = found.reports[0].temperature, found.reports[0].concurrency
    for each in found.reports:  # the report has those of every temperature and concurrency
        is_first = (each.temperature, each.concurrency) == first
        if is_first and len(each.by_category) > 1 and each.tells in ("all", "no depths"):
            console.print(report.category_table(each))
    if found.differences:
        console.print(report.difference_table(found.differences))
    for each in found.reports:
        for note in each.notes:
            console.print(f"[yellow]{escape(each.name)}: {escape(note)}[/]")
    if skipped := found.reports[0].num_skipped:
        console.print(f"[yellow]{skipped} prompts did not fit the context and were not asked[/]")


def _write(run: EvalRun, found: Evaluation, judged: Sequence[TauVerdict]) -> None:
    """Write the report, without the secrets among the settings."""
    settings = {name: value for name, value in dataclasses.asdict(run).items() if name != "api_key"}
    provenance = collect()
    if run.api_key:
        provenance["argv"] = [str(word).replace(run.api_key, "***") for word in provenance["argv"]]  # type: ignore[union-attr]
    path = Path(run.output)
    facts = {**found.to_json(), "verdicts": [verdict.to_json() for verdict in judged]}
    write_json(path, {**facts, "settings": settings, "provenance": provenance})
    console.print(f"report written to {escape(str(path))}")
