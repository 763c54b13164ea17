"""Draft heads on disk: written in the SGLang layout, read from any dialect, with `specserve.json` beside the weights
to remember the target and what was measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Quantization, Target
from specserve.checkpoints.sound import check_weights
from specserve.checkpoints.source import NOTES_FILE
from specserve.checkpoints.tensors import CONFIG, SINGLE_FILE, TensorFolder, write_json, write_tensors
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.registry import KindName
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.findings import Dialect
from specserve.interop.formats import format_for, format_of
from specserve.models.config import ModelConfig


def save_head(folder: Path, head: Head, target: Target, *, dtype: str, notes: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and specserve.json. `dtype` is that of the file; a head saved in its own
    dtype loads back bit for bit. Raises CheckpointError when there is no room or no right to write."""
    tensors, raw = head_files(head, target, dtype=dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_head(folder, tensors, raw, notes)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the head cannot be written ({error}); make room, and go on with --resume"
        ) from error


def write_head(folder: Path, tensors: Mapping[str, np.ndarray], raw: Mapping[str, Any], notes: dict[str, Any]) -> None:
    write_tensors(folder / SINGLE_FILE, tensors)
    write_json(folder / CONFIG, raw)
    if notes:
        write_json(folder / NOTES_FILE, notes)


def head_files(
    head: Head, target: Target, *, dtype: str, dialect: Dialect = "sglang", target_name: str = ""
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the config.json of a head in a dialect. Raises CheckpointError."""
    return format_for(head.drafter.name).files(head, target, dtype=dtype, dialect=dialect, target_name=target_name)


def load_head(
    folder: Path,
    target: Target,
    *,
    dtype: str,
    mesh: Mesh | None = None,
    kind: KindName | None = None,  # None: the one that config.json names
    quantization: Quantization = "none",  # of matrices that its files have in few bits: floats, or as they are stored
) -> Head:
    """Read a head for this target, over whose mesh it is spread too. Raises ConfigError or CheckpointError, also when
    it belongs to another target, and where a tensor holds a value that is not finite, or nothing but zeros."""
    reader = format_for(kind) if kind else format_of(folder)
    head = reader.load(folder, target, dtype=dtype, mesh=mesh, quantization=quantization)
    check_weights(head.params, head.drafter.spec(), str(folder), may_be_zero=False)
    return head


def sent_params(served: Head, path: Path, *, mesh: Mesh | None) -> Any:
    """Read other parameters of a head that is served from a file in which the names of its tensors begin with `draft.`.
    Raises ConfigError or CheckpointError, also where they are those of another draft vocabulary."""
    _, tensors = TensorFolder.of_version(path)
    head = format_for(served.drafter.name).of_tensors(served.drafter, tensors, str(path), mesh=mesh)
    if not np.array_equal(head.target_ids, served.target_ids):
        raise ConfigError(f"{path}: another draft vocabulary than that of the head that is served")
    check_weights(head.params, head.drafter.spec(), str(path), may_be_zero=False)
    return head.params


def read_drafter(folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
    """Read the shape of a head from its files, without its weights. Raises as `load_head` does."""
    return format_of(folder).read(folder, target, target_name, dtype=dtype)
