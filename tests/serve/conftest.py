"""A server over a real socket with a fake engine behind it, and two clients."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from fakes import FakeEngine

from specserve.serve.api import HttpServer, create_app


@pytest.fixture(scope="module")
def fake_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def server(fake_engine: FakeEngine) -> Iterator[HttpServer]:
    server = HttpServer(create_app(fake_engine), port=0)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def http(server: HttpServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client
