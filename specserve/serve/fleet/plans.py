"""The plans that the first process of a server sends to the others to run, and how they are written.

A plan is the name of a call of the runner with its arguments as the host has them: integers, a tree, arrays of token
ids. It is written as JSON with the arrays' bytes behind, so reading one runs nothing that it says.
"""

import dataclasses
import functools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from specserve.speculative.sampling import SamplerRows, TokenRows
from specserve.speculative.tree import DynamicTree, Proposal, StaticTree, Tree

LENGTHS = struct.Struct("!II")  # of the JSON and of the arrays
_ROWS = {rows.__name__: rows for rows in (SamplerRows, TokenRows)}
_ARRAY, _TREE, _PROPOSAL = "array", "tree", "proposal"


@dataclass(frozen=True)
class Plan:
    """A call by its name, with the host's values that it is made of. It never holds arrays of a device."""

    name: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


MAKERS: dict[str, Callable[..., Any]] = {}  # the methods that make calls, by the names that plans have


def told(make: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method that makes a call of values which the host knows. The call's plan says how other processes
    make the same call."""

    @functools.wraps(make)
    def made(self: Any, *arguments: Any, **options: Any) -> Any:
        call = make(self, *arguments, **options)
        return dataclasses.replace(call, plan=Plan(make.__name__, arguments, options))

    return MAKERS.setdefault(make.__name__, made)


def write(plan: Plan, trees: Sequence[Tree | None]) -> bytes:
    """Return the bytes of a plan. A tree is written as its place in `trees`. Any proposal stands for the last one that
    was made, because no other is ever verified."""
    arrays: list[bytes] = []

    def told(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            arrays.append(value.tobytes())
            return {_ARRAY: [value.dtype.name, *value.shape]}
        if isinstance(value, list | tuple):
            return [told(item) for item in value]
        if isinstance(value, StaticTree | DynamicTree):
            return {_TREE: trees.index(value)}
        if isinstance(value, Proposal):
            return {_PROPOSAL: 0}
        if type(value).__name__ in _ROWS:
            return {type(value).__name__: [told(getattr(value, item.name)) for item in fields(value)]}
        return value

    head = json.dumps([plan.name, told(plan.arguments), {name: told(value) for name, value in plan.options.items()}])
    text, body = head.encode(), b"".join(arrays)
    return LENGTHS.pack(len(text), len(body)) + text + body


def read(text: bytes, body: bytes, trees: Sequence[Tree | None], proposal: Proposal | None = None) -> Plan:
    """Read a plan from these two parts of its bytes. `proposal` is the last one that was made here. Lists come back as
    tuples."""
    begin = 0

    def made(value: Any) -> Any:
        nonlocal begin
        if isinstance(value, list):
            return tuple(made(item) for item in value)
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
        return _ROWS[kind](*map(made, inner))

    name, arguments, options = json.loads(text)
    return Plan(name, made(arguments), {name: made(value) for name, value in options.items()})
