"""The cases that the default suite leaves to `.ci/run all`, by the table in tests/longer.txt.

The default suite has nine minutes on two cores, and all cases take three times as long. So of a law of many cases it
runs as many as the table says, and of a law whose every case takes long perhaps none. The others are marked `longer`:
`pytest -m longer`.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

# marks of tests that have runs of their own
ELSEWHERE = "slow", "oracle", "gpu", "tpu", "libtpu", "cuda_aot", "scale", "tunix", "areal"
TABLE = Path(__file__).parent.parent / "longer.txt"


def read_table(text: str) -> dict[str, int]:
    """Return the number of cases that the default suite runs, by the id of a test function: `file::name`."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return {name: int(number) for name, number in filter(None, lines)}


def chosen(choices: list[frozenset[Any]], number: int) -> set[int]:
    """Return the places of so many cases: one after the other the first of those that have the most choices which no
    earlier one has, so that few cases have every choice of each axis."""
    left, seen = [*range(len(choices))], frozenset[Any]()
    while left and len(choices) - len(left) < number:
        best = max(left, key=lambda i: len(choices[i] - seen))
        left.remove(best)
        seen |= choices[best]
    return {*range(len(choices))} - {*left}


@pytest.hookimpl(tryfirst=True)  # before pytest itself leaves out what is marked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    table, cases = read_table(TABLE.read_text()), defaultdict[str, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and not any(map(item.get_closest_marker, ELSEWHERE)):
            name = f"{item.path.relative_to(config.rootpath).as_posix()}::{item.originalname}"
            if name in table:
                cases[name].append(item)
    for name, own in cases.items():
        choices = [
            frozenset(item.callspec.indices.items()) if hasattr(item, "callspec") else frozenset() for item in own
        ]
        keep = chosen(choices, table[name])
        for i, item in enumerate(own):
            if i not in keep:
                item.add_marker(pytest.mark.longer)
