"""What the HTTP layer costs: the same answers straight from the engine and over streams, and requests that ask for
almost nothing. With `--engine none`, what it does in a second over an engine that costs nothing.

Run from the checkout: `python benchmarks/http_layer.py`. Engine and server are one process. The clients are another one
on the same cores, which only reads bytes, so that what is measured is the server's work and not that of a client's
parser. Rounds take turns.
"""

import argparse
import asyncio
import json
import queue
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from over_http import MARGIN, processor, questions
from served_flags import add_served, positive, run

from specserve import LLM, SamplingParams
from specserve.serve.engine.interface import EngineStats
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.requests.request import Delta, FinishReason, GrammarSpec, Request, SpeculationStats
from specserve.tokenizer import Tokenizer

CONTEXT = 512
TINY = 200  # requests of one token, to see what a request costs
HEAD = (
    "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    "Content-Length: {}\r\n\r\n"
)


def ask(port: int, number: int, path: str, bodies: list[str]) -> int:
    """Send all bodies, `number` at a time, and read the streams to their ends; returns how many events came."""
    waiting, events, tail = bodies[::-1], 0, {}
    with selectors.DefaultSelector() as open_:

        def begin() -> None:
            body = waiting.pop()
            connection = socket.create_connection(("127.0.0.1", port), timeout=600)
            connection.sendall((HEAD.format(path, len(body)) + body).encode())
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
    """The other process: for each line of standard input, [port, clients, path, bodies], ask and print seconds and
    events."""
    for line in sys.stdin:
        port, number, path, bodies = json.loads(line)
        start = time.perf_counter()
        events = ask(port, number, path, [json.dumps(body) for body in bodies])
        print(json.dumps([time.perf_counter() - start, events]), flush=True)


class Served:
    """A server over an engine, whose loop is watched, and the process of its clients."""

    def __init__(self, engine: Any, num_clients: int) -> None:
        self.watch, self._num_clients = LoopWatch(), num_clients
        self._server = HttpServer(self.watch.wrap(create_app(engine)), port=0)  # type: ignore[arg-type] (any ASGI app)

    def __enter__(self) -> Self:
        self._server.start()
        self._other = subprocess.Popen(
            [sys.executable, __file__, "_clients"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._other.communicate()
        self._server.stop()

    def ask(self, bodies: list[dict], path: str = "/v1/completions") -> tuple[float, int]:
        """Seconds until all streams have ended, and their events."""
        assert self._other.stdin is not None
        assert self._other.stdout is not None
        self._other.stdin.write(json.dumps([self._server.port, self._num_clients, path, bodies]) + "\n")
        self._other.stdin.flush()
        return json.loads(self._other.stdout.readline())


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


class NoEngine:
    """Says "word" until a length ends it: a token in each round of its thread for every sequence, as an engine has it
    in each step, and at once."""

    model_name, vocab_size, max_model_len, speculation, draft = "none", 4096, 4096, "off", None
    is_healthy = is_ready = True

    def __init__(self, target: Path) -> None:
        self.tokenizer = Tokenizer.load(target)
        self._new: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_delta: Callable[[Delta], None], /, **_: Any
    ) -> Request:
        request = Request("", tuple(prompt_ids), params, params.max_tokens or 1, 0, on_delta=on_delta)
        self._new.put(request)
        return request

    def knows_grammar(self, grammar: GrammarSpec, /) -> bool:  # noqa: ARG002
        return True

    def stats(self) -> EngineStats:
        return EngineStats()

    def stop(self) -> None:
        self._new.put(None)
        self._thread.join()

    def _run(self) -> None:
        sequences: list[Iterator[None]] = []
        while True:
            while not sequences or not self._new.empty():
                request = self._new.get()
                if request is None:
                    return
                sequences.append(self._says(request))
            sequences = [each for each in sequences if next(each, self) is None]

    def _says(self, request: Request) -> Iterator[None]:
        for _ in range(request.max_new_tokens - 1):
            request.on_delta(Delta((5,), " word", num_chars=(5,)))
            yield
        stats = SpeculationStats(num_steps=request.max_new_tokens)
        request.on_delta(Delta((5,), " word", FinishReason.LENGTH, stats=stats, num_chars=(5,)))


def alone(options: argparse.Namespace, target: Path) -> None:
    """Print what the layer does over an engine that costs nothing."""
    engine, slots = NoEngine(target), options.clients
    content = "What does `os.path.join` do?"
    asked = {
        "/v1/completions": {"prompt": content, "stream": True},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": content}], "stream": True},
    }
    print(
        f"| {slots} clients, no engine | events/s | loop, us each | requests/s | loop, us each |\n|---|---|---|---|---|"
    )
    with Served(engine, slots) as served:

        def measure(bodies: list[dict], path: str) -> tuple[float, float, int]:
            """Seconds, those of the loop's thread, and events: each the middle of all rounds."""
            served.ask(bodies, path)  # warms up
            found = []
            for _ in range(options.rounds):
                before = served.watch.cpu_seconds()
                seconds, events = served.ask(bodies, path)
                found.append((seconds, served.watch.cpu_seconds() - before, events))
            seconds, cpu, events = (statistics.median(column) for column in zip(*found, strict=True))
            return seconds, cpu, int(events)

        for path, body in asked.items():
            seconds, cpu, events = measure([body | {"max_tokens": options.max_tokens}] * (4 * slots), path)
            per_event = f"{events / seconds:,.0f} | {1e6 * cpu / events:.0f}"
            seconds, cpu, _ = measure([body | {"max_tokens": 1}] * TINY, path)
            print(f"| {path} | {per_event} | {TINY / seconds:,.0f} | {1e6 * cpu / TINY:.0f} |")
    engine.stop()


def beside_engine(options: argparse.Namespace, target: Path) -> None:
    """Print what the layer adds to the tokens of a target."""
    slots = options.clients
    sizes = {"max_slots": slots, "max_model_len": CONTEXT}
    with (
        LLM(options.target, options.draft, speculation=options.speculation, progress=False, **sizes) as llm,
        Served(llm.engine, slots) as served,
    ):
        watch = served.watch
        prompts = questions(target, options.bench, slots, CONTEXT - options.max_tokens - MARGIN, history=0)
        params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
        asked = {"temperature": 0, "max_tokens": options.max_tokens, "ignore_eos": True, "stream": True}
        bodies = [{"prompt": prompt, **asked} for prompt in prompts]
        num_tokens, direct, streamed, cpu, num_events = slots * options.max_tokens, [], [], [], 0
        served.ask(bodies)  # warms up, and fills the prefix cache
        llm.generate(prompts, params)
        watch.lags.clear()
        for _ in range(options.rounds):
            start = time.perf_counter()
            llm.generate(prompts, params)
            direct.append(time.perf_counter() - start)
            before = watch.cpu_seconds()
            seconds, num_events = served.ask(bodies)
            streamed.append(seconds)
            cpu.append(watch.cpu_seconds() - before)
        lags = sorted(watch.lags)
        one = SamplingParams(temperature=0.0, max_tokens=1)
        tiny, tiny_direct = [], []
        for _ in range(3):
            start = time.perf_counter()
            llm.generate([prompts[0]] * TINY, one)
            tiny_direct.append(time.perf_counter() - start)
            tiny.append(served.ask([{"prompt": prompts[0], "max_tokens": 1, "stream": True}] * TINY)[0])
    ratio = statistics.median(b / a for a, b in zip(direct, streamed, strict=True))
    print(f"| {slots} clients, {options.speculation} | tokens/s | microseconds for each token |\n|---|---|---|")
    for name, seconds in (("engine", direct), ("over HTTP, streamed", streamed)):
        middle = statistics.median(seconds)
        print(f"| {name} | {num_tokens / middle:.0f} | {1e6 * middle / num_tokens:.0f} |")
    print(f"\nHTTP adds {100 * (ratio - 1):.1f}% to a token.")
    each = statistics.median(cpu) / num_events
    per_event = num_tokens / num_events
    print(f"The event loop computes {1e6 * each:.0f} microseconds for each event of {per_event:.2f} tokens.")
    print(f"The loop was late by {1e3 * lags[len(lags) // 2]:.1f} ms (median), {1e3 * lags[-1]:.1f} ms (worst).")
    rates = [TINY / statistics.median(seconds) for seconds in (tiny_direct, tiny)]
    print(f"Requests of one token: {rates[0]:.0f} a second from the engine, {rates[1]:.0f} over HTTP.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_served(parser)
    parser.add_argument("--engine", choices=["own", "none"], default="own", help="none: only the target's tokenizer")
    parser.add_argument("--clients", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--max-tokens", type=positive, default=96)
    parser.add_argument("--speculation", default="chain:3")
    return run(parser, print_tables)


def print_tables(options: argparse.Namespace, target: Path) -> None:
    """Print the processor, and what the layer does with an engine or without one."""
    print(f"{processor()}; {target}\n")
    (alone if options.engine == "none" else beside_engine)(options, target)


if __name__ == "__main__":
    clients() if sys.argv[1:] == ["_clients"] else sys.exit(main())
