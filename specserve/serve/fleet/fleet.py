"""Several engines as one: the interface that the HTTP layer needs (`interface.EngineLike`), over replicas that Ray
Serve runs. A fleet knows the states that its replicas report, sends each request to the replica that the router
chooses, and swaps heads."""

import asyncio
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Unpack

from specserve.errors import CapacityError, CheckpointError, ConfigError, RequestError, SpecServeError
from specserve.serve.engine.interface import DraftInfo, EngineStats
from specserve.serve.engine.pages import prefix_digests
from specserve.serve.requests.request import Delta, FinishReason, GrammarSpec, Request, RequestOptions, SamplingParams
from specserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at what the replicas say of themselves
ANSWER_SECONDS = 30.0  # for a replica to take a request
TRIES = 3  # replicas that may end before one of them has begun to answer
_ERRORS = {error.__name__: error for error in (CapacityError, CheckpointError, ConfigError, RequestError)}


@dataclass(frozen=True)
class Refused:
    """An error of a replica, as data: exceptions do not travel between processes as they are."""

    kind: str
    message: str
    param: str | None

    @classmethod
    def of(cls, error: SpecServeError) -> "Refused":
        return cls(type(error).__name__, str(error), error.param if isinstance(error, RequestError) else None)

    @property
    def error(self) -> SpecServeError:
        if self.kind == RequestError.__name__:
            return RequestError(self.message, param=self.param)
        return _ERRORS.get(self.kind, SpecServeError)(self.message)


@dataclass(frozen=True)
class Taken:
    """A replica's promise that it answers a request."""

    version: int  # of its head, when it took the request
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class ReplicaState:
    """The state that a replica reports."""

    replica: str  # its id
    version: int  # how many swaps of the head it has been sent, of all that the fleet has made
    folder: str  # of its head; empty: the one that it began with
    draft: DraftInfo | None
    speculation: str
    is_ready: bool
    stats: EngineStats
    model_name: str
    vocab_size: int
    max_model_len: int


@dataclass(eq=False)
class _Sent(Request):
    """A request that a replica is answering."""

    on_cancel: Callable[[], object] = field(default=lambda: None)

    def cancel(self) -> None:
        super().cancel()
        self.on_cancel()


@dataclass(frozen=True)
class _Head:
    """The head that the fleet serves."""

    version: int = 0
    folder: str = ""
    draft: DraftInfo | None = None


class Fleet:
    """The replicas behind one Ray Serve handle, as an engine. Make it by `connect`.

    The version of a head counts the swaps of the fleet. A request has the version of the replica that took it, at that
    time, and for each client (its API key, else its address) versions never fall: while a swap goes from replica to
    replica, a client that has met the new head is sent to replicas that have it. A swap that a replica refuses is
    undone by one more, back to the head before.
    """

    def __init__(self, handle: Any, tokenizer: Tokenizer) -> None:
        self._handle, self._answers = handle, handle.options(method_name="answer", stream=True)
        self._tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()
        self._states: dict[str, ReplicaState] = {}
        self._one: ReplicaState  # the last that was heard of, for what all have alike
        self._head, self._speculation = _Head(), ""
        self._floors: dict[str, int] = {}  # of clients that have met a head that not every replica has yet
        self._swap = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False

    @classmethod
    async def connect(cls, handle: Any, tokenizer: Tokenizer) -> "Fleet":
        """Wait for the first replica, and look after all of them from then on."""
        fleet = cls(handle, tokenizer)
        while not await fleet._look():
            await asyncio.sleep(LOOK_SECONDS)
        newest = max(fleet._states.values(), key=lambda state: state.version)  # this process may be a second one
        fleet._head = _Head(newest.version, newest.folder, newest.draft)
        fleet._keep(fleet._watch())
        return fleet

    # The part that the HTTP layer reads.

    @property
    def model_name(self) -> str:
        return self._one.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return self._one.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._one.max_model_len

    @property
    def speculation(self) -> str:
        return self._one.speculation

    @property
    def draft(self) -> DraftInfo | None:
        """The head of all replicas; during a swap the one before."""
        return self._head.draft

    @property
    def is_healthy(self) -> bool:
        """Always True: Ray replaces a replica that is not healthy. Until then requests may fail, but nothing is broken
        for good."""
        return True

    @property
    def is_ready(self) -> bool:
        return not self._is_draining and any(state.is_ready for state in self._states.values())

    def stats(self) -> EngineStats:
        """Return the stats of all replicas together, as of the last look."""
        return add_stats([state.stats for state in self._states.values()] or [self._one.stats])

    def drain(self, seconds: float) -> None:
        """Take no new sequences. Ray waits for the others."""
        del seconds
        self._is_draining = True

    async def _look(self) -> bool:
        """Ask every replica for its state. Returns whether one answered."""
        try:
            answers = await self._broadcast("state")
        except CapacityError as error:  # not yet, or no longer
            logger.debug("%s", error)
            answers = []
        states = [state for state in answers if isinstance(state, ReplicaState)]
        self._states = {state.replica: state for state in states}
        if states:
            self._one = states[0]
        return bool(states)

    async def _watch(self) -> None:
        """Look again and again, and give replicas that have begun anew the head and the settings that the
        others have."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
                if not self._swap.locked():
                    await self._catch_up()
            except Exception:
                logger.exception("replicas could not be looked after; trying again")

    async def _catch_up(self) -> None:
        for state in list(self._states.values()):
            if state.version < self._head.version:
                async with self._swap:
                    await self._swap_one(state.replica, self._head.folder, self._head.version)
            if self._speculation and state.speculation != self._speculation:
                await self._call(state.replica, "set_speculation", self._speculation)

    # Requests.

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Queue one sequence on a replica, as `Engine.submit` does. It waits until a replica has taken the request, so
        never call it on the event loop. A replica that ends before it has answered anything is replaced by another
        one."""
        if options.get("token_mask") is not None:
            raise RequestError("token_mask: replicas take grammars, not masks that are Python objects")
        if self._is_draining:
            raise CapacityError("the server is stopping; send the request again later or elsewhere")
        return self._wait(self._open(tuple(prompt_ids), params, on_delta, {"request_id": "", **options}))

    def knows_grammar(self, grammar: GrammarSpec) -> bool:  # noqa: ARG002
        return False  # it depends on the replica, which a request has yet to find

    async def _open(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        options: Mapping[str, Any],
    ) -> Request:
        asked = functools.partial(self._ask, prompt_ids, params, options)
        taken, stream = await asked()
        request = _Sent(
            prompt_ids=prompt_ids,
            params=params,
            max_new_tokens=taken.max_new_tokens,
            seed=taken.seed,
            on_delta=on_delta,
            **options,
        )
        task = self._keep(self._read(request, stream, asked))
        request.on_cancel = lambda: self._loop.call_soon_threadsafe(task.cancel)
        return request

    async def _ask(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, options: Mapping[str, Any]
    ) -> tuple[Taken, Any]:
        """Have a replica take the request. Returns its answer, and the stream of its deltas. Raises the error with
        which it refuses, or CapacityError where none takes it."""
        client = options.get("client", "")
        digests = prefix_digests(prompt_ids, self._one.stats.page_size, options.get("cache_salt", ""))
        for _ in range(TRIES):
            floor = max(self._head.version, self._floors.get(client, 0))
            stream = self._answers.remote(prompt_ids, params, options, floor=floor, pages=digests)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    first = await anext(stream)
            except TimeoutError:
                stream.cancel()
                raise CapacityError(f"no replica took the request within {ANSWER_SECONDS:g} s") from None
            except asyncio.CancelledError:
                stream.cancel()
                raise
            except Exception as error:
                logger.warning("a replica ended before it took a request: %s", _line(error))
                continue
            if isinstance(first, Refused):
                raise first.error
            if first.version > self._head.version:
                self._floors[client] = max(self._floors.get(client, 0), first.version)
            return first, stream
        raise CapacityError(f"{TRIES} replicas ended before they took the request; send it again later")

    async def _read(self, request: _Sent, stream: Any, asked: Callable[[], Any]) -> None:
        """Hand on the replica's deltas, to the last one. A replica that ends before its first delta is replaced."""
        has_begun = has_ended = False
        try:
            for number in range(TRIES):
                if number:
                    _, stream = await asked()
                try:
                    async for deltas in stream:
                        for delta in deltas:
                            has_begun, has_ended = True, delta.finish_reason is not None
                            request.on_delta(delta)
                    if has_ended:
                        return
                    lost = "its stream broke off"
                except Exception as error:  # Ray has a type for each way to end
                    lost = _line(error)
                logger.warning("%s: the replica that answers has ended: %s", request.request_id, lost)
                if has_begun:
                    break
            raise CapacityError("the replica that answered has ended; send the request again")
        except asyncio.CancelledError:
            stream.cancel()
            if not has_ended:
                request.on_delta(Delta(finish_reason=FinishReason.CANCELLED))
        except Exception as error:
            request.on_delta(Delta(finish_reason=FinishReason.ERROR, error=str(error)))

    # Changes of all replicas.

    def flush_cache(self) -> None:
        """Have every replica forget its cached prefixes."""
        self._loop.call_soon_threadsafe(lambda: self._keep(_result(self._broadcast("flush_cache"))))

    def set_speculation(self, speculation: str) -> None:
        """Speculate in this way on every replica, as `Engine.set_speculation` does. It must not be called on the event
        loop."""
        for answer in self._wait(self._broadcast("set_speculation", speculation)):
            if isinstance(answer, Refused):
                raise answer.error
        self._speculation = speculation

    def load_draft(self, folder: str) -> DraftInfo:
        """Give one replica after the other the head in this folder, which each of their machines must have. Where one
        refuses it, all go back to the head before, and its error is raised: ConfigError or CheckpointError.
        CapacityError where another swap is under way. Not to be called on the event loop."""
        return self._wait(self._swap_all(folder))

    async def _swap_all(self, folder: str) -> DraftInfo:
        if self._swap.locked():
            raise CapacityError("another head is being loaded; try again when it is there")
        async with self._swap:
            before = self._head
            answer = await self._roll(folder, before.version + 1)
            if isinstance(answer, Refused):
                await self._roll(before.folder, before.version + 2)
                self._settle(_Head(before.version + 2, before.folder, before.draft))
                raise answer.error
            if answer is None:
                raise CapacityError("no replica is there to load a head; try again later")
            self._settle(_Head(before.version + 1, folder, answer))
            return answer

    def _settle(self, head: _Head) -> None:
        self._head = head
        self._floors.clear()

    async def _roll(self, folder: str, version: int) -> DraftInfo | Refused | None:
        """Swap all replicas, one by one. Returns the answer of the last one, or of the first that refuses. A replica
        that ends meanwhile is given the head when it is back."""
        await self._look()
        answer = None
        for replica in sorted(self._states):
            answer = await self._swap_one(replica, folder, version) or answer
            if isinstance(answer, Refused):
                logger.warning("replica %s refuses the head in %s: %s", replica, folder, answer.message)
                return answer
        return answer

    async def _swap_one(self, replica: str, folder: str, version: int) -> DraftInfo | Refused | None:
        return await self._call(replica, "load_draft", folder, version)

    async def _call(self, replica: str, method: str, *args: Any) -> Any:
        """Call a method of one replica. Returns None where it ends meanwhile."""
        call = self._handle.options(method_name=method).remote(*args, to=replica)
        waiting = asyncio.ensure_future(_result(call))
        while not (await asyncio.wait([waiting], timeout=LOOK_SECONDS))[0]:
            if await self._look() and replica not in self._states:
                waiting.cancel()
                call.cancel()
                return None
        return waiting.result()

    async def _broadcast(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self._handle.broadcast(method, *args).results_async(
                timeout_s=ANSWER_SECONDS, return_exceptions=True
            )
        except Exception as error:  # Ray has a type for each way
            raise CapacityError(f"no replica answers ({_line(error)}); try again later") from error

    def _wait(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    def _keep(self, coroutine: Any) -> asyncio.Task[Any]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _result(call: Any) -> Any:
    """Return the result of one of Ray's calls, or None where its replica has ended."""
    try:
        return await call
    except Exception as error:
        logger.warning("a replica did not do as it was told: %s", _line(error))
        return None


def add_stats(all_stats: Sequence[EngineStats]) -> EngineStats:
    """Add the stats of several engines up. Fields that cannot be summed are the first engine's, or the largest."""
    first = all_stats[0]
    sums = {
        name: sum(getattr(stats, name) for stats in all_stats)
        for name, value in vars(first).items()
        if type(value) in (int, float) and name not in ("page_size", "estimated_speedup", "seconds_in_step")
    }
    steps = sum((Counter(stats.num_steps_by_speculation) for stats in all_stats), Counter[str]())
    return dataclasses.replace(
        first,
        **sums,
        num_steps_by_speculation=steps,
        round_sizes=tuple(map(sum, zip(*(stats.round_sizes for stats in all_stats), strict=True))),
        estimated_speedup=sum(stats.estimated_speedup for stats in all_stats) / len(all_stats),
        seconds_in_step=max(stats.seconds_in_step for stats in all_stats),
    )


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()[-1:]), type(error).__name__)
