"""Formats whose calls tag their arguments one by one: of GLM, Qwen3-Coder, Seed-OSS, MiniMax M2, and DeepSeek since
V3.2."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specserve.serve.http.formats.reader import NAME, Reader, Reading, Shape, matched
from specserve.serve.http.formats.schemas import fits, typed


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
    yield from _read_bare(tags, reader)
    while mark := (yield from reader.content_until(*heads)):
        head = yield from reader.match(heads[mark])
        if head and head["name"] in reader.tools:
            yield from _read_call(tags, reader, head["name"])
            yield from _read_bare(tags, reader)
        else:
            reader.give_back(mark + matched(head))


def _read_bare(tags: Tags, reader: Reader) -> Reading[None]:
    """Take the calls that stand next without their mark."""
    while tags.bare and (bare := (yield from reader.match(tags.bare))):
        if bare["name"] not in reader.tools:
            reader.give_back(bare[0])
            return
        yield from _read_call(tags, reader, bare["name"], bare)


def _read_call(tags: Tags, reader: Reader, name: str, found: re.Match[str] | None = None) -> Reading[None]:
    """Take the arguments of a call, of which the first key may be `found` already, and its ends."""
    say, schema, before, is_whole = reader.open_call(name), reader.tools[name], "{", True
    given: list[str] = []
    if tags.takes_objects and (yield from reader.match(_OBJECT)):
        yield from reader.arguments(say)
        before = ""
    elif not found:
        found = yield from reader.match(*tags.keys, *tags.ends)
    while found and "key" in found.re.groupindex:
        key, is_text = found["key"].strip(), found.groupdict().get("is_text")
        given.append(key)
        value, found, is_whole = yield from _read_value(tags, reader, schema, given)
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
    tags: Tags, reader: Reader, schema: Mapping[str, Any], given: Sequence[str]
) -> Reading[tuple[str, re.Match[str] | None, bool]]:
    """Take a value and what stands behind its end tag: the next key, or the end of the call. Returns too whether the
    value is whole. `given` are the call's keys so far, this one's too.

    An end tag that nothing of that follows is text of the value, and so is one within tags of its own kind. Behind an
    end of the call the value goes on only to an end tag with another end, behind which nothing but the next call
    stands, or to the first key before that. Where no end tag counts, the value ends where the next of the tool's
    arguments or the call does, as if its end tag was forgotten; else at the first of those end tags that a key or an
    end follows, else at the last of all."""
    text, first, ended, final, key, last = "", (), (), (), (), ()  # places of end tags: where they begin, and end
    heads, chains = tuple(mark for mark, _ in tags.heads), list[int]()  # the numbers of ends that stand together
    while True:
        pieces: list[str] = []
        mark = yield from reader.until((tags.end_value, *(heads if ended else ())), pieces.append)
        between = "".join(pieces)
        value = text + between
        text = value + mark
        if mark != tags.end_value:
            is_last = not between.strip() and (mark or not chains or chains[-1] >= chains[0])
            ended = final if final and is_last else ended
            break
        final, last = (), (len(value), len(text))
        if (ended and not between.strip()) or not (found := (yield from reader.match(*tags.keys, *tags.ends))):
            continue
        first, text = first or last, text + found[0]
        since = value[key[0] if key else ended[1] if ended else 0 :]
        num_closed = 0 if ended and not key else since.count(tags.end_value)
        is_outside = since.count(tags.begin_value) <= num_closed
        if "key" in found.re.groupindex:
            if is_outside and not ended:
                return value, found, True
            key = key or (last if is_outside else ())
            continue
        if not (is_outside or ended or _is_in_call(tags, value)):
            break
        final = (key or last) if is_outside and ended else ()
        ended = ended or (last if is_outside else ())
        if not ended:
            continue
        chains.append(1)
        while more := (yield from reader.match(*tags.ends)):
            text, chains[-1] = text + more[0], chains[-1] + 1
        if tags.bare and (bare := (yield from reader.match(tags.bare))):
            reader.put_back(bare[0])
            if bare["name"] in reader.tools:
                ended = final or ended
                break
    forgotten = None if ended else _forgotten_end(tags, text, first[0] if first else len(text), schema, given)
    places = ended or ((forgotten, forgotten) if forgotten is not None else first or last)
    if not places:
        return text, None, False
    begin, end_of_tag = places
    reader.put_back(text[end_of_tag:])
    return text[:begin], (yield from reader.match(*tags.keys, *tags.ends)), True


def _is_in_call(tags: Tags, value: str) -> bool:
    """Return whether a call begins in the value that does not end in it."""
    return value.count(tags.heads[-1][0]) > sum(1 for _ in tags.ends[0].find_all(value))


def _forgotten_end(tags: Tags, text: str, limit: int, schema: Mapping[str, Any], given: Sequence[str]) -> int | None:
    """Return where a value ends whose end tag was forgotten, before `limit`: before a line with a key of the tool's,
    which the call has nowhere else and whose value has its type, or before the end of the call, behind which are only
    tags. None where there is neither."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    ends = (end.start() for end in tags.ends[0].find_all(text) if re.match(r"\s*(<|$)", text[end.end() :]))
    end = next(ends, len(text))
    found = sorted((key for shape in tags.keys for key in shape.find_all(text[:end])), key=lambda key: key.start())
    keys = [*given, *(each["key"].strip() for each in found)]
    for each, behind in pairwise([*found, None]):
        assert each
        name, value = each["key"].strip(), text[each.end() : behind.start() if behind else end]
        value = value.partition(tags.end_value)[0]
        is_new = name in known and keys.count(name) == 1 and re.match(r"\s*\n", each[0])
        if each.start() < limit and is_new and fits(schema, name, value):
            return each.start()
    return end if end < limit else None
