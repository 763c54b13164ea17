"""The changes of the prefix cache, published for routers outside as vLLM's KV events, over ZMQ. Needs the extra
`scale`.

The engine's thread only notes changes of the tree of pages; events, messages and sockets are other threads' work. A
message has three frames: the topic, its number (8 bytes, big-endian, from 0 without gaps), and a batch in msgpack,
`[seconds since 1970, events, data-parallel rank]`. The PUB socket drops messages for which a subscriber is too slow.
That subscriber sees a gap in the numbers, and asks the ROUTER socket, through a DEALER: an empty frame, and the first
number that it wants, in 8 bytes. It gets the messages that are kept from there on, each with an empty frame before the
three, and then one of number -1 with no topic and no payload.
"""

from __future__ import annotations

import functools
import importlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from specserve.errors import ConfigError
from specserve.serve.settings import ServeRun
from specserve.serve.sizes import page_size

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)  # the number of a replay's last message
MOST_EVENTS = 1000  # of a batch
LINGER_SECONDS = 1  # for what is left to send when the server stops
_RANK = 0  # one engine has one cache, whatever its mesh
_MEDIUM = "GPU"  # vLLM's word for a device's own memory, whatever the device

_Event = dict[str, Any]


def stored(before: bytes | None, digests: Sequence[bytes], token_ids: Sequence[int], salt: str, size: int) -> _Event:
    """Make the event of pages of that size which can be hit, see `pages.Watcher`."""
    event: _Event = {"type": "BlockStored", "block_hashes": _numbers(digests)}
    event["parent_block_hash"] = None if before is None else _numbers([before])[0]
    event |= {"token_ids": token_ids, "block_size": size, "lora_id": None, "medium": _MEDIUM, "lora_name": None}
    if salt and before is None:  # the rest of what the first hash is of
        event["extra_keys"] = [[salt], *[None] * (len(digests) - 1)]
    return event


def removed(digests: Sequence[bytes]) -> _Event:
    """Make the event of pages that are cached no more."""
    return {"type": "BlockRemoved", "block_hashes": _numbers(digests), "medium": _MEDIUM}


def cleared() -> _Event:
    """Make the event of an empty cache."""
    return {"type": "AllBlocksCleared"}


def _numbers(digests: Sequence[bytes]) -> list[int]:
    """Return digests as numbers of 64 bits, which is how vLLM publishes hashes."""
    return [int.from_bytes(digest, "big") for digest in digests]


class Publisher:
    """A `pages.Watcher` that publishes the changes that the pool reports to it. It is a context manager: all changes
    before its end are sent.

    `address` and `replay_address` are where the sockets are found, with the ports that were taken.
    """

    def __init__(
        self,
        endpoint: str,
        page_size: int,
        *,
        replay_endpoint: str = "",  # empty: nothing is replayed
        topic: str = "",
        buffer_steps: int = 10_000,  # messages that are kept for replay, and for a slow subscriber
        is_positional: bool = False,  # events are arrays, as vLLM's were before they had names
    ) -> None:
        """Raises ConfigError where ZMQ and msgspec are missing, or an endpoint cannot be had."""
        self._zmq = _load("zmq")
        self._encode: Callable[[object], bytes] = _load("msgspec").msgpack.encode
        self._page_size, self._is_positional, self._topic = page_size, is_positional, topic.encode()
        self._changes: queue.SimpleQueue[Callable[[], _Event] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._lock = threading.Lock()  # of what is kept
        self.num_published, self._has_failed = 0, False
        self._context = self._zmq.Context()
        self._threads = [threading.Thread(target=self._publish, name="kv-events", daemon=True)]
        self._pub, self.address = self._open("endpoint", endpoint, self._zmq.PUB, buffer_steps)
        self._pub.linger = 1000 * LINGER_SECONDS
        self._router, self.replay_address = None, ""
        if replay_endpoint:
            # a whole replay fits in, and what is asked for beyond that and not read is dropped
            self._router, self.replay_address = self._open(
                "replay-endpoint", replay_endpoint, self._zmq.ROUTER, buffer_steps + 1
            )
            self._threads.append(threading.Thread(target=self._replay, name="kv-events-replay", daemon=True))
        for thread in self._threads:
            thread.start()
        logger.info("KV events: %s, replayed: %s", self.address, self.replay_address or "nowhere")

    def stored(self, before: bytes | None, digests: Sequence[bytes], token_ids: Sequence[int], salt: str) -> None:
        """See `pages.Watcher`."""
        self._note(functools.partial(stored, before, digests, token_ids, salt, self._page_size))

    def removed(self, digests: Sequence[bytes]) -> None:
        """See `pages.Watcher`."""
        self._note(functools.partial(removed, digests))

    def cleared(self) -> None:
        """See `pages.Watcher`."""
        self._note(cleared)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._changes.put(None)
        self._threads[0].join()
        self._context.term()  # the other thread hears of it
        for thread in self._threads:
            thread.join()

    def _open(self, name: str, endpoint: str, kind: int, most_waiting: int) -> tuple[Any, str]:
        """Open a socket, and return it with the address that it has taken or connects to. As vLLM's do, it waits for
        others where the host is any of this machine's, and a ROUTER always. Raises ConfigError."""
        own = self._context.socket(kind)
        own.sndhwm, own.linger = most_waiting, 0
        own.ipv6 = "[" in endpoint
        is_bound = kind == self._zmq.ROUTER or endpoint.startswith(("ipc://", "inproc://"))
        try:
            if is_bound or any(host in endpoint for host in ("*", "//[::]:", "//0.0.0.0:")):
                own.bind(endpoint)
                return own, own.last_endpoint.decode()
            own.connect(endpoint)
            return own, endpoint
        except (self._zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"--kv-events-{name} {endpoint!r}: {error}; expected an address that nobody has taken, such as tcp://*:5557"
            ) from None

    def _note(self, change: Callable[[], _Event]) -> None:
        if not self._has_failed:
            self._changes.put(change)

    def _publish(self) -> None:
        """Run the thread that makes messages of changes. Nothing here waits for a subscriber."""
        is_over = False
        try:
            while not is_over:
                changes = [self._changes.get()]
                while len(changes) < MOST_EVENTS and not self._changes.empty():
                    changes.append(self._changes.get())
                is_over = None in changes
                if events := [change() for change in changes if change is not None]:
                    self._send(events)
        except Exception:
            self._has_failed = True
            logger.exception("KV events end here: routers know less and less of this cache until a restart")
        finally:
            self._pub.close()

    def _send(self, events: list[_Event]) -> None:
        rows = [list(event.values()) for event in events] if self._is_positional else events
        payload = self._encode([time.time(), rows, _RANK])
        with self._lock:  # a replay has what subscribers have been sent
            self._pub.send_multipart([self._topic, self.num_published.to_bytes(8, "big"), payload])
            self._kept.append((self.num_published, payload))
            self.num_published += 1

    def _replay(self) -> None:
        """Run the thread that sends missed messages again, until the context ends."""
        router = self._router
        assert router is not None
        try:
            while True:
                client, *_, requested = router.recv_multipart()
                with self._lock:
                    kept = list(self._kept)
                first = int.from_bytes(requested, "big") if len(requested) == len(END) else self.num_published
                for number, payload in kept:
                    if number >= first:
                        router.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
                router.send_multipart([client, b"", b"", END, b""])
        except self._zmq.ContextTerminated:
            router.close()


def open_publisher(run: ServeRun) -> Publisher | None:
    """Open the publisher that the settings ask for, or return None. Raises ConfigError."""
    if not run.kv_events_endpoint:
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            if getattr(run, name):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {getattr(run, name)!r} needs --kv-events-endpoint, such as tcp://*:5557")
        return None
    if not run.prefix_cache:
        raise ConfigError("--kv-events-endpoint tells what the prefix cache has, and --no-prefix-cache: there is none")
    return Publisher(
        run.kv_events_endpoint,
        page_size(run),
        replay_endpoint=run.kv_events_replay_endpoint,
        topic=run.kv_events_topic,
        buffer_steps=run.kv_events_buffer_steps,
        is_positional=run.kv_events_format == "array",
    )


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--kv-events-endpoint needs {module} ({error}): pip install 'specserve[scale]'") from None
