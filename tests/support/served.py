"""`specserve serve` in processes of its own, over a tiny target."""

import contextlib
import json
import os
import socket
from pathlib import Path

from engines import EOS, Letters

from specserve.checkpoints.load import Target

SCRIPT = "from quick_compile import compile_quickly as quick; quick(); from specserve.cli.main import main; main()"


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
