"""Error replies: their shape, which is OpenAI's, and Anthropic's below its path; and the status of each error that
leaves a route."""

import json
from typing import Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specserve.errors import CapacityError, RequestError, SpecServeError
from specserve.serve.http.transport.json_codec import ReplyObject

RETRY_AFTER_SECONDS = 1
MESSAGES = "/v1/messages"  # and what lies below it, is Anthropic's API
INTERNAL_ERROR = "internal error; the server's log has the details"


class EngineFailureError(SpecServeError):
    """The engine failed while it worked on a request (HTTP 500)."""


class ModelNotFoundError(RequestError):
    """Raised for a request for another model than the one served (HTTP 404)."""


class ErrorDetails(ReplyObject):
    """`param` is the field that was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(ReplyObject):
    """Every reply of a status from 400, as OpenAI's."""

    error: ErrorDetails


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Error:
    """Return the body of an error reply. `param` is the field that was wrong."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class AnthropicErrorDetails(ReplyObject):
    """`param` is the field that was wrong."""

    type: str
    message: str
    param: str | None


class AnthropicError(ReplyObject):
    """Every reply of a status from 400 below /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorDetails


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Return whether clients of Anthropic's API call this path."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


class ErrorResponse(JSONResponse):
    """An error reply, in the shape that clients of the path know."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        super().__init__(error_body(message, kind, param=param, code=code), status, headers)
        self._message, self._param, self._given = message, param, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_anthropic(scope["path"]):
            await super().__call__(scope, receive, send)
            return
        kind = _ANTHROPIC_TYPES.get(self.status_code, "invalid_request_error")
        error: AnthropicErrorDetails = {"type": kind, "message": self._message, "param": self._param}
        whole: AnthropicError = {"type": "error", "error": error}
        text = json.dumps(whole, ensure_ascii=False)
        await Response(text, self.status_code, self._given, self.media_type)(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error that leaves a route a reply in the shape of its API."""

    def add(kind: type[SpecServeError], status: int, code: str | None, headers: dict[str, str] | None = None) -> None:
        @app.exception_handler(kind)
        async def on_error(_: Request, error: SpecServeError) -> Response:
            return ErrorResponse(status, str(error), param=error.param, code=code, headers=headers)

    add(RequestError, 400, None)
    add(ModelNotFoundError, 404, "model_not_found")
    add(CapacityError, 503, "overloaded", {"Retry-After": str(RETRY_AFTER_SECONDS)})
    add(EngineFailureError, 500, "engine_failure")

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette names the methods of the first route of a path alone
            headers["Allow"] = ", ".join(sorted(_methods_at(app, request.scope["path"])))
        return ErrorResponse(error.status_code, error.detail, headers=headers)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it


def _methods_at(app: FastAPI, path: str) -> set[str]:
    """Return the methods that a path allows. HEAD is among them where GET is."""
    routes = [each for each in app.routes if isinstance(each, Route) and each.path_regex.fullmatch(path)]
    methods = {method for each in routes for method in each.methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods
