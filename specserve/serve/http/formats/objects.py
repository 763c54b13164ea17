"""Formats whose calls are JSON objects with a name and arguments: of Qwen and Hermes, Llama 3, Mistral, Phi 4, Command
and Nemotron."""

import json
from typing import Any

from specserve.serve.http.formats.reader import NAME, Reader, Reading, Shape, matched
from specserve.serve.http.formats.written import read_value

_SPACE = Shape(r"\s*(?=\S)")
_ARGUMENTS = ("arguments", "parameters", "args", "tool_arguments")
_BESIDE = frozenset(("name", "tool_name", "type", "id", "tool_call_id", "index", "function"))  # other members of a call
_OBJECT_HEADS = [
    Shape(rf'\s*\{{\s*{kind}\s*:\s*"{NAME}"\s*,\s*"{arguments}"\s*:\s*(?=\{{)')
    for kind in (
        *('"name"', r'"type"\s*:\s*"function"\s*,\s*"name"', r'"type"\s*:\s*"function"\s*,\s*"function"'),
        *('"tool_name"', r'"tool_call_id"\s*:\s*"[0-9]+"\s*,\s*"tool_name"'),
    )
    for arguments in ("arguments", "parameters")
]


def _object_call(reader: Reader, before: str, *, is_certain: bool = True) -> Reading[bool]:
    """Take an object that is a call, or give it back, with the text `before` it that promised a call. Where that is
    not certain, only an object whose first members are a call's is one, and all else is left behind `before`. Returns
    whether it was a call."""
    head = yield from reader.match(*_OBJECT_HEADS)
    if head and head["name"] in reader.tools:
        yield from reader.arguments(reader.open_call(head["name"]))
        tail: list[str] = []
        yield from reader.json(tail.append, depth=1)
        if not _is_tail("".join(tail)):
            reader.give_back("".join(tail))
        return True
    if not head and not is_certain:
        reader.give_back(before)
        return False
    body = [matched(head)]
    if not head and (space := (yield from reader.match(_SPACE))):
        body.append(space[0])
    text = "" if head else (yield from reader.python_object())
    body.append(text)
    if not text:
        yield from reader.json(body.append, depth=1 if head else 0)
    call = _as_call("".join(body), reader)
    if call is None:
        reader.give_back(before + "".join(body))
        return False
    name, arguments = call
    reader.open_call(name)(json.dumps(arguments, ensure_ascii=False))
    return True


def _is_tail(text: str) -> bool:
    """Return whether a call's object may end like this behind its arguments: with further members (Mistral's have an
    id), or with the last bracket forgotten."""
    if text.strip() in ("", "}"):
        return True
    try:
        json.loads('{"": 0' + text)
    except (ValueError, RecursionError):
        return False
    return True


def _as_call(text: str, reader: Reader) -> tuple[str, dict[str, Any]] | None:
    """Return the name and arguments in the text of an object whose members stand in another order, have other names, or
    are in OpenAI's nesting. None where it is no call, or has no arguments and a member that is none of a call's."""
    try:
        call = read_value(text)
        inside = call.get("function", {})
        call = {**call, "name": inside} if isinstance(inside, str) else inside or call
        name = call.get("name", call.get("tool_name"))
        is_certain = any(key in call for key in _ARGUMENTS) or call.keys() <= _BESIDE
        arguments = next((call[key] for key in _ARGUMENTS if key in call), None)
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, SyntaxError, RecursionError, AttributeError):
        return None
    if is_certain and isinstance(name, str) and name in reader.tools and isinstance(arguments, dict):
        return name, arguments
    return None


_FENCES = [Shape(rf"\s*```{language}\s*(?=[\[{{])") for language in ("", "json")]
_END_FENCE = Shape(r"\s*```")
_BEGIN_LIST = Shape(r"\s*\[\s*(?=\{)")
_NEXT_ITEM = Shape(r"\s*,\s*(?=\{)")
_END_LIST = Shape(r"\s*\]")


def _read_list(reader: Reader, before: str) -> Reading[bool]:
    """Take a list of objects that are calls, or one alone, behind a mark `before` it that promised it, and where there
    was one maybe in a fence. Returns whether the last was a call."""
    fence = (yield from reader.match(*_FENCES)) if before else None
    begin = yield from reader.match(_BEGIN_LIST)
    opened = before + matched(fence) + matched(begin)
    is_call = yield from _object_call(reader, opened, is_certain=bool(before))
    if not is_call and not before:
        return False
    while begin and (between := (yield from reader.match(_NEXT_ITEM))):
        is_call = yield from _object_call(reader, between[0])
    end = (yield from reader.match(_END_LIST)) if begin else None
    if fence and is_call:
        yield from reader.match(_END_FENCE)
    if end and not is_call:
        reader.give_back(end[0])
    return is_call


_END_TOOL_CALL = Shape(r"\s*</tool_call>")
_NEXT_OBJECT = Shape(r"\s*[;,]?\s*(?=\{)")


def read_marked(mark: str, end: Shape | None, reader: Reader) -> Reading[None]:
    """<tool_call>{"name": "f", "arguments": {}}</tool_call>, or {"name": "f", "parameters": {}} behind <|python_tag|>,
    or a list of them. An answer may begin with a call without the mark, and more may stand behind a call, with a
    semicolon between."""
    before = ""
    while True:
        is_call = yield from _read_list(reader, before)
        while is_call:
            if end:
                yield from reader.match(end)
            between = yield from reader.match(_NEXT_OBJECT)
            if not between:
                break
            is_call = yield from _object_call(reader, between[0], is_certain=False)
        before = yield from reader.content_until(mark)
        if not before:
            return


def read_hermes(reader: Reader) -> Reading[None]:
    """Read answers of Qwen 2.5 and 3, of Hermes, and of models that are shown how to call tools by our own prompt."""
    return read_marked("<tool_call>", _END_TOOL_CALL, reader)


def read_llama3(reader: Reader) -> Reading[None]:
    return read_marked("<|python_tag|>", None, reader)


_MISTRAL_HEADS = [
    Shape(rf"\s*{NAME}\s*{between}(?=\{{)") for between in ("", r"\[ARGS\]\s*", r"\[CALL_ID\][^\[\]]*\[ARGS\]\s*")
]


def read_mistral(reader: Reader) -> Reading[None]:
    """[TOOL_CALLS]f[ARGS]{}, or formerly [TOOL_CALLS][{"name": "f", "arguments": {}}]"""
    while mark := (yield from reader.content_until("[TOOL_CALLS]")):
        head = yield from reader.match(*_MISTRAL_HEADS)
        if head:
            yield from reader.named_call(head["name"], mark + head[0])
        else:
            yield from _read_list(reader, mark)


def read_lists(begins: tuple[str, ...], end: Shape, reader: Reader) -> Reading[None]:
    """Read <|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>, <TOOLCALL>[]</TOOLCALL>, and what else
    has a list of objects, or one of them, behind a mark."""
    while mark := (yield from reader.content_until(*begins)):
        if (yield from _read_list(reader, mark)):
            yield from reader.match(end)


def read_phi4(reader: Reader) -> Reading[None]:
    return read_lists(("functools", "<|tool_call|>"), Shape(r"\s*<\|/tool_call\|>"), reader)


def read_command(reader: Reader) -> Reading[None]:
    """Read answers of Command since R7B, and of those before, whose calls stand in a fence behind "Action:"."""
    return read_lists(("<|START_ACTION|>", "Action:"), Shape(r"\s*<\|END_ACTION\|>"), reader)


def read_nemotron(reader: Reader) -> Reading[None]:
    return read_lists(("<TOOLCALL>",), Shape(r"\s*</TOOLCALL>"), reader)
