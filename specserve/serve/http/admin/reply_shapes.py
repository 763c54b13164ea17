"""The shape of every reply, each in one place, as /openapi.json tells it; `dialect_shapes` has those of other APIs than
OpenAI's chat and completions.

The formats spell replies as plain objects, since that is what costs least for each event of a stream. Tests hold these
shapes against what is sent: an object has the members named here and no others, unless its docstring says so.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ReplyShape(BaseModel):
    """A JSON object. A member with a default may be absent."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetails(ReplyShape):
    """`param` is the field that was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(ReplyShape):
    """Every reply of a status from 400, as OpenAI's."""

    error: ErrorDetails


# --- what is served, and how it fares -------------------------------------------------------------------------------


class ModelCard(ReplyShape):
    """The target, or its draft head, whose parent is the target. `tau`: tokens per forward of the target; of the target
    so far, of a head in its own evaluation."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    tau: float | None
    parent: str = ""


class ModelList(ReplyShape):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class ServerLoad(ReplyShape):
    """GET /load: sequences that run or wait."""

    server_load: int


class Status(ReplyShape):
    """The reply of a server that is well."""

    status: Literal["ok"]


class Version(ReplyShape):
    """GET /version."""

    version: str


class ModelInfo(ReplyShape):
    """GET /get_model_info, as SGLang's."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    has_image_understanding: bool
    has_audio_understanding: bool


class InternalState(ReplyShape):
    """The state of one engine."""

    avg_spec_accept_length: float
    num_running_reqs: int
    num_waiting_reqs: int


class ServerInfo(ReplyShape):
    """GET /get_server_info, as SGLang's."""

    version: str
    model_path: str
    served_model_name: str
    context_length: int
    speculative_algorithm: str
    speculative_draft_model_path: str | None
    internal_states: list[InternalState]


class SpeculationNow(ReplyShape):
    """The way in which the server speculates: `off`, `auto`, or one way."""

    speculation: str


class DraftLoaded(ReplyShape):
    """A draft head by name, with tau of its own evaluation."""

    id: str
    tau: float | None


class LoadedDraft(ReplyShape):
    """POST /v1/load_draft."""

    status: Literal["ok"]
    draft: DraftLoaded


# --- tokens ---------------------------------------------------------------------------------------------------------


class Tokens(ReplyShape):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(ReplyShape):
    """POST /detokenize."""

    prompt: str


class TokenCount(ReplyShape):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class TokenizerInfo(ReplyShape):
    """GET /tokenizer_info; besides these, the tokenizer's special tokens by name."""

    model_config = ConfigDict(extra="allow")

    vocab_size: int
    tokenizer_class: str


class PromptLogprob(ReplyShape):
    """The log-probability of one token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null for the first token


# --- what /v1/completions and /v1/chat/completions share ------------------------------------------------------------


class PromptDetails(ReplyShape):
    """Tokens of prompts."""

    cached_tokens: int


class CompletionDetails(ReplyShape):
    """Tokens of answers, and draft tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenCounts(ReplyShape):
    """So far, in the middle of a stream."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenUsage(TokenCounts):
    """The tokens of a whole reply."""

    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class SpeculationMetrics(ReplyShape):
    """The speculation of one sequence, as vLLM tells it."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] = []
    per_step_drafted: list[int] = []


class ReplyMetrics(ReplyShape):
    """Times of the one sequence of a reply, where the server tells."""

    queue_time_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    generation_time_ms: float = 0.0
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: SpeculationMetrics | None = None


class DraftDepths(ReplyShape):
    """The origin of each token: the depth at which it was drafted, or 0 for the target's own."""

    tokens: list[str]
    depths: list[int]


class LastTree(ReplyShape):
    """The tree of the last step: nodes with their parents, and the accepted ones."""

    tokens: list[str]
    parents: list[int]
    accepted: list[int]


class OpenAIChoice(ReplyShape):
    """One answer, or in a stream what has come of it since the last chunk."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None
    token_ids: list[int] = []
    draft_depths: DraftDepths | None = None
    tree: LastTree | None = None


class OpenAIReply(ReplyShape):
    """The head of a reply, or of a chunk."""

    id: str
    created: int
    model: str
    metrics: ReplyMetrics | None = None


# --- /v1/completions ------------------------------------------------------------------------------------------------


class TokenLists(ReplyShape):
    """Log-probabilities in parallel lists, one item for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(OpenAIChoice):
    """One completion."""

    text: str
    logprobs: TokenLists | None
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: list[int] = []


class Completion(OpenAIReply):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(OpenAIReply):
    """One event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage | TokenCounts | None = None


# --- /v1/chat/completions -------------------------------------------------------------------------------------------


class TokenLogprob(ReplyShape):
    """The log-probability of one token. `bytes` is null for a token that is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    """The log-probability of a token of the answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobLists(ReplyShape):
    """One item for each token."""

    content: list[ChosenLogprob]
    refusal: None


class SaidFunction(ReplyShape):
    """`arguments` are JSON."""

    name: str
    arguments: str


class SaidCall(ReplyShape):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: SaidFunction


class FunctionDelta(ReplyShape):
    """The name comes first; `arguments` are the next piece of the JSON."""

    name: str = ""
    arguments: str


class ToolCallDelta(ReplyShape):
    """A piece of a call; the first has its id, type and name."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class SaidMessage(ReplyShape):
    """The message of the model: content is null where it is calls alone. Reasoning has both its names."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[SaidCall] = []


class ChatDelta(ReplyShape):
    """The next part of a message; the first has its role."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChoice(OpenAIChoice):
    """One answer."""

    message: SaidMessage
    logprobs: ChatLogprobLists | None


class ChatChunkChoice(OpenAIChoice):
    """A piece of one answer."""

    delta: ChatDelta
    logprobs: ChatLogprobLists | None


class ChatCompletion(OpenAIReply):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []


class ChatChunk(OpenAIReply):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenUsage | TokenCounts | None = None
    prompt_token_ids: list[int] = []
