"""The text of a program as XLA has optimised it: which instructions one run executes, and what they move in a device's
large memory.

The compilers' own count of bytes is of no use for that: on a TPU it counts what lies on the chip like what does not, so
a matrix that is fetched ahead counts twice, and it counts the branches that no run takes.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{\n((?:.*\n)*?)\}", re.MULTILINE)
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\](?:\{([^}]*)\})?")  # kind of number, its bits, sizes, layout
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%\S+)")
_NAME = re.compile(r"%([\w.-]+)")
# instructions that name arrays which are there already
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"}
_CONTROL = {"while", "conditional", "call", "call-start"}
_SLICES = {"gather", "dynamic-slice", "slice"}  # they read no more than what they return,
_UPDATES = {"scatter", "dynamic-update-slice"}  # and they write no more than what they are given


class Array(NamedTuple):
    """An array that an instruction takes or makes."""

    text: str  # such as bf16[8,4096]
    sizes: tuple[int, ...]
    num_bytes: int
    is_on_chip: bool  # in a TPU's vector or scalar memory


@dataclass(frozen=True, eq=False)
class Instruction:
    """An instruction of a computation."""

    name: str
    types: str  # of its results
    kind: str  # such as "fusion" or "all-reduce"
    rest: str  # its operands and attributes
    around: Mapping[str, "Instruction"]  # its computation, by name

    @property
    def results(self) -> list[Array]:
        return arrays(self.types)

    @property
    def operands(self) -> list["Instruction"]:
        names = _NAME.findall(self.rest.partition("), ")[0])
        return [self.around[name] for name in names if name in self.around]

    @property
    def called(self) -> list[str]:
        """The names of the computations that it calls. The condition of a loop is left out."""
        return [name for group in _CALLED.findall(self.rest) for name in _NAME.findall(group)]


def arrays(types: str) -> list[Array]:
    """The arrays that a type names."""
    found = []
    for kind, bits, text, layout in _ARRAY.findall(types):
        sizes = tuple(int(size) for size in text.split(",") if size)
        found.append(Array(f"{kind}{bits}[{text}]", sizes, int(bits or 8) * math.prod(sizes) // 8, "S(" in layout))
    return found


class Program:
    """An optimised program."""

    def __init__(self, text: str) -> None:
        self._bodies: dict[str, str] = {}
        self._entry = ""
        for entry, name, body in _COMPUTATION.findall(text):
            self._bodies[name] = body
            self._entry = name if entry else self._entry

    @functools.cache  # noqa: B019
    def computation(self, name: str) -> Mapping[str, Instruction]:
        """The instructions of a computation, by name, in their order."""
        found: dict[str, Instruction] = {}
        for line in self._bodies[name].splitlines():
            match = _INSTRUCTION.match(line)
            if match is not None:
                found[match[1]] = Instruction(match[1], match[2], match[3], match[4], found)
        return found

    def executed(self, weigh: Callable[[Instruction], float]) -> list[Instruction]:
        """The instructions that one run executes, those of a loop once: of a choice, those of the branch that weighs
        least, which is that of a step in which no request has an option. Of a fusion it is the fusion alone."""
        return self._executed(self._entry, weigh)

    def _executed(self, name: str, weigh: Callable[[Instruction], float]) -> list[Instruction]:
        found = []
        for instruction in self.computation(name).values():
            inside = [self._executed(each, weigh) for each in instruction.called if instruction.kind in _CONTROL]
            if instruction.kind == "conditional":
                inside = [min(inside, key=lambda branch: sum(map(weigh, branch)))]
            found += [each for branch in inside for each in branch] if instruction.kind in _CONTROL else [instruction]
        return found

    def moved_bytes(self) -> int:
        """The bytes that one run reads and writes in the large memory. Kernels are left out, which do not read all of
        the arrays that they are given."""
        return sum(map(self._moved, self.executed(self._moved)))

    def _moved(self, instruction: Instruction) -> int:
        kind = instruction.kind
        if kind in _FREE or kind == "custom-call" or kind.endswith("-done"):
            return 0
        results, taken = instruction.results, [each for operand in instruction.operands for each in operand.results]
        if kind.endswith("-start"):  # the results are those of the whole, its operands, and where it stands
            result = results[0 if kind == "copy-start" else min(len(taken), len(results) - 1)]
            return result.num_bytes * (any(not each.is_on_chip for each in taken) + (not result.is_on_chip))
        if kind in _SLICES:
            return _large(results) + sum(each.num_bytes for each in results)
        return _large(results) + (sum(self._read_by_fusion(instruction)) if kind == "fusion" else _large(taken))

    def _read_by_fusion(self, fusion: Instruction) -> Iterator[int]:
        """Count what a fusion reads of each operand, less the part of a result that is the operand's own and stays."""
        body = self.computation(fusion.called[0])
        parameters = {int(each.rest.partition(")")[0]): each for each in body.values() if each.kind == "parameter"}
        for i, operand in enumerate(fusion.operands):
            size = _large(operand.results)
            users = [user for user in body.values() if parameters[i] in user.operands]
            if all(user.kind in _SLICES for user in users):
                size = min(size, sum(each.num_bytes for user in users for each in user.results))
            elif all(user.kind in _UPDATES for user in users):
                size = -size
            yield size


def _large(found: list[Array]) -> int:
    return sum(each.num_bytes for each in found if not each.is_on_chip)
