"""Conversations -> token documents -> rows of fixed length with several documents each. Host only, numpy only."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    num_truncated_documents: int  # longer than max_len
    num_truncated_tokens: int  # tokens cut from those
    num_dropped: int  # nothing to learn from: no loss-bearing token within max_len
    num_rejected: int  # the chat template refuses the messages

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(document.loss_mask.sum()) for document in self.documents)


@dataclass(frozen=True, eq=False)
class PackedRows:
    token_ids: np.ndarray  # int32 [row, seq]; 0 at padding
    loss_mask: np.ndarray  # bool [row, seq]
    document_ids: np.ndarray  # int32 [row, seq]; 1, 2, ... within a row, 0 = padding
    position_ids: np.ndarray  # int32 [row, seq]; from 0 within each document
    num_truncated_tokens: int = 0  # of documents longer than a row

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def padding_share(self) -> float:
        """Padding slots over all slots."""
        return float(np.mean(self.document_ids == 0)) if self.document_ids.size else 0.0


def tokenize(conversations: Sequence[Conversation], tokenizer: Tokenizer, max_len: int) -> TokenizedDocuments:
    """Token ids and loss masks, cut to `max_len` tokens. A plain document is learned whole, with EOS after it.

    Everything cut or left out is counted and logged. Raises DataError when nothing is left.
    """
    documents: list[Document] = []
    num_truncated_documents = num_truncated_tokens = num_dropped = 0
    rejections: list[str] = []
    for conversation in conversations:
        try:
            token_ids, loss_mask = _encode(conversation, tokenizer)
        except DataError as error:
            rejections.append(f"{conversation.source}: {error}")
            continue
        num_cut = max(0, len(token_ids) - max_len)
        num_truncated_documents += num_cut > 0
        num_truncated_tokens += num_cut
        document = Document(np.array(token_ids[:max_len], np.int32), np.array(loss_mask[:max_len], bool))
        # The first token is never predicted, so a mask that holds only it teaches nothing.
        if document.loss_mask[1:].any():
            documents.append(document)
        else:
            num_dropped += 1
    if rejections:
        log.warning("%d conversations left out, the chat template refuses them; %s", len(rejections), rejections[0])
    if num_dropped or num_truncated_documents:
        log.warning(
            "%d documents are longer than %d tokens: %d tokens cut; %d documents have no loss-bearing token and are "
            "left out",
            *(num_truncated_documents, max_len, num_truncated_tokens, num_dropped),
        )
    if not documents:
        raise DataError(f"none of {len(conversations)} conversations has a loss-bearing token within {max_len} tokens")
    return TokenizedDocuments(documents, num_truncated_documents, num_truncated_tokens, num_dropped, len(rejections))


def pack(documents: Sequence[Document], seq_len: int) -> PackedRows:
    """Lay documents into rows of `seq_len` by first-fit decreasing. Longer documents are cut, counted and logged."""
    lengths = np.minimum([len(document) for document in documents], seq_len).astype(np.int64)
    order = np.argsort(-lengths, kind="stable")
    rows = _first_fit(lengths[order].tolist(), seq_len)
    num_rows = max(rows, default=-1) + 1
    packed = PackedRows(
        token_ids=np.zeros((num_rows, seq_len), np.int32),
        loss_mask=np.zeros((num_rows, seq_len), bool),
        document_ids=np.zeros((num_rows, seq_len), np.int32),
        position_ids=np.zeros((num_rows, seq_len), np.int32),
        num_truncated_tokens=sum(map(len, documents)) - int(lengths.sum()),
    )
    used, num_inside = [0] * num_rows, [0] * num_rows
    positions = np.arange(seq_len, dtype=np.int32)
    for index, row in zip(order.tolist(), rows, strict=True):
        document, length = documents[index], int(lengths[index])
        slots = slice(used[row], used[row] + length)
        used[row] += length
        num_inside[row] += 1
        packed.token_ids[row, slots] = document.token_ids[:length]
        packed.loss_mask[row, slots] = document.loss_mask[:length]
        packed.document_ids[row, slots] = num_inside[row]
        packed.position_ids[row, slots] = positions[:length]
    if packed.num_truncated_tokens:
        log.warning("%d tokens cut from documents longer than a row of %d", packed.num_truncated_tokens, seq_len)
    return packed


def _encode(conversation: Conversation, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    if not conversation.is_document:
        return tokenizer.encode_chat(conversation.as_dicts())
    token_ids = tokenizer.encode(conversation.messages[0].content)
    eos_id = tokenizer.eos_token_id
    if eos_id is not None and token_ids[-1:] != [eos_id]:
        token_ids.append(eos_id)
    return token_ids, [True] * len(token_ids)


def _first_fit(lengths: Sequence[int], seq_len: int) -> list[int]:
    """The row of each length: the first one that still has room, found in a tree of each half's largest room."""
    num_leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [seq_len] * (2 * num_leaves)  # node i has children 2i and 2i+1; leaf of row r is num_leaves + r
    rows = []
    for length in lengths:
        node = 1
        while node < num_leaves:
            node *= 2
            node += room[node] < length
        rows.append(node - num_leaves)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows
