"""The shape of the house: imports point down, public functions are typed, `jax.jit` and `print` keep to their rooms,
everything has one name and one owner, and nothing is long."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve.drafters.registry import KINDS
from specserve.drafters.words import OWN_TEXT

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "specserve"
FLOORS = {
    "kernels": 1,
    "models": 2,
    "speculative": 3,
    "data": 3,
    "checkpoints": 3,
    "drafters": 4,
    "interop": 5,
    "train": 6,
    "serve": 6,
    "answers": 7,
    "plan": 7,
    "learn": 7,
    "eval": 8,
    "cli": 9,
}
FLAT = {
    "cluster",
    "errors",
    "host",
    "hub",
    "launcher",
    "log",
    "pytree",
    "config",
    "mesh",
    "processes",
    "provenance",
    "__init__",
}
FLAT |= {"chat_template", "devices", "tokenizer"}
MAY_JIT = (
    "mesh.py",  # kernels that layers share a trace of, within a program
    "serve/programs/calls.py",
    "serve/programs/program_cache.py",  # one operation of LAPACK, which sets it up for programs that are loaded
    "serve/programs/layouts.py",  # products that are timed to choose how matrices are cut
    "train/step.py",
    "train/first.py",  # the first losses of a new head, by one scale of its output after another
    "train/capture.py",  # the target's pass alone, whose results are kept on disk
    "train/target_states.py",  # the same, while a run lasts
    "train/remote/prefill.py",  # the target's pass alone, in a process of its own
    "train/acceptance.py",
    "eval/",
    "models/params.py",
    "models/stacked.py",  # one array of a stack at a time, where its layers are
    "checkpoints/lora.py",  # pairs are added to a matrix where it lies
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


# The names that users have for the kinds, the rooms, and lookups as they are written (`suffix` alone is a word of code
# models too). A lookup is no kind, but the interface's own word for a proposer without a head: `Tree.lookup`.
ROOMS = {path.parent.name for path in PACKAGE.glob("drafters/*/*.py")}
DRAFTERS = re.compile(
    "|".join(sorted({*KINDS, *ROOMS - {"lookup"}, "eagle", OWN_TEXT})) + r"|suffix:[\dK{]|nextn|medusa|hydra|domino",
    re.IGNORECASE,
)
OF_ALL_DRAFTERS = ("interface", "learning", "settings", "follow", "grow")
OF_ALL_HEADS = ("format", "head", "convert", "doctor", "findings", "keys", "repairs", "examined", "notes", "published")
# in a config.json or a checkpoint of a target that embeds its last tokens together
KEYS_OF_TARGETS = re.compile(r"\b(make_|split_|heads_per_)?ngram(_size|_parts|_vocab_size_\w+|_embedding)?\b")
# some layers in a target's checkpoint are not its own, and some targets are parts of others in the names of adapters
NAMES_LAYERS_OF_TARGETS = ("checkpoints/load.py", "checkpoints/unused.py", "checkpoints/lora.py")


def test_a_drafter_is_named_in_its_own_room_alone() -> None:
    """A kind is named by its networks, by its files and by a line of the registry, where the bundled head's folder is
    named too."""
    found = [
        f"{_name(path)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in (".py", ".j2", ".html", ".cc", ".h") and not _name(path).startswith(("drafters/", "interop/"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DRAFTERS.search(KEYS_OF_TARGETS.sub("", line)) and _name(path) not in NAMES_LAYERS_OF_TARGETS
    ]
    assert not found, "\n".join(found)
    generic = [f"drafters/{name}" for name in OF_ALL_DRAFTERS] + [f"interop/{name}" for name in OF_ALL_HEADS]
    for name in generic:
        named = DRAFTERS.findall((PACKAGE / f"{name}.py").read_text())
        assert not {*named} - {"EAGLE"}, name  # a paper that is cited


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


def _modules(tree: ast.Module) -> Iterator[str]:
    """The files of the package that a file imports, be it at once or in a function of it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            for found in (f"{node.module}.{alias.name}", node.module or ""):
                file = Path(*found.split(".")[1:]).with_suffix(".py").as_posix() if "." in found else ""
                if (PACKAGE / file).is_file():
                    yield file
                    break


def test_no_file_imports_itself_by_way_of_others(trees: dict[str, ast.Module]) -> None:
    """Inside a room imports point one way too: where two files import each other, one file has two subjects."""
    imported = {name: set(_modules(tree)) for name, tree in trees.items() if name != "__init__.py"}
    assert sum(map(len, imported.values())) > len(imported), "no imports were found"
    while leaves := [name for name, files in imported.items() if not files & imported.keys()]:
        for name in leaves:
            del imported[name]
    assert not imported, {name: sorted(files & imported.keys()) for name, files in imported.items()}


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


# Files and the parts whose fields they set: records of figures that an object keeps for itself, and fields by
# which a library is configured. Whatever else an object has is changed by its own methods.
OWN_RECORDS = {
    ("checkpoints/train_state.py", "self._best"),
    ("cli/conversation.py", "self.answer"),
    ("answers/regenerate.py", "self._account"),
    ("eval/verify/proof.py", "self.report"),
    ("serve/http/formats/reader.py", "self._content"),
    ("serve/fleet/ranks.py", "self._wire"),
    ("serve/engine/rounds.py", "self._counters"),
    ("train/trainer.py", "self._stopping"),
}
OF_LIBRARIES = {
    ("hub.py", "sys.modules['datasets'].config"),
    ("serve/http/app.py", "app.state"),
    ("serve/http/transport/connections.py", "self.cycle"),
    ("serve/http/transport/server.py", "self._config"),
    ("serve/http/transport/server.py", "self._server"),
    ("serve/fleet/kv_events.py", "self._pub"),
    ("serve/http/service.py", "http.state"),
    ("serve/fleet/routing.py", "pending_request.routing_context"),
}


def test_nobody_sets_a_field_of_what_another_object_owns(trees: dict[str, ast.Module]) -> None:
    found = {
        (name, ast.unparse(node.value))
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if isinstance(node.value, ast.Attribute)
    }
    assert found == OWN_RECORDS | OF_LIBRARIES


def test_a_public_class_has_a_name_of_its_own(trees: dict[str, ast.Module]) -> None:
    places = defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert not {name: files for name, files in places.items() if len(files) > 1}


USED_ELSEWHERE = {
    "build_or_say",  # by the build of the wheel
    "RUNNING",  # by the table of the doctor's checks
    "SpecserveRollout",  # by Tunix
}


def test_nothing_is_there_for_tests_alone(trees: dict[str, ast.Module]) -> None:
    """Every function, class and constant of a module is read somewhere in the package, be it by its name in a text
    without spaces (the table of commands, annotations)."""
    defined, used = {}, set(USED_ELSEWHERE)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined[node.name] = f"{name}:{node.lineno}"
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined |= {each.id: f"{name}:{node.lineno}" for each in targets if isinstance(each, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                used.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                used.update(re.findall(r"\w+", node.value))
    unused = {name: where for name, where in defined.items() if name not in used}
    assert {name for name in unused if not name.startswith("__")} == set(), unused


WRITE_NO_FILE_OF_OURS_THAT_ANOTHER_READS = {
    ("kernels/native/build.py", "(into / MARKER).write_text"),  # why there is no library, beside where it would be
    ("host.py", "Path(f'/proc/{pid}/oom_score_adj').open"),  # the kernel's
    ("serve/http/admin/sent_weights.py", "path.open"),  # on the disk before anybody learns its name
}


def test_files_are_written_whole(trees: dict[str, ast.Module]) -> None:
    """A reader of a file that is being written sees the old one: what is to replace it goes to the `partial` of
    `host.whole_file`."""
    found = {place for place, call in _calls_in_all(trees) if _writes(call) and not place[1].startswith("partial.")}
    assert found == WRITE_NO_FILE_OF_OURS_THAT_ANOTHER_READS


def _calls_in_all(trees: dict[str, ast.Module]) -> Iterator[tuple[tuple[str, str], ast.Call]]:
    """Yield each call, with its file and what is called."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield (name, ast.unparse(node.func)), node


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    given = (*call.args, *(each.value for each in call.keywords))
    is_new = any(isinstance(each, ast.Constant) and str(each.value)[:1] in ("w", "x") for each in given)
    return name in ("write_text", "write_bytes") or (name == "open" and is_new)


RENAME_FILES = {
    ("host.py", "os.replace"),  # of `take_place`
    # The build of a wheel loads this file by itself. A library that the disk has lost is noticed, and built again.
    ("kernels/native/build.py", "partial.replace"),
}
RENAME_NO_FILES = ("self.rename", "files.rename", "mapping.rename")  # but tensors and columns


def test_a_file_takes_its_place_once_it_is_on_the_disk(trees: dict[str, ast.Module]) -> None:
    """`host.take_place` alone renames files: another rename may be on the disk before what the file holds, and where
    the machine stops then, a restart reads an empty file."""
    assert {place for place, call in _calls_in_all(trees) if _renames(call)} == RENAME_FILES


def _renames(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func) in RENAME_NO_FILES:
        return False
    # a text's `replace` has two arguments, that of `dataclasses` names
    is_path = len(call.args) == 1 and not call.keywords
    return call.func.attr in ("rename", "renames", "move") or (
        call.func.attr == "replace" and (is_path or ast.unparse(call.func) == "os.replace")
    )


MOST_LINES, MOST_LINES_OF_A_FUNCTION = 499, 59
LONGER = {  # functions that one reads in one piece or not at all
    "specserve/kernels/paged_gpu.py: _kernel",
    "specserve/kernels/paged_tpu.py: _kernel",
    "tests/drafters/test_joint_learn.py: test_what_is_learned_is_what_is_served",
    "tests/serve/http/test_metrics.py: test_metrics_tell_the_engines_own_state_at_the_scrape",
    "tests/speculative/test_distribution.py: test_emitted_tokens_have_the_targets_distribution",
}


def test_files_and_functions_are_short() -> None:
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in ("specserve", "tests", "benchmarks", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    long = {f"{name}: {len(text.splitlines())}" for name, text in texts.items() if text.count("\n") > MOST_LINES}
    assert not long
    functions = (
        (name, node)
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert {
        f"{name}: {node.name}"
        for name, node in functions
        if (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
    } == LONGER
