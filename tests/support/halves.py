"""Half of a table of cases in the default suite, and all of it among the longer laws."""

import itertools
from collections.abc import Collection
from typing import Any

import pytest


def half_of(*axes: Collection[Any]) -> list[Any]:
    """Return every combination of the axes' choices, for `parametrize`. Every second one is marked slow, as the fields
    of a chessboard are coloured, so every choice is in the default suite too: beside half of those of another axis, or,
    of three axes or more, beside all of them."""
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        case = [list(axis)[place] for axis, place in zip(axes, places, strict=True)]
        found.append(pytest.param(*case, id="-".join(map(str, case)), marks=[pytest.mark.slow] * (sum(places) % 2)))
    return found
