"""The parts of an answer's text, as clients see them: content, reasoning and calls of tools.

A parser splits the text of one answer while it arrives. Formats (`replies`) spell the parts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


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
    pieces: Sequence["Part"] = field(default=(), compare=False)  # what it is the sum of; none: it was said at once

    @property
    def in_order(self) -> Sequence["Part"]:
        """The pieces in the order in which they were said: text behind a call stands behind it."""
        return self.pieces or ((self,) if self else ())

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, other: "Part") -> "Part":
        calls = {call.index: call for call in self.tool_calls}
        for call in other.tool_calls:
            before = calls.get(call.index, ToolCallPart(call.index))
            calls[call.index] = ToolCallPart(
                call.index,
                before.arguments + call.arguments,
                before.call_id or call.call_id,
                before.name or call.name,
            )
        pieces = (*self.in_order, *other.in_order)
        return Part(self.content + other.content, self.reasoning + other.reasoning, tuple(calls.values()), pieces)


class AnswerParser(Protocol):
    """The interface of a parser that splits the text of one answer. Text that may still become one thing or another is
    held back, until more text comes."""

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens whose text begins in what has been read as reasoning, its marks left out."""
        ...

    def push(self, text: str, num_chars: Sequence[int] = ()) -> Part:
        """Take more text, and return the part that is certain. `num_chars` has for each further token the number of
        characters that it has settled, of this text and of what is to come."""
        ...

    def finish(self) -> Part:
        """End the answer, and return what was still held back."""
        ...


MakeParser = Callable[[], AnswerParser]


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
