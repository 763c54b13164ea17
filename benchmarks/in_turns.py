"""The turns of what is compared, and how far their ratios are apart."""

import statistics
from collections.abc import Iterator, Sequence


def turns(arms: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield so many rounds in which each arm has a turn: the round's number and the arm. Each round begins with
    another arm."""
    for number in range(rounds):
        first = number % len(arms)
        yield from ((number, arm) for arm in (*arms[first:], *arms[:first]))


def spread(ratios: Sequence[float]) -> str:
    """Write the median of a ratio over rounds, and its least and greatest."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
