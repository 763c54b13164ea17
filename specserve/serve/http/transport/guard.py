"""The layers between a socket and a route: the API key, the body's limits, and errors in OpenAI's shape.

Knows nothing of models, prompts or sampling.
"""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.errors import CapacityError, RequestError, SpecServeError
from specserve.serve.http.openai.replies import error_body
from specserve.serve.http.page.routes import PAGE_PATHS
from specserve.serve.http.transport.request_ids import current_request_id

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_SECONDS = 60.0
RETRY_AFTER_SECONDS = 1
INTERNAL_ERROR = "internal error; the server's log has the details"
OPEN_PATHS = PAGE_PATHS | {"/health", "/ready", "/version"}  # every other path needs the key, existing or not
_MAX_DRAINED_BYTES = 4 * MAX_BODY_BYTES
_CLIENT = "specserve.client"  # in the scope


class EngineFailureError(SpecServeError):
    """The engine failed while it worked on a request (HTTP 500)."""


class ApiKeyGate:
    """ASGI middleware: `Authorization: Bearer <key>` or 401. Compares digests, and always all of them, so timing tells
    nothing of the keys. Whose key it was is a part of the scope (`client_of`)."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = self._number_of_key(scope) if scope["type"] == "http" else None
        if number is not None:
            scope = {**scope, _CLIENT: f"key {number}"}
        if number is not None or scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        response = error_response(
            401,
            "a valid API key is required: send Authorization: Bearer <key>",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    def _number_of_key(self, scope: Scope) -> int | None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key).digest()
        found = [number for number, each in enumerate(self._expected) if hmac.compare_digest(digest, each)]
        return found[0] if found and scheme.lower() == b"bearer" else None


def client_of(scope: Scope) -> str:
    """Return who sends a request: by the API key, else by the address."""
    return scope.get(_CLIENT) or (scope["client"][0] if scope.get("client") else "")


class BugGate:
    """ASGI middleware: an unforeseen exception is logged and becomes a 500 that says nothing of internals.

    Starlette's own handler answers and raises again, upon which uvicorn closes the connection under the client's next
    request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            if is_started or scope["type"] != "http":
                raise
            logger.exception("%s: %s %s failed", current_request_id(), scope["method"], scope["path"])
            response = error_response(500, INTERNAL_ERROR, code="internal_error")
            await response(scope, receive, send)


async def read_body(request: Request) -> bytes:
    """Read the body of a JSON request. Raises HTTPException: 408 where it takes too long, 413 where it is too large,
    415 where it is not JSON."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:  # told before it is sent, to who waits for that
        close = {"Connection": "close"} if int(length) > _MAX_DRAINED_BYTES else None  # else what comes is dropped
        raise HTTPException(413, f"the request body is over the limit of {MAX_BODY_BYTES} bytes", close)
    content_type = request.headers.get("content-type", "")
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, f"send Content-Type: application/json, got {content_type[:80]!r}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "compressed request bodies are not accepted")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            return await _read_bounded(request)
    except TimeoutError:
        raise HTTPException(408, f"the request body did not arrive within {BODY_TIMEOUT_SECONDS:.0f} s") from None


async def _read_bounded(request: Request) -> bytes:
    chunks, num_bytes = [], 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        # A body a little too large is drained, not kept: a client that is still writing would never read the answer.
        if num_bytes <= MAX_BODY_BYTES:
            chunks.append(chunk)
        elif num_bytes > _MAX_DRAINED_BYTES:
            break
    if num_bytes > MAX_BODY_BYTES:
        raise HTTPException(413, f"the request body is over the limit of {MAX_BODY_BYTES} bytes")
    return b"".join(chunks)


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(error_body(message, kind, param=param, code=code), status, headers)


def _methods_at(app: FastAPI, path: str) -> set[str]:
    """Return the methods that a path allows. HEAD is among them where GET is."""
    routes = [each for each in app.routes if isinstance(each, Route) and each.path_regex.fullmatch(path)]
    methods = {method for each in routes for method in each.methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods


def install_error_handlers(app: FastAPI) -> None:
    """Make every error that leaves a route a reply in OpenAI's shape."""

    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        return error_response(400, str(error), param=error.param)

    @app.exception_handler(CapacityError)
    async def on_capacity_error(_: Request, error: CapacityError) -> Response:
        return error_response(503, str(error), code="overloaded", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})

    @app.exception_handler(EngineFailureError)
    async def on_engine_failure(_: Request, error: EngineFailureError) -> Response:
        return error_response(500, str(error), code="engine_failure")

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette tells those of the first route of a path alone
            headers["Allow"] = ", ".join(sorted(_methods_at(app, request.scope["path"])))
        return error_response(error.status_code, error.detail, headers=headers)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it
