"""The HTTP server over a real socket, with a fake engine behind it that speaks the engine's interface."""

import gzip
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import openai
import pytest

from specserve.errors import CapacityError, ConfigError, RequestError
from specserve.serve import http_guard, streaming
from specserve.serve.api import HttpServer, bind_listener, create_app
from specserve.serve.metrics import Metrics
from specserve.serve.request import Delta, FinishReason, Request, SamplingParams, SpeculationStats

MODEL = "tests/fake-model"
CONTEXT = 4096
EOS = "."
STORY = "abcdefgh."  # what the fake engine writes, over and over


class FakeTokenizer:
    """One id per UTF-8 byte."""

    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if "forbidden" in messages[-1]["content"]:
            raise RequestError("the template refuses", param="messages")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return self.encode(text + str(dict(template_kwargs or {})) + "<assistant>" * add_generation_prompt)


class FakeEngine:
    """Two tokens a step on its own thread: STORY from letter `seed`, until EOS, a stop string or max_tokens.

    Prompts that contain "slow" never end, "explode" fail in the engine, "full" find no room.
    """

    model_name = MODEL
    vocab_size = 256
    max_model_len = CONTEXT

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.is_healthy = True
        self.requests: list[Request] = []
        self._active: dict[Request, int] = {}
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_delta: Callable[[Delta], None], /
    ) -> Request:
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(f"prompt has {len(prompt_ids)} tokens, context is {self.max_model_len}", param="prompt")
        num_left = self.max_model_len - len(prompt_ids)
        if params.max_tokens is not None and params.max_tokens > num_left:
            raise RequestError(f"max_tokens must be at most {num_left}", param="max_tokens")
        if b"full" in bytes(prompt_ids) and (self._active or b"now" in bytes(prompt_ids)):
            raise CapacityError("the queue is full")
        request = Request(
            request_id=str(next(self._ids)),
            prompt_ids=tuple(prompt_ids),
            params=params,
            max_new_tokens=params.max_tokens or num_left,
            seed=params.seed or 0,
            on_delta=on_delta,
        )
        with self._lock:
            self.requests.append(request)
            self._active[request] = 0
        return request

    @property
    def num_active(self) -> int:
        return len(self._active)

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping:
            with self._lock:
                active = list(self._active.items())
            for request, num_emitted in active if self.is_healthy else []:
                delta = self._step(request, num_emitted)
                with self._lock:
                    if delta.finish_reason is None:
                        self._active[request] += len(delta.token_ids)
                    else:
                        del self._active[request]
                request.on_delta(delta)
            time.sleep(0.002)

    def _step(self, request: Request, num_emitted: int) -> Delta:
        prompt = bytes(request.prompt_ids)
        if request.is_cancelled:
            return Delta(finish_reason=FinishReason.CANCELLED, stats=SpeculationStats())
        if b"explode" in prompt:
            return Delta(finish_reason=FinishReason.ERROR, error="secret internals", stats=SpeculationStats())
        if b"slow" in prompt:
            time.sleep(0.01)
            return Delta() if b"silent" in prompt else Delta((97,), "a")
        text, reason = "", None
        for k in range(num_emitted, num_emitted + 2):
            text += STORY[(request.seed + k) % len(STORY)]
            if text[-1] in request.params.stop:
                text, reason = text[:-1], FinishReason.STOP
            elif text[-1] == EOS and not request.params.ignore_eos:
                reason = FinishReason.STOP
            elif k + 1 == request.max_new_tokens:
                reason = FinishReason.LENGTH
            if reason:
                break
        stats = SpeculationStats(num_steps=3, num_draft_tokens=9, accepted_per_depth=(3, 1)) if reason else None
        return Delta(tuple(text.encode()), text, reason, stats=stats)


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def server(engine) -> Iterator[HttpServer]:
    server = HttpServer(create_app(engine), port=0)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


USER = [{"role": "user", "content": "hi"}]


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


def test_completion_passes_every_sampling_field_to_the_engine(client, engine):
    client.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop="h",
        extra_body={"top_k": 5, "min_p": 0.1, "stop_token_ids": [7], "ignore_eos": True},
    )
    assert engine.requests[-1].params == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        stop=("h",),
        stop_token_ids=(7,),
        ignore_eos=True,
    )


def test_null_means_the_default(http, engine):
    fields = (
        "n",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stream",
        "logprobs",
        "model",
    )
    reply = http.post("/v1/completions", json={"prompt": "x"} | dict.fromkeys(fields))
    assert reply.status_code == 200, reply.text
    assert engine.requests[-1].params == SamplingParams(max_tokens=16)


def test_choice_i_is_drawn_with_seed_plus_i(client, engine):
    reply = client.completions.create(model=MODEL, prompt=["x", "y"], n=2, seed=1, max_tokens=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == ["bcd", "cde", "bcd", "cde"]
    assert reply.usage.prompt_tokens == 2  # each prompt once
    assert reply.usage.completion_tokens == 12
    client.completions.create(model=MODEL, prompt="x", n=2)
    assert [request.params.seed for request in engine.requests[-2:]] == [None, None]


def test_streamed_completion_equals_the_whole_one(client):
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=["x", "y"], n=2, seed=1, echo=True, stream=True, stream_options={"include_usage": True}
        )
    )
    whole = client.completions.create(model=MODEL, prompt=["x", "y"], n=2, seed=1, echo=True)
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


def test_chat_returns_a_message(client, engine):
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
    prompt = bytes(engine.requests[-1].prompt_ids).decode()
    assert prompt == "<system>be brief<user>a\nb{'enable_thinking': False}<assistant>"


def test_chat_takes_its_own_answer_back(client):
    answer = client.chat.completions.create(model=MODEL, messages=USER).choices[0].message
    messages = [*USER, answer.model_dump(exclude_unset=True), *USER]
    assert client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content == STORY


def test_chat_runs_to_the_context_unless_told(client, engine):
    client.chat.completions.create(model=MODEL, messages=USER)
    assert engine.requests[-1].params.max_tokens is None


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


def test_neutral_values_of_unsupported_fields_and_harmless_fields_are_accepted(http):
    shared = {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "n": 1}
    shared |= {
        "user": "me",
        "metadata": {"run": "1"},
        "store": False,
        "best_of": 1,
        "response_format": {"type": "text"},
    }
    reply = http.post("/v1/completions", json=shared | {"prompt": "x", "logprobs": None, "suffix": None})
    assert reply.status_code == 200, reply.text
    chat = {"messages": USER, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none"}
    reply = http.post("/v1/chat/completions", json=shared | chat)
    assert reply.status_code == 200, reply.text


# --- leaving, failing, refusing ------------------------------------------------------------------------------------


def _wait_for(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("prompt", ["slow", "slow and silent"])
def test_disconnect_cancels_every_sequence_within_a_second(server, engine, is_stream, prompt):
    _wait_for(lambda: engine.num_active == 0)
    body = json.dumps({"prompt": [prompt, prompt], "n": 2, "stream": is_stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        _wait_for(lambda: engine.num_active == 4)
        if is_stream:
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
    _wait_for(lambda: engine.num_active == 0)


def test_closing_an_openai_stream_cancels_the_sequence(client, engine):
    _wait_for(lambda: engine.num_active == 0)
    with client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "slow"}], stream=True
    ) as stream:
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        assert engine.num_active == 1
    _wait_for(lambda: engine.num_active == 0)


def test_no_room_is_503_with_retry_after_and_leaves_no_sequence(http, engine):
    reply = http.post("/v1/completions", json={"prompt": "full now"})
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json()["error"]["message"] == "the queue is full"
    reply = http.post("/v1/completions", json={"prompt": ["slow", "full"], "stream": True})  # the second finds no room
    assert reply.status_code == 503
    _wait_for(lambda: engine.num_active == 0)


def test_engine_error_is_500_and_tells_no_internals(http, engine):
    reply = http.post("/v1/completions", json={"prompt": ["explode", "slow"]})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    _wait_for(lambda: engine.num_active == 0)


def test_engine_error_in_a_stream_is_an_event(client, http):
    reply = http.post("/v1/completions", json={"prompt": "explode", "stream": True})
    first, last = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert json.loads(first)["error"]["type"] == "server_error"
    assert "secret" not in first
    assert last == "[DONE]"
    with pytest.raises(openai.APIError):
        list(client.completions.create(model=MODEL, prompt="explode", stream=True))


def test_an_engine_that_dies_silently_ends_its_requests(http, engine, monkeypatch):
    monkeypatch.setattr(streaming, "HEALTH_CHECK_SECONDS", 0.05)
    engine.is_healthy = False
    try:
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 500
    finally:
        engine.is_healthy = True
    assert http.get("/health").status_code == 200


def test_a_quiet_stream_is_kept_alive(http, monkeypatch):
    monkeypatch.setattr(streaming, "HEALTH_CHECK_SECONDS", 0.002)
    monkeypatch.setattr(streaming, "KEEPALIVE_SECONDS", 0.0)
    with http.stream("POST", "/v1/completions", json={"prompt": "slow and silent", "stream": True}) as reply:
        assert next(reply.iter_lines()) == ": ping"


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
    *[(_completion(logprobs=n), "logprobs") for n in (0, 1, -1, 10**9, True)],
    *[(_chat(top_logprobs=n), "top_logprobs") for n in (1, -1, 10**9)],
    (_chat(logprobs=True), "logprobs"),
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
    (_completion(seed=2**63 - 1, n=2), "seed"),
    *[(_completion(stop=s), "stop") for s in ("", ["a", ""], ["x"] * 10_000, "y" * 2**20, 3)],
    (_completion(stop=["a", 1]), "stop[1]"),
    *[(_completion(stop_token_ids=ids), "stop_token_ids") for ids in ([-1], [256], list(range(5000)), 3)],
    (_completion(stop_token_ids=[True]), "stop_token_ids[0]"),
    (_completion(ignore_eos=1), "ignore_eos"),
    (_completion(stream="yes"), "stream"),
    (_completion(stream_options={"include_usage": True}), "stream_options"),
    (_completion(stream=True, stream_options={"surprise": 1}), "stream_options.surprise"),
    # many mistakes at once: only the first is told, and soon
    (_chat(messages=[{"role": 1}] * 5000), "messages[0].role"),
    (_chat(messages=USER * 10_001), "messages"),
    (_chat(chat_template_kwargs=dict.fromkeys(map(str, range(100_000)))), "chat_template_kwargs"),
    (_chat(metadata=dict.fromkeys(map(str, range(100_000)), 1)), "metadata"),
    # not supported yet
    *[(_chat(**{f: 0.5}), f) for f in ("presence_penalty", "frequency_penalty", "repetition_penalty")],
    *[(_chat(**{f: float(2)}), f) for f in ("presence_penalty", "repetition_penalty")],
    (_chat(presence_penalty=False), "presence_penalty"),
    (_chat(logit_bias={"5": 100}), "logit_bias"),
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


def _assert_refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text[:500]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(reply.content) < 2000
    return error


def _assert_serves(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == STORY


@pytest.mark.parametrize(
    ("request_", "param"), BAD_FIELDS, ids=lambda value: re.sub(r"\W+", "_", str(value))[:60].strip("_")
)
def test_a_bad_field_is_a_400_that_names_it_and_the_server_still_serves(http, request_, param):
    path, body = request_
    error = _assert_refused(http.post(path, json=body))
    assert error["param"] == param
    assert param.split("[")[0].split(".")[-1] in error["message"] or path.startswith("/v1/chat")
    _assert_serves(http)


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
    _assert_refused(http.post("/v1/completions", content=BAD_BODIES[name], headers=headers))
    _assert_refused(http.post("/v1/chat/completions", content=BAD_BODIES[name], headers=headers))
    _assert_serves(http)


def test_nul_and_odd_text_in_a_prompt_are_text(http, engine):
    reply = http.post("/v1/completions", json={"prompt": "a\x00b\u202e\U0001f600"})
    assert reply.status_code == 200
    assert bytes(engine.requests[-1].prompt_ids).decode() == "a\x00b\u202e\U0001f600"


def test_body_over_the_limit_is_413(http, monkeypatch):
    monkeypatch.setattr(http_guard, "MAX_BODY_BYTES", 1000)
    _assert_refused(http.post("/v1/completions", json={"prompt": "x" * 3000}), 413)
    chunks = iter([b'{"prompt": "', *[b"x" * 100] * 30, b'"}'])  # no content length
    reply = http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    _assert_refused(reply, 413)
    _assert_serves(http)


def test_body_that_never_ends_is_408(server, http, monkeypatch):
    monkeypatch.setattr(http_guard, "BODY_TIMEOUT_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: 100\r\n\r\n{")
        assert raw.recv(100).startswith(b"HTTP/1.1 408")
    _assert_serves(http)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_wrong_content_type_is_415(http, content_type):
    reply = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": content_type})
    _assert_refused(reply, 415)


def test_compressed_body_is_415(http):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    _assert_refused(http.post("/v1/completions", content=gzip.compress(b"x" * 10**6), headers=headers), 415)


@pytest.mark.parametrize(
    "path", ["/", "/v1", "//v1/completions", "/v1/../health/x", "/docs", "/openapi.json", "/v1/embeddings"]
)
def test_unknown_path_is_404(http, path):
    _assert_refused(http.get(path), 404)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_wrong_method_is_405(http, method):
    reply = http.request(method, "/v1/completions")
    assert reply.headers["allow"] == "POST"
    _assert_refused(reply, 405)


def test_unknown_model_is_404_and_named(client):
    with pytest.raises(openai.NotFoundError) as info:
        client.chat.completions.create(model="gpt-9", messages=USER)
    assert (info.value.code, info.value.param) == ("model_not_found", "model")


def test_model_without_a_template_refuses_chat(http, engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "has_chat_template", False, raising=False)
    error = _assert_refused(http.post("/v1/chat/completions", json={"messages": USER}))
    assert error["param"] == "messages"


def test_a_bug_is_a_500_that_tells_nothing_and_keeps_the_connection(http, engine, monkeypatch, caplog):
    def fail(text, *, add_special_tokens):
        raise KeyError("secret")

    monkeypatch.setattr(engine.tokenizer, "encode", fail)
    reply = http.post("/v1/completions", json={"prompt": "x"})
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"
    assert "secret" not in reply.text
    assert "secret" in caplog.text  # the log has the details
    monkeypatch.undo()
    _assert_serves(http)


# --- keys, metrics, the socket -------------------------------------------------------------------------------------


def test_every_route_but_health_and_version_needs_the_key(engine):
    server = HttpServer(create_app(engine, api_key="sk-ключ"), port=0)
    server.start()
    try:
        with httpx.Client(base_url=server.url) as http:
            assert http.get("/health").status_code == 200
            assert http.get("/version").status_code == 200
            closed = ["/metrics", "/v1/models", "/v1/completions", "/tokenize", "/nowhere", "//health", "/health/"]
            for path in closed:
                assert _assert_refused(http.get(path), 401)["code"] == "invalid_api_key"
            for value in ["", "Bearer", "Bearer wrong", "sk-ключ", "Basic sk-ключ", "Bearer sk-ключ2"]:
                reply = http.get("/v1/models", headers={"authorization": value.encode()})
                _assert_refused(reply, 401)
            key = "Bearer sk-ключ".encode()
            assert http.get("/v1/models", headers={"authorization": key}).status_code == 200
    finally:
        server.stop()


def test_an_empty_key_is_refused_at_once(engine):
    with pytest.raises(ConfigError, match="api_key"):
        create_app(engine, api_key="")


def _series(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_metrics_count_tokens_speculation_and_latency(http, engine):
    _wait_for(lambda: engine.num_active == 0)
    before = _series(http.get("/metrics").text)
    http.post("/v1/completions", json={"prompt": "hello", "n": 2})
    reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert "_created" not in reply.text
    after = _series(reply.text)
    label = f'{{model_name="{MODEL}"}}'

    def grown(name: str, labels: str = label) -> float:
        return after[f"vllm:{name}{labels}"] - before.get(f"vllm:{name}{labels}", 0.0)

    assert grown("prompt_tokens_total") == 10
    assert grown("generation_tokens_total") == 2 * len(STORY)
    assert grown("spec_decode_num_drafts_total") == 6
    assert grown("spec_decode_num_draft_tokens_total") == 18
    assert grown("spec_decode_num_accepted_tokens_total") == 8
    position = f'{{model_name="{MODEL}",position="1"}}'
    assert grown("spec_decode_num_accepted_tokens_per_pos_total", position) == 2
    assert grown("request_success_total", f'{{finished_reason="stop",model_name="{MODEL}"}}') == 2
    assert grown("time_to_first_token_seconds_count") == 2
    assert grown("e2e_request_latency_seconds_count") == 2
    assert grown("inter_token_latency_seconds_count") == 2 * (len(STORY) - 2)
    assert after[f"vllm:num_requests_running{label}"] == 0
    assert after[f"vllm:num_requests_waiting{label}"] == 0


def test_two_apps_have_registries_of_their_own():
    assert Metrics("a").registry is not Metrics("a").registry


def test_a_taken_port_is_a_config_error(server, engine):
    with pytest.raises(ConfigError, match=str(server.port)):
        HttpServer(create_app(engine), port=server.port)
    with pytest.raises(ConfigError, match="70000"):
        bind_listener("127.0.0.1", 70000)


def test_a_stopped_server_frees_its_port(engine):
    server = HttpServer(create_app(engine), listener=bind_listener("127.0.0.1", 0))
    server.start()
    assert httpx.get(f"{server.url}/version").json()["version"]
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/version")
    bind_listener("127.0.0.1", server.port).close()
