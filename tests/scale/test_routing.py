"""The choice of a replica, without a cluster: the prompt's beginning, overload, and age."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.serve.engine.pages import PagePool, prefix_digests

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

SLACK = 2
PAGES = prefix_digests(range(40), 8)


@dataclasses.dataclass(eq=False)
class Replica:
    """The facts about a replica that the router gets."""

    name: str
    routing_stats: dict[str, Any]
    num_open: int = 0

    @property
    def replica_id(self) -> SimpleNamespace:
        return _IDS.setdefault(self.name, Id(unique_id=self.name))


class Id(SimpleNamespace):
    __hash__ = object.__hash__


_IDS: dict[str, Id] = {}


@pytest.fixture
def router() -> Any:
    from specserve.serve.fleet.routing import PrefixRouter

    class Alone(PrefixRouter):
        """Without Ray's own books, of which the loads are these."""

        def __init__(self) -> None:
            self.loads: dict[Any, int] = {}
            self.initialize_state(slack=SLACK)

        @property
        def replica_queue_len_cache(self) -> Any:
            return self.loads

        def choose(self, *replicas: Replica, **asked: Any) -> list[list[str]]:
            self.loads = {replica.replica_id: replica.num_open for replica in replicas}
            pending = SimpleNamespace(kwargs=asked, routing_context=SimpleNamespace())
            ranks = asyncio.run(self.choose_replicas(list(replicas), pending))
            return [[replica.name for replica in rank] for rank in ranks]

    return Alone()


def test_the_longest_beginning_wins_unless_its_holder_is_overloaded(router: Any) -> None:
    short, long = Replica("a", {"pages": PAGES[:2]}), Replica("b", {"pages": PAGES[1::-1] + PAGES[2:4]})
    gap, empty = Replica("c", {"pages": PAGES[1:]}), Replica("d", {})
    assert router.choose(short, long, gap, empty, pages=PAGES)[0] == ["b"]
    long.num_open = SLACK
    assert router.choose(short, long, gap, empty, pages=PAGES)[0] == ["b"]
    long.num_open = SLACK + 1
    assert router.choose(short, long, gap, empty, pages=PAGES)[0] == ["a"]
    short.num_open = SLACK + 1
    assert len(router.choose(short, long, gap, empty, pages=PAGES)[0]) == 2, "two at random, by load"
    assert len(router.choose(short, long, gap, empty)[0]) == 2
    twin = Replica("e", {"pages": PAGES[:2]}, num_open=1)
    short.num_open = 0
    assert router.choose(twin, short, pages=PAGES)[0] == ["a"]


def test_what_was_sent_counts_until_the_replica_reports(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specserve.serve.fleet import routing

    one, other = Replica("f", {}), Replica("g", {})
    router.on_request_routed(SimpleNamespace(kwargs={"pages": PAGES}), one.replica_id, None)
    assert router.choose(one, other, pages=PAGES)[0] == ["f"]
    now = routing.time.monotonic()
    monkeypatch.setattr(routing.time, "monotonic", lambda: now + routing.FRESH_SECONDS + 1)
    assert len(router.choose(one, other, pages=PAGES)[0]) == 2, "it was never reported, so it is gone"


def test_versions_and_names_bind(router: Any) -> None:
    old, new = Replica("h", {"version": 1, "pages": PAGES}), Replica("i", {"version": 2})
    assert router.choose(old, new, floor=2, pages=PAGES) == [["i"], ["i"]]
    assert router.choose(old, new, floor=3) == []
    assert router.choose(old, new, to="h") == [["h"]]


def test_autoscaling_reaches_its_target() -> None:
    from specserve.serve.fleet.routing import TARGET_USE, scale

    def num_replicas(*use: float) -> float:
        context = SimpleNamespace(
            aggregated_metrics={"use": dict(enumerate(use))} if use else None,
            current_num_replicas=len(use),
            target_num_replicas=3,
        )
        return scale(context)[0]

    assert num_replicas() == 3
    assert num_replicas(TARGET_USE, TARGET_USE) == pytest.approx(2)
    assert num_replicas(2 * TARGET_USE, 2 * TARGET_USE) == pytest.approx(4)
    assert num_replicas(0.0, 0.0) == 0


def test_a_pool_reports_the_digests_of_what_it_holds() -> None:
    """Those that a prompt has, however it came there: at once or page by page, and not after it was evicted."""
    pool = PagePool(6, 8)
    tokens = list(range(40))
    pages = pool.allocate(5)
    pool.insert(tokens[:16], pages, "salt")
    pool.insert(tokens, pages, "salt", num_known=2)
    assert pool.newest_digests(99) == prefix_digests(tokens, 8, "salt")[::-1]
    assert pool.newest_digests(2) == prefix_digests(tokens, 8, "salt")[:2:-1]
    assert not set(pool.newest_digests(99)) & {*prefix_digests(tokens, 8), *prefix_digests([1, *tokens[1:]], 8, "salt")}
    pool.release(pages)
    pool.allocate(3)
    assert set(pool.newest_digests(99)) == set(prefix_digests(tokens, 8, "salt")[:3])
