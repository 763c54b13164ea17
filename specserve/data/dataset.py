"""The way from the sources of a mixture to packed rows, with an account of each source: what was used, cut and left
out."""

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

from specserve.data import pydoc
from specserve.data.conversations import Conversation, Row, Split, TokenRow
from specserve.data.documents import Document, TokenizedDocuments, check, join, tokenize_part
from specserve.data.packing import PackedRows, pack, stack
from specserve.data.sources import PYDOC, SourceRows
from specserve.data.token_cache import tokenize_cached
from specserve.errors import DataError, RequestError
from specserve.host import whole_file
from specserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SourceTokens:
    """The training rows of one source as documents."""

    source: SourceRows
    rows: tuple[Row, ...]  # the documents' `origins` count in them
    tokenized: TokenizedDocuments


@dataclass(frozen=True, eq=False)
class SourceReport:
    """The account of one source's training rows."""

    tokens: SourceTokens
    counts: np.ndarray  # int64 [vocab]; how often each token bears loss
    num_rows: int  # packed
    padding_share: float


@dataclass(frozen=True, eq=False)
class Dataset:
    """The data that training reads: packed rows of all sources, and an account of each source."""

    rows: PackedRows
    reports: tuple[SourceReport, ...]  # in the order of `rows.source_starts`

    @property
    def counts(self) -> np.ndarray:  # float64 [vocab]
        """The number of times that each token bears loss in an epoch of the mixture."""
        weighted = [report.tokens.source.weight * report.counts for report in self.reports]
        return np.sum(weighted, axis=0)


@dataclass(frozen=True)
class Prompt:
    """A held-out question, on which heads are measured."""

    source: str
    token_ids: list[int]


def draw(mixture: Sequence[SourceRows], count: int, seed: int) -> tuple[SourceRows, ...]:
    """Draw `count` of the mixture's training rows by the seed; all when there are no more, or `count` is 0.

    A source of which none is drawn is left out, and logged.
    """
    sizes = [len(source.train) for source in mixture]
    if not count or count >= sum(sizes):
        return tuple(mixture)
    return shuffled(mixture, count, seed)


def shuffled(mixture: Sequence[SourceRows], count: int, seed: int) -> tuple[SourceRows, ...]:
    """Draw as `draw` does, the rows of each source in the order of the draw, also where all are drawn. So fewer rows
    are the first of more."""
    sizes = [len(source.train) for source in mixture]
    drawn = np.random.default_rng(seed).permutation(sum(sizes))[: count or None]
    chosen = []
    for source, size, stop in zip(mixture, sizes, np.cumsum(sizes).tolist(), strict=True):
        own = drawn[(drawn >= stop - size) & (drawn < stop)] - (stop - size)
        if len(own):
            chosen.append(dataclasses.replace(source, train=tuple(source.train[i] for i in own.tolist())))
        else:
            log.warning("%s: none of its %d rows is among the %d that were drawn", source.name, size, count)
    return tuple(chosen)


def tokenize_source(
    source: SourceRows,
    tokenizer: Tokenizer,
    folder: Path,  # of the tokenizer
    *,
    max_len: int,
    workers: int = 0,
) -> SourceTokens:
    """Tokenise the source's training rows, or read them from the cache. What is cut or left out is counted and logged,
    and so are fields of rows that the chat template does not read.

    Raises DataError when nothing is left.
    """
    conversations = [row for row in source.train if isinstance(row, Conversation)]
    if unread := _unread(conversations, tokenizer):
        counts = ", ".join(f"{what} (of {count})" for what, count in unread.most_common())
        log.warning("%s: conversations say what the chat template does not read: %s", source.name, counts)
    ready = [row for row in source.train if isinstance(row, TokenRow)]
    parts = [tokenize_part(ready, tokenizer, max_len)]
    if conversations:
        parts.insert(0, tokenize_cached(conversations, tokenizer, folder, max_len, workers))
    tokenized = join(parts)
    try:
        check(tokenized, max_len)
    except DataError as error:
        raise DataError(f"{source.name}: {error}") from error
    return SourceTokens(source, (*conversations, *ready), tokenized)


def build(sources: Sequence[SourceTokens], *, seq_len: int, vocab_size: int) -> Dataset:
    """Pack each source into rows of `seq_len`, and count its tokens up to the target's `vocab_size`."""
    packed = [pack(source.tokenized.documents, seq_len) for source in sources]
    reports = [
        SourceReport(source, token_counts(source.tokenized.documents, vocab_size), len(rows), rows.padding_share)
        for source, rows in zip(sources, packed, strict=True)
    ]
    return Dataset(stack(packed, [source.source.weight for source in sources]), tuple(reports))


def token_counts(documents: Sequence[Document], vocab_size: int) -> np.ndarray:  # int64 [vocab]
    """Count how often each token bears loss."""
    learned = [document.token_ids[document.loss_mask] for document in documents]
    return np.bincount(np.concatenate([np.empty(0, np.int32), *learned]), minlength=vocab_size)


def held_out_prompts(mixture: Sequence[SourceRows], tokenizer: Tokenizer, count: int, *, max_len: int) -> list[Prompt]:
    """Collect at most `count` questions that nobody trains on, from all sources in turn, the same ones in every run.

    Plain documents ask nothing; questions that the chat template refuses or that are longer than `max_len` tokens are
    passed over.
    """
    queues = [_questions(source, tokenizer, count, max_len) for source in mixture]
    in_turn = (prompt for layer in zip_longest(*queues) for prompt in layer if prompt is not None)
    return list(islice(in_turn, count))


def write_rows(parts: Sequence[tuple[Split, SourceTokens]], path: Path) -> int:
    """Write every document as a row of token ids, which `sources` reads again, into the same part; returns how many.

    All of the file is there or none of it. Raises DataError.
    """
    try:
        with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
            for split, source in parts:
                for document, origin in zip(source.tokenized.documents, source.tokenized.origins, strict=True):
                    row = source.rows[origin]
                    ids, mask = document.token_ids, document.loss_mask
                    written = TokenRow(ids, mask, row.category, source.source.name, row.key, split)
                    file.write(json.dumps(written.as_row()) + "\n")
    except OSError as error:
        raise DataError(f"{path}: cannot write the rows: {error.strerror}") from error
    return sum(len(source.tokenized.documents) for _, source in parts)


def write_conversations(mixture: Sequence[SourceRows], path: Path) -> int:
    """Write the training rows of all sources to a file that `sources` reads again; returns how many. All of the file is
    there or none of it. Raises DataError."""
    rows = [row for source in mixture for row in source.train]
    try:
        with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row.as_row(), ensure_ascii=False) + "\n")
    except OSError as error:
        raise DataError(f"{path}: cannot write the rows: {error.strerror}") from error
    return len(rows)


def _unread(conversations: Sequence[Conversation], tokenizer: Tokenizer) -> Counter[str]:
    """Count, by what it is, the content of conversations that their chat template does not write down."""
    unread: Counter[str] = Counter()
    for conversation in conversations:
        unread["tools"] += bool(conversation.tools) and not tokenizer.template.reads_tools
        has_reasoning = any(message.reasoning for message in conversation.messages)
        unread["reasoning"] += has_reasoning and not tokenizer.template.reads_reasoning
        unread.update(name for name in conversation.variables() if not tokenizer.template.reads_variable(name))
    return +unread


def _questions(source: SourceRows, tokenizer: Tokenizer, count: int, max_len: int) -> Iterator[Prompt]:
    spread = pydoc.held_out_prompts(count) if source.name == PYDOC else sorted(source.held_out, key=lambda row: row.key)
    for row in spread:
        token_ids = _question_ids(row, tokenizer)
        if 0 < len(token_ids) <= max_len:
            yield Prompt(source.name, token_ids)


def _question_ids(row: Row, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids up to where the assistant first speaks. They are empty where nothing is asked, or not in a
    way the template knows."""
    if isinstance(row, TokenRow):
        return row.token_ids[: int(row.loss_mask.argmax())].tolist()
    if row.is_document:
        return []
    try:
        return tokenizer.render_chat(row.question.as_dicts(), tools=row.tool_dicts(), template_kwargs=row.variables())
    except RequestError as error:
        log.debug("%s: %s", row.source, error)
        return []
