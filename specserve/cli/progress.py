"""The terminal that commands write to, and a bar on it over programs that are compiled."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import Console

from specserve.serve import progress

console = Console()


def warmup_bar(text: str = "compiling") -> AbstractContextManager[Callable[[int, int, str], None]]:
    """Show a bar while programs compile. The context gives the function to report with: (done, total, name)."""
    return progress.warmup_bar(console, text=text)
