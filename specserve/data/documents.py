"""Rows of a data set -> token documents, each with its loss mask. Host only, numpy only."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

from specserve.data.chat_masks import encode_chat
from specserve.data.conversations import Conversation, Row, TokenRow
from specserve.errors import DataError
from specserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Document:
    """A conversation or plain text, or a piece of one: all that its tokens may see when documents share a row."""

    token_ids: np.ndarray  # int32 [seq]
    loss_mask: np.ndarray  # bool [seq]; True where the token is to be predicted

    def __len__(self) -> int:
        return len(self.token_ids)


Count = Literal[
    "rows",
    "rejected",  # the chat template refuses the messages
    "dropped",  # nothing to learn from: no loss-bearing token within max_len
    "dropped tokens",
    "truncated",  # chats longer than max_len
    "truncated tokens",  # cut from those that are kept
    "cut inside",  # of the truncated: cut inside the first answer, which does not fit
    "tokens cut inside",  # of the truncated tokens
    "split",  # plain texts laid into pieces of max_len; nothing of them is cut
]


@dataclass(frozen=True)
class TokenizedDocuments:
    """The documents that rows were made into, and what became of the rows."""

    documents: list[Document]
    origins: list[int]  # of each document: which of the rows it came of
    counts: Counter[Count]
    rejection: str = ""  # where and why the first row was rejected

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(document.loss_mask.sum()) for document in self.documents)


def tokenize(rows: Sequence[Row], tokenizer: Tokenizer, max_len: int) -> TokenizedDocuments:
    """Make the rows into documents of at most `max_len` >= 2 tokens.

    A longer chat, or row of ready token ids, ends where the last answer ends that fits whole; only where not even the
    first one does is it cut inside. A plain document is learned whole, with EOS after it, in as many pieces as it
    takes; each begins with the last token of the one before, so that every token but the first is predicted once.

    Everything cut or left out is counted and logged. Raises DataError when nothing is left.
    """
    tokenized = tokenize_part(rows, tokenizer, max_len)
    check(tokenized, max_len)
    return tokenized


def tokenize_part(rows: Sequence[Row], tokenizer: Tokenizer, max_len: int) -> TokenizedDocuments:
    """Tokenise a worker's share as `tokenize` does, without logging what it left out. Shares are `join`ed and then
    `check`ed."""
    documents: list[Document] = []
    origins: list[int] = []
    counts: Counter[Count] = Counter({"rows": len(rows)})
    rejection = ""
    for origin, row in enumerate(rows):
        try:
            whole = _encode(row, tokenizer)
        except DataError as error:
            counts["rejected"] += 1
            rejection = rejection or f"{row.source}: {error}"
            continue
        is_split = isinstance(row, Conversation) and row.is_document
        pieces, outcome = _fit(whole, max_len, is_split=is_split)
        documents += pieces
        origins += [origin] * len(pieces)
        counts += outcome
    return TokenizedDocuments(documents, origins, counts, rejection)


def _fit(whole: Document, max_len: int, *, is_split: bool) -> tuple[list[Document], Counter[Count]]:
    """Return the documents of at most `max_len` tokens that a row is made into, and the name under which it is
    counted."""
    length = len(whole) if is_split else turn_end(whole.loss_mask, max_len)
    num_cut = len(whole) - length
    counts: Counter[Count] = Counter({"truncated": num_cut > 0})
    pieces = _split(Document(whole.token_ids[:length], whole.loss_mask[:length]), max_len)
    # The first token is never predicted, so a mask that holds only it teaches nothing.
    if not pieces[0].loss_mask[1:].any():
        counts.update({"dropped": 1, "dropped tokens": len(whole)})
        return [], counts
    counts.update({"truncated tokens": num_cut, "split": len(pieces) > 1})
    if num_cut and whole.loss_mask[length - 1 : length + 1].all():
        counts.update({"cut inside": 1, "tokens cut inside": num_cut})
    return pieces, counts


def join(parts: Sequence[TokenizedDocuments]) -> TokenizedDocuments:
    """Put the documents of all parts in order, and add up their counts."""
    documents = [document for part in parts for document in part.documents]
    starts = accumulate((part.counts["rows"] for part in parts), initial=0)
    origins = [start + origin for start, part in zip(starts, parts, strict=False) for origin in part.origins]
    rejection = next((part.rejection for part in parts if part.rejection), "")
    return TokenizedDocuments(documents, origins, sum((part.counts for part in parts), Counter()), rejection)


def check(tokenized: TokenizedDocuments, max_len: int) -> None:
    """Log what was cut or left out. Raises DataError when nothing is left."""
    counts = tokenized.counts
    if counts["rejected"]:
        log.warning(
            "%d conversations left out, the chat template refuses them; %s", counts["rejected"], tokenized.rejection
        )
    if counts["truncated"]:
        log.warning(
            "%d chats are longer than %d tokens: %d tokens cut behind the last answer that fits, %d inside the first "
            "answer of %d chats",
            *(counts["truncated"], max_len, counts["truncated tokens"] - counts["tokens cut inside"]),
            *(counts["tokens cut inside"], counts["cut inside"]),
        )
    if counts["dropped"]:
        log.warning(
            "%d documents of %d tokens have no loss-bearing token within %d and are left out",
            *(counts["dropped"], counts["dropped tokens"], max_len),
        )
    if counts["split"]:
        log.info("%d plain documents are laid into pieces of %d tokens", counts["split"], max_len)
    if not tokenized.documents:
        raise DataError(
            f"none of {counts['rows']} conversations has a loss-bearing token within {max_len} tokens; "
            "give a longer --seq-len, or other data (--source)"
        )


def turn_end(
    loss_mask: np.ndarray,  # bool [seq]
    max_len: int,
) -> int:
    """Return how many tokens of a chat are kept: all where it fits into `max_len`, or else up to the end of the last
    answer that fits whole, or where there is none `max_len`."""
    if len(loss_mask) <= max_len:
        return len(loss_mask)
    ends = np.flatnonzero(loss_mask & ~np.append(loss_mask[1:], False)) + 1
    fitting = ends[ends <= max_len]
    return int(max(fitting, default=max_len))


def _split(document: Document, max_len: int) -> list[Document]:
    """Cut into pieces of at most `max_len` that overlap by one token, which bears loss in the first of the two."""
    pieces = []
    for start in range(0, max(1, len(document) - 1), max_len - 1):
        loss_mask = document.loss_mask[start : start + max_len].copy()
        loss_mask[0] &= start == 0
        pieces.append(Document(document.token_ids[start : start + max_len], loss_mask))
    return pieces


def _encode(row: Row, tokenizer: Tokenizer) -> Document:
    """Return all token ids of a row and its loss mask. Raises DataError where the chat template refuses its
    messages."""
    if isinstance(row, TokenRow):
        return Document(row.token_ids, row.loss_mask)
    if not row.is_document:
        messages, tools = row.as_dicts(), row.tool_dicts()
        token_ids, loss_mask = encode_chat(tokenizer, messages, tools=tools, template_kwargs=row.variables())
        return Document(np.array(token_ids, np.int32), np.array(loss_mask, bool))
    token_ids = tokenizer.encode(row.messages[0].content)
    bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos_id is not None and token_ids[:2] == [bos_id, bos_id]:  # the text has one, and the tokenizer adds one
        del token_ids[0]
    if eos_id is not None and token_ids[-1:] != [eos_id]:
        token_ids.append(eos_id)
    return Document(np.array(token_ids, np.int32), np.ones(len(token_ids), bool))
