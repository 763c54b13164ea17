"""The messages of a chat, as clients send them and as chat templates take them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from specserve.chat_template import REASONING_NAMES
from specserve.errors import RequestError
from specserve.serve.http.openai.fields import Body

MAX_MESSAGES = 10_000
MAX_CALLS = 1000  # of one message


def _as_text_parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list) and value:
        return value
    raise PydanticCustomError("content", "should be a string or a list of text parts")


def _as_arguments(value: Any) -> str | dict[str, Any]:
    if isinstance(value, str | dict):
        return value
    raise PydanticCustomError("arguments", "should be JSON text or an object")


class TextPart(Body):
    """One part of a message's content. There are no others than text."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What a message's call called. `arguments` are JSON text; some clients send the object itself."""

    name: str
    arguments: Annotated[
        str | dict[str, Any], PlainValidator(_as_arguments, json_schema_input_type=str | dict[str, Any])
    ] = ""
    parsed_arguments: Any = None  # never read: OpenAI's client has them beside the text


class ToolCall(Body):
    """A call of a tool, in the message of an assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, le=MAX_CALLS)] | None = None  # as in the pieces of a stream

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates take it, with arguments as an object. Arguments that are no JSON object,
        as a model may have written them, stay text."""
        arguments = self.function.arguments
        if isinstance(arguments, str):
            try:
                read = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                read = None
            arguments = read if isinstance(read, dict) else arguments
        function = {"name": self.function.name, "arguments": arguments}
        return ({} if self.id is None else {"id": self.id}) | {"type": "function", "function": function}


class ChatMessage(Body):
    """One message of a chat. "developer" is OpenAI's newer word for "system" and means the same here."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            list[TextPart],
            Field(fail_fast=True),
            BeforeValidator(_as_text_parts, json_schema_input_type=str | list[TextPart]),
        ]
        | None
    ) = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's word for the same
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # Fields of an assistant message that clients send back as they got them: only empty.
    parsed: Any = None  # never read: OpenAI's client has it beside the content
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it, its parts joined by line ends."""
        turn: dict[str, Any] = dict.fromkeys(REASONING_NAMES, self.reasoning_content or self.reasoning)
        turn |= {"tool_calls": [call.for_template() for call in self.tool_calls or ()]}
        turn |= {"tool_call_id": self.tool_call_id, "name": self.name}
        role = "system" if self.role == "developer" else self.role
        content = "\n".join(part.text for part in self.content or ())
        return {"role": role, "content": content} | {name: value for name, value in turn.items() if value}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]

_OF_ASSISTANTS = ("tool_calls", "reasoning_content", "reasoning")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates take them. A tool's message gets the name of the tool from the call that it
    answers, where it has none. Raises RequestError for a message that lacks content, or has what its role has not."""
    names: dict[str, str] = {}
    turns = []
    for i, message in enumerate(messages):
        _check(message, f"messages[{i}]")
        names |= {call.id: call.function.name for call in message.tool_calls or () if call.id}
        turn = message.for_template()
        if message.role == "tool" and not message.name and message.tool_call_id in names:
            turn["name"] = names[message.tool_call_id]
        turns.append(turn)
    return turns


def _check(message: ChatMessage, where: str) -> None:
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{where}.content is required in messages of role {message.role}", param=f"{where}.content")
    roles = dict.fromkeys(_OF_ASSISTANTS, "assistant") | {"tool_call_id": "tool"}
    for name, role in roles.items():
        if message.role != role and getattr(message, name):
            raise RequestError(
                f"{where}.{name} belongs to messages of role {role}, got role {message.role}", param=f"{where}.{name}"
            )
