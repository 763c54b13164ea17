"""Everything a client can send that is wrong: an error that names it, and a server that serves on."""

import gzip
import re
import socket
from typing import Any

import openai
import pytest
from fakes import CONTEXT, USER, assert_refused, assert_serves

from specserve.serve import http_guard


def _completion(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": "x"} | fields


def _chat(**fields: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": USER} | fields


def _user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


# (path and body, the field that the error must name)
BAD_FIELDS = [
    *[(_completion(n=n), "n") for n in (0, -1, 10**9, 10**400, True, "2", 1.5, 1e18)],
    *[(_completion(best_of=n), "best_of") for n in (0, -1, 2, 2**70)],
    *[(_completion(logprobs=n), "logprobs") for n in (21, -1, 10**9, 10**400, True, "5", 1.5)],
    *[(_chat(logprobs=True, top_logprobs=n), "top_logprobs") for n in (21, -1, 10**9, 10**400, True, "5", 1.5)],
    *[(_chat(top_logprobs=3, **off), "top_logprobs") for off in ({}, {"logprobs": False}, {"logprobs": None})],
    *[(_chat(logprobs=value), "logprobs") for value in (0, 5, "true", [])],
    (_completion(logprobs=0, echo=True), "logprobs"),
    (_completion(return_tokens_as_token_ids=1), "return_tokens_as_token_ids"),
    (_completion(prompt=["x"] * 65, n=2), "prompt"),
    # lengths
    (_completion(prompt="x" * CONTEXT), "prompt"),
    (_completion(prompt="x" * 5_000_000), "prompt"),
    (_completion(max_tokens=CONTEXT), "max_tokens"),
    *[(_completion(max_tokens=n), "max_tokens") for n in (0, -1, 10**18, 1e18, 10**400, "5", True)],
    (_chat(max_completion_tokens=0), "max_completion_tokens"),
    (_chat(max_completion_tokens=CONTEXT), "max_completion_tokens"),
    (_chat(max_tokens=1, max_completion_tokens=2), "max_completion_tokens"),
    (_chat(messages=_user("x" * CONTEXT)), "messages"),
    # prompts and messages
    *[(_completion(prompt=p), "prompt") for p in ("", [], [[]], ["a", 1], [1, "a"], [[1], "a"], [["a"]], 3, {}, None)],
    *[(_completion(prompt=p), "prompt") for p in ([-1], [256], [1.0], [True], [[1], [2**70]], [[1], []])],
    (("/v1/completions", {}), "prompt"),
    (("/v1/chat/completions", {}), "messages"),
    *[(_chat(messages=m), "messages") for m in ([], None, "hi", {})],
    (_chat(messages=["hi"]), "messages[0]"),
    *[(_chat(messages=_user(content)), "messages[0].content") for content in (None, [], 3, {})],
    (_chat(messages=[{"role": "user"}]), "messages[0].content"),
    (_chat(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role"),
    (_chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].role"),
    (_chat(messages=_user([{"type": "image_url", "image_url": {"url": "x"}}])), "messages[0].content[0].type"),
    (_chat(messages=_user([{"type": "text", "text": None}])), "messages[0].content[0].text"),
    (_chat(messages=[*USER, {"role": "assistant", "content": "", "tool_calls": [{}]}]), "messages[1].tool_calls"),
    (_chat(messages=_user("forbidden")), "messages"),
    # sampling
    *[(_completion(temperature=t), "temperature") for t in (-1, 1e308, 10**400, "0.5", True, [])],
    *[(_completion(top_p=p), "top_p") for p in (0, -1, 1.5, "1", True)],
    *[(_completion(min_p=p), "min_p") for p in (-0.1, 2, "0", True)],
    *[(_completion(top_k=k), "top_k") for k in (-2, 2**63, 1.5, True, "5")],
    *[(_completion(seed=s), "seed") for s in (2**63, -(2**63) - 1, 10**400, 1.5, True, "1")],
    *[(_completion(stop=s), "stop") for s in ("", ["a", ""], ["x"] * 10_000, "y" * 2**20, 3)],
    (_completion(stop=["a", 1]), "stop[1]"),
    *[(_completion(stop_token_ids=ids), "stop_token_ids") for ids in ([-1], [256], list(range(5000)), 3)],
    (_completion(stop_token_ids=[True]), "stop_token_ids[0]"),
    (_completion(ignore_eos=1), "ignore_eos"),
    *[
        (_completion(**{name: value}), name)
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.1, 2.1, 1e308, -(10**400), "0.5", True, [])
    ],
    *[(_chat(repetition_penalty=p), "repetition_penalty") for p in (0, -1, 100.5, 1e308, 10**400, "1", True, {})],
    *[(_completion(min_tokens=n), "min_tokens") for n in (-1, 17, 10**18, 10**400, "5", True, 1.5)],
    *[(_completion(logit_bias=bias), "logit_bias") for bias in ([], "5", 5, True, {str(i): 1 for i in range(5000)})],
    *[
        (_completion(logit_bias={key: 1}), "logit_bias")
        for key in ("", "a", "-1", "+5", "1.0", "1e2", " 5", "05", "٥", "²", "256", "99999999999", "9" * 5000)
    ],
    *[(_completion(logit_bias={"5": bias}), "logit_bias") for bias in (100.5, -101, 1e308)],
    *[(_completion(logit_bias={"5": bias}), "logit_bias.5") for bias in ("1", True, None, [], 10**400)],
    *[(_completion(bad_words=words), "bad_words") for words in ("x", [""], ["x"] * 65, ["y" * 2**20], {}, 3)],
    (_completion(bad_words=["a", 1]), "bad_words[1]"),
    *[(_chat(allowed_token_ids=ids), "allowed_token_ids") for ids in ([], [-1], [256], [1] * 5000, 3, {})],
    *[(_chat(allowed_token_ids=[item]), "allowed_token_ids[0]") for item in (True, 1.0, "1", 10**400)],
    *[(_chat(speculation=s), "speculation") for s in (-1, 2**31, 10**400, 1.5, True, "chain:3", "", "OFF", [], {})],
    *[(_chat(priority=p), "priority") for p in (2**63, -(2**63) - 1, 10**400, 1.5, True, "1")],
    *[(_chat(cache_salt=salt), "cache_salt") for salt in ("", "x" * 1025, 3, True, ["x"])],
    (_completion(stream="yes"), "stream"),
    (_completion(stream_options={"include_usage": True}), "stream_options"),
    (_completion(stream=True, stream_options={"surprise": 1}), "stream_options.surprise"),
    # many mistakes at once: only the first is told, and soon
    (_chat(messages=[{"role": 1}] * 5000), "messages[0].role"),
    (_chat(messages=USER * 10_001), "messages"),
    (_chat(chat_template_kwargs=dict.fromkeys(map(str, range(100_000)))), "chat_template_kwargs"),
    (_chat(metadata=dict.fromkeys(map(str, range(100_000)), 1)), "metadata"),
    # not supported yet
    *[(_completion(**{f: "x"}), f) for f in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")],
    *[(_completion(prompt_logprobs=n), "prompt_logprobs") for n in (0, 5)],
    (_completion(skip_special_tokens=False), "skip_special_tokens"),
    (_completion(structured_outputs={"regex": "a"}), "structured_outputs"),
    (_completion(use_beam_search=True), "use_beam_search"),
    (_completion(length_penalty=True), "length_penalty"),
    (_chat(response_format={"type": "json_object"}), "response_format"),
    (_chat(tools=[{"type": "function"}] * 1000), "tools"),
    *[(_chat(tool_choice=c), "tool_choice") for c in ("required", {"type": "function"}, 7)],
    (_chat(functions=[{}]), "functions"),
    (_chat(audio={"voice": "x"}), "audio"),
    (_chat(modalities=["audio"]), "modalities"),
    (_chat(chat_template="{{ 1 }}"), "chat_template"),
    (_chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages"),
    (_chat(chat_template_kwargs={"tokenize": False}), "chat_template_kwargs.tokenize"),
    (_chat(chat_template_kwargs={"enable_thinking": 1}), "chat_template_kwargs.enable_thinking"),
    (_completion(suffix="end"), "suffix"),
    (_completion(metadata={"a": 1}), "metadata.a"),
    # unknown
    (_completion(temprature=0.5), "temprature"),
    (_completion(temprature=None), "temprature"),
    (_completion(**dict.fromkeys(map("f{}".format, range(100_000)))), "f0"),
    (_chat(prompt="x"), "prompt"),
    (("/tokenize", {}), "prompt"),
    (("/tokenize", {"prompt": "x", "messages": USER}), "prompt"),
    (("/detokenize", {"tokens": [1, -1]}), "tokens"),
    (("/detokenize", {"tokens": [1.5]}), "tokens[0]"),
]


@pytest.mark.parametrize(
    ("request_", "param"), BAD_FIELDS, ids=lambda value: re.sub(r"\W+", "_", str(value))[:60].strip("_")
)
def test_a_bad_field_is_a_400_that_names_it_and_the_server_still_serves(http, request_, param):
    path, body = request_
    error = assert_refused(http.post(path, json=body))
    assert error["param"] == param
    assert param.split("[")[0].split(".")[-1] in error["message"] or param == "messages"
    assert_serves(http)


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
        (_completion(logit_bias={"5": 101}), "logit_bias should be less than or equal to 100, got 101.0"),
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
    monkeypatch.setattr(http_guard, "MAX_BODY_BYTES", 1000)
    assert_refused(http.post("/v1/completions", json={"prompt": "x" * 3000}), 413)
    chunks = iter([b'{"prompt": "', *[b"x" * 100] * 30, b'"}'])  # no content length
    reply = http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    assert_refused(reply, 413)
    assert_serves(http)


def test_body_that_never_ends_is_408(server, http, monkeypatch):
    monkeypatch.setattr(http_guard, "BODY_TIMEOUT_SECONDS", 0.1)
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


@pytest.mark.parametrize(
    "path", ["/", "/v1", "//v1/completions", "/v1/../health/x", "/docs", "/openapi.json", "/v1/embeddings"]
)
def test_unknown_path_is_404(http, path):
    assert_refused(http.get(path), 404)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_wrong_method_is_405(http, method):
    reply = http.request(method, "/v1/completions")
    assert reply.headers["allow"] == "POST"
    assert_refused(reply, 405)


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
