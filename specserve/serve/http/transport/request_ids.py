"""The id of each request: the client's own, of the header X-Request-Id, or one that is made here. Replies carry it, and
the log names sequences by it."""

import logging
import re
import time
import uuid
from contextvars import ContextVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.serve.http.openai.replies import error_body

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
MAX_CHARS = 128
_NAME = HEADER.lower().encode()
_VALID = re.compile(rb"[!-~]{1,%d}" % MAX_CHARS)  # printable ASCII, no spaces: it ends up in logs and headers
_current: ContextVar[str] = ContextVar("request_id", default="")


def current_request_id() -> str:
    """The id of the request that this code works on; empty outside of requests."""
    return _current.get()


class RequestIds:
    """ASGI middleware. An id that is not 1 to 128 printable ASCII characters, or is sent twice, is a 400."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == _NAME]
        is_valid = not given or (len(given) == 1 and _VALID.fullmatch(given[0]) is not None)
        request_id = given[0].decode() if given and is_valid else uuid.uuid4().hex
        token, start, status = _current.set(request_id), time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (_NAME, request_id.encode())]}
            await send(message)

        try:
            if is_valid:
                await self._app(scope, receive, send_with_id)
            else:
                wanted = f"{HEADER} must be sent once, with 1 to {MAX_CHARS} printable ASCII characters and no spaces"
                body = error_body(wanted, "invalid_request_error", param=HEADER)
                await JSONResponse(body, 400)(scope, receive, send_with_id)
        finally:
            _current.reset(token)
            seconds = time.monotonic() - start
            logger.debug("%s: %s %s: %d in %.3f s", request_id, scope["method"], scope["path"][:200], status, seconds)
