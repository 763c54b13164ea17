"""Docstrings open with a sentence or a noun phrase, never with a clause that needs its neighbours."""

import ast
import difflib
import itertools
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "specserve"
FRAGMENTS = ("What", "Where", "Which", "Whose", "Whether", "How", "Why", "Who", "When")
FRAGMENTS += ("Of", "As", "Those", "Under", "With", "From", "By", "Within", "Between")
ALIKE = 0.65  # share of the words of two sentences in a row that are the same: one was to take the other's place
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


def test_no_docstring_says_a_sentence_twice_or_stops_in_one() -> None:
    """Two sides of a merge, old and new, stand one after the other without a conflict."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not (text := " ".join((ast.get_docstring(node) or "").split())):
                continue
            sentences = [sentence.split() for sentence in re.split(r"(?<=[.;:]) ", text.lower())]
            alike = [b for a, b in itertools.pairwise(sentences) if len(a) > 2 and _share(a, b) > ALIKE]
            alike += [a for i, a in enumerate(sentences) if len(a) > 2 and a in sentences[:i]]
            where = f"{path.relative_to(PACKAGE)}:{node.body[0].lineno}"
            wrong += [f"{where}: twice: {' '.join(sentence)}" for sentence in alike]
            if text[-1].isalnum():
                wrong.append(f"{where}: ends in {text[-40:]}")
    assert not wrong, "\n".join(wrong)


def _share(a: list[str], b: list[str]) -> float:
    """The share of two sentences' words that are the same, in the same order."""
    return difflib.SequenceMatcher(None, a, b).ratio()
