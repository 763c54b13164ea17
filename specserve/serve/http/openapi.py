"""The description of an app by OpenAPI: every route, with the schema of the body that it reads and the errors that it
may reply. What no schema can tell (a vocabulary, a context, two fields that do not fit) is a 400 all the same.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

import specserve
from specserve.serve.http.bodies import Body
from specserve.serve.http.draft_routes import LoadDraftBody, SpeculationBody
from specserve.serve.http.generate_bodies import GenerateBody
from specserve.serve.http.guard import OPEN_PATHS
from specserve.serve.http.messages_bodies import CountTokensBody, MessagesBody
from specserve.serve.http.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from specserve.serve.http.replies import Json
from specserve.serve.http.responses_bodies import ResponsesBody

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

_TEXT = {"type": "string"}
_NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _NULLABLE, "code": _NULLABLE},
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
    },
}
_FAILURES = {
    400: "The request cannot be served as it stands; `param` names the field.",
    401: "No API key, or a wrong one.",
    403: "The operator has not allowed it.",
    404: "A model that is not served.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON, or compressed.",
    500: "A failure on the server's side.",
    503: "The server is full, starting, stopping or unhealthy.",
}
_OF_BODIES = (400, 404, 408, 413, 415, 500, 503)
_OF_OPERATORS = ("/v1/load_draft", "/v1/speculation")
_OF_OTHERS = {"/health": (503,), "/ready": (503,), "/v1/models/{model}": (404,)}


def openapi(app: FastAPI, *, has_key: bool) -> Json:
    """Return the description of an app's routes, by OpenAPI 3.1. `has_key`: they need an API key."""
    refs, definitions = models_json_schema(
        [(body, "validation") for body in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    schemas = {**definitions["$defs"], "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    paths: dict[str, Json] = {}
    for route in _routes(app):
        path = route.path_format
        for method in sorted(route.methods or ()):
            operation = _operation(route, method)
            if method == "POST" and path in BODIES:
                schema = refs[BODIES[path], "validation"]
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            if has_key and path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
                operation["responses"]["401"] = _failure(path, 401)
            paths.setdefault(path, {})[method.lower()] = operation
    components: Json = {"schemas": schemas}
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "specserve", "version": specserve.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _routes(app: FastAPI) -> Iterator[APIRoute]:
    yield from (route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema)


def _operation(route: APIRoute, method: str) -> Json:
    path = route.path_format
    body = BODIES.get(path) if method == "POST" else None
    statuses = _OF_OTHERS.get(path, ()) if body is None else _OF_BODIES
    if body is not None and path in _OF_OPERATORS:
        statuses = (*statuses, 403)
    responses = {"200": {"description": "The reply."}} | {str(status): _failure(path, status) for status in statuses}
    operation: Json = {"operationId": f"{method.lower()}_{path.strip('/') or 'page'}", "responses": responses}
    if body is not None:
        operation["summary"] = (body.__doc__ or "").partition("\n")[0]
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in route.param_convertors]
    return operation | ({"parameters": parameters} if parameters else {})


def _failure(path: str, status: int) -> Json:
    schema = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    content: Any = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": _FAILURES[status], "content": content}
