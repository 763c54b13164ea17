"""The rows that slots have in a batch.

Over a mesh that cuts sequences a batch has as many rows for each data rank, in the order of the ranks
(`pages.data_rank`). The slots of a rank follow one another from where its part begins; the other rows are padding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specserve.serve.engine.pages import data_rank


@dataclass(frozen=True)
class Batches:
    """The batches that steps are made of: the sizes that there are, and the row of each slot."""

    sizes: tuple[int, ...]  # the smallest first
    num_slots: int
    num_ranks: int  # data ranks: it divides the slots and every size

    def rank_of(self, slot: int) -> int:
        """The data rank that has this slot."""
        return data_rank(slot, self.num_slots, self.num_ranks)

    def spread(self, number: int) -> list[int]:
        """So many slots, as evenly of all data ranks as can be."""
        each = self.num_slots // self.num_ranks
        return [i % self.num_ranks * each + i // self.num_ranks for i in range(number)]

    def most_of_a_rank(self, slots: Sequence[int]) -> int:
        """Return how many of these slots a data rank has, at most."""
        if self.num_ranks == 1:
            return len(slots)
        return max(Counter(map(self.rank_of, slots)).values(), default=0)

    def least_size(self, slots: Sequence[int]) -> int:
        """The rows that a batch of these slots needs: each data rank has room for its own."""
        return self.most_of_a_rank(slots) * self.num_ranks

    def size_for(self, slots: Sequence[int]) -> int:
        """The batch bucket of these slots."""
        least = self.least_size(slots)
        return next(size for size in self.sizes if size >= least)

    def rows(self, slots: Sequence[int], size: int) -> list[int] | slice:
        """The rows of these slots in a batch of this size."""
        if self.num_ranks == 1:
            return slice(len(slots))
        next_row = list(range(0, size, size // self.num_ranks))
        rows = []
        for rank in map(self.rank_of, slots):
            rows.append(next_row[rank])
            next_row[rank] += 1
        return rows

    def fill(self, slots: Sequence[int], values: Any, size: int, rest: int) -> np.ndarray:
        """Return values of slots, [slot, ...], in the rows of a batch, whose other rows are `rest`."""
        values = np.asarray(values)
        found = np.full((size, *values.shape[1:]), rest, values.dtype)
        found[self.rows(slots, size)] = values
        return found

    def pad(self, slots: Sequence[int], size: int = 0) -> tuple[int, ...]:
        """A batch of these slots, of this size or else their bucket's; its other rows are past the last slot."""
        size = size or self.size_for(slots)
        if self.num_ranks == 1:
            return (*slots, *[self.num_slots] * (size - len(slots)))
        return tuple(self.fill(slots, np.array(slots, np.int32), size, self.num_slots).tolist())

    def fill_masks(
        self, slots: Sequence[int], allowed: np.ndarray | None, size: int
    ) -> np.ndarray | None:  # [batch, node, bytes] uint8
        """Return what slots may draw, [slot, node, bytes] uint8, in the rows of a batch; padding may draw anything."""
        return None if allowed is None else self.fill(slots, allowed, size, 255)
