"""A running server as the commands `chat` and `top` ask it: JSON, streams of events, and plain text."""

import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any

from specserve.errors import ConfigError, SpecServeError

SECONDS = 600.0  # of silence, after which a server counts as gone: a first answer may wait for a long queue


class UnreachableError(SpecServeError):
    """Nobody answers at the address, or the connection was lost."""


class RefusedError(SpecServeError):
    """The server answered with an error. `status` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Asks one server. `url` is its address with or without http:// and /v1; `api_key` may be empty."""

    def __init__(self, url: str, api_key: str = "", *, seconds: float = SECONDS) -> None:
        """Raises ConfigError for what is no address."""
        whole = url if "://" in url else f"http://{url}"
        self.url = whole.rstrip("/").removesuffix("/v1").rstrip("/")
        scheme, _, rest = self.url.partition("://")
        if scheme not in ("http", "https") or not rest:
            raise ConfigError(f"{url!r} is no address of a server; expected one like http://127.0.0.1:8000")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._seconds = seconds

    def text(self, path: str) -> str:
        """The body of a GET. Raises UnreachableError and RefusedError, as the other methods do."""
        with self._open(path, None) as reply:
            return reply.read().decode(errors="replace")

    def json(self, path: str, body: Any = None) -> Any:
        """The JSON that answers a GET or, with a body, a POST."""
        with self._open(path, body) as reply:
            try:
                return json.load(reply)
            except ValueError as error:
                raise RefusedError(200, f"{self.url}{path} did not answer with JSON: {error}") from None

    def events(self, path: str, body: Any) -> Generator[dict[str, Any]]:
        """The server-sent events that answer a POST, as JSON, up to [DONE]. Closing the iterator closes the connection,
        which ends the request on the server."""
        with self._open(path, body) as reply:
            for line in reply:
                data = line.decode(errors="replace").strip()
                if data.startswith("data:") and data != "data: [DONE]":
                    event = json.loads(data.removeprefix("data:"))
                    if "error" in event:
                        raise RefusedError(500, _message(event, "the answer failed"))
                    yield event

    @contextmanager
    def _open(self, path: str, body: Any) -> Iterator[HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            raise RefusedError(error.code, _said(error)) from None
        except (OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UnreachableError(f"{self.url} does not answer: {reason or type(error).__name__}") from None


def _said(error: urllib.error.HTTPError) -> str:
    """What the body of an error says, in OpenAI's shape or any other."""
    raw = error.read(10_000)
    try:
        return _message(json.loads(raw), f"the server answered {error.code}")
    except ValueError:
        return f"the server answered {error.code} {error.reason}"


def _message(body: Any, otherwise: str) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else otherwise
