"""A connection of uvicorn's with what uvicorn lacks: time limits, clients that have closed their half, errors in
OpenAI's shape, and bounds: on how many connections there are, and on what is read of one before others have their turn.
"""

import asyncio
import json
import sys
from typing import Any

import h11
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from specserve.serve.http.transport.errors import RETRY_AFTER_SECONDS, error_body
from specserve.serve.http.transport.guard import OPEN_PATHS

KEEP_ALIVE_SECONDS = 5.0  # between two requests
HEAD_SECONDS = 20.0  # in which the head of a request must be there, once its connection or its first byte is
STALL_SECONDS = 60.0  # a client may not read for so long while there is more to send
PROBE_SECONDS = (0.1, 1.0)  # between the first two probes, and between later ones
RESERVE = 32  # connections beyond the bound, for probes of the server's health
READ_BYTES = 2**13  # at once: chunks of one byte, or lines of a head, take some microseconds each


class Connection(H11Protocol):
    """A connection of one client.

    A client that has shut down its half of the connection after its request still reads, and is answered. One that has
    closed all of it looks the same until something is sent to it. So it is sent interim responses (102 Processing),
    which clients must skip; and once a stream has begun, the comments that a stream may have, which the app keeps as
    `probe` in the request's state."""

    def __init__(self, *args: Any, most: int, **kwargs: Any) -> None:
        """Set the limits: so many connections, and `RESERVE` more."""
        super().__init__(*args, **kwargs)
        self._most, self._routes, self.app = most, self.app, self._route_or_refuse
        self.timeout_keep_alive = KEEP_ALIVE_SECONDS  # type: ignore[assignment] (uvicorn's setting is an integer)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most + RESERVE:
            transport.abort()
        else:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_partial = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not is_partial:
            self._head_timer = _cancel(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        cycle = self.cycle
        is_waiting = cycle is not None and not cycle.more_body and not cycle.response_complete
        if not is_waiting or self.scheme != "http" or self._probing() is None:
            return None  # a client that leaves, or needs nothing more; and TLS has no halves
        cycle.keep_alive = False
        self._probe(PROBE_SECONDS[0])
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer, self._probe_timer):
            _cancel(timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer = _cancel(self._stall_timer)

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 found wrong, in whose handler it is called, with the status that h11 hints at."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(status, f"{msg.rstrip('.')}: {str(error)[:200]}")

    async def _route_or_refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with a 503 that closes the connection where there are more connections than there may be.
        OPEN_PATHS are answered all the same."""
        if scope["path"] in OPEN_PATHS or len(self.connections) <= self._most:
            await self._routes(scope, receive, send)
            return
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"}
        message = f"there are more than {self._most} connections; close some, or try again later"
        error = error_body(message, "server_error", code="overloaded")
        await JSONResponse(error, 503, headers)(scope, receive, send)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the head of the request did not arrive within {HEAD_SECONDS:g} s")
        else:
            self.transport.close()

    def _probing(self) -> h11.Event | None:
        """Return an event that may be sent to see whether the client reads, or None where none may."""
        if not self.cycle.response_started:  # of HTTP/1.0 there are no interim responses
            if self.scope["http_version"] != "1.1":
                return None
            return h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
        probe = self.scope.get("state", {}).get("probe")
        return None if probe is None else h11.Data(data=probe)

    def _probe(self, next_seconds: float) -> None:
        if self.cycle.response_complete or self.transport.is_closing():
            return
        event = self._probing()
        if event is None:
            return
        self.transport.write(self.conn.send(event) or b"")
        self._probe_timer = self.loop.call_later(next_seconds, self._probe, PROBE_SECONDS[1])

    def _refuse(self, status: int, message: str) -> None:
        """Answer data that is no request, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_body(message, "invalid_request_error")).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            headers.append((b"connection", b"close"))
            head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES.get(status, b""))
            for each in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(each) or b"")
        self.transport.close()


class BoundedReads(asyncio.BufferedProtocol):
    """Gives a protocol what its client sends, at most `READ_BYTES` at a time. Other clients have their turn between two
    reads. It is no `asyncio.Protocol`, because uvloop gives such a protocol all that has come."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.connection_made, self.connection_lost = protocol.connection_made, protocol.connection_lost
        self.pause_writing, self.resume_writing = protocol.pause_writing, protocol.resume_writing
        self.eof_received = protocol.eof_received
        self._data_received = protocol.data_received
        self._buffer = memoryview(b"")

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (asyncio's signature)
        self._buffer = memoryview(bytearray(READ_BYTES))  # freed after each read, for there are many connections
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data, self._buffer = bytes(self._buffer[:nbytes]), memoryview(b"")
        self._data_received(data)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
