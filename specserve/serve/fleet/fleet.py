"""Several engines as one: the interface that the HTTP layer needs (`interface.EngineLike`), over replicas that Ray
Serve runs. `group` has the replicas and what they report, `heads` the swaps of heads, `relay` the way of a request."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Unpack

from specserve.errors import CapacityError, RequestError
from specserve.serve.engine.interface import DraftInfo, EngineStats
from specserve.serve.fleet.group import Refused, ReplicaGroup, result_of
from specserve.serve.fleet.heads import FleetHead
from specserve.serve.fleet.relay import Relay, RelayedRequest
from specserve.serve.requests.request import Delta, GrammarSpec, Request, RequestOptions, SamplingParams
from specserve.tokenizer import Tokenizer


class Fleet:
    """The replicas behind one Ray Serve handle, as an engine. Make it by `connect`.

    A request has the version of the head (`heads`) of the replica that took it, at that time.
    """

    def __init__(self, group: ReplicaGroup, tokenizer: Tokenizer) -> None:
        self._group, self._head, self.tokenizer = group, FleetHead(group), tokenizer
        self._loop = asyncio.get_running_loop()
        self._speculation = ""  # that was set for all replicas; empty: none was
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_draining = False

    @classmethod
    async def connect(cls, handle: Any, tokenizer: Tokenizer) -> "Fleet":
        """Wait for the first replica, and look after all of them from then on."""
        group = ReplicaGroup(handle)
        await group.find_first()
        fleet = cls(group, tokenizer)
        fleet._keep(group.watch(fleet._catch_up))
        return fleet

    @property
    def model_name(self) -> str:
        return self._group.example.model_name

    @property
    def vocab_size(self) -> int:
        return self._group.example.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._group.example.max_model_len

    @property
    def speculation(self) -> str:
        return self._group.example.speculation

    @property
    def draft(self) -> DraftInfo | None:
        """The head of all replicas; during a swap the one before."""
        return self._head.draft

    @property
    def loras(self) -> Mapping[str, str]:
        """Always empty: replicas have no adapters."""
        return {}

    @property
    def is_healthy(self) -> bool:
        """Always True: Ray replaces a replica that is not healthy. Until then requests may fail, but nothing is broken
        for good."""
        return True

    @property
    def is_ready(self) -> bool:
        return not self._is_draining and any(state.is_ready for state in self._group.states.values())

    def stats(self) -> EngineStats:
        """Return the stats of all replicas together, as of the last look."""
        states = [*self._group.states.values()] or [self._group.example]
        return add_stats([state.stats for state in states])

    def drain(self, seconds: float) -> None:
        """Take no new sequences. Ray waits for the others."""
        del seconds
        self._is_draining = True

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
        relay = Relay(self._group, self._head, tuple(prompt_ids), params, {"request_id": "", **options})
        return self._wait(self._run(relay, on_delta))

    def knows_grammar(self, grammar: GrammarSpec) -> bool:  # noqa: ARG002
        return False  # it depends on the replica, which a request has yet to find

    async def _run(self, relay: Relay, on_delta: Callable[[Delta], None]) -> RelayedRequest:
        request = await relay.start(on_delta)
        task = self._keep(relay.run(request))
        request.on_cancel = lambda: self._loop.call_soon_threadsafe(task.cancel)
        return request

    def flush_cache(self) -> None:
        """Have every replica forget its cached prefixes."""
        self._loop.call_soon_threadsafe(lambda: self._keep(result_of(self._group.broadcast("flush_cache"))))

    def set_speculation(self, speculation: str) -> None:
        """Speculate in this way on every replica, as `Engine.set_speculation` does. It must not be called on the event
        loop."""
        for answer in self._wait(self._group.broadcast("set_speculation", speculation)):
            if isinstance(answer, Refused):
                raise answer.error
        self._speculation = speculation

    def load_draft(self, folder: str) -> DraftInfo:
        """Give one replica after the other the head in this folder (`FleetHead.swap`), which each of their machines
        must have. Raises ConfigError, CheckpointError or CapacityError. Not to be called on the event loop."""
        return self._wait(self._head.swap(folder))

    async def _catch_up(self) -> None:
        """Give replicas that have begun anew the head and the settings that the others have."""
        if self._head.is_swapping:
            return
        for state in [*self._group.states.values()]:
            await self._head.catch_up(state)
            if self._speculation and state.speculation != self._speculation:
                await self._group.call(state.replica, "set_speculation", self._speculation)

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _keep(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


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
