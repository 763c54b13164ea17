"""Laws of answering conversations with tools anew: the target is asked as a server asks it, results that were recorded
follow the calls that were recorded and no others, and what is written trains as what was generated."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted

from specserve.answers import regenerate as module
from specserve.answers.account import Account
from specserve.answers.regenerate import AnswerSettings
from specserve.data.conversations import Conversation, TokenRow, parse_row
from specserve.data.documents import tokenize
from specserve.data.sources import load_mixture
from specserve.serve.http.formats.grammars import write_calls
from specserve.serve.http.formats.reasoning import AnswerSyntax
from specserve.serve.http.openai.bodies import ChatBody

SETTINGS = AnswerSettings(max_tokens=90)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": SCHEMA}}
FAMILIES = ["qwen2.5", "qwen3", "qwen3-coder", "mistral", "llama-3", "glm-4.5", "gpt-oss", "deepseek-v3.1", "gemma-3"]
regenerate: Any = module.regenerate  # a scripted engine is not of the engine's type


def recorded(*arguments: dict[str, Any], **row: Any) -> Conversation:
    """A conversation whose author's model called the tool with these arguments, and then answered."""
    calls = [{"id": f"r{i}", "function": {"name": "add", "arguments": each}} for i, each in enumerate(arguments)]
    results = [{"role": "tool", "content": f"result {i}", "tool_call_id": f"r{i}"} for i in range(len(calls))]
    asked = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    turns = [asked[0], {"role": "assistant", "content": None, "tool_calls": calls}, *results[::-1]]
    turns += [{"role": "assistant", "content": "old"}, asked[1], {"role": "assistant", "content": "old"}]
    found = parse_row({"messages": turns, "tools": [TOOL], **row}, "here:1")
    assert isinstance(found, Conversation)
    return found


def calling(family: str, *arguments: dict[str, Any]) -> Any:
    """Return the script of a target that calls the tool so, in its family's format, before it has had a result."""
    tokenizer = Scripted(family, lambda _prompt, _seed: "").tokenizer
    syntax = AnswerSyntax(tokenizer, "auto", "auto")
    calls = write_calls(syntax.tool_format.wording_for(tokenizer.template), [("add", each) for each in arguments])

    def reply(prompt: str, seed: int) -> str:
        del seed
        if "result 0" not in prompt:
            return calls
        return "<|channel|>final<|message|>yo" if family == "gpt-oss" else "yo"

    return reply


def run(family: str, reply: Any, row: Conversation, output: Path, settings: Any = SETTINGS) -> tuple[Any, Account]:
    engine = Scripted(family, reply, max_model_len=900)
    return engine, regenerate(engine, [row], output, settings)


def written(output: Path) -> dict[str, Any]:
    [line] = output.read_text().splitlines()
    return json.loads(line)


@pytest.mark.parametrize("family", FAMILIES)
def test_results_follow_the_calls_that_were_recorded(tmp_path: Path, family: str) -> None:
    """In every format: each prompt is the one that a server makes of the row's beginning, and training sees it."""
    arguments = [{"a": 1}] if family in ("llama-3", "gpt-oss", "gemma-3") else [{"a": 1}, {"a": 2}]  # at once
    settings = AnswerSettings(max_tokens=90, thinking="drop" if family == "gpt-oss" else "keep")
    engine, account = run(family, calling(family, *arguments), recorded(*arguments), tmp_path / "o.jsonl", settings)
    assert (account.num_rows, account.num_answers, account.shortened.total()) == (1, 3, 0)
    row = written(tmp_path / "o.jsonl")
    assert row["finish_reasons"] == ["stop"] * 3
    prompts = [engine.vocabulary.encode(prompt, add_special_tokens=False).ids for prompt in engine.prompts]
    assert "add" in engine.prompts[0], "the tool is offered"
    assert all(f"result {i}" in engine.prompts[1] for i in range(len(arguments)))

    [source] = load_mixture([str(tmp_path / "o.jsonl")])
    [kept] = (*source.train, *source.held_out)
    assert isinstance(kept, Conversation)
    [document] = tokenize([kept], engine.tokenizer, 900).documents
    said = engine.tokenizer.decode(document.token_ids[document.loss_mask].tolist(), skip_special_tokens=False)
    assert said.count("yo") == 2
    assert ("add" in said, "result" in said) == (True, False), "calls bear loss, and their results none"
    if family not in ("qwen3", "glm-4.5", "gpt-oss", "deepseek-v3.1"):  # these write earlier answers otherwise
        assert document.token_ids[: len(prompts[-1])].tolist() == prompts[-1]
    if "tools" in row:
        calls = row["messages"][1]["tool_calls"]
        assert [call["function"]["arguments"] for call in calls] == arguments
        ids = {f"result {i}": call["id"] for i, call in enumerate(calls)}
        results = [message for message in row["messages"] if message["role"] == "tool"]
        assert {message["content"]: message["tool_call_id"] for message in results} == ids
        body = ChatBody.model_validate({"messages": row["messages"][:-1], "tools": row["tools"]})
        question = AnswerSyntax(engine.tokenizer, "auto", "auto").question(body)
        assert engine.tokenizer.render_chat(question.messages, tools=question.tools) == prompts[-1]
    engine, _ = run(family, calling(family, *arguments), recorded(*arguments), tmp_path / "p.jsonl", settings)
    assert (tmp_path / "p.jsonl").read_bytes() == (tmp_path / "o.jsonl").read_bytes(), "ids of calls too"


@pytest.mark.parametrize("family", ["qwen2.5", "mistral", "qwen3-coder"])
def test_the_tokens_that_were_generated_come_back(tmp_path: Path, family: str) -> None:
    _, account = run(family, calling(family, {"a": 1}), recorded({"a": 1}), tmp_path / "o.jsonl")
    assert account.num_exact == account.num_compared == 3


@pytest.mark.parametrize("called", [[{"a": 2}], [], [{"a": 1}, {"a": 1}]], ids=str)
def test_other_calls_end_the_conversation(tmp_path: Path, called: list[dict[str, Any]]) -> None:
    """Nobody has their results. The answer that made them, or made none, is learned."""
    reply = calling("qwen2.5", *called) if called else lambda _prompt, _seed: "no call"
    _, account = run("qwen2.5", reply, recorded({"a": 1}), tmp_path / "o.jsonl")
    assert (account.num_answers, account.shortened) == (1, {"calls that were not recorded": 1})
    row = written(tmp_path / "o.jsonl")
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    calls = row["messages"][1].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == called


def test_the_same_values_in_another_order_are_the_same_call(tmp_path: Path) -> None:
    spaced = '<tool_call>\n{"arguments":{"b":  2, "a":1},"name":"add"}\n</tool_call>'
    reply = lambda prompt, _seed: "yo" if "result 0" in prompt else spaced  # noqa: E731
    _, account = run("qwen2.5", reply, recorded({"a": 1, "b": 2}), tmp_path / "o.jsonl")
    assert (account.num_answers, account.shortened.total()) == (3, 0)
    assert account.num_exact == 2, "the template writes the call in its own way"


def test_a_call_that_breaks_off_is_kept_as_the_tokens_it_was(tmp_path: Path) -> None:
    """No message can hold it; as a later answer it ends the conversation before it."""
    settings = AnswerSettings(max_tokens=18)
    engine, account = run("qwen2.5", calling("qwen2.5", {"a": 1}), recorded({"a": 1}), tmp_path / "o.jsonl", settings)
    assert account.shortened == {"a call does not end within max_tokens": 1}
    [source] = load_mixture([str(tmp_path / "o.jsonl")])
    [row] = (*source.train, *source.held_out)
    assert isinstance(row, TokenRow)
    assert engine.tokenizer.decode(row.token_ids[~row.loss_mask].tolist(), skip_special_tokens=False) in engine.prompts
    assert row.loss_mask.sum() == 18

    long = calling("qwen2.5", {"a": 1}, *[{"a": i} for i in range(9)])
    reply = lambda prompt, seed: "hi" if "two" not in prompt else long(prompt, seed)  # noqa: E731
    turns = [{"role": role, "content": text} for role, text in (("user", "one"), ("assistant", "a"), ("user", "two"))]
    row = parse_row({"messages": turns, "tools": [TOOL]}, "here:1", needs_answers=False)
    _, account = run("qwen2.5", reply, row, tmp_path / "p.jsonl", AnswerSettings(max_tokens=40))
    assert account.shortened == {"a call does not end within max_tokens": 1}
    assert [message["content"] for message in written(tmp_path / "p.jsonl")["messages"]] == ["one", "hi"]


def test_what_cannot_be_asked_is_counted(tmp_path: Path) -> None:
    question, result = {"role": "user", "content": "q"}, {"role": "tool", "content": "2"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    rows = [
        {"messages": [question, call, result]},
        {"messages": [question, result, {"role": "assistant", "content": "a"}], "tools": [TOOL]},
        {"messages": [question], "tools": [{"name": "not a name"}]},
        {"messages": [question], "tools": '[{"name": "add"}]'},  # without its wrapping, as text
    ]
    asked = [parse_row(row, "d:1", needs_answers=False) for row in rows]
    engine = Scripted("qwen2.5", lambda _prompt, _seed: "yo", max_model_len=900)
    account = regenerate(engine, asked, tmp_path / "o.jsonl", SETTINGS)
    assert account.left_out == {
        "calls tools, and offers none": 1,
        "holds results of tools that no answer calls": 1,
        "refused by the chat template or the engine": 1,
    }
    assert (account.num_rows, written(tmp_path / "o.jsonl")["tools"][0]["function"]["name"]) == (1, "add")
