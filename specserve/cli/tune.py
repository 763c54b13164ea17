"""`specserve tune`: the best way to speculate at each batch size, into a profile that the server loads."""

from dataclasses import asdict, replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from specserve.cli.progress import Bars, console
from specserve.errors import DataError
from specserve.eval.prompts import load_chats
from specserve.eval.report import table
from specserve.eval.settings import TuneRun
from specserve.eval.tune import NEAR, Found, is_near, measure_live, parse_trees, tune
from specserve.provenance import collect
from specserve.serve.engines import load
from specserve.serve.launch import Models
from specserve.serve.tuned import Profile, profile_file


def search(run: TuneRun) -> None:
    """Replay every tree's acceptance, time the steps that could win, write the profile, and check it by a live run."""
    parse_trees(run.trees)  # a wrong one is said before minutes of work
    models = load(run, run.draft)
    prompts = _prompts(run, models)
    with Bars() as progress:
        on_progress = progress.reporter()
        found = tune(models, run, prompts, on_progress)
        details = {**found.profile.details, "settings": asdict(run), "provenance": collect()}
        profile = replace(found.profile, details=details)
        file = Path(run.output).expanduser() if run.output else profile_file(profile.facts)
        profile.write(file)
        if run.live:
            profile = measure_live(models, run, profile, str(file), prompts, on_progress)
            profile.without_losses().write(file)
    _show(found, profile, run)
    given = f" --tuned-profile {file}" if run.output else ""
    console.print(f"profile written to {escape(str(file))}; serve with [bold]--speculation tuned{escape(given)}[/]")


def _prompts(run: TuneRun, models: Models) -> list[list[int]]:
    assert models.tokenizer is not None
    rendered = [models.tokenizer.render_chat(chat) for chat in load_chats(run.bench, run.requests)]
    prompts = [prompt for prompt in rendered if len(prompt) + run.max_tokens + 16 <= run.max_model_len]
    if not prompts:
        raise DataError(f"{run.bench}: no prompt leaves room for {run.max_tokens} tokens; raise --max-model-len")
    if len(prompts) < len(rendered):
        console.print(f"{len(rendered) - len(prompts)} of {len(rendered)} prompts do not fit and are not asked")
    return prompts


def _show(found: Found, profile: Profile, run: TuneRun) -> None:
    timed = len({each.tree for each in found.timed})
    console.print(
        f"replayed {len(found.replayed)} trees over {found.num_answers} answers of {found.num_tokens:,} tokens, "
        f"temperature {run.temperature:g}; {timed} of them were worth timing"
    )
    console.print(profile_table(profile))
    console.print(pays_line(profile.without_losses()), highlight=False)
    for entry in profile.losses:
        console.print(
            f"{entry.batch_size} at once: {entry.speculation} was slower than plain decoding when it was tried "
            f"({entry.measured_gain:.2f}x), so the profile says off",
            highlight=False,
        )
    for entry in profile.entries:
        if not is_near(entry):
            console.print(
                f"[yellow]{entry.batch_size} at once: predicted {entry.predicted_gain:.2f}x and measured "
                f"{entry.measured_gain:.2f}x differ by more than {NEAR:.0%}; is the machine busy? Tune again, or with "
                "more --requests and --repeats[/]",
                highlight=False,
            )


def profile_table(profile: Profile) -> Table:
    """Make a table with a row for each batch size."""
    numbers = ("tau", "plain ms", "step ms", "predicted", "measured")
    shown = table("the best way to speculate, and its gain", ("at once", "speculation"), numbers)
    for entry in profile.entries:
        gain = entry.measured_gain
        shown.add_row(
            str(entry.batch_size),
            entry.speculation,
            f"{entry.tau:.2f}",
            f"{entry.plain_ms:.2f}",
            f"{entry.step_ms:.2f}",
            f"{entry.predicted_gain:.2f}x",
            "" if gain is None else f"{gain:.2f}x",
        )
    return shown


def pays_line(profile: Profile) -> str:
    """Say at which batch sizes speculation pays."""
    largest, pays = profile.entries[-1].batch_size, profile.pays_at
    if not pays:
        return "speculation does not pay here: plain decoding is the fastest at every batch size that was measured"
    if len(pays) == len(profile.entries):
        return f"speculation pays at every batch size up to {largest}; beyond, nothing was measured (--max-slots)"
    return f"speculation pays at {', '.join(map(str, pays))} at once; other steps are plain"
