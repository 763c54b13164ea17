"""A reader of an answer's text while it arrives, and the parts that it finds: content, reasoning and calls of tools.

A format of answers is a generator over a `Reader`: it takes the text that it understands, notes what that means, and
yields where it needs more text. So a format reads like a description of its syntax. The way in which the text is cut
into pieces changes nothing: text that may still become something else is held back.
"""

import contextlib
import json
import re
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specserve.serve.http.formats.written import read_value

_T = TypeVar("_T")
Reading = Generator[None, None, _T]  # of a format: it yields for more text
Say = Callable[[str], None]

NAME = r"(?P<name>[A-Za-z0-9_.-]+)"  # of a tool, in shapes
_ATOM = re.compile(r"(?:\(\?[^)]*\)|\[(?:\\.|[^\]\\])*\]|\\.|.)[*+?]?", re.DOTALL)
_JSON_CHARS = frozenset('{}[],:+-. \t\r\n"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ')


@dataclass(frozen=True)
class ToolCallPart:
    """A piece of one call of a tool. The first piece of a call has its id and name."""

    index: int  # among the calls of the answer
    arguments: str = ""  # JSON text, to be added to that of the pieces before
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Part:
    """The meaning of one stretch of text. Parts of one answer can be added up, in order."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallPart] = ()
    pieces: Sequence["Part"] = field(default=(), compare=False)  # its summands; none: it came at once

    @property
    def in_order(self) -> Sequence["Part"]:
        """The pieces in the order in which they came: text behind a call stands behind it."""
        return self.pieces or ((self,) if self else ())

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, other: "Part") -> "Part":
        calls = {call.index: call for call in self.tool_calls}
        for call in other.tool_calls:
            before = calls.get(call.index, ToolCallPart(call.index))
            calls[call.index] = ToolCallPart(
                call.index, before.arguments + call.arguments, before.call_id or call.call_id, before.name or call.name
            )
        pieces = (*self.in_order, *other.in_order)
        return Part(self.content + other.content, self.reasoning + other.reasoning, tuple(calls.values()), pieces)


class PlainText:
    """A parser for which all text is content."""

    num_reasoning_tokens = 0

    def push(self, text: str, num_chars: Sequence[int] = ()) -> Part:  # noqa: ARG002
        return Part(text)

    def finish(self) -> Part:
        return Part()


def joined(parts: Iterable[Part]) -> Part:
    """Return all of an answer's parts as one."""
    return sum(parts, Part())


class Shape:
    """A regular expression that also knows whether a text may still become what it matches.

    It takes a sequence of characters, classes, escapes, named groups and lookaheads, each with at most one quantifier.
    It should end where more text cannot prolong the match: with a character, or with a lookahead.
    """

    def __init__(self, pattern: str) -> None:
        self._whole = re.compile(pattern)
        beginning = ""
        for atom in reversed(_ATOM.findall(pattern)):
            beginning = f"(?:{atom}{beginning})?"
        self._beginning = re.compile(beginning)

    def match(self, text: str) -> re.Match[str] | None:
        return self._whole.match(text)

    def find_all(self, text: str) -> Iterator[re.Match[str]]:
        return self._whole.finditer(text)

    def may_become(self, text: str) -> bool:
        """Return whether the text is a beginning of what matches."""
        return self._beginning.fullmatch(text) is not None


_PYTHON_OBJECT = Shape(r"\{\s*(?=')")
NO_ARGUMENTS = Shape(r"\s*(?=<)")  # before a mark


class Reader:
    """A parser that splits the text of one answer by a format. It holds the text that has come and is not taken yet,
    and the meaning of the text before it. Text that may still become one thing or another is held back, until more
    comes.
    """

    def __init__(
        self,
        read: "Callable[[Reader], Reading[None]]",  # the format
        new_id: Callable[[], str],
        *,
        tools: Mapping[str, Mapping[str, Any]],  # JSON schemas of the arguments by the names of the tools
        hidden: Collection[str] = (),  # special tokens of the format, which are never shown
        keeps_reasoning: bool = True,
        is_parallel: bool = True,  # else only the first call is reported
    ) -> None:
        self._reading = read(self)
        self._num_chars = 0  # of all tokens
        self._begins: deque[int] = deque()  # of tokens whose text is not read yet, by characters of the answer
        self.num_reasoning_tokens = 0  # those whose text begins in what has been read as reasoning, its marks left out
        self.rest = ""
        self.num_taken = 0  # characters
        self.is_thinking = False  # the reasoning has begun and not ended
        self.thoughts: list[tuple[int, int]] = []  # of the characters taken last, the stretches that are reasoning
        self.is_whole = False  # no more text will come
        self.unopened: tuple[str, str] | None = None  # marks of reasoning that the answer has not begun with
        self.tools = tools
        self._hidden = tuple(hidden)
        self._new_id = new_id
        self._keeps_reasoning = keeps_reasoning
        self._is_parallel = is_parallel
        self.num_calls = 0
        self._content, self._reasoning = _Trimmed(), _Trimmed(is_at_start=True)
        self._parts: list[Part] = []

    # --- for the reply ---

    def push(self, text: str, num_chars: Sequence[int] = ()) -> Part:
        """Take more text, and return the part that is certain. `num_chars` has for each further token the number of
        characters that it has settled, of this text and of what is to come."""
        for each in num_chars:
            self._begins.append(self._num_chars)
            self._num_chars += each
        self.rest += text
        next(self._reading)
        return self._new_parts()

    def finish(self) -> Part:
        """End the answer, and return what was still held back."""
        self.is_whole = True
        for _ in self._reading:
            raise AssertionError("a format asks for text where there is no more")
        return self._new_parts()

    def _new_parts(self) -> Part:
        """Return the parts that were noted since the last time."""
        while self._begins and self._begins[0] < self.num_taken:
            at = self._begins.popleft()
            self.num_reasoning_tokens += any(begin <= at < end for begin, end in self.thoughts)
        self.thoughts.clear()  # later tokens begin later
        if self.is_whole and not self.num_calls and (space := self._content.space):
            self._parts.append(Part(space))
        part = self._parts[0] if len(self._parts) == 1 else joined(self._parts)
        self._parts.clear()
        return part

    # --- for a format: the meaning of its text ---

    def say(self, text: str) -> None:
        """Note that the text is content."""
        if said := self._content.push(text):
            self._parts.append(Part(said))

    def think(self, text: str) -> None:
        """Note that the text, which was taken last, is reasoning."""
        self.is_thinking = True
        self.thoughts.append((self.num_taken - len(text), self.num_taken))
        said = self._reasoning.push(text)
        if said and self._keeps_reasoning:
            self._parts.append(Part(reasoning=said))

    def end_thinking(self) -> None:
        """End the reasoning. The space around it is neither reasoning nor content."""
        self.is_thinking = False
        self._reasoning = _Trimmed("\n" if self._reasoning.has_said else "", is_at_start=not self._reasoning.has_said)
        self._content.is_at_start = not self._content.has_said

    def open_call(self, name: str, call_id: str = "") -> Say:
        """Begin a call of a tool, and return a function that takes its arguments, JSON text in pieces. The space
        before a call is not content. `call_id` is the one that the model has given it."""
        self._content.space = ""
        index = self.num_calls
        self.num_calls += 1
        if index and not self._is_parallel:
            return lambda _: None
        self._parts.append(Part(tool_calls=(ToolCallPart(index, call_id=call_id or self._new_id(), name=name),)))

        def say(arguments: str) -> None:
            if arguments:
                self._parts.append(Part(tool_calls=(ToolCallPart(index, arguments),)))

        return say

    def named_call(self, name: str, before: str, call_id: str = "") -> Reading[bool]:
        """Take the arguments of a call, a JSON object, unless there is no such tool: then the text `before` them is
        given back. Returns whether there is one."""
        if name not in self.tools:
            self.give_back(before)
            return False
        say = self.open_call(name, call_id)
        if (yield from self.match(NO_ARGUMENTS)):
            say("{}")
        else:
            yield from self.arguments(say)
        return True

    def give_back(self, text: str) -> None:
        """Note that a text which looked like a call is none, and is content."""
        for mark in self._hidden:
            text = text.replace(mark, "")
        self.say(text)

    # --- for a format: taking text ---

    def take(self, num_chars: int) -> str:
        taken, self.rest = self.rest[:num_chars], self.rest[num_chars:]
        self.num_taken += len(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Make the text that was taken last the next to be taken."""
        self.rest = text + self.rest
        self.num_taken -= len(text)

    def until(self, marks: Sequence[str], say: Say) -> Reading[str]:
        """Take the text before the first of these marks, as it comes, and the mark, which is returned; "" where the
        text ends without one."""
        while True:
            found = [(at, mark) for mark in marks if (at := self.rest.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                say(self.take(at))
                return self.take(len(mark))
            num_held = 0 if self.is_whole else _num_held(self.rest, marks)
            say(self.take(len(self.rest) - num_held))
            if self.is_whole:
                return ""
            yield

    def text_until(self, marks: Sequence[str], say: Say) -> Reading[str]:
        """Take text as `until` does, with the format's special tokens left out, and the end of a reasoning that has
        never begun."""
        while True:
            unopened = self.unopened
            mark = yield from self.until((*marks, *self._hidden, *(unopened or ())), say)
            if unopened and mark in unopened:
                self.unopened = None
                if mark == unopened[0] and mark not in self._hidden:
                    say(mark)
            elif not mark or mark in marks:
                return mark

    def content_until(self, *marks: str) -> Reading[str]:
        """Take content up to the first of these marks, which is returned; "" where the text ends without one."""
        return (yield from self.text_until(marks, self.say))

    def match(self, *shapes: Shape) -> Reading[re.Match[str] | None]:
        """Take what one of the shapes matches; nothing, and None, where none can."""
        while True:
            for shape in shapes:
                if found := shape.match(self.rest):
                    self.take(found.end())
                    return found
            if self.is_whole or not any(shape.may_become(self.rest) for shape in shapes):
                return None
            yield

    def arguments(self, say: Say) -> Reading[None]:
        """Take the arguments of a call, a JSON object, as they come; one in Python's notation as JSON, at once."""
        if text := (yield from self.python_object()):
            with contextlib.suppress(ValueError, SyntaxError):  # cut short: as far as it goes
                text = json.dumps(read_value(text), ensure_ascii=False)
            say(text)
        else:
            yield from self.json(say)

    def python_object(self) -> Reading[str]:
        """Take an object in Python's notation, whose first key stands in single quotes; "" where none stands next."""
        found = yield from self.match(_PYTHON_OBJECT)
        pieces, end = [matched(found)], matched(found)
        while end:  # up to the bracket with which it is whole
            end = yield from self.until(("}",), pieces.append)
            pieces.append(end)
            with contextlib.suppress(ValueError, SyntaxError):
                read_value("".join(pieces))
                break
        return "".join(pieces)

    def json(self, say: Say, depth: int = 0) -> Reading[bool]:
        """Take a JSON object or list, as it comes, or what is left of one in `depth` brackets. Stops before a
        character that cannot be in one. Returns whether it is closed."""
        is_text = is_escaped = False
        while True:
            for at, char in enumerate(self.rest):
                if is_text:
                    is_text = is_escaped or char != '"'
                    is_escaped = char == "\\" and not is_escaped
                elif char not in _JSON_CHARS or (not depth and char not in "{["):
                    say(self.take(at))
                    return False
                elif char == '"':
                    is_text = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    if not depth:
                        say(self.take(at + 1))
                        return True
            say(self.take(len(self.rest)))
            if self.is_whole:
                return False
            yield


def matched(found: re.Match[str] | None) -> str:
    """Return the text that a match has taken, "" where there is none."""
    return found[0] if found else ""


AnswerParser = Reader | PlainText
MakeParser = Callable[[], AnswerParser]


class _Trimmed:
    """A text whose last space is held back, until it is known whether anything follows it."""

    def __init__(self, space: str = "", *, is_at_start: bool = False) -> None:
        self.space = space
        self.is_at_start = is_at_start  # space that comes now is left out
        self.has_said = False

    def push(self, text: str) -> str:
        text = self.space + (text.lstrip() if self.is_at_start else text)
        said = text.rstrip()
        self.space = text[len(said) :]
        self.is_at_start = self.is_at_start and not said
        self.has_said = self.has_said or bool(said)
        return said


def _num_held(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of the text that begins a mark."""
    longest = min(len(text), max((len(mark) - 1 for mark in marks), default=0))
    if not any(mark[0] in text[-longest:] for mark in marks):  # nearly always, and cheaper than what follows
        return 0
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
