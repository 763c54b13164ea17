"""An answer as a row of blocks: a stretch of reasoning, a text, a call of a tool. The Responses API calls them output
items, the Messages API content blocks. Knows nothing of either."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specserve.serve.http.formats.parts import Part


@dataclass
class Block:
    """A block, with its content so far."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    call_index: int = -1  # among the calls of the answer
    call_id: str = ""
    name: str = ""
    text: str = ""  # of a call its arguments, JSON


BlockEvent = tuple[Literal["start", "delta", "stop"], Block, str]  # what happens to a block; a delta has its text


class Blocks:
    """Turns the parts of one answer into blocks, one after another, while they arrive."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.blocks)

    def push(self, part: Part) -> Iterator[BlockEvent]:
        """Take the next part of the answer, and yield the changes of the blocks."""
        for piece in part.in_order:
            if piece.reasoning:
                yield from self._add("reasoning", piece.reasoning)
            if piece.content:
                yield from self._add("text", piece.content)
            for call in piece.tool_calls:
                yield from self._add("call", call.arguments, call.index, call.call_id, call.name)

    def finish(self) -> Iterator[BlockEvent]:
        """End the answer, and yield the changes of the blocks."""
        if self._is_open:
            self._is_open = False
            yield "stop", self.blocks[-1], ""

    def _add(
        self,
        kind: Literal["reasoning", "text", "call"],
        text: str,
        call_index: int = -1,
        call_id: str = "",
        name: str = "",
    ) -> Iterator[BlockEvent]:
        if not (self._is_open and (self.blocks[-1].kind, self.blocks[-1].call_index) == (kind, call_index)):
            yield from self.finish()
            self.blocks.append(Block(len(self.blocks), kind, call_index, call_id, name))
            self._is_open = True
            yield "start", self.blocks[-1], ""
        if text:
            self.blocks[-1].text += text
            yield "delta", self.blocks[-1], text
