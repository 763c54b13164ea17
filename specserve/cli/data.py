"""`specserve data`: training data."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from specserve.cli import data_view
from specserve.cli.options import command
from specserve.config import setting
from specserve.errors import ConfigError

app = typer.Typer(help="Training data.", no_args_is_help=True)
app.command("prepare")(command(data_view.PrepareRun)(data_view.prepare))
app.command("inspect")(command(data_view.InspectRun)(data_view.inspect))


@dataclass(frozen=True)
class RegenerateRun:
    """Everything that `specserve data regenerate` can be told."""

    target: str = setting("pydoc", help="preset, Hugging Face folder or hub id: who answers")
    draft: str = setting("", help="folder of a draft head; empty: the bundled one with the bundled target, else none")
    speculation: str = setting("", help="as of `serve`; changes no token. Empty: auto where there is a head, else off")
    source: tuple[str, ...] = setting(
        ("pydoc",), help="what is asked: pydoc, data sets by name, owner/name of the hub, or files, as of `train`"
    )
    columns: tuple[str, ...] = setting((), help="what the columns of a source hold, as data.columns of `train`")
    output: str = setting("regenerated.jsonl", help="file that rows are appended to; answered ones are skipped")
    count: int = setting(2000, help="conversations, drawn by the seed; 0: all", ge=0)
    samples: int = setting(1, help="rows per conversation, each drawn anew", ge=1)
    max_tokens: int = setting(256, help="longest answer", ge=1)
    temperature: float = setting(0.0, help="0 is greedy", ge=0)
    top_p: float = setting(
        1.0, help="draw from the most likely tokens that together reach this probability", gt=0, le=1
    )
    top_k: int = setting(0, help="draw from so many most likely tokens; 0: all", ge=0)
    seed: int = setting(0, help="which conversations are drawn, and the sampling", ge=0)
    thinking: Literal["keep", "drop"] = setting("keep", help="reasoning in the rows")
    enable_thinking: Literal["", "true", "false"] = setting(
        "", help="what the chat template is told of reasoning; empty: nothing"
    )
    template_kwargs: tuple[str, ...] = setting(
        (), help="variables of the chat template, as data.template_kwargs of `train`"
    )
    cut: Literal["keep", "drop"] = setting("keep", help="answers that end at max_tokens")
    quantization: Literal["", "none", "stored", "int8", "fp8"] = setting("", help="of the target, as of `serve`")
    mesh: str = setting("", help="devices to spread the models over, as of `serve`")
    max_slots: int = setting(16, help="sequences at once", ge=1)
    max_model_len: int = setting(
        1024,
        help="prompt and answer together; 0: the target's context, at most 4,096; longer questions are left out",
        ge=0,
    )


@app.command("regenerate")
@command(RegenerateRun)
def regenerate(run: RegenerateRun) -> None:
    """Have the target answer the questions of a data set itself: what it says is what a draft must predict."""
    from rich.markup import escape
    from rich.progress import Progress

    from specserve.cli.progress import bar_columns, console, warmup_bar
    from specserve.data import dataset, sources
    from specserve.data.conversations import Columns, parse_template_kwargs
    from specserve.eval import regenerate as eval_regenerate
    from specserve.eval.regenerate import Account, Manner
    from specserve.mesh import SERVING_AXES, parse_mesh
    from specserve.serve.launch import load_models, make_engine
    from specserve.serve.settings import ServeRun
    from specserve.tokenizer import THINKING_SWITCH

    if weighted := [entry for entry in run.source if sources.parse_entry(entry)[1] != 1]:
        raise ConfigError(f"--source {weighted[0]}: every question is asked once, so give no weights")
    mixture = sources.load_mixture(run.source, Columns.parse(run.columns), needs_answers=False)
    rows = [row for source in dataset.draw(mixture, run.count, run.seed) for row in source.train]
    template_kwargs = parse_template_kwargs(run.template_kwargs)
    if run.enable_thinking and THINKING_SWITCH in template_kwargs:
        raise ConfigError(f"--enable-thinking and --template-kwargs both set {THINKING_SWITCH}; give one of them")
    if run.enable_thinking:
        template_kwargs[THINKING_SWITCH] = run.enable_thinking == "true"
    manner = Manner(
        max_tokens=run.max_tokens,
        temperature=run.temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        seed=run.seed,
        thinking=run.thinking,
        template_kwargs=template_kwargs,
        cut=run.cut,
    )
    mesh = parse_mesh(run.mesh, SERVING_AXES)
    models = load_models(run.target, run.draft, quantization=run.quantization, mesh=mesh)
    serve = ServeRun(
        speculation=run.speculation or ("auto" if models.head else "off"),
        max_slots=run.max_slots,
        max_model_len=run.max_model_len,
        max_queue=2 * run.max_slots,
        constrained=False,
        early_ready=False,
    )
    with warmup_bar() as on_warmup:
        engine = make_engine(models, serve, on_warmup)
    with engine, Progress(*bar_columns(), console=console) as progress:
        task = progress.add_task("answering", total=len(rows) * run.samples, note="")

        def on_answer(account: Account) -> None:
            rate, tau = account.tokens_per_second, account.acceptance.tau
            note = f"{account.num_tokens:,} tokens  {rate:,.0f} tokens/s  tau {tau:.2f}"
            progress.update(task, completed=account.num_settled, note=note)

        account = eval_regenerate.regenerate(
            engine,
            rows,
            Path(run.output),
            manner,
            samples=run.samples,
            target=models.fingerprint,
            on_answer=on_answer,
        )
    console.print(escape(account.describe()), highlight=False, soft_wrap=True)
    next_command = f"specserve train --target {shlex.quote(run.target)} --source {shlex.quote(run.output)}"
    console.print(f"the rows are in {escape(run.output)}; next: [bold]{escape(next_command)}[/]", soft_wrap=True)
