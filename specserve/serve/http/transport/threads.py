"""Threads for work that would hold the event loop, and with it every other client's stream; and calls from other
threads back to the event loop."""

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from specserve.errors import CapacityError
from specserve.serve.engine.admission import Queue

LARGE = 2**16  # bytes of a body, or tokens, from which on work waits for other large work alone
MAX_GRAMMARS = 1024  # requests that wait for their grammars, divided among the clients
GRAMMAR_SECONDS = 30.0  # a request waits at most so long for its grammar's turn

# Threads take turns, some milliseconds each, so every thread at work makes the event loop wait for its own turn longer.
_small = ThreadPoolExecutor(3, "specserve-http")
_large = ThreadPoolExecutor(1, "specserve-http-large")
_T = TypeVar("_T")


async def in_thread(work: Callable[..., _T], *args: object, size: int) -> _T:
    """Call `work` with these arguments on another thread. `size` is that of its input, in bytes or tokens."""
    pool = _large if size >= LARGE else _small
    return await asyncio.get_running_loop().run_in_executor(pool, _here(work, *args))


async def in_grammar_queue(work: Callable[[], _T], client: str) -> _T:
    """Call `work`, which compiles a grammar, on another thread when its turn comes. Raises CapacityError where too many
    wait already, or where the turn comes too late."""
    return await asyncio.wrap_future(_grammars.put(client, _here(work)))


class _GrammarQueue:
    """Calls that compile grammars. Each may take seconds, in which other threads run, and waits for other grammars
    alone. Clients take turns."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "specserve-http-grammar")
        self._places = Queue(MAX_GRAMMARS)
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any], float]]] = {}  # in the order of turns
        self._lock = threading.Lock()

    def put(self, client: str, work: Callable[[], _T]) -> Future[_T]:
        done: Future[_T] = Future()
        with self._lock:
            self._places.take(client, ())
            self._waiting.setdefault(client, deque()).append((done, work, time.monotonic()))
        self._threads.submit(self._run_next)
        return done

    def _run_next(self) -> None:
        with self._lock:
            client, works = next(iter(self._waiting.items()))
            del self._waiting[client]
            done, work, since = works.popleft()
            if works:
                self._waiting[client] = works  # behind all others
        try:
            if done.set_running_or_notify_cancel():
                if time.monotonic() - since > GRAMMAR_SECONDS:
                    raise CapacityError(
                        f"other grammars have been compiled for {GRAMMAR_SECONDS:g} s, and this one not yet; try again "
                        "later"
                    )
                done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        finally:
            with self._lock:
                self._places.give_back(client)


_grammars = _GrammarQueue(2)


def _here(work: Callable[..., _T], *args: object) -> Callable[[], _T]:
    """Return the call, with the caller's context variables."""
    context = contextvars.copy_context()
    return lambda: context.run(work, *args)


class CallQueue:
    """The calls that wait for one event loop. All calls that are posted before the loop gets to them wake it once. A
    step of the engine has deltas for every stream, and each wake-up is a system call for which the engine's thread
    releases the interpreter's lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._is_due = False

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop make this call. Raises RuntimeError where the loop is closed."""
        self._calls.append(call)
        if not self._is_due:
            self._is_due = True
            self.loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_due = False  # before anything is taken out, so that what is posted from now on has its own wake-up
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            if self._calls:  # a call failed, which the loop's own handler logs; the others are made all the same
                self.loop.call_soon(self._run)
