"""`specserve quickstart`: the whole loop in minutes, on the bundled target without any network, or on a chat model."""

import itertools
import logging
import shlex
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress

from specserve import config
from specserve.checkpoints.source import BUNDLED
from specserve.checkpoints.tensors import SINGLE_FILE
from specserve.cli.options import start
from specserve.cli.progress import console
from specserve.cli.train import train
from specserve.cli.training_bar import TrainingBar
from specserve.cli.watch import StageWatch
from specserve.data.sources import SELF
from specserve.errors import ConfigError
from specserve.eval.acceptance import SpeculationReport, converse, reader, warm_up
from specserve.eval.bench.comparison import PLAIN, EngineArm
from specserve.eval.bench.step_times import StepTimes, measure_steps
from specserve.eval.client import Client
from specserve.eval.prompts import Question, load_questions
from specserve.eval.report import summary_table
from specserve.interop.bundled import bundled_head
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import measured_engine
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.launch import Models, load_models
from specserve.serve.progress import bar_columns
from specserve.train.run.folder import STATE_FOLDER, RunFolder
from specserve.train.run.observers import observing
from specserve.train.run.prepare import prepare
from specserve.train.run.recipe import fill
from specserve.train.settings import DataSettings, DraftSettings, EvalSettings, TrainRun, TrainSettings

SPECULATION = "chain:3"
SPECULATIONS = (SPECULATION, "auto")
NUM_QUESTIONS, MAX_TOKENS, CONTEXT = 8, 128, 512
LIBRARIES = ("absl", "datasets", "huggingface_hub", "jax", "orbax", "transformers")
PAYS = 1.05  # a gain below is none
FOLDER = "quickstart-head"
MINUTES, CHAT_MINUTES = 3.5, 2.5  # of training; a chat model, which is larger, is measured for longer
# A chat model's, that anybody can judge the answers of. The first is asked over HTTP, and its answer shown.
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain to a child, in three sentences, why the sky is blue.",
    "Write a short email that moves a meeting from Monday to Tuesday.",
    "Give me five ideas for a rainy Sunday at home.",
)


def quickstart(
    target: Annotated[str, typer.Option(help="Preset, folder, GGUF file or hub id; pydoc: the bundled one.")] = BUNDLED,
    minutes: Annotated[float | None, typer.Option(help="Training; empty: 3.5, a chat model 2.5.", min=0.05)] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the head; empty: ./quickstart-head, or -2, -3.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Print what each stage found and the commands to go on with."""
    start(log_level)
    if log_level in ("warning", "error"):
        _quiet()
    heads = [("just trained", output := _free_folder(output))]
    if shipped := bundled_head(target):
        heads.append(("shipped", shipped))
    if target == BUNDLED:
        console.rule("1. train a draft head for the bundled target")
        _train(minutes or MINUTES, output)
        questions, asked = load_questions("pydoc", NUM_QUESTIONS), "held-out pydoc"
    else:
        begun = "train the head that ships with it further" if shipped else "train a draft head"
        console.rule(f"1. {begun}, on questions that {escape(target)} asks itself")
        _train_on_own_questions(target, minutes or CHAT_MINUTES, output, shipped)
        questions, asked = [Question(text, "everyday", (text,)) for text in QUESTIONS], "everyday questions"

    console.rule(f"2. evaluate it on {asked}, plain and speculative side by side")
    rows: list[tuple[str, SpeculationReport]] = []
    plain, times, answer = None, None, ""
    with Progress(*bar_columns(), console=console, transient=True) as progress:
        for name, folder in heads:
            models = load_models(target, str(folder))
            plain = plain or _engine(models, PLAIN, progress, PLAIN).start()
            speculative = {text: _engine(models, text, progress, f"{name}, {text}") for text in SPECULATIONS}
            if times is None:
                times = _time_steps(models, speculative[SPECULATION], progress)
            with speculative[SPECULATION], speculative["auto"]:
                task = progress.add_task(f"{name}: answering", total=len(questions), note="")
                found = compare(
                    {PLAIN: plain, **speculative},
                    questions,
                    lambda taus, task=task: progress.update(task, advance=1, note=taus),
                )
                answer = answer or _serve_and_ask(speculative["auto"], questions[0].turns[0])
            rows += [(f"{name}, {text}", report) for text, report in found.items()]
        if plain:
            plain.stop()

    console.rule("3. served over HTTP, it answered")
    console.print(answer, markup=False, highlight=False)
    console.rule("4. result")
    console.print(summary_table(rows, f"{asked}, greedy, one stream"))
    if times is not None:
        console.print(explain(rows[0][1], times), highlight=False)
    console.print("go on with:")
    shown = escape(shlex.quote(str(output) if output.is_absolute() else f"./{output}"))
    of_target = "" if target == BUNDLED else f" --target {escape(shlex.quote(target))}"
    bench = "pydoc" if target == BUNDLED else "mt-bench"
    for command in ("chat", "serve", f"eval --bench {bench}"):
        console.print(f"  [bold]specserve {command}{of_target} --draft {shown}[/]", highlight=False, soft_wrap=True)


def _free_folder(asked: Path | None) -> Path:
    """Return the folder for the head. Raises ConfigError where the one that is asked for has a head or a run."""
    if asked is None:
        return next(folder for i in itertools.count(1) if not (folder := Path(FOLDER + f"-{i}" * (i > 1))).exists())
    if any((asked / name).exists() for name in (SINGLE_FILE, STATE_FOLDER)):
        raise ConfigError(f"--output {asked}: a head is there already; give another folder")
    return asked


def _quiet() -> None:
    """Keep the terminal for what this command prints. Warnings of libraries concern their callers, and docstrings that
    are cut are cut on purpose."""
    warnings.simplefilter("ignore")
    for name in (*LIBRARIES, "specserve.data.documents"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _train(minutes: float, output: Path) -> None:
    # few minutes are few steps: small batches, and Muon, learn most from them
    settings = TrainSettings(
        max_minutes=minutes,
        batch_size=4,
        rollout=3,
        optimizer="muon",
        muon_lr=0.02,
        lr=1.5e-3,
        log_every=4,
        eval_every=40,
    )
    # only as much is read as fits the minutes: tokenising all of pydoc would take a tenth of them
    data = DataSettings(max_conversations=max(600, int(6000 * minutes)), eval_prompts=8)
    draft = DraftSettings(vocab_size=3072, d_ff=768, fc_norm=True, norm_output=True)
    measured = EvalSettings(speculation=(SPECULATION,))
    run = TrainRun(
        target=BUNDLED,
        draft_quantization="int8",  # half of the bytes to read, and accepted as often (docs/log)
        output=str(output),
        data=data,
        draft=draft,
        train=settings,
        eval=measured,
    )
    with RunFolder(run) as folder, observing(run) as observers, StageWatch() as watch:
        watch.begin("reading the functions and docstrings installed here")
        trainer = prepare(run, folder)
        bar = TrainingBar(trainer, watch, is_brief=True)
        trainer.train([bar.update, *observers])


def _train_on_own_questions(target: str, minutes: float, output: Path, begin_from: Path | None) -> None:
    """Train as `specserve train` does, on what the target asks itself and answers within these minutes."""
    given: dict[str, object] = {
        "target": target,
        "output": str(output),
        "budget": f"{minutes:.3f}m",
        "init_from": str(begin_from or ""),
        "data.source": (SELF,),
        "eval.speculation": (SPECULATION,),
        "eval.bench": (),
    }
    train(config.resolve(TrainRun, arguments=given, fill=fill))


def _engine(models: Models, speculation: str, progress: Progress, name: str) -> Engine:
    """An engine for one sequence, compiled and not started."""
    task = progress.add_task(f"{name}: compiling", note="")
    made = measured_engine(
        models,
        speculation,
        num_slots=1,
        max_model_len=CONTEXT,
        on_warmup=lambda done, total, what: progress.update(task, completed=done, total=total, note=what),
    )
    progress.remove_task(task)
    return made


def _time_steps(models: Models, speculative: Engine, progress: Progress) -> StepTimes:
    """Measure the times of steps on this machine, by engines that do not run."""
    task = progress.add_task("timing the steps", total=None, note="")
    idle = measured_engine(models, PLAIN, num_slots=1, max_model_len=CONTEXT)
    times = measure_steps(idle.runner, speculative.runner, context=128)
    progress.remove_task(task)
    return times


def compare(
    engines: dict[str, Engine], questions: Sequence[Question], on_question: Callable[[str], None] = lambda _taus: None
) -> dict[str, SpeculationReport]:
    """Ask every running engine the questions, in turns, one at a time; a report of each that speculates, beside the one
    named "off". `on_question` hears the tau of each so far. Raises SpecServeError where an engine fails."""
    arms = {name: EngineArm(engine) for name, engine in engines.items()}
    reports = [SpeculationReport("pydoc", name, 0.0, 1) for name in engines if name != PLAIN]
    read = reader(engines[PLAIN], MAX_TOKENS)
    warm_up(arms.values(), questions[0], read)

    def on_answer() -> None:
        on_question(", ".join(f"{report.name} tau {report.acceptance.tau:.2f}" for report in reports))

    converse(arms, questions, reports, read, on_answer=on_answer)
    return {report.name: report for report in reports}


def explain(report: SpeculationReport, times: StepTimes) -> str:
    """Explain a gain, or why there is none: the tokens of a step, and what it costs beside a plain one."""
    tau, cost = report.speculative.acceptance.tau, times.step / times.plain
    text = (
        f"Why {report.speculative.ratio:.2f}x: on this machine a plain step takes {times.plain:.1f} ms and emits one "
        f"token; a step of {report.speculation} takes {times.step:.1f} ms, of which {times.draft:.1f} are the draft's, "
        f"and emits {tau:.2f} (tau), so it can gain {tau:.2f} x {times.plain:.1f} / {times.step:.1f} = "
        f"{tau / cost:.2f}x."
    )
    if tau / cost < PAYS:
        return (
            f"{text} It pays above tau {cost:.2f}: longer training raises tau, and auto turns to plain decoding where "
            "drafts do not pay."
        )
    return f"{text} Longer training raises tau, and beside a larger target a draft costs less."


def _serve_and_ask(engine: Engine, question: str) -> str:
    server = HttpServer(create_app(engine), port=0)
    server.start()
    try:
        return _ask(server.url, question)
    finally:
        server.stop()


def _ask(url: str, question: str) -> str:
    """Ask for a chat completion over HTTP, as any client would, and return question and answer as text."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64}
    with Client(url) as client:
        found = client.json("/v1/chat/completions", body)
    usage = found["usage"]
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    return (
        f"> {question}\n{found['choices'][0]['message']['content']}\n"
        f"({usage['completion_tokens']} tokens, {accepted} of them proposed by the draft)"
    )
