"""Safetensors on disk: reading named tensors from one file or a sharded folder, and writing them atomically."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy, which safetensors asks for by name
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specserve.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class TensorFolder:
    """The tensors of a checkpoint folder, read one at a time. Opening checks every header against its file."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if there are no weights, or a shard is missing, truncated or not safetensors."""
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        for path in _weight_files(folder):
            try:
                with safe_open(path, framework="numpy") as tensors:
                    names = list(tensors.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: not a whole safetensors file ({error}); copy or download it again"
                ) from error
            for name in names:
                self._file_of[name] = path

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._file_of[name], framework="numpy") as tensors:
            return tuple(tensors.get_slice(name).get_shape())

    def file(self, name: str) -> Path:
        return self._file_of[name]

    def read(self, names: Iterator[str] | list[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the tensors one by one, file by file, so that at most one lies in host memory beside its consumer's."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        for path, wanted in by_file.items():
            with safe_open(path, framework="numpy") as tensors:
                for name in wanted:
                    yield name, tensors.get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        names = sorted(set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder}: {INDEX_FILE} names {', '.join(missing)}, which is not there")
        return [folder / name for name in names]
    raise CheckpointError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; is this a model folder?")


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one safetensors file; a reader sees the old file or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, partial, {"format": "pt"})
    partial.chmod(0o644)  # the library makes it readable by its owner alone
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, object]:
    """A JSON object on disk. Raises CheckpointError when it is missing or malformed."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there; is {path.parent} a model folder?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def write_json(path: Path, value: object) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)
