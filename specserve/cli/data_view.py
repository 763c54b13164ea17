"""`specserve data prepare` and `inspect`: a mixture as training will see it, made and shown."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from specserve.checkpoints.source import resolve_target
from specserve.checkpoints.tensors import read_json
from specserve.cli.progress import console
from specserve.data.conversations import Split, parse_template_kwargs
from specserve.data.dataset import Dataset, SourceReport, SourceTokens, tokenize_source, write_rows
from specserve.data.documents import Document
from specserve.data.settings import InspectRun, MixtureRun, PrepareRun
from specserve.data.sources import parse_entry
from specserve.errors import ConfigError
from specserve.models.families.table import model_config
from specserve.speculative.vocab import coverage
from specserve.tokenizer import Tokenizer, read_end_ids
from specserve.train.run.prepare import draft_vocab, load_data, load_mixture
from specserve.train.settings import DataSettings, TrainSettings

OUTSIDE, LEARNED, GIVEN = "bold red", "green", "dim"  # of the draft vocabulary; bears loss; does not
MARKS = "⟦⟧"  # around what bears loss, where there are no colours
NUM_BINS, BAR_WIDTH = 10, 40


@dataclass(frozen=True)
class Prepared:
    """A mixture that is tokenised and packed, with the draft vocabulary that a training run would choose for it."""

    dataset: Dataset
    tokenizer: Tokenizer
    folder: Path  # of the target
    draft_ids: np.ndarray  # [draft_vocab] int32


def load(run: MixtureRun) -> Prepared:
    """Read the tokenizer and the mixture, but none of the target's weights. Raises ConfigError, CheckpointError or
    DataError."""
    folder = resolve_target(run.target, needs_weights=False).folder
    raw = read_json(folder / "config.json")
    vocab_size = model_config(raw, dtype="float32").vocab_size
    tokenizer = Tokenizer.load(folder, parse_template_kwargs(run.template_kwargs))
    shared = {name: getattr(run, name) for name in ("source", "columns", "max_conversations", "workers")}
    data = DataSettings(**shared, eval_prompts=0)
    train, mixture = TrainSettings(seq_len=run.seq_len, seed=run.seed), load_mixture(run.target, data, vocab_size)
    dataset, _ = load_data(run.target, data, train, mixture, tokenizer, folder, vocab_size)
    draft_ids = draft_vocab(dataset.counts, tokenizer, read_end_ids(folder), run.vocab_size)
    return Prepared(dataset, tokenizer, folder, draft_ids)


def prepare(run: PrepareRun) -> None:
    """Fill the cache that training reads, print what became of every row, and write the token ids to `output`."""
    if run.output and not run.output.endswith(".jsonl"):
        raise ConfigError(f"--output {run.output}: expected a name ending in .jsonl, or none")
    if any(parse_entry(entry)[0] == run.output for entry in run.source):
        raise ConfigError(f"--output {run.output} is one of the sources; give another name")
    prepared = load(run)
    console.print(summary(prepared))
    if not run.output:
        console.print("[dim]training with these settings reads this from the cache[/]")
        return
    parts: list[tuple[Split, SourceTokens]] = [("train", report.tokens) for report in prepared.dataset.reports]
    for source in [report.tokens.source for report in prepared.dataset.reports]:
        if source.held_out:
            held_out, of = replace(source, train=source.held_out), (prepared.tokenizer, prepared.folder)
            tokens = tokenize_source(held_out, *of, max_len=run.seq_len, workers=run.workers)
            parts.append(("held-out", tokens))
    num_rows = write_rows(parts, Path(run.output))
    next_command = f"specserve train --source {shlex.quote(run.output)}"
    line = f"{num_rows:,} rows of token ids in {escape(run.output)}; next: [bold]{escape(next_command)}[/]"
    console.print(line, soft_wrap=True)


def inspect(run: InspectRun) -> None:
    """Print some conversations, coloured by what training does with each token, and tables of the whole mixture."""
    prepared = load(run)
    for report in prepared.dataset.reports:
        documents = report.tokens.tokenized.documents
        picks = np.random.default_rng(run.seed).permutation(len(documents))[: run.show]
        for pick in picks.tolist():
            row = report.tokens.rows[report.tokens.tokenized.origins[pick]]
            title = " · ".join(filter(None, (row.source, row.category, f"{len(documents[pick])} tokens")))
            console.print(Rule(Text(title), style="dim", align="left"))
            console.print(coloured(documents[pick], prepared, run.show_tokens, has_colours=bool(console.color_system)))
    console.print(Rule(style="dim"))
    legend = [("bears loss", LEARNED), ("is given", GIVEN), ("bears loss, not in the draft vocabulary", OUTSIDE)]
    if console.color_system:
        console.print(Text("  ").join(Text(*entry) for entry in legend))
    console.print(summary(prepared))
    for report in prepared.dataset.reports:
        console.print(histogram(report))


def summary(prepared: Prepared) -> Table:
    """A table with a column for each source and one for the mixture. Measures are its lines, so that it fits a narrow
    terminal."""
    reports, rows = prepared.dataset.reports, prepared.dataset.rows
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", style="dim")
    for report in reports:
        table.add_column(escape(_short(report.tokens.source.name)), justify="right", overflow="fold")
    if len(reports) > 1:
        table.add_column("mixture", justify="right")
    columns = [_measures(report) for report in reports]
    for measure in columns[0]:
        values = [column[measure] for column in columns]
        total = [f"{sum(values):,}"] * (len(reports) > 1)
        table.add_row(measure, *(f"{value:,}" for value in values), *total)
    table.add_row("times per epoch", *(f"{report.tokens.source.weight:g}" for report in reports))
    shares = [(_loss_share([report]), report.padding_share, report.counts) for report in reports]
    shares += [(_loss_share(reports), rows.padding_share, prepared.dataset.counts)] * (len(reports) > 1)
    table.add_row("loss-bearing", *(f"{share:.1%}" for share, _, _ in shares))
    table.add_row("padding", *(f"{padding:.2%}" for _, padding, _ in shares))
    covered = [f"{coverage(counts, prepared.draft_ids):.2%}" for _, _, counts in shares]
    table.add_row(f"in a draft vocabulary of {len(prepared.draft_ids):,}", *covered)
    return table


def histogram(report: SourceReport) -> Text:
    """A bar chart of the documents of a source by their length in tokens."""
    lengths = [len(document) for document in report.tokens.tokenized.documents]
    edges = np.linspace(0, max(lengths), min(NUM_BINS, max(lengths)) + 1).astype(int)
    counts = np.histogram(lengths, edges + 1)[0]  # bins (low, high]
    text = Text()
    text.append(f"\n{_short(report.tokens.source.name)}: documents by length in tokens\n", style="bold")
    for low, high, count in zip(edges[:-1] + 1, edges[1:], counts, strict=True):
        bar = "█" * round(BAR_WIDTH * count / counts.max())
        text.append(f"{low:>7,} to {high:>7,}  ", style="dim")
        text.append(f"{bar:<{BAR_WIDTH}} {count:,}\n")
    return text


def coloured(document: Document, prepared: Prepared, limit: int, *, has_colours: bool) -> Text:
    """Return the first `limit` tokens of the document as text, coloured by what training does with each."""
    is_inside = np.isin(document.token_ids, prepared.draft_ids) | (not has_colours)
    styles = np.where(is_inside, LEARNED, OUTSIDE)
    styles = np.where(document.loss_mask, styles, GIVEN)[:limit].tolist()
    text = Text()
    begin = 0
    for style, group in groupby(styles):
        end = begin + len(list(group))
        piece = prepared.tokenizer.decode(document.token_ids[begin:end].tolist(), skip_special_tokens=False)
        is_marked = style != GIVEN and not has_colours
        text.append(f"{MARKS[0]}{piece}{MARKS[1]}" if is_marked else piece, style=style)
        begin = end
    if len(document) > limit:
        text.append(f" … {len(document) - limit:,} more tokens", style="italic dim")
    return text


def _measures(report: SourceReport) -> dict[str, int]:
    source, tokenized = report.tokens.source, report.tokens.tokenized
    return {
        "conversations": tokenized.counts["rows"],
        "held out": len(source.held_out),
        "held out elsewhere, not used": source.num_withheld,
        "bad rows, left out": len(source.problems),
        "refused by the template, left out": tokenized.counts["rejected"],
        "nothing to learn, left out": tokenized.counts["dropped"],
        "cut short": tokenized.counts["truncated"],
        "tokens cut": tokenized.counts["truncated tokens"],
        "tokens": tokenized.num_tokens,
        "packed rows": report.num_rows,
    }


def _loss_share(reports: Sequence[SourceReport]) -> float:
    tokens = sum(report.tokens.tokenized.num_tokens for report in reports)
    return sum(report.tokens.tokenized.num_loss_tokens for report in reports) / max(1, tokens)


def _short(name: str) -> str:
    if "." not in name:
        return name
    return Path(name).name
