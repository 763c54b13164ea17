"""The bodies that benchmarks and evaluations send, by name of field, and what they read of the replies."""

import json
from typing import Any

import httpx
import pytest
from fakes import MODEL, STORY

Json = dict[str, Any]
N = len(STORY)
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TEXTS = [{"role": "user", "content": "hi"}]
COUNTED = {"include_usage": True, "continuous_usage_stats": True}

STREAMS: dict[str, tuple[str, Json]] = {
    "guidellm, text": (
        "/v1/completions",
        {"prompt": "hi", "max_tokens": N, "stop": None, "ignore_eos": True, "stream_options": COUNTED},
    ),
    "guidellm, chat": (
        "/v1/chat/completions",
        {"messages": PARTS, "max_completion_tokens": N, "stop": None, "ignore_eos": True, "stream_options": COUNTED},
    ),
    "aiperf, chat": (
        "/v1/chat/completions",
        {"messages": TEXTS, "max_completion_tokens": N, "stream_options": {"include_usage": True}},
    ),
    "aiperf, every chunk counted": (
        "/v1/chat/completions",
        {"messages": TEXTS, "max_tokens": N, "min_tokens": N, "ignore_eos": True, "stream_options": COUNTED},
    ),
    "aiperf, responses": (
        "/v1/responses",
        {"input": [{"type": "message", "role": "user", "content": "hi"}], "max_output_tokens": N, "instructions": "s"},
    ),
    "aiperf, messages": ("/v1/messages", {"messages": TEXTS, "max_tokens": N, "system": "s"}),
    "aiperf, generate": (
        "/generate",
        {"rid": "r-1", "input_ids": [97], "sampling_params": {"ignore_eos": True, "max_new_tokens": N}},
    ),
    "vllm bench serve, completions": (
        "/v1/completions",
        {
            "prompt": "hi",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": N,
            "logprobs": None,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "vllm bench serve, chat": (
        "/v1/chat/completions",
        {"messages": PARTS, "temperature": 0.0, "max_completion_tokens": N, "stream_options": {"include_usage": True}},
    ),
    "sglang.bench_serving, generate": (
        "/generate",
        {
            "text": "hi",
            "sampling_params": {"temperature": 0.0, "max_new_tokens": N, "ignore_eos": True},
            "lora_path": None,
            "return_logprob": False,
            "return_routed_experts": False,
            "logprob_start_len": -1,
            "image_data": None,
        },
    ),
    "sglang.bench_serving, completions": (
        "/v1/completions",
        {"prompt": "hi", "temperature": 0.0, "best_of": 1, "max_tokens": N, "ignore_eos": True},
    ),
    "sglang.bench_serving, chat": (
        "/v1/chat/completions",
        {"messages": TEXTS, "temperature": 0.0, "max_tokens": N, "ignore_eos": True},
    ),
}


def _said(event: Json) -> str:
    """The text of one event of any API."""
    if "choices" in event:
        return "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in event["choices"])
    delta = event.get("delta", "")
    return delta.get("text", "") if isinstance(delta, dict) else delta


def _counted(event: Json) -> int | None:
    """The tokens of the answer, where an event gives them."""
    inner = event.get("response", event)
    usage = inner.get("usage") or inner.get("meta_info") or {}
    return usage.get("completion_tokens", usage.get("output_tokens"))


@pytest.mark.parametrize("name", STREAMS)
def test_a_benchmark_gets_its_tokens_and_their_number(http: httpx.Client, name: str) -> None:
    path, body = STREAMS[name]
    own = {} if path == "/generate" else {"model": MODEL}
    reply = http.post(path, json=body | own | {"stream": True})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    text = events[-1]["text"] if path == "/generate" else "".join(map(_said, events))
    assert text == STORY
    counts = [count for event in events if (count := _counted(event)) is not None]
    assert counts[-1] == N if counts else "stream_options" not in body
    if body.get("stream_options") == COUNTED:
        assert len(counts) == len(events)


def test_an_evaluation_reads_likelihoods_answers_and_the_tokenizer(http: httpx.Client) -> None:
    """lm-eval's local-completions and local-chat-completions."""
    scored = {"model": MODEL, "prompt": [[97, 98, 99], [100, 101]], "temperature": 0, "seed": 1234}
    reply = http.post("/v1/completions", json=scored | {"max_tokens": 1, "logprobs": 1, "echo": True}).json()
    for prompt, choice in zip(scored["prompt"], reply["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(prompt) + 1
        for own, top in zip(logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], strict=True):
            assert own <= max(top.values())
    asked = {"model": MODEL, "max_tokens": 256, "temperature": 0, "stop": ["\n\n", "h"], "seed": 0}
    reply = http.post("/v1/completions", json=asked | {"prompt": [[97, 98]]}).json()
    assert reply["choices"][0]["text"] == "abcdefg"
    reply = http.post("/v1/chat/completions", json=asked | {"messages": TEXTS}).json()
    assert reply["choices"][0]["message"]["content"] == "abcdefg"
    assert {"eos_token", "tokenizer_class"} <= set(http.get("/tokenizer_info").json())
    assert http.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False}).json()["tokens"] == [97, 98]


def test_the_benchmarks_of_sglang_read_how_much_was_accepted(http: httpx.Client) -> None:
    body = {"text": ["x", "y"], "sampling_params": {"temperature": 0, "max_new_tokens": 4, "top_p": 1.0}}
    for reply in http.post("/generate", json=body).json():
        assert reply["meta_info"]["completion_tokens"] / reply["meta_info"]["spec_verify_ct"] > 1
    assert http.get("/get_server_info").json()["internal_states"][0]["avg_spec_accept_length"] > 1
