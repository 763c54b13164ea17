"""The replies of POST /v1/messages: a message, or the events by which it grows."""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, with_config

from specserve.serve.http.adapters.translation import Block, BlockEvent, Blocks
from specserve.serve.http.openai.replies import Answer, ReplyFormat, ReplyVersion, Usage, event, version_of
from specserve.serve.http.transport.errors import Error
from specserve.serve.http.transport.json_codec import Json, ReplyObject

_DELTA = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class SaidText(ReplyObject):
    """A message of the model."""

    type: Literal["text"]
    text: str


class SaidThinking(ReplyObject):
    """The reasoning of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class SaidToolUse(ReplyObject):
    """A tool that it calls."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class AnthropicUsage(ReplyObject):
    """Token counts; `input_tokens` are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageHead(ReplyObject):
    """The members of a message that never change."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str


class MessageEnd(ReplyObject):
    """The reason why a message ended."""

    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None


class AnthropicMessage(MessageHead, MessageEnd, ReplyVersion):
    """POST /v1/messages."""

    content: list[Annotated[SaidText | SaidThinking | SaidToolUse, Discriminator("type")]]
    usage: AnthropicUsage


@with_config(ConfigDict(extra="allow", strict=True))
class AnthropicEvent(ReplyObject):
    """One event of a streamed message; its other members depend on its type, as in Anthropic's API."""

    type: str
    message: NotRequired[AnthropicMessage]


class MessagesFormat(ReplyFormat):
    """Spells the one answer to a body of /v1/messages as content blocks."""

    def __init__(self, model_name: str, request_id: str | None) -> None:
        self._blocks = Blocks()
        self._version: ReplyVersion = {}  # at its end
        self._end: MessageEnd = {"stop_reason": None, "stop_sequence": None}
        self._head: MessageHead = {
            "id": f"msg_{request_id or uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model_name,
        }

    def reply(self, answers: Sequence[Answer], usage: Usage) -> AnthropicMessage:
        for _ in self._grow(answers[0]):
            pass
        content = [_content(block) for block in self._blocks.blocks]
        return {**self._head, "content": content, **self._end, "usage": _usage(usage), **self._version}

    def begin(self, start: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        message: AnthropicMessage = {**self._head, "content": [], **self._end, "usage": _usage(usage())}
        yield _event("message_start", message=message)

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        for kind, block, text in self._grow(answer):
            if kind == "start":
                yield _event("content_block_start", index=block.index, content_block=_content(block))  # no text yet
            elif kind == "delta":
                delta_type, member = _DELTA[block.kind]
                yield _event("content_block_delta", index=block.index, delta={"type": delta_type, member: text})
            else:
                yield _event("content_block_stop", index=block.index)

    def end(self, usage: Usage) -> Iterable[bytes]:
        yield _event("message_delta", delta=self._end, usage=_usage(usage), **self._version)
        yield _event("message_stop")

    def failure(self, error: Error) -> Iterable[bytes]:
        details = error["error"]
        kind = details["type"] if details["type"] == "invalid_request_error" else "api_error"
        yield _event("error", error={"type": kind, "message": details["message"]})

    def _grow(self, answer: Answer) -> Iterator[BlockEvent]:
        yield from self._blocks.push(answer.part)
        if answer.finish_reason is not None:
            yield from self._blocks.finish()
            self._version = version_of([answer])
            self._end = {"stop_reason": self._reason(answer), "stop_sequence": None}
            if isinstance(answer.stop_reason, str):
                self._end["stop_sequence"] = answer.stop_reason

    def _reason(self, answer: Answer) -> Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]:
        if answer.finish_reason == "length":
            return "max_tokens"
        if self._blocks.has_calls:
            return "tool_use"
        return "stop_sequence" if isinstance(answer.stop_reason, str) else "end_turn"


def _event(name: str, /, **members: Any) -> bytes:
    return event({"type": name, **members}, name)


def _content(block: Block) -> SaidText | SaidThinking | SaidToolUse:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(block.text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _arguments(text: str) -> Json:
    """Return the arguments of a call as an object. The length limit may have cut their JSON in the middle."""
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"text": text}


def _usage(usage: Usage) -> AnthropicUsage:
    """Return the token counts. Anthropic counts a prompt's cached tokens apart from the others."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_completion,
    }
