"""KV events as a router gets them: a subscriber that knows nothing else says beforehand which pages hit."""

import random
import re
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engines import PAGE_SIZE, VOCAB, Ask, Fixed, greedy, make_engine, run, serving, wait_until
from mirror import Mirror

from specserve.errors import ConfigError
from specserve.serve.engine.pages import PagePool
from specserve.serve.fleet import kv_events, replicas
from specserve.serve.fleet.kv_events import Publisher
from specserve.serve.programs.runner import Runner
from specserve.serve.settings import ServeRun

ANY = "tcp://127.0.0.1:*"
PATIENCE_MS = 60_000
TOPIC = "kv@10.0.0.1@tiny"


@pytest.fixture
def context() -> Iterator[Any]:
    import zmq

    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def read_batch(payload: bytes) -> list[dict[str, Any]]:
    """The events of a batch, by the types that a subscriber of vLLM's declares."""
    import msgspec

    hashes = list[bytes | int]
    base: dict[str, Any] = {"tag": True, "omit_defaults": True}
    stored = msgspec.defstruct(
        "BlockStored",
        [
            *(("block_hashes", hashes), ("parent_block_hash", bytes | int | None), ("token_ids", list[int])),
            *(("block_size", int), ("lora_id", int | None), ("medium", str | None), ("lora_name", str | None)),
            ("extra_keys", list[tuple[Any, ...] | None] | None, None),
        ],
        **base,
    )
    removed = msgspec.defstruct("BlockRemoved", [("block_hashes", hashes), ("medium", str | None)], **base)
    cleared = msgspec.defstruct("AllBlocksCleared", [], **base)
    batch = msgspec.defstruct(
        "KVEventBatch",
        [("ts", float), ("events", list[stored | removed | cleared]), ("data_parallel_rank", int | None, None)],
        array_like=True,
    )
    found = msgspec.msgpack.decode(payload, type=batch)
    assert abs(time.time() - found.ts) < PATIENCE_MS
    assert found.data_parallel_rank == 0
    return [msgspec.to_builtins(event) for event in found.events]


class Subscriber:
    """A router's end: what it has heard, in order, with what it had to ask for again."""

    def __init__(self, context: Any, publisher: Publisher) -> None:
        import zmq

        self.mirror, self.next, self.num_asked, self._num_marks = Mirror(), 0, 0, 0
        self._context, self._publisher = context, publisher
        self._sub = context.socket(zmq.SUB)
        self._sub.subscribe("kv@")
        self._sub.connect(publisher.address)

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_exc: object) -> None:
        self._sub.close()

    def catch_up(self) -> None:
        """Hear all that has been noted by now: live, where it comes, and by asking for what has not."""
        self._publisher.removed(())  # nothing, which marks the place
        self._num_marks += 1
        while self.mirror.num_marks < self._num_marks:
            if self._sub.poll(100):
                topic, number, payload = self._sub.recv_multipart()
                assert topic == TOPIC.encode()
                if int.from_bytes(number, "big") > self.next:
                    self._ask()
                self._hear(int.from_bytes(number, "big"), payload)
            else:
                self._ask()

    def _ask(self) -> None:
        self.num_asked += 1
        for number, payload in replay(self._context, self._publisher.replay_address, self.next):
            self._hear(number, payload)

    def _hear(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return
        assert number == self.next, "what was missed is not to be had"
        self.next += 1
        for event in read_batch(payload):
            self.mirror.hear(event)


def replay(context: Any, address: str, first: int | bytes) -> list[tuple[int, bytes]]:
    """What the ROUTER has from this number on."""
    import zmq

    found: list[tuple[int, bytes]] = []
    with context.socket(zmq.DEALER) as asker:
        asker.connect(address)
        asker.send_multipart([b"", first if isinstance(first, bytes) else first.to_bytes(8, "big")])
        while True:
            assert asker.poll(PATIENCE_MS), "no answer"
            empty, topic, number, payload = asker.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == TOPIC.encode()
            found.append((int.from_bytes(number, "big"), payload))


@pytest.mark.scale
@pytest.mark.parametrize("seed", range(2))
def test_a_subscriber_knows_which_pages_hit(lookup_runner: Runner, context: Any, seed: int) -> None:
    """In a storm of prompts that begin alike, under salts, with evictions and flushes: before each request the index
    made of events alone says how many of its tokens are cached."""
    rng = random.Random(seed)
    stems = [tuple(rng.choices(range(3, VOCAB), k=40)) for _ in range(4)]
    hits: list[int] = []

    def any_ask() -> Ask:
        stem = rng.choice(stems)[: rng.randrange(41)]
        prompt = (*stem, *rng.choices(range(3, VOCAB), k=rng.randrange(1, 9)))
        return Ask(prompt, greedy(rng.randrange(1, 20), ignore_eos=True), salt=rng.choice(["", "", "alice", "bob"]))

    with (
        Publisher(ANY, PAGE_SIZE, replay_endpoint=ANY, topic=TOPIC) as publisher,
        Subscriber(context, publisher) as subscriber,
    ):
        engine = make_engine(lookup_runner, Fixed(None), num_pages=30, watcher=publisher)
        with serving(engine):
            for turn in range(60):
                if turn % 20 == 19:
                    engine.flush_cache()
                run(engine, [any_ask() for _ in range(rng.randrange(1, 3))])
                ask = any_ask()
                subscriber.catch_up()
                expected = subscriber.mirror.match(ask.prompt[:-1], ask.salt, PAGE_SIZE)
                stats = run(engine, [ask])[0].wait().stats
                assert stats is not None
                assert stats.num_cached_tokens == expected
                hits.append(expected)
            subscriber.catch_up()
            assert len(subscriber.mirror.prefixes) == engine.stats().num_pages_cached
    assert subscriber.mirror.num_removed > 20, "little was evicted, so little was tested"
    assert subscriber.mirror.num_cleared == 3
    assert 5 < sum(hit > 0 for hit in hits) < 60


def _fill(pool: PagePool, *prompts: tuple[int, ...], salt: str = "") -> None:
    for prompt in prompts:
        pages = pool.acquire(prompt, salt)
        pages += pool.allocate(len(prompt) // pool.page_size - len(pages))
        pool.insert(prompt, pages, salt)
        pool.release(pages)


@pytest.mark.scale
@pytest.mark.parametrize("is_positional", [False, True])
def test_events_are_framed_as_vllms(context: Any, is_positional: bool) -> None:
    """Every field of every event; the hashes are any, but those that a page's parent and its removal have are its
    own, and those of another server are the same."""
    import msgspec

    def batches(positional: bool) -> list[list[Any]]:
        options: dict[str, Any] = {"replay_endpoint": ANY, "topic": TOPIC, "is_positional": positional}
        with Publisher(ANY, 2, **options) as publisher:
            pool = PagePool(3, 2, publisher)
            _fill(pool, (1, 2, 3, 4))
            _fill(pool, (1, 2, 3, 4, 5, 6))
            _fill(pool, (1, 2), salt="alice")
            pool.flush()
            wait_until(lambda: b"AllBlocksCleared" in b"".join(each for _, each in kept(publisher)))
            return [msgspec.msgpack.decode(payload) for _, payload in kept(publisher)]

    def kept(publisher: Publisher) -> list[tuple[int, bytes]]:
        return replay(context, publisher.replay_address, 0)

    found = batches(is_positional)
    assert [rank for _, _, rank in found] == [0] * len(found)
    events = [event for _, each, _ in found for event in each]
    assert events == [event for _, each, _ in batches(is_positional) for event in each]
    first, second, third, salted = _hashes(events)
    assert len({first, second, third, salted}) == 4
    after = {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None}
    none = {"parent_block_hash": None}
    expected = [
        {"type": "BlockStored", "block_hashes": [first, second], **none, "token_ids": [1, 2, 3, 4], **after},
        {"type": "BlockStored", "block_hashes": [third], "parent_block_hash": second, "token_ids": [5, 6], **after},
        {"type": "BlockRemoved", "block_hashes": [third], "medium": "GPU"},
        {"type": "BlockStored", "block_hashes": [salted], **none, "token_ids": [1, 2], **after},
        {"type": "AllBlocksCleared"},
    ]
    expected[3]["extra_keys"] = [["alice"]]
    assert events == ([list(event.values()) for event in expected] if is_positional else expected)


def _hashes(events: list[Any]) -> list[int]:
    """Those of what is stored, in order."""
    rows = [list(event.values()) if isinstance(event, dict) else event for event in events]
    return [block for row in rows if row[0] == "BlockStored" for block in row[1]]


@pytest.mark.scale
def test_a_replay_has_the_last_messages_and_then_ends(context: Any) -> None:
    with Publisher(ANY, 1, replay_endpoint=ANY, topic=TOPIC, buffer_steps=20) as publisher:
        for number in range(50):
            publisher.stored(None, [bytes([number])], [number], "")
            wait_until(lambda number=number: publisher.num_published > number)

        def numbers(first: int | bytes) -> list[int]:
            return [number for number, _ in replay(context, publisher.replay_address, first)]

        assert numbers(0) == list(range(30, 50))
        assert numbers(45) == list(range(45, 50))
        assert numbers(50) == numbers(2**63) == numbers(b"") == numbers(b"what") == []
        [event] = [
            event for number, each in replay(context, publisher.replay_address, 41) for event in read_batch(each)
        ][:1]
        assert event["token_ids"] == [41]


@pytest.mark.scale
def test_who_does_not_read_holds_up_nobody(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than sockets and kernel hold is published, while one subscriber reads nothing and another all."""
    import zmq

    monkeypatch.setattr(kv_events, "MOST_EVENTS", 1)
    size, num_pages, token_id = 4096, 1000, 70_000  # of five bytes: 20 MB
    with (
        Publisher(ANY, size, replay_endpoint=ANY, topic=TOPIC, buffer_steps=100) as publisher,
        Subscriber(context, publisher) as reader,
        context.socket(zmq.SUB) as stuck,
    ):
        stuck.rcvhwm = 1
        stuck.subscribe("")
        stuck.connect(publisher.address)
        while not stuck.poll(20):  # until it has joined
            reader.catch_up()
        for page in range(num_pages):
            publisher.stored(None, [page.to_bytes(8, "big")], [token_id + page] * size, "")
            if page % 50 == 49:
                reader.catch_up()
        assert len(reader.mirror.prefixes) == num_pages
        got = []
        while stuck.poll(1000):
            _, number, _ = stuck.recv_multipart()
            got.append(int.from_bytes(number, "big"))
        assert got == sorted(set(got))
        assert len(got) < publisher.num_published, "it was given all, so nothing was tested"


def test_what_cannot_be_published_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kv_events.open_publisher(ServeRun()) is None
    for name in ("replay_endpoint", "topic"):
        with pytest.raises(ConfigError, match=f"--kv-events-{name.replace('_', '-')} 'x' needs --kv-events-endpoint"):
            kv_events.open_publisher(ServeRun(**{f"kv_events_{name}": "x"}))
    with pytest.raises(ConfigError, match="--no-prefix-cache"):
        kv_events.open_publisher(ServeRun(kv_events_endpoint=ANY, prefix_cache=False))
    with pytest.raises(ConfigError, match="does not go with --ray"):
        replicas.check(ServeRun(kv_events_endpoint=ANY, ray=True))
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"needs zmq .*pip install 'specserve\[scale\]'"):
        kv_events.open_publisher(ServeRun(kv_events_endpoint=ANY))


@pytest.mark.scale
def test_an_endpoint_that_cannot_be_had_is_said_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://*:{taken.getsockname()[1]}"
        for options, name, endpoint in (
            ({"endpoint": address}, "endpoint", address),
            ({"endpoint": "nonsense"}, "endpoint", "nonsense"),
            ({"endpoint": "tcp://*"}, "endpoint", "tcp://*"),
            ({"endpoint": ANY, "replay_endpoint": address}, "replay-endpoint", address),
        ):
            begin = re.escape(f"--kv-events-{name} {endpoint!r}: ")
            with pytest.raises(ConfigError, match=f"^{begin}.*; expected an address"):
                Publisher(page_size=2, **options)


@pytest.mark.scale
def test_a_subscriber_that_waits_is_connected_to(context: Any) -> None:
    import zmq

    with context.socket(zmq.SUB) as waiting:
        port = waiting.bind_to_random_port("tcp://127.0.0.1")
        waiting.subscribe("")
        with Publisher(f"tcp://127.0.0.1:{port}", 2) as publisher:
            while not waiting.poll(20):  # until it has been found
                publisher.cleared()
            assert {event["type"] for event in read_batch(waiting.recv_multipart()[2])} == {"AllBlocksCleared"}
