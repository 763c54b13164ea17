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
# A grammar may take a second to compile, for which it lets others run; only other grammars are to wait for it.
_grammars = ThreadPoolExecutor(2, "specserve-http-grammar")
_T = TypeVar("_T")


async def in_thread(work: Callable[..., _T], *args: object, size: int, has_grammar: bool = False) -> _T:
    """Call `work` with these arguments on another thread. `size` is that of what it works on, in bytes or tokens;
    `has_grammar` says that it compiles one."""
    pool = _grammars if has_grammar else _large if size >= LARGE else _small
    call = partial(contextvars.copy_context().run, work, *args)
    return await asyncio.get_running_loop().run_in_executor(pool, call)
