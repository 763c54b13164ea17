"""The container: a header of keys and values, a table of tensors, and their data, which stays in the file.

The table is read here and the numbers by the `gguf` package, whose own reader makes several arrays of each string of a
vocabulary (seconds and a gigabyte for 150,000 tokens) and does not hold a file's claims against its size.
"""

import contextlib
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from specserve.errors import CheckpointError, first_line

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = 32  # of the data, where general.alignment states no other
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file, and the type of its numbers."""

    file: Path
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # the last axis is contiguous, and blocks of quantised numbers lie along it
    offset: int  # of its first byte in the file

    @property
    def row_bytes(self) -> int:
        """The bytes of the numbers along the last axis."""
        size, num_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // size * num_bytes


@dataclass(frozen=True)
class GgufFile:
    """The header of a file, or of all files of a split one."""

    path: Path  # of the first file
    values: Mapping[str, Any]  # numbers, strings and lists
    tensors: Mapping[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file, and of the other files where it is one of several (`-00001-of-00003.gguf`). Raises
    CheckpointError for a file that is missing, damaged, cut off, or of another format."""
    match = _SHARD.fullmatch(path.name)
    total = int(match[3]) if match else 1
    names = [f"{match[1]}-{i + 1:05}-of-{total:05}.gguf" for i in range(total)] if match else [path.name]
    shards = [_read(path.with_name(name)) for name in names]
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    counts = [shard.values.get("split.count") or total for shard in shards]  # 0 of files that were joined again
    stated = shards[0].values.get("split.tensors.count", len(tensors))
    if counts != [total] * total or stated != len(tensors):
        raise CheckpointError(
            f"{shards[0].path}: {total} of a split's {counts[0]} files, with {len(tensors)} of {stated} tensors; copy "
            "or download all of them again, and keep their names"
        )
    return GgufFile(shards[0].path, shards[0].values, tensors)


@contextlib.contextmanager
def making_sense(path: Path) -> Iterator[None]:
    """Raises CheckpointError where values that are read within are not of the types or sizes that they should have."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its keys make no sense ({first_line(error)})") from error


def _read(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream:
            if stream.read(4) != _MAGIC:
                raise ValueError("it does not begin with GGUF")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Header(path, content).read()
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path}: not a whole GGUF file ({first_line(error)}); copy or download it again"
        ) from None


class _Header:
    """Reads a header from its beginning. Raises ValueError and struct.error for what the file does not hold."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.place = path, content, len(_MAGIC)

    def read(self) -> GgufFile:
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; 2 and 3 can be read, of little-endian numbers")
        num_tensors, num_values = self._unpack("<QQ")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            name = self._string()
            if name in values:
                raise ValueError(f"it states {name} twice")
            values[name] = self._value(*self._unpack("<I"))
        places = [self._place() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", _ALIGNMENT)
        begin = -(-self.place // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, kind, shape, offset in places:
            if name in tensors:
                raise ValueError(f"it has {name} twice")
            tensors[name] = self._checked(name, StoredTensor(self.path, kind, shape, begin + offset))
        return GgufFile(self.path, values, tensors)

    def _unpack(self, layout: str) -> tuple[int, ...]:
        found = struct.unpack_from(layout, self.content, self.place)
        self.place += struct.calcsize(layout)
        return found

    def _take(self, num_bytes: int) -> bytes:
        end = self.place + num_bytes
        if end > len(self.content):
            raise ValueError(f"it ends at byte {len(self.content):,}, within its header")
        found, self.place = self.content[self.place : end], end
        return found

    def _string(self) -> str:
        return self._take(self._unpack("<Q")[0]).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            (number,) = self._numbers(kind, 1)
            return float(str(np.float32(number))) if kind == GGUFValueType.FLOAT32 else number  # 1e-05 as it was stated
        kind, count = self._unpack("<IQ")
        if kind == GGUFValueType.STRING:
            return [self._string() for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[GGUFValueType(kind)])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _place(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name, (rank,) = self._string(), self._unpack("<I")
        if not 0 < rank <= 4:
            raise ValueError(f"{name} has {rank} axes")
        shape = self._unpack(f"<{rank}Q")[::-1]
        kind, offset = self._unpack("<IQ")
        return name, _type_of(kind, name), shape, offset

    def _checked(self, name: str, tensor: StoredTensor) -> StoredTensor:
        if tensor.shape[-1] % GGML_QUANT_SIZES[tensor.kind][0]:
            raise ValueError(f"{name} has rows of {tensor.shape[-1]}, not whole blocks of {tensor.kind.name}")
        end = tensor.offset + math.prod(tensor.shape[:-1]) * tensor.row_bytes
        if end > len(self.content):
            raise ValueError(f"{name} ends at byte {end:,}, the file has {len(self.content):,}")
        return tensor


def _type_of(kind: int, name: str) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"{name} is of type {kind}, which the installed gguf package does not know") from None
