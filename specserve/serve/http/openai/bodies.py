"""The bodies of OpenAI's completions and chat, with the fields that clients of vLLM and SGLang send besides. `fields`
has the rules that they are read by."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, PlainValidator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from specserve.errors import RequestError
from specserve.serve.http.openai.chat import Messages, ToolChoice, Tools
from specserve.serve.http.openai.fields import (
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    Body,
    No,
    at_most,
    check_num_fields,
    or_text,
)
from specserve.serve.requests.request import MAX_TOKEN_IDS, GrammarSpec, SamplingParams, describe, option_schemas
from specserve.speculative.ranges import Bias, TokenId

MAX_ALTERNATIVES = 10_000  # of a choice
MAX_SALT_CHARS = 1024
MAX_ID_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat runs up to the context length

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]

# The fields that a body and SamplingParams share; a field that the body lacks fails when the first request is read.
_OF_ROUTES = ("hidden_states", "shown_special_ids")  # options that no body has, and some routes set
_OPTIONS = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in _OF_ROUTES]


def as_prompts(value: Any) -> list[str | list[int]]:
    """Return a list of prompts, from a string, a list of strings, token ids, or a list of token id lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if _is_token_ids(value):
            return [value]
        if all(isinstance(item, list) and item and _is_token_ids(item) for item in value):
            return list(value)
    raise PydanticCustomError(
        "prompt", "should be a string, a list of strings, a list of token ids or a list of token id lists, none empty"
    )


def _is_token_ids(items: Sequence[Any]) -> bool:
    return all(type(item) is int for item in items)


def _as_token_id(key: str) -> int:
    """Read a token id from a name of a JSON object, which is a string. Only the plain spelling is read: "07" and "7"
    would be two biases of one token."""
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
        raise RequestError(
            f"logit_bias must map token ids in decimal to numbers, got the key {describe(key)}", param="logit_bias"
        )
    return int(key)


def _as_speculation(value: Any) -> int | None:
    if value == "auto":
        return None
    if value == "off":
        return 0
    if type(value) is int and 0 <= value < 2**31:
        return value
    raise PydanticCustomError("speculation", 'should be "auto", "off" or the most draft tokens to accept in a step')


CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)]
Biases = Annotated[dict[str, Bias], at_most(MAX_TOKEN_IDS, "biases", "token ids")]
Stops = Annotated[list[str], Field(fail_fast=True), or_text(list[str], str)]
Speculation = Annotated[int | None, PlainValidator(_as_speculation, json_schema_input_type=int | str)]


# --- structured output: what an answer must be ---


def _as_schema(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str):
        return value
    raise PydanticCustomError("schema", "should be a JSON schema, as an object or as its text")


Schema = Annotated[str, PlainValidator(_as_schema, json_schema_input_type=dict[str, Any] | str)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True)]


class JsonSchema(Body):
    """The value of `response_format.json_schema`. A schema always holds, whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """The value of `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """The value of `structured_outputs`: exactly one of the five kinds."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # of vLLM's backends: only at the values that change nothing here
    disable_any_whitespace: No | None = None
    whitespace_pattern: None = None
    structural_tag: None = None
    disable_fallback: bool | None = None
    disable_additional_properties: No | None = None


class GrammarFields(Body):
    """The fields for structured output, for all bodies that generate. At most one of them may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def grammar(self) -> GrammarSpec | None:
        """The grammar that the answers must follow. Raises RequestError."""
        found = self._grammars()
        if len(found) > 1:
            *_, last = found
            raise RequestError(f"{' and '.join(found)} each say what the answer must be; send one", param=last)
        return next(iter(found.values()), None)

    @property
    def grammar_field(self) -> str:
        """The field that `grammar` comes from."""
        return next(iter(self._grammars()), "response_format")

    def _grammars(self) -> dict[str, GrammarSpec]:
        """Return the grammars that are asked for, each by the field that asks for it."""
        asked: dict[str, GrammarSpec | None] = {
            "response_format": _of_format(self.response_format),
            "guided_json": _text("json_schema", self.guided_json),
            "guided_regex": _text("regex", self.guided_regex),
            "guided_choice": _text("choice", self.guided_choice),
            "guided_grammar": _text("lark", self.guided_grammar),
        }
        if (own := self.structured_outputs) is not None:
            asked |= {
                "structured_outputs.json": _text("json_schema", own.json_),
                "structured_outputs.regex": _text("regex", own.regex),
                "structured_outputs.choice": _text("choice", own.choice),
                "structured_outputs.grammar": _text("lark", own.grammar),
                "structured_outputs.json_object": _ANY_OBJECT if own.json_object else None,
            }
        return {name: spec for name, spec in asked.items() if spec is not None}


_ANY_OBJECT = GrammarSpec("json_schema", '{"type": "object"}')


def _of_format(response_format: ResponseFormat | None) -> GrammarSpec | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return _ANY_OBJECT
    if response_format.json_schema is None:
        raise RequestError("response_format.json_schema is required with this type", param="response_format")
    return GrammarSpec("json_schema", json.dumps(response_format.json_schema.schema_))


def _text(kind: Literal["json_schema", "regex", "lark", "choice"], text: str | list[str] | None) -> GrammarSpec | None:
    if text is None:
        return None
    return GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text))


# --- the fields of all bodies that generate ---


class StreamOptions(Body):
    """The value of `stream_options`."""

    include_usage: bool = False
    """The stream ends with a chunk of token counts."""
    continuous_usage_stats: bool = False
    """With `include_usage`: every chunk counts the tokens so far."""
    include_obfuscation: No = False


_BOUND_ELSEWHERE = ("logprobs", "prompt_logprobs", "max_tokens", "speculation")  # they differ between endpoints
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minItems", "maxItems", "maxProperties")


def _bounds(known: JsonSchemaValue, kind: str | None) -> JsonSchemaValue:
    """Return the bounds that the schema of an option has for values of one JSON type. Those of items are in the body's
    types, because an error is to name the item."""
    options = [option for option in known.get("anyOf", [known]) if option.get("type") == kind]
    return {name: option[name] for option in options for name in _BOUNDS if name in option}


class SamplingBody(GrammarFields):
    """The fields that completions and chat share. SamplingParams checks the ranges of their values; the engine checks
    token ids and words against its vocabulary."""

    model: str | None = None
    """The name of the model that is served; it may be left out."""
    n: Int64 = SamplingParams.n
    """The number of answers; answer i is drawn with `seed + i`."""
    best_of: Int64 | None = None
    """Only `n` itself: no answer is ever ranked and dropped."""
    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    min_tokens: Int64 = SamplingParams.min_tokens
    """No end of sequence and no stop token id comes before so many tokens."""
    temperature: float = SamplingParams.temperature
    """0 is greedy. Of it and the next four, the model's generation_config.json may have other defaults
    (`--sampling-defaults`)."""
    top_p: float = SamplingParams.top_p
    top_k: Int64 = SamplingParams.top_k
    """0 and -1: off."""
    min_p: float = SamplingParams.min_p
    repetition_penalty: float = SamplingParams.repetition_penalty
    """Over the tokens of prompt and answer."""
    presence_penalty: float = SamplingParams.presence_penalty
    """Over the tokens of the answer."""
    frequency_penalty: float = SamplingParams.frequency_penalty
    """Over the tokens of the answer."""
    logit_bias: Biases = Field(default_factory=dict)
    """From token ids, in plain decimal, to biases: `{"42": -100}`."""
    allowed_token_ids: TokenIds | None = None
    """Every other token is banned."""
    bad_words: Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    """Never produced, nor with a space in front."""
    seed: Int64 | None = None
    """Drawn by the server where it is not given."""
    stop: Stops = Field(default_factory=list)
    """Strings that end the answer and are no part of it."""
    stop_token_ids: TokenIds = Field(default_factory=list)
    include_stop_str_in_output: bool = SamplingParams.include_stop_str_in_output
    """The text ends with the stop string, or with the text of the stop token id."""
    ignore_eos: bool = SamplingParams.ignore_eos
    skip_special_tokens: bool = SamplingParams.skip_special_tokens
    """false: the text shows special tokens, but not the one that ends it."""
    truncate_prompt_tokens: Annotated[Int64, Field(ge=-1)] | None = None
    """Keep so many tokens of the prompt; -1: as many as fit."""
    truncation_side: Literal["left", "right"] = "left"
    """The side that this cuts: `right` keeps the first tokens."""
    prompt_logprobs: Int64 | None = None
    """Log-probabilities of the prompt's tokens, in vLLM's shape, and of 0 to 20 likely ones. Not in streams."""
    return_tokens_as_token_ids: bool = False
    """Tokens in log-probabilities are named `token_id:42`."""
    return_token_ids: bool = False
    """`token_ids` of each choice, and `prompt_token_ids`."""
    return_draft_depths: bool = False
    """The origin of each token: 0, or the depth at which it was a draft token."""
    return_tree: bool = SamplingParams.return_tree
    """The tree that the last step proposed."""
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    """A part of the reply's `id`; drawn where it is not given."""
    speculation: Speculation = None
    """"auto", "off", or the most draft tokens that a step accepts; 0 is off."""
    priority: Int64 = 0
    """Lower runs first; other than 0 only with `--allow-priority`."""
    cache_salt: CacheSalt = ""
    """Cached prefixes are shared only under one salt."""
    learn: bool = True
    """false, as a `cache_salt` or `store: false`: a server with `--learn` keeps nothing of this request."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Changes nothing, as all fields below."""
    metadata: Annotated[dict[str, str], BeforeValidator(check_num_fields)] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Make the schema, with the ranges that SamplingParams checks."""
        found = super().__get_pydantic_json_schema__(schema, handler)
        members = handler.resolve_ref_schema(found)["properties"]
        bounded = {name: known for name, known in option_schemas().items() if name not in _BOUND_ELSEWHERE}
        for name in bounded.keys() & members.keys():
            for option in members[name]["anyOf"]:
                option |= _bounds(bounded[name], option.get("type"))
        return found

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens that one answer may have. None means as many as fit."""
        return self.max_tokens

    @property
    def may_learn(self) -> bool:
        """Return whether a draft head may learn from the answers: their client has not said that they are private."""
        is_unstored = self.store is False and "store" in self.model_fields_set  # some bodies have it as their default
        return self.learn and not is_unstored and not self.cache_salt

    @property
    def num_logprobs(self) -> int | None:
        """The number of most likely tokens that are returned at each place besides the one drawn. None means no
        log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The number of most likely tokens that are returned for each token of the prompt, or None."""
        return self.prompt_logprobs

    def reword(self, error: RequestError) -> RequestError:
        """Return an error of SamplingParams or of the engine under the name that the client of this endpoint sent."""
        return RequestError(str(error), param=self.grammar_field) if error.param == "grammar" else error

    def sampling_params(self) -> SamplingParams:
        """Return the options under the engine's names, which fields of the same name have already. Raises RequestError
        for values out of range and for combinations of fields that cannot be."""
        if self.best_of not in (None, self.n):
            raise RequestError(f"best_of is not supported yet: leave it out or send n, {self.n}", param="best_of")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be streamed: leave out stream", param="prompt_logprobs")
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise RequestError("stream_options is only allowed with stream: true", param="stream_options")
        options = {name: getattr(self, name) for name in _OPTIONS}
        bias = {_as_token_id(key): value for key, value in self.logit_bias.items()}
        options |= {"max_tokens": self.max_new_tokens, "logprobs": self.num_logprobs, "logit_bias": bias}
        options["prompt_logprobs"] = self.num_prompt_logprobs
        try:
            return SamplingParams(**options)
        except RequestError as error:
            raise self.reword(error) from None


class CompletionBody(SamplingBody):
    """POST /v1/completions. `echo` puts the prompt's text before each answer."""

    UNSUPPORTED = UNSUPPORTED_IN_COMPLETIONS

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    """A string, token ids, or a list of them; a request makes at most 128 sequences."""
    suffix: str = ""
    """The answer is the text between prompt and suffix, for models that fill in the middle."""
    echo: bool = False
    """The text begins with the prompt, and `logprobs` with the prompt's."""
    add_special_tokens: bool = True
    max_tokens: Annotated[Int64, Field(ge=0)] | None = DEFAULT_COMPLETION_TOKENS
    """At most what the context leaves. With `echo`, 0 returns the prompt alone."""
    logprobs: Int64 | None = None
    """Log-probabilities of each token, and of 0 to 20 of the most likely ones."""

    @property
    def is_prompt_only(self) -> bool:
        """Return whether nothing is to be generated, and only the prompt comes back, as some evaluations want it for
        its log-probabilities."""
        return self.echo and self.max_tokens == 0

    @property
    def max_new_tokens(self) -> int | None:
        return 1 if self.is_prompt_only else self.max_tokens  # a sequence ends with a token, which is left out

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatTemplateKwargs(Body):
    """The template variables that a client may set; any other name could replace the template's own."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    UNSUPPORTED = UNSUPPORTED_IN_CHAT

    messages: Messages
    tools: Tools = Field(default_factory=list)
    """`parameters` of a function is the JSON schema of an object."""
    tool_choice: ToolChoice = "auto"
    """"none", "auto", "required" or `{"type": "function", "function": {"name": NAME}}`."""
    parallel_tool_calls: bool = True
    """false: an answer calls at most one tool."""
    reasoning_effort: Effort | None = None
    """As the template does by itself, where it is not given."""
    include_reasoning: bool = True
    """false: reasoning is left out of the reply; its tokens count, and are in `logprobs`."""
    max_completion_tokens: Annotated[Int64, Field(ge=1)] | None = None
    """At most what the context leaves, which is also the default; `max_tokens` is the same."""
    logprobs: bool = False
    top_logprobs: Int64 = 0
    """From 0 to 20; needs `logprobs: true`."""
    chat_template_kwargs: ChatTemplateKwargs | None = None
    """Variables of the chat template."""
    add_generation_prompt: bool | None = None
    """true unless the final message is continued."""
    continue_final_message: bool = False
    """The answer goes on where the last message ends."""

    @property
    def has_generation_prompt(self) -> bool:
        """Return whether the prompt ends where a new answer begins. Raises RequestError where two fields ask
        for both."""
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true: send one of them",
                param="continue_final_message",
            )
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def max_new_tokens(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                "max_tokens and max_completion_tokens differ: send one of them", param="max_completion_tokens"
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None

    def reword(self, error: RequestError) -> RequestError:
        if error.param == "grammar" and self.grammar is None:  # it was made of the tools
            return RequestError(str(error), param="tools")
        if error.param == "prompt":
            return RequestError(str(error), param="messages")
        if error.param == "max_tokens" and self.max_completion_tokens is not None:
            return RequestError(
                str(error).replace("max_tokens", "max_completion_tokens"), param="max_completion_tokens"
            )
        if error.param == "logprobs":
            return RequestError(str(error).replace("logprobs", "top_logprobs"), param="top_logprobs")
        return super().reword(error)
