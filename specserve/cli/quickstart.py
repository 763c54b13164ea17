"""`specserve quickstart`: the whole loop on the bundled target, offline, in minutes."""

import json
import shlex
import urllib.request
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress

from specserve.checkpoints.source import BUNDLED
from specserve.cli.options import start
from specserve.cli.progress import bar_columns, console
from specserve.cli.training_bar import TrainingBar
from specserve.drafters.registry import BUNDLED_HEAD_FOLDER
from specserve.eval.acceptance import Report, evaluate
from specserve.eval.engines import engine_pair
from specserve.eval.prompts import Question, load_questions
from specserve.eval.report import summary_table
from specserve.serve.http.app import create_app
from specserve.serve.http.server import HttpServer
from specserve.serve.launch import Models, load_models
from specserve.train.observers import observing
from specserve.train.prepare import prepare
from specserve.train.run_folder import RunFolder
from specserve.train.settings import DataSettings, DraftSettings, EvalSettings, TrainRun, TrainSettings

SPECULATION = "chain:3"
NUM_QUESTIONS, MAX_TOKENS = 12, 128


def quickstart(
    minutes: Annotated[float, typer.Option(help="How long to train, compilation included.", min=0.05)] = 4.0,
    output: Annotated[Path, typer.Option(help="Folder for the head.")] = Path("ckpt"),
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Print what each stage found and the commands to go on with."""
    start(log_level)
    console.rule("1. train a draft head for the bundled target")
    # few minutes are few steps: small batches, and Muon, learn most from them
    settings = TrainSettings(
        max_minutes=minutes,
        batch_size=4,
        rollout=3,
        optimizer="muon",
        muon_lr=0.02,
        lr=1.5e-3,
        log_every=4,
        eval_every=60,
    )
    # what fits the minutes is read: tokenising all of pydoc would take a tenth of them
    data = DataSettings(max_conversations=max(600, int(6000 * minutes)), eval_prompts=8)
    draft = DraftSettings(vocab_size=3072, d_ff=768, fc_norm=True, norm_output=True)
    measured = EvalSettings(speculation=(SPECULATION,))
    run = TrainRun(target=BUNDLED, output=str(output), data=data, draft=draft, train=settings, eval=measured)
    with RunFolder(run) as folder, observing(run) as observers:
        with console.status("reading the functions and docstrings installed here"):
            trainer = prepare(run, folder)
        with TrainingBar(trainer) as bar:
            trainer.train([bar.update, *observers])

    console.rule("2. evaluate it on held-out questions, plain and speculative side by side")
    questions = load_questions("pydoc", NUM_QUESTIONS)
    heads = [("just trained", output)] + ([("shipped", BUNDLED_HEAD_FOLDER)] if BUNDLED_HEAD_FOLDER.is_dir() else [])
    rows: list[tuple[str, Report]] = []
    answer = ""
    for name, folder in heads:
        models = load_models(BUNDLED, str(folder))
        for way in (SPECULATION, "auto"):
            report, text = _evaluate_and_ask(models, questions, name, way)
            rows.append((f"{name}, {way}", report))
            answer = answer or text

    console.rule("3. served over HTTP, it answered")
    console.print(answer, markup=False, highlight=False)
    console.rule("4. result")
    console.print(summary_table(rows, "held-out pydoc, greedy, one stream"))
    console.print("go on with:")
    shown = escape(shlex.quote(str(output) if output.is_absolute() else f"./{output}"))
    console.print(f"  [bold]specserve serve --draft {shown}[/]")
    console.print(f"  [bold]specserve eval --draft {shown} --bench pydoc[/]")


def _evaluate_and_ask(models: Models, questions: list[Question], name: str, speculation: str) -> tuple[Report, str]:
    with Progress(*bar_columns(), console=console, transient=True) as progress:
        task = progress.add_task(f"{name}, {speculation}: compiling", note="")
        plain, speculative = engine_pair(
            models,
            speculation,
            num_slots=1,
            max_model_len=512,
            on_warmup=lambda done, total, what: progress.update(task, completed=done, total=total, note=what),
        )
        task = progress.add_task(f"{name}, {speculation}: answering", total=len(questions), note="")
        with plain, speculative:
            report = evaluate(
                plain,
                speculative,
                questions,
                Report("pydoc", speculation, 0.0, 1),
                max_tokens=MAX_TOKENS,
                on_answer=lambda found: progress.update(
                    task, completed=found.plain.num_answers, note=f"tau {found.speculative.acceptance.tau:.2f}"
                ),
            )
            server = HttpServer(create_app(speculative), port=0)
            server.start()
            try:
                text = _ask(server.url, questions[0].turns[0])
            finally:
                server.stop()
    return report, text


def _ask(url: str, question: str) -> str:
    """Ask for a chat completion over HTTP, as any client would, and return question and answer as text."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        found = json.load(reply)
    usage = found["usage"]
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    return (
        f"> {question}\n{found['choices'][0]['message']['content']}\n"
        f"({usage['completion_tokens']} tokens, {accepted} of them proposed by the draft)"
    )
