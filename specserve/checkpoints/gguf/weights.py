"""The weights of a GGUF file under their Hugging Face names, in their shapes and orders, read by slice.

llama.cpp's converter changes three things. It puts the two halves of each head's queries and keys in turns where its
graph turns neighbours (`config.Architecture.in_turns`). It adds 1 to the norms of Gemma. It stacks the experts of a
layer in one tensor. Reading undoes each.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.quants import dequantize
from gguf.tensor_mapping import get_tensor_name_map

from specserve.checkpoints.gguf.blocks import WHOLE_NUMBERS, Part, WholeNumbers
from specserve.checkpoints.gguf.config import ROPE_TENSORS, Architecture, architecture_of, read_config
from specserve.checkpoints.gguf.container import StoredTensor, making_sense, read_gguf
from specserve.checkpoints.lazy import FLOAT32, Index, LazyQuantized, LazyTensor, blocks_of
from specserve.errors import CheckpointError
from specserve.models.config import ModelConfig
from specserve.models.families.table import model_config
from specserve.models.params import ParamSpec, specs
from specserve.models.target import target_spec

_PLAIN = {
    GGMLQuantizationType.F32: FLOAT32,
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.I64: np.dtype(np.int64),
}
QUANTISED = tuple(
    GGMLQuantizationType[name]
    for name in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "TQ1_0", "TQ2_0"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    )
)
NAMES_FILE = "tensors.json"  # beside a file, of tensors whose names do not follow from a family of targets
_ROWS = 1024  # restored at once


@dataclass(frozen=True)
class GgufEntry:
    """A tensor of a checkpoint, and how it lies in a file."""

    stored: StoredTensor
    shape: tuple[int, ...]
    num_heads: int = 0  # the heads of rows that stand in turns; 0: rows stand as they are
    shift: int = 0  # added to what the checkpoint has
    is_product: bool = False  # rows are multiplied by it
    holds_ids: bool = False  # of tokens, where the checkpoint has how far each is from its own place

    @property
    def file(self) -> Path:
        return self.stored.file

    @property
    def dtype(self) -> np.dtype:
        return _PLAIN.get(self.stored.kind, FLOAT32)

    @property
    def is_widened(self) -> bool:
        return self.stored.kind not in _PLAIN

    def read(self, index: Index = ()) -> np.ndarray:
        """Read a slice into memory of its own: of the file only the pages under its rows are touched. Numbers in few
        bits become float32, as the gguf package computes them."""
        rows, *rest = index or tuple(slice(0, size) for size in self.shape)
        if self.is_widened:
            value = self._values(self._blocks(rows, self._blocks_of(*rest)), *rest)
        else:
            mapped = np.memmap(self.file, self.dtype, "r", self.stored.offset, self.shape)
            value = np.array(mapped[(self._in_file(rows), *rest)])
        if self.holds_ids:
            value -= np.arange(self.shape[0], dtype=value.dtype)[rows]
        return value - np.asarray(self.shift, value.dtype) if self.shift else value

    def whole_numbers(self) -> LazyQuantized | None:
        """Return a matrix that rows are multiplied by as whole numbers and scales, where its type has those; or
        None."""
        numbers = WHOLE_NUMBERS.get(self.stored.kind)
        if numbers is None or not self.is_product:
            return None
        shape = (self.shape[0], self.shape[1] // numbers.inputs)
        values = LazyTensor(self.shape, np.dtype(np.int8), lambda index: self._part(numbers, "values", index))
        scale = LazyTensor(shape, FLOAT32, lambda index: self._part(numbers, "scale", index))
        offset = None
        if numbers.has_offset:
            offset = LazyTensor(shape, FLOAT32, lambda index: self._part(numbers, "offset", index))
        return LazyQuantized(values, scale, numbers.inputs, offset)

    def _part(self, numbers: WholeNumbers, part: Part, index: Index) -> np.ndarray:
        rows, places = index
        each = 1 if part == "values" else numbers.inputs
        columns = slice(places.start * each, places.stop * each)
        blocks = self._blocks(rows, self._blocks_of(columns))
        numbers.hold_still(blocks, part)
        found = self._values(blocks, columns)[:, ::each]
        return found.astype(np.int8) if part == "values" else found

    def _in_file(self, rows: slice | np.ndarray) -> slice | np.ndarray:
        """Return the places of some rows in the file, where a head's first half may stand in turns with its second."""
        if not self.num_heads:
            return rows
        places = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        size = self.shape[0] // self.num_heads
        half, place = np.divmod(places % size, size // 2)
        return places // size * size + 2 * place + half

    def _blocks_of(self, columns: slice) -> slice:
        return blocks_of(columns, GGML_QUANT_SIZES[self.stored.kind][0])

    def _blocks(self, rows: slice | np.ndarray, blocks: slice) -> np.ndarray:  # [row, block, byte] uint8
        size, num_bytes = GGML_QUANT_SIZES[self.stored.kind]
        shape = (self.shape[0], self.shape[1] // size, num_bytes)
        return np.array(np.memmap(self.file, np.uint8, "r", self.stored.offset, shape)[self._in_file(rows), blocks])

    def _values(self, blocks: np.ndarray, columns: slice) -> np.ndarray:
        """Return the numbers in these columns, of the blocks that they lie in."""
        first = columns.start % GGML_QUANT_SIZES[self.stored.kind][0]
        value = np.empty((len(blocks), columns.stop - columns.start), np.float32)
        for row in range(0, len(blocks), _ROWS):  # the package holds its result twice
            some = blocks[row : row + _ROWS]
            value[row : row + _ROWS] = dequantize(some.reshape(len(some), -1), self.stored.kind)[
                :, first : first + value.shape[1]
            ]
        return value


def read_entries(path: Path) -> dict[str, GgufEntry]:
    """Return the tensors of a file by the names that its family has in Hugging Face folders, or that `NAMES_FILE` has;
    those that its family does not have by their own. Raises CheckpointError for types of numbers that are not read, and
    as `container.read_gguf` and `config.read_config` do."""
    file, names_file = read_gguf(path.resolve()), path.with_name(NAMES_FILE)
    where = str(file.path)
    unread = {t.kind.name: name for name, t in file.tensors.items() if t.kind not in (*_PLAIN, *QUANTISED)}
    if unread:
        kind, name = min(unread.items())
        allowed = ", ".join(kind.name for kind in (*_PLAIN, *QUANTISED))
        raise CheckpointError(f"{where}: {name} is of type {kind}; {allowed} can be read")
    if names_file.is_file():
        stated: dict[str, Any] = json.loads(names_file.read_text())
        parts = {name: (entry.pop("stored"), tuple(entry.pop("shape")), entry) for name, entry in stated.items()}
        return {name: GgufEntry(file.tensors[own], shape, **how) for name, (own, shape, how) in parts.items()}
    architecture = architecture_of(file)
    with making_sense(file.path):
        config = model_config(read_config(file), dtype="float32", where=where)
    entries: dict[str, GgufEntry] = {}
    used: set[str] = set(ROPE_TENSORS)
    names = get_tensor_name_map(_arch(architecture.name), config.num_layers)
    for spec in specs(target_spec(config)):
        for e, name in enumerate(spec.names):
            own = names.get_name(re.sub(r"\.experts\.\d+\.", ".experts.", name), (".weight", ".bias"))
            if own and own in file.tensors:
                used.add(own)
                entries[name] = _entry(file.tensors[own], spec, e, architecture, config)
    return entries | {name: GgufEntry(t, t.shape) for name, t in file.tensors.items() if name not in used}


def _arch(name: str) -> MODEL_ARCH:
    return next(arch for arch, its in MODEL_ARCH_NAMES.items() if its == name)


def _entry(
    tensor: StoredTensor, spec: ParamSpec, expert: int, architecture: Architecture, config: ModelConfig
) -> GgufEntry:
    shape, name, num_heads = tensor.shape, spec.name, 0
    if spec.is_per_expert and len(shape) == 3 and shape[0] == spec.shape[0]:
        shape = shape[1:]
        tensor = replace(tensor, shape=shape, offset=tensor.offset + expert * shape[0] * tensor.row_bytes)
    if (1, *shape) == spec.stored_shape:  # llama.cpp drops such an axis
        shape = spec.stored_shape
    if tensor.kind not in _PLAIN and len(shape) != 2:
        raise CheckpointError(f"{tensor.file}: the tensor of {name} is of type {tensor.kind.name}, but no matrix")
    if architecture.in_turns and (match := re.search(r"\.self_attn\.([qk])_proj\.", name)):
        num_heads = config.num_heads if match[1] == "q" else config.num_kv_heads
    shift = int(config.norm_offset and name.endswith("norm.weight"))
    is_product = spec.transpose or (config.tie_embeddings and name == config.names.embedding)
    return GgufEntry(tensor, shape, num_heads, shift, is_product=is_product)
