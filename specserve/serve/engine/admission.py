"""The queue's places, and how they are shared out among the clients that wait."""

from collections import Counter
from collections.abc import Iterable

from specserve.errors import CapacityError


class Queue:
    """A count of each client's sequences, from their submission to their end. It knows nothing of their order."""

    def __init__(self, max_queue: int) -> None:
        self.num_open = 0  # submitted and not ended
        self._max_queue = max_queue
        self._num_open: Counter[str] = Counter()

    def take(self, client: str, running: Iterable[str]) -> None:
        """Count one sequence more of a client; `running` are the clients of those in a slot. Raises CapacityError where
        the client has as many waiting as it may: `max_queue` over the number of clients that wait. So a client that
        waits alone may fill the queue, and one that comes when others have filled it still finds its share."""
        waiting = self._num_open - Counter(running)  # none below zero
        num_clients = max(1, len(waiting))
        share = max(1, self._max_queue // num_clients)
        if waiting[client] >= share:
            whose = "" if num_clients == 1 else f" of this client, whose share it is among {num_clients} that wait"
            raise CapacityError(f"{waiting[client]} requests are waiting already{whose}; try again later")
        self._num_open[client] += 1
        self.num_open += 1

    def give_back(self, client: str) -> None:
        """Count one sequence less of a client: it has ended."""
        self.num_open -= 1
        self._num_open[client] -= 1
        if not self._num_open[client]:
            del self._num_open[client]
