"""The rules that every request body is read by.

Every field of a request is either honoured, harmless by nature (`user`, `metadata`, ...), accepted only at the values
that change nothing (`UNSUPPORTED`), or an error that names it. null means "not given", at any depth. Types are strict:
true is not 1 and "0.5" is not 0.5. Knows nothing of HTTP; errors are RequestError with `param` set.
"""

import functools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, LiteralString, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, from_json

from specserve.errors import RequestError
from specserve.serve.http.transport.json_codec import is_long, read_json
from specserve.serve.requests.request import describe, request_error

logger = logging.getLogger(__name__)

MAX_OBJECT_FIELDS = 100
UnsupportedFields = Mapping[str, tuple[Any, ...]]  # field -> the values that change nothing, beside null
MAX_NAMES_LOGGED = 1000

# Fields that clients of OpenAI, vLLM and SGLang send by default, at values that change nothing. This server does not do
# what another value asks for, so such a value is an error. Of the first ones only null changes nothing.
# fmt: off
_NULL_ONLY = (
    "moderation", "prompt_cache_options", "ec_transfer_params", "guided_decoding_backend",
    "guided_whitespace_pattern", "kv_transfer_params", "logits_processors", "logprob_token_ids",
    "repetition_detection", "structural_tag", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "custom_logit_processor", "data_parallel_rank", "disagg_prefill_dp_rank", "ebnf", "extra_key", "regex", "rid",
    "routed_dp_rank",
)
UNSUPPORTED_ANYWHERE: UnsupportedFields = dict.fromkeys(_NULL_ONLY, ()) | {
    "prompt_cache_retention": ("in_memory", "in-memory"), "early_stopping": (False,), "length_penalty": (1,),
    "mm_processor_kwargs": ({},), "return_mm_kwargs": (True,), "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,), "spaces_between_special_tokens": (True,), "stream_interval": (1,),
    "thinking_token_budget": (-1,), "use_beam_search": (False,), "vllm_xargs": ({},), "watermarking": (False,),
    "custom_labels": ({},), "custom_params": ({},), "images_config": ({},), "lora_path": ("",),
    "no_stop_trim": (False,), "return_cached_tokens_details": (False,), "return_hidden_states": (False,),
    "return_routed_experts": (False,), "routed_experts_start_len": (0,), "session_params": ({},),
    "stop_regex": ([], ""),
}
# fmt: on
UNSUPPORTED_IN_COMPLETIONS: UnsupportedFields = {**UNSUPPORTED_ANYWHERE, "json_schema": (), "prompt_embeds": ()}
# fmt: off
UNSUPPORTED_IN_CHAT: UnsupportedFields = {
    **UNSUPPORTED_ANYWHERE, "add_special_tokens": (False,), "input_ids": (), "max_dynamic_patch": (),
    "media_io_kwargs": ({},), "min_dynamic_patch": (), "return_meta_info": (False,), "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,), "separate_reasoning": (True,), "stream_reasoning": (True,), "task": (),
    "use_audio_in_video": (False,), "audio": (), "chat_template": (), "documents": ([],), "echo": (False,),
    "function_call": ("none",), "functions": ([],), "modalities": (["text"],), "prediction": (),
    "verbosity": ("medium",), "web_search_options": (),
}
# fmt: on


def _only(expected: bool | int) -> BeforeValidator:
    """For literals, which take 0 for false and true for 1, as Python does."""

    def check(value: Any) -> Any:
        if isinstance(value, bool) != isinstance(expected, bool):
            raise PydanticCustomError("literal_error", "should be {expected}", {"expected": json.dumps(expected)})
        return value

    return BeforeValidator(check)


No = Annotated[Literal[False], _only(False)]
One = Annotated[Literal[1], _only(1)]


class UnknownFields:
    """Counts unknown fields, where the server lets them pass. Each name is logged once. Threads may share it."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._names: set[str] = set()

    def note(self, body: str, name: str) -> None:
        self._count()
        known = f"{body}.{name[:200]}"
        if known not in self._names and len(self._names) < MAX_NAMES_LOGGED:
            self._names.add(known)
            logger.warning("requests have an unknown field, which is not read: %s", known)


def check_num_fields(value: Any) -> Any:
    """Check that an object has not too many members. pydantic reports every error of an object, and a million wrong
    members would take it seconds."""
    if isinstance(value, dict) and len(value) > MAX_OBJECT_FIELDS:
        raise PydanticCustomError("fields", "has too many fields")
    return value


def at_most(most: int, kind: LiteralString, what: LiteralString) -> BeforeValidator:
    """A validator of lists and objects that refuses longer ones before pydantic looks at what is in them."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise PydanticCustomError(kind, "should have at most {most} " + what, {"most": most})
        return value

    return BeforeValidator(check)


def or_text(items: Any, item_of: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator of lists that takes one text too, of which it makes the one item."""

    def as_list(value: Any) -> Any:
        return [item_of(value)] if isinstance(value, str) else value

    return BeforeValidator(as_list, json_schema_input_type=str | items)


class Body(BaseModel):
    """The base of all bodies, and of the objects in them. `UNSUPPORTED` has known fields that may only be sent at
    values that change nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    UNSUPPORTED: ClassVar[UnsupportedFields] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """null means "not given", and a field that is not supported may have the values that change nothing."""
        found = handler(schema)
        own = handler.resolve_ref_schema(found)
        members = own.setdefault("properties", {})
        for name in set(members) - set(own.get("required", ())):
            members[name] = _or_null(members[name])
        for name, harmless in cls.UNSUPPORTED.items():
            members[name] = {"enum": [*harmless, None], "description": "Not supported: only what changes nothing."}
        return found

    @model_validator(mode="before")
    @classmethod
    def _known_members(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the members that are fields of this body and not null. pydantic's own refusal of others would report
        every one of a million. The validation's context is an UnknownFields where unknown ones may pass."""
        if not isinstance(value, dict):
            return value
        given, known = {}, _names(cls)
        for name, item in value.items():
            if name in known:
                if item is not None:
                    given[name] = item
            elif name in cls.UNSUPPORTED:
                _check_unsupported(name, item, cls.UNSUPPORTED[name])
            elif isinstance(info.context, UnknownFields):
                info.context.note(cls.__name__, name)
            else:
                raise PydanticCustomError("unknown", "unknown", {"field": name[:200]})
        return given


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    options = schema.pop("anyOf", None) or [
        {name: schema.pop(name) for name in list(schema) if name not in ("default", "description")}
    ]
    has_null = {"type": "null"} in options
    return {"anyOf": options if has_null else [*options, {"type": "null"}]} | schema


@functools.cache
def _names(body_type: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body_type.model_fields.items())


_BodyT = TypeVar("_BodyT", bound=Body)


def parse_body(body_type: type[_BodyT], raw: bytes, unknown_fields: UnknownFields | None = None) -> _BodyT:
    """Read a checked body from these bytes. Raises RequestError, whose `param` names the field that is wrong. Unknown
    fields are wrong too, unless `unknown` counts them."""
    return check_body(body_type, _parse_object(raw), unknown_fields)


def check_body(
    body_type: type[_BodyT], value: Mapping[str, Any], unknown_fields: UnknownFields | None = None
) -> _BodyT:
    """Check a body that was read as an object, or made."""
    try:
        return body_type.model_validate(value, context=unknown_fields)
    except ValidationError as error:
        raise _as_request_error(error) from None


def _parse_object(raw: bytes) -> dict[str, Any]:
    """Read a JSON object strictly. It refuses what json.loads lets through: NaN, lone surrogates, a BOM, bad UTF-8,
    deep nesting."""
    try:
        if is_long(raw):
            value = read_json(raw, _refuse_duplicates)
        else:
            value = from_json(raw, allow_inf_nan=False)
            json.loads(raw, object_pairs_hook=_refuse_duplicates)
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {describe(value)}")
    return cast(dict[str, Any], value)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError("an object has two members of one name")


def _check_unsupported(name: str, value: Any, harmless: tuple[Any, ...]) -> None:
    is_harmless = value is None or any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in harmless
    )
    if not is_harmless:
        allowed = " or send " + json.dumps(harmless[0]) if harmless else ""
        raise PydanticCustomError("unsupported", "unsupported", {"field": name, "allowed": allowed})


def _as_request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    names = first["loc"] + ((context["field"],) if first["type"] in ("unknown", "unsupported") else ())
    shown = [part for part in names if not str(part).startswith("<")]  # without the tags of alternatives
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in shown).lstrip(".")
    if first["type"] == "unknown":
        return RequestError(f"unknown field: {param}", param=param)
    if first["type"] == "unsupported":
        return RequestError(f"{param} is not supported yet: leave it out{context['allowed']}", param=param)
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param=param)
    return request_error(error, param)
