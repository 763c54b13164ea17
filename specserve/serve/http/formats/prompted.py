"""Chats with tools for templates that do not write all of them: the tools, the calls and their results become text of
the messages that every template writes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specserve.serve.http.formats.grammars import write_calls
from specserve.serve.http.formats.probe import ToolWays

_EXAMPLE = ("name_of_the_tool", {"name_of_an_argument": "value"})
_PROMPT = """You can call these tools. Each is a JSON object with its name, and a JSON schema of its arguments:
{tools}

To call a tool, answer with its name and arguments, written like this, and nothing else:
{example}
You get its result in the next message. Where no tool helps, answer as usual."""


def as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], ways: ToolWays, wording: str
) -> list[dict[str, Any]]:
    """Return messages as the template can write them, of a chat in which these tools are offered."""
    found: list[dict[str, Any]] = []
    for message in messages:
        turn = dict(message)
        if turn.get("tool_calls") and not ways.writes_calls:
            calls = [(each["function"]["name"], each["function"]["arguments"]) for each in turn.pop("tool_calls")]
            turn["content"] = _joined(turn.get("content"), write_calls(wording, calls))
        if turn["role"] == "tool" and not ways.writes_results:
            turn = {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
            if found and found[-1]["role"] == "user":
                found[-1]["content"] = _joined(found[-1]["content"], turn["content"], "\n")
                continue
        found.append(turn)
    if not tools:
        return found
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    if ways.tools == "system":
        return _with_system(found, "", ways, {"tools": json.dumps(list(tools), ensure_ascii=False)})
    example = write_calls(wording, [_EXAMPLE])
    return _with_system(found, _PROMPT.format(tools=listed, example=example), ways, {})


def _with_system(
    messages: list[dict[str, Any]], text: str, ways: ToolWays, members: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the messages with this text, and these members, in the system's, or else in the first of the user's."""
    if ways.takes_system:
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": ""}, *messages]
        first, *rest = messages
        return [{**first, "content": _joined(first["content"], text), **members}, *rest]
    place = next((i for i, turn in enumerate(messages) if turn["role"] == "user"), 0)
    turn = {**messages[place], "content": _joined(text, messages[place].get("content"))}
    return [*messages[:place], turn, *messages[place + 1 :]]


def _joined(text: str | None, more: str | None, between: str = "\n\n") -> str:
    return between.join(each for each in (text, more) if each)
