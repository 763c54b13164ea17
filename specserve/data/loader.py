"""Endless shuffled batches of packed rows, exactly resumable: everything follows from (seed, position)."""

from dataclasses import dataclass

import numpy as np

from specserve.data.packing import PackedRows
from specserve.errors import DataError


@dataclass(frozen=True, eq=False)
class Batch:
    token_ids: np.ndarray  # int32 [batch, seq]
    loss_mask: np.ndarray  # bool [batch, seq]
    document_ids: np.ndarray  # int32 [batch, seq]; 0 = padding
    position_ids: np.ndarray  # int32 [batch, seq]


class Loader:
    """Rows in a new order each epoch, drawn from (seed, epoch). A batch may span two epochs, so no row is skipped."""

    def __init__(self, rows: PackedRows, batch_size: int, seed: int) -> None:
        """Raises DataError when there is no row. `batch_size` > 0, `seed` >= 0."""
        assert batch_size > 0
        assert seed >= 0
        if not len(rows):
            raise DataError("there are no rows to load")
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._position = 0  # rows handed out so far
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # the epoch whose order is kept, and it

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._position / len(self._rows)

    @property
    def batches_per_epoch(self) -> float:
        return len(self._rows) / self._batch_size

    def next_batch(self) -> Batch:
        positions = range(self._position, self._position + self._batch_size)
        index = np.array([self._row_at(position) for position in positions])
        self._position += self._batch_size
        rows = self._rows
        return Batch(rows.token_ids[index], rows.loss_mask[index], rows.document_ids[index], rows.position_ids[index])

    def state(self) -> dict[str, int]:
        """All that `restore` needs, as plain integers."""
        return {"position": self._position, "seed": self._seed, "num_rows": len(self._rows)}

    def restore(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken. Raises DataError when it belongs to other data or another seed."""
        own = self.state()
        for key, what in (("seed", "seed"), ("num_rows", "number of rows")):
            if state[key] != own[key]:
                raise DataError(
                    f"cannot resume the data stream: its {what} was {state[key]}, now it is {own[key]}; "
                    "resume with the same data and seed, or start a new run"
                )
        self._position = state["position"]

    def _row_at(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._rows))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)))
        return int(self._order[1][offset])
