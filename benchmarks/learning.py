"""A head that learns from traffic that drifts, and what keeping the traffic costs.

    python benchmarks/learning.py drift --styles chat,code,code,code
    python benchmarks/learning.py cost

`drift` starts one server with --learn on the bundled target. In each round it asks as many questions of one style as
begin a round of training, waits until that has ended, and prints the taus of the static, the served and the candidate
head on held-out prompts, and which one was chosen. The styles are `chat`, the questions that the bundled heads were
trained on, and `code`, files of Python's library to be continued, without a chat.

`cost` asks two servers in turns, one of which keeps its traffic and never trains: tokens/s of both, and their ratio."""

import argparse
import itertools
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from environments import say
from server_process import ServerProcess, value

from specserve.data import pydoc

CHARS = 300  # of a file, as a prompt
COMMON = ("--target", "pydoc", "--speculation", "chain:3")
POLL_SECONDS = 1.0
SPARE = 1.2  # of the answers of a round are asked for: some are of one token, which teaches nothing


def main() -> int:
    options = _parse()
    {"drift": drift, "cost": cost}[options.what](options)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=("drift", "cost"))
    add("--styles", type=lambda text: text.split(","), default=["chat", "code", "code", "code"], metavar="A,B")
    add("--answers", type=int, default=320, help="of a round (%(default)s)")
    add("--steps", type=int, default=100, help="of training, of a round (%(default)s)")
    add("--max-tokens", type=int, default=64, help="of an answer (%(default)s)")
    add("--clients", type=int, default=8, help="that ask at once (%(default)s)")
    add("--rounds", type=int, default=6, help="of cost (%(default)s)")
    add("--serve", type=str.split, default=[], metavar="FLAGS", help="further flags of specserve serve")
    return parser.parse_args()


def questions(style: str, max_tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the body of endless requests of a style, the same ones in every run."""
    rng, options = random.Random(0), {"max_tokens": max_tokens, "temperature": 0.7}
    if style == "chat":
        pairs = [*pydoc.build("held-out")]
        while True:
            messages = [rng.choice(pairs).messages[0].as_dict()]
            yield "/v1/chat/completions", {"messages": messages, "seed": rng.randrange(2**31), **options}
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    while True:
        text = rng.choice(files).read_text(errors="replace")
        begin = rng.randrange(max(1, len(text) - CHARS))
        body = {"prompt": text[begin : begin + CHARS], "seed": rng.randrange(2**31), **options}
        yield "/v1/completions", body


def ask(server: ServerProcess, asked: Sequence[tuple[str, dict[str, Any]]], clients: int) -> float:
    """Ask all, and return the tokens per second."""
    with ThreadPoolExecutor(clients) as pool:
        begin = time.monotonic()
        replies = list(pool.map(lambda each: server.client.json(*each), asked))
    return sum(reply["usage"]["completion_tokens"] for reply in replies) / (time.monotonic() - begin)


def drift(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        learn = ("--learn", folder, "--learn-answers", str(options.answers), "--learn-steps", str(options.steps))
        streams = {style: questions(style, options.max_tokens) for style in options.styles}
        with ServerProcess([*COMMON, *learn, *options.serve]) as server:
            server.wait_until_complete()
            for number, style in enumerate(options.styles, 1):
                rate = ask(server, [*itertools.islice(streams[style], round(SPARE * options.answers))], options.clients)
                begin = time.monotonic()
                while (value(text := server.client.text("/metrics"), "specserve:learn_rounds_total") or 0) < number:
                    server.check()
                    time.sleep(POLL_SECONDS)
                lines = [line for line in text.splitlines() if line.startswith("specserve:learn_")]
                say(f"round {number}, {style}: {rate:.0f} tokens/s, then {time.monotonic() - begin:.0f} s of training")
                for line in lines:
                    if any(name in line for name in ("held_out_tau", "live_tau", "learn_version", "drift", "rounds")):
                        say(f"  {line.removeprefix('specserve:learn_')}")


def cost(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keeping = ServerProcess([*COMMON, "--learn", folder, "--learn-answers", str(10**9), *options.serve])
        with keeping, ServerProcess([*COMMON, *options.serve]) as plain:
            for server in (keeping, plain):
                server.wait_until_complete()
            stream, ratios = questions("chat", options.max_tokens), []
            ask(keeping, (first := [*itertools.islice(stream, options.clients * 2)]), options.clients)
            ask(plain, first, options.clients)
            for number in range(options.rounds):
                asked, rates = [*itertools.islice(stream, options.clients * 8)], {}
                for server in (keeping, plain) if number % 2 else (plain, keeping):
                    rates[server] = ask(server, asked, options.clients)
                ratios.append(rates[keeping] / rates[plain])
                say(f"{rates[keeping]:.0f} tokens/s while keeping, {rates[plain]:.0f} without: {ratios[-1]:.3f}")
            say(f"median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    sys.exit(main())
