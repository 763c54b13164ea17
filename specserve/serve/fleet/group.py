"""The replicas behind one Ray Serve handle: what they report and answer, and calls of one of them or of all."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specserve.errors import CapacityError, CheckpointError, ConfigError, RequestError, SpecServeError
from specserve.serve.engine.interface import DraftInfo, EngineStats

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at what the replicas say of themselves
ANSWER_SECONDS = 30.0  # for a replica to take a request
_ERRORS = {error.__name__: error for error in (CapacityError, CheckpointError, ConfigError, RequestError)}


@dataclass(frozen=True)
class Refused:
    """An error of a replica, as data: exceptions do not travel between processes as they are."""

    kind: str
    message: str
    param: str | None

    @classmethod
    def of(cls, error: SpecServeError) -> "Refused":
        return cls(type(error).__name__, str(error), error.param)

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


class ReplicaGroup:
    """The replicas behind one handle. `look` or `watch` has to have found one before `example` is read."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._answers = handle, handle.options(method_name="answer", stream=True)
        self.states: dict[str, ReplicaState] = {}  # of the last look, by the replica's id
        self.example: ReplicaState  # the last that was heard of, for what all have alike

    async def look(self) -> bool:
        """Ask every replica for its state. Returns whether one answered."""
        try:
            answers = await self.broadcast("state")
        except CapacityError as error:  # not yet, or no longer
            logger.debug("%s", error)
            answers = []
        states = [state for state in answers if isinstance(state, ReplicaState)]
        self.states = {state.replica: state for state in states}
        if states:
            self.example = states[0]
        return bool(states)

    async def find_first(self) -> None:
        """Look until a replica answers."""
        while not await self.look():
            await asyncio.sleep(LOOK_SECONDS)

    async def watch(self, on_look: Callable[[], Awaitable[None]]) -> None:
        """Look again and again, and await `on_look` after each time."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
                await on_look()
            except Exception:
                logger.exception("replicas could not be looked after; trying again")

    def answer(self, *request: Any, floor: int, pages: Sequence[bytes]) -> Any:
        """Send a request to the replica that the router chooses, of a head of version `floor` at least. Returns the
        stream of what `EngineReplica.answer` yields."""
        return self._answers.remote(*request, floor=floor, pages=pages)

    async def call(self, replica: str, method: str, *args: Any) -> Any:
        """Call a method of one replica. Returns None where it ends meanwhile."""
        call = self._handle.options(method_name=method).remote(*args, to=replica)
        waiting = asyncio.ensure_future(result_of(call))
        while not (await asyncio.wait([waiting], timeout=LOOK_SECONDS))[0]:
            if await self.look() and replica not in self.states:
                waiting.cancel()
                call.cancel()
                return None
        return waiting.result()

    async def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all replicas. Returns their results or errors. Raises CapacityError where none answers."""
        try:
            return await self._handle.broadcast(method, *args).results_async(
                timeout_s=ANSWER_SECONDS, return_exceptions=True
            )
        except Exception as error:  # Ray has a type for each way
            raise CapacityError(f"no replica answers ({last_line(error)}); try again later") from error


async def result_of(call: Awaitable[Any]) -> Any:
    """Return the result of one of Ray's calls, or None where its replica has ended."""
    try:
        return await call
    except Exception as error:
        logger.warning("a replica did not do as it was told: %s", last_line(error))
        return None


def last_line(error: Exception) -> str:
    """Return the last line of an error's text, which is the cause in Ray's errors, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()[-1:]), type(error).__name__)
