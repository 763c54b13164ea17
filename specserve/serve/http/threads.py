"""A few threads of their own for work that would hold the event loop, and with it every other client's stream."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

LARGE = 2**16  # bytes of a body, or tokens, from which on work waits for other large work alone

# Threads take turns, some milliseconds each, so every thread at work makes the event loop wait for its own turn longer.
_small = ThreadPoolExecutor(3, "specserve-http")
_large = ThreadPoolExecutor(1, "specserve-http-large")
_T = TypeVar("_T")


async def in_thread(work: Callable[..., _T], *args: object, size: int) -> _T:
    """Call `work` with these arguments on another thread. `size` is that of its input, in bytes or tokens."""
    pool = _large if size >= LARGE else _small
    call = partial(contextvars.copy_context().run, work, *args)
    return await asyncio.get_running_loop().run_in_executor(pool, call)
