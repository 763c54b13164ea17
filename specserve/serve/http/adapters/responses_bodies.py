"""The body of OpenAI's POST /v1/responses, and how it becomes one of chat. Stateless: nothing is stored, so nothing can
be referred to by its id."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from specserve.serve.http.adapters.translation import TranslatedBody, of, text_part
from specserve.serve.http.openai.bodies import Int64
from specserve.serve.http.openai.chat import MAX_MESSAGES
from specserve.serve.http.openai.fields import Body, No, UnsupportedFields, or_text
from specserve.serve.http.transport.json_codec import Json

MAX_PARTS = 10_000


class ContentPart(Body):
    """One part of a message's content. There are no others than text."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text", "text"]
    text: str


class ReasoningPart(Body):
    """One part of the reasoning of a model."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


_Content = Annotated[
    list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS), or_text(list[ContentPart], text_part)
]
_Status = Literal["in_progress", "completed", "incomplete"]


class Item(Body):
    """One item of the input. Clients send those of an answer back as they got them."""

    id: str | None = None
    status: _Status | None = None


class MessageItem(Item):
    """A message of the conversation."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"phase": ("final_answer",)}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class CallItem(Item):
    """A call of a function, as the model has asked for it."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"namespace": (), "caller": ()}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Item):
    """The result of a function."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"caller": ()}

    type: Literal["function_call_output"]
    call_id: str
    output: _Content


class ReasoningItem(Item):
    """The reasoning of a model before it answered or called. It is read from `content`."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"encrypted_content": ()}

    type: Literal["reasoning"]
    summary: list[ReasoningPart] = Field(default_factory=list)
    content: Annotated[list[ReasoningPart], Field(min_length=1, fail_fast=True)]


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(lambda value: of(value, "message")),
]


class ReasoningOptions(Body):
    """The value of `reasoning`. There are no summaries."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"generate_summary": ("auto",), "summary": ("auto",)}

    effort: Any = None  # chat's `reasoning_effort` checks it


class TextOptions(Body):
    """The value of `text`."""

    format: dict[str, Any] | None = None  # chat's `response_format` checks it
    verbosity: Any = None


class ResponsesTool(Body):
    """A function that the model may call. Chat's `tools` checks the schema of its parameters."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {"defer_loading": (False,)}

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> Json:
        own = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": own}


class ResponsesBody(TranslatedBody):
    """POST /v1/responses."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
        "verbosity": "text",
        "reasoning_effort": "reasoning",
        "logprobs": "top_logprobs",
    }
    # fmt: off
    UNSUPPORTED: ClassVar[UnsupportedFields] = {
        "access_programs": (), "background": (False,), "background_options": (), "context_management": ([],),
        "conversation": (), "image": (), "max_tool_calls": (), "moderation": (), "previous_response_id": (),
        "prompt": (), "prompt_cache_options": (), "prompt_cache_retention": ("in_memory",), "truncation": ("disabled",),
    }
    # fmt: on

    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        or_text(list[InputItem], lambda text: {"role": "user", "content": text}),
    ]
    instructions: str | None = None
    max_tokens: None = None  # type: ignore[assignment]  # it is max_output_tokens here
    max_output_tokens: Annotated[Int64, Field(ge=1)] | None = None
    top_logprobs: Int64 = 0
    # Reasoning is sent in plain text, which can be sent back; so asking for it encrypted changes nothing.
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list, max_length=8
    )
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None  # chat checks it
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # chat checks them
    store: No = False  # type: ignore[assignment]

    @property
    def has_logprobs(self) -> bool:
        """Return whether the reply is to have log-probabilities."""
        return "message.output_text.logprobs" in self.include or self.top_logprobs > 0

    def chat_fields(self) -> Json:
        fields = self.shared_fields() | {"messages": self._messages(), "max_tokens": self.max_output_tokens}
        if self.has_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        fields["chat_template_kwargs"] = self.chat_template_kwargs
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text is not None:
            fields |= {"verbosity": self.text.verbosity, "response_format": _chat_format(self.text.format)}
        if self.tools:
            fields["tools"] = [tool.for_chat() for tool in self.tools]
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        if self.tools or self.tool_choice not in ("auto", "none"):
            fields["tool_choice"] = _chat_choice(self.tool_choice)
        return {name: value for name, value in fields.items() if value is not None}

    def _messages(self) -> list[Json]:
        messages: list[Json] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if isinstance(item, MessageItem) and item.role == "assistant":
                _assistant(messages, "content")["content"] = _text_parts(item.content)
            elif isinstance(item, MessageItem):
                messages.append({"role": item.role, "content": _text_parts(item.content)})
            elif isinstance(item, CallOutputItem):
                content = _text_parts(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            elif isinstance(item, CallItem):
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            else:
                text = "".join(part.text for part in item.content)
                _assistant(messages, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text
        return messages


def _assistant(messages: list[Json], *unless: str) -> Json:
    """Return the message that the next item of an answer belongs to: the last one, if that is an answer that has no
    such parts yet, or a new one. Reasoning, text and calls stand in this order in a message."""
    if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(name) for name in unless):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text_parts(parts: Sequence[ContentPart]) -> list[Json] | str:
    return [text_part(part.text) for part in parts] or ""


def _chat_format(given: Json | None) -> Json | None:
    """Return the format as chat has it, with the schema one level deeper."""
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: item for name, item in given.items() if name != "type"}}


def _chat_choice(given: str | Json | None) -> str | Json | None:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {name: item for name, item in given.items() if name != "type"}}
    return given
