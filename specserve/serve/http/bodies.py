"""The rules that every request body is read by.

Every field of a request is either honoured, harmless by nature (`user`, `metadata`, ...), accepted only at the value
that changes nothing (`UNSUPPORTED`), or an error that names it. Types are strict: true is not 1 and "0.5" is not 0.5.
Knows nothing of HTTP; errors are RequestError with `param` set.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from specserve.errors import RequestError
from specserve.serve.http.patient_json import is_long, read_json
from specserve.serve.request import describe, request_error

MAX_OBJECT_FIELDS = 100


def check_num_fields(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_OBJECT_FIELDS:
        raise PydanticCustomError("fields", "has too many fields")
    return value


class Body(BaseModel):
    """The base of all bodies. `UNSUPPORTED` has known fields that may only be sent at values that change nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        """pydantic reports every error of an object; a million unknown fields would take it seconds."""
        return check_num_fields(value)


_BodyT = TypeVar("_BodyT", bound=Body)


def parse_body(body_type: type[_BodyT], raw: bytes) -> _BodyT:
    """The checked body that these bytes are. Raises RequestError, whose `param` names the field that is wrong."""
    given: dict[str, Any] = {}
    for name, value in _parse_object(raw).items():
        if name in body_type.UNSUPPORTED:
            _check_neutral(name, value, body_type.UNSUPPORTED[name])
        elif name not in body_type.model_fields:
            raise _unknown_field(name)
        elif value is not None:  # null means "not given"
            given[name] = value
    try:
        return body_type.model_validate(given)
    except ValidationError as error:
        raise _as_request_error(error) from None


def _parse_object(raw: bytes) -> dict[str, Any]:
    """The strict reader refuses what json.loads lets through: NaN, lone surrogates, a BOM, bad UTF-8, deep nesting."""
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


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    is_neutral = value is None or any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )
    if not is_neutral:
        allowed = " or send " + json.dumps(neutral[0]) if neutral else ""
        raise RequestError(f"{name} is not supported yet: leave it out{allowed}", param=name)


def _as_request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        return _unknown_field(param)
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param=param)
    return request_error(error, param)


def _unknown_field(name: str) -> RequestError:
    return RequestError(f"unknown field: {name[:200]}", param=name[:200])
