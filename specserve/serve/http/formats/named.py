"""Formats whose calls are a name, then arguments in JSON: of DeepSeek, Kimi and GPT-OSS."""

import itertools
import re

from specserve.serve.http.formats.reader import NAME, NO_ARGUMENTS, Reader, Reading, Shape

_BEGIN_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN_CALL, _SEP, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_MARKS = (_BEGIN_CALLS, _BEGIN_CALL, _SEP, _END_CALL, _END_CALLS)
_FIRST_CALL, _LAST_CALL = Shape(rf"\s*{_BEGIN_CALL}"), Shape(rf"\s*{_END_CALLS}")
_DEEPSEEK_HEADS = [Shape(rf"\s*function{_SEP}{NAME}\s*```json\s*(?=\{{)"), Shape(rf"\s*{NAME}{_SEP}\s*(?=\{{)")]
_DEEPSEEK_TAIL = Shape(rf"\s*`*\s*{_END_CALL}")


def read_deepseek(reader: Reader) -> Reading[None]:
    """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>; V3 and
    R1 have function<｜tool▁sep｜>f, and the arguments in a fence."""
    while mark := (yield from reader.content_until(_BEGIN_CALLS, _BEGIN_CALL)):
        if mark == _BEGIN_CALLS and (first := (yield from reader.match(_FIRST_CALL))):
            mark += first[0]
        head = yield from reader.match(*_DEEPSEEK_HEADS)
        if not head:
            reader.give_back(mark)
        elif (yield from reader.named_call(head["name"], mark + head[0])):
            yield from reader.match(_DEEPSEEK_TAIL)
            yield from reader.match(_LAST_CALL)


KIMI_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_KIMI_FIRST, _KIMI_TAIL, _KIMI_LAST = (
    Shape(r"\s*" + mark.replace("|", r"\|")) for mark in (KIMI_MARKS[1], KIMI_MARKS[3], KIMI_MARKS[4])
)
_KIMI_HEAD = Shape(r"\s*(?P<id>[^<\s]+)\s*<\|tool_call_argument_begin\|>\s*(?=[{<])")
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::(?P<number>[0-9]+))?")


def read_kimi(reader: Reader) -> Reading[None]:
    """<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>
    <|tool_calls_section_end|>. What stands before the arguments is the id of the call, which its result will name; one
    without a number, which the model may write, gets that of the call, and one that is taken the next that is not."""
    ids: set[str] = set()
    while mark := (yield from reader.content_until(*KIMI_MARKS[:2])):
        if mark == KIMI_MARKS[0] and (first := (yield from reader.match(_KIMI_FIRST))):
            mark += first[0]
        head = yield from reader.match(_KIMI_HEAD)
        found = head and _KIMI_ID.fullmatch(head["id"])
        if not (head and found):
            reader.give_back(mark)
            continue
        numbers = itertools.count(int(found["number"] or reader.num_calls))
        call_id = next(each for number in numbers if (each := f"functions.{found['name']}:{number}") not in ids)
        if (yield from reader.named_call(found["name"], mark + head[0], call_id)):
            ids.add(call_id)
            yield from reader.match(_KIMI_TAIL)
            yield from reader.match(_KIMI_LAST)


_TO = rf"to=functions\.{NAME}"
_HARMONY_HEADS = [
    Shape(recipient + r"\s*<\|channel\|>(?P<channel>[a-z]+)" + then + end)
    for recipient, then in (("", r"\s*"), ("", rf"\s+{_TO}\s*"), (rf"\s*{_TO}", r"[ a-z]*"))
    for end in (r"<\|message\|>", r"[a-z]*<\|message\|>", r"<\|constrain\|>\s*[a-z]*\s*<\|message\|>")
]
HARMONY_MARKS = ("<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|channel|>", "<|message|>", "<|constrain|>")
_ROLE = Shape("assistant")


def read_harmony(reader: Reader) -> Reading[None]:
    """Read an answer in Harmony: <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{}<|call|>, or <|channel|>final<|message|>content at the end."""
    while True:
        head = yield from reader.match(*_HARMONY_HEADS)
        name = head.groupdict().get("name") if head else None
        if head and name in reader.tools:
            assert name is not None
            say = reader.open_call(name)
            if (yield from reader.match(NO_ARGUMENTS)):
                say("{}")
            mark = yield from reader.until(HARMONY_MARKS, say)
        elif head and head["channel"] == "analysis" and not name:
            mark = yield from reader.until(HARMONY_MARKS, reader.think)
            if mark:
                reader.end_thinking()
        else:
            if name and head:
                reader.give_back(head[0])
            mark = yield from reader.until(HARMONY_MARKS, reader.say)
        if mark == "<|start|>":
            yield from reader.match(_ROLE)
        if not mark:
            return
