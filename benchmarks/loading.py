"""What loading costs: a synthetic checkpoint, read by specserve and by safetensors' own loader for PyTorch, each in a
process of its own, in turns, with the files in the page cache.

PyTorch's loader maps files and reads nothing before it is used, so it is also measured with what a model needs to run
from memory of its own: every tensor copied once. Its arms run where the `oracle` extra is installed. Linux only.

Run from the checkout: `python benchmarks/loading.py --gigabytes 2`.
"""

import importlib.util
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pydantic.dataclasses
import typer
from over_http import processor

from specserve.checkpoints.load import load_target
from specserve.checkpoints.tensors import INDEX_FILE, write_json, write_tensors
from specserve.cli.options import command
from specserve.config import RULES, setting
from specserve.models.families.table import model_config
from specserve.models.params import num_params, specs
from specserve.models.target import target_spec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SHARD_BYTES = 500_000_000


@dataclass(frozen=True)
class Load:
    """What one load in a fresh process took."""

    seconds: float
    peak_bytes: int  # of memory, beyond what the process held before
    weight_bytes: int  # of what was loaded


def bench_load(
    num_bytes: int = 2_000_000_000,
    *,
    num_rounds: int = 3,
    config: Mapping[str, Any] = CONFIG,
    on_load: Callable[[str, Load], None] | None = None,
) -> dict[str, list[Load]]:
    """Load a checkpoint of about `num_bytes`, which lies in a temporary folder meanwhile, with every arm in turns.

    Returns each arm's loads, one for each round; `on_load` hears of each as it is done."""
    arms = [arm for arm in ARMS if not arm.startswith("safetensors") or importlib.util.find_spec("torch")]
    loads: dict[str, list[Load]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), num_bytes, config)
        for _ in range(num_rounds):
            for arm in arms:
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    load = process.submit(measure, arm, folder).result()
                loads[arm].append(load)
                if on_load:
                    on_load(arm, load)
    return loads


def load_lines(loads: Mapping[str, Sequence[Load]]) -> list[str]:
    """Say the results in one line for each arm: medians over the rounds."""
    return [
        f"{arm}: {statistics.median(load.seconds for load in rounds):.2f} s, peak memory "
        f"{statistics.median(load.peak_bytes for load in rounds) / 1e9:.2f} GB for "
        f"{rounds[0].weight_bytes / 1e9:.2f} GB of weights"
        for arm, rounds in loads.items()
    ]


def write_checkpoint(folder: Path, num_bytes: int, config: Mapping[str, Any]) -> None:
    """Write a sharded bfloat16 checkpoint with as many layers as fit in `num_bytes`, one at least."""

    def spec(num_layers: int) -> Any:
        return target_spec(model_config({**config, "num_hidden_layers": num_layers}, dtype="bfloat16"))

    one, two = num_params(spec(1)), num_params(spec(2))
    num_layers = max(1, 1 + (num_bytes // 2 - one) // (two - one))
    write_json(folder / "config.json", {**config, "num_hidden_layers": num_layers})
    some = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    weight_map: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}

    def write_shard() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        write_tensors(folder / file, shard)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for each in specs(spec(num_layers)):
        shard[each.name] = np.resize(some, each.stored_shape)
        if sum(math.prod(tensor.shape) * 2 for tensor in shard.values()) > SHARD_BYTES:
            write_shard()
    write_shard()
    write_json(folder / INDEX_FILE, {"weight_map": weight_map})


def measure(arm: str, folder: str) -> Load:
    """Load the checkpoint in this process. Peak memory is what the process ever held, so it takes a fresh one."""
    load = ARMS[arm]()
    before = _memory("VmRSS")
    begin = time.perf_counter()
    weights = load(Path(folder))
    seconds = time.perf_counter() - begin
    return Load(seconds, _memory("VmHWM") - before, sum(weight.nbytes for weight in weights))


def _specserve(dtype: str) -> Callable[[Path], list[Any]]:
    import jax

    jax.device_put(np.zeros(1)).block_until_ready()  # the backend is up
    return lambda folder: jax.block_until_ready(jax.tree.leaves(load_target(folder, dtype=dtype).params))


def _safetensors(is_copied: bool) -> Callable[[Path], list[Any]]:
    from safetensors.torch import load_file

    def load(folder: Path) -> list[Any]:
        tensors = []
        for file in sorted(folder.glob("*.safetensors")):
            found = load_file(file)
            tensors += [found[name].clone() if is_copied else found[name] for name in list(found)]
        return tensors

    return load


ARMS: dict[str, Callable[[], Callable[[Path], list[Any]]]] = {
    "specserve, bfloat16": lambda: _specserve("bfloat16"),
    "specserve, float32": lambda: _specserve("float32"),
    "safetensors.torch.load_file, mapped": lambda: _safetensors(is_copied=False),
    "safetensors.torch.load_file, copied": lambda: _safetensors(is_copied=True),
}


def _memory(what: str) -> int:
    """The bytes of this process by Linux's account: VmRSS is held now, VmHWM was held at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {what}")


app = typer.Typer()


@pydantic.dataclasses.dataclass(frozen=True, config=RULES)
class LoadRun:
    """The settings of the command."""

    gigabytes: float = setting(2.0, help="size of the checkpoint, about", gt=0)
    rounds: int = setting(3, help="how often the arms take turns", ge=1)


@app.command()
@command(LoadRun)
def main(run: LoadRun) -> None:
    """Load a synthetic checkpoint with every loader in turns, and say the seconds and the memory that it took."""
    print(processor())
    for line in load_lines(bench_load(int(run.gigabytes * 1e9), num_rounds=run.rounds)):
        print(line)


if __name__ == "__main__":  # the loads run in processes of their own, which import this file again
    app()
