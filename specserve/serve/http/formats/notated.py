"""Formats whose calls have values in a notation of their own: of Gemma 4, and of LFM2, which calls as Python does."""

import json

from specserve.serve.http.formats.reader import NAME, Reader, Reading, Shape, matched
from specserve.serve.http.formats.written import GEMMA_QUOTE, read_calls, read_value

GEMMA_MARKS = ("<|tool_call>", "<tool_call|>", GEMMA_QUOTE)
LFM_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
_GEMMA_HEAD = Shape(rf"\s*call:\s*{NAME}\s*(?=\{{)")


def read_gemma4(reader: Reader) -> Reading[None]:
    """<|tool_call>call:f{a:1,text:<|"|>x<|"|>}<tool_call|>"""
    begin, end, quote = GEMMA_MARKS
    while mark := (yield from reader.content_until(begin)):
        head = yield from reader.match(_GEMMA_HEAD)
        if not head or head["name"] not in reader.tools:
            reader.give_back(mark + matched(head))
            continue
        say, pieces, found = reader.open_call(head["name"]), list[str](), quote
        while found == quote:  # up to the end that stands in no text
            found = yield from reader.until((quote,) if pieces.count(quote) % 2 else (quote, end), pieces.append)
            pieces += [found] if found == quote else []
        try:
            say(json.dumps(read_value("".join(pieces)), ensure_ascii=False))
        except (ValueError, SyntaxError):  # cut short, or in no such notation: as far as it goes
            say("".join(pieces))


def read_lfm2(reader: Reader) -> Reading[None]:
    """<|tool_call_start|>[f(a=1, text="x"), g()]<|tool_call_end|>; some write JSON between the marks."""
    begin, end = LFM_MARKS
    while mark := (yield from reader.content_until(begin)):
        pieces, found = list[str](), end
        while found:  # an end mark may stand within a text
            found = yield from reader.until((end,), pieces.append)
            if found and _open_calls(reader, "".join(pieces)):
                break
            pieces += [found] if found else []
        else:
            reader.give_back(mark + "".join(pieces))


def _open_calls(reader: Reader, text: str) -> bool:
    """Report the calls that a text has. Returns False, and reports none, where it is no list of known tools' calls."""
    try:
        calls = read_calls(text)
    except (ValueError, SyntaxError):
        return _open_objects(reader, text)
    if not calls or any(name not in reader.tools for name, _, _ in calls):
        return False
    for name, values, named in calls:
        properties = reader.tools[name].get("properties")
        keys = [key for key in (properties if isinstance(properties, dict) else {}) if key not in named]
        arguments = dict(zip(keys, values, strict=False)) | named
        reader.open_call(name)(json.dumps(arguments, ensure_ascii=False))
    return True


def _open_objects(reader: Reader, text: str) -> bool:
    try:
        found = json.loads(text)
        calls = [(each["name"], each["arguments"]) for each in (found if isinstance(found, list) else [found])]
    except (ValueError, RecursionError, LookupError, TypeError):
        return False
    if not calls or any(name not in reader.tools or not isinstance(given, dict) for name, given in calls):
        return False
    for name, given in calls:
        reader.open_call(name)(json.dumps(given, ensure_ascii=False))
    return True
