"""The `pydoc` data set: questions about the installed Python sources, answered with the source or the docstring.

Made with `ast` from the running interpreter's standard library and this package's dependencies, so it needs no
network and imports none of the modules it reads. It is the data that the bundled target model was trained on (same
recipe, see the model's README), hence the distribution on which a draft head for it is trained and measured.

The order is fixed, every choice is a hash of a name, and a module is either in training or held out, never both.
"""

import ast
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sysconfig
import textwrap
import time
import tokenize
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from specserve.data.conversations import Conversation, Message
from specserve.host import cache_folder, write_whole

log = logging.getLogger(__name__)

RECIPE_VERSION = 1  # part of the cache key: raise it when the same sources would give other pairs
HELD_OUT_MODULUS = 25
MIN_CHARS, MAX_CHARS = 40, 3000  # of an answer
HINT_TENTHS = 6  # so many source questions in ten quote the docstring's first line

PACKAGES = {  # import name -> distribution name
    "numpy": "numpy",
    "jax": "jax",
    "optax": "optax",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "datasets": "datasets",
    "orbax": "orbax-checkpoint",
    "transformers": "transformers",
}
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_vendor"})
SKIPPED_PATHS = frozenset({"transformers/models"})  # two thousand near copies of one another

SOURCE_QUESTIONS = (
    "Write the function `{name}`.",
    "Show me the source of `{name}`.",
    "Implement `{last}` from `{parent}` in Python.",
)
DOC_QUESTIONS = ("What does `{name}` do?", "Explain `{name}`.", "Document `{name}`.")


def build(split: Literal["train", "held-out"]) -> list[Conversation]:
    """Build all question/answer pairs of the split; `source` is the module's name, `category` is "source" or "docs".

    The first call of an environment takes seconds and fills the user's cache folder; later ones read it.
    """
    packages = _installed()
    path = _cache_path(split, packages)
    if path.exists():
        return _read(path)
    pairs = _make_pairs(packages)
    parts = {
        "train": [c for c in pairs if not _is_held_out(c.source)],
        "held-out": [c for c in pairs if _is_held_out(c.source)],
    }
    try:
        for part, conversations in parts.items():
            _write(_cache_path(part, packages), conversations)
    except OSError as error:  # a full disk or a read-only home costs time, not the data
        log.warning("pydoc: cannot keep the pairs in %s (%s); they are built again next time", path.parent, error)
    return parts[split]


def held_out_prompts(count: int) -> list[Conversation]:
    """Choose `count` held-out questions without their answers, one module after the other, so that they are spread
    out."""
    by_module: dict[str, list[Conversation]] = {}
    for conversation in sorted(build("held-out"), key=lambda c: _hash(c.messages[0].content)):
        by_module.setdefault(conversation.source, []).append(conversation)
    spread = (c for layer in zip_longest(*by_module.values()) for c in layer if c is not None)
    return [Conversation(c.messages[:1], c.category, c.source) for c, _ in zip(spread, range(count), strict=False)]


def _make_pairs(packages: dict[str, str]) -> list[Conversation]:
    begin = time.monotonic()
    pairs: list[Conversation] = []
    answers: set[bytes] = set()
    num_duplicates = num_unreadable = 0
    for package, root in _roots(packages):
        num_before = len(pairs)
        for module, path in _modules(package, root):
            try:
                found = list(_pairs_of_module(module, path))
            except (OSError, SyntaxError, ValueError, RecursionError):  # templates, Python 2, odd encodings
                num_unreadable += 1
                continue
            for pair in found:
                digest = hashlib.md5(pair.messages[1].content.encode(), usedforsecurity=False).digest()
                num_duplicates += digest in answers
                if digest not in answers:
                    answers.add(digest)
                    pairs.append(pair)
        log.debug("pydoc: %d pairs from %s", len(pairs) - num_before, package or "the standard library")
    log.info(
        "pydoc: %d pairs from the standard library, %s in %.1f s; left out %d duplicates, %d unreadable files",
        *(len(pairs), ", ".join(packages), time.monotonic() - begin, num_duplicates, num_unreadable),
    )
    return pairs


def _pairs_of_module(module: str, path: Path) -> Iterator[Conversation]:
    with tokenize.open(path) as file:  # honours the coding line
        text = file.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(text)
    lines = text.splitlines()
    for name, node in _functions(tree, module):
        docstring = ast.get_docstring(node) or ""
        # Without decorators, and dedented: a method is answered as a function.
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if MIN_CHARS <= len(source) <= MAX_CHARS:
            question = _choose(SOURCE_QUESTIONS, name)
            if docstring and _hash(f"{name} hint") % 10 < HINT_TENTHS:
                question = f"{question} {docstring.strip().splitlines()[0]}"
            yield _pair(question, f"```python\n{source}\n```", "source", module)
        if MIN_CHARS <= len(docstring) <= MAX_CHARS:
            yield _pair(_choose(DOC_QUESTIONS, name), docstring, "docs", module)


def _functions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods with their dotted names, not those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name}.{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{name}.{child.name}")


def _choose(questions: tuple[str, ...], name: str) -> str:
    parent, _, last = name.rpartition(".")
    return questions[_hash(name) % len(questions)].format(name=name, parent=parent, last=last)


def _pair(question: str, answer: str, category: str, module: str) -> Conversation:
    return Conversation((Message("user", question), Message("assistant", answer)), category, module)


def _modules(package: str, root: Path) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module under a package's folder, in a fixed order, test folders left out."""
    for folder, folders, files in os.walk(root):
        parts = Path(folder).relative_to(root).parts
        prefix = tuple(filter(None, (package, *parts)))
        folders[:] = sorted(
            f for f in folders if f not in SKIPPED_FOLDERS and "/".join((*prefix, f)) not in SKIPPED_PATHS
        )
        for file in sorted(files):
            stem, suffix = os.path.splitext(file)
            if suffix == ".py" and (stem != "__init__" or prefix):
                yield ".".join(prefix if stem == "__init__" else (*prefix, stem)), Path(folder, file)


def _roots(packages: dict[str, str]) -> list[tuple[str, Path]]:
    """(dotted prefix, folder) of everything that is read."""
    roots = [("", Path(sysconfig.get_path("stdlib")))]
    return roots + [(name, folder) for name in packages for folder in _package_folders(name)]


def _package_folders(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)  # a top-level name is found without importing it
    locations = spec.submodule_search_locations if spec is not None else None
    return sorted(Path(location) for location in locations or ())


def _installed() -> dict[str, str]:
    """Import name -> version, of the packages that are there."""
    versions = {}
    for name, distribution in PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(distribution)
    return {name: version for name, version in versions.items() if _package_folders(name)}


def _is_held_out(module: str) -> bool:
    return _hash(module) % HELD_OUT_MODULUS == 0


def _hash(text: str) -> int:
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16)


def _cache_path(split: str, packages: dict[str, str]) -> Path:
    key = json.dumps([RECIPE_VERSION, platform.python_version(), packages], sort_keys=True)
    return cache_folder() / f"pydoc-{hashlib.sha256(key.encode()).hexdigest()[:16]}-{split}.jsonl"


def _write(path: Path, conversations: list[Conversation]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps([c.source, c.category, *(m.content for m in c.messages)]) + "\n" for c in conversations]
    write_whole(path, "".join(rows).encode())


def _read(path: Path) -> list[Conversation]:
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [_pair(question, answer, category, source) for source, category, question, answer in rows]
