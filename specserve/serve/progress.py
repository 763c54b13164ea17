"""Progress for people who wait while programs compile or answers are made: bars on a terminal. Without one, those of
commands that take minutes say in the log how far they are."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specserve.serve.requests.completion import CompletionOutput
from specserve.speculative.acceptance import Acceptance

logger = logging.getLogger(__name__)

SAID_EVERY_SECONDS = 5.0


def bar_columns() -> list[ProgressColumn]:
    """Return the columns of every bar of the server: description, bar, percentage, times, and a note of the task."""
    return [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]


class Bars(Progress):
    """The bars of a command that takes minutes, on stderr, so that its results can be piped. Where that is no terminal,
    the log says every few seconds what is being done, how much of it, and how long it will take if that is known."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        console = console or Console(stderr=True)
        first, *rest = bar_columns()
        columns = first, MofNCompleteColumn(), *rest
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal, get_time=clock)
        self._last = clock() - SAID_EVERY_SECONDS  # the first line comes at once

    def add(self, description: str, total: float | None = None) -> TaskID:
        """Make a bar that is not begun: it has no note yet."""
        return self.add_task(description, total=total, note="")

    def reporter(self) -> Callable[[str, int, int], None]:
        """Add a bar that has nothing to say yet. The function sets it: (what is being done, how much of it is done, of
        how much)."""
        task = self.add("")

        def report(what: str, done: int, total: int) -> None:
            self.update(task, description=what, completed=done, total=total)

        return report

    def update(self, task_id: TaskID, **changes: object) -> None:  # type: ignore[override]
        """Change a bar, as rich's own does; without a terminal perhaps with a line."""
        super().update(task_id, **changes)  # type: ignore[arg-type]
        if self.disable and self.get_time() - self._last >= SAID_EVERY_SECONDS:
            self._last = self.get_time()
            logger.info("%s", self._line(task_id))

    def _line(self, task_id: TaskID) -> str:
        task = self._tasks[task_id]
        number = f": {task.completed:,.0f}" if task.completed or task.total else ""
        of = f" of {task.total:,.0f}" if task.total else ""
        parts = [f"{task.description}{number}{of}", task.fields["note"]]
        if task.time_remaining and task.completed < (task.total or 0):
            parts.append(f"about {task.time_remaining:.0f} s left")
        return ", ".join(filter(None, parts))


@contextmanager
def warmup_bar(
    console: Console | None = None, *, is_shown: bool = True, text: str = "compiling"
) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar over the programs that are being compiled, from the first one that is done. The function that is
    given is called with (programs done, programs in total, name of the last one)."""
    console = console or Console(stderr=True)
    with Progress(*bar_columns(), console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task(text, note="")

        def on_warmup(done: int, total: int, name: str) -> None:
            progress.update(task, completed=done, total=total, note=name)

        yield on_warmup


@contextmanager
def answer_bar(total: int, *, is_shown: bool = True) -> Iterator[Callable[[CompletionOutput], None]]:
    """Show a bar over `total` answers, with tokens per second and tokens per forward of the target. The function that
    is given is called with each answer."""
    num_tokens = 0
    accepted = Acceptance()
    begin = time.monotonic()
    columns, console = bar_columns(), Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("answering", total=total, note="")

        def on_done(completion: CompletionOutput) -> None:
            nonlocal num_tokens, accepted
            num_tokens += len(completion.token_ids)
            accepted += completion.stats
            rate = num_tokens / max(time.monotonic() - begin, 1e-9)
            progress.update(task, advance=1, note=f"{rate:,.0f} tokens/s  tau {accepted.tau:.2f}")

        yield on_done
