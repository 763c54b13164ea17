"""POST /v1/responses by the real client: whole and streamed replies say the same, in OpenAI's events."""

import json

import openai
import pydantic
import pytest
from fakes import MODEL, STORY, assert_refused

from specserve.serve.http.adapters.responses_bodies import ResponsesBody
from specserve.serve.http.adapters.responses_replies import ResponsesFormat
from specserve.serve.http.adapters.translation import Blocks
from specserve.serve.http.formats.reader import Part, ToolCallPart
from specserve.serve.http.openai.logprobs import TokenTexts
from specserve.serve.http.openai.replies import Answer, Usage


@pytest.fixture
def prompt(fake_engine):
    return lambda: bytes(fake_engine.requests[-1].prompt_ids).decode()


def test_a_response_is_a_chat(client, fake_engine, prompt):
    answer = client.responses.create(
        model=MODEL, input="hi", instructions="be brief", max_output_tokens=4, temperature=0.5, metadata={"a": "b"}
    )
    assert (answer.output_text, answer.status, answer.incomplete_details.reason) == (
        "abcd",
        "incomplete",
        "max_output_tokens",
    )
    assert prompt() == "<system>be brief<user>hi{}<assistant>"
    assert (fake_engine.requests[-1].params.temperature, fake_engine.requests[-1].params.max_tokens) == (0.5, 4)
    assert answer.usage.total_tokens == answer.usage.input_tokens + 4
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *[item.model_dump(exclude_none=True) for item in answer.output],
        {"type": "message", "role": "developer", "content": "more"},
    ]
    again = client.responses.create(model=MODEL, input=history, store=False, extra_body={"seed": 0})
    assert (again.output_text, again.status) == (STORY, "completed")
    assert prompt() == "<user>hi<assistant>abcd<system>more{}<assistant>"


def test_a_streamed_response_grows_into_the_whole_one(client, fake_engine):
    asked = {"model": MODEL, "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    fake_engine.flush_cache()
    whole = client.responses.create(**asked)
    fake_engine.flush_cache()
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == STORY
    logprobs = [token.model_dump() for event in events[4:-4] for token in event.logprobs]
    assert [token.model_dump() for token in whole.output[0].content[0].logprobs] == logprobs
    assert [token["token"] for token in logprobs] == list(STORY)
    assert events[-2].item == events[-1].response.output[0]
    own = {"id", "created_at", "output"}
    assert events[-1].response.model_dump(exclude=own) == whole.model_dump(exclude=own)
    assert events[-1].response.output_text == whole.output_text
    with client.responses.stream(model=MODEL, input="hi") as stream:  # the client's own model of a growing response
        assert stream.get_final_response().output_text == STORY


def test_a_failure_in_a_stream_is_a_failed_response(client):
    *_, last = client.responses.create(model=MODEL, input="explode", stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "secret" not in last.response.error.message
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=MODEL, input="explode")


PARTS = [
    Part(reasoning="so"),
    Part(reasoning=" be it", content="I "),
    Part(content="call", tool_calls=[ToolCallPart(0, "", "c0", "f")]),
    Part(tool_calls=[ToolCallPart(0, '{"a":'), ToolCallPart(0, "1}"), ToolCallPart(1, "{}", "c1", "g")]),
]
LATE = Part(content=" or not")  # behind the calls, as models should not say it


def test_parts_become_blocks_however_they_are_cut():
    whole, cut = Blocks(), Blocks()
    list(whole.push(sum([*PARTS, LATE], Part())))
    events = [event for part in [*PARTS, LATE] for event in cut.push(part)] + list(cut.finish())
    assert whole.blocks == cut.blocks
    assert [(block.kind, block.text) for block in cut.blocks] == [
        ("reasoning", "so be it"),
        ("text", "I call"),
        ("call", '{"a":1}'),
        ("call", "{}"),
        ("text", " or not"),
    ]
    for block in cut.blocks:
        own = [(kind, text) for kind, each, text in events if each is block]
        assert (own[0], own[-1]) == (("start", ""), ("stop", ""))
        assert "".join(text for _, text in own) == block.text


def test_reasoning_and_calls_are_items_of_their_own(fake_engine):
    body = ResponsesBody.model_validate({"input": "x"})
    usage = Usage(1, 0, 2, 0, 0, num_reasoning=1)
    spelled = ResponsesFormat(MODEL, body, TokenTexts(fake_engine.tokenizer))
    reply = spelled.reply([Answer(0, sum(PARTS, Part()), "tool_calls")], usage)
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert reply["output"][2] | {"id": ""} == {
        "id": "",
        "type": "function_call",
        "status": "completed",
        "call_id": "c0",
        "name": "f",
        "arguments": '{"a":1}',
    }
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 1
    for item in reply["output"]:
        item.pop("status")
    back = ResponsesBody.model_validate(
        {"input": [*reply["output"], {"type": "function_call_output", "call_id": "c0", "output": "7"}]}
    )
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate([("f", '{"a":1}'), ("g", "{}")])
    ]
    assert back.chat_fields()["messages"] == [
        {
            "role": "assistant",
            "reasoning_content": "so be it",
            "content": [{"type": "text", "text": "I call"}],
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c0", "content": [{"type": "text", "text": "7"}]},
    ]


def test_tools_and_formats_become_those_of_chat():
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    body = ResponsesBody.model_validate(
        {
            "input": "x",
            "tools": [tool],
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": False,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
        }
    )
    fields = body.chat_fields()
    assert fields["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    ]
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert fields["response_format"] == {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    assert "logprobs" not in fields
    assert (fields["parallel_tool_calls"], fields["reasoning_effort"]) == (False, "low")


def test_a_schema_holds_for_a_response(client, fake_engine):
    class Found(pydantic.BaseModel):
        name: str

    with pytest.raises(pydantic.ValidationError):  # the fake engine writes its story all the same
        client.responses.parse(model=MODEL, input="hi", text_format=Found)
    grammar = fake_engine.requests[-1].params.grammar
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text)["required"] == ["name"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input[0].content"),
        ({"input": "forbidden"}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"surprise": 1}, "surprise"),
        ({"chat_template_kwargs": {"bogus": 1}}, "chat_template_kwargs.bogus"),
    ],
)
def test_what_a_response_cannot_be_is_named(http, fields, param):
    error = assert_refused(http.post("/v1/responses", json={"input": "x"} | fields))
    assert error["param"] == param, error
