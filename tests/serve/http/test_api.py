"""The HTTP server over a real socket: what clients get. Bad inputs have a file of their own."""

import dataclasses
import functools
import itertools
import json
import socket
import uuid
from typing import Any

import httpx
import openai
import pytest
from fakes import CONTEXT, MODEL, STORY, USER, FakeTokenizer, assert_refused, wait_for

from specserve.errors import ConfigError
from specserve.serve.http.app import create_app
from specserve.serve.http.formats.reader import Part
from specserve.serve.http.openai import completions, streaming
from specserve.serve.http.openai.bodies import ChatBody, ChatTemplateKwargs, CompletionBody, StreamOptions
from specserve.serve.http.openai.chat import ChatMessage
from specserve.serve.http.openai.completions import ChatFormat, CompletionFormat
from specserve.serve.http.openai.logprobs import TokenTexts
from specserve.serve.http.openai.replies import Answer, Usage
from specserve.serve.http.transport.server import HttpServer, bind_listener
from specserve.serve.requests.request import Delta, FinishReason, Request, SamplingParams, SpeculationStats

# --- what clients get --------------------------------------------------------------------------------------------


def test_completion_returns_text_usage_and_the_stop_reason(client):
    reply = client.completions.create(model=MODEL, prompt="hello")
    assert reply.choices[0].text == STORY
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == 5
    assert reply.usage.completion_tokens == len(STORY)
    assert reply.usage.total_tokens == 5 + len(STORY)
    assert reply.usage.completion_tokens_details.accepted_prediction_tokens == 4
    assert reply.usage.completion_tokens_details.rejected_prediction_tokens == 5


def test_completion_defaults_to_sixteen_tokens_and_says_length(client):
    reply = client.completions.create(model=MODEL, prompt="hello", extra_body={"ignore_eos": True})
    assert len(reply.choices[0].text) == 16
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", ["ab", ["ab", "c"], [97, 98], [[97, 98], [99]]])
def test_completion_takes_every_form_of_prompt_and_echoes_it(client, prompt):
    texts = [choice.text for choice in client.completions.create(model=MODEL, prompt=prompt, echo=True).choices]
    assert texts == ["ab" + STORY] if prompt in ("ab", [97, 98]) else ["ab" + STORY, "c" + STORY]


# every option of SamplingParams but n, as clients spell it
OPTIONS: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": -2,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.1,
    "logit_bias": {"0": -100, "255": 1.5},
    "allowed_token_ids": [0, 97, 98],
    "bad_words": ["x", "y z"],
    "seed": 3,
    "stop": "h",
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "speculation": 2,
    "return_tree": True,
}
PARAMS = SamplingParams(**OPTIONS | {"logit_bias": {0: -100.0, 255: 1.5}})


def test_every_option_reaches_the_engine_from_both_endpoints(http, fake_engine):
    routing = {"priority": -5, "cache_salt": "tenant"}
    for path, body, logprobs in [
        ("/v1/completions", {"prompt": "x", "logprobs": 20}, 20),
        ("/v1/completions", {"prompt": "x", "logprobs": 0}, 0),
        ("/v1/completions", {"prompt": "x"}, None),
        ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 20}, 20),
        ("/v1/chat/completions", {"messages": USER, "logprobs": True}, 0),
        ("/v1/chat/completions", {"messages": USER, "logprobs": False}, None),
    ]:
        reply = http.post(path, json=body | OPTIONS | routing)
        assert reply.status_code == 200, reply.text
        request = fake_engine.requests[-1]
        assert request.params == dataclasses.replace(PARAMS, logprobs=logprobs)
        assert (request.priority, request.cache_salt, request.token_mask) == (-5, "tenant", None)
    besides = {"n", "logprobs", "prompt_logprobs", "grammar", "hidden_states", "shown_special_ids"}
    assert {item.name for item in dataclasses.fields(SamplingParams)} == {*OPTIONS, *besides}  # none forgotten


@pytest.mark.parametrize(("sent", "got"), [("off", 0), ("auto", None), (None, None), (0, 0), (2**31 - 1, 2**31 - 1)])
def test_speculation_is_a_depth_or_off_or_the_servers_choice(http, fake_engine, sent, got):
    assert http.post("/v1/completions", json={"prompt": "x", "speculation": sent}).status_code == 200
    assert fake_engine.requests[-1].params.speculation == got


def test_null_means_the_default_at_any_depth(http, fake_engine):
    fields = dict.fromkeys([*CompletionBody.model_fields, *CompletionBody.UNSUPPORTED])
    nothing = {"stream_options": dict.fromkeys(StreamOptions.model_fields)}
    reply = http.post("/v1/completions", json=fields | {"prompt": "x"} | nothing)
    assert reply.status_code == 200, reply.text
    assert fake_engine.requests[-1].params == SamplingParams(max_tokens=16)
    fields = dict.fromkeys([*ChatBody.model_fields, *ChatBody.UNSUPPORTED])
    message = dict.fromkeys(ChatMessage.model_fields) | USER[0]
    nothing |= {"chat_template_kwargs": dict.fromkeys(ChatTemplateKwargs.model_fields)}
    reply = http.post("/v1/chat/completions", json=fields | {"messages": [message]} | nothing)
    assert reply.status_code == 200, reply.text
    assert fake_engine.requests[-1].params == SamplingParams()
    assert (fake_engine.requests[-1].priority, fake_engine.requests[-1].cache_salt) == (0, "")


def test_choice_i_is_drawn_with_seed_plus_i(client, fake_engine):
    reply = client.completions.create(model=MODEL, prompt=["x", "y"], n=2, seed=1, max_tokens=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == ["bcd", "cde", "bcd", "cde"]
    assert reply.usage.prompt_tokens == 2  # each prompt once
    assert reply.usage.completion_tokens == 12
    client.completions.create(model=MODEL, prompt="x", n=2)
    assert [request.params.seed for request in fake_engine.requests[-2:]] == [None, None]
    client.completions.create(model=MODEL, prompt="x", n=2, seed=2**63 - 1)
    assert [request.params.seed for request in fake_engine.requests[-2:]] == [2**63 - 1, -(2**63)]


def test_cached_tokens_are_those_of_each_prompts_first_choice(http):
    body = {"prompt": ["cached", "or not"], "n": 3, "cache_salt": "s"}

    def cached(body: dict[str, Any]) -> int:
        usage = http.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens"] == 6 * len(body["prompt"])
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(body), cached(body), cached(body | {"prompt": ["cached"]})] == [0, 12, 6]
    assert cached(body | {"cache_salt": "another"}) == 0
    assert cached(body) == 12
    reply = http.post("/flush_cache")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
    assert cached(body) == 0


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 0}])
def test_streamed_completion_equals_the_whole_one(client, fake_engine, fields):
    asked = {"model": MODEL, "prompt": ["x", "y"], "n": 2, "seed": 1, "echo": True, **fields}
    asked["extra_body"] = {"return_draft_depths": True, "return_token_ids": True}
    fake_engine.flush_cache()
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    fake_engine.flush_cache()
    whole = client.completions.create(**asked)
    assert (whole.usage.completion_tokens == 0) == (fields != {}) == (not whole.choices[0].token_ids)
    assert hasattr(whole.choices[0], "draft_depths") == (fields == {})
    texts, reasons = [""] * 4, [None] * 4
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_stream_ends_in_done_and_has_no_usage_unasked(http):
    reply = http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events[:-1])


def test_chat_returns_a_message(client, fake_engine):
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        max_completion_tokens=4,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.content == "abcd"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    prompt = bytes(fake_engine.requests[-1].prompt_ids).decode()
    assert prompt == "<system>be brief<user>a\nb{'enable_thinking': False}<assistant>"


def test_chat_takes_its_own_answer_back(client):
    answer = client.chat.completions.create(model=MODEL, messages=USER).choices[0].message
    messages = [*USER, answer.model_dump(exclude_unset=True), *USER]
    assert client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content == STORY


def test_chat_runs_to_the_context_unless_limited(client, fake_engine):
    client.chat.completions.create(model=MODEL, messages=USER)
    assert fake_engine.requests[-1].params.max_tokens is None


def test_streamed_chat_starts_with_the_role(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=USER, n=2, seed=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for index, text in enumerate([STORY, STORY[1:]]):
        deltas = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert (deltas[0].delta.role, deltas[0].delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in deltas) == text
        assert [choice.finish_reason for choice in deltas if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == 2 * len(STORY) - 1


def test_models_are_listed_and_found(client, http):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert http.get(f"/v1/models/{MODEL}").json()["max_model_len"] == CONTEXT
    with pytest.raises(openai.NotFoundError) as info:
        client.models.retrieve("other")
    assert info.value.code == "model_not_found"


def test_tokenize_and_detokenize_are_inverse(http):
    reply = http.post("/tokenize", json={"prompt": "héllo"}).json()
    assert (reply["count"], reply["max_model_len"]) == (6, CONTEXT)
    assert http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "héllo"}
    chat = http.post("/tokenize", json={"messages": USER, "add_generation_prompt": False}).json()
    assert bytes(chat["tokens"]) == b"<user>hi{}"


def test_default_values_of_unsupported_fields_and_harmless_fields_are_accepted(http):
    shared = {
        "user": "me",
        "metadata": {"run": "1"},
        "store": False,
        "n": 2,
        "best_of": 2,
        "response_format": {"type": "text"},
        "length_penalty": 1.0,
        "structural_tag": None,
        "logits_processors": None,
        "structured_outputs": {"json_object": True, "structural_tag": None},
        "stream_options": {"include_usage": False},
    }
    reply = http.post("/v1/completions", json=shared | {"prompt": "x", "suffix": ""})
    assert reply.status_code == 200, reply.text
    chat = {"messages": USER, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none"}
    reply = http.post("/v1/chat/completions", json=shared | chat)
    assert reply.status_code == 200, reply.text


# --- leaving, failing, refusing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("prompt", ["slow", "slow and silent"])
def test_disconnect_cancels_every_sequence_within_a_second(server, fake_engine, is_stream, prompt):
    wait_for(lambda: fake_engine.num_active == 0)
    body = json.dumps({"prompt": [prompt, prompt], "n": 2, "stream": is_stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(lambda: fake_engine.num_active == 4)
        if is_stream:
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
    wait_for(lambda: fake_engine.num_active == 0)


def test_closing_an_openai_stream_cancels_the_sequence(client, fake_engine):
    wait_for(lambda: fake_engine.num_active == 0)
    with client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "slow"}], stream=True
    ) as stream:
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        assert fake_engine.num_active == 1
    wait_for(lambda: fake_engine.num_active == 0)


def test_no_room_is_503_with_retry_after_and_leaves_no_sequence(http, fake_engine):
    reply = http.post("/v1/completions", json={"prompt": "full now"})
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json()["error"]["message"] == "the queue is full"
    reply = http.post("/v1/completions", json={"prompt": ["slow", "full"], "stream": True})  # the second finds no room
    assert reply.status_code == 503
    wait_for(lambda: fake_engine.num_active == 0)


def test_ready_is_reported_by_the_engine(http, fake_engine, monkeypatch):
    assert http.get("/ready").json() == {"status": "ok", "programs_left": fake_engine.stats().num_programs_left}
    for name, value in [("is_compiled", False), ("is_draining", True), ("is_healthy", False)]:
        with monkeypatch.context() as context:
            context.setattr(fake_engine, name, value)
            reply = http.get("/ready")
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_ready")
            assert int(reply.headers["retry-after"]) >= 1
            assert http.get("/health").status_code == (200 if name != "is_healthy" else 503)
    assert http.get("/ready").status_code == 200


def test_engine_error_is_500_and_tells_no_internals(http, fake_engine):
    reply = http.post("/v1/completions", json={"prompt": ["explode", "slow"]})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    wait_for(lambda: fake_engine.num_active == 0)


def test_engine_error_in_a_stream_is_an_event(client, http):
    reply = http.post("/v1/completions", json={"prompt": "explode", "stream": True})
    first, last = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert json.loads(first)["error"]["type"] == "server_error"
    assert "secret" not in first
    assert last == "[DONE]"
    with pytest.raises(openai.APIError):
        list(client.completions.create(model=MODEL, prompt="explode", stream=True))


def test_an_engine_that_dies_silently_ends_its_requests(http, fake_engine, monkeypatch):
    monkeypatch.setattr(streaming, "HEALTH_CHECK_SECONDS", 0.05)
    fake_engine.is_healthy = False
    try:
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 500
    finally:
        fake_engine.is_healthy = True
    assert http.get("/health").status_code == 200


def test_a_quiet_stream_is_kept_alive(http, monkeypatch):
    monkeypatch.setattr(streaming, "HEALTH_CHECK_SECONDS", 0.002)
    monkeypatch.setattr(streaming, "KEEPALIVE_SECONDS", 0.0)
    with http.stream("POST", "/v1/completions", json={"prompt": "slow and silent", "stream": True}) as reply:
        assert next(reply.iter_lines()) == ": ping"


def test_a_stream_whose_tokens_show_no_text_is_kept_alive(http, monkeypatch):
    """As one that thinks where its thoughts are not asked for: what counts is how long no byte has gone out."""
    monkeypatch.setattr(streaming, "HEALTH_CHECK_SECONDS", 0.002)
    monkeypatch.setattr(streaming, "KEEPALIVE_SECONDS", 0.12)
    body = {"prompt": "paced and held", "stream": True, "max_tokens": 20, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        assert ": ping" in [*reply.iter_lines()]


# --- keys and the socket -------------------------------------------------------------------------------------------


def test_every_route_but_the_page_health_ready_and_version_needs_the_key(fake_engine):
    server = HttpServer(create_app(fake_engine, api_keys=["sk-ключ"]), port=0)
    server.start()
    try:
        with httpx.Client(base_url=server.url) as http:
            assert http.get("/health").status_code == 200
            assert http.get("/ready").status_code == 200
            assert http.get("/version").status_code == 200
            closed = [
                "/flush_cache",
                "/metrics",
                "/v1/models",
                "/v1/completions",
                "/tokenize",
                "/nowhere",
                "/health/",
            ]
            for path in closed:
                # the whole address: of "//health" alone, httpx would take the name for a host
                assert assert_refused(http.get(server.url + path), 401)["code"] == "invalid_api_key"
            for value in ["", "Bearer", "Bearer wrong", "sk-ключ", "Basic sk-ключ", "Bearer sk-ключ2"]:
                reply = http.get("/v1/models", headers={"authorization": value.encode()})
                assert_refused(reply, 401)
            key = "Bearer sk-ключ".encode()
            assert http.get("/v1/models", headers={"authorization": key}).status_code == 200
    finally:
        server.stop()


def test_a_taken_port_is_a_config_error(server, fake_engine):
    with pytest.raises(ConfigError, match=str(server.port)):
        HttpServer(create_app(fake_engine), port=server.port)
    with pytest.raises(ConfigError, match="70000"):
        bind_listener("127.0.0.1", 70000)


def test_a_stopped_server_frees_its_port(fake_engine):
    server = HttpServer(create_app(fake_engine), listener=bind_listener("127.0.0.1", 0))
    server.start()
    assert httpx.get(f"{server.url}/version").json()["version"]
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/version")
    bind_listener("127.0.0.1", server.port).close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": True},
        {"prompt_logprobs": 0},
        {"request_id": "<text>"},
    ],
)
@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
def test_a_chunk_of_text_is_the_last_chunk_without_its_end(kind, options, monkeypatch):
    """Byte for byte: what stands around a text is spelled once for a stream, but for its last chunk."""
    monkeypatch.setattr(completions.time, "time", lambda: 1.0)
    monkeypatch.setattr(completions.uuid, "uuid4", lambda: uuid.UUID(int=1))
    fields = {"prompt": "a"} if kind is CompletionFormat else {"messages": USER}
    body = (CompletionBody if kind is CompletionFormat else ChatBody).model_validate({**fields, **options})
    going, ended = (kind(MODEL, body, TokenTexts(FakeTokenizer())) for _ in range(2))
    for index, text in itertools.product((0, 1), ("a", "<text>", '"\\\n\u2028', "\u00e9\U0001f600", "<text>")):
        answer = Answer(index, Part(text), None, token_ids=(5, len(text)), prompt_ids=(1,))
        usage = functools.partial(Usage, 1, 0, len(text), 0, 0)
        [chunk] = going.piece(answer, usage)
        [last] = ended.piece(dataclasses.replace(answer, finish_reason="length"), usage)
        assert chunk == last.replace(b'"finish_reason":"length"', b'"finish_reason":null')


def test_text_that_is_there_does_not_wait_for_what_another_choice_says_next(http, fake_engine, monkeypatch):
    """One step brings a choice text, and another one half a character, again and again."""
    said = set[int]()

    def step(request: Request, _num_emitted: int) -> Delta:
        if request.is_cancelled:
            return Delta(finish_reason=FinishReason.CANCELLED, stats=SpeculationStats())
        is_new = request.prompt_ids[0] not in said
        said.add(request.prompt_ids[0])
        return Delta((104,), "hello") if is_new and request.prompt_ids[0] == ord("a") else Delta((195,))

    monkeypatch.setattr(fake_engine, "_step", step)
    body = {"model": MODEL, "prompt": ["a", "b"], "stream": True, "max_tokens": 99}
    with http.stream("POST", "/v1/completions", json=body, timeout=5.0) as stream:
        assert next(line for line in stream.iter_lines() if "hello" in line)
