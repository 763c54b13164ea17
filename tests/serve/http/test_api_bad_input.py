"""Everything a client can send that is wrong: an error that names it, and a server that serves on.

Types and bounds are read off the schema, so a new field is tested as it is written."""

import gzip
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from fakes import CONTEXT, USER, assert_refused, assert_serves
from ranges import OUTSIDE

from specserve.serve.http.openai.bodies import ChatBody, CompletionBody
from specserve.serve.http.openai.fields import Body
from specserve.serve.http.openai.tokenizer import DetokenizeBody, TokenizeBody
from specserve.serve.http.transport import guard

Json = dict[str, Any]


def _completion(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": "x"} | fields


def _chat(**fields: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": USER} | fields


def _user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


Case = tuple[str, Json, str]  # path, body, and the field that the error must name

BODIES: dict[str, tuple[type[Body], Json]] = {  # with the least that is sound
    "/v1/completions": (CompletionBody, {"prompt": "x"}),
    "/v1/chat/completions": (ChatBody, {"messages": USER}),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
}
ONE_OF_EACH_TYPE = {
    "null": None,
    "boolean": True,
    "integer": 1,
    "number": 1.5,
    "string": "x",
    "array": [],
    "object": {},
}
HUGE = 10**400


def _assert_each_is_refused(http: httpx.Client, cases: Iterable[Case]) -> None:
    for path, body, param in cases:
        error = assert_refused(http.post(path, json=body))
        case = f"{path} {str(body)[:200]}: {error}"
        assert error["param"] == param, case
        assert param.split("[")[0].split(".")[-1] in error["message"] or param == "messages", case
    assert_serves(http)


@dataclass(frozen=True)
class Place:
    """A place of a body where a value stands, as the schema of the body says."""

    param: str  # as errors name it
    options: list[Json]  # JSON schemas, one of which the value must meet, each with a "sound" value or item
    put: Callable[[Any], Json]  # the body with a value there
    is_member: bool = False  # of an object: null means "not given"


def _places(path: str) -> Iterator[Place]:
    """Every field of a body, the fields of objects in it, and the items of lists."""
    body_type, sound = BODIES[path]
    schema = body_type.model_json_schema()

    def resolved(item: Json) -> Json:
        return schema["$defs"][item["$ref"].rpartition("/")[2]] if "$ref" in item else item

    def sound_value(item: Json) -> Any:
        item = resolved(item)
        if item.get("type") == "object":
            return {name: sound_value(item["properties"][name]) for name in item.get("required", ())}
        if item.get("type") == "array" or "anyOf" in item:
            return [sound_value(item["items"])] if "items" in item else sound_value(item["anyOf"][0])
        return item.get("enum", [item.get("const", "x" if item.get("type") == "string" else 1)])[0]

    def below(param: str, item: Json, put: Callable[[Any], Json], *, is_member: bool = False) -> Iterator[Place]:
        options = [resolved(option) for option in item.get("anyOf", [item])]
        for option in options:
            option["sound"] = sound_value(option["items"] if "maxItems" in option else option)
        yield Place(param, options, put, is_member)
        arrays = [option for option in options if option.get("type") == "array"]
        if len(arrays) == 1:  # where there are several, an error names the whole
            yield from below(f"{param}[0]", arrays[0]["items"], lambda value: put([value]))
        for option in options:
            for name, inner in option.get("properties", {}).items():
                yield from below(
                    f"{param}.{name}",
                    inner,
                    lambda value, name=name, whole=option["sound"]: put(whole | {name: value}),
                    is_member=True,
                )
            if isinstance(option.get("additionalProperties"), dict):
                yield from below(f"{param}.5", option["additionalProperties"], lambda value: put({"5": value}))

    for name in body_type.model_fields:
        inner = schema["properties"][name]
        yield from below(name, inner, lambda value, name=name: sound | {name: value}, is_member=True)


@pytest.mark.parametrize("path", BODIES)
def test_a_value_of_a_wrong_type_is_refused_wherever_it_stands(http: httpx.Client, path: str) -> None:
    cases: list[Case] = []
    for place in _places(path):
        right = {option.get("type", "any") for option in place.options}
        right |= {"integer"} if "number" in right else set()
        right |= {"null"} if place.is_member else set()
        if "any" not in right:
            wrong = [value for name, value in ONE_OF_EACH_TYPE.items() if name not in right]
            cases += [(path, place.put(value), place.param) for value in wrong]
    assert {param for _, _, param in cases} >= set(BODIES[path][0].model_fields)
    _assert_each_is_refused(http, cases)


def _outside(option: Json) -> Iterator[Any]:
    """Values of the right type that the schema excludes."""
    if "const" in option or "enum" in option:
        yield "none of these" if option["type"] == "string" else not option["const"]
    if option.get("type") in ("integer", "number"):
        yield from (HUGE, -HUGE)
    if "minimum" in option:
        yield option["minimum"] - 1
    if "maximum" in option:
        yield option["maximum"] + 1
    if option.get("minLength"):
        yield ""
    if "maxLength" in option:
        yield "x" * (option["maxLength"] + 1)
    if option.get("minItems"):
        yield []
    if "maxItems" in option:
        yield [option["sound"]] * (option["maxItems"] + 1)


@pytest.mark.parametrize("path", BODIES)
def test_a_value_outside_the_schemas_bounds_is_refused_wherever_it_stands(http: httpx.Client, path: str) -> None:
    places = [(place, option) for place in _places(path) for option in place.options]
    _assert_each_is_refused(
        http, [(path, place.put(value), place.param) for place, option in places for value in _outside(option)]
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_number_outside_its_range_is_refused(http: httpx.Client, path: str) -> None:
    """The ranges of `SamplingParams`, under the endpoint's names."""
    is_chat, cases = "chat" in path, []
    names = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"} if is_chat else {}
    for name, values in OUTSIDE.items():
        param = names.get(name, name)
        for value in values:
            body = BODIES[path][1] | {param: value} | ({"logprobs": True} if param == "top_logprobs" else {})
            cases.append((path, body, param))
    _assert_each_is_refused(http, cases)


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_supported_is_refused_but_where_it_changes_nothing(http: httpx.Client, path: str) -> None:
    body_type, sound = BODIES[path]
    cases: list[Case] = []
    for name, accepted in body_type.UNSUPPORTED.items():
        twins = [int(item) if isinstance(item, bool) else True for item in accepted if item in (0, 1)]
        cases += [(path, sound | {name: value}, name) for value in ("x", *twins, *([] if accepted else [0, False]))]
        for value in (None, *accepted):
            assert http.post(path, json=sound | {name: value}).status_code == 200
    cases.append((path, sound | {"surprise": None}, "surprise"))
    for place in _places(path):
        for option in place.options:
            if "properties" in option:
                cases.append((path, place.put(option["sound"] | {"surprise": 1}), f"{place.param}.surprise"))
    _assert_each_is_refused(http, cases)


BAD_FIELDS: list[Case] = [
    # fields that must fit each other
    *[(*_completion(best_of=n), "best_of") for n in (0, 2)],
    *[(*_chat(top_logprobs=3, **off), "top_logprobs") for off in ({}, {"logprobs": False}, {"logprobs": None})],
    (*_completion(prompt_logprobs=0, stream=True), "prompt_logprobs"),
    (*_completion(min_tokens=17), "min_tokens"),
    (*_completion(prompt=["x"] * 65, n=2), "prompt"),
    (*_chat(max_tokens=1, max_completion_tokens=2), "max_completion_tokens"),
    (*_completion(stream_options={"include_usage": True}), "stream_options"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
    # lengths
    *[(*_completion(prompt="x" * num_chars), "prompt") for num_chars in (CONTEXT, 5_000_000)],
    (*_completion(max_tokens=CONTEXT), "max_tokens"),
    (*_chat(max_completion_tokens=CONTEXT), "max_completion_tokens"),
    (*_chat(messages=_user("x" * CONTEXT)), "messages"),
    *[(*_completion(stop=stop), "stop") for stop in ("", ["a", ""], ["x"] * 10_000, "y" * 2**20)],
    *[(*_completion(bad_words=words), "bad_words") for words in ([""], ["x"] * 65, ["y" * 2**20])],
    (*_completion(logit_bias={str(i): 1 for i in range(5000)}), "logit_bias"),
    (*_chat(allowed_token_ids=[]), "allowed_token_ids"),
    *[(*_chat(cache_salt=salt), "cache_salt") for salt in ("", "x" * 1025)],
    (*_chat(messages=USER * 10_001), "messages"),
    # prompts and messages
    *[(*_completion(prompt=p), "prompt") for p in ("", [], [[]], ["a", 1], [1, "a"], [[1], "a"], [["a"]], None)],
    *[(*_completion(prompt=p), "prompt") for p in ([-1], [256], [1.0], [True], [[1], [2**70]], [[1], []])],
    ("/v1/completions", {}, "prompt"),
    ("/v1/chat/completions", {}, "messages"),
    (*_chat(messages=None), "messages"),
    (*_chat(messages=_user([])), "messages[0].content"),
    (*_chat(messages=[{"role": "user"}]), "messages[0].content"),
    (*_chat(messages=[*USER, {"role": "assistant", "tool_calls": [{}]}]), "messages[1].tool_calls[0].function"),
    (*_chat(messages=_user("forbidden")), "messages"),
    (*_chat(prompt="x"), "prompt"),
    # token ids
    *[
        (*_completion(**{name: [i]}), param)
        for name in ("stop_token_ids", "allowed_token_ids")
        for i, param in ((-1, f"{name}[0]"), (256, name))
    ],
    *[
        (*_completion(logit_bias={key: 1}), "logit_bias")
        for key in ("", "a", "-1", "+5", "1.0", "1e2", " 5", "05", "٥", "²", "256", "99999999999", "9" * 5000)
    ],
    *[(*_completion(logit_bias={"5": bias}), "logit_bias.5") for bias in (100.5, -101)],
    ("/detokenize", {"tokens": [1, -1]}, "tokens"),
    *[(*_chat(speculation=s), "speculation") for s in (-1, 2**31, "chain:3", "", "OFF")],
    # numbers that are nearly of the right type
    *[(*_completion(seed=seed), "seed") for seed in (1e18, 1.0)],
    (*_chat(structured_outputs={"disable_any_whitespace": 0}), "structured_outputs.disable_any_whitespace"),
    (*_chat(stream=True, stream_options={"include_obfuscation": 0}), "stream_options.include_obfuscation"),
    *[("/v1/responses", {"input": "x", name: value}, name) for name, value in (("store", 0), ("n", True))],
    # many mistakes at once: only the first is reported, and soon
    (*_chat(messages=[{"role": 1}] * 5000), "messages[0].role"),
    (*_chat(chat_template_kwargs=dict.fromkeys(map(str, range(100_000)))), "chat_template_kwargs.0"),
    (*_chat(metadata=dict.fromkeys(map(str, range(100_000)), 1)), "metadata"),
    (*_completion(**dict.fromkeys(map("f{}".format, range(100_000)))), "f0"),
    (*_chat(tools=[{"type": "function"}] * 1000), "tools"),
]


def test_what_no_single_type_or_bound_can_tell_is_refused(http: httpx.Client) -> None:
    _assert_each_is_refused(http, BAD_FIELDS)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (_completion(n=0), "n should be greater than or equal to 1, got 0"),
        (_completion(logprobs=21), "logprobs should be less than or equal to 20, got 21"),
        (_chat(logprobs=True, top_logprobs=21), "top_logprobs should be less than or equal to 20, got 21"),
        (_chat(max_tokens=0), "max_tokens should be greater than or equal to 1, got 0"),
        (_chat(max_completion_tokens=0), "max_completion_tokens should be greater than or equal to 1, got 0"),
        (_chat(max_completion_tokens=CONTEXT), f"max_completion_tokens must be at most {CONTEXT - 21}"),
        (_completion(min_tokens=17), "min_tokens should be at most max_tokens, 16, got 17"),
        (_completion(logit_bias={"5": 101}), "logit_bias.5 should be less than or equal to 100, got 101"),
        (_completion(logit_bias={"a": 1}), 'logit_bias must map token ids in decimal to numbers, got the key "a"'),
    ],
)
def test_an_error_tells_the_range_under_the_name_that_was_sent(http, request_, message):
    path, body = request_
    assert assert_refused(http.post(path, json=body))["message"] == message


def test_the_longest_of_everything_is_fine(http):
    body = {
        "prompt": "x",
        "logit_bias": {str(i): -100 for i in range(256)},
        "stop_token_ids": [1] * 1024,
        "allowed_token_ids": [1] * 1024,
        "bad_words": ["w" * 1024] * 64,
        "stop": ["s" * 1024] * 64,
        "cache_salt": "é" * 1024,
        "priority": -(2**63),
        "seed": -(2**63),
        "n": 128,
    }
    reply = http.post("/v1/completions", json=body)
    assert (reply.status_code, len(reply.json()["choices"])) == (200, 128)


BAD_BODIES = {
    "empty": b"",
    "not json": b"prompt=x",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "a string": b'"prompt"',
    "truncated": b'{"prompt": "x"',
    "trailing": b'{"prompt": "x"} {}',
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": Infinity}',
    "nan in an object": b'{"prompt": "x", "logit_bias": {"5": NaN}}',
    "infinite penalty": b'{"prompt": "x", "presence_penalty": -Infinity}',
    "bias that overflows": b'{"prompt": "x", "logit_bias": {"5": 1e999}}',
    "two biases of one token": b'{"prompt": "x", "logit_bias": {"5": 1, "5": 2}}',
    "surrogate in a salt": b'{"prompt": "x", "cache_salt": "\\ud800"}',
    "overflow": b'{"prompt": "x", "temperature": 1e999}',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "surrogate in a name": b'{"\\udc00": 1, "prompt": "x"}',
    "encoded surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "invalid utf-8": b'{"prompt": "\xff\xfe"}',
    "utf-16": '{"prompt": "x"}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"prompt": "x"}',
    "raw nul": b'{"prompt": "\x00"}',
    "duplicate keys": b'{"prompt": "x", "prompt": "y"}',
    "nested duplicate keys": b'{"prompt": "x", "stream": true, "stream_options": {"a": 1, "a": 2}}',
    "huge number": b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_is_a_400_and_the_server_still_serves(http, name):
    headers = {"content-type": "application/json"}
    assert_refused(http.post("/v1/completions", content=BAD_BODIES[name], headers=headers))
    assert_refused(http.post("/v1/chat/completions", content=BAD_BODIES[name], headers=headers))
    assert_serves(http)


def test_nul_and_odd_text_in_a_prompt_are_text(http, fake_engine):
    reply = http.post("/v1/completions", json={"prompt": "a\x00b\u202e\U0001f600"})
    assert reply.status_code == 200
    assert bytes(fake_engine.requests[-1].prompt_ids).decode() == "a\x00b\u202e\U0001f600"


def test_body_over_the_limit_is_413(http, monkeypatch):
    monkeypatch.setattr(guard, "MAX_BODY_BYTES", 1000)
    assert_refused(http.post("/v1/completions", json={"prompt": "x" * 3000}), 413)
    chunks = iter([b'{"prompt": "', *[b"x" * 100] * 30, b'"}'])  # no content length
    reply = http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    assert_refused(reply, 413)
    assert_serves(http)


def test_body_that_never_ends_is_408(server, http, monkeypatch):
    monkeypatch.setattr(guard, "BODY_TIMEOUT_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: 100\r\n\r\n{")
        assert raw.recv(100).startswith(b"HTTP/1.1 408")
    assert_serves(http)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_wrong_content_type_is_415(http, content_type):
    reply = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": content_type})
    assert_refused(reply, 415)


def test_compressed_body_is_415(http):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert_refused(http.post("/v1/completions", content=gzip.compress(b"x" * 10**6), headers=headers), 415)


@pytest.mark.parametrize("path", ["/page", "/v1", "//v1/completions", "/v1/../health/x", "/docs", "/v1/embeddings"])
def test_unknown_path_is_404(http, path):
    assert_refused(http.get(path), 404)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_wrong_method_is_405(http, method):
    reply = http.request(method, "/v1/completions")
    assert reply.headers["allow"] == "POST"
    assert_refused(reply, 405)
    if method not in ("GET", "POST"):
        assert http.request(method, "/v1/speculation").headers["allow"] == "GET, HEAD, POST"  # of two routes


def test_unknown_model_is_404_and_named(client):
    with pytest.raises(openai.NotFoundError) as info:
        client.chat.completions.create(model="gpt-9", messages=USER)
    assert (info.value.code, info.value.param) == ("model_not_found", "model")


def test_model_without_a_template_refuses_chat(http, fake_engine, monkeypatch):
    monkeypatch.setattr(fake_engine.tokenizer, "has_chat_template", False, raising=False)
    error = assert_refused(http.post("/v1/chat/completions", json={"messages": USER}))
    assert error["param"] == "messages"


def test_a_bug_is_a_500_that_tells_nothing_and_keeps_the_connection(http, fake_engine, monkeypatch, caplog):
    def fail(text, *, add_special_tokens):
        raise KeyError("secret")

    monkeypatch.setattr(fake_engine.tokenizer, "encode", fail)
    reply = http.post("/v1/completions", json={"prompt": "x"})
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"
    assert "secret" not in reply.text
    assert "secret" in caplog.text  # the log has the details
    monkeypatch.undo()
    assert_serves(http)
