"""The formats in which models write calls of tools into their answers, one for each family, and the choice of one by
the chat template. Each reads answers (see `reader`); `grammars` has the grammars by which a model must write
it.

A call counts where it is whole enough to have the name of a tool that the request has, and arguments that begin. All
else is content, as it was written.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from specserve.serve.engine.interface import TemplateLike
from specserve.serve.http.formats.reader import Reader, Reading, Shape, matched
from specserve.serve.settings import ToolParser

NAME = r"(?P<name>[A-Za-z0-9_.-]+)"
_SPACE = Shape(r"\s*(?=\S)")

# --- calls that are JSON objects, with a name and arguments ---------------------------------------------------------

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
        yield from reader.json(reader.open_call(head["name"]))
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
        call = json.loads(text)
        call = call.get("function", call)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError, AttributeError):
        return None
    if not (isinstance(name, str) and name in reader.tools and isinstance(arguments, dict)):
        return None
    return name, arguments


_END_TOOL_CALL = Shape(r"\s*</tool_call>")


def _read_hermes(reader: Reader) -> Reading[None]:
    """<tool_call>{"name": "f", "arguments": {}}</tool_call>"""
    while mark := (yield from reader.content_until("<tool_call>")):
        if (yield from _object_call(reader, mark)):
            yield from reader.match(_END_TOOL_CALL)


_NEXT_OBJECT = Shape(r"\s*[;,]?\s*(?=\{)")


def _read_llama3(reader: Reader) -> Reading[None]:
    """{"name": "f", "parameters": {}} alone, or behind <|python_tag|>; more calls behind a semicolon."""
    mark = ""
    while True:
        is_call = yield from _object_call(reader, mark, is_certain=bool(mark))
        while is_call and (between := (yield from reader.match(_NEXT_OBJECT))):
            is_call = yield from _object_call(reader, between[0], is_certain=False)
            if not is_call:
                reader.give_back(between[0])
        mark = yield from reader.content_until("<|python_tag|>")
        if not mark:
            return


_MISTRAL_HEADS = [
    Shape(rf"\s*{NAME}\s*{between}(?=\{{)") for between in ("", r"\[ARGS\]\s*", r"\[CALL_ID\][^\[\]]*\[ARGS\]\s*")
]
_BEGIN_LIST = Shape(r"\s*\[\s*(?=\{)")
_NEXT_ITEM = Shape(r"\s*,\s*(?=\{)")
_END_LIST = Shape(r"\s*\]")


def _read_mistral(reader: Reader) -> Reading[None]:
    """[TOOL_CALLS]f[ARGS]{}, or formerly [TOOL_CALLS][{"name": "f", "arguments": {}}]"""
    while mark := (yield from reader.content_until("[TOOL_CALLS]")):
        head = yield from reader.match(*_MISTRAL_HEADS)
        if head:
            yield from _arguments(reader, head["name"], mark + head[0])
            continue
        begin = yield from reader.match(_BEGIN_LIST)
        is_call = yield from _object_call(reader, mark + matched(begin))
        while begin and (between := (yield from reader.match(_NEXT_ITEM))):
            is_call = yield from _object_call(reader, between[0])
        end = (yield from reader.match(_END_LIST)) if begin else None
        if end and not is_call:
            reader.give_back(end[0])


# --- calls that are a name, then arguments in JSON ------------------------------------------------------------------


def _arguments(reader: Reader, name: str, before: str) -> Reading[bool]:
    """Take the arguments of a call, unless there is no such tool: then the text `before` them is given back."""
    if name not in reader.tools:
        reader.give_back(before)
        return False
    yield from reader.json(reader.open_call(name))
    return True


_BEGIN_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN_CALL, _SEP, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FIRST_CALL, _LAST_CALL = Shape(rf"\s*{_BEGIN_CALL}"), Shape(rf"\s*{_END_CALLS}")
_DEEPSEEK_HEADS = [Shape(rf"\s*function{_SEP}{NAME}\s*```json\s*(?=\{{)"), Shape(rf"\s*{NAME}{_SEP}\s*(?=\{{)")]
_DEEPSEEK_TAIL = Shape(rf"\s*`*\s*{_END_CALL}")


def _read_deepseek(reader: Reader) -> Reading[None]:
    """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>; V3 and
    R1 have function<｜tool▁sep｜>f, and the arguments in a fence."""
    while mark := (yield from reader.content_until(_BEGIN_CALLS, _BEGIN_CALL)):
        if mark == _BEGIN_CALLS and (first := (yield from reader.match(_FIRST_CALL))):
            mark += first[0]
        head = yield from reader.match(*_DEEPSEEK_HEADS)
        if not head:
            reader.give_back(mark)
        elif (yield from _arguments(reader, head["name"], mark + head[0])):
            yield from reader.match(_DEEPSEEK_TAIL)
            yield from reader.match(_LAST_CALL)


_TO = rf"to=functions\.{NAME}"
_HARMONY_HEADS = [
    Shape(recipient + r"\s*<\|channel\|>(?P<channel>[a-z]+)" + then + end)
    for recipient, then in (("", r"\s*"), ("", rf"\s+{_TO}\s*"), (rf"\s*{_TO}", r"[ a-z]*"))
    for end in (r"<\|message\|>", r"[a-z]*<\|message\|>", r"<\|constrain\|>\s*[a-z]*\s*<\|message\|>")
]
_HARMONY_MARKS = ("<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|channel|>", "<|message|>", "<|constrain|>")
_ROLE, _NO_ARGUMENTS = Shape("assistant"), Shape(r"\s*(?=<)")


def read_harmony(reader: Reader) -> Reading[None]:
    """Read an answer in Harmony: <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{}<|call|>, or <|channel|>final<|message|>content at the end."""
    while True:
        head = yield from reader.match(*_HARMONY_HEADS)
        name = head.groupdict().get("name") if head else None
        if head and name in reader.tools:
            assert name is not None
            say = reader.open_call(name)
            if (yield from reader.match(_NO_ARGUMENTS)):
                say("{}")
            mark = yield from reader.until(_HARMONY_MARKS, say)
        elif head and head["channel"] == "analysis" and not name:
            mark = yield from reader.until(_HARMONY_MARKS, reader.think)
            if mark:
                reader.end_thinking()
        else:
            if name and head:
                reader.give_back(head[0])
            mark = yield from reader.until(_HARMONY_MARKS, reader.say)
        if mark == "<|start|>":
            yield from reader.match(_ROLE)
        if not mark:
            return


# --- calls whose arguments are tagged one by one --------------------------------------------------------------------


@dataclass(frozen=True)
class _Tags:
    head: Shape
    key: Shape
    end_value: str
    tail: Shape


_GLM = _Tags(
    Shape(rf"\s*{NAME}\s*(?=<)"),
    Shape(r"\s*<arg_key>\s*(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    _END_TOOL_CALL,
)
_QWEN_CODER = _Tags(
    Shape(rf"\s*<function={NAME}>"),
    Shape(r"\s*<parameter=(?P<key>[^>]*)>"),
    "</parameter>",
    Shape(r"\s*</function>\s*</tool_call>"),
)


def _read_tagged(tags: _Tags, reader: Reader) -> Reading[None]:
    """<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>, or
    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>"""
    while mark := (yield from reader.content_until("<tool_call>")):
        head = yield from reader.match(tags.head)
        if not head or head["name"] not in reader.tools:
            reader.give_back(mark + matched(head))
            continue
        say, schema, before = reader.open_call(head["name"]), reader.tools[head["name"]], "{"
        end = tags.end_value
        while end and (key := (yield from reader.match(tags.key))):
            value: list[str] = []
            end = yield from reader.until((tags.end_value,), value.append)
            name = key["key"].strip()
            say(f"{before}{json.dumps(name, ensure_ascii=False)}: {_typed(schema, name, ''.join(value))}")
            before = ", "
        if end:  # else the answer was cut within a value
            say("{}" if before == "{" else "}")
        yield from reader.match(tags.tail)


_AS_JSON = {"True": "true", "False": "false", "None": "null"}  # as templates write what Python's str() makes of them


def _typed(schema: Mapping[str, Any], name: str, text: str) -> str:
    """Return a tagged value as JSON. By its tool's schema `1` is a number or text."""
    text = text.removeprefix("\n").removesuffix("\n")
    types = argument_types(schema, name)
    if "string" not in types or (text.strip() == "null" and "null" in types):
        try:
            return json.dumps(json.loads(_AS_JSON.get(text.strip(), text)), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def argument_types(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the JSON types that a tool's schema lets an argument have. They are empty where it says nothing."""
    properties = schema.get("properties")
    return _types(properties.get(name) if isinstance(properties, dict) else None, schema, 0)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > 8:
        return set()
    kinds, values = schema.get("type"), schema.get("enum")
    found = {each for each in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(each, str)}
    if isinstance(values, list):
        found |= {"string" if isinstance(each, str) else "other" for each in values}
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        for each in choices if isinstance(choices, list) else ():
            found |= _types(each, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        definitions = root.get("$defs")
        if isinstance(definitions, dict):
            found |= _types(definitions.get(reference.removeprefix("#/$defs/")), root, depth + 1)
    return found


# --- which there are ------------------------------------------------------------------------------------------------


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class ToolFormat:
    """A format in which calls are written."""

    name: ToolParser | Literal["none"]
    signs: tuple[str, ...]  # a chat template with one of these writes calls so
    marks: tuple[str, ...]  # strings that may be special tokens
    read: Callable[[Reader], Reading[None]]
    new_id: Callable[[], str] = new_call_id
    usual_sign: str = ""  # templates of models that write the format's usual wording have it
    other_wording: str = ""

    def wording_for(self, template: TemplateLike) -> str:
        """Return which wording of the format `grammars` takes for this template."""
        return self.name if template.mentions(self.usual_sign) else self.other_wording


def _read_content(reader: Reader) -> Reading[None]:
    yield from reader.content_until()


NO_CALLS = ToolFormat("none", (), (), _read_content)  # of answers that are text alone

# in the order in which a template is looked through: later signs also stand in templates of earlier formats
TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("harmony", ("<|channel|>",), _HARMONY_MARKS, read_harmony),
    ToolFormat(
        "deepseek",
        (_BEGIN_CALLS,),
        (_BEGIN_CALLS, _BEGIN_CALL, _SEP, _END_CALL, _END_CALLS),
        _read_deepseek,
        usual_sign="```json",
        other_wording="deepseek bare",
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        _read_mistral,
        lambda: uuid.uuid4().hex[:9],  # its templates refuse longer ones
        usual_sign="[ARGS]",
        other_wording="mistral list",
    ),
    ToolFormat(
        "glm",
        ("<arg_key>",),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        partial(_read_tagged, _GLM),
    ),
    ToolFormat("qwen3-coder", ("<function=",), ("<tool_call>", "</tool_call>"), partial(_read_tagged, _QWEN_CODER)),
    ToolFormat("hermes", ("<tool_call>",), ("<tool_call>", "</tool_call>"), _read_hermes),
    ToolFormat("llama3", ("<|python_tag|>", '"parameters": '), ("<|python_tag|>",), _read_llama3),
)


def choose_tool_format(name: ToolParser, template: TemplateLike) -> ToolFormat:
    """Return the format of that name; with "auto" that of the chat template, or NO_CALLS where it has none that is
    known."""
    for each in TOOL_FORMATS:
        if name == each.name or (name == "auto" and any(template.mentions(sign) for sign in each.signs)):
            return each
    return NO_CALLS
