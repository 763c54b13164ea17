"""Tools and reasoning over the Responses and the Messages API: what comes goes back as history, streamed or not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fakes import MODEL, USER
from fixed_text import ARGUMENTS, CALL, THOUGHT, WEATHER, FixedTextEngine, serving

Json = dict[str, Any]
SAID = f"{THOUGHT}I will look.\n\n{CALL}"
NAME = WEATHER["function"]["name"]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FixedTextEngine, str]]:
    with serving() as both:
        yield both


@pytest.fixture
def engine(served: tuple[FixedTextEngine, str]) -> FixedTextEngine:
    served[0].says = SAID
    return served[0]


def _prompt(engine: FixedTextEngine) -> str:
    return bytes(engine.requests[-1].prompt_ids).decode()


def test_a_response_calls_and_goes_on(engine: FixedTextEngine, served: tuple[FixedTextEngine, str]) -> None:
    asked: Json = {"model": MODEL, "tools": [{"type": "function"} | WEATHER["function"]]}
    with openai.OpenAI(base_url=f"{served[1]}", api_key="none", max_retries=0, timeout=10) as client:
        answer = client.responses.create(**asked, input="hi")
        *_, last = client.responses.create(**asked, input="hi", stream=True)
        assert last.type == "response.completed"
        kinds = [(item.type, item.status) for item in answer.output]
        assert kinds == [(kind, "completed") for kind in ("reasoning", "message", "function_call")]
        texts = [item.to_dict() | {"id": "", "call_id": ""} for item in answer.output]
        assert [item.to_dict() | {"id": "", "call_id": ""} for item in last.response.output] == texts
        call = answer.output[-1]
        assert (call.name, json.loads(call.arguments)) == (NAME, ARGUMENTS)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
        engine.says = "It is fine."
        again = client.responses.create(**asked, input=[*USER, *[item.to_dict() for item in answer.output], result])
        assert again.output_text == "It is fine."
        of_responses = _prompt(engine)
        engine.says = SAID
        chat: Json = {"model": MODEL, "tools": [WEATHER]}
        message = client.chat.completions.create(**chat, messages=USER).choices[0].message
        results = [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "fine"}]
        client.chat.completions.create(**chat, messages=[*USER, message.to_dict(), *results])
    ids = message.tool_calls[0].id, call.call_id
    assert of_responses.replace(ids[1], "ID") == _prompt(engine).replace(ids[0], "ID")  # one conversation, two words


def test_a_message_calls_and_goes_on(engine: FixedTextEngine, served: tuple[FixedTextEngine, str]) -> None:
    function = WEATHER["function"]
    tool = {"name": NAME, "description": function["description"], "input_schema": function["parameters"]}
    asked: Json = {"model": MODEL, "max_tokens": 500, "tools": [tool], "messages": USER}
    with httpx.Client(base_url=served[1].removesuffix("/v1"), timeout=10) as http:
        answer = http.post("/v1/messages", json=asked).json()
        thinking, text, call = answer["content"]
        assert (thinking["type"], text["text"].strip(), answer["stop_reason"]) == (
            "thinking",
            "I will look.",
            "tool_use",
        )
        assert (call["name"], call["input"]) == (NAME, ARGUMENTS)
        lines = http.post("/v1/messages", json=asked | {"stream": True}).text.split("\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        parts = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", {})]
        assert json.loads("".join(parts)) == ARGUMENTS
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "fine"}
        turns = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        engine.says = "It is fine."
        again = http.post("/v1/messages", json=asked | {"messages": [*USER, *turns]})
        assert again.json()["content"] == [{"type": "text", "text": "It is fine."}]
