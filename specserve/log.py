"""The package's logging: every module uses `logging.getLogger(__name__)`, and a program of ours calls `setup` once.

A library user who never calls `setup` keeps their own logging as it is.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from specserve.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
HANDLER_NAME = "specserve"
SAY_SECONDS = 10.0  # between two lines that report a wait


@contextlib.contextmanager
def waiting(report: Callable[[str], None], what: str, seconds: float) -> Iterator[None]:
    """Report again and again, while the body waits, what it waits for, and for how many seconds more it may."""
    is_over, end = threading.Event(), time.monotonic() + seconds

    def run() -> None:
        while not is_over.wait(SAY_SECONDS):
            report(still_waiting(what, end - time.monotonic()))

    thread = threading.Thread(target=run, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def still_waiting(what: str, seconds: float) -> str:
    """The line that reports a wait for `what`."""
    return f"waiting for {what}, {max(0.0, seconds):.0f} seconds more at most"


def setup(level: str = "info") -> None:
    """Send the package's log to stderr: in colour on a terminal, as plain lines with a date elsewhere.

    May be called again, to change the level. Other libraries keep their own loggers, and what has a handler of its own
    is not printed by a root handler too. Raises ConfigError.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level must be one of {', '.join(LEVELS)}, got {level!r}")
    logger = logging.getLogger("specserve")
    logger.setLevel(level.upper())
    if not any(handler.name == HANDLER_NAME for handler in logger.handlers):
        handler = _make_handler()
        handler.name = HANDLER_NAME
        logger.addHandler(handler)
        for each in (logger, logging.getLogger("huggingface_hub")):
            each.propagate = False  # else a root handler of some library prints every line twice


def _make_handler() -> logging.Handler:
    from rich.console import Console
    from rich.logging import RichHandler

    console = Console(stderr=True)
    if console.is_terminal:
        return RichHandler(console=console, show_path=False, omit_repeated_times=False, log_time_format="[%X]")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler
