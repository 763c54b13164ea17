"""Formats whose calls tag their arguments one by one: of GLM, Qwen3-Coder, Seed-OSS, MiniMax M2, and DeepSeek since
V3.2."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve.serve.http.formats.reader import NAME, Reader, Reading, Shape, matched
from specserve.serve.http.formats.schemas import typed


@dataclass(frozen=True)
class Tags:
    """The tags of one format. A call begins with one of `heads`, whose mark may stand behind other text."""

    heads: tuple[tuple[str, Shape], ...]  # the mark, and what stands behind it up to the arguments
    keys: tuple[Shape, ...]
    begin_value: str  # in `keys`
    end_value: str
    ends: tuple[Shape, ...]  # of a call, and of all calls; a model may forget either
    takes_objects: bool = False  # arguments may be one JSON object instead
    bare: Shape | None = None  # of an answer that begins with a call without its mark: up to the first value


_END_TOOL_CALL = Shape(r"\s*</tool_call>")
GLM = Tags(
    (("<tool_call>", Shape(rf"\s*{NAME}\s*(?=<)")),),
    (Shape(r"\s*<arg_key>\s*(?P<key>[^<]*)</arg_key>\s*<arg_value>"),),
    "<arg_value>",
    "</arg_value>",
    (_END_TOOL_CALL,),
    bare=Shape(rf"\s*{NAME}\s*<arg_key>\s*(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
)
QWEN_CODER = Tags(
    (("<tool_call>", Shape(rf"\s*<function={NAME}>")), ("<function=", Shape(rf"{NAME}>"))),
    (Shape(r"\s*<parameter=(?P<key>[^>]*)>"),),
    "<parameter=",
    "</parameter>",
    (Shape(r"\s*</function>"), _END_TOOL_CALL),
)
SEED = Tags(
    (("<seed:tool_call>", Shape(rf"\s*<function={NAME}>")), QWEN_CODER.heads[1]),
    QWEN_CODER.keys,
    "<parameter=",
    "</parameter>",
    (Shape(r"\s*</function>"), Shape(r"\s*</seed:tool_call>")),
)
FUNCTIONARY = Tags((("<function=", Shape(rf"{NAME}>")),), (), "", "", (Shape(r"\s*</function>"),), takes_objects=True)
MINIMAX = Tags(
    (
        ("<minimax:tool_call>", Shape(rf'\s*<invoke\s+name="{NAME}"\s*>')),
        ("<invoke ", Shape(rf'\s*name="{NAME}"\s*>')),
    ),
    (Shape(r'\s*<parameter\s+name="(?P<key>[^"]*)"\s*>'),),
    "<parameter ",
    "</parameter>",
    (Shape(r"\s*</invoke>"), Shape(r"\s*</minimax:tool_call>")),
)
_DSML_INVOKE = Shape(rf'\s*<｜DSML｜invoke\s+name="{NAME}"\s*>')
DSML = Tags(
    (
        ("<｜DSML｜function_calls>", _DSML_INVOKE),
        ("<｜DSML｜tool_calls>", _DSML_INVOKE),
        ("<｜DSML｜invoke ", Shape(rf'\s*name="{NAME}"\s*>')),
    ),
    (
        Shape(r'\s*<｜DSML｜parameter\s+name="(?P<key>[^"]*)"\s+string="(?P<is_text>[a-z]+)"\s*>'),
        Shape(r'\s*<｜DSML｜parameter\s+name="(?P<key>[^"]*)"\s*>'),
    ),
    "<｜DSML｜parameter ",
    "</｜DSML｜parameter>",
    (Shape(r"\s*</｜DSML｜invoke>"), Shape(r"\s*</｜DSML｜function_calls>"), Shape(r"\s*</｜DSML｜tool_calls>")),
    takes_objects=True,
)
_OBJECT = Shape(r"\s*(?=\{)")


def read_tagged(tags: Tags, reader: Reader) -> Reading[None]:
    """<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>, or
    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>, or the latter without <tool_call>."""
    heads = dict(tags.heads)
    bare = (yield from reader.match(tags.bare)) if tags.bare else None
    if bare and bare["name"] in reader.tools:
        yield from _read_call(tags, reader, bare["name"], bare)
    else:
        reader.give_back(matched(bare))
    while mark := (yield from reader.content_until(*heads)):
        head = yield from reader.match(heads[mark])
        if head and head["name"] in reader.tools:
            yield from _read_call(tags, reader, head["name"])
        else:
            reader.give_back(mark + matched(head))


def _read_call(tags: Tags, reader: Reader, name: str, found: re.Match[str] | None = None) -> Reading[None]:
    """Take the arguments of a call, of which the first key may be `found` already, and its ends."""
    say, schema, before, is_whole = reader.open_call(name), reader.tools[name], "{", True
    if tags.takes_objects and (yield from reader.match(_OBJECT)):
        yield from reader.arguments(say)
        before = ""
    elif not found:
        found = yield from reader.match(*tags.keys, *tags.ends)
    while found and "key" in found.re.groupindex:
        key, is_text = found["key"].strip(), found.groupdict().get("is_text")
        value, found, is_whole = yield from _read_value(tags, reader, schema)
        if is_text is None:  # templates write such values on lines of their own
            value = value.removeprefix("\n").removesuffix("\n")
        spelled = typed(schema, key, value)
        if is_text:
            spelled = json.dumps(value, ensure_ascii=False) if is_text == "true" else typed({}, key, value)
        say(f"{before}{json.dumps(key, ensure_ascii=False)}: {spelled}")
        before = ", "
    if is_whole and before:
        say("{}" if before == "{" else "}")
    while (yield from reader.match(*tags.ends)):
        pass


def _read_value(
    tags: Tags, reader: Reader, schema: Mapping[str, Any]
) -> Reading[tuple[str, re.Match[str] | None, bool]]:
    """Take a value and what stands behind its end tag: the next key, or the end of the call. Returns too whether the
    value is whole.

    An end tag that nothing of that follows is text of the value, and so are one within tags of its own kind, and one
    with an end of the call behind which the value goes on: before the next call comes another that counts. Where the
    answer ends without any, the value ends where the next of the tool's arguments or the call does, as if its end tag
    was forgotten; else at the first of those end tags that a key or an end follows, else at the last of all."""
    text, first, ended, last = "", (), (), ()  # the places of end tags: where they begin, and where they end
    heads = tuple(mark for mark, _ in tags.heads)
    while True:
        pieces: list[str] = []
        mark = yield from reader.until((tags.end_value, *(heads if ended else ())), pieces.append)
        value = text + "".join(pieces)
        text = value + mark
        if mark != tags.end_value:
            break
        last = len(value), len(text)
        if not (found := (yield from reader.match(*tags.keys, *tags.ends))):
            continue
        first, text = first or last, text + found[0]
        is_outside = value.count(tags.begin_value) <= value.count(tags.end_value)
        if is_outside and "key" in found.re.groupindex:
            return value, found, True
        ended = last if is_outside else ended
    forgotten = _forgotten_end(tags, text[: first[0] if first else None], schema)
    places = ended or ((forgotten, forgotten) if forgotten is not None else first or last)
    if not places:
        return text, None, False
    begin, end_of_tag = places
    reader.put_back(text[end_of_tag:])
    return text[:begin], (yield from reader.match(*tags.keys, *tags.ends)), True


def _forgotten_end(tags: Tags, text: str, schema: Mapping[str, Any]) -> int | None:
    """Return where a value ends whose end tag was forgotten: before a line with a key of the tool's, or before the end
    of the call, behind which are only tags. None where there is neither."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    keys = (found for shape in tags.keys for found in shape.find_all(text))
    places = [
        found.start() for found in keys if found["key"].strip() in known and "\n" in found[0][: found.start("key")]
    ]
    places += [found.start() for found in tags.ends[0].find_all(text) if re.match(r"\s*(<|$)", text[found.end() :])]
    return min(places, default=None)
