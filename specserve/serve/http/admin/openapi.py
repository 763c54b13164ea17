"""The description of an app by OpenAPI: every route, with the schemas of the body that it reads, of what it replies and
of the errors that it may reply. What no schema can tell (a vocabulary, a context, two fields that do not fit) is a 400
all the same.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

import specserve
from specserve.serve.http.adapters.generate_bodies import GenerateBody
from specserve.serve.http.adapters.messages_bodies import CountTokensBody, MessagesBody
from specserve.serve.http.adapters.messages_replies import PATH as MESSAGES
from specserve.serve.http.adapters.responses_bodies import ResponsesBody
from specserve.serve.http.admin import dialect_shapes, reply_shapes
from specserve.serve.http.admin.draft_routes import LoadDraftBody, SpeculationBody
from specserve.serve.http.admin.metrics import CONTENT_TYPE
from specserve.serve.http.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from specserve.serve.http.openai.fields import Body
from specserve.serve.http.openai.replies import Json
from specserve.serve.http.transport.guard import OPEN_PATHS
from specserve.serve.http.transport.request_ids import HEADER

BODIES: Mapping[str, type[Body]] = {
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/load_draft": LoadDraftBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/responses": ResponsesBody,
    "/v1/speculation": SpeculationBody,
}
REPLIES: Mapping[str, Any] = {
    "/flush_cache": reply_shapes.Status,
    "/generate": dialect_shapes.Generated | list[dialect_shapes.Generated],
    "/get_model_info": reply_shapes.ModelInfo,
    "/get_server_info": reply_shapes.ServerInfo,
    "/health": reply_shapes.Status,
    "/load": reply_shapes.ServerLoad,
    "/model_info": reply_shapes.ModelInfo,
    "/openapi.json": dict[str, Any],
    "/ready": reply_shapes.Status,
    "/server_info": reply_shapes.ServerInfo,
    "/tokenize": reply_shapes.Tokens,
    "/detokenize": reply_shapes.Detokenized,
    "/tokenizer_info": reply_shapes.TokenizerInfo,
    "/v1/chat/completions": reply_shapes.ChatCompletion,
    "/v1/completions": reply_shapes.Completion,
    "/v1/load_draft": reply_shapes.LoadedDraft,
    "/v1/messages": dialect_shapes.AnthropicMessage,
    "/v1/messages/count_tokens": reply_shapes.TokenCount,
    "/v1/models": reply_shapes.ModelList,
    "/v1/models/{model}": reply_shapes.ModelCard,
    "/v1/responses": dialect_shapes.Response,
    "/v1/speculation": reply_shapes.SpeculationNow,
    "/version": reply_shapes.Version,
}
EVENTS: Mapping[str, type[reply_shapes.ReplyShape]] = {  # of streams
    "/generate": dialect_shapes.Generated,
    "/v1/chat/completions": reply_shapes.ChatChunk,
    "/v1/completions": reply_shapes.CompletionChunk,
    "/v1/messages": dialect_shapes.AnthropicEvent,
    "/v1/responses": dialect_shapes.ResponseEvent,
}
ENDS_WITH_DONE = ("/generate", "/v1/chat/completions", "/v1/completions")
ERRORS: Mapping[str, type[reply_shapes.ReplyShape]] = {
    "Error": reply_shapes.Error,
    "AnthropicError": dialect_shapes.AnthropicError,
}
TEXTS: Mapping[str, str] = {"/docs": "text/html", "/metrics": CONTENT_TYPE.partition(";")[0]}

_TEXT = {"type": "string"}
_FAILURES = {
    400: "The request cannot be served as it stands; `param` names the field.",
    401: "No API key, or a wrong one.",
    403: "The operator has not allowed it.",
    404: "A model that is not served.",
    405: "The path has other methods.",
    408: "The head or the body of the request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON, or compressed.",
    431: "The head of the request is too large.",
    500: "A failure on the server's side.",
    501: "The body is in another Transfer-Encoding than chunked.",
    503: "The server is full, starting, stopping or unhealthy.",
}
_OF_ALL = (400, 405, 408, 431, 501)
_OF_BODIES = (404, 413, 415, 500)
_OF_NO_REQUEST = (431, 501)  # what is none is told before anyone knows whose it is
_EARLY = (400, 408, 503)  # may be told then too: 503 where there are too many connections
_OF_OPERATORS = ("/v1/load_draft", "/v1/speculation")
_HEADERS: Mapping[int, Json] = {
    401: {"WWW-Authenticate": "Bearer."},
    405: {"Allow": "The methods that the path has."},
    503: {"Retry-After": "Seconds."},
}
_SCHEMA_REF = "#/components/schemas/{model}"
_ID_REF = {"$ref": f"#/components/headers/{HEADER}"}


def openapi(app: FastAPI, *, has_key: bool) -> Json:
    """Return the description of an app's routes, by OpenAPI 3.1. `has_key`: they need an API key."""
    kinds = {"body": BODIES, "reply": REPLIES, "event": EVENTS, "error": ERRORS}
    asked = [((kind, path), "validation", TypeAdapter(of)) for kind, each in kinds.items() for path, of in each.items()]
    found, definitions = TypeAdapter.json_schemas(asked, ref_template=_SCHEMA_REF)  # type: ignore[arg-type]
    refs = {key: schema for (key, _), schema in found.items()}
    paths: dict[str, Json] = {}
    for route in _routes(app):
        path = route.path_format
        for method in sorted(route.methods or ()):
            operation = _operation(route, method, refs)
            if has_key and path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
                operation["responses"]["401"] = _failure(path, 401)
            paths.setdefault(path, {})[method.lower()] = operation
    header = {"description": "The request's own, or one that was made for it.", "schema": _TEXT}
    failures = {f"{name}{status}": _failed(name, status, refs) for name in ERRORS for status in _FAILURES}
    components: Json = {"schemas": definitions["$defs"], "headers": {HEADER: header}, "responses": failures}
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "specserve", "version": specserve.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _routes(app: FastAPI) -> Iterator[APIRoute]:
    yield from (route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema)


def _operation(route: APIRoute, method: str, refs: Mapping[tuple[str, str], Json]) -> Json:
    path = route.path_format
    body = BODIES.get(path) if method == "POST" else None
    responses = {
        "200": {"description": "The reply.", "headers": {HEADER: _ID_REF}, "content": _content(path, refs, body)}
    }
    responses |= {str(status): _failure(path, status) for status in _statuses(path, has_body=body is not None)}
    operation: Json = {"operationId": f"{method.lower()}_{path.strip('/')}", "responses": responses}
    if body is not None:
        operation["summary"] = (body.__doc__ or "").partition("\n")[0]
        content = {"application/json": {"schema": refs["body", path]}}
        operation["requestBody"] = {"required": True, "content": content}
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in route.param_convertors]
    return operation | ({"parameters": parameters} if parameters else {})


def _statuses(path: str, *, has_body: bool) -> Iterator[int]:
    """Return the statuses of the errors that a route may reply."""
    yield from _OF_ALL
    if path != "/version":  # which is there whatever the server does
        yield 503
    if has_body:
        yield from _OF_BODIES
    if has_body and path in _OF_OPERATORS:
        yield 403
    if path == "/v1/models/{model}":
        yield 404


def _content(path: str, refs: Mapping[tuple[str, str], Json], body: type[Body] | None) -> Json:
    """Return what a route replies where nothing is wrong, by media type."""
    if path in TEXTS:
        return {TEXTS[path]: {"schema": _TEXT}}
    content: Json = {"application/json": {"schema": refs["reply", path]}}
    if path in EVENTS and body is not None:
        # OpenAPI 3.2's word for the items of a stream, which tools read in documents of 3.1 too
        content["text/event-stream"] = {"itemSchema": _event(path, refs)}
    return content


def _event(path: str, refs: Mapping[tuple[str, str], Json]) -> Json:
    """One event of a stream. OpenAI's and SGLang's may end with an error, and do end with a word."""
    data: Json = _TEXT | {"contentMediaType": "application/json", "contentSchema": refs["event", path]}
    if path in ENDS_WITH_DONE:
        data |= {"contentSchema": {"anyOf": [refs["event", path], refs["error", "Error"]]}}
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {"type": "object", "required": ["data"], "properties": {"data": data, "event": _TEXT}}


def _failure(path: str, status: int) -> Json:
    name = "AnthropicError" if path.startswith(MESSAGES) and status not in _OF_NO_REQUEST else "Error"
    return {"$ref": f"#/components/responses/{name}{status}"}


def _failed(name: str, status: int, refs: Mapping[tuple[str, str], Json]) -> Json:
    headers = {header: {"description": told, "schema": _TEXT} for header, told in _HEADERS.get(status, {}).items()}
    schema = refs["error", name]
    if status in _EARLY and name != "Error":
        schema = {"anyOf": [schema, refs["error", "Error"]]}
    content = {"application/json": {"schema": schema}}
    return {"description": _FAILURES[status], "headers": {HEADER: _ID_REF} | headers, "content": content}
