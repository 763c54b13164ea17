"""The steady state of a replica under a load.

A replica that gets r requests a second, each with a prompt that takes P seconds and an answer of A tokens, spends r P
of each second on prompts. In the rest it makes steps of T(b) seconds, each of which brings tau tokens to b sequences.
So the load keeps b sequences running where

    b tau / T(b) = r (A - 1) / (1 - r P)

(the first token of an answer comes with its prompt), and a replica is full where no b does. Data ranks prefill side by
side, so P is a share of what the programs take: of a full replica, where every rank has a prompt, one for each rank.
Under a smaller load a program has as many prompts as ranks are busy at once, on average. Speculation breaks even at
tau = T_speculative(b) / T_plain(b), at the b of plain decoding.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from specserve.plan.step_costs import StepCosts


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
    token_seconds: float  # of one sequence after its first, prompts of others between its steps included; 0: has one
    first_token_seconds: float  # of an unloaded queue
    is_full: bool  # the load is more than it can take


def solve(costs: StepCosts, load: Load, tau: float, *, is_speculative: bool) -> Way:
    """Find the steady state of a replica whose steps bring `tau` tokens to each sequence."""
    seconds = costs.of(is_speculative)
    rates = [size * tau / each for size, each in zip(costs.batch_sizes, seconds, strict=True)]  # tokens per second
    most = max(rates)
    alone, chunks = costs.prefill_seconds(load.prompt)
    later = load.answer - 1
    most_requests = 1 / (alone / costs.num_ranks + later / most) if alone or later else math.inf
    is_full = load.rate > most_requests
    rate = min(load.rate, most_requests)

    def free(batch: float) -> float:
        """Return what prompts leave of each second, where a step of so many sequences lies between two chunks."""
        busy = rate * (alone + chunks * _at(costs.batch_sizes, seconds, batch))
        return 1 - rate * alone / _side_by_side(busy, costs.num_ranks)

    def spare(batch: float) -> float:
        """Return the tokens per second that so many sequences may get, over those that the load asks for."""
        return free(batch) * batch * tau / _at(costs.batch_sizes, seconds, batch) - rate * later

    batch = _first_root(spare, costs.batch_sizes) if later else 0.0
    left = rate * later / most  # where all slots are taken: prompts wait for each other until programs are full enough
    if batch is None:
        batch = costs.batch_sizes[rates.index(most)]
    elif later:
        left = free(batch)
    step = _at(costs.batch_sizes, seconds, batch)
    token_seconds = step / tau / left if later else 0.0
    return Way(tau, batch, step, most_requests, rate * load.answer, token_seconds, alone + chunks * step, is_full)


def _side_by_side(busy: float, num_ranks: int) -> float:
    """The prompts in a prefill program, on average, where so many data ranks have one on average over all the time: 1
    under a small load, all ranks under a large one. Prompts are taken to come and go as in a queue before so many
    servers (Erlang's, M/M/c): the share of time in which any is busy is one less the chance of none."""
    if busy >= num_ranks or not busy:
        return float(num_ranks if busy else 1)
    term, others = 1.0, 0.0  # the chance of so many, and of any, over the chance of none
    for number in range(1, num_ranks):
        term *= busy / number
        others += term
    others += term * busy / (num_ranks - busy)
    return busy * (1 + others) / others


def _first_root(function: Callable[[float], float], sizes: tuple[int, ...]) -> float | None:
    """Return the first number at which a function that begins below 0 is 0, or None where it is below 0 at all of the
    sizes. Between two of them it may pass 0 once."""
    for low, high in itertools.pairwise((0, *sizes)):
        if function(high) >= 0:
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (low, middle) if function(middle) >= 0 else (middle, high)
            return high
    return None


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
