"""The steady state of a replica under a load.

A replica that gets r requests a second, each with a prompt that takes P seconds and an answer of A tokens, spends r P
of each second on prompts. In the rest it makes steps of T(b) seconds, each of which brings tau tokens to b sequences.
So the load keeps b sequences running where

    b tau / T(b) = r (A - 1) / (1 - r P)

(the first token of an answer comes with its prompt), and a replica is full where no b does. Data ranks prefill side by
side, so P is a share of what the programs take. Speculation breaks even at
tau = T_speculative(b) / T_plain(b), at the b of plain decoding.
"""

import itertools
import math
from dataclasses import dataclass

from specserve.eval.step_costs import StepCosts


@dataclass(frozen=True)
class Load:
    """The load of one replica."""

    rate: float  # requests per second
    prompt: int  # tokens that are not cached
    answer: int  # tokens


@dataclass(frozen=True)
class Way:
    """The behaviour of one replica under a load, if it decodes in one way."""

    tau: float
    batch: float  # sequences that decode at once, on average
    step_seconds: float  # at that batch
    most_requests: float  # per second, at which it is full
    tokens_per_second: float  # at the load, or as many as it can
    token_seconds: float  # of one sequence, prompts of others between its steps included
    first_token_seconds: float  # of an unloaded queue
    is_full: bool  # the load is more than it can take


def solve(costs: StepCosts, load: Load, tau: float, *, is_speculative: bool) -> Way:
    """Find the steady state of a replica whose steps bring `tau` tokens to each sequence."""
    seconds = costs.of(is_speculative)
    rates = [size * tau / each for size, each in zip(costs.batch_sizes, seconds, strict=True)]  # tokens per second
    most = max(rates)
    alone, chunks = costs.prefill_seconds(load.prompt)
    prompt = alone / costs.num_ranks
    later = load.answer - 1
    most_requests = 1 / (prompt + later / most) if prompt or later else math.inf
    is_full = load.rate > most_requests
    rate = min(load.rate, most_requests)
    free = 1 - rate * prompt  # of each second
    batch, step = _batch_at(costs.batch_sizes, seconds, rate * later / free / tau) if later else (0.0, seconds[0])
    return Way(
        *(tau, batch, step, most_requests, rate * load.answer, step / tau / free, alone + chunks * step, is_full)
    )


def _batch_at(sizes: tuple[int, ...], seconds: tuple[float, ...], rate: float) -> tuple[float, float]:
    """The smallest b with b / T(b) = rate, and T(b), which is a line between two sizes and the first one's below it."""
    points = [(0.0, seconds[0]), *zip(sizes, seconds, strict=True)]
    for (low, first), (high, last) in itertools.pairwise(points):
        slope = (last - first) / (high - low)
        if high >= rate * last * (1 - 1e-12):  # rounding of a load that just fills it
            batch = rate * (first - slope * low) / (1 - rate * slope)
            return min(batch, high), first + slope * (min(batch, high) - low)
    raise AssertionError("a load beyond the most that it can take")


def break_even_tau(costs: StepCosts, batch: float) -> float:
    """The tau at which a step that speculates for so many sequences is worth its time."""
    plain, step = (_at(costs.batch_sizes, costs.of(each), batch) for each in (False, True))
    return step / plain


def _at(sizes: tuple[int, ...], seconds: tuple[float, ...], batch: float) -> float:
    points = [(0.0, seconds[0]), *zip(sizes, seconds, strict=True)]
    for (low, first), (high, last) in itertools.pairwise(points):
        if batch <= high:
            return first + (last - first) * (batch - low) / (high - low)
    return seconds[-1]


def tau_of(tau: float, depth: int, other: int) -> float:
    """The tau of chains of `other` draft tokens of a head that reached `tau` with chains of `depth`, if each depth
    accepts alike."""
    return 1 + sum(acceptance(tau, depth) ** (i + 1) for i in range(other))


def acceptance(tau: float, depth: int) -> float:
    """The acceptance p at each depth with which 1 + p + ... + p^depth = tau."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if 1 + sum(p ** (i + 1) for i in range(depth)) < tau else (low, p)
    return high
