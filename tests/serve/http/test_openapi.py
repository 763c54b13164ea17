"""/openapi.json is true: every route, by the schemas of the bodies themselves."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_page import commands
from described import TYPES, check_events, check_reply
from fakes import FakeEngine, assert_refused
from fastapi.routing import APIRoute
from fixed_text import WEATHER, serving

import specserve.serve.http
from specserve.serve.http.admin.openapi import openapi
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.settings import ServeRun

SCHEMATHESIS = os.environ.get("SCHEMATHESIS") or shutil.which("schemathesis")
WITHOUT_BODY = {"/flush_cache"}
BODIES = TYPES["body"]


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
    document = http.get("/openapi.json").json()
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    assert {(route.path_format, method.lower()) for route in routes for method in route.methods or ()} == {
        (path, method) for path, methods in document["paths"].items() for method in methods
    }
    posts = {route.path_format for route in routes if "POST" in (route.methods or ())}
    assert posts == set(BODIES) | WITHOUT_BODY
    assert all(reduce(getitem, ref.removeprefix("#/").split("/"), document) for ref in set(_refs(document)))
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)
    locked = openapi(app, has_key=True)
    open_paths = {path for path, each in locked["paths"].items() if "security" not in next(iter(each.values()))}
    assert open_paths == {"/health", "/ready", "/version"}


def test_every_reply_is_described(http: httpx.Client) -> None:
    """By its media type, and the JSON of bodies also by its shape, of which no name is used twice."""
    document = http.get("/openapi.json").json()
    assert not [name for name in document["components"]["schemas"] if "FunctionTool" not in name and "__" in name]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert {"200", "400", "405", "408", "431", "501"} <= set(operation["responses"])
            found = operation["responses"]["200"]["content"]
            assert all(each.get("schema") or each["itemSchema"] for each in found.values()), path
            if method == "get" and "{" not in path:
                reply = http.get(path)
                assert reply.headers["content-type"].partition(";")[0] in found, path
                assert reply.headers["X-Request-Id"]


@pytest.mark.parametrize("path", TYPES["event"])
@pytest.mark.parametrize("prompt", ["hi", "unicode", "explode"])
def test_every_event_of_a_stream_has_the_shape_that_is_described(http: httpx.Client, path: str, prompt: str) -> None:
    """With all that a body can ask the events to hold. What comes whole is checked by the client itself."""
    options = {"return_token_ids": True, "return_draft_depths": True, "return_tree": True}
    counted = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    bodies: dict[str, Any] = {
        "/generate": {"text": [prompt, "x"], "return_logprob": True, "top_logprobs_num": 2},
        "/v1/chat/completions": {"messages": _said(prompt), "logprobs": True, "top_logprobs": 2, **options},
        "/v1/completions": {"prompt": prompt, "echo": True, "logprobs": 2, "n": 2, **options},
        "/v1/messages": {"messages": _said(prompt), "max_tokens": 20},
        "/v1/responses": {"input": prompt, "top_logprobs": 2},
    }
    of_prompt = {"/generate": {"logprob_start_len": 0}}
    of_prompt |= {key: {"prompt_logprobs": 1} for key in ("/v1/chat/completions", "/v1/completions")}
    whole = http.post(path, json=bodies[path] | of_prompt.get(path, {}))
    assert whole.status_code == (500 if prompt == "explode" else 200), whole.text
    reply = http.post(path, json=bodies[path] | {"stream": True} | (counted if "completions" in path else {}))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert check_events(path, reply.text)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_reasoning_and_calls_have_the_shape_that_is_described(path: str) -> None:
    function = WEATHER["function"]
    tools: dict[str, Any] = {
        "/v1/chat/completions": [WEATHER],
        "/v1/messages": [{"name": function["name"], "input_schema": function["parameters"]}],
        "/v1/responses": [{"type": "function"} | function],
    }
    body = {"input": "hi"} if "responses" in path else {"messages": _said("hi"), "max_tokens": 400}
    with serving() as (engine, url), httpx.Client(event_hooks={"response": [check_reply]}) as http:
        engine.answers = True
        ask = partial(http.post, url.removesuffix("/v1") + path)
        whole, stream = (ask(json=body | {"tools": tools[path]} | fields) for fields in ({}, {"stream": True}))
    assert all(said in whole.text for said in ("They want weather.", "Genève", "days")), whole.text
    assert len(check_events(path, stream.text)) > 10


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("path", BODIES)
def test_the_schema_of_a_body_has_every_field_that_is_read(http: httpx.Client, path: str) -> None:
    document = http.get("/openapi.json").json()
    [ref] = set(_refs(document["paths"][path]["post"]["requestBody"]))
    schema = document["components"]["schemas"][ref.rpartition("/")[2]]
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
@pytest.mark.skipif(not SCHEMATHESIS, reason="pip install schemathesis, or name its command in SCHEMATHESIS")
@pytest.mark.parametrize("key", ["", "secret"])
def test_schemathesis_finds_nothing(fake_engine: FakeEngine, key: str) -> None:
    """Except what no schema states: that a valid value may not fit the vocabulary, the context or another field. With
    a key, also that no route which is said to need it goes without."""
    server = HttpServer(create_app(fake_engine, api_keys=[key] if key else []), port=0)
    server.start()
    [command] = commands("test_openapi")
    # names of models in a path are drawn at random, and most are no part of a path
    command = f"{command.rstrip()} --phases examples,coverage,fuzzing --suppress-health-check filter_too_much"
    command += " --max-time 90"
    command += f' --header "Authorization: Bearer {key}"' if key else ""
    path = f"{Path(str(SCHEMATHESIS)).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        done = subprocess.run(
            ["bash", "-euc", command],
            env=os.environ | {"URL": server.url, "PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        server.stop()
    assert done.returncode == 0, done.stdout[-5000:]


def test_every_status_that_is_raised_is_described(fake_engine: FakeEngine, tmp_path: Path) -> None:
    """Of a module that has one route by that route, which passes on what is raised for all that change weights."""
    run = ServeRun(allow_update_weights=True, update_folder=str(tmp_path))
    paths = openapi(create_app(fake_engine, api_keys=("k",), run=run), has_key=True)["paths"]
    described = {path: {int(each) for of in way.values() for each in of["responses"]} for path, way in paths.items()}
    every, changing = set[int]().union(*described.values()), ("/update_weights_from_disk", "/collective_rpc")
    sent = "/update_weights_from_safetensors"
    of_all = set.intersection(*(described[path] for path in (sent, *changing)))
    of_route = {"sent_weights.py": described[sent], "weights.py": of_all}
    for source in Path(specserve.serve.http.__file__).parent.rglob("*.py"):
        raised = set(map(int, re.findall(r"\b(?:HTTPException|ErrorResponse)\(\s*(\d+)", source.read_text())))
        assert raised <= of_route.get(source.name, every), source
