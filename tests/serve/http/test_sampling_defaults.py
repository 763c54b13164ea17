"""Options of sampling that a client leaves out are those of the target's generation_config.json, over every route."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import USER, FakeEngine

from specserve.errors import CheckpointError, ConfigError
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun
from specserve.tokenizer import SAMPLING_DEFAULTS, read_sampling_defaults

Json = dict[str, Any]
RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
ROUTES: list[tuple[str, Json]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 8}),
    ("/generate", {"text": "hi"}),
]


def _nested(path: str, options: Json) -> Json:
    return {"sampling_params": options} if path == "/generate" else options


@pytest.fixture(params=["model", "openai"])
def taken(request: pytest.FixtureRequest, fake_engine: FakeEngine) -> Iterator[tuple[str, httpx.Client]]:
    fake_engine.tokenizer.sampling_defaults = RECOMMENDED
    server = HttpServer(create_app(fake_engine, run=ServeRun(sampling_defaults=request.param)), port=0)
    server.start()
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield request.param, client
    server.stop()
    fake_engine.tokenizer.sampling_defaults = {}


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    "sent", [{}, {"temperature": 0.0}, {"temperature": None, "top_p": 1.0}, {"top_k": 3, "min_p": 0}]
)
def test_what_is_left_out_is_the_models(taken, fake_engine, path, body, sent):
    which, client = taken
    if path == "/v1/messages":
        sent = {name: value for name, value in sent.items() if name != "min_p"}  # it has none
    reply = client.post(path, json=body | _nested(path, sent))
    assert reply.status_code == 200, reply.text
    params = fake_engine.requests[-1].params
    defaults = (
        RECOMMENDED if which == "model" else {name: getattr(SamplingParams(), name) for name in SAMPLING_DEFAULTS}
    )
    given = {name: value for name, value in sent.items() if value is not None}
    assert {name: getattr(params, name) for name in SAMPLING_DEFAULTS} == defaults | given
    if path == "/v1/responses":
        assert (reply.json()["temperature"], reply.json()["top_p"]) == (params.temperature, params.top_p)


def test_a_file_that_recommends_what_cannot_be_stops_the_start(fake_engine):
    fake_engine.tokenizer.sampling_defaults = {"temperature": -1}
    try:
        with pytest.raises(ConfigError, match=r"generation_config\.json.*temperature.*--sampling-defaults openai"):
            create_app(fake_engine, run=ServeRun())
        create_app(fake_engine, run=ServeRun(sampling_defaults="openai"))
    finally:
        fake_engine.tokenizer.sampling_defaults = {}


def test_a_folders_recommendation_is_read(tmp_path: Path):
    assert read_sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    stated = {**RECOMMENDED, "top_k": None, "do_sample": True, "eos_token_id": 2, "max_length": 20}
    file.write_text(json.dumps(stated))
    assert read_sampling_defaults(tmp_path) == {name: value for name, value in RECOMMENDED.items() if name != "top_k"}
    for wrong in ("0.6", True, [0.6]):
        file.write_text(json.dumps({"temperature": wrong}))
        with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature: expected a number"):
            read_sampling_defaults(tmp_path)
