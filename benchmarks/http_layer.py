"""What the HTTP layer costs: the same answers straight from the engine and over streams, and requests that ask for
almost nothing.

Run from the checkout: `python benchmarks/http_layer.py`. Engine and server are one process. The clients are another one
on the same cores, which only reads bytes, so that what is measured is the server's work and not that of a client's
parser. Rounds take turns.
"""

import argparse
import asyncio
import json
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from specserve import LLM, SamplingParams
from specserve.eval.prompts import load_chats
from specserve.serve.http.app import create_app
from specserve.serve.http.server import HttpServer

TINY = 200  # requests of one token, to see what a request costs
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    "Content-Length: {}\r\n\r\n"
)


def ask(port: int, number: int, bodies: list[str]) -> int:
    """Send all bodies, `number` at a time, and read the streams to their ends; returns how many events came."""
    waiting, events, tail = bodies[::-1], 0, {}
    with selectors.DefaultSelector() as open_:

        def begin() -> None:
            body = waiting.pop()
            connection = socket.create_connection(("127.0.0.1", port), timeout=600)
            connection.sendall((HEAD.format(len(body)) + body).encode())
            open_.register(connection, selectors.EVENT_READ)
            tail[connection] = b""

        for _ in range(min(number, len(waiting))):
            begin()
        while tail:
            for key, _ in open_.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                came = connection.recv(1 << 16)
                events += came.count(b"data: {")
                tail[connection] = (tail[connection] + came)[-64:]
                if not came:
                    assert b"data: [DONE]" in tail.pop(connection), "a stream was cut"
                    open_.unregister(connection)
                    connection.close()
                    if waiting:
                        begin()
    return events


def clients() -> None:
    """The other process: for each line of standard input, [port, clients, bodies], ask and tell seconds and events."""
    for line in sys.stdin:
        port, number, bodies = json.loads(line)
        start = time.perf_counter()
        events = ask(port, number, [json.dumps(body) for body in bodies])
        print(json.dumps([time.perf_counter() - start, events]), flush=True)


class LoopWatch:
    """How late the event loop of a served app is, and what its thread has computed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.lags: list[float] = []  # seconds

    def wrap(self, app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """The app, which begins to watch with its first request."""

        async def watched(scope: object, receive: object, send: object) -> None:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._tick(self._loop.time())
            await app(scope, receive, send)

        return watched

    def _tick(self, due: float) -> None:
        assert self._loop is not None
        now = self._loop.time()
        self.lags.append(now - due)
        self._loop.call_at(now + 0.005, self._tick, now + 0.005)

    def cpu_seconds(self) -> float:
        """Of the loop's thread, up to now."""

        async def read() -> float:
            return time.thread_time()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(read(), self._loop).result()


@dataclass
class Measured:
    """Seconds of each round, for the same answers."""

    num_tokens: int  # of a round
    num_events: int = 0  # of a streamed round
    direct: list[float] = field(default_factory=list)  # straight from the engine
    streamed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # of the event loop's thread, while it streams
    lags: list[float] = field(default_factory=list)  # of the event loop, sorted
    tiny_direct: list[float] = field(default_factory=list)  # `TINY` requests of one token
    tiny: list[float] = field(default_factory=list)  # the same over HTTP


OverHttp = Callable[[list[dict]], tuple[float, int]]  # the bodies; seconds, and events that came


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--speculation", default="chain:3")
    options = parser.parse_args()
    slots, watch = options.clients, LoopWatch()
    with LLM(speculation=options.speculation, max_slots=slots, max_model_len=512, progress=False) as llm:
        app = create_app(llm.engine)
        server = HttpServer(watch.wrap(app), port=0)  # type: ignore[arg-type] (any ASGI app will do)
        server.start()
        other = subprocess.Popen(
            [sys.executable, __file__, "_clients"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        def over_http(bodies: list[dict]) -> tuple[float, int]:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(json.dumps([server.port, slots, bodies]) + "\n")
            other.stdin.flush()
            return json.loads(other.stdout.readline())

        found = measure(llm, watch, over_http, options)
        other.stdin.close() if other.stdin else None
        server.stop()
    show(found, options)


def measure(llm: LLM, watch: LoopWatch, over_http: OverHttp, options: argparse.Namespace) -> Measured:
    """Ask the engine and the server in turns, first for whole answers and then for one token each."""
    slots = options.clients
    chats = load_chats("pydoc", slots, history=0)
    prompts = [llm.tokenizer.render_chat(chat) for chat in chats]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    asked = {"temperature": 0, "max_tokens": options.max_tokens, "ignore_eos": True, "stream": True}
    bodies = [{"prompt": prompt, **asked} for prompt in prompts]
    found = Measured(slots * options.max_tokens)
    over_http(bodies)  # warms up, and fills the prefix cache
    llm.generate(prompts, params)
    watch.lags.clear()
    for _ in range(options.rounds):
        start = time.perf_counter()
        llm.generate(prompts, params)
        found.direct.append(time.perf_counter() - start)
        before = watch.cpu_seconds()
        seconds, found.num_events = over_http(bodies)
        found.streamed.append(seconds)
        found.cpu.append(watch.cpu_seconds() - before)
    found.lags = sorted(watch.lags)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    for _ in range(3):
        start = time.perf_counter()
        llm.generate([prompts[0]] * TINY, one)
        found.tiny_direct.append(time.perf_counter() - start)
        found.tiny.append(over_http([{"prompt": prompts[0], "max_tokens": 1, "stream": True}] * TINY)[0])
    return found


def show(found: Measured, options: argparse.Namespace) -> None:
    """Print what was measured."""
    ratio = statistics.median(b / a for a, b in zip(found.direct, found.streamed, strict=True))
    what = f"{options.clients} clients, {options.speculation}"
    print(f"| {what} | tokens/s | microseconds for each token |\n|---|---|---|")
    for name, seconds in (("engine", found.direct), ("over HTTP, streamed", found.streamed)):
        middle = statistics.median(seconds)
        print(f"| {name} | {found.num_tokens / middle:.0f} | {1e6 * middle / found.num_tokens:.0f} |")
    print(f"\nHTTP adds {100 * (ratio - 1):.1f}% to a token.")
    each = statistics.median(found.cpu) / found.num_events
    per_event = found.num_tokens / found.num_events
    print(f"The event loop computes {1e6 * each:.0f} microseconds for each event of {per_event:.2f} tokens.")
    middle, worst = statistics.median_high(found.lags), found.lags[-1]
    print(f"The loop was late by {1e3 * middle:.1f} ms (median), {1e3 * worst:.1f} ms (worst).")
    rates = [TINY / statistics.median(seconds) for seconds in (found.tiny_direct, found.tiny)]
    print(f"Requests of one token: {rates[0]:.0f} a second from the engine, {rates[1]:.0f} over HTTP.")


if __name__ == "__main__":
    clients() if sys.argv[1:] == ["_clients"] else main()
