"""The watch says what a command is at without being called: while the main thread is busy, and whatever it does."""

import io
import time

from rich.console import Console

from specserve.cli.watch import StageState, StageWatch


def test_a_line_comes_while_nothing_is_reported() -> None:
    out = io.StringIO()
    with StageWatch(Console(file=out, width=40), every=1.3) as watch:
        watch.begin("compiling", lambda: StageState("3 of 9 programs [of all], and a text that is longer than a line"))
        time.sleep(1.8)  # as if in a program that Python cannot interrupt
        watch.say("a moment")
        watch.begin("training")
    lines = out.getvalue().splitlines()
    assert lines[0] == "0:00  compiling: 3 of 9 programs [of all], and a text that is longer than a line"
    assert "compiling, for 0:0" in lines[1]
    assert lines[-2] == "a moment"
    assert lines[-1].endswith("training")
    length = len(out.getvalue())
    time.sleep(1.5)  # nothing is said after the end
    assert len(out.getvalue()) == length


def test_a_terminal_shows_a_bar_that_moves_by_itself() -> None:
    out = io.StringIO()
    with StageWatch(Console(file=out, width=100, force_terminal=True)) as watch:
        watch.begin("answering", lambda: StageState("5 of 10", 0.5, ("more below",)))
        time.sleep(0.6)
        watch.say("a moment that stays")
    shown = out.getvalue()
    for text in ("answering", "━", "5 of 10", "more below", "a moment that stays"):
        assert text in shown
