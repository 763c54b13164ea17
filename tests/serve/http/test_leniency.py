"""Fields that clients of other servers send beside OpenAI's: what they ask for is done, streamed or not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes import CONTEXT, STORY, USER, FakeEngine, assert_refused

from specserve.serve.http.app import create_app
from specserve.serve.http.openai import prompts
from specserve.serve.http.openai.bodies import ChatBody, CompletionBody
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.settings import ServeRun

Json = dict[str, Any]
BODIES: list[tuple[str, Json]] = [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": USER})]


def _stream(http: httpx.Client, path: str, body: Json) -> list[Json]:
    lines = http.post(path, json=body | {"stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def _whole(http: httpx.Client, path: str, body: Json) -> Json:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _text(choice: Json) -> str:
    return choice["text"] if "text" in choice else choice.get("message", choice.get("delta")).get("content", "")


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"stop": ["e", "d"]}, "abc", "d"),
        ({"stop": "d", "include_stop_str_in_output": True}, "abcd", "d"),
        ({"stop_token_ids": [101]}, "abcd", 101),
        ({"stop_token_ids": [101], "include_stop_str_in_output": True}, "abcde", 101),
        ({}, STORY, None),
        ({"max_tokens": 3}, "abc", None),
    ],
)
def test_what_ended_an_answer_is_said_at_its_end(http, path, body, options, text, reason):
    """The fake engine's steps have two tokens, so half of these ends are in the middle of one."""
    [choice] = _whole(http, path, body | options)["choices"]
    assert (_text(choice), choice["stop_reason"]) == (text, reason)
    choices = [chunk["choices"][0] for chunk in _stream(http, path, body | options)]
    assert "".join(map(_text, choices)) == text
    assert [choice["stop_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]
    assert choices[-1]["finish_reason"] == ("length" if "max_tokens" in options else "stop")


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_token_ids_of_prompt_and_answer_are_given_on_request(http, fake_engine, path, body):
    body = body | {"return_token_ids": True, "seed": 0, "n": 2}
    for held in ({}, {"prompt": "held"} if "prompt" in body else {}):
        whole = _whole(http, path, body | held)
        sent = list(fake_engine.requests[-1].prompt_ids)
        answers = [list(STORY.encode()), list(STORY[1:].encode())]
        assert [choice["token_ids"] for choice in whole["choices"]] == answers
        in_choice = [choice.get("prompt_token_ids") for choice in whole["choices"]]
        assert (in_choice, whole.get("prompt_token_ids")) in [([sent, sent], None), ([None, None], sent)]
        received: list[list[int]] = [[], []]
        prompts = 0
        for chunk in _stream(http, path, body | held):
            [choice] = chunk["choices"]
            received[choice["index"]] += choice["token_ids"]
            prompt = chunk.get("prompt_token_ids", choice.get("prompt_token_ids"))
            assert prompt in (None, sent)
            prompts += prompt is not None
        assert received == answers
        assert prompts == (1 if "messages" in body else 2)
    assert "token_ids" not in _whole(http, path, body | {"return_token_ids": False})["choices"][0]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_continuous_usage_counts_every_chunk(http, path, body):
    usage = {"include_usage": True, "continuous_usage_stats": True}
    chunks = _stream(http, path, body | {"stream_options": usage})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [len(STORY)] * 2
    assert all(chunk["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"] for chunk in chunks)
    alone = _stream(http, path, body | {"stream_options": {"continuous_usage_stats": True}})
    assert all("usage" not in chunk for chunk in alone)  # as at vLLM: include_usage asks for usage, this how often


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_prompt_is_truncated_on_request(http, fake_engine, path, body):
    _whole(http, path, body)
    whole = fake_engine.requests[-1].prompt_ids
    for fields, kept in [
        ({"truncate_prompt_tokens": 2}, whole[-2:]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, whole[:2]),
        ({"truncate_prompt_tokens": 10_000}, whole),
        ({"truncate_prompt_tokens": -1, "max_tokens": CONTEXT - 1}, whole[-1:]),
    ]:
        assert http.post(path, json=body | fields | {"seed": 0}).status_code == 200
        assert fake_engine.requests[-1].prompt_ids == kept
    for fields in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -1, "max_tokens": CONTEXT}):
        assert assert_refused(http.post(path, json=body | fields))["param"] == "truncate_prompt_tokens"
    long = [{"prompt": "x" * CONTEXT}, {"prompt": [97] * CONTEXT}] if "prompt" in body else []
    for prompt in long:
        assert http.post(path, json=prompt | {"truncate_prompt_tokens": -1}).status_code == 200
        assert len(fake_engine.requests[-1].prompt_ids) == CONTEXT - 16
    echoed = {"prompt": "hello", "echo": True, "truncate_prompt_tokens": 2}
    assert _whole(http, "/v1/completions", echoed)["choices"][0]["text"] == "lo" + STORY


def test_a_suffix_is_put_into_the_tokens_of_the_model(http, fake_engine, monkeypatch):
    body = {"prompt": ["a", "b"], "suffix": "z"}
    _whole(http, "/v1/completions", body)
    assert [request.prompt_ids for request in fake_engine.requests[-2:]] == [(1, 97, 2, 122, 3), (1, 98, 2, 122, 3)]
    fake_ids = {"[PREFIX]": 4, "[SUFFIX]": 5}
    monkeypatch.setattr(fake_engine.tokenizer, "token_id", fake_ids.get)
    _whole(http, "/v1/completions", body)
    assert fake_engine.requests[-1].prompt_ids == (5, 122, 4, 98)
    refused = assert_refused(http.post("/v1/completions", json=body | {"prompt": [97]}))
    assert refused["param"] == "suffix"
    monkeypatch.setattr(fake_engine.tokenizer, "token_id", {"<fim_prefix>": 1}.get)
    assert assert_refused(http.post("/v1/completions", json=body))["param"] == "suffix"
    assert len({marks.prompt for marks in prompts._MARKS}) == len(prompts._MARKS)


def test_a_final_message_is_continued_on_request(http, fake_engine):
    messages = [*USER, {"role": "assistant", "content": "so"}]
    for fields, end in [
        ({"continue_final_message": True}, "<assistant>so"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<assistant>so"),
        ({"add_generation_prompt": False}, "<assistant>so{}"),
        ({}, "<assistant>so{}<assistant>"),
    ]:
        _whole(http, "/v1/chat/completions", {"messages": messages} | fields)
        assert bytes(fake_engine.requests[-1].prompt_ids).decode() == "<user>hi" + end
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert assert_refused(http.post("/v1/chat/completions", json=both))["param"] == "continue_final_message"


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_reply_has_the_id_that_was_asked_for(http, path, body):
    assert _whole(http, path, body | {"request_id": "mine-1"})["id"].endswith("-mine-1")


@pytest.mark.parametrize("body_type", [CompletionBody, ChatBody])
def test_a_field_is_either_read_or_inactive(body_type):
    assert not set(body_type.model_fields) & set(body_type.UNSUPPORTED)


@pytest.fixture
def lax(fake_engine: FakeEngine) -> Iterator[httpx.Client]:
    server = HttpServer(create_app(fake_engine, run=ServeRun(allow_unknown_fields=True)), port=0)
    server.start()
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client
    server.stop()


def test_unknown_fields_pass_where_that_is_allowed_and_are_counted_and_logged_once(lax, caplog):
    body = {"prompt": "x", "surprise": [1], "stream_options": {"odd": None}}
    for _ in range(2):
        assert lax.post("/v1/completions", json=body).status_code == 200
    logged = [record.getMessage().rpartition(" ")[2] for record in caplog.records if "unknown" in record.getMessage()]
    assert sorted(logged) == ["CompletionBody.surprise", "StreamOptions.odd"]
    assert 'specserve:unknown_fields_total{model_name="tests/fake-model"} 4.0' in lax.get("/metrics").text
    assert assert_refused(lax.post("/v1/completions", json=body | {"echo": 1}))["param"] == "echo"
    assert assert_refused(lax.post("/v1/completions", json=body | {"length_penalty": 2}))["param"] == "length_penalty"
    many = dict.fromkeys(map("f{}".format, range(100_000)), 1)
    assert lax.post("/v1/completions", json={"prompt": "x"} | many).status_code == 200
    assert len(caplog.records) < 1100
