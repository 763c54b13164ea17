"""The shape of the house: imports point down, public functions are typed, `jax.jit` and `print` keep to their rooms."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "specserve"
FLOORS = {
    "kernels": 1,
    "models": 2,
    "speculative": 3,
    "data": 3,
    "checkpoints": 3,
    "drafters": 4,
    "train": 5,
    "serve": 5,
    "eval": 6,
    "cli": 7,
}
FLAT = {"cluster", "errors", "host", "hub", "log", "pytree", "config", "mesh", "processes", "provenance", "__init__"}
FLAT |= {"chat_template", "devices", "tokenizer"}
MAY_JIT = (
    "serve/calls.py",
    "serve/stablehlo_run.py",  # copied beside exported programs, which it runs
    "serve/layouts.py",  # products that are timed to choose how matrices are cut
    "train/step.py",
    "train/capture.py",  # the target's pass alone, whose results are kept on disk
    "train/prefill.py",  # the target's pass alone, in a process of its own
    "train/acceptance.py",
    "eval/",
    "models/params.py",
    "checkpoints/load.py",  # weights are dequantised and quantised without float32 copies on the way
)
FILES = sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _room(parts: tuple[str, ...]) -> str | None:
    return parts[0] if parts and parts[0] in FLOORS else None


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the room"
            module = node.module or ""
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


DRAFTERS = re.compile(r"eagle|medusa|hydra|ngram|dflash|dspark|domino", re.IGNORECASE)


def test_a_drafter_is_named_in_its_own_room_alone() -> None:
    """Whoever adds one writes a room and a line of the registry; the folder of the bundled head is named there too."""
    found = [
        f"{_name(path)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in (".py", ".j2", ".html", ".cc", ".h") and not _name(path).startswith("drafters/")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DRAFTERS.search(line)
    ]
    assert not found, "\n".join(found)
    generic = ["door", "head", "exchange", "doctor", "findings", "notes", "settings"]
    for name in generic:
        named = DRAFTERS.findall((PACKAGE / "drafters" / f"{name}.py").read_text())
        assert set(named) <= ({"eagle"} if name == "door" else set()), name


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {_name(path): ast.parse(path.read_text()) for path in FILES}


def test_every_file_stands_in_a_known_room() -> None:
    strays = {_name(path) for path in FILES if path.relative_to(PACKAGE).parts[0] not in {*FLOORS, "targets"}}
    assert {Path(name).stem for name in strays} <= FLAT


def test_imports_point_down(trees: dict[str, ast.Module]) -> None:
    wrong = []
    for name, tree in trees.items():
        if name == "__init__.py":  # the door for Python programs, which opens lazily
            continue
        own = _room(Path(name).parts)
        floor = FLOORS[own] if own else 0
        for module, line in _imports(tree):
            if not module.startswith("specserve."):
                continue
            other = _room(tuple(module.split(".")[1:]))
            if other is not None and other != own and FLOORS[other] >= floor:
                wrong.append(f"{name}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_private_part_of_jax_is_used(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{name}: {module}" for name, tree in trees.items() for module, _ in _imports(tree) if "jax._src" in module
    ]
    assert not wrong


def _calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            yield ast.unparse(node), node.lineno


def test_only_named_files_decide_about_compilation(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{name}:{line}"
        for name, tree in trees.items()
        for text, line in _calls(tree)
        if text in ("jax.jit", "jax.pmap", "jit") and not name.startswith(MAY_JIT)
    ]
    assert not wrong


def test_only_the_command_line_prints(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{name}:{line}"
        for name, tree in trees.items()
        for text, line in _calls(tree)
        if text == "print" and not name.startswith("cli/")
    ]
    assert not wrong


def _functions(node: ast.AST, is_public: bool) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods that other files can reach by a public name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            is_dunder = child.name.startswith("__") and child.name.endswith("__")
            if is_public and (is_dunder or not child.name.startswith("_")):
                yield child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, is_public and not child.name.startswith("_"))


def test_public_functions_are_fully_typed(trees: dict[str, ast.Module]) -> None:
    wrong = []
    for name, tree in trees.items():
        for function in _functions(tree, is_public=True):
            arguments = function.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            every += [extra for extra in (arguments.vararg, arguments.kwarg) if extra]
            bare = [a.arg for a in every if a.annotation is None and a.arg not in ("self", "cls")]
            if bare or function.returns is None:
                wrong.append(f"{name}:{function.lineno} {function.name}: {', '.join(bare) or 'the result'}")
    assert not wrong, "\n".join(wrong)
