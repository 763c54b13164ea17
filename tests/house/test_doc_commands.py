"""Every command in the documents is run, or says in a comment above its fence why not; all of them are parsed.

<!-- run -->                        these tests run it, with a head in ./ckpt and conversations in chats.jsonl
<!-- tested: tests/x/test_y.py -->  that file tests the same, on models that are smaller
<!-- not run: hub: words -->        it needs a model hub (or: device, long, network); the words may be left out
<!-- not run: synopsis -->          it is a form to be filled in, of which only the flags are looked at
<!-- not run: gone -->              in the log alone: the command that made a figure, and has been removed since
"""

import ast
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from test_docs import PAGES, ROOT

from specserve import config
from specserve.checkpoints.source import BUNDLED_HEADS
from specserve.cli.main import BenchCommands, DataCommands, PlanCommands, Root
from specserve.cli.options import flags_from

SHELL = ("sh", "bash", "shell", "console")
MARK = re.compile(
    r"run|tested: (?P<test>tests/\S+\.py)|not run: (?P<why>hub|device|long|network|synopsis|gone)(: \S.*)?", re.ASCII
)
OTHERS = {"pip", "git", "cd", "curl", "pytest", "ruff", "pyright", ".ci/run", "mkdocs", "done"}  # not looked into
OTHERS |= {"docker", "helm", "kubectl", "ray", "sky", "guidellm", "aiperf", "vllm", "lm_eval", "schemathesis"}
HISTORY = {"CHANGELOG.md", *(page.name for page in (ROOT / "docs" / "log").glob("*.md"))}  # with removed commands
BUNDLED_EAGLE3 = BUNDLED_HEADS["pydoc-eagle3"]  # every engine's layout can hold it
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@dataclasses.dataclass(frozen=True)
class Fence:
    page: Path
    line: int  # of its first line, as editors count
    language: str
    mark: str  # the comment above it
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fences(page: Path) -> Iterator[Fence]:
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    above = ""
    for number, line in lines:
        if begins := re.match(r"( *)```(\w*)", line):
            indent, language = begins.groups()
            inside = []
            for _, text in lines:
                if text.strip() == "```":
                    break
                inside.append(text.removeprefix(indent))
            comment = re.fullmatch(r"<!-- (.+) -->", above.strip())
            yield Fence(page, number, language, comment[1] if comment else "", "\n".join(inside))
        above = line


ALL = [fence for page in PAGES for fence in fences(page)]
COMMANDS = [fence for fence in ALL if fence.language in SHELL]


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a script. A loop is gone through once, with its first value."""
    values: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set(";&|") or not word:
                words.append(re.sub(r"\$(\w+)", lambda name: values.get(name[1], name[0]), word))
                continue
            if ">" in words:
                words = words[: words.index(">")]
            if words[:1] == ["do"]:
                words = words[1:]
            if words[:1] == ["for"]:
                values[words[1]] = words[3]
            elif words:
                yield words
            words = []


def find(words: list[str]) -> tuple[Any, str, list[str]]:
    """Find the click command that `specserve` runs for these words: it, its settings, and the words that are left."""
    group: Any = {"bench": BenchCommands, "data": DataCommands, "plan": PlanCommands}.get(words[0])
    if group is None and " ".join(words[:2]) in Root.lazy:
        words = [" ".join(words[:2]), *words[2:]]
    name, rest = (words[1], words[2:]) if group else (words[0], words[1:])
    lazy = (group or Root).lazy
    assert name in lazy, f"there is no `specserve {name}`; there are {', '.join(lazy)}"
    return lazy[name].load(name), lazy[name].settings, rest


def check_specserve(words: list[str]) -> None:
    """Parse flags and their values as `specserve` would, up to where it would begin to work."""
    command, settings, rest = find(words)
    given = command.make_context(words[0], rest).params
    if settings:
        module, _, name = settings.partition(":")
        del given["config_file"], given["log_level"]
        overrides = given.pop("overrides") or ()
        config.resolve(getattr(importlib.import_module(module), name), overrides=overrides, flags=flags_from(given))


def check_flags(words: list[str]) -> None:
    """Check that there are such flags, whatever stands for their values."""
    command, _, rest = find(words)
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    unknown = {flag for word in rest for flag in re.findall(r"(?<![\w-])--[\w-]+", word)} - {*known, "--help"}
    assert not unknown, f"`specserve {words[0]}` has no {', '.join(sorted(unknown))}"


def check_script(path: str, words: list[str]) -> None:
    """Check the flags of a file of benchmarks/ or tools/: by its typer app, or as they stand in its source and that of
    the files beside it which it imports."""
    source = (ROOT / path).read_text()
    beside = (ROOT / path).with_name
    shared = [beside(f"{name}.py") for name in re.findall(r"^from (\w+) import", source, re.M)]
    source += "".join(file.read_text() for file in shared if file.is_file())
    if "typer.Typer(" in source:
        command = typer.main.get_command(importlib.import_module(Path(path).stem).app)
        if (commands := getattr(command, "commands", None)) is not None:
            command, words = commands[words[0]], words[1:]
        command.make_context(path, words)
        return
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    unknown = [flag for flag in flags if f'"{flag}"' not in source]
    assert not unknown, f"{path} has no {', '.join(unknown)}"


def check(words: list[str]) -> None:
    program, rest = words[0], words[1:]
    if program == "specserve":
        check_specserve(rest)
    elif program == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]), f"there is no module {rest[1]}"
    elif program == "python":
        check_script(rest[0], rest[1:])
    else:
        assert program in OTHERS, f"{program!r} is no program that the documents use; see OTHERS in {__file__}"
    for extras in re.findall(r"(?:\.|specserve)\[([\w,]+)\]", " ".join(rest)) if program == "pip" else ():
        assert set(extras.split(",")) <= set(EXTRAS), f"pyproject.toml has no extra {extras}"


@pytest.mark.parametrize("fence", COMMANDS, ids=lambda fence: fence.where)
def test_commands_say_whether_they_are_run_and_have_the_flags_they_use(fence):
    mark = MARK.fullmatch(fence.mark)
    assert mark, (
        f"{fence.where}: above this fence stands {fence.mark or 'no comment'!r}. "
        f"Write one of these on a line of its own right above the fence:\n{__doc__.partition(chr(10))[2]}"
    )
    assert not mark["test"] or (ROOT / mark["test"]).is_file(), f"{fence.where}: there is no {mark['test']}"
    if mark["why"] == "gone":
        assert fence.page.name in HISTORY, f"{fence.where}: only the log has commands that are gone"
        return
    is_form = mark["why"] == "synopsis"
    for words in map(str.split, fence.text.splitlines()) if is_form else simple_commands(fence.text):
        try:
            (check_flags if is_form else check)(words[is_form:])
        except (Exception, SystemExit) as error:
            message = getattr(error, "message", "") or str(error)
            pytest.fail(f"{fence.where}: `{shlex.join(words)}`: {message}", pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_hides_elsewhere(page):
    """Not in a fence without a language; and what is said in a sentence has commands and flags that exist."""
    for fence in fences(page):
        if fence.language == "python":
            ast.parse(fence.text, fence.where)
        first = fence.text.split(maxsplit=1)[:1]
        assert fence.language or first[0] not in {*OTHERS, "specserve", "python"}, f"{fence.where}: write ```sh"
    if page.name not in HISTORY:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
        for said in re.findall(r"`specserve ([a-z][^`]*)`", prose):
            check_flags(said.split())
        for script in re.findall(r"`python ((?:benchmarks|tools|tests)/\S+\.py)", prose):
            assert (ROOT / script).is_file(), f"{page.name}: there is no {script}"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the documents speak of: a head, conversations, and `specserve` on the path."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(BUNDLED_EAGLE3, folder / "ckpt")
    turns = [{"role": "user", "content": "What is a heap?"}, {"role": "assistant", "content": "A tree in an array."}]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(30)))
    (folder / "bin").mkdir()
    program = folder / "bin" / "specserve"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m specserve.cli.main "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.mark == "run"], ids=lambda fence: fence.where)
def test_what_is_marked_runs(fence, workplace):
    interpreter = [sys.executable, "-c"] if fence.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    environment = {
        **os.environ,
        "PATH": f"{workplace / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(workplace / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    ran = subprocess.run([*interpreter, fence.text], cwd=workplace, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, f"{fence.where}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    assert "Traceback" not in ran.stderr
