"""The replies of POST /v1/messages: a message, or the events by which it grows; and errors in Anthropic's shape."""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, with_config
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.serve.http.adapters.translation import Block, BlockEvent, Blocks
from specserve.serve.http.openai.replies import Answer, ReplyFormat, Usage, event
from specserve.serve.http.transport.errors import Error
from specserve.serve.http.transport.json_codec import Json, ReplyObject

PATH = "/v1/messages"  # and what lies below it

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
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


class AnthropicMessage(MessageHead, MessageEnd):
    """POST /v1/messages."""

    content: list[Annotated[SaidText | SaidThinking | SaidToolUse, Discriminator("type")]]
    usage: AnthropicUsage


@with_config(ConfigDict(extra="allow", strict=True))
class AnthropicEvent(ReplyObject):
    """One event of a streamed message; its other members depend on its type, as in Anthropic's API."""

    type: str
    message: NotRequired[AnthropicMessage]


class AnthropicErrorDetails(ReplyObject):
    """`param` is the field that was wrong."""

    type: str
    message: str
    param: str | None


class AnthropicError(ReplyObject):
    """Every reply of a status from 400 below /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class MessagesFormat(ReplyFormat):
    """Spells the one answer to a body of /v1/messages as content blocks."""

    def __init__(self, model_name: str, request_id: str | None) -> None:
        self._blocks = Blocks()
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
        return {**self._head, "content": content, **self._end, "usage": _usage(usage)}

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
        yield _event("message_delta", delta=self._end, usage=_usage(usage))
        yield _event("message_stop")

    def failure(self, error: Error) -> Iterable[bytes]:
        details = error["error"]
        kind = details["type"] if details["type"] == "invalid_request_error" else "api_error"
        yield _event("error", error={"type": kind, "message": details["message"]})

    def _grow(self, answer: Answer) -> Iterator[BlockEvent]:
        yield from self._blocks.push(answer.part)
        if answer.finish_reason is not None:
            yield from self._blocks.finish()
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
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"text": text} if text else {}


def _usage(usage: Usage) -> AnthropicUsage:
    """Return the token counts. Anthropic counts a prompt's cached tokens apart from the others."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_completion,
    }


class MessagesLayer:
    """An ASGI layer for Anthropic's clients. Their header of the API key counts, and errors have their shape."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["path"] == PATH or scope["path"].startswith(PATH + "/")):
            await self._app(scope, receive, send)
            return
        names = [name for name, _ in scope["headers"]]
        if b"x-api-key" in names and b"authorization" not in names:
            keys = [(b"authorization", b"Bearer " + value) for name, value in scope["headers"] if name == b"x-api-key"]
            scope = {**scope, "headers": [*scope["headers"], *keys]}
        start: Message | None = None
        body = b""

        async def translate(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    await _send_error(start, body, send)

        await self._app(scope, receive, translate)


async def _send_error(start: Message, body: bytes, send: Send) -> None:
    """Send an error reply of OpenAI's shape in Anthropic's."""
    kind = _KINDS.get(start["status"], "invalid_request_error" if start["status"] < 500 else "api_error")
    if body:
        details = json.loads(body)["error"]
        error: AnthropicErrorDetails = {"type": kind, "message": details["message"], "param": details["param"]}
        whole: AnthropicError = {"type": "error", "error": error}
        body = json.dumps(whole, ensure_ascii=False).encode()
    headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})
