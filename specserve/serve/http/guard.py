"""What stands between a socket and a route: the API key, the body's limits, and errors in OpenAI's shape.

Knows nothing of models, prompts or sampling.
"""

import asyncio
import hashlib
import hmac
import logging

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.errors import CapacityError, ConfigError, RequestError, SpecServeError
from specserve.serve.http.page_routes import PAGE_PATHS
from specserve.serve.http.replies import error_body

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_SECONDS = 60.0
RETRY_AFTER_SECONDS = 1
INTERNAL_ERROR = "internal error; the server's log has the details"
OPEN_PATHS = PAGE_PATHS | {"/health", "/ready", "/version"}  # every other path needs the key, existing or not
_MAX_DRAINED_BYTES = 4 * MAX_BODY_BYTES


class EngineFailureError(SpecServeError):
    """The engine failed while it worked on a request (HTTP 500)."""


class ApiKeyGate:
    """ASGI middleware: `Authorization: Bearer <key>` or 401. Compares digests, so timing tells nothing of the key."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        if not api_key:
            raise ConfigError("api_key must not be empty; leave it out to serve without one")
        self._app = app
        self._expected = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        response = error_response(
            401,
            "a valid API key is required: send Authorization: Bearer <key>",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(key).digest(), self._expected)


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
            logger.exception("%s %s failed", scope["method"], scope["path"])
            response = error_response(500, INTERNAL_ERROR, code="internal_error")
            await response(scope, receive, send)


async def read_body(request: Request) -> bytes:
    """Read the body of a JSON request. Raises HTTPException: 408 where it takes too long, 413 where it is too large,
    415 where it is not JSON."""
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


def install_error_handlers(app: FastAPI) -> None:
    """Make every error that leaves a route a reply in OpenAI's shape."""
    app.add_middleware(BugGate)

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
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, error.detail, headers=dict(error.headers or {}))

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it
