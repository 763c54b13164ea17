"""`specserve data`: training data."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.markup import escape
from rich.progress import Progress

from specserve import cluster
from specserve.answers import ray_engines
from specserve.answers import regenerate as eval_regenerate
from specserve.answers.account import Account
from specserve.answers.cache import answer_slots
from specserve.answers.openings import read_openings
from specserve.answers.own_questions import Asked, OwnQuestions, QuestionSettings
from specserve.answers.regenerate import AnswerSettings, AnswerSource
from specserve.answers.row_file import check_settings
from specserve.answers.settings import RegenerateRun
from specserve.chat_template import THINKING_SWITCH
from specserve.cli.progress import console, warmup_bar
from specserve.cli.watch import StageWatch
from specserve.data import dataset, sources
from specserve.data.conversations import Columns, Row, parse_template_kwargs
from specserve.data.sources import SELF
from specserve.errors import ConfigError
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import answering_engine, load
from specserve.serve.launch import Models
from specserve.serve.progress import bar_columns
from specserve.serve.sizes import longest_sequence
from specserve.train.remote import ray_capture
from specserve.train.run.prepare import Mixture
from specserve.train.settings import TrainRun


def regenerate(run: RegenerateRun) -> None:
    """Append the answers to `output`, and print how many there are and how fast they came."""
    if weighted := [entry for entry in run.source if sources.parse_entry(entry)[1] != 1]:
        raise ConfigError(f"--source {weighted[0]}: every question is asked once, so give no weights")
    mixture = sources.load_mixture(run.source, Columns.parse(run.columns), needs_answers=False)
    if _asks_itself(run) and (run.ray or not run.count):
        lack = "one engine asks, so leave --ray out" if run.ray else "say how many questions: --count"
        raise ConfigError(f"--source {SELF}: {lack}")
    template_kwargs = parse_template_kwargs(run.template_kwargs)
    if run.enable_thinking and THINKING_SWITCH in template_kwargs:
        raise ConfigError(f"--enable-thinking and --template-kwargs both set {THINKING_SWITCH}; give one of them")
    if run.enable_thinking:
        template_kwargs[THINKING_SWITCH] = run.enable_thinking == "true"
    settings = AnswerSettings(
        max_tokens=run.max_tokens,
        temperature=run.temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        seed=run.seed,
        thinking=run.thinking,
        template_kwargs=template_kwargs,
        cut=run.cut,
    )
    cluster.check(run.ray, run.ray_address, run.num_workers)
    answer = _here
    if run.ray:
        answer = _on_ray
    account = answer(run, mixture, settings)
    console.print(escape(account.describe()), highlight=False, soft_wrap=True)
    next_command = f"specserve train --target {shlex.quote(run.target)} --source {shlex.quote(run.output)}"
    console.print(f"the rows are in {escape(run.output)}; next: [bold]{escape(next_command)}[/]", soft_wrap=True)


def capture(run: TrainRun) -> None:
    """Capture what the folder of `--capture` lacks, and print what to go on with."""
    with StageWatch() as watch:
        watch.begin("loading the target and the rows")
        features = ray_capture.capture_states(run, watch.counting("capturing the target's states", "rows"))
    console.print(
        f"the hidden states of {features.manifest.num_rows:,} rows are in {escape(str(features.folder))}; next: "
        "[bold]specserve train[/] with the same settings",
        highlight=False,
        soft_wrap=True,
    )


def _asks_itself(run: RegenerateRun) -> bool:
    return any(sources.parse_entry(entry)[0] == SELF for entry in run.source)


def _rows(run: RegenerateRun, mixture: Mixture) -> list[Row]:
    drawn = dataset.draw(sources.with_held_out(mixture), run.count, run.seed)
    return [row for source in drawn for row in source.train]


def _here(run: RegenerateRun, mixture: Mixture, settings: AnswerSettings) -> Account:
    """Have an engine in this process answer."""
    models = load(run, run.draft)
    with warmup_bar() as on_warmup:
        engine = answering_engine(
            models,
            run.speculation,
            num_slots=answer_slots(models, run.max_slots, longest_sequence(models.target.config, run.max_model_len)),
            max_model_len=run.max_model_len,
            on_warmup=on_warmup,
        )
    source = AnswerSource(models.fingerprint, engine.max_model_len, engine.tokenizer)
    check_settings(Path(run.output), source.stated(settings))  # before anything is asked
    with engine:
        if _asks_itself(run):
            mixture = _with_own_questions(run, models, mixture, engine, settings)
        rows = _rows(run, mixture)
        with _answering(len(rows) * run.samples) as on_answer:
            return eval_regenerate.regenerate(
                engine,
                rows,
                Path(run.output),
                settings,
                samples=run.samples,
                target=models.fingerprint,
                on_answer=on_answer,
            )


def _with_own_questions(
    run: RegenerateRun, models: Models, mixture: Mixture, engine: Engine, settings: AnswerSettings
) -> Mixture:
    """Return the mixture with as many questions as are drawn that the target asks itself."""
    stated = models.fingerprint, run.quantization, run.seed, engine.max_model_len
    questions = OwnQuestions(
        QuestionSettings(*stated, settings.template_kwargs, openings=read_openings(run.self_openings))
    )
    with Progress(*bar_columns(), console=console) as progress:
        task = progress.add_task("asking itself", total=run.count, note="")

        def on_question(asked: Asked) -> None:
            progress.update(task, completed=len(asked.kept), note=f"of {asked.num_candidates:,}")

        asked = questions.ask(engine, run.count, on_question)
    console.print(escape(asked.describe()), highlight=False, soft_wrap=True)
    return questions.fill_in(mixture, run.count, run.self_turns)


def _on_ray(run: RegenerateRun, mixture: Mixture, settings: AnswerSettings) -> Account:
    """Have several engines in workers of a cluster answer."""
    rows = _rows(run, mixture)
    with _answering(len(rows) * run.samples) as on_answer:
        return ray_engines.regenerate(run, rows, settings, on_answer)


@contextlib.contextmanager
def _answering(total: int) -> Iterator[Callable[[Account], None]]:
    """Show a bar over so many rows. The context gives the function to report with."""
    with Progress(*bar_columns(), console=console) as progress:
        task = progress.add_task("answering", total=total, note="")

        def on_answer(account: Account) -> None:
            rate, tau = account.tokens_per_second, account.acceptance.tau
            note = f"{account.num_tokens:,} tokens  {rate:,.0f} tokens/s  tau {tau:.2f}"
            progress.update(task, completed=account.num_settled, note=note)

        yield on_answer
