"""Docstrings open with a sentence or a noun phrase, never with a clause that needs its neighbours; docstrings and
comments use plain words, and names use the field's."""

import ast
import difflib
import functools
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "specserve"
# Folders and files in which every comment, docstring and name keeps to plain words (WORDS, OPENINGS, RIDDLES)
ROOMS_THAT_KEEP_IT = ("specserve", "tests", "benchmarks")
# (file, word): why the word stands there all the same
ALLOWED: dict[tuple[str, str], str] = {}
PEOPLE = r"(?<!\buser )(?<!\busers )(?<!\bpeople )(?<!\bperson )(?<!\bsomebody )(?<!\banyone )(?<!\bnobody )"
WORDS = {
    r"\b(?:tell|tells|told|telling)\b": "code reports, states, returns, names, broadcasts or distinguishes",
    PEOPLE + r"\b(?:who|whom)\b": "a request, process, client or file is `it` or `that`; only people are a who",
    r"\b(?:whoever|whomever|whosoever)\b": "name the thing: the reader, the caller, the process",
    r"\b(?:that|those|that|what|all) (?:which|who)\b": "name the thing that is meant",
}
OPENINGS = {
    r"^(?:who|whom|whose|whoever|which|what|whatever)\b": "a comment begins with its subject, not with a clause",
    r"^that (?!is\b|are\b|was\b|would\b|way\b|they\b|it\b)": "a comment begins with its subject, not with a clause",
}
RIDDLES = {
    "told": "reported, broadcast, given",
    "wanted": "requested, expected, required",
    "flight": "in_flight, pending",
    "flights": "in_flight, pending",
    "ledger": "counts, token_counts",
    "neutral": "default, inactive",
    "mended": "repaired",
    "mending": "repairs",
    "lesson": "draft targets",
    "aims": "draft targets",
    "guests": "what they are",
}
RIDDLES_OF_FILES = {
    "asks": "requests",
    "door": "interface",
    "edge": "middleware",
    "kept": "program_cache",
    "way": "speculation setting",
    "ways": "speculation settings",
}
FRAGMENTS = ("What", "Where", "Which", "Whose", "Whether", "How", "Why", "Who", "When")
FRAGMENTS += ("Of", "As", "Those", "Under", "With", "From", "By", "Within", "Between")
ALIKE = 0.65  # share of the words of two sentences in a row that are the same: one was to take the other's place


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def _docstrings() -> dict[str, str]:
    """The package's docstrings, each on one line, by the place where it stands and the name of its owner."""
    return {
        f"{path.relative_to(PACKAGE)}:{node.body[0].lineno} {getattr(node, 'name', path.stem)}": " ".join(text.split())
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in _nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := (ast.get_docstring(node, clean=False) or "").strip())
    }


def test_no_docstring_opens_as_a_fragment() -> None:
    first_words = {where: text.split()[0] for where, text in _docstrings().items()}
    assert len(first_words) > 2000, "the docstrings were not found"
    wrong = [f"{where}: {word} ..." for where, word in first_words.items() if word.rstrip(",:") in FRAGMENTS]
    assert not wrong, "say in a sentence what it is, does or returns:\n" + "\n".join(wrong)


def test_no_docstring_says_a_sentence_twice_or_stops_in_one() -> None:
    """Two sides of a merge, old and new, stand one after the other without a conflict."""
    wrong = []
    for where, text in _docstrings().items():
        sentences = [sentence.split() for sentence in re.split(r"(?<=[.;:]) ", text.lower())]
        alike = [b for a, b in itertools.pairwise(sentences) if len(a) > 2 and _are_alike(a, b)]
        alike += [a for i, a in enumerate(sentences) if len(a) > 2 and a in sentences[:i]]
        wrong += [f"{where}: twice: {' '.join(sentence)}" for sentence in alike]
        if text[-1].isalnum():
            wrong.append(f"{where}: ends in {text[-40:]}")
    assert not wrong, "\n".join(wrong)


def _are_alike(a: list[str], b: list[str]) -> bool:
    """Whether two sentences have more than ALIKE of their words in common, in the same order."""
    words = difflib.SequenceMatcher(None, a, b)
    return words.real_quick_ratio() > ALIKE and words.quick_ratio() > ALIKE and words.ratio() > ALIKE


def _prose(path: Path) -> Iterator[tuple[int, str, bool]]:
    """The comments and docstrings of a file: line, text on one line, and whether it is a comment. Comment lines that
    follow each other are one text."""
    text, runs = path.read_text(encoding="utf-8"), []
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            is_alone = lines[token.start[0] - 1].lstrip().startswith("#")
            body = token.string.lstrip("#: ").strip()
            if is_alone and runs and runs[-1][2] and runs[-1][1] == token.start[0] - 1:
                runs[-1][1] += 1
                runs[-1][3] += " " + body
            else:
                runs.append([token.start[0], token.start[0], is_alone, body])
    yield from ((first, body, True) for first, _, _, body in runs)
    for node in _nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, " ".join(node.value.value.split()), False


def _names(path: Path) -> Iterator[tuple[int, str]]:
    """The names that a file itself gives: its classes, functions, arguments, variables and fields."""
    for node in _nodes(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _breaches(path: Path) -> Iterator[tuple[str, str]]:
    """Words of a file that the law bans, each with the line that reports it."""
    where = path.relative_to(ROOT).as_posix()
    for line, prose, is_comment in _prose(path):
        for pattern, instead in (WORDS | OPENINGS if is_comment else WORDS).items():
            for found in re.finditer(pattern, prose, re.IGNORECASE):
                excerpt = prose[max(0, found.start() - 40) : found.end() + 40]
                yield found[0].lower(), f"{where}:{line}: `{found[0]}` in `{excerpt}`: {instead}"
    for line, name in _names(path):
        for part in re.findall(r"(?<!in_)(?<!In)(?:[A-Z]?[a-z]+|[A-Z]+)", name):
            if instead := RIDDLES.get(part.lower()):
                yield part.lower(), f"{where}:{line}: the name `{name}` is a riddle; the field's word: {instead}"
    if instead := (RIDDLES | RIDDLES_OF_FILES).get(path.stem):
        yield path.stem, f"{where}: the file's name is a riddle; the field's word: {instead}"


def _files(room: str) -> list[Path]:
    path = ROOT / room
    return sorted(path.rglob("*.py")) or [path for path in [path] if path.is_file()]


@pytest.mark.parametrize("room", ROOMS_THAT_KEEP_IT)
def test_a_room_keeps_to_plain_words(room: str) -> None:
    files = _files(room)
    assert files, f"{room} has no files: name the room that took its place in ROOMS_THAT_KEEP_IT"
    wrong = [
        message
        for path in files
        for word, message in _breaches(path)
        if (path.relative_to(ROOT).as_posix(), word) not in ALLOWED
    ]
    assert not wrong, "\n".join(["use plain words, or give a reason in ALLOWED:", *wrong])


def test_every_exception_is_needed() -> None:
    found = {(name, word) for name, _ in ALLOWED for word, _ in _breaches(ROOT / name)}
    assert not ALLOWED.keys() - found, "these are said in plain words by now: drop them from ALLOWED"
