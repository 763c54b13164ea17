"""The set-up of every test: eight CPU devices, strict dtype promotion, tiny models, and the bundled one."""

import gc
import logging
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the laws hold on accelerators too; run there with JAX_PLATFORMS=...

import jax
import numpy as np
import pytest
import tiny
from hypothesis import settings
from quick_compile import compile_quickly, keep_compiled

from specserve import host, hub
from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.source import BUNDLED_FOLDER, BUNDLED_HEADS
from specserve.data import pydoc
from specserve.drafters.interface import Head
from specserve.interop.bundled import BUNDLED_HEAD
from specserve.interop.head import load_head
from specserve.models.params import init_params
from specserve.tokenizer import Tokenizer

host.own_process = lambda: None  # by a command that a test runs here: other tests need transformers' models
pytest_plugins = ["instruction_sets", "longer", "server_fixtures", "two_versions"]
jax.config.update("jax_numpy_dtype_promotion", "strict")
settings.register_profile("specserve", deadline=None, derandomize=True)
settings.load_profile("specserve")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs beside pytest's own cache: compiling is most of the suite's time, and many are alike."""
    compile_quickly()
    if config.pluginmanager.hasplugin("cacheprovider"):
        is_first = not hasattr(config, "workerinput")  # of xdist, whose workers use what the first process has set up
        keep_compiled(config.cache.mkdir("xla"), is_first=is_first)  # type: ignore[union-attr]
        _keep_bytecode(config.cache.mkdir("bytecode"))  # type: ignore[union-attr]


def _keep_bytecode(folder: Path) -> None:
    """Where Python may not write bytecode beside the sources, each of pytest's workers, and each process that a test
    starts, would compile all that it imports, which takes seconds: they share a folder beside pytest's cache."""
    if sys.dont_write_bytecode:
        sys.pycache_prefix = sys.pycache_prefix or str(folder)
        sys.dont_write_bytecode = False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish() -> None:
    """Tracing makes many small objects, few of which are garbage: looking for it less often saves a thirtieth."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With ALLOWED_SKIPS a test that is skipped for another reason than this expression finds has failed: CI has what
    tests need, such as the native kernels, and does not pass where it is lost."""
    report = yield
    allowed = os.environ.get("ALLOWED_SKIPS")
    if allowed and report.skipped and isinstance(report.longrepr, tuple) and not re.search(allowed, report.longrepr[2]):
        report.outcome, report.longrepr = "failed", f"{report.longrepr[2]} (ALLOWED_SKIPS is {allowed!r})"
    return report


def pytest_runtest_setup(item: pytest.Function) -> None:
    """Programs over tiny models compile without LLVM's own optimiser, which takes longer than they run: the graph, its
    fusions and its memory are the same. The bundled target runs as users run it."""
    is_tiny = "pydoc_target" not in item.fixturenames
    jax.config.update("jax_disable_most_optimizations", is_tiny and jax.default_backend() == "cpu")


@pytest.fixture(autouse=True)
def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests put their own hub in place of the real one, which nobody asks whether it is there."""
    monkeypatch.setattr(hub, "_probe", lambda _url: "")


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command that a test runs in this process sets up the log and may silence a part of it: the next test has all
    loggers as if there had been no command."""

    def state(logger: logging.Logger) -> tuple[list[logging.Handler], int, bool]:
        return logger.handlers[:], logger.level, logger.propagate

    def loggers() -> dict[str, logging.Logger]:
        return {
            name: logging.getLogger(name) for name in ("specserve", "huggingface_hub", *logging.root.manager.loggerDict)
        }

    before = {name: state(logger) for name, logger in loggers().items()}
    yield
    for name, logger in loggers().items():
        if name in before or name.startswith("specserve"):
            handlers, level, logger.propagate = before.get(name, ([], logging.NOTSET, True))
            logger.handlers[:] = handlers
            logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _one_pydoc(pytestconfig: pytest.Config) -> Iterator[None]:
    """The data set `pydoc` is read from all installed sources, which takes ten seconds: once for all tests, whatever
    cache folder they have. A test of the recipe, which has sources of its own, has files of its own."""
    path, roots = pydoc._cache_path, pydoc._roots
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.pluginmanager.hasplugin("cacheprovider"):
            folder = pytestconfig.cache.mkdir("pydoc")  # type: ignore[union-attr]

            def shared(split: str, packages: dict[str, str]) -> Path:
                own = path(split, packages)
                return folder / own.name if pydoc._roots is roots else own

            patch.setattr(pydoc, "_cache_path", shared)
        yield


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Random, 6 layers, vocabulary 64, loaded from a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny-target")
    tiny.write_target(folder, tiny.TARGET, seed=0)
    return load_target(folder, dtype="float32")


@pytest.fixture(scope="session")
def shallow_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The same with 2 layers, for laws about heads and losses, which see no more of a target."""
    folder = tmp_path_factory.mktemp("shallow-target")
    tiny.write_target(folder, tiny.TARGET | {"num_hidden_layers": 2}, seed=0)
    return load_target(folder, dtype="float32")


@pytest.fixture(scope="session")
def tiny_head(tiny_target: Target) -> Head:
    """Random, with a draft vocabulary of 48 of the 64 tokens."""
    return tiny.random_head(tiny_target.config, seed=1)


@pytest.fixture(scope="session")
def pydoc_target() -> Target:
    return load_target(BUNDLED_FOLDER, dtype="float32")


@pytest.fixture(scope="session")
def pydoc_tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_FOLDER)


@pytest.fixture(scope="session")
def pydoc_head(pydoc_target: Target) -> Head:
    """The head that ships in the package."""
    return load_head(BUNDLED_HEADS[BUNDLED_HEAD], pydoc_target, dtype="float32")


@pytest.fixture(scope="session")
def random_pydoc_head(pydoc_head: Head) -> Head:
    """An untrained head of the shipped one's shape: nearly all that it proposes is wrong."""
    params = init_params(pydoc_head.drafter.spec(), jax.random.key(7), "float32")
    # numbers of bfloat16, as the shipped head's are: so both are packed alike, and one can take the other's place
    params = jax.tree.map(lambda x: x.astype("bfloat16").astype(x.dtype), params)
    return Head(pydoc_head.drafter, params, pydoc_head.target_ids)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
