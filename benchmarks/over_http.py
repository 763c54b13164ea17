"""Another server beside specserve's, over HTTP: what is measured and how, whichever engine the other one is.

A file of this folder makes a comparison of it by a `Peer`, and calls `main`.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from environments import load, report, say
from side_by_side import PLAIN, Arm, Batch, BenchmarkError, Server, summarize, table

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 1024  # prompt and answer
MARGIN = 32  # tokens that a tree may write beyond the answer
OURS, BUNDLED = "specserve", "pydoc"
FILE = "{file}"  # in the flags of --serve


class Peer(Protocol):
    """The other engine, in an environment of its own."""

    name: str
    weight_bytes: Mapping[str, float]  # of a weight, in each format that the engine serves
    folder: Path

    def servers(self, options: argparse.Namespace, target: Path) -> Iterator[Server]:
        """Start its servers of `target`, one after the other, for the formats and chains of the options."""
        ...

    def file(self, target: Path, weights: str) -> Path:
        """Return the file of `target` that it serves in a format. Raises BenchmarkError where it has none."""
        ...

    def describe(self) -> str:
        """Name the engine with its version."""
        ...


class Nobody:
    """No other engine: specserve's own ways beside each other, in the table beside plain decoding."""

    name = OURS

    def __init__(self, weight_bytes: Mapping[str, float], folder: Path) -> None:
        self.weight_bytes, self.folder = weight_bytes, folder
        folder.mkdir(parents=True, exist_ok=True)

    def servers(self, options: argparse.Namespace, target: Path) -> Iterator[Server]:
        del options, target
        yield from ()

    def file(self, target: Path, weights: str) -> Path:
        raise BenchmarkError(f"--serve {weights}=...{FILE}: there is no other engine's file of {target}")

    def describe(self) -> str:
        return "no other engine"


def main(make_peer: Callable[[Path], Peer], cache_name: str, formats: Mapping[str, float], description: str) -> int:
    """Run a comparison from the command line; `cache_name` is the peer's folder in the cache."""
    options = parse(formats, description)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    make = make_peer if options.formats else functools.partial(Nobody, formats)
    return report(lambda: compare(options, make, cache_name), options.output)


def parse(formats: Mapping[str, float], description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = {"type": lambda text: text.split(","), "metavar": "A,B"}
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--target", default=BUNDLED, help="folder, preset or hub id of what all of them serve (%(default)s)")
    add("--bench", help="the questions, as of `specserve eval`; pydoc for the bundled target, else they must be given")
    add("--prompts", type=int, default=18, help="questions (%(default)s)")
    add("--max-tokens", type=int, default=128, help="of an answer (%(default)s)")
    add("--clients", default=["1", "4"], help="how many ask at once, one measurement each (1,4)", **listed)
    add("--formats", default=list(formats), help=f"of the other engine: {', '.join(formats)} (all); or none", **listed)
    add("--speculation", default=[PLAIN, "chain:3", "auto"], help="of specserve (off,chain:3,auto)", **listed)
    add("--draft", type=Path, help="a head as `specserve train` or `import` writes it, for both; else the bundled one")
    add("--lookup", action="store_true", help="serve the other engine also with its speculation without a head")
    add(
        "--serve",
        type=assignment,
        action="append",
        metavar="FORMAT=FLAGS",
        help="serve specserve with these flags too, beside the other engine in that format (bf16=); may be repeated. "
        f"{FILE} is the file that the other one serves",
    )
    add(
        "--checkout",
        type=assignment,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="measure another checkout of specserve too; may be repeated",
    )
    add("--beside", type=int, default=0, help="processes that take a core each meanwhile (%(default)s)")
    add("--threads", type=int, default=2, help="cores of every server (%(default)s)")
    add("--cache", type=Path, help="folder for the other engine's environment, models and logs")
    add("--output", type=Path, help="write everything that was measured to this JSON file")
    options = parser.parse_args()
    if bad := [text for text in options.clients if not text.isdecimal() or text == "0"]:
        parser.error(f"--clients {bad[0]}: expected numbers such as 1,4")
    options.formats = [] if options.formats == ["none"] else options.formats
    if bad := [text for text in options.formats if text not in formats]:
        parser.error(f"--formats {bad[0]}: expected some of {', '.join(formats)}, or none")
    if options.lookup and not options.formats:
        parser.error("--lookup: is of the other engine, which --formats none leaves out")
    options.clients = [int(text) for text in options.clients]
    options.speculation = list(dict.fromkeys([PLAIN, *options.speculation]))  # all must answer as the first
    options.serve = dict(options.serve or [("bf16", "")])  # as it is published; the arithmetic is float32
    if bad := [text for text in options.serve if text not in formats]:
        parser.error(f"--serve {bad[0]}: expected FORMAT=FLAGS with one of {', '.join(formats)}")
    options.checkout = {OURS: ROOT, **{name: Path(folder).absolute() for name, folder in options.checkout}}
    for name, folder in options.checkout.items():
        if not (folder / "specserve" / "__init__.py").is_file():
            parser.error(f"--checkout {name}={folder}: there is no specserve in that folder")
    if options.target != BUNDLED and not options.bench:
        parser.error(f"--target {options.target}: say what it is asked, such as --bench mt-bench:FILE")
    options.bench = options.bench or BUNDLED
    if min(options.rounds, options.prompts, options.max_tokens, options.threads) < 1:
        parser.error("--rounds, --prompts, --max-tokens and --threads must be at least 1")
    return options


def assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def take_cores(number: int) -> None:
    """Keep this process, and the servers that it starts, to so many cores. Raises BenchmarkError."""
    if sys.platform != "linux":
        raise BenchmarkError(f"this runs on Linux (cores and peak memory are the kernel's to tell), not {sys.platform}")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < number:
        raise BenchmarkError(f"--threads {number}: this process may use {len(cores)} cores")
    os.sched_setaffinity(0, cores[:number])


def compare(options: argparse.Namespace, make_peer: Callable[[Path], Peer], cache_name: str) -> dict[str, Any]:
    """Start every server, ask them in turns and print the table; returns what was measured, ready for JSON."""
    take_cores(options.threads)
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT))
    from specserve.checkpoints.configs import find_config
    from specserve.checkpoints.source import resolve_target
    from specserve.eval.bench.step_times import read_bandwidth
    from specserve.host import cache_folder

    folder = (options.cache or cache_folder() / "benchmarks" / cache_name).absolute()
    peer = make_peer(folder)
    sizes = peer.weight_bytes
    target = resolve_target(options.target).folder
    asked = questions(
        target, options.bench, options.prompts + max(options.clients), CONTEXT - options.max_tokens - MARGIN
    )
    prompts = dict(enumerate(asked[: options.prompts]))
    size = num_weights(find_config(str(target))[0])
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server) for server in own_and_peers(options, peer, target)]
        stack.enter_context(load(options.beside))
        for server in servers:
            for clients in options.clients:
                server.ask_all(dict(enumerate(asked[options.prompts :])), options.max_tokens, clients=clients)
        batches: list[Batch] = []
        bandwidths: dict[str, list[float]] = {weights: [] for weights in sizes}
        for clients in options.clients:
            for number in range(options.rounds):
                say(f"{clients} at once, round {number + 1} of {options.rounds}")
                for weights, of_round in bandwidths.items():
                    of_round.append(read_bandwidth(int(size * sizes[weights])))
                for turn, group in enumerate([{k: v} for k, v in prompts.items()] if clients == 1 else [prompts]):
                    first = (number + turn) % len(servers)
                    for server in (*servers[first:], *servers[:first]):
                        batches.append(server.ask_all(group, options.max_tokens, clients=clients, number=number))
        peaks = {server.arm: server.peak_bytes() for server in servers}
        late = {server.arm: server.total("specserve:late_compiles_total") for server in servers}
    bandwidth = {weights: statistics.median(of_round) for weights, of_round in bandwidths.items()}
    bounds = {weights: bandwidth[weights] / size / sizes[weights] for weights in sizes}
    reference = Arm(OURS, next(iter(options.serve)), PLAIN)
    rows = summarize(batches, bounds, peaks, reference, peer.name)
    machine = f"{processor()}, {options.threads} cores, {options.beside} other processes"
    reads = ", ".join(f"{size * sizes[name] / 1e6:.0f} MB at {bandwidth[name] / 1e9:.1f} GB/s" for name in sizes)
    print(f"{machine}; it reads {reads}\n{peer.describe()}\n\n{table(rows, peer.name)}")
    for arm, count in late.items():
        if count:
            say(f"warning: {arm} compiled {count} programs while it was measured")
    return {
        "settings": vars(options),
        "machine": machine,
        "commits": {name: commit(where) for name, where in options.checkout.items()},
        "peer": peer.describe(),
        "read_bandwidth": bandwidths,
        "tokens_per_second_bound": bounds,
        "late_compiles": {str(arm): count for arm, count in late.items()},
        "rows": [dataclasses.asdict(row) for row in rows],
        "batches": [dataclasses.asdict(batch) for batch in batches],
    }


def own_and_peers(options: argparse.Namespace, peer: Peer, target: Path) -> Iterator[Server]:
    """Start the servers one after the other: each measures its steps alone, and nothing but it runs."""
    yield from peer.servers(options, target)
    for name, checkout in options.checkout.items():
        for weights, given in options.serve.items():
            flags = given.replace(FILE, str(peer.file(target, weights))) if FILE in given else given
            for speculation in options.speculation:
                port = free_port()
                command = [sys.executable, "-m", "specserve.cli.main", "serve", "--target", options.target]
                command += ["--port", str(port)]
                command += [
                    "--speculation",
                    speculation,
                    "--max-slots",
                    str(max(options.clients)),
                    "--max-model-len",
                    str(CONTEXT),
                ]
                command += ["--no-prefix-cache", "--no-constrained", "--no-early-ready", *shlex.split(flags)]
                draft = options.draft and (options.draft.absolute() if options.draft.is_dir() else options.draft)
                command += ["--draft", str(draft)] if draft else []  # a folder, or the name of one that is bundled
                arm = Arm(name, weights, speculation)
                say(f"starting {arm}")
                environment = {"PYTHONPATH": str(checkout)}
                yield Server(arm, port, command, peer.folder, environment, has_salt=True)


def questions(target: Path, bench: str, count: int, longest: int, history: int = 2) -> list[list[int]]:
    """Render a bench's questions as token ids; those of pydoc have up to `history` answered ones before them."""
    from specserve.eval.prompts import load_chats
    from specserve.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(target)
    chats = load_chats(bench, 2 * count, history)
    fitting = [ids for chat in chats if len(ids := tokenizer.render_chat(chat, add_generation_prompt=True)) <= longest]
    if len(fitting) < count:
        raise BenchmarkError(
            f"only {len(fitting)} questions of {count} are there and fit {longest} tokens: lower --max-tokens, "
            "--prompts or --clients"
        )
    return [fitting[i * len(fitting) // count] for i in range(count)]


def num_weights(config: Any) -> int:
    """Count the weights that are read for every token: an embedding among them only where it is the output head."""
    from specserve.models.presets import target_size

    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    return target_size(config).active - looked_up


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def processor() -> str:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        lines = subprocess.check_output(["lscpu"], text=True, env={**os.environ, "LC_ALL": "C"}).splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model name")), "")
    return platform.processor() or platform.machine()


def commit(folder: Path) -> str:
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return ""
