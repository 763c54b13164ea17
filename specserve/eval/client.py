"""A client of a running server, for JSON, streams of events, and plain text."""

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from specserve.errors import ConfigError, SpecServeError

SECONDS = 600.0  # of silence, after which a server counts as gone: a first answer may wait for a long queue
CONNECT_SECONDS = 10.0


class UnreachableError(SpecServeError):
    """Raised where no server answers at the address, or the connection was lost."""


class RefusedError(SpecServeError):
    """The server answered with an error. `status` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Asks one server. `url` is its address with or without http:// and /v1; `api_key` may be empty. It is a context
    manager, which keeps connections open until its end, and every method may be called from several threads at once."""

    def __init__(self, url: str, api_key: str = "", *, seconds: float = SECONDS) -> None:
        """Open the client. Raises ConfigError where `url` is no address, or has a key in it."""
        whole = url if "://" in url else f"http://{url}"
        self.url = whole.rstrip("/").removesuffix("/v1").rstrip("/")
        self.headers: dict[str, str] = {}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        try:
            parts = httpx.URL(self.url)
        except httpx.InvalidURL:
            parts = httpx.URL()
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigError(f"{url!r} is no address of a server; expected one like http://127.0.0.1:8000")
        if parts.userinfo:
            raise ConfigError(
                f"the address of {parts.host} has a key in it, which reports and messages would repeat; give it as the "
                "API key (--api-key), and the address without it"
            )
        self._http = httpx.Client(
            base_url=parts, headers=self.headers, timeout=timeout, limits=httpx.Limits(), follow_redirects=True
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; answers that are being read break off."""
        self._http.close()

    def text(self, path: str) -> str:
        """The body of a GET. Raises UnreachableError and RefusedError, as the other methods do."""
        with self._open(path, None) as reply:
            return reply.read().decode(errors="replace")

    def json(self, path: str, body: Any = None) -> Any:
        """The JSON that answers a GET or, with a body, a POST."""
        with self._open(path, body) as reply:
            try:
                return json.loads(reply.read())
            except ValueError as error:
                raise RefusedError(200, f"{self.url}{path} did not answer with JSON: {error}") from None

    def events(self, path: str, body: Any) -> Generator[dict[str, Any]]:
        """The server-sent events that answer a POST, as JSON, up to [DONE]. Closing the iterator closes the connection,
        which ends the request on the server."""
        with self._open(path, body) as reply:
            for data in _data(reply.iter_bytes()):
                if data != b"[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise RefusedError(500, _message(event, "the answer failed"))
                    yield event

    def first_model(self) -> str:
        """The name of the model that the server lists first. Raises ConfigError where it cannot be asked."""
        try:
            return str(self.json("/v1/models")["data"][0]["id"])
        except (UnreachableError, RefusedError, LookupError, TypeError) as error:
            status = f"status {error.status}: " if isinstance(error, RefusedError) else ""
            raise ConfigError(
                f"GET {self.url}/v1/models failed ({status}{error}); expected the address of a running server that "
                "speaks OpenAI's API, and its --api-key where it has one"
            ) from error

    @contextmanager
    def _open(self, path: str, body: Any) -> Iterator[httpx.Response]:
        method = "GET" if body is None else "POST"
        try:
            with self._http.stream(method, path, json=body) as reply:
                if not reply.is_success:
                    raise RefusedError(reply.status_code, _said(reply))
                yield reply
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
            raise UnreachableError(f"{self.url} does not answer: {error or type(error).__name__}") from None


def _data(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of the lines of events. httpx's own lines end at letters such as U+2028, too."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:"))


def _said(reply: httpx.Response) -> str:
    """Return the message in the body of an error, in OpenAI's shape or any other."""
    text = reply.read()[:10_000].decode(errors="replace").strip()
    otherwise = text[:300] or f"the server answered {reply.status_code} {reply.reason_phrase}"
    try:
        return _message(json.loads(text), otherwise)
    except ValueError:
        return otherwise


def _message(body: Any, otherwise: str) -> str:
    match body:
        case {"error": {"message": message}} | {"error": message} | {"message": message} | message:
            if isinstance(message, str) and message:
                return message
    return otherwise
