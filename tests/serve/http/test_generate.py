"""SGLang's own API: /generate whole and streamed, and what is reported of the server and its models."""

import itertools
import json
from typing import Any

import pytest
from fakes import CONTEXT, MODEL, STORY, FakeTokenizer, assert_refused

from specserve.serve.engine.interface import DraftInfo
from specserve.serve.http.adapters.generate import GenerateBody, GenerateFormat
from specserve.serve.http.formats.reader import Part
from specserve.serve.http.openai.logprobs import TokenTexts
from specserve.serve.http.openai.replies import Answer, Usage

Json = dict[str, Any]


def _generate(http, **body: Any) -> Any:
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _events(http, **body: Any) -> list[Json]:
    *events, last = http.post("/generate", json=body | {"stream": True}).text.strip().split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(each.removeprefix("data: ")) for each in events]


def test_events_that_hold_much_again_are_spelled_elsewhere():
    """Every event holds all of its answer, so the loop spells none from a number of tokens on."""
    body = GenerateBody.model_validate({"text": ["x", "y"]})
    spelled = GenerateFormat(body, TokenTexts(FakeTokenizer()))
    usage = lambda: Usage(1, 0, 0, 0, 0)  # noqa: E731
    for num_tokens in range(0, 1200, 100):
        assert spelled.is_long == (num_tokens >= 600), num_tokens
        for index, text in ((0, "a"), (1, "")):
            ids = [97] * 100 if text else []
            [said] = spelled.piece(Answer(index, Part(text * 100), None, token_ids=ids), usage)
            event = json.loads(said.removeprefix(b"data: "))
            assert event["output_ids"] == [97] * len(event["text"])
            assert len(event["text"]) == (num_tokens + 100) * len(text)


def test_generate_tells_what_was_done(http, fake_engine):
    fake_engine.flush_cache()
    options = {"temperature": 0, "max_new_tokens": 20, "stop": ["e"], "min_new_tokens": 1, "sampling_seed": 0}
    reply = _generate(http, text="hello", sampling_params=options, rid="mine")
    meta = reply["meta_info"]
    assert (reply["text"], reply["output_ids"]) == ("abcd", list(b"abcde"))
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": "e"},
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "cached_tokens": 0,
        "spec_verify_ct": 3,
        "weight_version": "0",
    }
    params = fake_engine.requests[-1].params
    assert (params.temperature, params.max_tokens, params.min_tokens, params.seed) == (0, 20, 1, 0)
    assert _generate(http, text="hello")["meta_info"]["cached_tokens"] == 5
    assert fake_engine.requests[-1].params.max_tokens == 128
    end = _generate(http, input_ids=[97])["meta_info"]["finish_reason"]
    assert end == {"type": "stop", "matched": ord(".")}
    options = {"max_new_tokens": 2, "no_stop_trim": True, "json_schema": "{}"}
    end = _generate(http, text="x", sampling_params=options)["meta_info"]["finish_reason"]
    assert end == {"type": "length", "length": 2}
    params = fake_engine.requests[-1].params
    assert (params.include_stop_str_in_output, params.grammar.text) == (True, "{}")


@pytest.mark.parametrize(
    "body",
    [{"text": ["x", "y"]}, {"input_ids": [[97], [98]]}, {"text": "x", "sampling_params": {"n": 2}}, {"text": ["x"]}],
)
def test_lists_get_lists(http, body):
    replies = _generate(http, **body)
    assert len(replies) == (1 if body == {"text": ["x"]} else 2)
    assert len({reply["meta_info"]["id"] for reply in replies}) == len(replies)


def test_a_stream_repeats_what_has_come(http, fake_engine):
    fake_engine.flush_cache()
    body = {"text": ["x", "y"], "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    whole = _generate(http, **body)
    fake_engine.flush_cache()
    events = _events(http, **body)
    for index, reply in enumerate(whole):
        own = [event for event in events if event["index"] == index]
        texts = [event["text"] for event in own]
        assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
        for last in (own[-1]["meta_info"], reply["meta_info"]):
            last.pop("e2e_latency")
            last.pop("id")
        assert own[-1] == reply | {"index": index}
        assert reply["text"] == STORY
        assert [row[1:] for row in reply["meta_info"]["output_token_logprobs"]] == [[ord(c), c] for c in STORY]
        assert [len(rows) for rows in reply["meta_info"]["output_top_logprobs"]] == [2] * len(STORY)


def test_the_log_probabilities_of_a_prompt_begin_where_they_are_asked_for(http):
    body = {"text": "abc", "return_logprob": True}
    assert "input_token_logprobs" not in _generate(http, **body)["meta_info"]
    for start in (0, 1):
        rows = _generate(http, **body, logprob_start_len=start)["meta_info"]["input_token_logprobs"]
        assert [row[1] for row in rows] == list(b"abc")[start:]
        assert (rows[0][0] is None) == (start == 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": [256]}, "input_ids"),
        ({"input_ids": "x"}, "input_ids"),
        ({"text": "x" * CONTEXT}, "text"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "sampling_params": {"max_new_tokens": CONTEXT}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"temperature": "1"}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.regex"),
        ({"text": "x", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"text": "x", "sampling_params": {"surprise": 1}}, "sampling_params.surprise"),
        ({"text": "x", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "x", "image_data": "y"}, "image_data"),
        ({"text": "x", "surprise": 1}, "surprise"),
    ],
)
def test_what_cannot_be_generated_is_named(http, body, param):
    error = assert_refused(http.post("/generate", json=body))
    assert error["param"] == param, error


def test_what_is_served_and_how_it_fares_is_reported(http, fake_engine, monkeypatch):
    _generate(http, text="x")
    state = http.get("/get_server_info").json()
    [counts] = state["internal_states"]
    assert counts["avg_spec_accept_length"] == 7 / 3  # of every sequence of the fake engine
    assert (state["context_length"], state["speculative_algorithm"]) == (CONTEXT, "chain:3")
    assert http.get("/get_model_info").json()["model_path"] == MODEL
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/tokenizer_info").json()["eos_token"] == "."
    [card] = http.get("/v1/models").json()["data"]
    assert card["tau"] == counts["avg_spec_accept_length"]
    monkeypatch.setattr(fake_engine, "draft", DraftInfo("my-head", 2.5))
    head = http.get("/v1/models").json()["data"][1]
    assert (head["id"], head["parent"], head["tau"]) == ("my-head", MODEL, 2.5)
    assert http.get("/v1/models/my-head").json() == head
    assert http.get("/get_server_info").json()["speculative_draft_model_path"] == "my-head"
    error = assert_refused(http.post("/v1/completions", json={"prompt": "x", "model": "my-head"}), 404)
    assert error["code"] == "model_not_found"
