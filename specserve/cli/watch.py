"""The watch over a command that takes minutes: it shows the stage that the command is at, again and again."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from specserve.cli.progress import console
from specserve.train.run.report import duration

SAID_EVERY = 10.0  # seconds without a line, at most, where there is no terminal


@dataclass(frozen=True)
class StageState:
    """The progress of a stage."""

    text: str = ""
    share: float | None = None  # of it that is over; None: not known
    more: tuple[str, ...] = ()  # lines besides, for a terminal


class StageWatch:
    """Shows the stage that a command is at, for how long, and how far it is. On a terminal that is a live line with a
    bar; elsewhere a line whenever a stage begins, and at least every ten seconds, from a thread of its own: it is said
    too while a program compiles or a step takes long."""

    def __init__(self, console: Console = console, every: float = SAID_EVERY) -> None:
        self._console, self._every = console, every
        self._start = self._since = self._said = time.monotonic()
        self._stage, self._state = "", StageState
        self._spinner, self._over = Spinner("dots"), threading.Event()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)
        self._thread = threading.Thread(target=self._tick, name="watch", daemon=True)

    def __enter__(self) -> "StageWatch":
        if self._live:
            self._live.start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._live:
            self._live.stop()

    @property
    def stage(self) -> str:
        """The stage that the command is at."""
        return self._stage

    def begin(self, stage: str, state: Callable[[], StageState] = StageState) -> None:
        """Begin a stage. `state` says how far it is, and may be called from another thread at any time."""
        self._since, self._stage, self._state = time.monotonic(), stage, state
        if not self._live:
            self.say(self._line())

    def counting(self, stage: str, unit: str) -> Callable[[int, int], None]:
        """Return a function that shows how many are done of a total, in a stage that its first call begins."""
        shown = StageState()

        def show(done: int, total: int) -> None:
            nonlocal shown
            shown = StageState(f"{done:,} of {total:,} {unit}", done / max(1, total))
            if self._stage != stage:
                self.begin(stage, lambda: shown)

        return show

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._said = time.monotonic()
        self._console.print(Text(text), highlight=False, soft_wrap=True)

    def _tick(self) -> None:
        while not self._over.wait(self._every / 10):
            if time.monotonic() - self._said >= 0.9 * self._every:
                self.say(self._line())

    def _line(self) -> str:
        state, here = self._state(), time.monotonic() - self._since
        within = f", for {duration(here)}" if here >= 1 else ""
        return f"{duration(time.monotonic() - self._start)}  {self._stage}{within}" + (state.text and f": {state.text}")

    def _render(self) -> RenderableType:
        if not self._stage:
            return Text()
        state, here = self._state(), time.monotonic() - self._since
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(width=30, total=1.0, completed=min(state.share, 1.0)) if state.share is not None else Text()
        line.add_row(self._spinner, Text(self._stage), bar, Text(duration(here)), Text(state.text, style="dim"))
        return Group(line, *(Text(f"  {each}") for each in state.more))
