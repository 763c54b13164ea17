"""Safetensors on disk: reading named tensors, whole or by slice, from one file or a sharded folder, and writing them
atomically.

A file's header is its own claim, so it is held against the file's size before anything is allocated or mapped.
"""

import copy
import itertools
import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from specserve.checkpoints.lazy import Index, LazyQuantized, RestoredEntry
from specserve.errors import CheckpointError
from specserve.host import whole_file

if TYPE_CHECKING:
    from specserve.checkpoints.gguf.weights import GgufEntry

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
OF_HEAD = "draft."  # begins the names of a head's tensors in a file that has a target and its head
INDEX_FILE = "model.safetensors.index.json"
GGUF_FILE = "model.gguf"  # the file that a folder shows (`gguf.folder`)
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in (
        ("F64", np.float64),
        ("F32", np.float32),
        ("F16", np.float16),
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
        ("I64", np.int64),
        ("I32", np.int32),
        ("I16", np.int16),
        ("I8", np.int8),
        ("U64", np.uint64),
        ("U32", np.uint32),
        ("U16", np.uint16),
        ("U8", np.uint8),
        ("BOOL", np.bool_),
    )
}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

# all experts in one tensor, and whose rows of an expert stand in it, in this order
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_OF_MLX = re.compile(r"(.+)\.switch_mlp\.(\w+)\.(\w+)")  # MLX's name of all experts' parts in one tensor
# its names of Mixtral's matrices, which it calls as those of others
_OF_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def mlx_base(base: str) -> str:
    """Return MLX's name of the weight that all experts' of this name are in; the name itself of any other."""
    name = re.sub(r"\.experts\.\d+\.", ".switch_mlp.", base)
    theirs = {ours: name for name, ours in _OF_MIXTRAL.items()}
    return re.sub(r"\w+$", lambda part: theirs.get(part[0], part[0]), name) if "switch_mlp" in name else name


@dataclass(frozen=True)
class TensorEntry:
    """The place of a tensor: its file, its bytes, its shape and its dtype."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    is_widened: ClassVar[bool] = False

    def read(self, index: Index = ()) -> np.ndarray:
        """Read a slice into memory of its own. Of the file only the pages under the slice are touched."""
        if 0 in self.shape:  # nothing to map
            return np.empty(self.shape, self.dtype)[index]
        mapped = np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
        return np.array(mapped[index])

    def part(self, i: int, rows: int) -> "TensorEntry":
        """Return the i-th so many rows of a tensor of matrices [expert, row, column], where they lie."""
        shape = rows, self.shape[2]
        return replace(self, shape=shape, offset=self.offset + i * math.prod(shape) * self.dtype.itemsize)


@dataclass(frozen=True)
class ArrayEntry:
    """A tensor that is in memory, in place of one in a file, which is named where something is wrong with it."""

    file: Path
    array: Any  # of JAX or NumPy
    is_widened: ClassVar[bool] = False

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, index: Index = ()) -> np.ndarray:
        """Read a slice into memory of its own."""
        return np.array(self.array[index])

    def whole_numbers(self) -> None:
        """Return nothing: its own type is of floats."""


def _is_array(given: Any) -> bool:
    """Return whether it is an array of NumPy or JAX, and no tensor of torch, say."""
    try:
        return isinstance(given.shape, tuple) and isinstance(np.dtype(given.dtype), np.dtype)
    except (AttributeError, TypeError):
        return False


def is_file(given: object) -> TypeGuard[str | Path]:
    """Return whether what names weights is one file of them, and no folder."""
    return isinstance(given, str | Path) and Path(given).suffix == ".safetensors"


def head_beside(target: object) -> Path | None:
    """Return what names a target's weights where it is a file that has its head too. Raises CheckpointError."""
    return Path(target) if is_file(target) and TensorFolder.of_version(Path(target))[1].names() else None


class TensorFolder:
    """The tensors of a checkpoint folder, read by slice. Opening checks every header against its file."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if there are no weights, or a file is missing, truncated or of another format."""
        self.folder = folder
        self._entries: dict[str, TensorEntry | ArrayEntry | GgufEntry | RestoredEntry]
        if (folder / SINGLE_FILE).is_file():
            self._entries = {**_read_header(folder / SINGLE_FILE)}
        elif (folder / INDEX_FILE).is_file():
            self._entries = {**_read_shards(folder)}
        elif (folder / GGUF_FILE).is_file():
            from specserve.checkpoints.gguf.weights import read_entries  # imports a library that others need not

            self._entries = {**read_entries(folder / GGUF_FILE)}
        else:
            raise CheckpointError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; is this a model folder?")

        for name in [*self._entries]:
            match, entry = _OF_MLX.fullmatch(name), self._entries[name]
            if match and isinstance(entry, TensorEntry) and len(entry.shape) == 3:
                del self._entries[name]
                part = _OF_MIXTRAL.get(match[2], match[2]) if match[1].endswith("block_sparse_moe") else match[2]
                for i in range(entry.shape[0]):
                    self._entries[f"{match[1]}.experts.{i}.{part}.{match[3]}"] = entry.part(i, entry.shape[1])

    @classmethod
    def of_arrays(cls, folder: Path, arrays: Mapping[str, Any]) -> "TensorFolder":
        """Return arrays, by their names, as the tensors of a folder. Raises CheckpointError where one is no array."""
        if wrong := [name for name, each in arrays.items() if not _is_array(each)]:
            raise CheckpointError(f"not an array: {listed(wrong)}")
        made = cls.__new__(cls)
        made.folder = folder
        made._entries = {name: ArrayEntry(folder / SINGLE_FILE, each) for name, each in arrays.items()}
        return made

    @classmethod
    def of_file(cls, path: Path) -> "TensorFolder":
        """Return the tensors of one file. Raises CheckpointError as opening a folder does."""
        made = cls.__new__(cls)
        made.folder = path.parent
        made._entries = {**_read_header(path)}
        return made

    @classmethod
    def of_version(cls, path: Path) -> "tuple[TensorFolder, TensorFolder]":
        """Return the tensors of one file that are a target's, and those of its head, whose names begin with `draft.`
        there. Raises CheckpointError as opening a folder does."""
        target, head = cls.of_file(path), cls.of_file(path)
        head.folder = path  # the place that errors name: no config.json lies beside what was sent
        target._entries = {name: entry for name, entry in target._entries.items() if not name.startswith(OF_HEAD)}
        head._entries = {name.removeprefix(OF_HEAD): head._entries[name] for name in head.names() - target.names()}
        return target, head

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._entries[name].dtype

    def file(self, name: str) -> Path:
        return self._entries[name].file

    def is_widened(self, name: str) -> bool:
        """Return whether a tensor is stored in fewer bits than it is read in."""
        return self._entries[name].is_widened

    def whole_numbers(self, name: str) -> LazyQuantized | None:
        """Return a matrix whose own type is of whole numbers and scales, as some types of GGUF are; else None."""
        entry = self._entries[name]
        return None if isinstance(entry, TensorEntry) else entry.whole_numbers()

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Read a slice of a tensor into memory of its own."""
        return self._entries[name].read(index)

    def with_others(self, names: Collection[str], entries: Mapping[str, RestoredEntry]) -> "TensorFolder":
        """Return the folder with other tensors in the place of these."""
        shown = copy.copy(self)
        shown._entries = {name: entry for name, entry in self._entries.items() if name not in names} | {**entries}
        return shown


class ExpertByExpert(TensorFolder):
    """A folder that keeps all experts of a layer in one tensor, as modules of transformers 5 do: `experts.gate_up_proj`
    [expert, 2 d_ff, d_model], the rows of gate and then those of up, and `experts.down_proj` [expert, d_model, d_ff].
    Experts are given one by one, in the names of checkpoints, where they lie."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in [*self._entries]:
            match, entry = re.fullmatch(r"(.+\.experts)\.(\w+)", name), self._entries[name]
            if not match or not isinstance(entry, TensorEntry):
                continue
            parts = FUSED.get(match[2])
            if parts and len(entry.shape) == 3 and entry.shape[1] % len(parts) == 0:
                rows = entry.shape[1] // len(parts)
                del self._entries[name]
                for i, (expert, part) in enumerate(itertools.product(range(entry.shape[0]), parts)):
                    self._entries[f"{match[1]}.{expert}.{part}.weight"] = entry.part(i, rows)


def fuse_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put the experts of each layer into one tensor, as `ExpertByExpert` reads them."""
    out = dict(tensors)
    groups: dict[str, dict[tuple[int, str], np.ndarray]] = {}
    for name in tensors:
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
            groups.setdefault(match[1], {})[int(match[2]), match[3]] = out.pop(name)
    for layer, own in groups.items():
        experts = range(1 + max(expert for expert, _ in own))
        for name, parts in FUSED.items():
            out[f"{layer}.{name}"] = np.stack([np.concatenate([own[i, part] for part in parts]) for i in experts])
    return out


def listed(problems: Sequence[str], limit: int = 8) -> str:
    """List all that is wrong in one line, or as much of it as a line takes."""
    parts = list(problems[:limit])
    if len(problems) > limit:
        parts.append(f"and {len(problems) - limit} more")
    return "; ".join(parts)


def _read_shards(folder: Path) -> dict[str, TensorEntry]:
    """The tensors that the index names, each where the index says that it is, and no others."""
    stated = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(stated, dict) or not all(isinstance(file, str) for file in stated.values()):
        raise CheckpointError(f"{folder / INDEX_FILE}: weight_map must say the file of every tensor")
    files = sorted(set(stated.values()))
    if strays := [file for file in files if Path(file).name != file]:
        raise CheckpointError(f"{folder / INDEX_FILE}: {', '.join(strays)} is not in the model's folder")
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise CheckpointError(f"{folder}: {INDEX_FILE} names {', '.join(missing)}, which is not there")
    shards = {file: _read_header(folder / file) for file in files}
    found = {(name, file) for file, entries in shards.items() for name in entries}
    lost, unknown = stated.items() - found, found - stated.items()
    places = dict(unknown)
    problems = [f"{name} should be in {file}, it is in {places.get(name, 'no file')}" for name, file in sorted(lost)]
    moved = {name for name, _ in lost}
    problems += [
        f"{name} is also in {file}" if name in stated else f"{name} in {file} is not mentioned"
        for name, file in sorted(unknown)
        if name not in moved
    ]
    if problems:
        raise CheckpointError(f"{folder / INDEX_FILE}: {listed(problems)}; copy or download the folder again")
    return {name: shards[file][name] for name, file in stated.items()}


class _Unsound(Exception):
    """The reason why a file is no whole safetensors file."""


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _Unsound(f"its header claims {length:,} bytes, the file has {size:,}")
            header = json.loads(stream.read(length), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise _Unsound("its header is no JSON object")
        header.pop("__metadata__", None)
        begin = 8 + length
        return _entries(path, header, begin, size - begin)
    except (_Unsound, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); copy or download it again") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Unsound("its header names a tensor twice")
    return found


def _entries(path: Path, header: Mapping[str, Any], begin: int, size: int) -> dict[str, TensorEntry]:
    """The tensors of a file with `size` bytes of data, which they must fill without overlap or hole."""
    spans = []
    for name, stated in header.items():
        dtype, shape, (first, end) = _parse(name, stated)
        spans.append((first, end, name, TensorEntry(path, dtype, shape, begin + first)))
    expected, before = 0, "the header"
    for first, end, name, _ in sorted(spans, key=lambda span: span[:3]):
        if first != expected:
            what = "overlaps" if first < expected else "leaves a hole after"
            raise _Unsound(f"{name} {what} {before}: it begins at byte {first:,} of the data, expected {expected:,}")
        expected, before = end, name
    if expected != size:
        raise _Unsound(f"its tensors take {expected:,} bytes, the file holds {size:,}")
    return {name: entry for _, _, name, entry in spans}


def _parse(name: str, stated: Any) -> tuple[np.dtype, tuple[int, ...], tuple[int, int]]:
    """A tensor's dtype, shape and first and last byte in the data, checked against each other."""
    try:
        dtype_name, shape, (first, end) = stated["dtype"], tuple(stated["shape"]), stated["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _Unsound(f"{name} lacks dtype, shape or data_offsets") from None
    if any(type(number) is not int or number < 0 for number in (*shape, first, end)):
        raise _Unsound(f"{name} has shape {list(shape)} and data_offsets {[first, end]}, not counts")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise _Unsound(f"{name} has dtype {dtype_name}, which is not one of {', '.join(DTYPES)}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - first != num_bytes:
        raise _Unsound(
            f"{name} is {dtype_name} of shape {list(shape)}, {num_bytes:,} bytes, its data_offsets span {end - first:,}"
        )
    return dtype, shape, (first, end)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one safetensors file, whole. Raises OSError."""
    with whole_file(path) as partial:
        try:
            save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, partial, {"format": "pt"})
        except SafetensorError as error:  # the library raises it for a full disk
            raise OSError(f"{partial}: {error}") from error
        partial.chmod(0o644)  # the library makes it readable by its owner alone


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object from disk. Raises CheckpointError when it is missing or malformed, or contradicts itself."""
    try:
        value = json.loads(
            path.read_text("utf-8-sig"), object_pairs_hook=_stated_once
        )  # editors of Windows write a mark
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there; is {path.parent} a model folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _stated_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON. Raises ValueError where it states a key twice, and differently: readers take the first or
    the last."""
    found = dict(pairs)
    if twice := [f"{key}: {value!r} and {found[key]!r}" for key, value in pairs if repr(found[key]) != repr(value)]:
        raise ValueError(f"stated twice, and differently: {', '.join(twice)}")
    return found


def write_json(path: Path, value: object) -> None:
    """Write one JSON file, whole. Raises OSError."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n")
