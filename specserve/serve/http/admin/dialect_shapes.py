"""The shapes of the replies of /v1/responses, /v1/messages and /generate, as `reply_shapes` has the others."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field

from specserve.serve.http.admin.reply_shapes import ChosenLogprob, CompletionDetails, PromptDetails, ReplyShape
from specserve.serve.http.openai.replies import Json

# --- /v1/responses --------------------------------------------------------------------------------------------------


class OutputText(ReplyShape):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[ChosenLogprob]


class ReasoningText(ReplyShape):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputItem(ReplyShape):
    """The members that all items have."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputMessage(OutputItem):
    """A message of the model."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(OutputItem):
    """The reasoning of the model."""

    type: Literal["reasoning"]
    summary: list[Json]
    content: list[ReasoningText]


class OutputCall(OutputItem):
    """A tool that it calls; `arguments` are JSON."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResponseUsage(ReplyShape):
    """Token counts."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ResponseError(ReplyShape):
    """The reason why a response failed."""

    code: str
    message: str


class Response(ReplyShape):
    """POST /v1/responses: what was said, and what the body asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: Json | None
    output: list[Annotated[OutputMessage | OutputReasoning | OutputCall, Discriminator("type")]]
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: Json
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: Json
    service_tier: str
    store: Literal[False]
    temperature: float | None
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | None


class ResponseEvent(ReplyShape):
    """One event of a streamed response; its type says which other members it has, as in OpenAI's API."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
    response: Response | None = None


# --- /v1/messages ---------------------------------------------------------------------------------------------------


class SaidText(ReplyShape):
    """A message of the model."""

    type: Literal["text"]
    text: str


class SaidThinking(ReplyShape):
    """The reasoning of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class SaidToolUse(ReplyShape):
    """A tool that it calls."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class AnthropicUsage(ReplyShape):
    """Token counts; `input_tokens` are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(ReplyShape):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[SaidText | SaidThinking | SaidToolUse, Discriminator("type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(ReplyShape):
    """One event of a streamed message; its type says which other members it has, as in Anthropic's API."""

    model_config = ConfigDict(extra="allow")

    type: str
    message: AnthropicMessage | None = None


class AnthropicErrorDetails(ReplyShape):
    """`param` is the field that was wrong."""

    type: str
    message: str
    param: str | None


class AnthropicError(ReplyShape):
    """Every reply of a status from 400 below /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorDetails


# --- /generate ------------------------------------------------------------------------------------------------------

Row = list[float | int | str | None]  # log-probability, token id, text


class GenerateMeta(ReplyShape):
    """Facts about one answer. The last four are there where log-probabilities were asked for."""

    id: str
    finish_reason: Json | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    spec_verify_ct: int = 0
    e2e_latency: float = 0.0
    output_token_logprobs: list[Row] = Field(default_factory=list)
    output_top_logprobs: list[list[Row] | None] = Field(default_factory=list)
    input_token_logprobs: list[Row] = Field(default_factory=list)
    input_top_logprobs: list[list[Row] | None] = Field(default_factory=list)


class Generated(ReplyShape):
    """POST /generate: one answer, in a stream with all that has come so far; `index` of a batch's stream."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int = 0
