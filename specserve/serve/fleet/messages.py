"""The messages between the processes of a server: a word and values that the host has.

What the first process has the others run is a `StepProgram` with its host values: integers, trees, arrays of token ids.
A message is written as JSON with the arrays' bytes behind, so reading one runs nothing that is in it. It never holds
arrays of a device.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from specserve.speculative.program import StepProgram
from specserve.speculative.sampling import SamplerRows, TokenRows
from specserve.speculative.tree import DynamicTree, Proposal, StaticTree, Tree

LENGTHS = struct.Struct("!II")  # of the JSON and of the arrays
_RECORDS = {record.__name__: record for record in (StepProgram, SamplerRows, TokenRows)}
_ARRAY, _TREE, _PROPOSAL = "array", "tree", "proposal"


def write(word: str, values: Sequence[Any] = (), trees: Sequence[Tree | None] = ()) -> bytes:
    """Return the bytes of a message. A tree is written as its place in `trees`. Any proposal stands for the last one
    that was made, because no other is ever verified."""
    arrays: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            arrays.append(value.tobytes())
            return {_ARRAY: [value.dtype.name, *value.shape]}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, StaticTree | DynamicTree):
            return {_TREE: trees.index(value)}
        if isinstance(value, Proposal):
            return {_PROPOSAL: 0}
        if type(value).__name__ in _RECORDS:
            return {type(value).__name__: [plain(getattr(value, item.name)) for item in fields(value)]}
        return value

    text = json.dumps([word, *map(plain, values)]).encode()
    body = b"".join(arrays)
    return LENGTHS.pack(len(text), len(body)) + text + body


def read(
    text: bytes, body: bytes, trees: Sequence[Tree | None] = (), proposal: Proposal | None = None
) -> tuple[str, tuple[Any, ...]]:
    """Return the word and the values of a message, from these two parts of its bytes. `proposal` is the last one that
    was made here. Lists come back as tuples."""
    begin = 0

    def restored(value: Any) -> Any:
        nonlocal begin
        if isinstance(value, list):
            return tuple(restored(item) for item in value)
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind == _ARRAY:
            dtype, shape = np.dtype(inner[0]), inner[1:]
            count = int(np.prod(shape, dtype=int))
            array = np.frombuffer(body, dtype, count, begin).reshape(shape)
            begin += array.nbytes
            return array
        if kind == _TREE:
            return trees[inner]
        if kind == _PROPOSAL:
            return proposal
        return _RECORDS[kind](*map(restored, inner))

    word, *values = json.loads(text)
    return word, restored(values)
