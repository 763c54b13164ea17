"""Finished sequences, for callers that wait: what the deltas of each add up to."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from specserve.serve.request import Delta, FinishReason, SpeculationStats, TokenLogprobs


@dataclass(frozen=True)
class Completion:
    """A finished sequence, for callers that wait (`Engine.generate`)."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: SpeculationStats
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    seconds_to_first: float = 0.0  # since it was submitted
    seconds: float = 0.0


class Collector:
    """Gathers the deltas of `count` sequences. `on_done` is called on the engine's thread as each ends."""

    def __init__(self, count: int, on_done: Callable[[int, Completion], None]) -> None:
        self._done: list[Completion | None] = [None] * count
        self._on_done = on_done
        self._finished = threading.Semaphore(0)

    def listener(self, i: int) -> Callable[[Delta], None]:
        """What sequence i calls with each of its deltas."""
        token_ids: list[int] = []
        text: list[str] = []
        logprobs: list[TokenLogprobs] = []
        start = time.monotonic()
        first = 0.0

        def on_delta(delta: Delta) -> None:
            nonlocal first
            now = time.monotonic() - start
            if delta.token_ids and not token_ids:
                first = now
            token_ids.extend(delta.token_ids)
            text.append(delta.text)
            logprobs.extend(delta.logprobs)
            if delta.finish_reason is not None:
                completion = Completion(
                    tuple(token_ids),
                    "".join(text),
                    delta.finish_reason,
                    delta.stats or SpeculationStats(),
                    tuple(logprobs),
                    delta.error,
                    first,
                    now,
                )
                self._done[i] = completion
                try:
                    self._on_done(i, completion)
                finally:
                    self._finished.release()

        return on_delta

    def wait(self) -> list[Completion]:
        """All of them, in order."""
        for _ in self._done:
            self._finished.acquire()
        return [completion for completion in self._done if completion is not None]
