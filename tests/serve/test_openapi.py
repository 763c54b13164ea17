"""/openapi.json tells the truth: every route, by the schemas of the bodies themselves."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, assert_refused
from fastapi.routing import APIRoute

from specserve.serve.http.app import create_app
from specserve.serve.http.openapi import BODIES, openapi
from specserve.serve.http.server import HttpServer
from specserve.serve.settings import ServeRun

WITHOUT_BODY = {"/flush_cache"}


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (item for name, item in value.items() if name == "$ref")
        for item in value.values():
            yield from _refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _refs(item)


def test_every_route_is_described(http: httpx.Client, fake_engine: FakeEngine) -> None:
    app = create_app(fake_engine)
    told = http.get("/openapi.json").json()
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    assert {(route.path_format, method.lower()) for route in routes for method in route.methods or ()} == {
        (path, method) for path, methods in told["paths"].items() for method in methods
    }
    posts = {route.path_format for route in routes if "POST" in (route.methods or ())}
    assert posts == set(BODIES) | WITHOUT_BODY
    assert {ref.removeprefix("#/components/schemas/") for ref in _refs(told)} <= set(told["components"]["schemas"])
    ids = [operation["operationId"] for methods in told["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)
    locked = openapi(app, has_key=True)
    open_paths = {path for path, each in locked["paths"].items() if "security" not in next(iter(each.values()))}
    assert open_paths == {"/health", "/ready", "/version"}


@pytest.mark.parametrize("path", BODIES)
def test_the_schema_of_a_body_has_every_field_that_is_read(http: httpx.Client, path: str) -> None:
    told = http.get("/openapi.json").json()
    [ref] = set(_refs(told["paths"][path]["post"]["requestBody"]))
    schema = told["components"]["schemas"][ref.rpartition("/")[2]]
    assert schema["additionalProperties"] is False
    names = {field.alias or name for name, field in BODIES[path].model_fields.items()}
    assert set(schema["properties"]) == names | set(BODIES[path].UNSUPPORTED)


def test_the_page_of_the_api_is_opt_in_and_loads_nothing(http: httpx.Client, fake_engine: FakeEngine) -> None:
    assert "--docs" in assert_refused(http.get("/docs"), 404)["message"]
    server = HttpServer(create_app(fake_engine, run=ServeRun(docs=True)), port=0)
    server.start()
    try:
        page = httpx.get(f"{server.url}/docs").text
        paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    finally:
        server.stop()
    assert all(f"<code>{path}</code>" in page for path in paths)
    assert "<code>max_tokens</code>" in page
    assert not re.search(r"https?://|<script", page)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("schemathesis"), reason="pip install schemathesis")
def test_schemathesis_finds_nothing(server: HttpServer) -> None:
    """But what no schema tells: that a valid value may not fit the vocabulary, the context or another field."""
    command = ["schemathesis", "run", f"{server.url}/openapi.json", "--checks", "all"]
    options = ["--exclude-checks", "positive_data_acceptance", "--phases", "examples,coverage,fuzzing"]
    done = subprocess.run(
        [*command, *options, "--max-time", "90"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
