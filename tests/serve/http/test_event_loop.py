"""No request, whatever it asks for, holds the event loop that sends all other clients' streams."""

import asyncio
import gc
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fakes import CONTEXT, USER, FakeEngine, FakeTemplate, assert_serves
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from specserve.serve.http.app import create_app
from specserve.serve.http.transport.json_codec import ENCODER, MAX_AT_ONCE, write_json
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.settings import ServeRun

Json = dict[str, Any]
LOOP_SECONDS = 0.05  # of the processor, that one callback may take
LONG = [97] * (CONTEXT - 100)  # a prompt


class LoopCosts:
    """What every callback of an asyncio loop costs: seconds that its thread computes, which other work on the machine
    does not change."""

    def __init__(self) -> None:
        self.worst = 0.0, "nothing ran"
        self.num_calls = 0

    @contextmanager
    def watch(self, thread: threading.Thread, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Garbage is collected by whichever thread makes some, so the collector rests: its work is no callback's."""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            if threading.current_thread() is not thread:
                run(handle)
                return
            start = time.thread_time()
            run(handle)
            seconds = time.thread_time() - start
            self.num_calls += 1
            if seconds > self.worst[0]:
                self.worst = seconds, repr(handle)

        monkeypatch.setattr(asyncio.Handle, "_run", timed)
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


def _schema(size: int) -> Json:
    return {"type": "object", "properties": {f"p{i}": {"enum": ["a", i, None]} for i in range(size)}}


def _tools(number: int, size: int) -> list[Json]:
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": _schema(size)}} for i in range(number)]


def _deep(depth: int) -> Json:
    return json.loads('{"allOf": [' * depth + "{}" + "]}" * depth)


GRAMMARS: list[Json] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(8000)}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _deep(100)}}},
    {"guided_json": {"enum": [*range(50_000)]}},
    {"guided_regex": "(a|b|c{9}){99}" * 18_000},
    {"guided_choice": ["w" * 20] * 10_000},
    {"structured_outputs": {"grammar": "start: start start | /a*/" + " | 'x'" * 40_000}},
]
SAMPLED: list[Json] = [
    {"logit_bias": dict.fromkeys(map(str, range(40_000)), 1)},
    {"n": 128, "stop": ["s" * 1024] * 64, "bad_words": ["w" * 1024] * 64},
    {"allowed_token_ids": [1] * 100_000},
    {"metadata": {f"m{i}": "x" for i in range(20_000)}},
    {f"unknown{i}": i for i in range(20_000)},
]
COMPLETIONS: list[Json] = [
    {"prompt": [1] * 200_000},
    {"prompt": [[1]] * 40_000},
    {"prompt": [LONG] * 20},
    {"prompt": "a, " * 40_000},
    {"prompt": '\\"é' * 1_000_000},
    {"prompt": LONG, "echo": True, "logprobs": 20, "max_tokens": 0},
    {"prompt": LONG, "echo": True, "logprobs": 20, "max_tokens": 3, "stream": True, "return_token_ids": True},
    {"prompt": LONG, "prompt_logprobs": 20},
    {"prompt": LONG, "n": 128, "stream": True, "return_token_ids": True, "max_tokens": 2},
    {"prompt": "x", "n": 64, "logprobs": 20, "max_tokens": 40, "ignore_eos": True},
]
CHATS: list[Json] = [
    {"messages": USER * 10_000},
    {"messages": [{"role": "user", "content": "é" * 1_000_000}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 30_000}]},
    {"messages": USER, "tools": _tools(128, 100)},
    {"messages": USER, "tools": _tools(128, 100), "tool_choice": "none"},
    {"messages": USER, "tools": _tools(20, 2), "tool_choice": "required"},
    {"messages": USER, "chat_template_kwargs": {f"k{i}": 1 for i in range(20_000)}},
    {"messages": USER, "n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 40, "ignore_eos": True},
]
RESPONSES: list[Json] = [
    {"input": [{"role": "user", "content": "x"}] * 10_000},
    {"input": "x" * 4_000_000},
    {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": _schema(16_000)}], "tool_choice": "none"},
    {"input": "held x", "top_logprobs": 20, "max_output_tokens": 600, "ignore_eos": True},
]
MESSAGES: list[Json] = [
    {"messages": USER * 10_000},
    {"messages": USER, "system": [{"type": "text", "text": "x"}] * 10_000},
    {"messages": USER, "tools": [{"name": f"f{i}", "input_schema": _schema(100)} for i in range(128)]},
    {"messages": [{"role": "user", "content": "x" * 4_000_000}]},
]
FEW, MANY = {"max_new_tokens": 9}, {"max_new_tokens": 300, "ignore_eos": True}
GENERATE: list[Json] = [
    {"input_ids": [LONG] * 20},
    {"text": ["x" * 50_000] * 60},
    {"text": "x", "sampling_params": {"json_schema": json.dumps(_schema(8000))}},
    {"input_ids": LONG, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20, "sampling_params": FEW},
    {"text": "x", "return_logprob": True, "top_logprobs_num": 20, "sampling_params": MANY},
]


def _hostile() -> Iterator[tuple[str, Json]]:
    """Each takes a while to read, to check, to tokenize, to submit or to answer; and every POST route has some."""
    for options in [*GRAMMARS, *SAMPLED]:
        yield "/v1/completions", {"prompt": "x"} | options
        yield "/v1/chat/completions", {"messages": USER} | options
    yield from (("/v1/completions", body) for body in COMPLETIONS)
    yield from (("/v1/chat/completions", body) for body in CHATS)
    yield from (("/v1/responses", body) for body in RESPONSES)
    for body in MESSAGES:
        yield "/v1/messages", body | {"max_tokens": 9}
        yield "/v1/messages/count_tokens", body
    yield from (("/generate", body) for body in GENERATE)
    streamed = [("/v1/chat/completions", CHATS[-1]), ("/v1/messages", MESSAGES[2] | {"max_tokens": 9})]
    streamed += [("/v1/responses", body) for body in RESPONSES[-2:]] + [("/generate", GENERATE[-1])]
    yield from ((path, body | {"stream": True}) for path, body in streamed)
    yield "/tokenize", {"prompt": "x" * 1_000_000}
    yield "/tokenize", {"messages": USER * 10_000}
    yield "/tokenize", {"messages": USER, "tools": _tools(128, 100)}
    yield "/detokenize", {"tokens": [97] * 100_000}
    for path, name in (("/v1/load_draft", "draft"), ("/v1/speculation", "speculation")):
        yield path, {name: [1] * 200_000}
        yield path, {name: "x" * 4_000_000}
    yield "/flush_cache", {"x": [1] * 200_000}


@pytest.mark.slow
def test_no_callback_of_the_loop_computes_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [(path, json.dumps(body, ensure_ascii=False).encode()) for path, body in _hostile()]
    random.Random(3).shuffle(bodies)
    costs = LoopCosts()
    with FakeEngine() as engine:
        monkeypatch.setattr(engine.tokenizer, "template", FakeTemplate("tools <think> </think>"))
        app = create_app(engine, run=ServeRun(allow_load_draft=True, tool_parser="hermes"))
        routes = [route for route in app.routes if isinstance(route, APIRoute)]
        assert {path for path, _ in bodies} == {each.path for each in routes if "POST" in each.methods}
        server = HttpServer(app, port=0)
        server._config.loop = "asyncio"  # its callbacks can be watched, whatever else is installed
        server.start()
        try:
            with httpx.Client(base_url=server.url, timeout=100) as http, ThreadPoolExecutor(6) as pool:
                assert_serves(http)
                assert server._thread is not None

                def send(path: str, raw: bytes) -> int:
                    return http.post(path, content=raw, headers={"content-type": "application/json"}).status_code

                with costs.watch(server._thread, monkeypatch):
                    statuses = list(pool.map(lambda each: send(*each), bodies))
                assert set(statuses) == {200, 400}, statuses
                assert_serves(http)
        finally:
            server.stop()
    assert costs.num_calls > 10 * len(bodies)
    assert costs.worst[0] < LOOP_SECONDS, f"{costs.worst[0]:.3f} s in {costs.worst[1][:500]}"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_what_is_written_patiently_is_the_same(value: Any) -> None:
    assert write_json(value) == ENCODER.encode(value)


def test_what_has_many_values_is_written_in_parts() -> None:
    value = {"a": [[i, None, "é", {"x": -0.5}] for i in range(MAX_AT_ONCE // 3)]}
    assert write_json(value) == ENCODER.encode(value)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json([float("nan")])
