"""Progress bars for people who wait while programs compile or answers are made. They are silent without a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specserve.serve.completion import CompletionOutput
from specserve.speculative.acceptance import Acceptance


def bar_columns() -> list[ProgressColumn]:
    """The columns of every bar of the server: description, bar, percentage, times, and a note of the task."""
    return [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]


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
