"""Holds what a server sends against the types from which /openapi.json is made."""

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import httpx
from pydantic import TypeAdapter

from specserve.serve.http.admin.openapi import ERRORS, types_of
from specserve.serve.http.app import create_app

_TEMPLATE = SimpleNamespace(mentions=lambda _: False)
_ENGINE: Any = SimpleNamespace(
    model_name="",
    tokenizer=SimpleNamespace(template=_TEMPLATE, has_chat_template=False, sampling_defaults={}),
    stats=None,
)
TYPES: dict[str, Any] = types_of(create_app(_ENGINE)) | {"error": ERRORS}


@cache
def _shape(kind: str, key: str) -> TypeAdapter[Any]:
    return TypeAdapter(TYPES[kind][key])


def check_reply(reply: httpx.Response) -> None:
    """A hook for clients: what comes as JSON, from whatever test, has the shape that is described."""
    if reply.headers.get("content-type") != "application/json":
        return
    content, path = reply.read(), reply.request.url.path
    if reply.status_code == 200 and content:  # none for HEAD
        _shape("reply", "/v1/models/{model}" if path.startswith("/v1/models/") else path).validate_json(content)
    elif content:
        _shape("error", "AnthropicError" if path.startswith("/v1/messages") else "Error").validate_json(content)


def check_events(path: str, stream: str) -> list[Any]:
    """The events of a whole stream, whose shape each has; or that of an error, which ends it."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    for event in events:
        if set(event) == {"error"}:
            _shape("error", "Error").validate_json(json.dumps(event))
        else:
            _shape("event", path).validate_json(json.dumps(event))
    return events
