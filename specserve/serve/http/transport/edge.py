"""ASGI layers at the edge of the app: which hosts are answered, HEAD, and how many connections there may be."""

from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from specserve.serve.http.transport.guard import OPEN_PATHS, RETRY_AFTER_SECONDS, error_response


class HostGate:
    """Refuses requests whose Host header has no allowed name, whatever the port, so that a page of another site, whose
    name was made to point here, cannot ask. `*.example.com` allows every name below example.com. OPEN_PATHS are
    answered to all, since probes ask by address."""

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str]) -> None:
        self._app, self._allowed = app, tuple(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        message = "this host name is not served here; --allowed-hosts lists those that are"
        await error_response(400, message, param="Host", code="unknown_host")(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1:
            return False
        host = given[0] if given[0].endswith("]") else given[0].rsplit(":", 1)[0]
        return any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in self._allowed)


class HeadAsGet:
    """ASGI middleware that answers HEAD as GET. The server drops the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class CrowdGate:
    """Refuses requests with a 503 that closes the connection, where there are more connections than there may be.
    OPEN_PATHS are answered all the same."""

    def __init__(self, app: ASGIApp, *, count: Callable[[], int], most: int) -> None:
        self._app, self._count, self._most = app, count, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._count() <= self._most:
            await self._app(scope, receive, send)
            return
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"}
        message = f"there are more than {self._most} connections; close some, or try again later"
        await error_response(503, message, code="overloaded", headers=headers)(scope, receive, send)
