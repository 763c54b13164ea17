"""The table of cases that the default suite leaves out: each line names a law that is there, and what is left in has
every choice that so few cases can have."""

import ast
import itertools
from pathlib import Path

from longer import TABLE, chosen, read_table

ROOT = Path(__file__).parent.parent.parent


def test_each_line_names_a_law_once() -> None:
    text = TABLE.read_text()
    table = read_table(text)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(table), "a law stands there twice"
    assert lines == sorted(lines)
    files = {name.partition("::")[0] for name in table}
    there = {
        f"{file}::{node.name}"
        for file in files
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert not table.keys() - there, "laws that have another name now, or are gone"


def test_few_cases_have_every_choice() -> None:
    """Of three axes with up to four choices, four cases have all of them; and cases that are alike in nothing are taken
    in their order."""
    axes = [[(axis, choice) for choice in range(size)] for axis, size in enumerate((2, 4, 3))]
    cases = [frozenset(case) for case in itertools.product(*axes)]
    for number in range(len(cases) + 1):
        assert len(chosen(cases, number)) == number
    had = frozenset.union(*(cases[i] for i in chosen(cases, 4)))
    assert had == frozenset(itertools.chain(*axes))
    assert chosen([frozenset({("case", i)}) for i in range(9)], 3) == {0, 1, 2}
