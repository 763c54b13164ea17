"""A request on its way through the replicas: one takes it and answers, and where that one ends too early another one
does."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specserve.errors import CapacityError
from specserve.serve.engine.pages import prefix_digests
from specserve.serve.fleet.group import ANSWER_SECONDS, Refused, ReplicaGroup, Taken, last_line
from specserve.serve.fleet.heads import FleetHead
from specserve.serve.requests.request import Delta, FinishReason, Request, SamplingParams

logger = logging.getLogger(__name__)

TRIES = 3  # replicas that may end before one of them has begun to answer


@dataclass(eq=False)
class RelayedRequest(Request):
    """A request that a replica is answering."""

    on_cancel: Callable[[], object] = field(default=lambda: None)

    def cancel(self) -> None:
        super().cancel()
        self.on_cancel()


class Relay:
    """Asks the replicas of a group one request, and hands on the deltas of the one that takes it."""

    def __init__(
        self,
        group: ReplicaGroup,
        head: FleetHead,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        options: Mapping[str, Any],  # `RequestOptions`
    ) -> None:
        self._group, self._head = group, head
        self._prompt_ids, self._params, self._options = prompt_ids, params, options
        self._client = options.get("client", "")
        self._digests = prefix_digests(prompt_ids, group.example.stats.page_size, options.get("cache_salt", ""))
        self._stream: Any = None  # of the replica that has taken the request

    async def start(self, on_delta: Callable[[Delta], None]) -> RelayedRequest:
        """Have a replica take the request, whose deltas `run` hands to `on_delta`. Raises the error with which the
        replica refuses, or CapacityError where none takes it."""
        taken = await self._ask()
        return RelayedRequest(
            prompt_ids=self._prompt_ids,
            params=self._params,
            max_new_tokens=taken.max_new_tokens,
            seed=taken.seed,
            on_delta=on_delta,
            **self._options,
        )

    async def run(self, request: RelayedRequest) -> None:
        """Hand on the replica's deltas, to the last one. A replica that ends before its first delta is replaced."""
        has_begun = has_ended = False
        try:
            for number in range(TRIES):
                if number:
                    await self._ask()
                try:
                    async for deltas in self._stream:
                        for delta in deltas:
                            has_begun, has_ended = True, delta.finish_reason is not None
                            request.on_delta(delta)
                    if has_ended:
                        return
                    lost = "its stream broke off"
                except Exception as error:  # Ray has a type for each way to end
                    lost = last_line(error)
                logger.warning("%r: the replica that answers has ended: %s", request.request_id, lost)
                if has_begun:
                    break
            raise CapacityError("the replica that answered has ended; send the request again")
        except asyncio.CancelledError:
            self._stream.cancel()
            if not has_ended:
                request.on_delta(Delta(finish_reason=FinishReason.CANCELLED))
        except Exception as error:
            request.on_delta(Delta(finish_reason=FinishReason.ERROR, error=str(error)))

    async def _ask(self) -> Taken:
        """Have a replica take the request, and keep the stream of its deltas."""
        request = self._prompt_ids, self._params, self._options
        for _ in range(TRIES):
            stream = self._group.answer(*request, floor=self._head.floor(self._client), pages=self._digests)
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
                logger.warning("a replica ended before it took a request: %s", last_line(error))
                continue
            if isinstance(first, Refused):
                raise first.error
            self._head.note_met(self._client, first.version)
            self._stream = stream
            return first
        raise CapacityError(f"{TRIES} replicas ended before they took the request; send it again later")
