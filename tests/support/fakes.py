"""A fake engine and tokenizer that speak the interfaces of the HTTP layer, and what the tests of that layer share."""

import dataclasses
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack

import httpx
import pytest
from commands import PATIENCE

from specserve.errors import CapacityError, ConfigError, RequestError
from specserve.serve.engine.interface import DraftInfo, EngineStats
from specserve.serve.requests.request import (
    Delta,
    DraftTree,
    FinishReason,
    GrammarSpec,
    PromptToken,
    Request,
    RequestOptions,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)

MODEL = "tests/fake-model"
CONTEXT = 4096
STORY = "abcdefgh."  # the fake engine writes it over and over; "." is its end of sequence
UNICODE_STORY = "aé€😀z."  # it writes this for prompts that contain "unicode"
FIM_IDS = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}
USER = [{"role": "user", "content": "hi"}]


class FakeTemplate:
    """The source of a chat template, as far as a server looks at it."""

    def __init__(self, source: str = "") -> None:
        self._source = source

    @property
    def reads_tools(self) -> bool:
        return self.mentions("tools")

    def mentions(self, word: str) -> bool:
        return word in self._source

    def reads_variable(self, name: str) -> bool:
        return self.mentions(name)


class FakeTokenizer:
    """One id per UTF-8 byte."""

    has_chat_template = True
    template = FakeTemplate()
    special_token_ids = end_ids = frozenset[int]()
    sampling_defaults: Mapping[str, float] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def info(self) -> Mapping[str, Any]:
        return {"tokenizer_class": "FakeTokenizer", "eos_token": "."}

    def token_id(self, token: str) -> int | None:
        return FIM_IDS.get(token)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if "forbidden" in messages[-1]["content"]:
            raise RequestError("the template refuses", param="messages")
        text = json.dumps(tools) if tools else ""
        text += "".join(f"<{message['role']}>{message['content']}" for message in messages)
        assert not (add_generation_prompt and continue_final_message)
        end = "" if continue_final_message else str(dict(template_kwargs or {}))
        return self.encode(text + end + "<assistant>" * add_generation_prompt)


class FakeEngine:
    """Two tokens a step on its own thread: STORY from letter `seed`, until EOS, a stop character or max_tokens. The
    first of them is a draft token unless speculation is off.

    Words in a prompt change that: "slow" never ends, "paced" takes its time, "held" gets all its text at the end,
    "explode" fails in the engine, "full" finds no room. Whole prompts are cached, per salt.
    """

    model_name = MODEL
    vocab_size = 256
    max_model_len = CONTEXT
    num_slots = 8
    speculation = "chain:3"
    draft: DraftInfo | None = None
    loras: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.is_healthy = True
        self.is_compiled = True
        self.is_draining = False
        self.requests: list[Request] = []
        self.known_grammars: set[GrammarSpec] = set()
        self.state = EngineStats()
        self._cached: set[tuple[str, tuple[int, ...]]] = set()
        self._num_cached: dict[Request, int] = {}
        self._active: dict[Request, int] = {}
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self.is_compiled and not self.is_draining

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        /,
        **options: Unpack[RequestOptions],
    ) -> Request:
        assert params.n == 1
        self._check(prompt_ids, params)
        prompt = bytes(prompt_ids)
        if self.is_draining or (b"full" in prompt and (self._active or b"now" in prompt)):
            raise CapacityError("the server is stopping" if self.is_draining else "the queue is full")
        own: RequestOptions = {**options, "request_id": options.get("request_id") or str(next(self._ids))}
        request = Request(
            prompt_ids=tuple(prompt_ids),
            params=params,
            max_new_tokens=params.max_tokens or self.max_model_len - len(prompt_ids),
            seed=params.seed or 0,
            on_delta=on_delta,
            **own,
        )
        key = (request.cache_salt, request.prompt_ids)
        self._num_cached[request] = len(prompt_ids) if key in self._cached else 0
        self._cached.add(key)
        with self._lock:
            self.requests.append(request)
            self._active[request] = 0
        return request

    def knows_grammar(self, grammar: GrammarSpec, /) -> bool:
        return grammar in self.known_grammars

    def set_speculation(self, speculation: str, /) -> None:
        if speculation not in ("off", "chain:3"):
            raise ConfigError("no programs are compiled for this")
        self.speculation = speculation

    def load_draft(self, folder: str, /) -> DraftInfo:
        if "missing" in folder:
            raise ConfigError(f"{folder}: no such folder on the server")
        self.draft = DraftInfo(folder, 3.5)
        return self.draft

    def flush_cache(self) -> None:
        self._cached.clear()

    def stats(self) -> EngineStats:
        return dataclasses.replace(self.state, num_running=self.num_active)

    def drain(self, seconds: float) -> None:
        self.is_draining = True
        deadline = time.monotonic() + seconds
        while self._active and time.monotonic() < deadline:
            time.sleep(0.005)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(f"prompt has {len(prompt_ids)} tokens, context is {self.max_model_len}", param="prompt")
        num_left = self.max_model_len - len(prompt_ids)
        if params.max_tokens is not None and params.max_tokens > num_left:
            raise RequestError(f"max_tokens must be at most {num_left}", param="max_tokens")
        if params.grammar is not None and "forbidden" in params.grammar.text:
            raise RequestError("the grammar is refused", param="grammar")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if any(token_id >= self.vocab_size for token_id in getattr(params, name) or ()):
                raise RequestError(f"{name} must be in [0, {self.vocab_size})", param=name)

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
        for request in self._active:
            request.on_delta(Delta(finish_reason=FinishReason.CANCELLED))

    def _step(self, request: Request, num_emitted: int) -> Delta:
        prompt, params = bytes(request.prompt_ids), request.params
        if request.is_cancelled:
            return Delta(finish_reason=FinishReason.CANCELLED, stats=SpeculationStats())
        if b"explode" in prompt:
            return Delta(finish_reason=FinishReason.ERROR, error="secret internals", stats=SpeculationStats())
        if b"slow" in prompt:
            time.sleep(0.01)
            return Delta() if b"silent" in prompt else Delta((97,), "a")
        time.sleep(0.05 if b"paced" in prompt else 0)
        story = (UNICODE_STORY if b"unicode" in prompt else STORY).encode()
        answer = [story[(request.seed + k) % len(story)] for k in range(num_emitted + 2)]
        text, reason, cause, num_tokens = "", None, None, num_emitted
        while reason is None and num_tokens < len(answer):
            num_tokens += 1
            # half characters wait
            text = bytes(answer[:num_tokens]).decode(errors="ignore")[len(_text(answer[:num_emitted])) :]
            if text.endswith(tuple(params.stop) or "\0"):
                cause, reason = text[-1], FinishReason.STOP
                text = text if params.include_stop_str_in_output else text[:-1]
            elif answer[num_tokens - 1] in params.stop_token_ids:
                cause, reason = answer[num_tokens - 1], FinishReason.STOP
                text = text if params.include_stop_str_in_output else text[:-1]
            elif chr(answer[num_tokens - 1]) == "." and not params.ignore_eos:
                reason = FinishReason.STOP
            elif num_tokens == request.max_new_tokens:
                reason = FinishReason.LENGTH
        if b"held" in prompt:
            text = _text(answer[:num_tokens]) if reason else ""
        token_ids = tuple(answer[num_emitted:num_tokens])
        scored = () if params.prompt_logprobs is None or num_emitted else _scored(request)
        logprobs = () if params.logprobs is None else tuple(_logprobs(i, params.logprobs) for i in token_ids)
        last = answer[num_emitted - 1] if num_emitted else prompt[-1]
        num_accepted = min(1, len(token_ids)) if params.speculation != 0 else 0
        return Delta(
            token_ids,
            text,
            reason,
            cause,
            stats=self._stats_of(request) if reason else None,
            logprobs=logprobs,
            prompt=scored,
            num_accepted=num_accepted,
            tree=_tree(last, token_ids[0]) if params.return_tree and num_accepted else None,
        )

    def _stats_of(self, request: Request) -> SpeculationStats:
        return SpeculationStats(
            *(3, 9, (3, 1)),
            num_cached_tokens=self._num_cached[request],
            drafts=((3, 1), (3, 2), (3, 1)),
            max_accepted=3,
            queue_seconds=0.25,
            prefill_seconds=0.5,
            decode_seconds=2.0,
            versions=((0, "0"),),
        )


def _text(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode(errors="ignore")


def _tree(root_id: int, token_id: int) -> DraftTree:
    """Two children of the root, of which the second is accepted, and a child of that."""
    return DraftTree((root_id, ord("!"), token_id, ord("?")), (0, 0, 0, 2), (2,))


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """ "!" is always the likeliest, and the token itself comes next."""
    top = [(33, -0.25), (token_id, -1.5), *((35 + k, -math.inf) for k in range(num_top))]
    return TokenLogprobs(token_id, -1.5, tuple(top[:num_top]))


def _scored(request: Request) -> tuple[PromptToken, ...]:
    num_top = request.params.prompt_logprobs or 0
    first, *others = request.prompt_ids
    return PromptToken(first, None, 0), *(PromptToken(i, _logprobs(i, num_top), 2) for i in others)


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def assert_refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text[:500]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(reply.content) < 2000
    return error


def assert_needs_a_key(engine: FakeEngine, run: Any, routes: Sequence[str], words: str) -> None:
    """A server of these settings (`ServeRun`) does not start without a key, and answers nobody without it on these
    routes."""
    # servers in processes of their own import this file, and change what these modules would import
    from specserve.serve.http.app import create_app
    from specserve.serve.http.transport.keys import read_api_keys
    from specserve.serve.http.transport.server import HttpServer

    with pytest.raises(ConfigError, match=words):
        read_api_keys(run)
    server = HttpServer(create_app(engine, api_keys=("k",), run=run), port=0)
    server.start()
    try:
        with httpx.Client(base_url=server.url) as without:
            assert {without.post(f"/{route}", json={}).status_code for route in routes} == {401}
    finally:
        server.stop()


def assert_serves(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == STORY
