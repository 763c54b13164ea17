"""The fields of a chat's body about tools: which there are, and whether one must be called."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from specserve.errors import RequestError
from specserve.serve.http.openai.fields import Body, at_most
from specserve.serve.requests.request import describe

MAX_TOOLS = 128  # OpenAI's bound
MAX_NAME_CHARS = 128
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


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
