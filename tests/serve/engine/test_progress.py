"""Progress without a terminal: a line every few seconds that says what, how much of it, and how long it will take."""

import io
import logging

from rich.console import Console

from specserve.serve.progress import SAID_EVERY_SECONDS, Bars


def test_without_a_terminal_the_log_says_how_far_it_is() -> None:
    now = 100.0
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener, out = logging.getLogger("specserve.serve.progress"), Listener(), io.StringIO()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel("INFO")
    try:
        with Bars(Console(file=out, force_terminal=False), clock=lambda: now) as bars:
            compiling, asking = bars.add("compiling", 8), bars.add("asking")
            bars.update(compiling, completed=0, note="chain:1 for 4")
            for done in range(1, 9):
                now += 2.0
                bars.update(compiling, completed=done, note=f"chain:{done} for 4")
            now += SAID_EVERY_SECONDS
            bars.update(asking, completed=7, note="off: answers")  # nobody knows of how many
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    assert said == [
        "compiling: 0 of 8, chain:1 for 4",
        "compiling: 3 of 8, chain:3 for 4, about 10 s left",
        "compiling: 6 of 8, chain:6 for 4, about 4 s left",
        "asking: 7, off: answers",
    ]
    assert not out.getvalue().strip()


def test_on_a_terminal_there_are_bars() -> None:
    out = io.StringIO()
    with Bars(Console(file=out, force_terminal=True, width=120)) as bars:
        bars.update(bars.add("asking", 5), completed=2, note="off: answers", refresh=True)
    assert "asking" in out.getvalue()
    assert "2/5" in out.getvalue()
