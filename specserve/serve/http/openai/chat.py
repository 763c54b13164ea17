"""The messages and tools of a chat, as clients send them and as chat templates take them."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from specserve.chat_template import REASONING_NAMES
from specserve.errors import RequestError
from specserve.serve.http.openai.fields import Body, at_most
from specserve.serve.requests.request import describe

MAX_MESSAGES = 10_000
MAX_CALLS = 1000  # of one message
MAX_TOOLS = 128  # OpenAI's bound
MAX_NAME_CHARS = 128
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


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
    """The function that a message's call names. `arguments` are JSON text; some clients send the object itself."""

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


# --- tools ---


def _check_parameters(value: Any) -> Any:
    """Check only what reading a call needs. Whether the value is a JSON schema is found out where it becomes a
    grammar."""
    if isinstance(value, dict) and value.get("type", "object") != "object":
        raise PydanticCustomError(
            "parameters",
            'should be the JSON schema of an object, got "type": {kind}',
            {"kind": describe(value["type"])},
        )
    if isinstance(value, dict) and not isinstance(value.get("properties", {}), dict):
        raise PydanticCustomError("parameters", "should have an object as its properties")
    return value


class FunctionDefinition(Body):
    """A function that the client can run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=MAX_NAME_CHARS)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(_check_parameters)] | None = None  # a JSON schema
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or NO_ARGUMENTS


class FunctionTool(Body):
    """A tool; the only kind there is."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": function | {"parameters": self.function.schema_of_arguments}}


Tools = Annotated[list[FunctionTool], Field(fail_fast=True), at_most(MAX_TOOLS, "tools", "tools")]


@dataclasses.dataclass(frozen=True)
class NamedTool:
    """The choice of one tool."""

    name: str


def _as_tool_choice(value: Any) -> str | NamedTool:
    if value in ("none", "auto", "required"):
        return value
    match value:
        case {"type": "function", "function": {"name": str(name), **others}, **rest} if not others and not rest:
            return NamedTool(name)
    raise PydanticCustomError(
        "tool_choice", 'should be "none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'
    )


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    PlainValidator(_as_tool_choice, json_schema_input_type=str | dict[str, Any]),
]


def chosen_tools(tools: Sequence[FunctionTool], choice: str | NamedTool) -> Sequence[FunctionTool]:
    """Return the tools that an answer may call. Raises RequestError where the choice does not fit the tools."""
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"two tools have the name {name}", param=f"tools[{i}].function.name")
    if choice == "none":
        return ()
    if choice == "required" and not tools:
        raise RequestError('tool_choice "required" needs tools', param="tool_choice")
    if isinstance(choice, NamedTool):
        if choice.name not in names:
            raise RequestError(f"tool_choice names {describe(choice.name)}, which is not in tools", param="tool_choice")
        return [tool for tool in tools if tool.function.name == choice.name]
    return tools
