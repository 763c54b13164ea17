"""The bundled target served by llama.cpp and by specserve, asked the same in turns (benchmarks/README.md).

    python benchmarks/llama_cpp.py --rounds 3 --clients 1,4 --output peers.json

The first run makes an environment for llama.cpp: it needs a package index, and about 1.5 GB in the cache folder.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import os
import platform
import runpy
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environments import environment, run, say
from side_by_side import PLAIN, Arm, Batch, BenchmarkError, Server, summarize, table

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("xllamacpp", "torch==2.13.0", "transformers", "gguf", "sentencepiece")
CONVERTER = "llama-cpp-python==0.3.36"  # its sdist has llama.cpp's converter, which no wheel has
BYTES = {"f32": 4.0, "bf16": 2.0, "q8_0": 34 / 32}  # of a weight; q8_0 has a 16-bit scale for 32 of them
CONTEXT = 1024  # prompt and answer
MARGIN = 32  # what a tree may write beyond the answer
OURS, PEER = "specserve", "llama.cpp"


class Peer:
    """llama.cpp in an environment of its own, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, environment(folder, PACKAGES, needs=CONVERTER)
        if (folder / "llama.cpp" / "convert_hf_to_gguf.py").is_file():
            return
        say(f"fetching llama.cpp's converter into {folder}, once")
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "download", "--no-binary", ":all:", "--no-deps"]
        run([*pip, "--dest", folder, CONVERTER], folder / "pip.log", "pip download (it needs a network)")
        (sdist,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(sdist) as archive:
            for member in archive:
                _, is_inside, member.name = member.name.partition("/vendor/llama.cpp/")
                if is_inside and member.name.endswith(".py"):
                    archive.extract(member, folder / "llama.cpp", filter="data")
        sdist.unlink()

    def convert(self, source: Path, weights: str, target: Path | None = None) -> Path:
        """Convert a model folder, or a head for `target`, to GGUF."""
        from specserve.provenance import fingerprint

        file = self.folder / f"{fingerprint(source)}-{weights}.gguf"
        if not file.is_file():
            say(f"converting {source} to {weights}")
            of_target = ["--target-model-dir", target] if target else []
            part = file.with_suffix(".part")
            command = [self.python, __file__, "_convert", self.folder / "llama.cpp", source, *of_target]
            command += ["--outtype", weights, "--outfile", part]
            run(command, self.folder / "convert.log", f"converting {source}")
            part.rename(file)
        return file

    def describe(self) -> str:
        code = "import xllamacpp as x; print(x.__version__, '|', x.get_system_info().strip(' |'))"
        return PEER + ", xllamacpp " + subprocess.check_output([self.python, "-c", code], text=True).strip()


def convert_here(llama_cpp: str, *arguments: str) -> None:
    """Run llama.cpp's converter in the peer's environment. It knows tokenizers by a hash, and not pydoc's."""
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    base = importlib.import_module("conversion.base").TextModel
    known = base.get_vocab_base_pre

    def named(self: Any, tokenizer: Any) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return "qwen2"  # splits text as pydoc's tokenizer does

    base.get_vocab_base_pre = named
    sys.argv = [f"{llama_cpp}/convert_hf_to_gguf.py", *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def serve_here(model: str, port: str, slots: str, threads: str, head: str = "", chain: str = "") -> None:
    """Run llama.cpp's HTTP server in the peer's environment, until it is killed."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_parallel, params.n_ctx = model, int(port), int(slots), CONTEXT * int(slots)
    params.hostnames = ["127.0.0.1"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.cache_prompt, params.cache_ram_mib, params.ui, params.fit_params = False, 0, False, False
    if head:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max = head, int(chain)
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    threading.Event().wait()


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    try:
        report = compare(options)
    except BenchmarkError as error:
        say(f"error: {error}")
        return 2
    if options.output:
        options.output.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = {"type": lambda text: text.split(","), "metavar": "A,B"}
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--prompts", type=int, default=18, help="held-out questions of pydoc (%(default)s)")
    add("--max-tokens", type=int, default=128, help="of an answer (%(default)s)")
    add("--clients", default=["1", "4"], help="how many ask at once, one measurement each (1,4)", **listed)
    add("--formats", default=list(BYTES), help="weights of llama.cpp: f32, bf16, q8_0 (all)", **listed)
    add("--speculation", default=[PLAIN, "chain:3", "auto"], help="of specserve (off,chain:3,auto)", **listed)
    add("--draft", type=Path, help="a head as `specserve train` or `import` writes it, for both; else the bundled one")
    add(
        "--serve",
        type=assignment,
        action="append",
        metavar="FORMAT=FLAGS",
        help="serve specserve with these flags too, beside llama.cpp in that format (bf16=); may be repeated",
    )
    add(
        "--checkout",
        type=assignment,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="measure another checkout of specserve too; may be repeated",
    )
    add("--threads", type=int, default=2, help="cores of every server (%(default)s)")
    add("--cache", type=Path, help="folder for llama.cpp's environment, models and logs")
    add("--output", type=Path, help="write everything that was measured to this JSON file")
    options = parser.parse_args()
    if bad := [text for text in options.clients if not text.isdecimal() or text == "0"]:
        parser.error(f"--clients {bad[0]}: expected numbers such as 1,4")
    if bad := [text for text in options.formats if text not in BYTES]:
        parser.error(f"--formats {bad[0]}: expected some of {', '.join(BYTES)}")
    options.clients = [int(text) for text in options.clients]
    options.speculation = list(dict.fromkeys([PLAIN, *options.speculation]))  # whose answers the others must give
    options.serve = dict(options.serve or [("bf16", "")])  # as it is published; the arithmetic is float32
    if bad := [text for text in options.serve if text not in BYTES]:
        parser.error(f"--serve {bad[0]}: expected FORMAT=FLAGS with one of {', '.join(BYTES)}")
    options.checkout = {OURS: ROOT, **{name: Path(folder).absolute() for name, folder in options.checkout}}
    for name, folder in options.checkout.items():
        if not (folder / "specserve" / "__init__.py").is_file():
            parser.error(f"--checkout {name}={folder}: there is no specserve in that folder")
    if min(options.rounds, options.prompts, options.max_tokens, options.threads) < 1:
        parser.error("--rounds, --prompts, --max-tokens and --threads must be at least 1")
    return options


def assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Start every server, ask them in turns and print the table; returns what was measured, ready for JSON."""
    if sys.platform != "linux":
        raise BenchmarkError(f"this runs on Linux (cores and peak memory are the kernel's to tell), not {sys.platform}")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < options.threads:
        raise BenchmarkError(f"--threads {options.threads}: this process may use {len(cores)} cores")
    os.sched_setaffinity(0, cores[: options.threads])  # the servers inherit it
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT))
    from specserve.checkpoints.source import BUNDLED_FOLDER
    from specserve.eval.step_times import read_bandwidth
    from specserve.host import cache_folder

    folder = (options.cache or cache_folder() / "benchmarks" / "llama_cpp").absolute()
    peer = Peer(folder)
    asked = questions(options.prompts + max(options.clients), CONTEXT - options.max_tokens - MARGIN)
    prompts = dict(enumerate(asked[: options.prompts]))
    size = num_weights(BUNDLED_FOLDER)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server) for server in all_servers(options, peer, BUNDLED_FOLDER)]
        for server in servers:
            for clients in options.clients:
                server.ask_all(dict(enumerate(asked[options.prompts :])), options.max_tokens, clients=clients)
        batches: list[Batch] = []
        bandwidths: dict[str, list[float]] = {weights: [] for weights in BYTES}
        for clients in options.clients:
            for number in range(options.rounds):
                say(f"{clients} at once, round {number + 1} of {options.rounds}")
                for weights, of_round in bandwidths.items():
                    of_round.append(read_bandwidth(int(size * BYTES[weights])))
                for turn, group in enumerate([{k: v} for k, v in prompts.items()] if clients == 1 else [prompts]):
                    first = (number + turn) % len(servers)
                    for server in (*servers[first:], *servers[:first]):
                        batches.append(server.ask_all(group, options.max_tokens, clients=clients, number=number))
        peaks = {server.arm: server.peak_bytes() for server in servers}
        late = {server.arm: server.total("specserve:late_compiles_total") for server in servers}
    bandwidth = {weights: statistics.median(of_round) for weights, of_round in bandwidths.items()}
    bounds = {weights: bandwidth[weights] / size / BYTES[weights] for weights in BYTES}
    reference = Arm(OURS, next(iter(options.serve)), PLAIN)
    rows = summarize(batches, bounds, peaks, reference, PEER)
    machine = f"{processor()}, {options.threads} cores"
    reads = ", ".join(f"{size * BYTES[name] / 1e6:.0f} MB at {bandwidth[name] / 1e9:.1f} GB/s" for name in BYTES)
    print(f"{machine}; it reads {reads}\n{peer.describe()}\n\n{table(rows, PEER)}")
    for arm, count in late.items():
        if count:
            say(f"warning: {arm} compiled {count} programs while it was measured")
    commits = {name: commit(where) for name, where in options.checkout.items()}
    return {
        "settings": vars(options),
        "machine": machine,
        "commits": commits,
        "peer": peer.describe(),
        "read_bandwidth": bandwidths,
        "tokens_per_second_bound": bounds,
        "late_compiles": {str(arm): count for arm, count in late.items()},
        "rows": [dataclasses.asdict(row) for row in rows],
        "batches": [dataclasses.asdict(batch) for batch in batches],
    }


def all_servers(options: argparse.Namespace, peer: Peer, target: Path) -> Iterator[Server]:
    """Start the servers one after the other: each measures its steps alone, and nothing but it runs."""
    slots = max(options.clients)
    for weights in options.formats:
        model = peer.convert(target, weights)
        heads: dict[str, tuple[str, ...]] = {PLAIN: ()}
        chains = [name for name in options.speculation if name.startswith("chain:")]
        if options.draft and chains:
            try:
                head = peer.convert(options.draft, weights, target)
                heads |= {name: (str(head), name.partition(":")[2]) for name in chains}
            except BenchmarkError as error:
                say(f"llama.cpp goes without a head: {error}")
        for speculation, head_of in heads.items():
            port = free_port()
            command = [str(peer.python), __file__, "_serve", str(model), str(port), str(slots), str(options.threads)]
            arm = Arm(PEER, weights, speculation)
            say(f"starting {arm}")
            yield Server(arm, port, [*command, *head_of], peer.folder, {"PYTHONPATH": ""}, has_salt=False)
    for name, checkout in options.checkout.items():
        for weights, flags in options.serve.items():
            for speculation in options.speculation:
                port = free_port()
                command = [sys.executable, "-m", "specserve.cli.main", "serve", "--target", "pydoc"]
                command += ["--port", str(port)]
                command += ["--speculation", speculation, "--max-slots", str(slots), "--max-model-len", str(CONTEXT)]
                command += ["--no-prefix-cache", "--no-constrained", "--no-early-ready", *shlex.split(flags)]
                command += ["--draft", str(options.draft.absolute())] if options.draft else []
                arm = Arm(name, weights, speculation)
                say(f"starting {arm}")
                environment = {"PYTHONPATH": str(checkout)}
                yield Server(arm, port, command, peer.folder, environment, has_salt=True)


def questions(count: int, longest: int) -> list[list[int]]:
    """Render held-out questions as token ids, some with answered ones before them."""
    from specserve.checkpoints.source import BUNDLED_FOLDER
    from specserve.eval.prompts import load_chats
    from specserve.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(BUNDLED_FOLDER)
    chats = load_chats("pydoc", 2 * count)
    fitting = [ids for chat in chats if len(ids := tokenizer.render_chat(chat, add_generation_prompt=True)) <= longest]
    if len(fitting) < count:
        raise BenchmarkError(f"only {len(fitting)} questions of {count} fit {longest} tokens: lower --max-tokens")
    return [fitting[i * len(fitting) // count] for i in range(count)]


def num_weights(folder: Path) -> int:
    """Count the weights of a model whose embedding is its output head: all are read for every token."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


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


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["_convert", *rest]:
            convert_here(*rest)
        case ["_serve", *rest]:
            serve_here(*rest)
        case _:
            sys.exit(main())
