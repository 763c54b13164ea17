"""Several engines as one, over replicas that are played here: versions of heads, refusals, replicas that end."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from engines import Inbox, Letters, wait_until

from specserve.errors import CapacityError, ConfigError, RequestError
from specserve.serve.engine.interface import DraftInfo, EngineStats
from specserve.serve.fleet import group
from specserve.serve.fleet.fleet import Fleet, add_stats
from specserve.serve.fleet.group import Refused, ReplicaState, Taken
from specserve.serve.fleet.relay import TRIES
from specserve.serve.requests.request import Delta, FinishReason, SamplingParams

GOOD = {"": "start", "new": "new", "newer": "newer"}  # heads that every replica takes, by folder


@dataclasses.dataclass(eq=False)
class Player:
    """A replica. Its answers are its name and the head that it had when it took the request."""

    name: str
    folder: str = ""
    version: int = 0
    refuses: str = ""  # a folder
    may_swap: Callable[[], bool] = lambda: True
    begins: int = 2  # deltas before it ends, while `is_dying`
    is_dying: bool = False
    asked: int = 0
    was_cancelled: bool = False

    def state(self) -> ReplicaState:
        stats = EngineStats(num_running=1, page_size=8, num_steps_by_speculation={"off": 2})
        own = (self.name, self.version, self.folder, DraftInfo(GOOD[self.folder]), "off", True, stats)
        return ReplicaState(*own, "tiny", 64, 96)

    async def load_draft(self, folder: str, version: int) -> DraftInfo | Refused:
        self.version = version
        while not self.may_swap():
            await asyncio.sleep(0.001)
        if folder not in GOOD or folder == self.refuses:
            return Refused.of(ConfigError(f"{folder}: no such folder"))
        self.folder = folder
        return DraftInfo(GOOD[folder])

    async def answer(self, prompt: tuple[int, ...], params: SamplingParams) -> AsyncIterator[Any]:
        self.asked += 1
        if params.n != 1 or prompt == (0,):
            yield Refused.of(RequestError("not this", param="prompt"))
            return
        try:
            yield Taken(self.version, 5, 7)
            for number in range(params.max_tokens or 0):
                if self.is_dying and number == self.begins:
                    raise RuntimeError("actor died")
                await asyncio.sleep(0.01)
                yield [Delta(token_ids=(number,), text=f"{self.name}{self.folder} ")]
            yield [Delta(finish_reason=FinishReason.LENGTH)]
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


class Stream:
    """What Ray gives for a call that streams: an iterator that can be cancelled."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items, self._task = items, None

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        self._task = asyncio.ensure_future(anext(self._items))  # type: ignore[arg-type]
        return await asyncio.shield(self._task)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Handle:
    """Ray's handle of a deployment of players, and its router: in turns, by what requests may demand."""

    def __init__(self, *players: Player) -> None:
        self.players, self.turn, self.method = list(players), 0, ""
        self.taken: list[tuple[str, str, int]] = []  # client, replica, version

    def options(self, method_name: str, stream: bool = False) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Any:
            return Stream(self._answer(*args, **kwargs)) if stream else self._call(method_name, *args, **kwargs)

        return type("Method", (), {"remote": staticmethod(remote)})

    def _call(self, method: str, *args: Any, to: str) -> asyncio.Task[Any]:
        [player] = [player for player in self.players if player.name == to]
        return asyncio.ensure_future(getattr(player, method)(*args))

    async def _answer(
        self, prompt: tuple[int, ...], params: SamplingParams, options: Any, floor: int, pages: Any
    ) -> AsyncIterator[Any]:
        while not (able := [player for player in self.players if player.version >= floor]):
            await asyncio.sleep(0.01)
        self.turn += 1
        player = able[self.turn % len(able)]
        self.taken.append((options.get("client", ""), player.name, player.version))
        try:
            async for item in player.answer(prompt, params):
                yield item
        except RuntimeError:  # nothing is sent to a player that has died
            self.players = [other for other in self.players if other is not player]
            raise

    def broadcast(self, method: str, *args: Any) -> Any:
        async def results_async(**_: Any) -> list[Any]:
            return [getattr(player, method)(*args) for player in self.players]

        return type("Results", (), {"results_async": staticmethod(results_async)})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fleet]]:
    """What makes a fleet of players, on an event loop of its own."""
    monkeypatch.setattr(group, "LOOK_SECONDS", 0.02)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def make(*players: Player) -> tuple[Fleet, Handle]:
        handle = Handle(*players)
        coming = asyncio.run_coroutine_threadsafe(Fleet.connect(handle, Letters()), loop)  # type: ignore[arg-type]
        return coming.result(10), handle

    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others)

    yield make
    asyncio.run_coroutine_threadsafe(end(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _ask(fleet: Fleet, client: str = "", **options: Any) -> tuple[Any, Inbox]:
    inbox = Inbox()
    params = SamplingParams(**{"max_tokens": 3} | options)
    return fleet.submit([1, 2, 3], params, inbox, client=client), inbox


def test_versions_never_fall_for_a_client_while_heads_are_swapped(serve: Any) -> None:
    """Whatever replica it is sent to. In the end all replicas have the new head, and say so."""
    players = [Player(name) for name in "abcd"]
    fleet, handle = serve(*players)
    for number, player in enumerate(players, 1):  # each swap lasts until some requests more have been taken
        player.may_swap = lambda least=6 * number: len(handle.taken) >= least
    swapped = threading.Thread(target=fleet.load_draft, args=("new",))
    swapped.start()
    while swapped.is_alive():
        for client in ("x", "y", "z"):
            _ask(fleet, client)
    for client in ("x", "y", "z"):
        versions = [version for who, _, version in handle.taken if who == client]
        assert versions == sorted(versions)
    assert {version for _, _, version in handle.taken} == {0, 1}, "both were there to be met"
    assert [player.folder for player in players] == ["new"] * 4
    assert fleet.draft == DraftInfo("new")


def test_a_head_that_one_replica_refuses_is_taken_back_by_all(serve: Any) -> None:
    players = [Player("a"), Player("b"), Player("c", refuses="newer")]
    fleet, handle = serve(*players)
    fleet.load_draft("new")
    with pytest.raises(ConfigError, match="newer: no such folder"):
        fleet.load_draft("newer")
    assert [player.folder for player in players] == ["new"] * 3
    assert fleet.draft == DraftInfo("new")
    assert {player.version for player in players} == {3}, "going back is a version more"
    handle.players.append(Player("d"))
    wait_until(lambda: handle.players[-1].folder == "new")  # it begins later


def test_a_replica_that_ends_takes_along_only_what_it_has_begun(serve: Any) -> None:
    dying, well = Player("a", is_dying=True, begins=0), Player("b")
    fleet, handle = serve(dying, well)
    inboxes = [_ask(fleet)[1] for _ in range(4)]
    assert [(inbox.wait(), inbox.text)[1] for inbox in inboxes] == ["b b b "] * 4
    assert dying.asked, "it was never asked, so nothing is tested"
    handle.players, dying.begins = [dying], 2
    inbox = _ask(fleet)[1]
    handle.players.append(well)
    assert inbox.wait().finish_reason is FinishReason.ERROR
    assert inbox.text == "a a ", "nobody goes on with what another has begun to say"
    handle.players = [Player(name, is_dying=True, begins=0) for name in "cdefg"]
    assert _ask(fleet)[1].wait().finish_reason is FinishReason.ERROR
    assert len(handle.players) == 5 - TRIES


def test_a_request_ends_with_its_client_or_is_refused_in_the_words_of_the_replica(serve: Any) -> None:
    player = Player("a")
    fleet, _ = serve(player)
    request, inbox = _ask(fleet, max_tokens=1000)
    inbox.wait_for_first()
    request.cancel()
    assert inbox.wait().finish_reason is FinishReason.CANCELLED
    wait_until(lambda: player.was_cancelled)
    with pytest.raises(RequestError, match="not this") as refused:
        fleet.submit([0], SamplingParams(max_tokens=3), Inbox())
    assert refused.value.param == "prompt"
    fleet.drain(0)
    assert not fleet.is_ready
    with pytest.raises(CapacityError):
        _ask(fleet)


def test_stats_add_up() -> None:
    one = EngineStats(num_running=1, page_size=8, num_steps_by_speculation={"off": 2}, seconds_in_step=1.0)
    two = dataclasses.replace(one, num_running=4, num_steps_by_speculation={"off": 1, "chain:1": 5}, is_caching=True)
    total = add_stats([one, two])
    assert (total.num_running, total.page_size, total.seconds_in_step) == (5, 8, 1.0)
    assert total.num_steps_by_speculation == {"off": 3, "chain:1": 5}
    assert add_stats([one]) == one
