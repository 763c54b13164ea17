"""The body of Anthropic's POST /v1/messages, and how it becomes one of chat."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from specserve.errors import RequestError
from specserve.serve.http.adapters.translation import TranslatedBody, of, text_part
from specserve.serve.http.openai.bodies import Int64
from specserve.serve.http.openai.chat import MAX_MESSAGES
from specserve.serve.http.openai.fields import Body, UnsupportedFields, or_text
from specserve.serve.http.transport.json_codec import Json

MAX_BLOCKS = 10_000


class CacheControl(Body):
    """A hint that a prefix is worth caching. Every prefix is cached here, so it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    """Text of a message."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"citations": ([],)}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Body):
    """The thinking of the model. It is not signed here."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Body):
    """A call of a tool, as the model has asked for it."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"caller": ({"type": "direct"},)}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


_BOUND = Field(fail_fast=True, max_length=MAX_BLOCKS)
Texts = Annotated[list[TextBlock], _BOUND, or_text(list[TextBlock], text_part)]


class ToolResultBlock(Body):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list)
    is_error: bool = False
    cache_control: CacheControl | None = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(of),
]


class MessageBody(Body):
    """One message. A last message of the assistant is continued."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], _BOUND, or_text(list[ContentBlock], text_part)]

    def for_chat(self) -> list[Json]:
        """Return the message as messages of chat. Results of tools come first, in messages of their own."""
        results: list[Json] = []
        own: Json = {"role": self.role}
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                text = "Error: " * block.is_error + "\n".join(part.text for part in block.content)
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                own.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            elif isinstance(block, ThinkingBlock):
                own["reasoning_content"] = own.get("reasoning_content", "") + block.thinking
            else:
                own.setdefault("content", []).append(text_part(block.text))
        if len(own) > 1 or not results:
            own.setdefault("content", "")
            return [*results, own]
        return results


class Tool(Body):
    """A tool that the client runs. Chat's `tools` checks the schema of its input."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {
        "defer_loading": (False,),
        "input_examples": ([],),
        "allowed_callers": (["direct"],),
        "eager_input_streaming": (False, True),
    }

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def for_chat(self) -> Json:
        function = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


class ToolChoice(Body):
    """The choice whether the model has to call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of the tool
    disable_parallel_tool_use: bool = False

    def for_chat(self) -> str | Json:
        if (self.type == "tool") != (self.name is not None):
            raise RequestError(
                'tool_choice.name goes with {"type": "tool"} and with no other type', param="tool_choice.name"
            )
        named = {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none"}.get(self.type, named)


class Thinking(Body):
    """The switch of thinking. Its length cannot be set."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"display": ("summarized",)}

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: Annotated[Int64, Field(ge=1)] | None = None

    def check(self, max_tokens: int | None) -> None:
        """Raises RequestError where the budget belongs to another type, or could end the thinking before `max_tokens`
        ends the answer. None: there is no answer, only its prompt."""
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise RequestError(
                'thinking.budget_tokens goes with {"type": "enabled"} and with no other type',
                param="thinking.budget_tokens",
            )
        if self.budget_tokens is not None and self.budget_tokens < (max_tokens or 0):
            raise RequestError(
                f"thinking.budget_tokens must be at least max_tokens, {max_tokens}, where it changes nothing, got "
                f'{self.budget_tokens}: thinking has no budget of its own here; send {{"type": "adaptive"}}',
                param="thinking.budget_tokens",
            )


class Metadata(Body):
    """The sender of the request, for the client's own use."""

    user_id: str | None = None


class OutputConfig(Body):
    """The value of `output_config`."""

    effort: Any = None  # chat's `reasoning_effort` checks it
    format: dict[str, Any] | None = None  # a JSON schema, which chat's `response_format` checks

    def for_chat(self) -> Json:
        fields: Json = {"reasoning_effort": self.effort}
        if self.format is not None and self.format.get("type") == "json_schema":
            schema = {name: value for name, value in self.format.items() if name != "type"}
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "output"} | schema}
        elif self.format is not None:
            raise RequestError("output_config.format should have the type json_schema", param="output_config.format")
        return {name: value for name, value in fields.items() if value is not None}


class _Prompt(TranslatedBody):
    """The prompt of a request in Anthropic's API."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
    }
    # fmt: off
    UNSUPPORTED: ClassVar[UnsupportedFields] = {
        "container": (), "context_management": (), "diagnostics": (), "inference_geo": (), "mcp_servers": ([],),
        "speed": ("standard",), "user_profile_id": (), "workspace_id": (),
    }
    # fmt: on

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts = Field(default_factory=list)
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    metadata: Metadata | None = None  # type: ignore[assignment]
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]

    @property
    def thinks(self) -> bool | None:
        return None if self.thinking is None else self.thinking.type != "disabled"

    def chat_fields(self) -> Json:
        fields = self.shared_fields()
        fields = {name: value for name, value in fields.items() if name not in ("metadata", "service_tier")}
        messages: list[Json] = []
        if self.system:
            messages.append({"role": "system", "content": [text_part(block.text) for block in self.system]})
        for message in self.messages:
            messages += message.for_chat()
        fields |= {"messages": messages, "max_tokens": self.max_tokens}
        if self.stop_sequences:
            fields["stop"] = [*self.stop, *self.stop_sequences]
        if self.messages[-1].role == "assistant":
            fields["continue_final_message"] = True
        if self.thinking is not None:
            self.thinking.check(self.max_tokens)
        if self.output_config is not None:
            fields |= self.output_config.for_chat()
        if self.tools:
            fields["tools"] = [tool.for_chat() for tool in self.tools]
        if self.tool_choice is not None:
            choice = self.tool_choice.for_chat()
            if self.tools or choice not in ("auto", "none"):
                fields["tool_choice"] = choice
            if self.tools and self.tool_choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        return fields


class MessagesBody(_Prompt):
    """POST /v1/messages."""

    max_tokens: Annotated[Int64, Field(ge=1)]  # type: ignore[assignment]


class CountTokensBody(_Prompt):
    """POST /v1/messages/count_tokens: the tokens of the prompt that the same body would make."""
