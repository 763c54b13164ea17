"""The way from the engine's thread to one HTTP reply: it collects the deltas of all sequences of a request, whole or
as a stream.

Has the hop between threads, and the rule that all sequences of a client end when its connection does. Knows nothing of
bodies and fields (`bodies`), of the meaning of text (`formats`) or of how a reply is spelled (`completions`).
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fastapi import Request as HttpRequest
from fastapi.sse import KEEPALIVE_COMMENT

from specserve.errors import CapacityError, RequestError, SpecServeError
from specserve.serve.engine.interface import EngineLike
from specserve.serve.http.admin.metrics import Metrics, SequenceMetrics
from specserve.serve.http.formats.reader import AnswerParser, MakeParser, Part, PlainText
from specserve.serve.http.openai.replies import (
    Answer,
    Ending,
    ReplyFormat,
    ReplyMetrics,
    RequestMetrics,
    TokenOrigin,
    Usage,
)
from specserve.serve.http.transport.errors import INTERNAL_ERROR, EngineFailureError, error_body
from specserve.serve.http.transport.guard import client_of, current_request_id
from specserve.serve.http.transport.threads import CallQueue, in_grammar_queue, in_thread
from specserve.serve.http.transport.tracing import Tracing
from specserve.serve.requests.request import Delta, FinishReason, Request, SamplingParams, SpeculationStats
from specserve.speculative.acceptance import Acceptance

logger = logging.getLogger(__name__)

HEALTH_CHECK_SECONDS = 1.0
_TICK = (-1, Delta())  # among the arrivals
KEEPALIVE_SECONDS = 15.0
ARRIVALS_AT_ONCE = 16  # that are spelled on the event loop, some tenths of a millisecond each
READY_BYTES = 2**16  # of events, which are sent although more are ready


ENDINGS: dict[FinishReason | None, Ending | None] = {  # of a sequence that goes on, or ends without an error
    None: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}


class ClientGoneError(Exception):
    """The client closed the connection; all its sequences have been cancelled."""


class WorkOptions(Protocol):
    """The interface of a body: its options of how it is to be answered."""

    stream: bool
    priority: int
    cache_salt: str

    @property
    def may_learn(self) -> bool:
        """Return whether a draft head may learn from the answers, on a server that has one learn."""
        ...

    def reword(self, error: RequestError) -> RequestError:
        """Return an error of the engine under the name that the client of this endpoint sent."""
        ...


Hear = Callable[[Delta], None]  # takes all deltas of one sequence, on the event loop
Listen = Callable[[Request, WorkOptions], Hear | None]  # None: it has no interest in a sequence


@dataclass(frozen=True)
class Work:
    """The work of one checked body: the prompts and options for the engine, and how the answers are read and
    spelled."""

    body: WorkOptions
    params: SamplingParams
    prompts: Sequence[Sequence[int]]
    reply_format: ReplyFormat
    make_parser: MakeParser = PlainText  # one for each sequence
    has_origins: bool = False  # answers report where their tokens come from
    lora: str = ""  # the adapter that answers; empty: the target alone
    request_id: str | None = None  # the client's own


@dataclass(eq=False)
class _Choice:
    """A sequence of a reply as its client sees it: the engine's request, and the output so far."""

    index: int
    request: Request
    metrics: SequenceMetrics
    is_first: bool  # of its prompt's
    parser: AnswerParser
    has_origins: bool
    names_version: bool
    hear: Hear | None
    has_calls: bool = False
    num_tokens: int = 0
    waiting_ids: Sequence[int] = ()  # of tokens that a stream has not sent yet
    stats: SpeculationStats | None = None  # None until it has ended

    def piece(self, delta: Delta) -> Answer:
        """Return a delta as a piece of the answer."""
        part = self.parser.push(delta.text, delta.num_chars)
        if delta.finish_reason is not None:
            part += self.parser.finish()
        self.has_calls = self.has_calls or bool(part.tool_calls)
        reason = ENDINGS[delta.finish_reason]
        if reason == "stop" and self.has_calls:
            reason = "tool_calls"
        return Answer(
            self.index,
            part,
            reason,
            delta.logprobs,
            prompt=delta.prompt,
            hidden_states=delta.hidden_states,
            stop_reason=delta.stop_reason,
            token_ids=(*self.waiting_ids, *delta.token_ids),
            prompt_ids=self.request.prompt_ids,
            stats=delta.stats,
            version=delta.stats.version if delta.stats is not None and self.names_version else "",
            origins=self._origins([delta]),
            tree=delta.tree,
        )

    def whole(self, deltas: Sequence[Delta]) -> Answer:
        """Return all deltas as one answer."""
        everything = dataclasses.replace(
            deltas[-1],
            text="".join(delta.text for delta in deltas),
            logprobs=tuple(item for delta in deltas for item in delta.logprobs),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            prompt=next((delta.prompt for delta in deltas if delta.prompt), ()),
            hidden_states=next((delta.hidden_states for delta in deltas if delta.hidden_states is not None), None),
            num_chars=tuple(num for delta in deltas for num in delta.num_chars),
        )
        return dataclasses.replace(self.piece(everything), origins=self._origins(deltas))

    def _origins(self, deltas: Sequence[Delta]) -> Sequence[TokenOrigin]:
        if not self.has_origins:
            return ()
        return [origin for delta in deltas for origin in zip(delta.token_ids, delta.draft_depths, strict=True)]


class Generation:
    """The sequences of one HTTP request, `params.n` of each prompt. Make it on the event loop, `submit` it, then
    consume `reply` or `stream` once. Choices are numbered prompt by prompt."""

    def __init__(
        self,
        engine: EngineLike,
        metrics: Metrics,
        http: HttpRequest,
        work: Work,
        *,
        calls: CallQueue,
        request_metrics: RequestMetrics,
        names_version: bool,
        tracing: Tracing | None = None,
        listen: Listen | None = None,
    ) -> None:
        """Prepare the work of one HTTP request. `request_metrics`: what the reply reports of its one sequence;
        `names_version`: whether it names the version of the weights; `listen` is asked for a listener of each
        sequence."""
        self._engine, self._metrics, self._http, self._work = engine, metrics, http, work
        self._request_metrics, self._names_version = request_metrics, names_version
        self._listen = listen
        self._tracing, self._parent = tracing, tracing.parent(http.headers) if tracing else None
        self._request_id = current_request_id()
        self._loop, self._calls = asyncio.get_running_loop(), calls
        self._arrivals: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()  # None: the client has gone
        self._choices: list[_Choice] = []
        self._early: list[tuple[int, Delta]] | None = []  # arrivals while sequences are still submitted
        self._is_cancelled = False
        self._client = client_of(http.scope)

    async def submit(self) -> None:
        """Hand all sequences to the engine, off the event loop. Raises what `engine.submit` raises, and
        ClientGoneError; then no sequence is left behind."""
        self._metrics.count_request(self._work.params)
        # Watched from here on, not from the first read: a client can leave before its turn comes or its stream starts.
        self._watch = asyncio.create_task(self._watch_client())
        self._tick()
        grammar = self._work.params.grammar
        try:
            if grammar is None or self._engine.knows_grammar(grammar):
                await in_thread(self._submit_all, size=self._num_prompt_tokens())
            else:
                await in_grammar_queue(self._submit_all, self._client)
        except BaseException:
            self._end()
            raise
        finally:
            early, self._early = self._early or [], None
            for arrival in early:
                self._receive(*arrival)

    def _submit_all(self) -> None:
        self._check_client()
        body, each = self._work.body, self._work.params.choices()
        name = self._work.request_id or self._request_id
        for token_ids, own in itertools.product(self._work.prompts, each):
            number = len(self._choices)
            request = self._engine.submit(
                token_ids,
                own,
                partial(self._on_delta, number),
                priority=body.priority,
                cache_salt=body.cache_salt,
                request_id=name and f"{name}-{number}",
                client=self._client,
                lora=self._work.lora,
            )
            counted = self._metrics.start_sequence(len(token_ids), self._work.lora)
            is_first, parser = number % len(each) == 0, self._work.make_parser()
            hear = self._listen(request, body) if self._listen else None
            named = self._work.has_origins, self._names_version, hear
            self._choices.append(_Choice(number, request, counted, is_first, parser, *named))
            self._check_client()

    def _check_client(self) -> None:
        """Raises ClientGoneError where the client has gone while its sequences are submitted."""
        if self._is_cancelled:
            self.cancel()
            raise ClientGoneError

    def cancel(self) -> None:
        """Stop every sequence, also while they are submitted. Safe at any time, also after the end."""
        self._is_cancelled = True
        for choice in self._choices:
            choice.request.cancel()

    def _end(self) -> None:
        self.cancel()
        self._watch.cancel()
        self._ticker.cancel()

    async def reply(self) -> bytes:
        """Return the whole reply. Raises ClientGoneError, CapacityError or EngineFailureError."""
        arrived: list[list[Delta]] = [[] for _ in self._choices]
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                before = arrived[index]
                if before and before[-1].tree is not None:  # only the last step's is reported
                    before[-1] = dataclasses.replace(before[-1], tree=None)
                before.append(delta)

        def spell() -> bytes:
            answers = [choice.whole(deltas) for choice, deltas in zip(self._choices, arrived, strict=True)]
            return self._work.reply_format.whole(answers, self._usage())

        # Always: what it takes depends on texts, calls and log-probabilities; and one hop to a thread is little beside
        # the two by which the request was read and submitted.
        return await in_thread(spell, size=self._num_tokens() + self._num_prompt_tokens())

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the reply as server-sent events, together those that are ready in one turn of the event loop: each is
        one write. An error after the start becomes an event."""
        reply_format, ready, failure = self._work.reply_format, b"", None
        try:
            async with contextlib.aclosing(self._events()) as events:
                async for each in events:
                    ready += each
                    if ready and (self._arrivals.empty() or len(ready) >= READY_BYTES):
                        yield ready
                        ready = b""
            ready += b"".join(await _spelled(lambda: reply_format.end(self._usage()), self._num_tokens()))
        except ClientGoneError:
            return
        except RequestError as error:
            failure = error_body(str(error), "invalid_request_error", param=error.param)
        except SpecServeError as error:
            failure = error_body(str(error), "server_error")
        except Exception:
            logger.exception("a stream failed")
            failure = error_body(INTERNAL_ERROR, "server_error")
        yield ready if failure is None else ready + b"".join(reply_format.failure(failure))

    async def _events(self) -> AsyncGenerator[bytes, None]:
        reply_format = self._work.reply_format
        started: set[int] = set()
        last_time = self._loop.time()
        async with contextlib.aclosing(self._deltas(is_idle_reported=True)) as deltas:
            async for index, delta in deltas:
                if index < 0:
                    if self._loop.time() - last_time >= KEEPALIVE_SECONDS:
                        last_time = self._loop.time()
                        yield KEEPALIVE_COMMENT
                    yield b""  # text that is ready does not wait for the next event
                    continue
                if index not in started:
                    started.add(index)
                    last_time = self._loop.time()
                    start = Answer(index, Part(), None, prompt_ids=self._choices[index].request.prompt_ids)
                    begin = partial(reply_format.begin, start, self._usage)
                    for each in await _spelled(begin, len(start.prompt_ids)):
                        yield each
                choice = self._choices[index]
                answer = choice.piece(delta)
                # A step may add tokens and no text yet: in the middle of a character, or of what may be a stop string.
                # Their ids go with the next text.
                has_news = answer.part or answer.logprobs or answer.prompt or answer.origins or answer.tree
                if has_news or answer.finish_reason is not None:
                    choice.waiting_ids = ()
                    last_time = self._loop.time()  # of bytes: tokens may come for minutes of which none is shown
                    spell = partial(reply_format.piece, answer, self._usage)
                    size = len(answer.prompt) + choice.num_tokens
                    for each in await _spelled(spell, size) if reply_format.is_long else spell():
                        yield each
                else:
                    choice.waiting_ids = answer.token_ids
                    yield b""

    def _num_prompt_tokens(self) -> int:
        return sum(map(len, self._work.prompts))

    def _num_tokens(self) -> int:
        """Return how many tokens have come so far."""
        return sum(choice.num_tokens for choice in self._choices)

    async def _deltas(self, *, is_idle_reported: bool = False) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (choice, delta) until every sequence has ended. With `is_idle_reported` also (-1, empty delta), about
        once a second."""
        num_open, num_taken = len(self._choices), 0
        try:
            while num_open:
                arrival = await self._arrivals.get()
                num_taken += 1
                if num_taken % ARRIVALS_AT_ONCE == 0:
                    await asyncio.sleep(0)  # other requests' turn, which a queue that is not empty does not give them
                if arrival is None:
                    raise ClientGoneError
                index, delta = arrival
                if index < 0:
                    if not self._engine.is_healthy:
                        raise EngineFailureError("the engine has stopped; the server's log has the details")
                    if is_idle_reported:
                        yield arrival
                    continue
                choice = self._choices[index]
                _check(choice.request, delta, can_abort=self._work.reply_format.can_abort)
                choice.num_tokens += len(delta.token_ids)
                choice.stats = delta.stats
                num_open -= delta.finish_reason is not None
                yield arrival
        finally:
            self._end()

    def _usage(self) -> Usage:
        """Return the token counts so far."""
        first = [choice for choice in self._choices if choice.is_first]
        total = sum((choice.stats for choice in self._choices if choice.stats is not None), Acceptance())
        return Usage(
            num_prompt=sum(len(choice.request.prompt_ids) for choice in first),
            num_cached=sum(choice.stats.num_cached_tokens for choice in first if choice.stats is not None),
            num_completion=self._num_tokens(),
            num_accepted=total.num_accepted,
            num_rejected=total.num_draft_tokens - total.num_accepted,
            num_reasoning=sum(choice.parser.num_reasoning_tokens for choice in self._choices),
            metrics=self._metrics_of_one(),
        )

    def _metrics_of_one(self) -> ReplyMetrics | None:
        """Return the `metrics` object at the end. There is none for several sequences, because they would have to
        share it."""
        [first, *others] = self._choices
        return None if others or first.stats is None else self._request_metrics.spell(first.stats, first.num_tokens)

    def _on_delta(self, index: int, delta: Delta) -> None:
        """Take a delta, on the engine's thread."""
        try:
            self._calls.post(partial(self._receive, index, delta))
        except RuntimeError:  # the event loop is closed: the server has stopped, and no client waits
            self.cancel()

    def _receive(self, index: int, delta: Delta) -> None:
        # This is counted here and not where deltas are read: a sequence whose client left still ends, and still counts.
        if self._early is not None:
            self._early.append((index, delta))
            return
        choice = self._choices[index]
        choice.metrics.observe(delta)
        if choice.hear is not None:
            choice.hear(delta)
        if delta.finish_reason is not None and self._tracing and self._parent is not None:
            self._tracing.end(
                *(self._parent, self._request_id, choice.request, delta),
                num_tokens=choice.metrics.num_tokens,
                model=self._work.lora or self._engine.model_name,
            )
        self._arrivals.put_nowait((index, delta))

    def _tick(self) -> None:
        """Wake the reader now and then to look at the engine's health, because a dead engine sends nothing."""
        self._arrivals.put_nowait(_TICK)
        self._ticker = self._loop.call_later(HEALTH_CHECK_SECONDS, self._tick)

    async def _watch_client(self) -> None:
        while (await self._http.receive())["type"] != "http.disconnect":
            pass
        self.cancel()
        self._ticker.cancel()  # there may be no reader any more
        self._arrivals.put_nowait(None)


async def _spelled(spell: Callable[[], Iterable[bytes]], size: int) -> list[bytes]:
    """Return the events of a part of a stream that may be long: the beginning and the end may repeat the request, or
    the whole answer."""
    return await in_thread(lambda: list(spell()), size=size)


def is_of(sequence: Request, request_id: str) -> bool:
    """Return whether a sequence is of the HTTP request of that id, by the name that it was submitted under."""
    return sequence.request_id.rpartition("-")[0] == request_id


def _check(request: Request, delta: Delta, *, can_abort: bool) -> None:
    if delta.finish_reason is FinishReason.ERROR and delta.is_refused:
        raise RequestError(str(delta.error))
    if delta.finish_reason is FinishReason.ERROR:
        logger.error("request %r failed: %s", request.request_id, delta.error)
        raise EngineFailureError("the engine failed on this request; the server's log has the details")
    if delta.finish_reason is FinishReason.CANCELLED or (delta.finish_reason is FinishReason.ABORTED and not can_abort):
        raise CapacityError(delta.error or "the server is stopping")
