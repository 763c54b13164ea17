"""The common part of other APIs of chat: each body is translated into the fields of a chat body, and each answer into a
row of blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from specserve.errors import RequestError
from specserve.serve.http.formats.reader import Part, ToolCallPart
from specserve.serve.http.openai.bodies import ChatBody, SamplingBody
from specserve.serve.http.openai.fields import No, One
from specserve.serve.http.transport.json_codec import Json


class TranslatedBody(SamplingBody):
    """A body with one answer, which takes chat's options beside the fields of its own API. `RENAMED` maps chat's names
    of fields to its own."""

    RENAMED: ClassVar[Mapping[str, str]] = {}

    n: One = 1  # type: ignore[assignment]
    best_of: One | None = None  # type: ignore[assignment]
    return_tokens_as_token_ids: No = False  # type: ignore[assignment]
    return_token_ids: No = False  # type: ignore[assignment]
    return_draft_depths: No = False  # type: ignore[assignment]
    return_tree: No = False  # type: ignore[assignment]
    prompt_logprobs: None = None  # type: ignore[assignment]

    @property
    def thinks(self) -> bool | None:
        """Return whether the model is to reason; None leaves it to the chat template."""
        return None

    def chat_fields(self) -> Json:
        """Return this body as the fields of a ChatBody. Raises RequestError."""
        raise NotImplementedError

    def shared_fields(self) -> Json:
        """Return the fields that have chat's name and meaning."""
        shared = self.model_fields_set & SamplingBody.model_fields.keys() - {"stream_options", "max_tokens"}
        return {name: getattr(self, name) for name in shared & ChatBody.model_fields.keys()}

    def reword(self, error: RequestError) -> RequestError:
        field, dot, rest = (error.param or "").partition(".")
        name, bracket, index = field.partition("[")
        ours = self.RENAMED.get(name)
        if ours is None:
            return error
        if name == "messages":  # their numbers are not those of what was sent
            return RequestError(f"{ours} cannot be served as a chat: {error}", param=ours)
        param = ours + bracket + index + dot + rest
        return RequestError(str(error).replace(error.param or name, param).replace(name, ours), param=param)


def text_part(text: str) -> Json:
    """Return a text as chat's messages have it."""
    return {"type": "text", "text": text}


def of(value: Any, default: str = "") -> str:
    """Return the name of an alternative in a list of objects by an object's `type`: <type>. Error messages leave such
    names out of the path, but have the name of this function."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{default if kind is None else kind}>"


BlockKind = Literal["reasoning", "text", "call"]
NO_CALL = ToolCallPart(-1)


@dataclass
class Block:
    """A block of an answer, with its content so far: a stretch of reasoning, a text or a call of a tool. The Responses
    API calls it an output item, the Messages API a content block."""

    index: int
    kind: BlockKind
    call_index: int = -1  # among the calls of the answer
    call_id: str = ""
    name: str = ""
    text: str = ""  # of a call its arguments, JSON


BlockEvent = tuple[Literal["start", "delta", "stop"], Block, str]  # the change of a block; a delta has its text


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
                yield from self._add("call", call.arguments, call)

    def finish(self) -> Iterator[BlockEvent]:
        """End the answer, and yield the changes of the blocks."""
        if self._is_open:
            self._is_open = False
            yield "stop", self.blocks[-1], ""

    def _add(self, kind: BlockKind, text: str, call: ToolCallPart = NO_CALL) -> Iterator[BlockEvent]:
        if not (self._is_open and (self.blocks[-1].kind, self.blocks[-1].call_index) == (kind, call.index)):
            yield from self.finish()
            self.blocks.append(Block(len(self.blocks), kind, call.index, call.call_id, call.name))
            self._is_open = True
            yield "start", self.blocks[-1], ""
        if text:
            self.blocks[-1].text += text
            yield "delta", self.blocks[-1], text
