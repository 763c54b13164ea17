"""What the HTTP layer costs: the same answers straight from the engine and over streams, and requests that ask for
almost nothing.

Run from the checkout: `python benchmarks/http_layer.py`. Engine and server are one process, the clients another, on the
same cores. Rounds take turns.
"""

import argparse
import functools
import http.client
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from specserve import LLM, SamplingParams
from specserve.eval.prompts import load_chats
from specserve.serve.http.app import create_app
from specserve.serve.http.server import HttpServer

TINY = 200  # requests of one token, to see what a request costs


def ask(port: int, body: str) -> int:
    """Send one streamed completion and read all of it; returns how many events came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    events = sum(line.startswith(b"data: {") for line in reply)
    connection.close()
    return events


def clients() -> None:
    """The other process: for each line of standard input, [port, clients, bodies], ask and tell the seconds."""
    for line in sys.stdin:
        port, number, bodies = json.loads(line)
        with ThreadPoolExecutor(number) as pool:
            start = time.perf_counter()
            events = sum(pool.map(functools.partial(ask, port), map(json.dumps, bodies)))
            print(json.dumps([time.perf_counter() - start, events]), flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--speculation", default="chain:3")
    options = parser.parse_args()
    slots = options.clients
    with LLM(speculation=options.speculation, max_slots=slots, max_model_len=512, progress=False) as llm:
        server = HttpServer(create_app(llm.engine), port=0)
        server.start()
        other = subprocess.Popen(
            [sys.executable, __file__, "_clients"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert other.stdin is not None
        assert other.stdout is not None

        def over_http(bodies: list[dict]) -> float:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(json.dumps([server.port, slots, bodies]) + "\n")
            other.stdin.flush()
            return json.loads(other.stdout.readline())[0]

        chats = load_chats("pydoc", slots, history=0)
        prompts = [llm.tokenizer.render_chat(chat) for chat in chats]
        params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
        asked = {"temperature": 0, "max_tokens": options.max_tokens, "ignore_eos": True, "stream": True}
        num_tokens, direct, streamed = slots * options.max_tokens, [], []
        for number in range(1 + options.rounds):  # the first warms up, and fills the prefix cache
            start = time.perf_counter()
            llm.generate(prompts, params)
            direct.append(time.perf_counter() - start)
            streamed.append(over_http([{"prompt": prompt, **asked} for prompt in prompts]))
            direct, streamed = (direct, streamed) if number else ([], [])
        ratio = statistics.median(b / a for a, b in zip(direct, streamed, strict=True))
        tiny = [over_http([{"prompt": prompts[0], "max_tokens": 1, "stream": True}] * TINY) for _ in range(3)]
        other.stdin.close()
        server.stop()
    print(f"| {slots} clients, {options.speculation} | tokens/s | microseconds for each token |\n|---|---|---|")
    for name, seconds in (("engine", direct), ("over HTTP, streamed", streamed)):
        middle = statistics.median(seconds)
        print(f"| {name} | {num_tokens / middle:.0f} | {1e6 * middle / num_tokens:.0f} |")
    print(f"\nHTTP adds {100 * (ratio - 1):.1f}% to a token.")
    print(f"It answers {TINY / statistics.median(tiny):.0f} requests of one token a second.")


if __name__ == "__main__":
    clients() if sys.argv[1:] == ["_clients"] else main()
