"""The probes that show how a chat template writes a model's answers: chats are rendered, and what comes of them is read
back. They find the format of calls of tools, the marks of reasoning, and what the template writes at all."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specserve.chat_template import REASONING_NAMES
from specserve.errors import RequestError
from specserve.serve.engine.interface import TokenizerLike
from specserve.serve.http.formats.reader import Part, Reader, Reading
from specserve.serve.http.formats.tools import GENERIC, NO_CALLS, TOOL_FORMATS, ToolFormat
from specserve.serve.settings import ToolParser

PROBE, _SAID = "zqprobe", "zqsaid"  # words that no template writes of itself
_QUESTION = {"role": "user", "content": "1"}
_SCHEMA = {"type": "object", "properties": {PROBE: {"type": "integer"}, "text": {"type": "string"}}}
_ARGUMENTS = {PROBE: 1, "text": "a b"}
_TOOL = {"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": _SCHEMA}}
_IDS = ("zqprobe01", f"functions.{PROBE}:0")  # Mistral's have nine characters, Kimi's the name of the tool


@dataclass(frozen=True)
class ToolWays:
    """The ways in which chats with tools reach a model, and calls come back."""

    format: ToolFormat
    # of the tools: the template's variable, a member of the system message, or a prompt of our own
    tools: Literal["variable", "system", "prompt"] = "variable"
    writes_calls: bool = True  # the template does; else they stand in the content
    writes_results: bool = True  # the template does; else the user says them
    takes_system: bool = True  # the template has a system message; else the user says it

    @property
    def are_usual(self) -> bool:
        """Return whether the template writes all of a chat with tools."""
        return self.tools == "variable" and self.writes_calls and self.writes_results


def find_tool_ways(name: ToolParser, tokenizer: TokenizerLike) -> ToolWays:
    """Return the ways of the format with that name. With "auto" it is the one that reads the call back that the
    template writes; where the template writes tools and no calls, the one of its signs; else the generic one, which
    our own prompt shows to the model."""
    if name == "none" or not tokenizer.has_chat_template:
        return ToolWays(NO_CALLS)
    template = tokenizer.template
    answers = list(_answers(tokenizer, _called(), tools=[_TOOL]))
    writes_calls = any(PROBE in answer for answer in answers)
    tools: Literal["variable", "system", "prompt"] = "variable" if template.reads_tools else "prompt"
    if tools == "prompt" and _writes(tokenizer, [{"role": "system", "content": "1", "tools": PROBE}, _QUESTION]):
        tools = "system"
    found = next((each for each in (GENERIC, *TOOL_FORMATS) if name == each.name), None)
    if found is None:
        found = _reading_back(answers)
    if found is None and not writes_calls and tools != "prompt":
        found = next((each for each in TOOL_FORMATS if each.sign and template.mentions(each.sign)), None)
    found = found or GENERIC
    result = {"role": "tool", "content": PROBE, "tool_call_id": _IDS[0], "name": PROBE}
    return ToolWays(
        found,
        "prompt" if found is GENERIC else tools,
        writes_calls and found is not GENERIC,
        any(_writes(tokenizer, [_QUESTION, asked, {**result, "tool_call_id": i}]) for i, asked in _called()),
        _writes(tokenizer, [{"role": "system", "content": PROBE}, _QUESTION]),
    )


def written_reasoning(tokenizer: TokenizerLike) -> tuple[str, str] | None:
    """Return what the template writes into an answer before and behind its reasoning, without space around it; before
    it is nothing where the prompt has begun it. None where it writes no reasoning, or nothing behind it."""
    said = {"role": "assistant", "content": _SAID, **dict.fromkeys(REASONING_NAMES, PROBE)}
    for answer in _answers(tokenizer, [("", said)]):
        before, _, behind = answer.partition(PROBE)
        between, found, _ = behind.partition(_SAID)
        if found and between.strip():
            return before.strip(), between.strip()
    return None


def _called() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield assistant's messages that call the probe's tool, with the ids of their calls."""
    for call_id in _IDS:
        call = {"id": call_id, "type": "function", "function": {"name": PROBE, "arguments": _ARGUMENTS}}
        yield call_id, {"role": "assistant", "content": "", "tool_calls": [call]}


def _reading_back(answers: Sequence[str]) -> ToolFormat | None:
    """Return the format that returns the probe's call, the one whose reading leaves the least text over."""
    found: dict[int, ToolFormat] = {}
    for answer in answers:
        for each in TOOL_FORMATS:
            part = _read(each.read, answer)
            if [(call.name, _loaded(call.arguments)) for call in part.tool_calls] == [(PROBE, _ARGUMENTS)]:
                found.setdefault(len(part.content.strip()), each)
    return found[min(found)] if found else None


def _read(read: Callable[[Reader], Reading[None]], answer: str) -> Part:
    reader = Reader(read, lambda: PROBE, tools={PROBE: _SCHEMA})
    return reader.push(answer) + reader.finish()


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _answers(tokenizer: TokenizerLike, said: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> Iterator[str]:
    """Yield what a model would have written that gave these answers to a question: what the template writes behind the
    prompt, up to a token that ends a turn."""
    for _, message in said:
        for given in (tools, None) if tools else (None,):
            try:
                prompt = tokenizer.render_chat([_QUESTION], tools=given)
                whole = tokenizer.render_chat([_QUESTION, message], add_generation_prompt=False, tools=given)
            except RequestError:
                continue
            start = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
            answer = whole[start:]
            end = next((i for i, token_id in enumerate(answer) if token_id in tokenizer.end_ids), len(answer))
            yield tokenizer.decode(answer[:end], skip_special_tokens=False)


def _writes(tokenizer: TokenizerLike, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the template writes the probe's word of these messages."""
    try:
        ids = tokenizer.render_chat(messages)
    except RequestError:
        return False
    return PROBE in tokenizer.decode(ids, skip_special_tokens=False)
