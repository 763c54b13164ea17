"""Token documents -> rows of fixed length with several documents each. Host only, numpy only."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.data.documents import Document

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of one length, each with several documents side by side and padding behind them."""

    token_ids: np.ndarray  # int32 [row, seq]; 0 at padding
    loss_mask: np.ndarray  # bool [row, seq]
    document_ids: np.ndarray  # int32 [row, seq]; 1, 2, ... within a row, 0 = padding
    position_ids: np.ndarray  # int32 [row, seq]; from 0 within each document
    num_truncated_tokens: int = 0  # of documents longer than a row
    source_starts: tuple[int, ...] = (0,)  # the rows of source i begin here, those of the next one behind them
    weights: tuple[float, ...] = (1.0,)  # how many times per epoch each row of source i is used

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def padding_share(self) -> float:
        """The share of all positions that are padding."""
        if not self.document_ids.size:
            return 0.0
        return float(np.mean(self.document_ids == 0))


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
        place = slice(used[row], used[row] + length)
        used[row] += length
        num_inside[row] += 1
        packed.token_ids[row, place] = document.token_ids[:length]
        packed.loss_mask[row, place] = document.loss_mask[:length]
        packed.document_ids[row, place] = num_inside[row]
        packed.position_ids[row, place] = positions[:length]
    if packed.num_truncated_tokens:
        log.warning("%d tokens cut from documents longer than a row of %d", packed.num_truncated_tokens, seq_len)
    return packed


def stack(parts: Sequence[PackedRows], weights: Sequence[float]) -> PackedRows:
    """Put the rows of several sources one source after the other: documents of two sources never share a row."""
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    return PackedRows(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        loss_mask=np.concatenate([part.loss_mask for part in parts]),
        document_ids=np.concatenate([part.document_ids for part in parts]),
        position_ids=np.concatenate([part.position_ids for part in parts]),
        num_truncated_tokens=sum(part.num_truncated_tokens for part in parts),
        source_starts=tuple(starts.tolist()),
        weights=tuple(weights),
    )


def _first_fit(lengths: Sequence[int], seq_len: int) -> list[int]:
    """Return the row for each length: the first one that still has room, found in a tree of each half's largest
    room."""
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
