"""Write the table of docs/checkpoints.md that lists all that the draft doctor can find. Run it from the checkout after
the catalogue has changed: `python tools/list_checks.py`.
"""

import re
from itertools import groupby
from pathlib import Path

from specserve.interop.findings import FAULTS, Check

PAGE = Path(__file__).parent.parent / "docs" / "checkpoints.md"
BEGIN, END = "<!-- written by tools/list_checks.py -->\n", "<!-- end -->\n"


def row(check: Check) -> str:
    what, why, by_fix, by_hand = (_shown(text) for text in (check.what, check.why, check.by_fix, check.by_hand))
    mend = " · ".join(filter(None, (by_fix and f"`--fix`: {by_fix}", by_hand and f"by hand: {by_hand}")))
    return f"| `{check.code}` | {check.level} | {what} | {why} | {mend} |\n"


def _shown(text: str) -> str:
    """The text with what is filled in in italics."""
    return re.sub(r"\{(\w+)\}", r"*\1*", text)


def table() -> str:
    lines = ["| finding | | what is wrong | why it matters | how it is mended |\n", "|---|---|---|---|---|\n"]
    every = [check for part in FAULTS.values() for check in part.values()]
    for area, checks in groupby(every, lambda check: check.area):
        lines += [f"| **{area}** | | | | |\n", *map(row, checks)]
    return "".join(lines)


def page(text: str) -> str:
    """The page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} has no place for the table: expected {BEGIN!r} and {END!r}"
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
