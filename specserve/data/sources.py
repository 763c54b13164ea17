"""The sources of conversations: data sets by name, any hub data set, local files, the bundled `pydoc`, and `self`: the
questions that the target asks itself.

The rows of every source are split by the key of their questions (`pydoc` by module) into those that are trained on and
those that are held out. No source trains on a question that another one holds out. Rows that cannot be used are
counted and reported.
"""

import difflib
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specserve import hub
from specserve.data import pydoc
from specserve.data.conversations import (
    HELD_OUT_SHARE,
    NO_COLUMNS,
    BadRowError,
    Columns,
    Conversation,
    Row,
    RowProblem,
    Split,
    parse_row,
    report,
    split_of,
    unread_fields,
)
from specserve.errors import ConfigError, DataError

log = logging.getLogger(__name__)

PYDOC, SELF = "pydoc", "self"
SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class HubDataset:
    """A data set of the Hugging Face hub, and the names under which it keeps the parts of a row."""

    hub_id: str
    licence: str
    config: str | None = None
    split: str = "train"
    files: str | None = None  # of its repository, where not all of them are one data set; or an address of its own
    columns: Columns = NO_COLUMNS  # empty where the rows are in a format that needs no mapping

    @property
    def homepage(self) -> str:
        """The address at which people find it."""
        if self.files is not None and self.files.startswith("https://"):
            return self.files
        return f"https://huggingface.co/datasets/{self.hub_id}"


DATASETS = {
    "sharegpt": HubDataset(
        "Aeala/ShareGPT_Vicuna_unfiltered",
        "apache-2.0",
        files="ShareGPT_V4.3_unfiltered_cleaned_split.json",  # the repository's other file is an earlier selection
    ),
    "ultrachat": HubDataset("HuggingFaceH4/ultrachat_200k", "mit", split="train_sft"),
    "perfectblend": HubDataset("mlabonne/open-perfectblend", "apache-2.0"),
    "magpie": HubDataset(
        "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        "llama3.1",
        columns=Columns(messages="conversations", category="task_category"),
    ),
    "opencodeinstruct": HubDataset(
        "nvidia/OpenCodeInstruct",
        "cc-by-4.0",
        config="train",
        columns=Columns(prompt="input", response="output", category="domain"),
    ),
    "gsm8k": HubDataset("openai/gsm8k", "mit", config="main", columns=Columns(prompt="question", response="answer")),
}
_HUB_NAME = re.compile(r"(?P<hub_id>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?")


@dataclass(frozen=True)
class SourceRows:
    """The rows that one source gives, and how often they are used."""

    name: str
    weight: float  # how many times per epoch each of its training rows is used
    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    problems: tuple[RowProblem, ...] = ()  # rows that could not be used
    num_withheld: int = 0  # left out of training: another source holds their question out


def parse_entry(entry: str) -> tuple[str, float]:
    """Give the name and the weight of `NAME` or `NAME=WEIGHT`. Raises ConfigError."""
    name, equals, text = entry.rpartition("=")
    if not equals:
        name, text = entry, "1"
    try:
        weight = float(text)
    except ValueError:  # an equals sign within the name
        return entry, 1.0
    if not name or not (math.isfinite(weight) and weight > 0):
        raise ConfigError(f"data.source: {entry!r}; expected NAME or NAME=WEIGHT with a weight above 0, as in gsm8k=2")
    return name, weight


def load_mixture(
    entries: Sequence[str],
    columns: Columns = NO_COLUMNS,
    *,
    vocab_size: int | None = None,  # of the target, against which ready token ids are checked
    withheld: Collection[str] = (),  # keys of further questions that nothing may be trained on
    needs_answers: bool = True,  # False where only the questions are used
) -> tuple[SourceRows, ...]:
    """Read every source of a mixture, each `NAME` or `NAME=WEIGHT`. A name is `pydoc`, a key of DATASETS or
    `owner/name[/config]` of the hub, both with `[:SPLIT]` as `datasets` has it (`gsm8k:test`, `magpie:train[:5%]`), or
    a file.

    `self` stands for the questions that the target asks itself, which are not known yet: its source has no rows.

    `columns` is for files and for hub data sets without a name of their own, wherever a row has them. Raises
    ConfigError for entries that make no sense, DataError for data that cannot be read or used.
    """
    named = [parse_entry(entry) for entry in entries]
    if not named:
        raise ConfigError("data.source is empty; give pydoc, a data set's name or a file")
    if repeated := [name for i, (name, _) in enumerate(named) if name in [other for other, _ in named[:i]]]:
        raise ConfigError(f"data.source names {repeated[0]} twice; use it more often with {repeated[0]}=2")
    parts = [_read(name, columns, vocab_size, needs_answers) for name, _ in named]
    if columns != NO_COLUMNS and not any(part.num_mapped for part in parts):
        seen = sorted({column for part in parts for column in part.columns})
        raise DataError(
            f"data.columns fits no row of {', '.join(name for name, _ in named)}; "
            f"{'their columns are ' + ', '.join(seen) if seen else 'named data sets have a mapping of their own'}"
        )
    kept_out = {row.key for part in parts for row in part.held_out} | set(withheld)
    mixture = []
    for (name, weight), part in zip(named, parts, strict=True):
        train = tuple(row for row in part.train if row.key not in kept_out)
        if not train and name != SELF:
            raise _nothing(name, part, "train")
        num_withheld = len(part.train) - len(train)
        mixture.append(SourceRows(name, weight, train, part.held_out, part.problems, num_withheld))
    return tuple(mixture)


def with_held_out(mixture: Sequence[SourceRows]) -> tuple[SourceRows, ...]:
    """Return the mixture with held-out rows among those of training, for a file whose readers hold the same rows out
    again, by their key. The bundled data set holds whole modules out, which a key does not show: its rows stay
    apart."""
    return tuple(
        replace(source, train=(*source.train, *source.held_out), held_out=()) if source.name != PYDOC else source
        for source in mixture
    )


def load(source: str, *, split: Split) -> tuple[Conversation, ...]:
    """Read the conversations of one source's part. Raises ConfigError or DataError; bad rows are counted and logged."""
    part = _read(source, NO_COLUMNS, None)
    rows = part.train if split == "train" else part.held_out
    conversations = tuple(row for row in rows if isinstance(row, Conversation))
    if len(conversations) < len(rows):
        raise DataError(f"{source} has rows of token ids, of which no conversation can be made; give what they came of")
    if not conversations:
        raise _nothing(source, part, split)
    return conversations


@dataclass(frozen=True)
class _Part:
    """The rows of one source as they were read."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    problems: tuple[RowProblem, ...] = ()
    num_mapped: int = 0  # rows that the user's mapping fitted
    columns: tuple[str, ...] = ()  # of the first row, where the user's mapping could have fitted


def _nothing(name: str, part: _Part, split: Split) -> DataError:
    return DataError(
        f"{name}: none of its {len(part.train) + len(part.held_out)} rows is in the {split!r} split "
        f"(one question in {HELD_OUT_SHARE} is held out, in all sources alike); give a larger source"
    )


def _read(name: str, columns: Columns, vocab_size: int | None, needs_answers: bool = True) -> _Part:
    if name == PYDOC:
        return _Part(tuple(pydoc.build("train")), tuple(pydoc.build("held-out")))
    if name == SELF and needs_answers:
        raise ConfigError(
            f"data.source {SELF}: the target asks itself, and answers, where it runs: in `train --regenerate` and in "
            "`data regenerate`; `specserve train --source self --data-only` writes a file that can be given here"
        )
    if name == SELF:
        return _Part((), ())
    label, numbered, mapping, is_users = _open(name, columns)
    rows: list[Row] = []
    problems: list[RowProblem] = []
    unread: Counter[str] = Counter()
    num_mapped, seen = 0, ()
    for number, raw in numbered:
        try:
            row = _decode(raw) if isinstance(raw, bytes) else raw
            if isinstance(row, dict):
                seen = seen or tuple(row)
                if mapping.fit(row):
                    num_mapped += 1
                    row = mapping.rename(row)
                unread.update(unread_fields(row))
            rows.append(parse_row(row, f"{label}:{number}", vocab_size, needs_answers=needs_answers))
        except BadRowError as error:
            problems.append(RowProblem(number, str(error)))
    if problems:
        log.warning("%s: %s", name, report(problems))
    if unread:
        counts = ", ".join(f"{field} (in {count} rows)" for field, count in unread.most_common())
        log.warning("%s: fields that are not read: %s", name, counts)
    if not is_users:  # no mapping of the user's could have fitted
        num_mapped, seen = 0, ()
    if not rows:
        hint = ""
        if seen:
            hint = f"; its columns are {', '.join(seen)}: say what they hold with data.columns"
        raise DataError(f"{name}: no usable row; {report(problems) if problems else 'there is none'}{hint}")
    by_split: dict[Split, list[Row]] = {"train": [], "held-out": []}
    for row in rows:
        by_split[split_of(row)].append(row)
    train, held_out = tuple(by_split["train"]), tuple(by_split["held-out"])
    return _Part(train, held_out, tuple(problems), num_mapped, seen)


def _open(name: str, columns: Columns) -> tuple[str, Iterable[tuple[int, Any]], Columns, bool]:
    """Return (label for where a row stands, its numbered rows, their mapping, whether that is the user's)."""
    if name.endswith(SUFFIXES):
        path = Path(name).expanduser()
        return path.name, file_rows(path), columns, True
    base, _, split = name.partition(":")
    if base in DATASETS:
        known = DATASETS[base]
        return base, _hub_rows(name, known, split or known.split), known.columns, False
    if matched := _HUB_NAME.fullmatch(base):
        dataset = HubDataset(matched["hub_id"], "", config=matched["config"])
        return base, _hub_rows(name, dataset, split or dataset.split), columns, True
    near = difflib.get_close_matches(base.lower(), [PYDOC, SELF, *DATASETS], n=1)
    raise ConfigError(
        f"data.source {name!r} is not known{f'; did you mean {near[0]!r}?' if near else '.'} It may be "
        f"{', '.join([PYDOC, SELF, *DATASETS])}, a hub data set (owner/name), or a file ending in {', '.join(SUFFIXES)}"
    )


def download(dataset: HubDataset, split: str) -> Iterable[Mapping[str, Any]]:
    """The rows of a hub data set as they are, downloaded when they are not in the cache of `datasets` yet. Raises what
    that library raises; where the hub cannot be asked, at once (`hub.why` then says so)."""
    hub.absence()  # before `datasets` is imported
    from datasets import load_dataset  # heavy

    rows: Any = load_dataset(dataset.hub_id, dataset.config, data_files=dataset.files, split=split)
    return rows


def is_kept(name: str) -> bool:
    """Return whether the cache of `datasets` has a data set of `DATASETS`, so that it can be read without the hub."""
    from huggingface_hub import constants  # heavy

    cache = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))
    return (cache / DATASETS[name].hub_id.lower().replace("/", "___")).is_dir()


def _hub_rows(name: str, dataset: HubDataset, split: str) -> Iterator[tuple[int, Any]]:
    """The rows of a hub data set, downloaded when they are not in the cache of `datasets` yet."""
    try:
        rows: Any = download(dataset, split)
    except Exception as error:  # datasets raises a dozen types for no network, no such set, no such split
        raise DataError(
            f"data.source {name}: {dataset.hub_id} could not be loaded ({hub.why(error)}). Where the hub cannot be "
            f"reached, download the data set elsewhere ({dataset.homepage}) and give its files: {_file_hint(dataset)}"
        ) from error
    yield from ((number, _without_nulls(row)) for number, row in enumerate(rows, start=1))


def _file_hint(dataset: HubDataset) -> str:
    hint = f"--source {dataset.files or 'FILE.parquet'}"
    if given := [f"{field}={column}" for field, column in vars(dataset.columns).items() if column]:
        hint += f" --columns {','.join(given)}"
    return hint


def file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a .jsonl (as bytes, by number of line), .json or .parquet file (decoded, by place). Raises
    DataError."""
    try:
        if path.suffix == ".parquet":
            yield from enumerate(_parquet_rows(path), start=1)
        elif path.suffix == ".json":
            yield from enumerate(_json_rows(path), start=1)
        else:
            # not splitlines: U+2028 and the like are no ends of lines in JSON
            yield from ((n, line) for n, line in enumerate(path.read_bytes().split(b"\n"), start=1) if line.strip())
    except OSError as error:
        raise DataError(f"{path}: cannot read the data: {error.strerror or error}") from error


def _json_rows(path: Path) -> list[Any]:
    """The rows of a file that is one JSON list, as ShareGPT's is."""
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); a file with one object a line is a .jsonl") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a list of rows, got {type(rows).__name__}")
    return rows


def _parquet_rows(path: Path) -> Iterator[Any]:
    from pyarrow import ArrowException, parquet  # heavy

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from map(_without_nulls, batch.to_pylist())
    except ArrowException as error:
        raise DataError(f"{path}: not a parquet file that can be read: {error}") from error


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's row without the nulls inside its values, because a table gives every call and schema the fields
    of all."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: clean(item) for name, item in value.items() if item is not None}
        if isinstance(value, list):
            return [clean(item) for item in value]
        return value

    return {name: clean(value) for name, value in row.items()}


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError covers bad JSON and bad UTF-8
        raise BadRowError("not JSON") from error
