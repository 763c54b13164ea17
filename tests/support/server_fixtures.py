"""A server over a real socket with a fake engine behind it, and two clients; and what the engine's tests run on."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from described import check_reply
from engines import Reference, compile_programs, make_runner
from fakes import FakeEngine

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.programs.runner import Runner
from specserve.serve.settings import ServeRun


@pytest.fixture(scope="module", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs and costs that tests keep do not lie among the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def fake_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def server(fake_engine: FakeEngine) -> Iterator[HttpServer]:
    server = HttpServer(create_app(fake_engine, run=ServeRun(allow_priority=True)), port=0)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def http(server: HttpServer) -> Iterator[httpx.Client]:
    """Each reply to it, in every test, is one of those that are described."""
    with httpx.Client(base_url=server.url, timeout=10, event_hooks={"response": [check_reply]}) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


@pytest.fixture(scope="session")
def kept(pytestconfig: pytest.Config) -> Path | None:
    """Where the runners below keep their programs: each of pytest's workers has them, and one compiles them for all."""
    has_cache = pytestconfig.pluginmanager.hasplugin("cacheprovider")
    return pytestconfig.cache.mkdir("programs") if has_cache else None  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def runner(tiny_target: Target, tiny_head: Head, kept: Path | None) -> Runner:
    """Every kind of tree that a head proposes, and plain decoding; all compiled. A test makes an engine of its own."""
    ways = "tree:3x3x8", "chain:3", "static:2x1", "head+suffix:3", "off"
    runner = make_runner(tiny_target, tiny_head, *ways, folder=kept)
    compile_programs(runner)
    return runner


@pytest.fixture(scope="session")
def lookup_runner(tiny_target: Target, kept: Path | None) -> Runner:
    """Drafts without a head."""
    runner = make_runner(tiny_target, None, "ngram:3", "off", has_constrained=False, folder=kept)
    compile_programs(runner)
    return runner


@pytest.fixture(scope="session")
def reference(tiny_target: Target, kept: Path | None) -> Iterator[Reference]:
    """What plain decoding says, asked one by one."""
    reference = Reference(tiny_target, kept)
    with reference.engine:
        yield reference
