"""Latencies of an answer, from the moments, in seconds, at which its pieces arrived. With speculation a piece may
hold several tokens."""

import itertools
from collections.abc import Sequence


def gaps(arrivals: Sequence[float]) -> list[float]:
    """The seconds between each piece and the next."""
    return [late - early for early, late in itertools.pairwise(arrivals)]


def seconds_per_token(arrivals: Sequence[float], num_tokens: int) -> float | None:
    """The mean seconds for each token after the first, which is vLLM's TPOT; None for an answer of one token."""
    if num_tokens <= 1:
        return None
    return (arrivals[-1] - arrivals[0]) / (num_tokens - 1) if arrivals else 0.0
