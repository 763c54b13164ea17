"""A connection of uvicorn's with what uvicorn lacks: time limits, clients that have closed their half, errors in
OpenAI's shape, and a bound on how many connections there are."""

import asyncio
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from specserve.serve.http.replies import error_body

HEAD_SECONDS = 20.0  # in which the head of a request must be there, once its connection or its first byte is
STALL_SECONDS = 60.0  # that a client may not read while there is more to send
PROBE_SECONDS = (0.1, 1.0)  # between the first two probes, and between later ones
RESERVE = 32  # connections beyond the bound, for those who ask how the server is


class Connection(H11Protocol):
    """A client that has shut down its half of the connection after its request is answered, as one that reads. One that
    has closed all of it looks the same, and tells itself apart only when something is sent to it. So it is sent
    interim responses (102 Processing), which clients must skip."""

    def __init__(self, *args: Any, most: int, **kwargs: Any) -> None:
        """Set the limits: so many connections, and `RESERVE` more."""
        super().__init__(*args, **kwargs)
        self._most = most
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
        is_waiting = cycle is not None and not cycle.more_body and not cycle.response_started
        if not is_waiting or self.scheme != "http" or self.scope["http_version"] != "1.1":
            return None  # a client that leaves; TLS has no halves, and HTTP/1.0 no interim responses
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

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the head of the request did not arrive within {HEAD_SECONDS:g} s")
        else:
            self.transport.close()

    def _probe(self, next_seconds: float) -> None:
        if self.cycle.response_started or self.transport.is_closing():
            return
        self.transport.write(
            self.conn.send(h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing"))
        )
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


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
