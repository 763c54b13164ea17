"""An answer in the terminal as it comes: its tokens coloured by depth, and a status line below."""

import time

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from specserve.cli.conversation import AnswerSoFar, Token

# as the page at / has them in the dark: the deeper, the brighter; the colour of the text goes with it, whatever the
# terminal's own is
DEPTH_STYLES = ("", *(f"#eefaf2 on {colour}" for colour in ("#173323", "#18432a", "#195432", "#1a653a", "#1b7642")))
REASONING = "dim italic"
SECONDS_PER_FRAME = 1 / 30


class AnswerView:
    """Prints an answer. Lines that are complete scroll away as any output does; the line that grows, and the status
    below it, are drawn again with every token. Without a terminal it is the plain text."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line = Text()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._drawn_time = 0.0
        self.note = ""

    def __enter__(self) -> "AnswerView":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()
        if self._line:
            self._print(self._line)
            self._line = Text()

    def push(self, token: Token, answer: AnswerSoFar) -> None:
        """Add a token."""
        style = DEPTH_STYLES[min(token.depth, len(DEPTH_STYLES) - 1)]
        self._line.append(token.text.replace("\t", "    "), f"{REASONING} {style}" if token.is_reasoning else style)
        complete, self._line = self._split()
        for line in complete:
            self._print(line)
        now = time.monotonic()
        if self._live and now - self._drawn_time >= SECONDS_PER_FRAME:  # drawing must not slow what it shows
            self._drawn_time = now
            self._live.update(Group(self._line, Text(status(answer), "dim")), refresh=True)

    def finish(self, answer: AnswerSoFar) -> None:
        """Print what is left of the answer, and what is known of it."""
        if self._live:
            self._live.update(Text(), refresh=True)
            self._live.stop()
        self._print(self._line)
        self._line = Text()
        last = ", ".join(filter(None, (status(answer), self.note, _ending(answer))))
        self._console.print(Text(last, "dim"), highlight=False)

    def _split(self) -> tuple[list[Text], Text]:
        """Split the answer into the lines to which nothing can be added any more, and the line that grows."""
        *whole, last = self._line.split("\n", allow_blank=True) or [Text()]
        wrapped = list(last.wrap(self._console, self._console.width)) if self._live and last else [last]
        return [*whole, *wrapped[:-1]], wrapped[-1]

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=not self._live, highlight=False)


def status(answer: AnswerSoFar) -> str:
    """Return one line of status: tokens, how many of them were the draft's, tau and speed."""
    if not answer.depths:
        return f"{answer.num_pieces} pieces; this server does not report where tokens come from"
    accepted = sum(depth > 0 for depth in answer.depths)
    parts = [f"{len(answer.depths)} tokens, {accepted} by the draft", f"tau {answer.acceptance.tau:.2f}"]
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.0f} tokens/s")
    return ", ".join(parts)


def _ending(answer: AnswerSoFar) -> str:
    return "cut at --max-tokens or the context" if answer.finish == "length" else ""
