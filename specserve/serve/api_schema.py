"""The request bodies that the server accepts.

Every field of a request is either honoured, harmless by nature (`user`, `metadata`, ...), accepted only at the value
that changes nothing (`UNSUPPORTED`), or an error that names it. Types are strict: true is not 1 and "0.5" is not 0.5.
Knows nothing of HTTP; errors are RequestError with `param` set.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from specserve.errors import RequestError
from specserve.serve.request import SamplingParams

MAX_CHOICES = 128  # n, and the sequences (prompts times n) of one HTTP request
MAX_STOP_TOKEN_IDS = 1024
MAX_MESSAGES = 10_000
MAX_OBJECT_FIELDS = 100
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat runs up to the context length

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

# Field -> the values that mean "not used". null always does.
_UNSUPPORTED_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
_UNSUPPORTED_IN_COMPLETIONS = _UNSUPPORTED_ANYWHERE | {"logprobs": (), "suffix": ("",)}
_UNSUPPORTED_IN_CHAT = _UNSUPPORTED_ANYWHERE | {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def _as_prompts(value: Any) -> list[str | list[int]]:
    """A string, a list of strings, token ids, or a list of token id lists: always a list of prompts."""
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


def _check_num_fields(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_OBJECT_FIELDS:
        raise PydanticCustomError("fields", "has too many fields")
    return value


def _as_strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_text_parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list) and value:
        return value
    raise PydanticCustomError("content", "should be a string or a list of text parts")


class Body(BaseModel):
    """Base of all bodies. `UNSUPPORTED` names known fields that may only be sent at a value that changes nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        """pydantic reports every error of an object; a million unknown fields would take it seconds."""
        return _check_num_fields(value)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False


class SamplingBody(Body):
    """What completions and chat share. With n > 1 and a seed, choice i is drawn with seed + i."""

    model: str | None = None  # None: the one model that is served
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    best_of: Int64 | None = None  # only n itself: nothing is ever ranked and dropped
    max_tokens: Int64 | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = 0
    min_p: float = 0.0
    seed: Int64 | None = None
    stop: Annotated[list[str], Field(fail_fast=True), BeforeValidator(_as_strings)] = []
    stop_token_ids: Annotated[list[Int64], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Harmless by nature: they never change an answer.
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_check_num_fields)] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, max_tokens: int | None, vocab_size: int) -> list[SamplingParams]:
        """One SamplingParams per choice. Raises RequestError for what single fields cannot show."""
        if self.best_of not in (None, self.n):
            raise RequestError(f"best_of is not supported yet: leave it out or send n, {self.n}", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream: true", param="stream_options")
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"stop_token_ids must be in [0, {vocab_size}), got {token_id}", param="stop_token_ids"
                )
        return [
            SamplingParams.create(
                max_tokens=max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                seed=None if self.seed is None else self.seed + choice,
                stop=self.stop,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
            )
            for choice in range(self.n)
        ]


class CompletionBody(SamplingBody):
    """POST /v1/completions. `echo` puts the prompt's text before each answer."""

    UNSUPPORTED = _UNSUPPORTED_IN_COMPLETIONS

    prompt: Annotated[list[str | list[int]], PlainValidator(_as_prompts)]
    echo: bool = False
    add_special_tokens: bool = True
    max_tokens: Int64 | None = DEFAULT_COMPLETION_TOKENS


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message. "developer" is OpenAI's newer word for "system" and means the same here."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], Field(fail_fast=True), BeforeValidator(_as_text_parts)]
    # Fields of an assistant message that clients send back as they got them: only empty.
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatTemplateKwargs(Body):
    """The template variables that a client may set; any other name could replace the template's own."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    UNSUPPORTED = _UNSUPPORTED_IN_CHAT

    messages: Messages
    max_completion_tokens: Int64 | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return {} if self.chat_template_kwargs is None else self.chat_template_kwargs.model_dump(exclude_none=True)

    @property
    def max_new_tokens(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                "max_tokens and max_completion_tokens differ: send one of them", param="max_completion_tokens"
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeBody(Body):
    """POST /tokenize: either a prompt or messages."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"return_token_strs": (False,)}

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: ChatTemplateKwargs | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Int64], Field(fail_fast=True)]


_BodyT = TypeVar("_BodyT", bound=Body)


def parse_body(body_type: type[_BodyT], raw: bytes) -> _BodyT:
    """Bytes to a checked body. Raises RequestError that names the field."""
    fields: dict[str, Any] = {}
    for name, value in _parse_object(raw).items():
        if name in body_type.UNSUPPORTED:
            _check_neutral(name, value, body_type.UNSUPPORTED[name])
        elif name not in body_type.model_fields:
            raise _unknown_field(name)
        elif value is not None:  # null means "not given"
            fields[name] = value
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise _as_request_error(error.errors(include_url=False, include_context=False)[0]) from None


def _parse_object(raw: bytes) -> dict[str, Any]:
    """The strict reader refuses what json.loads lets through: NaN, lone surrogates, a BOM, bad UTF-8, deep nesting."""
    try:
        value = from_json(raw, allow_inf_nan=False)
        json.loads(raw, object_pairs_hook=_refuse_duplicates)
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {_describe(value)}")
    return cast(dict[str, Any], value)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError("an object has two members of one name")


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    is_neutral = value is None or any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )
    if not is_neutral:
        allowed = " or send " + json.dumps(neutral[0]) if neutral else ""
        raise RequestError(f"{name} is not supported yet: leave it out{allowed}", param=name)


def _as_request_error(error: ErrorDetails) -> RequestError:
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error["type"] == "extra_forbidden":
        return _unknown_field(param)
    if error["type"] == "missing":
        return RequestError(f"{param} is required", param=param)
    message = error["msg"].removeprefix("Input ")
    return RequestError(f"{param} {message[0].lower()}{message[1:]}, got {_describe(error['input'])}", param=param)


def _unknown_field(name: str) -> RequestError:
    return RequestError(f"unknown field: {name[:200]}", param=name[:200])


def _describe(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:80] + "..."
