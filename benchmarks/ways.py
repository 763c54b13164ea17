"""The ways of one server in turns over HTTP: tokens/s of plain decoding, of `auto`, and of others that it has programs
for, prompts included, and the ratios to the first way.

Run from the checkout: `python benchmarks/ways.py --clients 4,16`. The ways are those of `POST /v1/speculation`. Servers
of their own differ by some percent though they do the same; here all ways share one.
"""

import argparse
import shlex
import statistics
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from environments import load
from in_turns import spread, turns
from over_http import CONTEXT, MARGIN, processor, questions
from served_flags import add_served, flags_of, numbers, positive, run
from server_process import ServerProcess

from specserve.eval.client import Client


def tokens_per_second(client: Client, prompts: list[list[int]], clients: int, max_tokens: int) -> float:
    """Ask all prompts with so many clients, each taking the next one when its answer is complete. Answers are from half
    to one and a half times as long as `max_tokens`: those of one length begin and end together, and that is luck."""

    def ask(prompt: list[int]) -> int:
        length = max(1, max_tokens // 2 + 37 * sum(prompt) % max_tokens)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        reply = client.json("/v1/completions", body | {"cache_salt": uuid.uuid4().hex})  # no answer helps another
        return reply["usage"]["completion_tokens"]

    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        number = sum(pool.map(ask, prompts))
    return number / (time.perf_counter() - begin)


def measure(given: argparse.Namespace, target: Path) -> None:
    """Start a server, and print a row for each number of clients and each way."""
    prompts = questions(target, given.bench, given.prompts, CONTEXT - 3 * given.max_tokens // 2 - MARGIN)
    sizes = ["--max-slots", str(max(given.clients)), "--max-model-len", str(CONTEXT), "--allow-load-draft"]
    print(f"{processor()}; {target}; {given.beside} other processes\n")
    print("| clients | way | tokens/s | to the first |\n|---:|---|---:|---|")
    with ServerProcess([*flags_of(given), *sizes, "--no-early-ready", *given.serve]) as server, load(given.beside):
        server.wait_until_complete()
        for clients in given.clients:
            rates: dict[str, list[float]] = {way: [] for way in given.ways}
            for number, way in turns(given.ways, given.rounds + 1):
                server.client.json("/v1/speculation", {"speculation": way})
                rate = tokens_per_second(server.client, prompts, clients, given.max_tokens)
                if number:  # the first round warms up
                    rates[way].append(rate)
            first = rates[given.ways[0]]
            for way, own in rates.items():
                ratios = [one / other for one, other in zip(own, first, strict=True)]
                print(f"| {clients} | `{way}` | {statistics.median(own):.0f} | {spread(ratios)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_served(parser)
    add("--clients", type=numbers, default="1,4,16", help="how many ask at once, one after another (%(default)s)")
    add("--ways", type=lambda text: text.split(","), default="off,auto", help="with commas (%(default)s)")
    add("--rounds", type=positive, default=4, help="turns of each way, after one that is not counted (%(default)s)")
    add("--prompts", type=positive, default=48, help="questions of a turn (%(default)s)")
    add("--max-tokens", type=positive, default=96, help="of an answer, in the mean (%(default)s)")
    add("--beside", type=int, default=0, help="processes that take a core each meanwhile (%(default)s)")
    add("--serve", type=shlex.split, default=[], metavar="FLAGS", help="more flags of `specserve serve`, in quotes")
    return run(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
