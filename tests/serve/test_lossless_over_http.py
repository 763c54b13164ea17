"""Law 1 as clients see it: whatever a request asks for, its reply is the same with and without speculation; and what
must follow a schema does."""

import concurrent.futures
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from specserve.checkpoints.load import Target
from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.drafters.door import Head
from specserve.drafters.speculation import parse_speculation
from specserve.kernels import native
from specserve.serve.engine import Engine
from specserve.serve.http.app import create_app
from specserve.serve.http.server import HttpServer
from specserve.serve.runner import Runner
from specserve.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.is_available(), reason="a row's bits depend on the batch without the native kernels"),
]

NUM_REQUESTS = 40
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
FORMATS: list[dict[str, Any]] = [
    {},
    {},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": r"(def|class) [a-z_]{2,20}\(.{0,30}\)"}},
    {"guided_choice": ["os.path.join", "json.dumps", "json.loads"]},
]
CHAT_FORMATS: list[dict[str, Any]] = [
    *FORMATS,
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.02},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logit_bias": {"300": 2.5, "40": -100}, "bad_words": ["return", " the"]},
    {"stop": [".", "return"], "include_stop_str_in_output": True},
    {"min_tokens": 6},
    {"n": 2},
    {"skip_special_tokens": False, "return_token_ids": True},
]
QUESTIONS = ["What does `os.path.join` do?", "Write the function `json.dumps`.", "Describe `list.sort` in a word."]


@pytest.fixture(scope="module")
def http(pydoc_target: Target, pydoc_head: Head) -> Iterator[httpx.Client]:
    import transformers

    backend = transformers.PreTrainedTokenizerFast.from_pretrained(str(BUNDLED_FOLDER))
    backend.chat_template = TEMPLATE
    tree = parse_speculation("tree:3x3x8")
    runner = Runner(pydoc_target, pydoc_head, [tree], num_slots=4, max_model_len=512, page_size=16, num_pages=4 * 32)
    with Engine(
        runner, Tokenizer(backend, pydoc_target.eos_ids), model_name="m", eos_ids=pydoc_target.eos_ids
    ) as engine:
        server = HttpServer(create_app(engine), port=0)
        server.start()
        with httpx.Client(base_url=server.url, timeout=600) as client:
            yield client
        server.stop()


def _requests() -> list[tuple[str, dict[str, Any]]]:
    rng, found = random.Random(11), []
    for number in range(NUM_REQUESTS):
        body: dict[str, Any] = {"seed": number, "max_tokens": 40}
        for options in rng.sample(OPTIONS, rng.randint(1, 3)):
            body |= options
        if number % 3:
            body |= rng.choice(CHAT_FORMATS) | {"messages": [{"role": "user", "content": rng.choice(QUESTIONS)}]}
            body |= rng.choice([{}, {"logprobs": True, "top_logprobs": 2}])
            found.append(("/v1/chat/completions", body))
        else:
            body |= rng.choice(FORMATS) | {"prompt": rng.choice(QUESTIONS)}
            body |= rng.choice([{}, {"echo": True}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}])
            found.append(("/v1/completions", body))
    return found


def _said(reply: httpx.Response) -> Any:
    """The choices without what is drawn for each reply, and without numbers that programs may round differently; or the
    error, where options and grammar together leave no token."""
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert "ban every token" in reply.text, reply.text
        return reply.json()
    choices = reply.json()["choices"]
    for choice in choices:
        choice.pop("logprobs", None)
        choice.pop("prompt_logprobs", None)
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    return choices


def test_no_option_of_a_request_tells_whether_there_is_speculation(http: httpx.Client) -> None:
    asked = _requests()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        replies = [
            list(pool.map(lambda ask, way=way: http.post(ask[0], json={**ask[1], "speculation": way}), asked))
            for way in ("off", "auto")
        ]
    num_accepted = num_structured = 0
    for (_, body), plain, speculative in zip(asked, *replies, strict=True):
        assert _said(speculative) == _said(plain), body
        if speculative.status_code == 400:
            continue
        reply = speculative.json()
        is_structured = {"response_format", "structured_outputs", "guided_choice"} & set(body) or "tool_choice" in body
        accepted = reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        num_accepted += accepted if is_structured else 0
        for choice in reply["choices"]:
            message = choice.get("message", {"content": choice.get("text")})
            if choice["finish_reason"] == "tool_calls":
                for call in message["tool_calls"]:
                    json.loads(call["function"]["arguments"])
                num_structured += 1
            elif choice["finish_reason"] == "stop" and "response_format" in body and choice["stop_reason"] is None:
                json.loads(message["content"].removeprefix(body["prompt"] if body.get("echo") else ""))
                num_structured += 1
    assert num_accepted > 20, "grammars were hardly met by drafts"
    assert num_structured > 3
