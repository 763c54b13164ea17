"""Endless shuffled batches of packed rows, exactly resumable: everything follows from (seed, position).

A source of weight w is an endless stream of passes over its rows, of which an epoch takes the next w passes: with
weight 2 every row twice, with 0.5 one half, and the other half in the next epoch. The position counts the rows handed
out to all processes together, so a run may go on with another number of them.
"""

import zlib
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from specserve.data.packing import PackedRows
from specserve.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows that a process trains on in one step."""

    token_ids: np.ndarray  # int32 [batch, seq]
    loss_mask: np.ndarray  # bool [batch, seq]
    document_ids: np.ndarray  # int32 [batch, seq]; 0 = padding
    position_ids: np.ndarray  # int32 [batch, seq]
    row_ids: np.ndarray  # int64 [batch], of the data


class Loader:
    """Hands out rows in a new order each epoch, drawn from (seed, epoch). A batch may span two epochs, so no row is
    skipped."""

    def __init__(self, rows: PackedRows, batch_size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> None:
        """Make the loader. Over all processes a batch has `batch_size` > 0 rows, of which process `shard[0]` of
        `shard[1]` gets its slice: the slices of all, in order, are the batch of a single process. `seed` >= 0.

        Raises DataError when there is no row, ConfigError when the batch cannot be shared out evenly.
        """
        assert batch_size > 0
        assert seed >= 0
        assert 0 <= shard[0] < shard[1]
        if not len(rows):
            raise DataError("there are no rows to load: the data bears no loss; give other data (--source)")
        if batch_size % shard[1]:
            raise ConfigError(f"train.batch_size is {batch_size}, which {shard[1]} processes cannot share evenly")
        self._rows = rows
        self.batch_size = batch_size  # rows of a batch, over all processes
        self._seed = seed
        self._shard = shard
        self._weights = [Fraction(str(weight)) for weight in rows.weights]  # the decimal that was typed, exactly
        self._sizes = np.diff([*rows.source_starts, len(rows)]).tolist()
        self.position = 0  # rows handed out so far, to all processes
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # the epoch whose order is kept, and it
        self._digest = _digest(rows)

    def next_batch(self) -> Batch:
        """Return this process's share of the next batch."""
        batch = self.peek()
        self.position += self.batch_size
        return batch

    @property
    def num_new_steps(self) -> int:
        """The number of batches after which no row is new, where each is used once an epoch."""
        return -(-len(self._rows) // self.batch_size)

    def peek(self, ahead: int = 0) -> Batch:
        """Return this process's share of the batch that comes `ahead` batches after the next one, which stays the
        next."""
        index, count = self._shard
        share = self.batch_size // count
        begin = self.position + ahead * self.batch_size + index * share
        at = np.array([self._row_at(position) for position in range(begin, begin + share)])
        rows = self._rows
        arrays = rows.token_ids[at], rows.loss_mask[at], rows.document_ids[at], rows.position_ids[at]
        return Batch(*arrays, row_ids=at)

    def state(self) -> dict[str, int]:
        """Return all that `restore` needs, as plain integers; it is the same on every process."""
        return {
            "position": self.position,
            "seed": self._seed,
            "num_rows": len(self._rows),
            "rows_digest": self._digest,
        }

    def restore(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken, on however many processes. Raises DataError when it belongs to other data
        or another seed."""
        own = self.state()
        for key, what in (("seed", "seed"), ("num_rows", "number of rows"), ("rows_digest", "digest of rows")):
            if state[key] != own[key]:
                raise DataError(
                    f"cannot resume the data stream: its {what} was {state[key]}, now it is {own[key]}; "
                    "resume with the same data and seed, or start a new run"
                )
        self.position = state["position"]

    @property
    def _epoch_size(self) -> Fraction:
        return sum((w * n for w, n in zip(self._weights, self._sizes, strict=True)), Fraction(0))

    def _start(self, source: int, epoch: int) -> int:
        """Return how many rows of the source all earlier epochs take."""
        return int(epoch * self._weights[source] * self._sizes[source])

    def _row_at(self, position: int) -> int:
        # rounded down by source, an epoch begins at most one row per source before its number does
        epoch = int(position / self._epoch_size)
        while sum(self._start(source, epoch + 1) for source in range(len(self._sizes))) <= position:
            epoch += 1
        if self._order[0] != epoch:
            drawn = np.concatenate([self._drawn(source, epoch) for source in range(len(self._sizes))])
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(drawn))
        return int(self._order[1][position - sum(self._start(source, epoch) for source in range(len(self._sizes)))])

    def _drawn(self, source: int, epoch: int) -> np.ndarray:  # [row of this epoch]
        """The rows that the epoch takes from the source's stream of passes."""
        size, is_whole = self._sizes[source], self._weights[source].denominator == 1
        if not size:
            return np.empty(0, np.int64)
        begin, end = self._start(source, epoch), self._start(source, epoch + 1)
        passes = [
            np.arange(size) if is_whole else np.random.default_rng((self._seed, number, 1 + source)).permutation(size)
            for number in range(begin // size, -(-end // size))
        ]
        offset = begin // size * size
        drawn = np.concatenate([*passes, np.empty(0, np.int64)])[begin - offset : end - offset]
        return self._rows.source_starts[source] + drawn


def _digest(rows: PackedRows) -> int:
    """Return a number by which the rows of a mixture are distinguished from others."""
    digest = zlib.crc32(str((rows.source_starts, rows.weights)).encode())
    for part in (rows.token_ids, rows.loss_mask):
        digest = zlib.crc32(np.ascontiguousarray(part).data, digest)
    return digest
