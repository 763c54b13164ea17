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

import numpy as np

from specserve.serve.engine.scheduler import chunk_size


@dataclass(frozen=True)
class StepCosts:
    """Seconds by batch size, the smallest first, and of prefill programs by their tokens."""

    batch_sizes: tuple[int, ...]
    plain: tuple[float, ...]  # of a plain step, by batch size
    step: tuple[float, ...]  # of a step that speculates; as `plain` where nothing does
    chunks: tuple[int, ...]  # prompt tokens of the prefill programs
    prefill: tuple[float, ...]  # of each of them
    source: str  # where the figures are from
    extra_tokens: int  # of a prompt, as `Shapes` has it
    num_ranks: int = 1  # data ranks, a prompt of each of which a prefill program runs side by side

    def prefill_seconds(self, num_tokens: int) -> tuple[float, int]:
        """Return the seconds that a prompt takes, or the part of it that is not cached, and the number of its
        chunks."""
        seconds, count = 0.0, 0
        while num_tokens > 0:
            size = chunk_size(self.chunks, num_tokens, self.extra_tokens)
            seconds, count = seconds + self.prefill[self.chunks.index(size)], count + 1
            num_tokens -= size
        return seconds, count

    def step_seconds(self, batch: float, *, is_speculative: bool) -> float:
        """Return the seconds of a step of so many sequences on average, on the lines through those of the batch
        sizes."""
        seconds = self.step if is_speculative else self.plain
        return float(np.interp(batch, self.batch_sizes, seconds))


@dataclass(frozen=True)
class Load:
    """The load of one replica."""

    rate: float  # requests per second
    prompt: int  # tokens that are not cached
    answer: int  # tokens


@dataclass(frozen=True)
class SteadyState:
    """The behaviour of one replica under a load, plain or speculative."""

    tau: float
    batch: float  # sequences that decode at once, on average
    step_seconds: float  # at that batch
    most_requests: float  # per second, at which it is full
    tokens_per_second: float  # at the load, or as many as it can
    token_seconds: float  # of one sequence after its first, prompts of others between its steps included; 0: has one
    first_token_seconds: float  # of an unloaded queue
    is_full: bool  # the load is more than it can take


def solve(costs: StepCosts, load: Load, tau: float, *, is_speculative: bool) -> SteadyState:
    """Find the steady state of a replica whose steps bring `tau` tokens to each sequence."""

    def seconds(batch: float) -> float:
        return costs.step_seconds(batch, is_speculative=is_speculative)

    rates = {size: size * tau / seconds(size) for size in costs.batch_sizes}  # tokens per second
    fastest = max(rates, key=lambda size: rates[size])
    most = rates[fastest]
    alone, chunks = costs.prefill_seconds(load.prompt)
    later = load.answer - 1
    most_requests = math.inf
    if alone or later:
        most_requests = 1 / (alone / costs.num_ranks + later / most)
    rate = min(load.rate, most_requests)

    def free(batch: float) -> float:
        """Return what prompts leave of each second, where a step of so many sequences lies between two chunks."""
        busy = rate * (alone + chunks * seconds(batch))
        return 1 - rate * alone / _side_by_side(busy, costs.num_ranks)

    def spare(batch: float) -> float:
        """Return the tokens per second that so many sequences may get, over those that the load needs."""
        return free(batch) * batch * tau / seconds(batch) - rate * later

    batch, token_seconds = 0.0, 0.0
    if later and (found := _first_root(spare, costs.batch_sizes)) is not None:
        batch = found
        token_seconds = seconds(batch) / tau / free(batch)
    elif later:  # all slots are taken, and prompts wait for each other until programs are full enough
        batch = fastest
        token_seconds = seconds(batch) / tau / (rate * later / most)
    step = seconds(batch)
    first = alone + chunks * step
    tokens = rate * load.answer
    return SteadyState(tau, batch, step, most_requests, tokens, token_seconds, first, load.rate > most_requests)


def _side_by_side(busy: float, num_ranks: int) -> float:
    """The prompts in a prefill program, on average, where so many data ranks have one on average over all the time: 1
    under a small load, all ranks under a large one. Prompts are taken to come and go as in a queue before so many
    servers (Erlang's, M/M/c): the share of time in which any is busy is one less the chance of none."""
    if not busy:
        return 1.0
    if busy >= num_ranks:
        return float(num_ranks)
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
            return root_between(low, high, function)
    return None


def root_between(low: float, high: float, function: Callable[[float], float]) -> float:
    """Return where a rising function is 0 between two numbers, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        if function(middle) >= 0:
            high = middle
        else:
            low = middle
    return high


def break_even_tau(costs: StepCosts, batch: float) -> float:
    """Return the tau at which a step that speculates for so many sequences is worth its time."""
    return costs.step_seconds(batch, is_speculative=True) / costs.step_seconds(batch, is_speculative=False)
