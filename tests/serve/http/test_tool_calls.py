"""Tools and reasoning as clients meet them: over OpenAI's own client, with a model that writes what a test sets."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from answer_texts import WRITERS, calls_of
from chats import FAMILIES, load
from fakes import MODEL, USER, assert_refused
from fixed_text import ARGUMENTS, CALL, HERMES, THOUGHT, WEATHER, FixedTextEngine, serving
from pydantic import BaseModel

from specserve.errors import RequestError
from specserve.serve.http.formats.reader import joined
from specserve.serve.http.formats.reasoning import AnswerSyntax
from specserve.serve.http.openai.bodies import ChatBody
from specserve.serve.http.openai.chat import template_messages
from specserve.serve.http.openai.fields import check_body
from specserve.serve.requests.output import OutputStream
from specserve.serve.requests.request import Request, SamplingParams

Json = dict[str, Any]
OTHER = {"type": "function", "function": {"name": "now"}}
ASK: Json = {"model": MODEL, "messages": USER, "tools": [WEATHER, OTHER]}
SAID = f"{THOUGHT}I will look.\n\n{CALL}\n" + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FixedTextEngine, str]]:
    with serving() as both:
        yield both


@pytest.fixture
def engine(served: tuple[FixedTextEngine, str]) -> FixedTextEngine:
    served[0].says = SAID
    return served[0]


@pytest.fixture(scope="module")
def client(served: tuple[FixedTextEngine, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served[1], api_key="none", max_retries=0, timeout=10) as client:
        yield client


@pytest.fixture(scope="module")
def http(served: tuple[FixedTextEngine, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[1], timeout=10) as client:
        yield client


def without_ids(message: Json) -> Json:
    return message | {"tool_calls": [call | {"id": ""} for call in message["tool_calls"]]}


MESSAGE = {
    "role": "assistant",
    "content": "I will look.",
    "refusal": None,
    "reasoning_content": "They want weather.",
    "reasoning": "They want weather.",
    "tool_calls": [
        {
            "id": "",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS).encode().decode("unicode_escape")},
        },
        {"id": "", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ],
}


def test_a_reply_has_content_reasoning_and_calls(engine, client, http):
    reply = client.chat.completions.create(**ASK)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == ARGUMENTS
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)
    body = http.post("/chat/completions", json=ASK).json()["choices"][0]
    assert without_ids(body["message"]) == MESSAGE
    assert "weather" in bytes(engine.requests[-1].prompt_ids).decode()
    raw = client.chat.completions.with_raw_response.create(**ASK)
    assert raw.parse().choices[0].message.content == "I will look."

    engine.says = CALL  # nothing but a call
    message = http.post("/chat/completions", json=ASK).json()["choices"][0]["message"]
    assert message["content"] is None
    assert not {"reasoning", "reasoning_content"} & message.keys()


def test_a_stream_adds_up_to_the_whole_reply(engine, client, http):
    message: Json = {
        "role": "",
        "content": "",
        "refusal": None,
        "reasoning_content": "",
        "reasoning": "",
        "tool_calls": [],
    }
    reasons = []
    for chunk in client.chat.completions.create(**ASK, stream=True):
        delta = chunk.choices[0].delta.to_dict()
        reasons.append(chunk.choices[0].finish_reason)
        for piece in delta.pop("tool_calls", ()):
            if piece["index"] == len(message["tool_calls"]):  # the first piece of a call
                assert piece["id"]
                assert piece["type"] == "function"
                message["tool_calls"].append(
                    {
                        "id": piece["id"],
                        "type": "function",
                        "function": {"name": piece["function"]["name"], "arguments": ""},
                    }
                )
            else:
                assert piece.keys() == {"index", "function"}
            message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        for name, text in delta.items():
            message[name] += text
    assert without_ids(message) == MESSAGE
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert len(reasons) > 20  # it has come bit by bit


def test_the_clients_own_helpers_work(engine, client, served):
    class Weather(BaseModel):
        city: str
        days: int

    tool = openai.pydantic_function_tool(Weather, name="weather")
    parsed = client.chat.completions.parse(model=MODEL, messages=USER, tools=[tool])
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(**ARGUMENTS)
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.tool_calls[0].function.parsed_arguments == Weather(**ARGUMENTS)

    async def ask() -> tuple[Any, list[str | None]]:
        async with openai.AsyncOpenAI(base_url=served[1], api_key="none", max_retries=0, timeout=10) as each:
            reply = await each.chat.completions.create(**ASK)
            stream = await each.chat.completions.create(**ASK, stream=True)
            return reply, [chunk.choices[0].finish_reason async for chunk in stream]

    reply, reasons = asyncio.run(ask())
    assert reply.choices[0].message.tool_calls[1].function.name == "now"
    assert reasons[-1] == "tool_calls"

    answer = client.responses.create(model=MODEL, input="hi", tools=[{"type": "function"} | WEATHER["function"]])
    # the rest calls no tool of this request, so it is text, and stands where it was written
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "message"]
    assert json.loads(answer.output[2].arguments) == ARGUMENTS


def test_a_conversation_goes_on_behind_a_call(engine, client, http):
    message = client.chat.completions.create(**ASK).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls]
    engine.says = "It is fine."
    for own in (message, message.to_dict(), message.model_dump()):
        reply = client.chat.completions.create(**ASK | {"messages": [*USER, own, *results]})
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("It is fine.", "stop")


def test_every_token_has_its_log_probability(engine, client):
    asked = ASK | {"logprobs": True, "extra_body": {"return_tokens_as_token_ids": True}}
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    chunks = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**asked, stream=True)]
    streamed = [token for each in chunks if each for token in each.content]
    assert [t.token for t in whole] == [t.token for t in streamed] == [f"token_id:{i}" for i in SAID.encode()]


def test_who_may_call_follows_the_choice(engine, client):
    def asked(**fields: Any) -> tuple[Any, Any]:
        choice = client.chat.completions.create(**ASK | fields).choices[0]
        return choice, engine.requests[-1]

    choice, request = asked(tool_choice="none")
    assert choice.message.tool_calls is None
    assert choice.message.content.endswith("</tool_call>")
    assert "weather" not in bytes(request.prompt_ids).decode()  # the surest way
    assert request.params.grammar is None
    choice, request = asked(tool_choice="auto", parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert request.params.grammar is None
    _, request = asked(tool_choice="required")
    assert {"weather", "now"} <= set(request.params.grammar.text.replace('\\"', '"').split('"'))
    choice, request = asked(tool_choice={"type": "function", "function": {"name": "now"}})
    assert '"weather' not in request.params.grammar.text
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    engine.says = "no call at all"
    assert asked()[0].message.content == "no call at all"
    assert asked()[0].finish_reason == "stop"


def test_reasoning_is_shown_asked_for_and_left_out(engine, client, http):
    def asked(**fields: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=USER, extra_body=fields).choices[0].message

    engine.says = f"{THOUGHT}Hello."
    assert (asked().reasoning_content, asked().content) == ("They want weather.", "Hello.")
    hidden = asked(include_reasoning=False)
    assert hidden.content == "Hello."
    assert not hasattr(hidden, "reasoning_content")
    assert [m for m in ("reasoning", "reasoning_content") if m in hidden.to_dict()] == []
    for effort, variables in [("none", "{'enable_thinking': False}"), ("high", "{'enable_thinking': True}")]:
        asked(reasoning_effort=effort)
        assert variables in bytes(engine.requests[-1].prompt_ids).decode()
    body = {"messages": USER, "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert assert_refused(http.post("/chat/completions", json=body))["param"] == "reasoning_effort"


def test_reasoning_tokens_are_those_between_the_marks(engine, client):
    """Whole and streamed, shown and left out, of all choices together, and in the Responses API; a token is a byte."""
    own = len(THOUGHT.strip().removeprefix("<think>").removesuffix("</think>"))
    for says, expected in [
        (f"{THOUGHT}Hello.", own),
        ("<think>Où? " + "é" * 30, len(("Où? " + "é" * 30).encode())),  # never ends
        ("Hello <think> no </think>", 0),
        (SAID, own),
    ]:
        engine.says = says
        for fields in ({}, {"include_reasoning": False}, {"n": 2}, {"stop": ["xyz"]}):
            chat: Json = ASK | {"extra_body": fields}
            whole = client.chat.completions.create(**chat).usage
            *_, last = client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
            details = whole.completion_tokens_details
            assert details == last.usage.completion_tokens_details
            assert details.reasoning_tokens == expected * fields.get("n", 1)
        asked: Json = {"model": MODEL, "input": "hi"}
        whole = client.responses.create(**asked)
        *_, last = client.responses.create(**asked, stream=True)
        details = whole.usage.output_tokens_details
        assert details == last.response.usage.output_tokens_details
        assert details.reasoning_tokens == expected


def _function(**fields: Any) -> Json:
    return {"tools": [{"type": "function", "function": {"name": "x"} | fields}]}


def _said(**fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": "x"} | fields]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER] * 2}, "tools[1].function.name"),
        ({"tools": [WEATHER] * 1000}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "custom", "function": {"name": "x"}}]}, "tools[0].type"),
        (_function(name="a b"), "tools[0].function.name"),
        (_function(name="x" * 129), "tools[0].function.name"),
        (_function(parameters=[]), "tools[0].function.parameters"),
        (_function(parameters={"type": "string"}), "tools[0].function.parameters"),
        (_function(parameters={"properties": 1}), "tools[0].function.parameters"),
        (_function(description="y" * 5_000_000), "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "absent"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "weather"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (_said(role="tool", content=None), "messages[0].content"),
        (_said(tool_calls=[{"function": {"name": "f"}}]), "messages[0].tool_calls"),
        (_said(tool_call_id="1"), "messages[0].tool_call_id"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_what_cannot_be_meant_is_refused(engine, http, fields, param):
    assert assert_refused(http.post("/chat/completions", json=ASK | fields))["param"] == param


@pytest.mark.parametrize(("template", "parser"), [("plain", "auto"), ("tools", "auto"), ("plain", "hermes")])
def test_a_model_that_was_taught_no_tools_is_shown_how_to_call_them(template, parser, caplog):
    """By a prompt of the server's own, which also has earlier calls and their results."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
    asked = [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "tool_calls": [call]}]
    asked.append({"role": "tool", "tool_call_id": "1", "content": "rain"})
    with serving(template, tool_parser=parser) as (engine, url), httpx.Client(base_url=url, timeout=10) as http:
        assert "prompt of the server's own" in caplog.text or not caplog.records
        engine.says = f"I will look.\n{CALL}"
        choice = http.post("/chat/completions", json=ASK | {"messages": asked}).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
        prompt = bytes(engine.requests[-1].prompt_ids).decode()
        assert prompt.startswith("<system>Be brief.\n\nYou can call these tools.")
        assert prompt.count('"name": "weather"') == 2
        assert CALL in prompt
        assert "<tool>rain" in prompt
        grammar = engine.requests[-1].params.grammar
        assert (grammar is not None) == (parser == "auto")
        assert (
            http.post("/tokenize".replace("/", "../"), json={"messages": asked, "tools": [WEATHER]}).status_code == 200
        )
        plain = http.post("/chat/completions", json=ASK | {"tools": [], "reasoning_effort": "medium"})
        assert plain.status_code == 200
        assert engine.requests[-1].params.grammar is None
        refused = http.post("/chat/completions", json=ASK | {"tools": [], "reasoning_effort": "high"})
        assert assert_refused(refused)["param"] == "reasoning_effort"


def test_a_server_may_have_no_tools():
    with serving("tools", tool_parser="none") as (_, url):
        error = assert_refused(httpx.post(f"{url}/chat/completions", json=ASK))
        assert (error["param"], "--tool-parser none" in error["message"]) == ("tools", True)
    with serving(HERMES, tool_parser="none", reasoning_parser="none") as (engine, url):
        engine.says = SAID
        reply = httpx.post(f"{url}/chat/completions", json={"messages": USER}).json()
        assert reply["choices"][0]["message"]["content"] == SAID


# --- with the templates and special tokens of the families -------------------------------------------------------

CHOSEN = {
    "deepseek-r1": ("deepseek", "think"),
    "deepseek-v3.1": ("deepseek", "think"),
    "gemma-3": ("generic", "none"),
    "glm-4": ("generic", "none"),
    "glm-4.5": ("glm", "think"),
    "gpt-oss": ("harmony", "harmony"),
    "llama-3": ("llama3", "none"),
    "mistral": ("mistral", "none"),
    "mistral-nemo": ("mistral", "none"),
    "qwen2.5": ("hermes", "none"),
    "qwen3": ("hermes", "think"),
    "qwen3-coder": ("qwen3-coder", "none"),
    "tagged": ("generic", "none"),
}


def test_formats_are_chosen_by_the_template():
    assert CHOSEN.keys() == FAMILIES.keys()
    for name, (tools, reasoning) in CHOSEN.items():
        syntax = AnswerSyntax(load(name), "auto", "auto")
        assert (syntax.tool_format.name, syntax.reasoning) == (tools, reasoning), name
    named = AnswerSyntax(load("glm-4"), "glm", "mistral")
    assert (named.tool_format.name, named.reasoning) == ("glm", "mistral")


def _answered(name: str, text: str, stop: str = "never") -> tuple[Any, int]:
    """What a server of that family reports of an answer of this text, token by token, and the tokens of reasoning."""
    tokenizer = load(name)
    syntax = AnswerSyntax(tokenizer, "auto", "auto")
    body = check_body(ChatBody, {"messages": USER, "tools": [WEATHER]})
    question = syntax.question(body)
    prompt = tokenizer.render_chat(question.messages, tools=question.tools)
    params, make_parser = syntax.reading(body, question, prompt, SamplingParams(stop=(stop,)))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    request = Request(
        "0", tuple(prompt), params, len(token_ids), 0, on_delta=lambda _: None, stop_ids=tokenizer.end_ids
    )
    stream, parser = OutputStream(request, tokenizer), make_parser()
    deltas = [stream.push([token_id]) for token_id in token_ids]
    part = joined([*(parser.push(delta.text, delta.num_chars) for delta in deltas), parser.finish()])
    whole = make_parser()
    whole.push("".join(delta.text for delta in deltas), [num for delta in deltas for num in delta.num_chars])
    whole.finish()
    assert whole.num_reasoning_tokens == parser.num_reasoning_tokens
    return part, parser.num_reasoning_tokens


@pytest.mark.parametrize("name", CHOSEN)
def test_what_a_template_writes_is_read_back(name):
    """Special tokens come to the parser, and never to the client."""
    tokenizer = load(name)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
    asked = check_body(ChatBody, {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]})
    turns, _ = AnswerSyntax(tokenizer, "auto", "auto").written(asked.messages, [])
    prompt = tokenizer.template.render(turns[:1])
    text = tokenizer.template.render(turns, add_generation_prompt=False)
    thought = "hm"
    if name == "deepseek-r1":  # its prompt opens the reasoning, which its template leaves out of what was said
        prompt, text = prompt.removesuffix("<think>\n"), text.replace("<｜Assistant｜>", "<｜Assistant｜>hm</think>")
    elif name == "gpt-oss":
        text = text.replace(
            "<|start|>assistant", "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        )
    else:
        thought = ""
    assert text.startswith(prompt)
    part, num_reasoning_tokens = _answered(name, text.removeprefix(prompt))
    assert calls_of(part) == [("weather", ARGUMENTS)]
    assert (part.content, part.reasoning) == ("", thought)
    between = "\n\n" if name == "qwen3" else thought  # it writes the marks of reasoning also around none
    assert num_reasoning_tokens == len(tokenizer.encode(between, add_special_tokens=False))


def test_a_tools_message_has_its_tools_name():
    """Harmony's template needs it, and clients send the id of the call alone."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}}
    result = {"role": "tool", "tool_call_id": "1", "content": "noon"}
    body = check_body(ChatBody, {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}, result]})
    text = load("gpt-oss").template.render(template_messages(body.messages))
    assert "to=functions.now<|channel|>commentary json<|message|>{}<|call|>" in text
    assert "<|start|>functions.now to=assistant" in text


def test_special_tokens_are_never_shown():
    broken = (
        "<|channel|>commentary to=functions.absent<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>x"
    )
    part, _ = _answered("gpt-oss", broken)
    assert part.tool_calls == ()
    assert "<|" not in part.content
    part, _ = _answered("deepseek-r1", "hm</think>x<｜tool▁call▁begin｜>y<｜tool▁calls▁end｜><｜User｜>z")
    assert (part.content, part.reasoning) == ("xyz", "hm")
    assert set(WRITERS) >= {"harmony", "deepseek"}


def test_a_template_without_an_effort_refuses_it():
    syntax = AnswerSyntax(load("gpt-oss"), "auto", "auto")
    with pytest.raises(RequestError, match="reasoning_effort"):
        syntax.question(check_body(ChatBody, {"messages": USER, "reasoning_effort": "high"}))
