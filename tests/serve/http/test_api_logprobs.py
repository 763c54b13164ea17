"""Log-probabilities of both endpoints, whole and streamed."""

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from fakes import MODEL, STORY, UNICODE_STORY, FakeTokenizer

from specserve.serve.http.openai.logprobs import CompletionLogprobs, TokenTexts, chat_logprobs
from specserve.serve.requests.request import PromptToken, TokenLogprobs
from specserve.tokenizer import Tokenizer

FLOOR = -9999.0


def _chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": 3}


def test_a_completion_lists_tokens_and_where_they_begin(client: openai.OpenAI):
    found = client.completions.create(model=MODEL, prompt="x", max_tokens=3, logprobs=3).choices[0].logprobs
    assert found is not None
    assert found.tokens == ["a", "b", "c"]
    assert found.token_logprobs == [-1.5] * 3
    assert found.text_offset == [0, 1, 2]
    assert found.top_logprobs == [{"!": -0.25, token: -1.5, "#": FLOOR} for token in "abc"]
    # the token itself is reported besides the likeliest
    found = client.completions.create(model=MODEL, prompt="x", max_tokens=1, logprobs=1).choices[0].logprobs
    assert found is not None
    assert found.top_logprobs == [{"!": -0.25, "a": -1.5}]
    found = client.completions.create(model=MODEL, prompt="x", max_tokens=1, logprobs=0).choices[0].logprobs
    assert found is not None
    assert found.top_logprobs == [{"a": -1.5}]


def test_a_chat_lists_one_object_per_token(client: openai.OpenAI):
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        max_completion_tokens=2,
        logprobs=True,
        top_logprobs=1,
    )
    assert reply.choices[0].logprobs is not None
    top = [{"token": "!", "logprob": -0.25, "bytes": [33]}]
    assert reply.choices[0].logprobs.model_dump() == {
        "content": [
            {"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": top},
            {"token": "b", "logprob": -1.5, "bytes": [98], "top_logprobs": top},
        ],
        "refusal": None,
    }


def test_no_logprobs_unless_asked(http: httpx.Client):
    for path, body in [("completions", {"prompt": "x"}), ("chat/completions", _chat("x") | {"logprobs": None})]:
        body.pop("top_logprobs", None)
        assert http.post(f"/v1/{path}", json=body).json()["choices"][0]["logprobs"] is None


def test_tokens_of_one_character_share_its_offset_and_have_no_bytes(http: httpx.Client):
    reply = http.post("/v1/completions", json={"prompt": "unicode", "logprobs": 0}).json()["choices"][0]
    assert reply["text"] == UNICODE_STORY
    assert reply["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5]
    content = http.post("/v1/chat/completions", json=_chat("unicode")).json()["choices"][0]["logprobs"]["content"]
    assert [item["bytes"] for item in content] == [[97], *[None] * 9, [122], [46]]


@pytest.mark.parametrize("name", ["text", "token ids"])
def test_tokens_may_be_named_by_their_ids(http: httpx.Client, name: str):
    extra = {"return_tokens_as_token_ids": name == "token ids", "max_tokens": 1}
    spell = {"text": chr, "token ids": "token_id:{}".format}[name]
    found = http.post("/v1/completions", json={"prompt": "x", "logprobs": 1} | extra).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [spell(97)]
    assert found["top_logprobs"] == [{spell(33): -0.25, spell(97): -1.5}]
    reply = http.post("/v1/chat/completions", json=_chat("x") | extra).json()
    (token,) = reply["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == (spell(97), [97])
    assert [top["token"] for top in token["top_logprobs"]] == [spell(33), spell(97), spell(35)]


@pytest.mark.parametrize("prompt", ["x", "unicode", "held", "held unicode"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_streamed_logprobs_join_to_the_whole_ones(http: httpx.Client, path: str, prompt: str):
    body = _chat(prompt) if path.startswith("chat") else {"prompt": [prompt, "y"], "logprobs": 2}
    body |= {"n": 2, "seed": 0}
    whole = http.post(f"/v1/{path}", json=body).json()["choices"]
    events = http.post(f"/v1/{path}", json=body | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event and "[DONE]" not in event]
    joined: list[dict[str, Any]] = [{} for _ in whole]
    for choice in itertools.chain.from_iterable(chunk["choices"] for chunk in chunks):
        content = choice.get("delta", choice)
        if choice["logprobs"] is not None:
            assert content.get("content", content.get("text")) is not None  # tokens are content, if of no length
        for key, values in (choice["logprobs"] or {}).items():
            joined[choice["index"]].setdefault(key, []).extend(values or [])
    expected = [{key: values or [] for key, values in choice["logprobs"].items()} for choice in whole]
    assert joined == expected
    if "held" in prompt:  # the text comes last, the tokens as they are made
        texts = [chunk["choices"][0].get("text", "") for chunk in chunks if chunk["choices"][0]["index"] == 0]
        assert all(text == "" for text in texts[:-1])
        assert len(texts) > len(STORY) // 2


def test_minus_infinity_and_nan_are_the_floor_as_json_has_neither():
    entry = TokenLogprobs(97, -math.inf, ((98, math.nan),))
    texts = TokenTexts(FakeTokenizer())
    assert CompletionLogprobs(texts)(0, [entry])["top_logprobs"] == [{"b": FLOOR, "a": FLOOR}]
    (token,) = chat_logprobs(texts, [entry])
    assert (token["logprob"], token["top_logprobs"][0]["logprob"]) == (FLOOR, FLOOR)


def test_a_token_keeps_its_leading_space_where_the_decoder_strips_the_first():
    class Stripping(FakeTokenizer):
        words = (" once", " upon", " a", "<end>")

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            return "".join(self.words[i] for i in ids if i < 3 or not skip_special_tokens).removeprefix(" ")

    entries = [TokenLogprobs(token_id, -1.0, ()) for token_id in (0, 2, 3, 1)]
    found = CompletionLogprobs(TokenTexts(Stripping()))(0, entries)
    assert found["tokens"] == [" once", " a", "<end>", " upon"]
    assert found["text_offset"] == [0, 5, 7, 7]  # special tokens are no text


@pytest.mark.parametrize("is_sent", [True, False])
def test_offsets_point_into_an_echo_with_special_tokens(is_sent: bool):
    """Those that a client has written are shown, and those that were put before its text are not."""

    class Marked(FakeTokenizer):
        words = ("<s>", "once", " upon")

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            return "".join(self.words[i] for i in ids if i or not skip_special_tokens)

    prompt = [PromptToken(0, None, 0), *(PromptToken(i, TokenLogprobs(i, -1.0, ()), 1) for i in (1, 2))]
    echo = "<s>once upon" if is_sent else "once upon"
    spell = CompletionLogprobs(TokenTexts(Marked()), echoes=[echo])
    found = spell(0, [TokenLogprobs(i, -1.0, ()) for i in (0, 1, 2)], prompt)
    begin = 3 if is_sent else 0
    assert found["text_offset"] == [0, begin, begin + 4, len(echo), len(echo), len(echo) + 4]
    assert (echo + "once upon").startswith("once", found["text_offset"][4])


def test_a_prompt_that_ends_within_a_character_moves_no_token_before_it():
    token_ids = [*b"ab", 0xC3]  # of two bytes, of which the first is echoed as the replacement character
    prompt = [PromptToken(i, None, 0) for i in token_ids]
    texts = TokenTexts(FakeTokenizer())
    found = CompletionLogprobs(texts, echoes=["ab\ufffd"])(0, [], prompt)
    assert found["text_offset"] == [0, 1, 2]


def test_offsets_point_at_the_tokens_in_the_text(pydoc_tokenizer: Tokenizer):
    text = 'def f(x):\n    """Größe, 数, 😀 é."""\n    return  x\n' * 3
    token_ids = pydoc_tokenizer.encode(text, add_special_tokens=False)
    found = CompletionLogprobs(TokenTexts(pydoc_tokenizer))(0, [TokenLogprobs(i, -1.0, ()) for i in token_ids])
    whole = [(t, at) for t, at in zip(found["tokens"], found["text_offset"], strict=True) if "\ufffd" not in t]
    assert len(whole) > len(token_ids) / 2
    assert len(whole) < len(token_ids)  # some characters took several tokens
    assert all(text.startswith(token, offset) for token, offset in whole)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echo_has_the_logprobs_of_its_prompt(client: openai.OpenAI, max_tokens: int, is_stream: bool):
    """As evaluations ask for them that compare how likely given texts are."""
    asked: dict[str, Any] = {"prompt": ["xyz", "AB"], "echo": True, "logprobs": 1, "n": 2, "max_tokens": max_tokens}
    reply = client.completions.create(model=MODEL, stream=is_stream, **asked)
    pieces = [chunk.choices[0] for chunk in reply] if is_stream else reply.choices
    for index, prompt in enumerate(["xyz", "xyz", "AB", "AB"]):
        found = [piece for piece in pieces if piece.index == index]
        text = prompt + STORY[:max_tokens] if max_tokens else prompt
        assert "".join(piece.text for piece in found) == text
        assert found[-1].finish_reason == "length"
        lists = {
            name: [item for piece in found if piece.logprobs for item in getattr(piece.logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        assert lists["tokens"] == list(text)
        assert lists["text_offset"] == list(range(len(text)))
        assert lists["token_logprobs"] == [None] + [-1.5] * (len(text) - 1)
        assert lists["top_logprobs"] == [None, *({"!": -0.25, token: -1.5} for token in text[1:])]
    if not is_stream:
        assert reply.usage.completion_tokens == 4 * max_tokens


def test_prompt_logprobs_are_spelled_as_at_vllm(http: httpx.Client):
    expected = [None, {"66": {"logprob": -1.5, "rank": 2, "decoded_token": "B"}}]
    expected[1] |= {"33": {"logprob": -0.25, "rank": 1, "decoded_token": "!"}}
    reply = http.post("/v1/completions", json={"prompt": "AB", "prompt_logprobs": 1, "n": 2}).json()
    assert [choice["prompt_logprobs"] for choice in reply["choices"]] == [expected] * 2
    assert [choice["logprobs"] for choice in reply["choices"]] == [None] * 2
    chat = {"messages": [{"role": "user", "content": "AB"}], "prompt_logprobs": 0}
    items = http.post("/v1/chat/completions", json=chat).json()["prompt_logprobs"]
    assert items[0] is None
    assert [list(item) for item in items[1:4]] == [[str(ord(letter))] for letter in "use"]
    error = http.post("/v1/completions", json={"prompt": "AB", "prompt_logprobs": 1, "stream": True}).json()["error"]
    assert error["param"] == "prompt_logprobs"
