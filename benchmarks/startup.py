"""How soon a server answers, and how much memory it holds: a first start, which compiles, and one that finds its
programs kept.

Run from the checkout: `python benchmarks/startup.py [flags of specserve serve]`. Everything is seen from outside, over
HTTP. Linux only.
"""

import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from side_by_side import START_SECONDS, Arm, Server

LEFT = "specserve:programs_left"
PROMPT = tuple(range(100, 164))  # token ids; what they say does not matter here
NUM_TOKENS = 32


@dataclass(frozen=True)
class Moment:
    """When a server had come so far, and what it held then."""

    what: str
    seconds: float  # since its process began
    bytes: int  # resident


def watch(flags: Sequence[str], folder: Path, cache: Path) -> Iterator[Moment]:
    """Start `specserve serve` with these flags and tell when it is ready, has answered, and has every program."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "specserve.cli.main", "serve", "--port", str(port), *flags]
    begin = time.monotonic()

    def moment(what: str) -> Moment:
        return Moment(what, time.monotonic() - begin, server.resident_bytes())

    arm = Arm("specserve", "f32", "startup")
    server = Server(arm, port, command, folder, {"XDG_CACHE_HOME": str(cache)}, has_salt=True)
    with server:
        yield moment("ready")
        server.ask(0, PROMPT, NUM_TOKENS)
        yield moment(f"a first answer of {NUM_TOKENS} tokens")
        while server.total(LEFT) and time.monotonic() - begin < START_SECONDS:
            time.sleep(0.5)
        yield moment("all programs")


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        starts = [list(watch(sys.argv[1:], folder, folder / "cache")) for _ in range(2)]
    print("| | first start | from kept programs |\n|---|---|---|")
    for pair in zip(*starts, strict=True):
        cells = [f"{each.seconds:.1f} s, {each.bytes / 2**20:,.0f} MiB" for each in pair]
        print(f"| {pair[0].what} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
