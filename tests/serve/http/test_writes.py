"""Everything that is ready in one turn of the event loop leaves a stream in one write."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import FakeEngine

from specserve.serve.http.app import create_app
from specserve.serve.http.openai import streaming
from specserve.serve.requests.request import Delta, FinishReason

BODY = json.dumps({"prompt": "hi", "stream": True}).encode()
HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]
SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
SCOPE |= {"headers": HEADERS, "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http"}


class ByHand(FakeEngine):
    """It sends nothing by itself: a test calls `on_delta` of its requests."""

    def _run(self) -> None:
        pass


async def _writes(turns: Sequence[Sequence[Delta]]) -> list[list[bytes]]:
    """Answer a request with the deltas of each turn, all before the loop's next one. Returns the writes of each turn,
    the last of them with those behind it."""
    written, unread, is_there = list[bytes](), [{"type": "http.request", "body": BODY}], asyncio.Event()
    found = list[list[bytes]]()

    async def receive() -> Any:
        if not unread:
            await asyncio.Event().wait()  # the client stays
        return unread.pop()

    async def send(message: Any) -> None:
        if message.get("body"):
            written.append(message["body"])
            is_there.set()

    with ByHand() as engine:
        replying = asyncio.create_task(create_app(engine)(SCOPE, receive, send))
        while not engine.requests:
            await asyncio.sleep(0.001)
        for deltas in turns:
            for delta in deltas:
                engine.requests[0].on_delta(delta)
            while sum(map(len, _texts(written))) < sum(len(delta.text) for delta in deltas):
                is_there.clear()
                await is_there.wait()
            found.append(written[:])
            written.clear()
        await replying
    found[-1] += written
    return found


def _texts(writes: Sequence[bytes]) -> list[str]:
    lines = b"".join(writes).decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [chunk["choices"][0]["text"] for chunk in chunks]


def _turns(*sizes: int) -> list[list[Delta]]:
    turns = [[Delta((97,), f"{turn}-{i} ") for i in range(size)] for turn, size in enumerate(sizes)]
    turns[-1].append(Delta((97,), "end", FinishReason.STOP))
    return turns


def test_what_is_ready_at_once_is_one_write() -> None:
    """Also where it is more than is read before others have a turn."""
    turns = _turns(1, 5, 1, 3 * streaming.ARRIVALS_AT_ONCE, 2)
    found = asyncio.run(_writes(turns))
    assert [_texts(writes) for writes in found] == [[delta.text for delta in deltas] for deltas in turns]
    assert found[-1].pop() == b"data: [DONE]\n\n"
    assert [len(writes) for writes in found] == [1] * len(turns)


def test_a_write_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent with the event that reaches it."""
    monkeypatch.setattr(streaming, "READY_BYTES", 1000)
    [writes] = asyncio.run(_writes(turns := _turns(40)))
    assert _texts(writes) == [delta.text for delta in turns[0]]
    for write in writes[:-2]:
        *before, last = write.removesuffix(b"\n\n").split(b"\n\n")
        assert sum(len(each) + 2 for each in before) < 1000 <= len(write), last
