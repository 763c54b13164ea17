"""The host's bounds of the sequences in their slots, without reading anything back from the device.

Steps are dispatched before the ones before them are read, so these are upper bounds: a sequence is taken to have grown
by the most that the steps in flight can emit, until they are read.
"""

from collections.abc import Callable, Sequence

import numpy as np

from specserve.serve.programs.shapes import Shapes
from specserve.speculative.tree import Tree, depth_of


class SlotBounds:
    """Upper bounds of how long each slot's sequence is and of how much of it the drafter has not read. There is one row
    for each slot, and one more for padding."""

    def __init__(self, shapes: Shapes, max_pending: int) -> None:
        """`max_pending` is the number of tokens that a drafter may leave unread, see `speculative.drafter`."""
        self._shapes, self._max_pending = shapes, max_pending
        num_slots = shapes.num_slots
        self._lens = [0] * (num_slots + 1)  # committed entries, at most
        self._pending = [1] * (num_slots + 1)  # tokens that the drafter has not read, at most
        self._generation = [0] * (num_slots + 1)  # of the slot's sequences

    def begin(self, slot: int, num_cached: int) -> None:
        """Note that a sequence has taken the slot, and that this many of its entries are committed already."""
        self._lens[slot], self._pending[slot] = num_cached, 1
        self._generation[slot] += 1

    def prefilled(self, slot: int, num_tokens: int) -> None:
        """Note that a prefill of this many more tokens of the slot's prompt has been dispatched."""
        self._lens[slot] += num_tokens
        self._pending[slot] = 1

    def caught_up(self, slots: Sequence[int]) -> None:
        """Note that the drafter reads all but the last emitted token."""
        for slot in slots:
            self._pending[slot] = 1

    def stepped(self, slots: Sequence[int], tree: Tree | None, num_steps: int = 1) -> Callable[[np.ndarray], None]:
        """Note that so many steps over this tree have been dispatched, each of which emits 1 to 1 + its depth tokens
        for each of these slots. Returns a function, which the caller calls with the accepted tokens of each slot in all
        of them, [slot], once they are read."""
        depth = depth_of(tree)
        for slot in slots:
            self._lens[slot] += num_steps * (1 + depth)
            self._pending[slot] = 1 + depth if depth else min(self._pending[slot] + num_steps, self._max_pending)
        generations = [self._generation[slot] for slot in slots]

        def on_read(n_accepted: np.ndarray) -> None:
            for slot, generation, accepted in zip(slots, generations, n_accepted.tolist(), strict=False):
                if self._generation[slot] == generation:
                    self._lens[slot] -= num_steps * depth - accepted

        return on_read

    def num_entries(self, slots: Sequence[int]) -> int:
        """Return how many entries the longest sequence in these slots has committed, at most."""
        return max((self._lens[slot] for slot in slots), default=0)

    def must_catch_up(self, slots: Sequence[int], tree: Tree | None, num_steps: int) -> bool:
        """Return whether the draft could not hold what is pending in these slots after so many steps over this tree."""
        if not self._max_pending or not slots:
            return False
        room = self._max_pending - num_steps if tree is None else tree.depth + 1
        return max(self._pending[slot] for slot in slots) > room

    def width_of(self, slots: Sequence[int], num_before: int = 0) -> int:
        """Return the page-table width of the next step of these slots, before which others emit so many tokens at
        most."""
        return self._shapes.widths_for(self.num_entries(slots) + num_before + 1)[0]

    def num_alike(self, slots: Sequence[int], tree: Tree | None, most: int) -> int:
        """Return how many steps, up to `most`, the program of the next one can make at once: those of its width."""
        width, size = self.width_of(slots), 1 + depth_of(tree)
        return max(number for number in range(1, most + 1) if self.width_of(slots, (number - 1) * size) == width)
