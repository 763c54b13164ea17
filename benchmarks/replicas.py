"""Replicas on Ray Serve beside the bare server: tokens per second of the same streams, and how long a killed replica is
away.

Run from the checkout: `python benchmarks/replicas.py`. Each server is the command that a user types, with all its
processes on this machine; the clients are threads of this process. The servers take turns: each round starts every one
of them alone, and what is printed are medians over the rounds; a ratio is that to the bare server, with its least and
greatest. With as many replicas as cores there is nothing to gain here, so what is seen is the cost of Ray. Other flags
are `serve`'s, for all servers.
"""

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import psutil
from environments import say
from in_turns import spread, turns
from over_http import processor
from served_flags import positive

REPLICA = "ray::ServeReplica:specserve:Engine"
FLAGS = ["--speculation", "chain:3", "--max-model-len", "256", "--max-slots", "4", "--no-constrained"]
FLAGS += ["--no-early-ready"]  # all programs are there when it is measured
CLUSTER = ("--ray", "--replica-resources", "cpu=0.5")
ARMS = {"bare": (1, ()), "1 replica": (1, CLUSTER), "2 replicas": (2, (*CLUSTER, "--replicas", "2"))}  # engines, flags
START_SECONDS = 900


@contextmanager
def serving(port: int, flags: Sequence[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A server with these flags, from when it is ready on."""
    words = [sys.executable, "-m", "specserve.cli.main", "serve", "--port", str(port), *FLAGS, *flags]
    command = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while not is_ready(url):
            assert command.poll() is None, f"{' '.join(words)} has ended"
            assert time.monotonic() < end, "it is not ready"
            time.sleep(0.2)
        yield url, psutil.Process(command.pid)
    finally:
        command.send_signal(signal.SIGTERM)
        command.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


def num_pages(url: str) -> float:
    """Of all replicas that are there."""
    found = re.search(r"^specserve:pages\{.*\} (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
    assert found is not None
    return float(found[1])


def wait_for_pages(url: str, number: float) -> None:
    """Wait until replicas with so many pages are there: a server is ready with the first of them."""
    end = time.monotonic() + START_SECONDS
    while (found := num_pages(url)) < number:
        assert time.monotonic() < end, f"{found:g} pages serve, expected {number:g}"
        time.sleep(0.1)


def stream(url: str, number: int, max_tokens: int) -> tuple[int, float]:
    """Ask for so many tokens: how many came, and the seconds to the first. Fewer came where the stream was cut."""
    body = {"prompt": f"def function_{number}(", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    begin, first, came = time.monotonic(), 0.0, 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=START_SECONDS) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                first = first or time.monotonic() - begin
                came = usage["completion_tokens"]
    return came, first


def load(url: str, at_once: int, max_tokens: int) -> list[tuple[int, float]]:
    """So many streams at once."""
    streams: list[tuple[int, float]] = []
    threads = [
        threading.Thread(target=lambda i=i: streams.append(stream(url, i, max_tokens)), daemon=True)
        for i in range(at_once)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return streams


def measure(name: str, url: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the tokens per second, and the median of the streams' seconds to the first token."""
    load(url, args.at_once, 8)
    begin = time.monotonic()
    streams = load(url, args.at_once, args.tokens)
    rate = sum(came for came, _ in streams) / (time.monotonic() - begin)
    first = statistics.median(first for _, first in streams)
    say(f"{name}: {rate:.1f} tokens/s, first token after {first * 1e3:.0f} ms")
    return rate, first


def replicas_of(tree: psutil.Process) -> list[psutil.Process]:
    return [each for each in tree.children(recursive=True) if " ".join(each.cmdline()).startswith(REPLICA)]


def recover(url: str, tree: psutil.Process, args: argparse.Namespace) -> None:
    """Kill a replica under load, and wait until as many pages serve as before."""
    whole, found = num_pages(url), replicas_of(tree)
    streams: list[list[tuple[int, float]]] = []
    loaded = threading.Thread(target=lambda: streams.append(load(url, args.at_once, args.tokens)))
    loaded.start()
    time.sleep(1)
    begin = time.monotonic()
    found[0].kill()
    while num_pages(url) == whole:
        time.sleep(0.1)
    noticed = time.monotonic() - begin
    wait_for_pages(url, whole)
    print(f"a killed replica: missed after {noticed:.1f} s, another one serves after {time.monotonic() - begin:.1f} s")
    loaded.join()
    cut = sum(came < args.tokens for came, _ in streams[0])
    print(f"of {args.at_once} streams that ran, {cut} were cut and {args.at_once - cut} came whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=8, help="streams that run at once")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=positive, default=3, help="in each of which every server has a turn")
    parser.add_argument("--port", type=int, default=8765)
    args, flags_of_all = parser.parse_known_args()
    print(processor(), flush=True)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
    pages = 0.0  # of one engine: the first turn is that of the bare server
    for number, name in turns([*ARMS], args.rounds):
        engines, flags = ARMS[name]
        with serving(args.port, [*flags, *flags_of_all]) as (url, tree):
            pages = pages or num_pages(url)
            wait_for_pages(url, engines * pages)
            found[name].append(measure(name, url, args))
            if name == "2 replicas" and number == args.rounds - 1:
                recover(url, tree, args)
    for name, pairs in found.items():
        rate, first = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = spread([own / bare for (own, _), (bare, _) in zip(pairs, found["bare"], strict=True)])
        print(f"{name:12} {rate:7.1f} tokens/s, to the bare server {ratios}; first token after {first * 1e3:6.0f} ms")


if __name__ == "__main__":
    main()
