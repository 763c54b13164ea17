"""A check that a server's memory stays what it was: `specserve serve` under a storm of bodies that are meant to hurt
and of prompts as long as the context, by its resident memory, which is read from outside every few seconds.

Run from the checkout: `python benchmarks/memory.py --minutes 10`. What a body costs must be gone when it is answered,
refused or hung up on. Growth counts from what the server holds when it has seen one of everything: a cache full of
prompts as long as the context, whose pages take memory from their first use on, and batches of each size, with a
grammar and without, whose programs are read when they are used. Linux only.
"""

import argparse
import contextlib
import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from over_http import processor
from served_flags import add_served, flags_of, positive, run
from server_process import ServerProcess

from specserve.checkpoints.configs import loaded_config
from specserve.checkpoints.tensors import CONFIG, read_json

SAMPLE_SECONDS = 5.0
SETTLE_SECONDS = 60.0  # in which the programs for grammars are compiled, if no earlier start has
IDLE_SECONDS = 30.0
CLIENT_SECONDS = 120.0  # of silence, after which a client gives up
FIRST_ID = 100  # of the tokens that prompts are drawn from, where there are more
CONTEXT = 4096  # the longest prompts of the storm almost fill it
FILLING = 9  # prompts almost as long as the context, whose pages are more than the 8 slots' of a CPU's server
Body = tuple[str, bytes, bool]  # path, what is sent, and whether the client hangs up after the first bytes

WORDS = ["list", "of", "the", "first", "value", "that", "an", "iterator", "gives", "back", "when", "code", "calls"]


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def _drawer(rng: random.Random, vocabulary: int) -> Callable[[int], list[int]]:
    """A function that draws so many token ids."""
    first = FIRST_ID if vocabulary > 2 * FIRST_ID else 0
    return lambda number: [rng.randrange(first, vocabulary) for _ in range(number)]


def _schema(rng: random.Random) -> dict:
    """One that has not been seen, so that it is compiled."""
    names = [f"{rng.choice(WORDS)}_{rng.getrandbits(32):x}" for _ in range(rng.randrange(1, 200))]
    members = {name: rng.choice([{"type": "integer"}, {"enum": _text(rng, 9).split()}]) for name in names}
    return {"type": "object", "properties": members, "required": names[:3], "additionalProperties": False}


def bodies(rng: random.Random, vocabulary: int) -> Iterator[Body]:
    """Every kind of body, for ever, in an order that a seed gives."""
    ids = _drawer(rng, vocabulary)
    kinds: list[Callable[[], tuple[str, dict | bytes]]] = [
        # bodies that run
        lambda: ("completions", {"prompt": ids(rng.randrange(2000, 3900)), "max_tokens": 16}),
        lambda: ("completions", {"prompt": _text(rng, 1500), "max_tokens": 32, "temperature": 1.0, "seed": 1}),
        lambda: ("completions", {"prompt": ids(400), "max_tokens": 200, "ignore_eos": True}),
        lambda: ("completions", {"prompt": ids(1500), "max_tokens": 4, "echo": True, "logprobs": 5}),
        lambda: ("completions", {"prompt": _text(rng, 50), "n": 16, "max_tokens": 24, "temperature": 1.2}),
        lambda: ("completions", {"prompt": [ids(30) for _ in range(64)], "max_tokens": 2}),
        lambda: ("chat/completions", {"messages": _chat(rng, 300), "max_tokens": 8}),
        lambda: ("chat/completions", {"messages": _chat(rng, 2), "max_tokens": 60, "response_format": _format(rng)}),
        lambda: (
            "completions",
            {"prompt": "x", "guided_regex": f"(a|b{rng.random()}){{1,400}}", "max_tokens": 20},
        ),
        lambda: ("completions", {"prompt": ids(40), "cache_salt": str(rng.getrandbits(64)), "max_tokens": 40}),
        lambda: ("completions", {"prompt": "x", "stop": ["s" * 1024] * 4, "bad_words": [_text(rng, 60)] * 64}),
        lambda: ("responses", {"input": _text(rng, 400), "max_output_tokens": 20}),
        lambda: ("messages", {"messages": _chat(rng, 9), "max_tokens": 20}),
        # bodies that are refused, late or early
        lambda: ("completions", {"prompt": [1] * 400_000}),
        lambda: ("completions", {"prompt": [[1]] * 100_000}),
        lambda: ("completions", {"prompt": _text(rng, 1_000_000)}),
        lambda: ("completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(200_000)}}),
        lambda: ("completions", {"prompt": "x", **{f"{rng.getrandbits(64)}": 1 for _ in range(50_000)}}),
        lambda: ("completions", {"prompt": "x", "guided_json": {"anyOf": [_schema(rng) for _ in range(200)]}}),
        lambda: ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * 200_000}),
        lambda: ("chat/completions", {"messages": [{"role": "user", "content": [_part()] * 50_000}]}),
        lambda: ("chat/completions", {"messages": _chat(rng, 1), "tools": [{"type": "function"}] * 50_000}),
        lambda: ("completions", b'{"prompt": ' + b"[" * 1_000_000),
        lambda: ("completions", b'{"prompt": "' + b"\\ud800" * 100_000 + b'"}'),
        lambda: ("completions", b'{"a": 1,' * 200_000),
        lambda: ("completions", rng.randbytes(4_000_000)),
        lambda: ("completions", b"x" * 17_000_000),  # more than is read
    ]
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            path, body = kind()
            is_cut = rng.random() < 0.2
            if isinstance(body, dict):
                body = json.dumps(body | ({"stream": True} if is_cut or rng.random() < 0.5 else {})).encode()
            yield f"/v1/{path}", body, is_cut


def _chat(rng: random.Random, turns: int) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": _text(rng, 8)} for i in range(2 * turns - 1)]


def _part() -> dict:
    return {"type": "text", "text": "a"}


def _format(rng: random.Random) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(rng)}}


def storm(url: str, rng: random.Random, vocabulary: int, is_over: threading.Event, seen: Counter[str]) -> None:
    """Send one body after another, and count the answers by status."""
    parts = urlsplit(url)
    for path, body, is_cut in bodies(rng, vocabulary):
        if is_over.is_set():
            return
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CLIENT_SECONDS)
        with contextlib.closing(connection):
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                reply.read(*([1] if is_cut else []))
                seen["hung up" if is_cut and reply.status == 200 else str(reply.status)] += 1
            except (OSError, http.client.HTTPException) as error:  # a body that is too long is not read to its end
                seen[type(error).__name__] += 1


def ask_side_by_side(server: ServerProcess) -> None:
    """Ask as many requests at once as each batch has, with a grammar among them and without."""
    for number in (1, 2, 4, 8):
        for form in ({"ignore_eos": True}, {"guided_regex": "(a|b){90}"}):
            body = {"prompt": ["x"] * number, "max_tokens": 90, **form}
            server.client.json("/v1/completions", body)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_served(parser, has_questions=False)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the storm")
    parser.add_argument("--clients", type=positive, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculation", default="chain:3")
    parser.add_argument("--serve", default="", help="more flags of `specserve serve`")
    return run(parser, watch)


def _vocab_size(target: Path) -> int:
    return loaded_config(read_json(target / CONFIG), dtype="float32", where=str(target)).vocab_size


def watch(options: argparse.Namespace, target: Path) -> None:
    """Print what the server held."""
    print(f"{processor()}; {target}", flush=True)
    flags = [*flags_of(options), "--max-model-len", str(CONTEXT), "--speculation", options.speculation]
    flags += options.serve.split()
    seen: Counter[str] = Counter()
    with ServerProcess(flags) as server:
        server.wait_until_complete()
        time.sleep(SAMPLE_SECONDS)
        print(f"at start, with its programs: {server.resident_bytes / 1e6:,.0f} MB", flush=True)
        vocabulary = _vocab_size(target)
        ids = _drawer(random.Random(options.seed), vocabulary)
        for _ in range(FILLING):
            server.client.json("/v1/completions", {"max_tokens": 16, "prompt": ids(3900)})
        ask_side_by_side(server)
        time.sleep(SETTLE_SECONDS)
        ask_side_by_side(server)
        start = server.resident_bytes
        print(f"after one of everything: {start / 1e6:,.0f} MB", flush=True)
        is_over = threading.Event()
        rngs = [random.Random(f"{options.seed}-{i}") for i in range(options.clients)]
        url = server.client.url
        clients = [threading.Thread(target=storm, args=(url, rng, vocabulary, is_over, seen)) for rng in rngs]
        for client in clients:
            client.start()
        begin, samples = time.monotonic(), [(0.0, start)]

        def say(what: str) -> None:
            last = samples[-1][1]
            counts = ", ".join(f"{status} {number}" for status, number in sorted(seen.items()))
            print(f"{what}: {last / 1e6:,.0f} MB ({last / start - 1:+.1%}); {counts}", flush=True)

        said = 0
        while (now := time.monotonic() - begin) < 60 * options.minutes:
            time.sleep(SAMPLE_SECONDS)
            samples.append((now, server.resident_bytes))
            if now >= 60 * (said + 1):
                said += 1
                say(f"after {said} min")
        is_over.set()
        for client in clients:
            client.join()
        samples.append((time.monotonic() - begin, server.resident_bytes))
        say("at its end")
        most = max(samples, key=lambda sample: sample[1])
        print(f"at most: {most[1] / 1e6:,.0f} MB ({most[1] / start - 1:+.1%}), after {most[0]:.0f} s")
        time.sleep(IDLE_SECONDS)
        samples.append((0.0, server.resident_bytes))
        say(f"idle for {IDLE_SECONDS:.0f} s")
        if any(status.startswith("5") and status != "503" for status in seen):
            raise SystemExit(f"the server failed:\n{server.last_lines()}")


if __name__ == "__main__":
    sys.exit(main())
