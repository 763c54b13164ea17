"""Formats whose calls are JSON objects with a name and arguments: of Qwen and Hermes, Llama 3, Mistral, Phi 4, Command
R7B and Nemotron."""

import json
from typing import Any

from specserve.serve.http.formats.reader import NAME, Reader, Reading, Shape, matched
from specserve.serve.http.formats.written import read_value

_SPACE = Shape(r"\s*(?=\S)")
_OBJECT_HEADS = [
    Shape(rf'\s*\{{\s*{kind}"name"\s*:\s*"{NAME}"\s*,\s*"{arguments}"\s*:\s*(?=\{{)')
    for kind in ("", r'"type"\s*:\s*"function"\s*,\s*')
    for arguments in ("arguments", "parameters")
]


def _object_call(reader: Reader, before: str, *, is_certain: bool = True) -> Reading[bool]:
    """Take an object that is a call, or give it back, with the text `before` it that promised a call. Where that is
    not certain, only an object whose first members are a call's is one, and all else is left. Returns whether it was a
    call."""
    head = yield from reader.match(*_OBJECT_HEADS)
    if head and head["name"] in reader.tools:
        yield from reader.arguments(reader.open_call(head["name"]))
        tail: list[str] = []
        yield from reader.json(tail.append, depth=1)
        if not _is_tail("".join(tail)):
            reader.give_back("".join(tail))
        return True
    if not head and not is_certain:
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
    """Return the name and arguments in the text of an object whose members stand in another order, or in OpenAI's
    nesting."""
    try:
        call = read_value(text)
        call = call.get("function", call)
        name, arguments = call.get("name", call.get("tool_name")), call.get("arguments", call.get("parameters"))
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, SyntaxError, RecursionError, AttributeError):
        return None
    if not (isinstance(name, str) and name in reader.tools and isinstance(arguments, dict)):
        return None
    return name, arguments


_END_TOOL_CALL = Shape(r"\s*</tool_call>")
_NEXT_OBJECT = Shape(r"\s*[;,]?\s*(?=\{)")


def read_marked(mark: str, end: Shape | None, reader: Reader) -> Reading[None]:
    """<tool_call>{"name": "f", "arguments": {}}</tool_call>, or {"name": "f", "parameters": {}} behind <|python_tag|>.
    An answer may begin with a call without the mark, and more may stand behind a call, with a semicolon between."""
    before = ""
    while True:
        is_call = yield from _object_call(reader, before, is_certain=bool(before))
        while is_call:
            if end:
                yield from reader.match(end)
            between = yield from reader.match(_NEXT_OBJECT)
            if not between:
                break
            is_call = yield from _object_call(reader, between[0], is_certain=False)
            if not is_call:
                reader.give_back(between[0])
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
_BEGIN_LIST = Shape(r"\s*\[\s*(?=\{)")
_NEXT_ITEM = Shape(r"\s*,\s*(?=\{)")
_END_LIST = Shape(r"\s*\]")


def read_list(reader: Reader, before: str) -> Reading[None]:
    """Take a list of objects that are calls, or one alone, behind a mark `before` it that promised it."""
    begin = yield from reader.match(_BEGIN_LIST)
    is_call = yield from _object_call(reader, before + matched(begin))
    while begin and (between := (yield from reader.match(_NEXT_ITEM))):
        is_call = yield from _object_call(reader, between[0])
    end = (yield from reader.match(_END_LIST)) if begin else None
    if end and not is_call:
        reader.give_back(end[0])


def read_mistral(reader: Reader) -> Reading[None]:
    """[TOOL_CALLS]f[ARGS]{}, or formerly [TOOL_CALLS][{"name": "f", "arguments": {}}]"""
    while mark := (yield from reader.content_until("[TOOL_CALLS]")):
        head = yield from reader.match(*_MISTRAL_HEADS)
        if head:
            yield from reader.named_call(head["name"], mark + head[0])
        else:
            yield from read_list(reader, mark)


def read_lists(begins: tuple[str, ...], end: Shape, reader: Reader) -> Reading[None]:
    """Read <|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>, <TOOLCALL>[]</TOOLCALL>, and what else
    has a list of objects, or one of them, behind a mark."""
    while mark := (yield from reader.content_until(*begins)):
        yield from read_list(reader, mark)
        yield from reader.match(end)


def read_phi4(reader: Reader) -> Reading[None]:
    return read_lists(("functools", "<|tool_call|>"), Shape(r"\s*<\|/tool_call\|>"), reader)


def read_command(reader: Reader) -> Reading[None]:
    return read_lists(("<|START_ACTION|>",), Shape(r"\s*<\|END_ACTION\|>"), reader)


def read_nemotron(reader: Reader) -> Reading[None]:
    return read_lists(("<TOOLCALL>",), Shape(r"\s*</TOOLCALL>"), reader)
