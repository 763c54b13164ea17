"""Quantised types of GGUF whose numbers are whole ones times a scale, perhaps plus an offset, for each block of inputs.

The gguf package restores floats alone. It is asked for them three times, each time of bytes in which some fields stand
still: with scales of 1 and no offsets it gives the whole numbers, with whole numbers of 1 and no offsets the scales,
and with whole numbers of 0 the offsets."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from gguf.constants import GGMLQuantizationType

Part = Literal["values", "scale", "offset"]
Bytes = int | bytes | None  # one that is repeated, or all of them; None: as they are stored


@dataclass(frozen=True)
class _Field:
    """Some bytes of a stored block, and what they are while a part is read."""

    size: int
    values: Bytes = None
    scale: Bytes = None
    offset: Bytes = None


@dataclass(frozen=True)
class WholeNumbers:
    """A type's whole numbers: the inputs that share a scale, and the fields of a stored block, which may hold several
    such groups."""

    inputs: int
    fields: tuple[_Field, ...]

    @property
    def has_offset(self) -> bool:
        return any(field.offset is not None for field in self.fields)

    def hold_still(self, blocks: np.ndarray, part: Part) -> None:
        """Overwrite the fields of stored blocks [..., byte] uint8 that do not belong to a part."""
        first = 0
        for field in self.fields:
            still: Bytes = getattr(field, part)
            if still is not None:
                filled = bytes([still]) * field.size if isinstance(still, int) else still
                blocks[..., first : first + field.size] = np.frombuffer(filled, np.uint8)
            first += field.size


_FACTOR = _Field(2, values=np.array([1], "<f2").tobytes())  # a float16
_MINIMUM = _Field(2, values=0, scale=0)  # another, which is added or taken away
_SIXES = _Field(12, values=bytes([1] * 4 + [0] * 4 + [1] * 4))  # eight scales and eight minima of 6 bits


def _codes(size: int, one: int, zero: int | None = None) -> _Field:
    return _Field(size, scale=one, offset=zero)


_NUMBERS = {
    "Q8_0": WholeNumbers(32, (_FACTOR, _codes(32, 1))),
    "Q4_0": WholeNumbers(32, (_FACTOR, _codes(16, 0x99))),  # 8 is taken away
    "Q4_1": WholeNumbers(32, (_FACTOR, _MINIMUM, _codes(16, 0x11, 0))),
    "Q5_0": WholeNumbers(32, (_FACTOR, _codes(4, 0xFF), _codes(16, 0x11))),  # the fifth bits, then the others; less 16
    "Q5_1": WholeNumbers(32, (_FACTOR, _MINIMUM, _codes(4, 0, 0), _codes(16, 0x11, 0))),
    "Q2_K": WholeNumbers(16, (_Field(16, values=1), _codes(64, 0x55, 0), _FACTOR, _MINIMUM)),
    # third bits that are set take nothing away; scales of 6 bits less 32, lower halves first
    "Q3_K": WholeNumbers(
        16, (_codes(32, 0xFF), _codes(64, 0x55), _Field(8, values=0x11), _Field(4, values=0xAA), _FACTOR)
    ),
    "Q4_K": WholeNumbers(32, (_FACTOR, _MINIMUM, _SIXES, _codes(128, 0x11, 0))),
    "Q5_K": WholeNumbers(32, (_FACTOR, _MINIMUM, _SIXES, _codes(32, 0, 0), _codes(128, 0x11, 0))),
    "Q6_K": WholeNumbers(16, (_codes(128, 0x11), _codes(64, 0xAA), _Field(16, values=1), _FACTOR)),  # less 32
    "MXFP4": WholeNumbers(32, (_Field(1, values=128), _codes(16, 0x11))),  # an exponent, of half of the doubles
    "IQ4_NL": WholeNumbers(32, (_FACTOR, _codes(16, 0x88))),  # the code of 1 in its table is 8
    # scales as of Q3_K, upper halves first
    "IQ4_XS": WholeNumbers(32, (_FACTOR, _Field(2, values=0xAA), _Field(4, values=0x11), _codes(128, 0x88))),
}
WHOLE_NUMBERS = {GGMLQuantizationType[name]: numbers for name, numbers in _NUMBERS.items()}
