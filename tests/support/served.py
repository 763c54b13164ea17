"""`specserve serve` in processes of its own, over a tiny target."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from engines import EOS, Letters
from fakes import wait_for

from specserve.checkpoints.load import Target

SCRIPT = "from quick_compile import compile_quickly as quick; quick(); from specserve.cli.main import main; main()"

OF_FLAGS = (  # an expression of the modules that no server without their flags imports
    r"specserve\.(learn|models\.adapters|checkpoints\.(lora|update)"
    r"|serve\.(loras|tunix|update_folder|engine\.adapters|http\.admin\.(loras|weights|sent_weights)))\b"
)
# Segments are written soon. Of many cores a learner never has its share, with which it would stand still.
LEARNING = """
import psutil
from specserve.learn import traffic
traffic.SEGMENT_SECONDS, own = 0.5, psutil.Process()
if hasattr(own, "cpu_affinity"):
    own.cpu_affinity(own.cpu_affinity()[:2])
"""


@contextlib.contextmanager
def started(
    command: Sequence[str], env: Mapping[str, str], *, words: str = "", seconds: float = 60.0, **options: Any
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server that is up, of which the line that names its address has these words before it, and a client of it with
    these options. It is killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", *command], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        urls = (re.search(rf"{words}on (http://[\d.:]+)/v1", line) for line in process.stdout)
        url = next(filter(None, urls))[1]
        with httpx.Client(base_url=url, **options) as http:
            wait_for(lambda: is_up(http), seconds)
            yield process, http
    finally:
        process.kill()
        process.communicate()


def is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.HTTPError:
        return False


def learners(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that make a round for this server."""
    found = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another one, which has ended meanwhile
            if "specserve.learn.learner" in child.cmdline():
                found.append(child)
    return found


def write_folder(target: Target, folder: Path) -> Path:
    """A copy of the target's folder with a tokenizer of letters."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(target.folder / name)
    (folder / "tokenizer.json").write_text(Letters().as_json())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": Letters.alphabet[EOS]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def environment(cache: Path) -> dict[str, str]:
    """One CPU device, and programs that compile fast and are kept in this folder."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "COLUMNS": "200",
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens to."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
