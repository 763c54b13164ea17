"""The gathering of the deltas of sequences into whole answers, for callers that wait for them."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from specserve.serve.requests.request import Delta, DraftTree, PromptToken, Request, SpeculationStats, TokenLogprobs


@dataclass(frozen=True)
class CompletionStats(SpeculationStats):
    """The acceptance of one answer, and how long it took."""

    seconds_to_first_token: float = 0.0  # both since it was submitted, so waiting for a slot counts
    seconds: float = 0.0


@dataclass(frozen=True)
class CompletionOutput:
    """An answer to a prompt."""

    index: int  # among the `n` of its prompt
    text: str  # empty without a tokenizer
    token_ids: tuple[int, ...]  # with the one that ended it
    finish_reason: str  # "stop", "length", "abort", "cancelled", or "error": then `error` says why
    stats: CompletionStats
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token, when they were asked for
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None: something else did
    tree: DraftTree | None = None  # of the last step, when it was asked for and one was proposed
    error: str | None = None
    prompt: tuple[PromptToken, ...] = ()  # how likely its prompt's tokens were, when that was asked for
    hidden_states: np.ndarray | None = None  # of its prompt, as `Delta` has them, when they were asked for

    @property
    def weight_versions(self) -> tuple[str, ...]:
        """The version of the weights that each token is of."""
        starts = [*self.stats.versions, (len(self.token_ids), "")]
        return tuple(name for (start, name), (end, _) in itertools.pairwise(starts) for _ in range(start, end))


class Collector:
    """Gathers the deltas of `count` sequences into answers, whose `index` is 0. `on_done` is called on the engine's
    thread as each ends, with the sequence's number and its answer."""

    def __init__(self, count: int, on_done: Callable[[int, CompletionOutput], None]) -> None:
        self._done: list[CompletionOutput | None] = [None] * count
        self._on_done = on_done
        self._finished = threading.Semaphore(0)

    def listener(self, i: int) -> Callable[[Delta], None]:
        """Return the listener of sequence i, for `Engine.submit`. Its seconds count from here."""
        token_ids: list[int] = []
        text: list[str] = []
        logprobs: list[TokenLogprobs] = []
        prompt: list[PromptToken] = []
        states: list[np.ndarray] = []
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
            prompt.extend(delta.prompt)
            states.extend([] if delta.hidden_states is None else [delta.hidden_states])
            if delta.finish_reason is not None:
                stats = vars(delta.stats or SpeculationStats())
                completion = CompletionOutput(
                    index=0,
                    text="".join(text),
                    token_ids=tuple(token_ids),
                    finish_reason=delta.finish_reason.value,
                    stats=CompletionStats(**stats, seconds_to_first_token=first, seconds=now),
                    logprobs=tuple(logprobs),
                    stop_reason=delta.stop_reason,
                    tree=delta.tree,
                    error=delta.error,
                    prompt=tuple(prompt),
                    hidden_states=states[0] if states else None,
                )
                self._done[i] = completion
                try:
                    self._on_done(i, completion)
                finally:
                    self._finished.release()

        return on_delta

    def give_up(self) -> None:
        """Let `wait` end now, with the answers that are there."""
        for _ in self._done:
            self._finished.release()

    def wait(self) -> list[CompletionOutput]:
        """Wait until all sequences have ended. Returns the answers in the sequences' order."""
        for _ in self._done:
            self._finished.acquire()
        return [completion for completion in self._done if completion is not None]


def answer_all(
    submit: Callable[[int, Callable[[Delta], None]], Request],  # a sequence by its number, and its listener
    count: int,
    on_done: Callable[[int, CompletionOutput], None],
    *,
    most: int,  # sequences that are submitted and have not ended, at any time
) -> list[CompletionOutput]:
    """Submit so many sequences and wait for their answers, which come back in order. `on_done` is called on the
    engine's thread as each ends. An interrupt, or a sequence that is refused, cancels all of them."""
    window = threading.Semaphore(most)

    def ended(i: int, completion: CompletionOutput) -> None:
        window.release()
        on_done(i, completion)

    collector, is_over = Collector(count, ended), threading.Event()
    requests: list[Request] = []

    def submit_all() -> None:
        for i in range(count):
            window.acquire()
            if is_over.is_set():
                return
            request = submit(i, collector.listener(i))
            requests.append(request)
            if is_over.is_set():  # the thread that has set it may have gone through the list before
                request.cancel()

    # an interrupt reaches the main thread alone, so none falls between a submission and its place in the list
    with ThreadPoolExecutor(1) as pool:
        try:
            submitting = pool.submit(submit_all)
            submitting.add_done_callback(lambda done: collector.give_up() if done.exception() else None)
            completions = collector.wait()
            submitting.result()
            return completions
        except BaseException:
            is_over.set()
            window.release()
            for request in requests:
                request.cancel()
            raise
