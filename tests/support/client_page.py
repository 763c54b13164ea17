"""docs/clients.md: its examples, and the commands that tests run."""

import re
from pathlib import Path

PAGE = (Path(__file__).parent.parent.parent / "docs" / "clients.md").read_text()
EXAMPLES: list[tuple[str, str, str]] = re.findall(r"<!-- run: (.+?) -->\n```(\w+)\n(.*?)```", PAGE, re.DOTALL)
_COMMANDS: list[tuple[str, str]] = re.findall(r"<!-- tested: \S+/(\w+).py -->\n```sh\n(.*?)```", PAGE, re.DOTALL)


def commands(test: str) -> list[str]:
    """Those that the test file of this name runs, as shell scripts."""
    return [text for name, text in _COMMANDS if name == test]


def is_complete() -> bool:
    """Whether nothing on the page stands outside these."""
    return PAGE.count("```") == 2 * (len(EXAMPLES) + len(_COMMANDS))
