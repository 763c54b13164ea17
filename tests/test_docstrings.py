"""Docstrings open with a sentence or a noun phrase, never with a clause that needs its neighbours."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "specserve"
FRAGMENTS = ("What", "Where", "Which", "Whose", "Whether", "How", "Why", "Who", "When")
FRAGMENTS += ("Of", "As", "Those", "Under", "With", "From", "By", "Within", "Between")
# pydantic makes descriptions of these, which clients read in /openapi.json
OF_THE_API = {
    "CalledFunction",
    "CallOutputItem",
    "MessageItem",
    "Metadata",
    "ReasoningItem",
    "Thinking",
    "ThinkingBlock",
    "ToolChoice",
    "ToolResultBlock",
}


def test_no_docstring_opens_as_a_fragment() -> None:
    wrong, num_found = {}, 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            words = (ast.get_docstring(node) or "").split(maxsplit=1)
            num_found += bool(words)
            if words and words[0].rstrip(",:") in FRAGMENTS:
                name = getattr(node, "name", path.stem)
                wrong[name] = f"{path.relative_to(PACKAGE)}:{node.body[0].lineno} {name}: {words[0]} ..."
    assert num_found > 2000, "the docstrings were not found"
    unexpected = [where for name, where in wrong.items() if name not in OF_THE_API]
    assert not unexpected, "say in a sentence what it is, does or returns:\n" + "\n".join(unexpected)
    assert not OF_THE_API - wrong.keys(), "these are sentences by now: drop them from OF_THE_API"
