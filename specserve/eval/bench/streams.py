"""The requests of a load, each as its client sees it: when each piece of the answer arrived, and what the server
reports of it at the end. It is not `eval.client`, whose connections an interrupt cannot hang up and whose reading of a
piece costs twice the time."""

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from specserve.eval.bench.arrivals import gaps, seconds_per_token
from specserve.eval.client import SECONDS, Client


@dataclass
class Reply:
    """An answer as its client saw it arrive. Times are of `time.perf_counter`."""

    start: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of pieces with text
    text: str = ""
    num_prompt: int = 0  # tokens, as the server counts them
    num_tokens: int = 0  # of the answer
    error: str = ""  # empty: it was answered

    @property
    def ttft(self) -> float:
        """Seconds to the first piece; 0 where there was none."""
        return self.arrivals[0] - self.start if self.arrivals else 0.0

    @property
    def itl(self) -> list[float]:
        """See `arrivals.gaps`."""
        return gaps(self.arrivals)

    @property
    def latency(self) -> float:
        """Seconds to the last piece."""
        return self.arrivals[-1] - self.start if self.arrivals else 0.0

    @property
    def tpot(self) -> float | None:
        """See `arrivals.seconds_per_token`."""
        return seconds_per_token(self.arrivals, self.num_tokens)


class Streams:
    """Asks one server over streams. Every method may be called from several threads at once."""

    def __init__(self, client: Client) -> None:
        """`client` has the address, which stands for no proxy, and the key."""
        self.url = client.url
        self._parts = urlsplit(client.url)
        self._headers = {"Content-Type": "application/json", **client.headers}
        self._open: set[socket.socket] = set()  # that are being read

    def hang_up(self) -> None:
        """End every request that is under way; each of them has an error then."""
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=SECONDS, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=SECONDS)

    def ask(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Ask over a stream. An error is the reply's `error`, and is not raised."""
        reply = Reply(start=time.perf_counter())
        try:
            with contextlib.closing(self._connect()) as connection, contextlib.ExitStack() as stack:
                connection.connect()
                self._open.add(connection.sock)
                stack.callback(self._open.discard, connection.sock)
                connection.request("POST", self._parts.path + path, json.dumps(body), self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    reply.error = f"status {response.status}: {response.read(500).decode(errors='replace')}"
                    return reply
                is_whole = False
                for line in response:
                    if line.startswith(b"data:"):
                        is_whole = _take(reply, line[5:].strip(), time.perf_counter())
                if not is_whole:
                    reply.error = reply.error or "the stream broke off"
        except (OSError, http.client.HTTPException, ValueError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        if not reply.error and not reply.arrivals:
            reply.error = "the answer has no text"
        reply.num_tokens = reply.num_tokens or len(reply.arrivals)
        return reply


def _take(reply: Reply, data: bytes, now: float) -> bool:
    """Read one event of a stream. Returns whether it was the last."""
    if data == b"[DONE]":
        return True
    event = json.loads(data)
    if "error" in event:
        reply.error = json.dumps(event["error"])[:500]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        said = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if said or delta.get("tool_calls"):
            reply.arrivals.append(now)
            reply.text += said or ""
    if usage := event.get("usage"):
        reply.num_prompt = usage.get("prompt_tokens") or 0
        reply.num_tokens = usage.get("completion_tokens") or 0
    return False


def stream_body(model: str, prompt: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    """Return the route and the body for a prompt: a text or token ids are completed, messages are answered as a
    chat."""
    is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
    body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **options}
    if is_chat:
        return "/v1/chat/completions", {**body, "messages": prompt}
    return "/v1/completions", {**body, "prompt": prompt}
