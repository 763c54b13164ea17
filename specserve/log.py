"""The package's logging: every module uses `logging.getLogger(__name__)`, and a program of ours calls `setup` once.

A library user who never calls `setup` keeps their own logging as it is.
"""

import logging

from specserve.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
HANDLER_NAME = "specserve"


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
