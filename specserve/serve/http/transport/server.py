"""The socket that an app stands behind: taking the port, signals, draining."""

import logging
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from specserve.errors import ConfigError
from specserve.serve.http.transport.connections import RESERVE, BoundedReads, Connection
from specserve.serve.settings import ServeRun

logger = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 10.0
_OTHER_FILES = 200  # files that a server may have open besides its connections


def bind_listener(host: str, port: int) -> socket.socket:
    """Take a port (0: any free one), so that a taken one is reported before minutes of loading. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None
    return listener


def check_tls(certfile: str, keyfile: str) -> None:
    """Raises ConfigError where these files cannot be served with. Empty names are none."""
    if keyfile and not certfile:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile: give the certificate of the key too")
    if certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile or None, password="")
        except (OSError, ValueError) as error:
            files = " and ".join(filter(None, (certfile, keyfile)))
            raise ConfigError(
                f"cannot serve TLS with {files}: {error}; expected PEM files without a password"
            ) from None


def _allow_files(num_connections: int) -> None:
    """Allow the process enough open files for so many connections. The system lets a process have some, and more on
    request."""
    num_files = num_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        allowed = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < num_files:
            logger.warning(
                "this process may open %d files, so fewer than %d connections; raise it with ulimit -n, or lower "
                "--max-connections",
                allowed,
                num_connections,
            )


def _url(listener: socket.socket, scheme: str) -> str:
    """Return the address by which this machine reaches a socket."""
    bound, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound) or str(bound)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """uvicorn with the meaning of a signal left to us. By itself it would stop accepting at once, and die of the
    signal."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 (uvicorn's signature)
        self._on_signal(sig)


class HttpServer:
    """An app on a real socket: `run` in the foreground until a signal, or `start` and `stop` in the background.

    SIGTERM or a first SIGINT drains: `on_drain(drain_seconds)` runs in a thread while connections are still accepted,
    so that clients get an honest 503; then open replies have a few seconds to be read. One more SIGINT stops at once.
    """

    def __init__(
        self,
        app: FastAPI,
        run: ServeRun | None = None,
        *,
        port: int | None = None,
        listener: socket.socket | None = None,
        on_drain: Callable[[float], None] | None = None,
    ) -> None:
        """Take the port at once, or a socket from `bind_listener`. Raises ConfigError. Of the server's settings `run`
        it reads those about the socket; `port` takes precedence over theirs."""
        run = run or ServeRun()
        check_tls(run.ssl_certfile, run.ssl_keyfile)
        _allow_files(run.max_connections + RESERVE)
        self._listener = listener or bind_listener(run.host, run.port if port is None else port)
        self._drain_seconds, self._on_drain = run.drain_seconds, on_drain
        self.port = int(self._listener.getsockname()[1])
        self.url = _url(self._listener, "https" if run.ssl_certfile else "http")
        self._config = uvicorn.Config(
            app,
            http=lambda **given: BoundedReads(Connection(**given, most=run.max_connections)),  # type: ignore[arg-type] (any call)
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,
            ssl_certfile=run.ssl_certfile or None,
            ssl_keyfile=run.ssl_keyfile or None,
        )
        self._server = _Uvicorn(self._config, self._on_signal)
        self._thread: threading.Thread | None = None
        self._is_draining = False
        self._is_forced = False

    def start(self) -> None:
        """Serve from a background thread; returns when connections are accepted."""
        self._thread = threading.Thread(target=self.run, name="specserve-http", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise ConfigError(f"the HTTP server on {self.url} did not start; the log has the details")
            time.sleep(0.005)
        logger.info("serving on %s", self.url)

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM (or `stop`). Raises KeyboardInterrupt after a signal to stop at once."""
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._listener.close()
        if self._is_forced:
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Stop accepting, give open replies a few seconds, and wait for the thread."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._listener.close()

    def _on_signal(self, number: int) -> None:
        """Handle a signal. It runs between two bytecodes of the event loop, so it must not log, nor do anything that
        waits."""
        if not self._is_draining:
            self._is_draining = True
            threading.Thread(target=self._drain, name="specserve-drain", daemon=True).start()
        elif number == signal.SIGINT:
            self._is_forced = True
            logging.getLogger("uvicorn.error").disabled = True  # it would write a traceback for every reply that is cut
            self._config.timeout_graceful_shutdown = 0
            self._server.force_exit = self._server.should_exit = True

    def _drain(self) -> None:
        try:
            if self._on_drain is not None:
                logger.info("stopping: running replies may end for %g s. Ctrl-C stops at once", self._drain_seconds)
                self._on_drain(self._drain_seconds)
        except Exception:
            logger.exception("draining failed")
        finally:
            self._server.should_exit = True
