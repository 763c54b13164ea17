"""Conversations -> token documents, each with its loss mask. Host only, numpy only."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import numpy as np

from specserve.data.chat_masks import encode_chat
from specserve.data.conversations import Conversation
from specserve.errors import DataError
from specserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Document:
    """What attention may see at once: one conversation or plain text."""

    token_ids: np.ndarray  # int32 [seq]
    loss_mask: np.ndarray  # bool [seq]; True where the token is to be predicted

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class TokenizedDocuments:
    documents: list[Document]
    origins: list[int]  # of each document: which of the conversations it came of
    num_conversations: int
    num_truncated_documents: int  # chats longer than max_len
    num_truncated_tokens: int  # cut from those that are kept
    num_dropped: int  # nothing to learn from: no loss-bearing token within max_len
    num_rejected: int  # the chat template refuses the messages
    rejection: str = ""  # where and why, of the first one
    num_inside_documents: int = 0  # of the truncated: cut inside the first answer, which does not fit
    num_inside_tokens: int = 0  # of num_truncated_tokens
    num_dropped_tokens: int = 0
    num_split_documents: int = 0  # plain texts laid into pieces of max_len; nothing of them is cut

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(document.loss_mask.sum()) for document in self.documents)


def tokenize(conversations: Sequence[Conversation], tokenizer: Tokenizer, max_len: int) -> TokenizedDocuments:
    """Token ids and loss masks of at most `max_len` >= 2 tokens.

    A longer chat ends where the last answer ends that fits whole; only where not even the first one does is it cut
    inside. A plain document is learned whole, with EOS after it, in as many pieces as it takes; each begins with the
    last token of the one before, so that every token but the first is predicted once.

    Everything cut or left out is counted and logged. Raises DataError when nothing is left.
    """
    tokenized = tokenize_part(conversations, tokenizer, max_len)
    check(tokenized, max_len)
    return tokenized


def tokenize_part(conversations: Sequence[Conversation], tokenizer: Tokenizer, max_len: int) -> TokenizedDocuments:
    """`tokenize` that says nothing of what it left out: a worker's share, to be `join`ed and then `check`ed."""
    documents: list[Document] = []
    origins: list[int] = []
    num_truncated_documents = num_truncated_tokens = num_inside_documents = num_inside_tokens = 0
    num_dropped = num_dropped_tokens = num_split_documents = num_rejected = 0
    rejection = ""
    for origin, conversation in enumerate(conversations):
        try:
            token_ids, loss_mask = _encode(conversation, tokenizer)
        except DataError as error:
            num_rejected += 1
            rejection = rejection or f"{conversation.source}: {error}"
            continue
        whole = Document(np.array(token_ids, np.int32), np.array(loss_mask, bool))
        length = len(whole) if conversation.is_document else turn_end(whole.loss_mask, max_len)
        num_cut = len(whole) - length
        is_inside = num_cut > 0 and bool(whole.loss_mask[length - 1 : length + 1].all())
        num_truncated_documents += num_cut > 0
        pieces = _split(Document(whole.token_ids[:length], whole.loss_mask[:length]), max_len)
        # The first token is never predicted, so a mask that holds only it teaches nothing.
        if not pieces[0].loss_mask[1:].any():
            num_dropped += 1
            num_dropped_tokens += len(whole)
            continue
        documents += pieces
        origins += [origin] * len(pieces)
        num_truncated_tokens += num_cut
        num_inside_documents += is_inside
        num_inside_tokens += num_cut * is_inside
        num_split_documents += len(pieces) > 1
    return TokenizedDocuments(
        documents=documents,
        origins=origins,
        num_conversations=len(conversations),
        num_truncated_documents=num_truncated_documents,
        num_truncated_tokens=num_truncated_tokens,
        num_dropped=num_dropped,
        num_rejected=num_rejected,
        rejection=rejection,
        num_inside_documents=num_inside_documents,
        num_inside_tokens=num_inside_tokens,
        num_dropped_tokens=num_dropped_tokens,
        num_split_documents=num_split_documents,
    )


def join(parts: Sequence[TokenizedDocuments]) -> TokenizedDocuments:
    """The documents of all parts in order, their counts added up."""
    counts = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in fields(TokenizedDocuments)
        if field.name.startswith("num_")
    }
    documents = [document for part in parts for document in part.documents]
    starts = accumulate((part.num_conversations for part in parts), initial=0)
    origins = [start + origin for start, part in zip(starts, parts, strict=False) for origin in part.origins]
    rejection = next((part.rejection for part in parts if part.rejection), "")
    return TokenizedDocuments(documents=documents, origins=origins, rejection=rejection, **counts)


def check(tokenized: TokenizedDocuments, max_len: int) -> None:
    """Log what was cut or left out. Raises DataError when nothing is left."""
    if tokenized.num_rejected:
        log.warning(
            "%d conversations left out, the chat template refuses them; %s", tokenized.num_rejected, tokenized.rejection
        )
    if tokenized.num_truncated_documents:
        num_inside, num_inside_tokens = tokenized.num_inside_documents, tokenized.num_inside_tokens
        log.warning(
            "%d chats are longer than %d tokens: %d tokens cut behind the last answer that fits, %d inside the first "
            "answer of %d chats",
            *(tokenized.num_truncated_documents, max_len, tokenized.num_truncated_tokens - num_inside_tokens),
            *(num_inside_tokens, num_inside),
        )
    if tokenized.num_dropped:
        log.warning(
            "%d documents of %d tokens have no loss-bearing token within %d and are left out",
            *(tokenized.num_dropped, tokenized.num_dropped_tokens, max_len),
        )
    if tokenized.num_split_documents:
        log.info("%d plain documents are laid into pieces of %d tokens", tokenized.num_split_documents, max_len)
    if not tokenized.documents:
        raise DataError(
            f"none of {tokenized.num_conversations} conversations has a loss-bearing token within {max_len} tokens; "
            "give a longer --seq-len, or other data (--source)"
        )


def turn_end(
    loss_mask: np.ndarray,  # bool [seq]
    max_len: int,
) -> int:
    """How many tokens of a chat to keep: up to the end of the last answer that fits whole into `max_len`, or where
    there is none `max_len`. All of a chat that fits."""
    if len(loss_mask) <= max_len:
        return len(loss_mask)
    ends = np.flatnonzero(loss_mask & ~np.append(loss_mask[1:], False)) + 1
    fitting = ends[ends <= max_len]
    return int(fitting[-1]) if len(fitting) else max_len


def _split(document: Document, max_len: int) -> list[Document]:
    """Pieces of at most `max_len` that overlap by one token, which bears loss in the first of the two."""
    pieces = []
    for start in range(0, max(1, len(document) - 1), max_len - 1):
        loss_mask = document.loss_mask[start : start + max_len].copy()
        loss_mask[0] &= start == 0
        pieces.append(Document(document.token_ids[start : start + max_len], loss_mask))
    return pieces


def _encode(conversation: Conversation, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    if not conversation.is_document:
        messages, tools = conversation.as_dicts(), conversation.tool_dicts()
        return encode_chat(tokenizer, messages, tools=tools, template_kwargs=conversation.variables())
    token_ids = tokenizer.encode(conversation.messages[0].content)
    bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos_id is not None and token_ids[:2] == [bos_id, bos_id]:  # the text has one, and the tokenizer adds one
        del token_ids[0]
    if eos_id is not None and token_ids[-1:] != [eos_id]:
        token_ids.append(eos_id)
    return token_ids, [True] * len(token_ids)
