"""POST /v1/messages in Anthropic's shapes: bodies as its clients send them, whole and streamed replies, errors."""

import json
from typing import Any

import httpx
import pytest
from fakes import MODEL, STORY, USER
from fixed_text import serving

from specserve.serve.http.adapters.messages_bodies import MessagesBody
from specserve.serve.http.adapters.messages_replies import MessagesFormat
from specserve.serve.http.app import create_app
from specserve.serve.http.formats.reader import Part, ToolCallPart
from specserve.serve.http.openai.replies import Answer, Usage
from specserve.serve.http.transport.server import HttpServer

Json = dict[str, Any]
ASKED: Json = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


def _post(http: httpx.Client, **fields: Any) -> Json:
    reply = http.post("/v1/messages", json=ASKED | fields, headers={"anthropic-version": "2023-06-01"})
    assert reply.status_code == 200, reply.text
    return reply.json()


def _events(http: httpx.Client, **fields: Any) -> list[Json]:
    text = http.post("/v1/messages", json=ASKED | fields | {"stream": True}).text
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    return events


def test_a_message_is_a_chat(http, fake_engine):
    hint = {"cache_control": {"type": "ephemeral"}}
    reply = _post(
        http,
        system=[{"type": "text", "text": "be brief"} | hint],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"} | hint]}],
        temperature=0.5,
        top_k=5,
        metadata={"user_id": "me"},
    )
    assert reply["content"] == [{"type": "text", "text": STORY}]
    assert (reply["stop_reason"], reply["stop_sequence"], reply["role"]) == ("end_turn", None, "assistant")
    assert bytes(fake_engine.requests[-1].prompt_ids).decode() == "<system>be brief<user>hi{}<assistant>"
    params = fake_engine.requests[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 5, 50)
    num_prompt = len(fake_engine.requests[-1].prompt_ids)
    usage = reply["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_prompt
    assert usage["output_tokens"] == len(STORY)
    counted = http.post("/v1/messages/count_tokens", json={"messages": ASKED["messages"]})
    assert counted.json() == {"input_tokens": num_prompt - len("<system>be brief")}


@pytest.mark.parametrize(
    ("fields", "text", "end"),
    [
        ({}, STORY, ("end_turn", None)),
        ({"max_tokens": 3}, "abc", ("max_tokens", None)),
        ({"stop_sequences": ["e", "f"]}, "abcd", ("stop_sequence", "e")),
        ({"stop_token_ids": [101]}, "abcd", ("end_turn", None)),
    ],
)
def test_a_streamed_message_grows_into_the_whole_one(http, fake_engine, fields, text, end):
    fake_engine.flush_cache()
    whole = _post(http, **fields)
    fake_engine.flush_cache()
    first, start, *deltas, stop, ended, last = _events(http, **fields)
    assert (first["message"]["content"], first["message"]["stop_reason"]) == ([], None)
    assert start == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert "".join(delta["delta"]["text"] for delta in deltas) == whole["content"][0]["text"] == text
    assert stop == {"type": "content_block_stop", "index": 0}
    assert ended["delta"] == {"stop_reason": end[0], "stop_sequence": end[1]}
    assert ended["delta"].items() <= whole.items()
    assert ended["usage"] == whole["usage"]
    assert last == {"type": "message_stop"}


def test_what_the_assistant_says_last_is_continued(http, fake_engine):
    _post(http, messages=[*ASKED["messages"], {"role": "assistant", "content": "so"}])
    assert bytes(fake_engine.requests[-1].prompt_ids).decode() == "<user>hi<assistant>so"


def test_tools_their_calls_and_results_become_those_of_chat():
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "no"}], "is_error": True}
    body = MessagesBody.model_validate(
        ASKED
        | {
            "messages": [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""}, call]},
                {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
        }
    )
    fields = body.chat_fields()
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert fields["messages"] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "so",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: no"},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ]
    assert fields["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == ("required", False)
    assert body.thinks is False


THINKING: dict[str, list[Json]] = {
    "yes": [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 50}],
    "no": [{"type": "disabled"}],
}


@pytest.mark.parametrize(
    ("template", "switches"),
    [
        ("<think> </think> enable_thinking", {"yes": "{'enable_thinking': True}", "no": "{'enable_thinking': False}"}),
        ("</think> {% if not thinking %}", {"yes": "{'thinking': True}", "no": "{'thinking': False}"}),
        ("<|channel|> reasoning_effort", {"yes": "{}", "no": "{'reasoning_effort': 'none'}"}),
        ("", {"yes": "{}", "no": "{}"}),  # it never reasons
        ("<think> </think>", {"yes": "{}", "no": None}),  # it always does
    ],
)
def test_thinking_reaches_the_template_by_its_own_switch(template, switches):
    """A budget that never ends it means what adaptive thinking means: the answer's own length comes first. What the
    template cannot be set to is refused."""
    with serving(template) as (engine, url), httpx.Client(base_url=url.removesuffix("/v1")) as http:
        engine.says = "x"
        for wish, thinking in ((wish, each) for wish, wishes in THINKING.items() for each in wishes):
            counted = http.post("/v1/messages/count_tokens", json={"messages": USER, "thinking": thinking})
            if switches[wish] is None:
                reply = http.post("/v1/messages", json=ASKED | {"thinking": thinking})
                assert reply.status_code == counted.status_code == 400
                assert "no switch for reasoning, so thinking would" in reply.json()["error"]["message"]
                continue
            _post(http, thinking=thinking)
            prompt = bytes(engine.requests[-1].prompt_ids)
            assert prompt.decode() == f"<user>hi{switches[wish]}<assistant>"
            assert counted.json() == {"input_tokens": len(prompt)}


def test_a_schema_holds_for_a_message(http, fake_engine):
    _post(http, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert json.loads(fake_engine.requests[-1].params.grammar.text) == {"type": "object"}


def test_calls_are_blocks_of_their_own():
    usage = Usage(5, 2, 3, 0, 0)
    calls = [ToolCallPart(0, '{"a": 1}', "c0", "f"), ToolCallPart(1, '{"cut', "c1", "g")]
    answer = Answer(0, Part(reasoning="so", content="I", tool_calls=calls), "tool_calls")
    reply = MessagesFormat(MODEL, None).reply([answer], usage)
    assert reply["content"] == [
        {"type": "thinking", "thinking": "so", "signature": ""},
        {"type": "text", "text": "I"},
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "c1", "name": "g", "input": {"text": '{"cut'}},
    ]
    assert reply["stop_reason"] == "tool_use"
    assert (reply["usage"]["input_tokens"], reply["usage"]["cache_read_input_tokens"]) == (3, 2)


def _assert_error(reply: httpx.Response, status: int, kind: str, named: str = "") -> None:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert named in body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "forbidden"}]}, "refuses"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 49}}, "thinking.budget_tokens must be at least max_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 99}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_errors_have_anthropics_shape(http, fields, named):
    reply = http.post("/v1/messages", json=ASKED | fields)
    _assert_error(reply, 400, "invalid_request_error", named)


def test_other_failures_have_it_too(http, fake_engine):
    _assert_error(http.get("/v1/messages"), 405, "invalid_request_error")
    _assert_error(http.post("/v1/messages", json=ASKED | {"model": "gpt-9"}), 404, "not_found_error", "gpt-9")
    full = [{"role": "user", "content": "full now"}]
    reply = http.post("/v1/messages", json=ASKED | {"messages": full})
    _assert_error(reply, 503, "overloaded_error")
    assert int(reply.headers["retry-after"]) >= 1
    *_, last = _events(http, messages=[{"role": "user", "content": "explode"}])
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in last["error"]["message"]


def test_the_key_may_come_in_anthropics_header(fake_engine):
    server = HttpServer(create_app(fake_engine, api_keys=["sk-1"]), port=0)
    server.start()
    try:
        for headers, status in [({}, 401), ({"x-api-key": "sk-2"}, 401), ({"x-api-key": "sk-1"}, 200)]:
            reply = httpx.post(f"{server.url}/v1/messages", json=ASKED, headers=headers)
            assert reply.status_code == status
            if status == 401:
                _assert_error(reply, 401, "authentication_error")
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "sk-1"}).status_code == 401
    finally:
        server.stop()
