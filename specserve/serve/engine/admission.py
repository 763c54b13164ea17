"""The way of requests from other threads to the engine's, and how the queue's places are shared out among clients."""

import queue
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from specserve.errors import CapacityError
from specserve.serve.requests.request import Request

STOPPING = "the engine is stopping, and has changed nothing; ask again later or elsewhere"


class Queue:
    """A count of each client's sequences, from their submission to their end, and the requests that the engine's thread
    has yet to take over. It knows nothing of their order. Other threads may `put`, and read what is public."""

    def __init__(self, max_queue: int) -> None:
        self.num_open = 0  # submitted and not ended
        self.is_closed = False
        self._max_queue = max_queue
        self._num_open: Counter[str] = Counter()
        self._arrived: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a finalizer that ends the engine may run in the midst of a call

    def put(self, request: Request, running: Iterable[str]) -> None:
        """Submit a request, `running` as in `take`. Raises CapacityError where its client has as many waiting as it
        may, or where the queue is closed."""
        with self._lock:
            if self.is_closed:
                raise CapacityError(STOPPING)
            self.take(request.client, running)
            self._arrived.put(request)

    def close(self) -> None:
        """Take no more requests. Those that are there stay."""
        with self._lock:
            self.is_closed = True

    def arrived(self) -> Iterator[Request]:
        """Yield the requests that have come since the last call."""
        while not self._arrived.empty():
            yield self._arrived.get_nowait()

    def take(self, client: str, running: Iterable[str]) -> None:
        """Count one sequence more of a client; `running` are the clients of those in a slot. Raises CapacityError where
        the client has as many waiting as it may: `max_queue` over the number of clients that wait. So a client that
        waits alone may fill the queue, and one that comes when others have filled it still finds its share."""
        waiting = self._num_open - Counter(running)  # none below zero
        num_clients = max(1, len(waiting))
        share = max(1, self._max_queue // num_clients)
        if waiting[client] >= share:
            whose = ""
            if num_clients > 1:
                whose = f" of this client, whose share it is among {num_clients} that wait"
            raise CapacityError(f"{waiting[client]} requests are waiting already{whose}; try again later")
        self._num_open[client] += 1
        self.num_open += 1

    def give_back(self, client: str) -> None:
        """Count one sequence less of a client: it has ended."""
        with self._lock:
            self.num_open -= 1
            self._num_open[client] -= 1
            if not self._num_open[client]:
                del self._num_open[client]
