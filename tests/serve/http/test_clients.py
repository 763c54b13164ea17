"""The examples of docs/clients.md, each run as it stands against a server whose model calls tools."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import client_page
import pytest
from client_page import EXAMPLES, commands
from fakes import MODEL
from fixed_text import serving

from specserve.checkpoints.source import BUNDLED_FOLDER

ROOT = Path(__file__).parents[3]
LOADS = {text.split()[0]: text for text in commands("test_clients")}
NODE_MODULES = Path(os.environ.get("NODE_MODULES", ROOT / "node_modules"))
PYTHON = os.environ.get("CLIENTS_PYTHON", sys.executable)
ARGUMENTS = '{"city": "Genève", "days": 2}'
FORECAST = "city='Genève' days=2"
PRINTS = {
    "openai 0": "It will be fine.",
    "openai 1": "It will be fine.",
    "openai 2": FORECAST,
    "openai 3": f"It will be fine. {FORECAST}",
    "openai 4": "200 mine It will be fine.",
    "openai 5": "They want weather. It will be fine.",
    "anthropic 6": "It will be fine.\n[{'city': 'Genève', 'days': 2}]",
    "litellm 7": ARGUMENTS,
    "langchain_openai 8": "['2 days of sun in Genève']",
    "langchain_openai 9": FORECAST,
    "node openai 10": ARGUMENTS,
    "node openai 11": "It will be fine. 200 mine",
    "node ai 12": "They want weather. 2 days of sun in Genève",
    "node ai 13": "Genève 2",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as (engine, url):
        engine.answers = True
        yield url


def test_each_example_is_run():
    assert [f"{package} {i}" for i, (package, _, _) in enumerate(EXAMPLES)] == list(PRINTS)
    assert client_page.is_complete()
    tests = set(re.findall(r"`(test_\w+\.py)`", client_page.PAGE))
    assert tests
    assert all(any(Path(__file__).parents[2].rglob(test)) for test in tests)


@pytest.mark.parametrize("name", [name for name in PRINTS if name.startswith("openai")])
def test_example_of_openai(name, url):
    _, _, code = EXAMPLES[int(name.split()[-1])]
    out, names = io.StringIO(), {"BASE_URL": url, "MODEL": MODEL, "__name__": "example"}
    with contextlib.redirect_stdout(out):
        exec(code, names)
    if "client" in names:
        names["client"].close()  # type: ignore[attr-defined]
    assert out.getvalue().strip() == PRINTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRINTS if not name.startswith("openai")])
def test_example_of_another_client(name, url, tmp_path):
    """With the packages of the interpreter CLIENTS_PYTHON and of the folder NODE_MODULES, by default this one's and
    node_modules here."""
    package, language, code = EXAMPLES[int(name.split()[-1])]
    given = f'const BASE_URL = "{url}", MODEL = "{MODEL}";\n' if language == "javascript" else ""
    if language == "python":
        version = f"import importlib.metadata; importlib.metadata.version({package!r})"
        if subprocess.run([PYTHON, "-c", version], capture_output=True, check=False).returncode:
            pytest.skip(f"{package} is not installed")
        given, command, script = f"BASE_URL, MODEL = {url!r}, {MODEL!r}\n", [PYTHON], tmp_path / "example.py"
    else:
        node = shutil.which("node")
        if node is None or not (NODE_MODULES / package.split()[1]).is_dir():
            pytest.skip("node or its packages are not installed")
        (tmp_path / "node_modules").symlink_to(NODE_MODULES)
        command, script = [node], tmp_path / "example.mjs"
    script.write_text(given + code)
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network first
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == PRINTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADS)
def test_load_generator(name, tmp_path):
    """With the command of this name in the folder LOADS_BIN, by default where it is found. All six of its requests are
    answered, each with as many tokens as it asked for."""
    folder = os.environ.get("LOADS_BIN", "")
    if shutil.which(name, path=folder or None) is None:
        pytest.skip(f"{name} is not installed")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}" if folder else os.environ["PATH"]
    given = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    given |= {"MODEL": MODEL, "TOKENIZER": str(BUNDLED_FOLDER), "PATH": path}
    with serving() as (engine, url):
        engine.says = "x" * 10_000
        done = subprocess.run(
            ["bash", "-euc", LOADS[name]],
            cwd=tmp_path,
            env=given | {"URL": url.removesuffix("/v1")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        asked = [request for request in engine.requests if request.params.ignore_eos]
    assert len(asked) >= 6
