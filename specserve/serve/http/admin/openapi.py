"""The description of an app by OpenAPI: every route, with the schemas of the body that it reads, of its reply and of
its errors. They are made of the types that read the bodies and write the replies. What no schema can state (a
vocabulary, a context, two fields that do not fit) is a 400 all the same.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

import specserve
from specserve.serve.http.admin.metrics import CONTENT_TYPE
from specserve.serve.http.admin.openapi_page import page
from specserve.serve.http.openai.fields import Body
from specserve.serve.http.transport.errors import AnthropicError, Error, ErrorResponse, is_anthropic
from specserve.serve.http.transport.guard import ID_HEADER, OPEN_PATHS
from specserve.serve.http.transport.json_codec import Json, write_json
from specserve.serve.http.transport.threads import in_thread

ENDS_WITH_DONE = ("/generate", "/v1/chat/completions", "/v1/completions")
ERRORS: Mapping[str, Any] = {"Error": Error, "AnthropicError": AnthropicError}
TEXTS: Mapping[str, str] = {"/docs": "text/html", "/metrics": CONTENT_TYPE.partition(";")[0]}
BYTES: Mapping[str, str] = {"/v1/hidden_states": "application/octet-stream"}

_TEXT = {"type": "string"}
_FAILURES = {
    400: "The request cannot be served as it stands; `param` names the field.",
    401: "No API key, or a wrong one.",
    403: "The operator has not allowed it.",
    404: "A model that is not served.",
    405: "The path has other methods.",
    408: "The head or the body of the request did not arrive in time.",
    409: "Another update of the weights is under way.",
    411: "The length of the body is not given.",
    413: "The body is too large.",
    415: "The body is not JSON, or compressed.",
    431: "The head of the request is too large.",
    500: "A failure on the server's side.",
    501: "The body is in another Transfer-Encoding than chunked.",
    503: "The server is full, starting, stopping or unhealthy.",
    507: "The disk has no room for the body.",
}
_OF_ALL = (400, 405, 408, 431, 501)
_OF_BODIES = (404, 413, 415, 500)
_OF_NO_REQUEST = (431, 501)  # replied before it is known which route the data is for
_EARLY = (400, 408, 503)  # may be replied then too: 503 where there are too many connections
_HEADERS: Mapping[int, Json] = {
    401: {"WWW-Authenticate": "Bearer."},
    405: {"Allow": "The methods that the path has."},
    503: {"Retry-After": "Seconds."},
}
_SCHEMA_REF = "#/components/schemas/{model}"
_ID_REF = {"$ref": f"#/components/headers/{ID_HEADER}"}


def openapi(app: FastAPI, *, has_key: bool) -> Json:
    """Return the description of an app's routes, by OpenAPI 3.1. `has_key`: they need an API key."""
    kinds = types_of(app) | {"error": ERRORS}
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
    components: Json = {"schemas": definitions["$defs"], "headers": {ID_HEADER: header}, "responses": failures}
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "specserve", "version": specserve.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def add_openapi_routes(app: FastAPI, *, has_key: bool, has_docs: bool) -> None:
    """Add /openapi.json, and its page at /docs, after all other routes. `has_key`: routes need an API key; `has_docs`:
    there is a page."""

    @functools.cache
    def description() -> tuple[str, str]:
        """Return the description as JSON and as a page. It takes a while, so it is made once, on a thread."""
        found = openapi(app, has_key=has_key)
        return write_json(found), page(found)

    @app.get("/openapi.json", response_model=None, openapi_extra={"reply": Json})
    async def openapi_json() -> Response:
        text, _ = await in_thread(description, size=0)
        return Response(text, media_type="application/json")

    @app.get("/docs", response_model=None, include_in_schema=has_docs)
    async def docs() -> Response:
        if not has_docs:
            return ErrorResponse(404, "no page of the API is served: start with --docs, or read /openapi.json")
        _, html = await in_thread(description, size=0)
        return HTMLResponse(html, headers={"Content-Security-Policy": "default-src 'unsafe-inline'"})


def _routes(app: FastAPI) -> Iterator[APIRoute]:
    yield from (route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema)


def types_of(app: FastAPI) -> dict[str, dict[str, Any]]:
    """Return the types of the "body", "reply" and "event" of each path, as its routes declare them: in `openapi_extra`,
    or by what they return."""
    found: dict[str, dict[str, Any]] = {"body": {}, "reply": {}, "event": {}}
    for route in _routes(app):
        for kind, of in ({"reply": route.response_model} | (route.openapi_extra or {})).items():
            if of is not None:
                found[kind][route.path_format] = of
    return found


def _operation(route: APIRoute, method: str, refs: Mapping[tuple[str, str], Json]) -> Json:
    path = route.path_format
    body: type[Body] | None = (route.openapi_extra or {}).get("body")
    responses = {
        "200": {"description": "The reply.", "headers": {ID_HEADER: _ID_REF}, "content": _content(path, refs, body)}
    }
    responses |= {str(status): _failure(path, status) for status in _statuses(route, has_body=body is not None)}
    operation: Json = {"operationId": f"{method.lower()}_{path.strip('/')}", "responses": responses}
    if body is not None:
        operation["summary"] = (body.__doc__ or "").partition("\n")[0]
        content = {"application/json": {"schema": refs["body", path]}}
        operation["requestBody"] = {"required": True, "content": content}
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in route.param_convertors]
    return operation | ({"parameters": parameters} if parameters else {})


def _statuses(route: APIRoute, *, has_body: bool) -> Iterator[int]:
    """Return the statuses of the errors that a route may reply: those of its kind, and its own, which it declares."""
    path = route.path_format
    yield from _OF_ALL
    yield from map(int, route.responses)
    if path != "/version":  # it is always there
        yield 503
    if has_body:
        yield from _OF_BODIES
    if path == "/v1/models/{model}":
        yield 404


def _content(path: str, refs: Mapping[tuple[str, str], Json], body: type[Body] | None) -> Json:
    """Return the reply of a route where nothing is wrong, by media type."""
    if path in TEXTS:
        return {TEXTS[path]: {"schema": _TEXT}}
    if path in BYTES:
        return {BYTES[path]: {"schema": _TEXT | {"format": "binary"}}}
    content: Json = {"application/json": {"schema": refs["reply", path]}}
    if ("event", path) in refs and body is not None:
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
    name = "AnthropicError" if is_anthropic(path) and status not in _OF_NO_REQUEST else "Error"
    return {"$ref": f"#/components/responses/{name}{status}"}


def _failed(name: str, status: int, refs: Mapping[tuple[str, str], Json]) -> Json:
    headers = {header: {"description": text, "schema": _TEXT} for header, text in _HEADERS.get(status, {}).items()}
    schema = refs["error", name]
    if status in _EARLY and name != "Error":
        schema = {"anyOf": [schema, refs["error", "Error"]]}
    content = {"application/json": {"schema": schema}}
    return {"description": _FAILURES[status], "headers": {ID_HEADER: _ID_REF} | headers, "content": content}
