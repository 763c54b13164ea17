"""The layers between a socket and a route: request ids, host names, API keys, and limits of connections and bodies.

Knows nothing of models, prompts or sampling.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from contextvars import ContextVar

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.serve.http.page.routes import PAGE_PATHS
from specserve.serve.http.transport.errors import INTERNAL_ERROR, ErrorResponse, is_anthropic

logger = logging.getLogger(__name__)

ID_HEADER = "X-Request-Id"
MAX_ID_CHARS = 128
MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_SECONDS = 60.0
OPEN_PATHS = PAGE_PATHS | {"/health", "/ready", "/version"}  # every other path needs the key, existing or not
_MAX_DRAINED_BYTES = 4 * MAX_BODY_BYTES
_CLIENT = "specserve.client"  # in the scope
_ID_NAME = ID_HEADER.lower().encode()
_VALID_ID = re.compile(rb"[!-~]{1,%d}" % MAX_ID_CHARS)  # printable ASCII, no spaces: it ends up in logs and headers
_request_id: ContextVar[str] = ContextVar("request_id", default="")


def current_request_id() -> str:
    """Return the id of the request that this code works on; empty outside of requests."""
    return _request_id.get()


def client_of(scope: Scope) -> str:
    """Return the client that sends a request: by its API key, else by its address."""
    return scope.get(_CLIENT) or (scope["client"][0] if scope.get("client") else "")


class Guard:
    """The ASGI layer around all routes. In this order it

    - gives each request an id, the client's own of the header X-Request-Id or a new one, which the reply carries and
      the log names sequences by. An id that is not 1 to 128 printable ASCII characters, or is sent twice, is a 400;
    - answers browsers' questions about other origins (CORS), where such origins are allowed;
    - logs an unforeseen exception, which becomes a 500 without internals. Starlette's own handler answers and raises
      again, upon which uvicorn closes the connection under the client's next request;
    - refuses requests whose Host header has no allowed name, whatever the port, so that a page of another site, whose
      name was made to point here, cannot send any. `*.example.com` allows every name below example.com. OPEN_PATHS are
      answered under any name, since probes send an address;
    - answers HEAD as GET; the server drops the body;
    - checks `Authorization: Bearer <key>`, or `x-api-key` of Anthropic's clients, else 401. Basic authentication is
      taken too, whose password is the key, or its user where there is no password: by it clients that know nothing of
      keys send the one in the address that they are given (`http://any:<key>@host:8000`). It is not offered, since
      browsers would ask for it and keep it. Digests are compared, and always all of them, so timing reveals nothing
      about the keys. The key's number becomes a part of the scope (`client_of`).
    """

    def __init__(
        self, app: ASGIApp, *, api_keys: Sequence[str], allowed_hosts: Sequence[str], cors_origins: Sequence[str]
    ) -> None:
        self._app = app
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._allowed_hosts = tuple(name.lower() for name in allowed_hosts)
        self._answer: ASGIApp = self._answer_or_500
        if cors_origins:
            self._answer = CORSMiddleware(
                self._answer_or_500,
                allow_origins=cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[ID_HEADER, "Retry-After"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == _ID_NAME]
        is_valid = not given or (len(given) == 1 and _VALID_ID.fullmatch(given[0]) is not None)
        request_id = given[0].decode() if given and is_valid else uuid.uuid4().hex
        token, start, status = _request_id.set(request_id), time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (_ID_NAME, request_id.encode())]}
            await send(message)

        try:
            if is_valid:
                await self._answer(scope, receive, send_with_id)
            else:
                rule = f"must be sent once, with 1 to {MAX_ID_CHARS} printable ASCII characters and no spaces"
                refusal = ErrorResponse(400, f"{ID_HEADER} {rule}", param=ID_HEADER)
                await refusal(scope, receive, send_with_id)
        finally:
            _request_id.reset(token)
            seconds = time.monotonic() - start
            logger.debug("%s: %s %s: %d in %.3f s", request_id, scope["method"], scope["path"][:200], status, seconds)

    async def _answer_or_500(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._answer_or_refuse(scope, receive, watched_send)
        except Exception:
            if is_started:
                raise
            logger.exception("%s: %s %s failed", current_request_id(), scope["method"], scope["path"])
            await ErrorResponse(500, INTERNAL_ERROR, code="internal_error")(scope, receive, send)

    async def _answer_or_refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["path"] in OPEN_PATHS
        if self._allowed_hosts and not is_open and not self._is_allowed_host(scope):
            message = "this host name is not served here; --allowed-hosts lists those that are"
            await ErrorResponse(400, message, param="Host", code="unknown_host")(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        number = self._number_of_key(scope) if self._key_digests else None
        if number is not None:
            # the key's place in the list would be another client's once a key is added or taken away
            scope = {**scope, _CLIENT: f"key {self._key_digests[number].hex()[:16]}"}
        elif self._key_digests and not is_open:
            message = "a valid API key is required: send Authorization: Bearer <key>"
            headers = {"WWW-Authenticate": "Bearer"}
            await ErrorResponse(401, message, code="invalid_api_key", headers=headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed_host(self, scope: Scope) -> bool:
        given = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1:
            return False
        host = given[0] if given[0].endswith("]") else given[0].rsplit(":", 1)[0]
        return any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in self._allowed_hosts)

    def _number_of_key(self, scope: Scope) -> int | None:
        headers = scope["headers"]
        given = [value for name, value in headers if name == b"authorization"]
        if not given and is_anthropic(scope["path"]):
            given = [b"Bearer " + value for name, value in headers if name == b"x-api-key"]
        key = _key_in(given[0]) if len(given) == 1 else None
        digest = hashlib.sha256(key or b"").digest()
        found = [number for number, each in enumerate(self._key_digests) if hmac.compare_digest(digest, each)]
        return found[0] if found and key is not None else None


def _key_in(header: bytes) -> bytes | None:
    """Return the key in the value of an Authorization header, or None where it has none."""
    scheme, _, key = header.partition(b" ")
    match scheme.lower():
        case b"bearer":
            return key
        case b"basic":
            try:
                user, _, password = base64.b64decode(key.strip(), validate=True).partition(b":")
            except binascii.Error:
                return None
            return password or user
        case _:
            return None


async def read_body(request: Request) -> bytes:
    """Read the body of a JSON request. Raises HTTPException: 408 where it takes too long, 413 where it is too large,
    415 where it is not JSON."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:  # before it is sent, for clients that wait for leave
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
