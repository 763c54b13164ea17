"""A fleet under load, event by event: requests arrive, are routed to replicas, wait, are prefilled in chunks and
decoded in batches, by known costs of steps.

Each replica runs the scheduler that serves (`serve.engine.scheduler`) with its pages and its prefix cache; only the
device is made up. A step takes what `StepCosts` says of its batch bucket, and each sequence accepts draft tokens at
random with given rates by depth. As in the engine, a round is planned while the one before it runs. Times are whole
nanoseconds, and events lie in a heap: a generator for each sequence, as simulation frameworks have them, would add a
dependency and say no less. Nothing depends on anything but the arguments.
"""

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, cast

import numpy as np

from specserve.plan.step_costs import StepCosts
from specserve.serve.engine.pages import PagePool, data_rank
from specserve.serve.engine.scheduler import Scheduler
from specserve.serve.engine.scheduler import Sequence as Running
from specserve.serve.requests.output import OutputStream
from specserve.serve.requests.request import Request, SamplingParams

Routing = Literal["round-robin", "least-loaded", "prefix", "random"]
SLACK = 8  # requests that a replica may have more than the least loaded one and still be chosen for its prefix
NANO = 10**9
_PARAMS = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Arrival:
    """A request of the simulation. Requests of one group begin with the same `shared` tokens."""

    time: int  # nanoseconds from the beginning
    prompt: int  # tokens
    answer: int
    group: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Replica:
    """The set-up of every replica."""

    costs: StepCosts
    num_slots: int
    num_pages: int
    page_size: int
    acceptance: tuple[float, ...] = ()  # conditional, by depth of the tree; empty: plain decoding
    cache_lag: int = 0  # as of `Scheduler`

    @property
    def num_ranks(self) -> int:
        """Data ranks, each with an equal part of slots and pages."""
        return self.costs.num_ranks


@dataclass(frozen=True)
class SimulatedAnswer:
    """The answer to a request. Times are nanoseconds from the beginning."""

    arrival: Arrival
    replica: int
    first: int  # when its first token was there
    last: int
    cached: int  # prompt tokens that were found in the cache
    num_tokens: int

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return (self.first - self.arrival.time) / NANO

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token."""
        return (self.last - self.first) / NANO / max(1, self.arrival.answer - 1)


@dataclass(frozen=True)
class SimulationReport:
    """A whole simulation."""

    answers: tuple[SimulatedAnswer, ...]  # in the order of their ends
    end: int  # nanoseconds
    busy: tuple[int, ...]  # of each replica, nanoseconds in rounds
    most_pages: tuple[int, ...]  # of each replica, that sequences held at once
    mean_pages: tuple[float, ...]  # of each replica, over its rounds' time
    num_preemptions: int
    num_steps: int  # of sequences
    num_tokens: int  # that came of these steps

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were cached."""
        asked = sum(answer.arrival.prompt for answer in self.answers)
        return sum(answer.cached for answer in self.answers) / max(1, asked)

    @property
    def tau(self) -> float:
        """The mean number of tokens of a step. Tokens past the end of an answer do not count."""
        return self.num_tokens / max(1, self.num_steps)

    def tokens_between(self, start: float, end: float) -> float:
        """The tokens of answers per second between two moments, in seconds. Those of an answer after its first are
        spread evenly over the time that they took."""
        low, high, total = int(start * NANO), int(end * NANO), 0.0
        for answer in self.answers:
            total += low <= answer.first < high
            if answer.last > answer.first:
                inside = max(0, min(high, answer.last) - max(low, answer.first))
                total += (answer.arrival.answer - 1) * inside / (answer.last - answer.first)
        return total / (end - start)

    def percentiles(self, what: Callable[[SimulatedAnswer], float], shares: Sequence[float]) -> list[float]:
        """Compute percentiles over the answers of a number that they have."""
        return np.percentile([what(answer) for answer in self.answers] or [0.0], shares).tolist()


def poisson(
    rate: float, seconds: float, *, prompt: int, answer: int, seed: int, groups: int = 1, shared: int = 0
) -> list[Arrival]:
    """Make requests that arrive at random for so long, each of one group at random."""
    rng = np.random.default_rng(seed)
    arrivals, now = [], 0.0
    while (now := now + rng.exponential(1 / rate)) < seconds:
        arrivals.append(Arrival(int(now * NANO), prompt, answer, int(rng.integers(groups)), shared))
    return arrivals


def simulate(
    replica: Replica, num_replicas: int, arrivals: Sequence[Arrival], *, routing: Routing, seed: int
) -> SimulationReport:
    """Answer all requests. They may come in any order."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.time)
    replicas = [_Replica(replica, number, seed) for number in range(num_replicas)]
    router = Router(replicas, routing, replica.page_size, seed)
    events: list[tuple[int, int, int]] = []  # ends of rounds: when, in which order, of which replica
    order = itertools.count()
    waiting = iter(ordered)
    upcoming = next(waiting, None)
    number = 0
    while upcoming is not None or events:
        if upcoming is not None and (not events or upcoming.time < events[0][0]):
            chosen = router.choose(upcoming)
            ends = chosen.add(upcoming, number)
            upcoming, number = next(waiting, None), number + 1
        else:
            now, _, which = heapq.heappop(events)
            chosen = replicas[which]
            ends = chosen.land(now)
        if ends is not None:
            heapq.heappush(events, (ends, next(order), chosen.number))
    answers = sorted(
        (answer for each in replicas for answer in each.answers), key=lambda answer: (answer.last, answer.replica)
    )
    return SimulationReport(
        tuple(answers),
        max((answer.last for answer in answers), default=0),
        tuple(each.busy for each in replicas),
        tuple(each.most_pages for each in replicas),
        tuple(each.page_time / max(1, each.busy) for each in replicas),
        sum(each.scheduler.num_preemptions for each in replicas),
        sum(each.num_steps for each in replicas),
        sum(each.num_tokens for each in replicas),
    )


@dataclass(frozen=True)
class _Round:
    """A round that was planned: how long it takes, and who is to be told when it ends."""

    duration: int  # nanoseconds
    rows: list[tuple[Running, int, bool]]  # a sequence, the most tokens that it gets, and whether by a step


@dataclass(eq=False)
class _Asked:
    """The record of a request while it runs."""

    arrival: Arrival
    first: int = -1


class _Replica:
    """A simulated server: the real scheduler over pages that hold nothing."""

    def __init__(self, setup: Replica, number: int, seed: int) -> None:
        assert setup.num_slots <= setup.costs.batch_sizes[-1], "every batch has a cost"
        self.number, self._setup = number, setup
        self._depth = len(setup.acceptance)
        self.scheduler = Scheduler(
            setup.num_slots,
            PagePool(setup.num_pages, setup.page_size, num_ranks=setup.num_ranks),
            chunks=setup.costs.chunks,
            max_step=1 + self._depth,
            cache_lag=setup.cache_lag,
        )
        costs = setup.costs
        self._sizes, self._chunks = costs.batch_sizes, costs.chunks
        self._steps = [round(NANO * seconds) for seconds in costs.of(self._depth > 0)]
        self._prefills = [round(NANO * seconds) for seconds in costs.prefill]
        self._reach = np.cumprod(setup.acceptance)[::-1].tolist()  # ascending: of the deepest first
        self._rng = np.random.default_rng([seed, number])
        self._asked: dict[Running, _Asked] = {}
        self._current: _Round | None = None
        self._next: _Round | None = None
        self._now = 0
        self.answers: list[SimulatedAnswer] = []
        self.busy = self.page_time = self.most_pages = self.num_steps = self.num_tokens = 0

    @property
    def load(self) -> int:
        """The number of requests that it has, waiting or running."""
        return len(self._asked)

    def add(self, arrival: Arrival, number: int) -> int | None:
        """Take a request. Where nothing was running, a round begins with it: returns when that ends."""
        request = Request(
            str(number), _prompt(arrival, number), _PARAMS, arrival.answer, 0, on_delta=lambda _delta: None
        )
        needed = -(-(arrival.prompt + arrival.answer - 1) // self._setup.page_size)
        assert needed <= self._setup.num_pages // self._setup.num_ranks, (
            "a request larger than the cache is refused by a server"
        )
        sequence = Running(request, cast(OutputStream, None))  # nobody reads what it says
        self._asked[sequence] = _Asked(arrival)
        self.scheduler.add(sequence)
        if self._current is not None:
            return None  # the engine waits for the round that runs
        self._current, self._now = self._plan(), arrival.time
        return self._start()

    def land(self, now: int) -> int | None:
        """End the current round. Returns when the next one ends, or None where there is none."""
        assert self._current is not None, "a round that ends has begun"
        self._now = now
        landed, self._current = self._current, self._next
        for sequence, most, is_step in landed.rows:
            if sequence.is_running:  # else it has ended, or has given up its pages and will do this step again
                self._give(sequence, most, is_step=is_step)
        self._current = self._current or self._plan()
        return self._start()

    def _start(self) -> int | None:
        """Begin the current round, and plan the one after it, whose results are not known then."""
        if self._current is None:
            return None
        pool, duration = self.scheduler.pool, self._current.duration
        held = pool.num_pages - pool.num_available
        self.busy, self.page_time = self.busy + duration, self.page_time + held * duration
        self.most_pages = max(self.most_pages, held)
        self._next = self._plan()
        return self._now + duration

    def _plan(self) -> _Round | None:
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return None
        duration = 0
        rows: list[tuple[Running, int, bool]] = []
        if plan.decode:
            ranks = self._setup.num_ranks
            own = Counter(data_rank(sequence.slot, self._setup.num_slots, ranks) for sequence in plan.decode)
            duration = self._steps[bisect.bisect_left(self._sizes, ranks * max(own.values()))]
            rows = [(sequence, 1 + self._depth, True) for sequence in plan.decode]
        for chunks in plan.prefills:
            most = max(chunk.num_tokens for chunk in chunks)
            duration += self._prefills[bisect.bisect_left(self._chunks, most)]
            rows += [(chunk.sequence, 1, False) for chunk in chunks if chunk.is_last]
        for sequence, most, _ in rows:
            sequence.dispatched(1, most)
        return _Round(duration, rows)

    def _give(self, sequence: Running, most: int, *, is_step: bool) -> None:
        """Hand a sequence the tokens of a step, or the one that follows its prompt."""
        sequence.landed(1, most)
        asked, drawn = self._asked[sequence], 1
        if most > 1:
            drawn += len(self._reach) - bisect.bisect_right(self._reach, self._rng.random())
        taken = min(drawn, asked.arrival.answer - len(sequence.output_ids))
        asked.first = self._now if asked.first < 0 else asked.first
        if is_step:
            self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + taken
        sequence.output_ids.extend(itertools.repeat(0, taken))
        if len(sequence.output_ids) == asked.arrival.answer:
            self.scheduler.finish(sequence)
            del self._asked[sequence]
            self.answers.append(
                SimulatedAnswer(
                    asked.arrival,
                    self.number,
                    asked.first,
                    self._now,
                    sequence.num_cached or 0,
                    len(sequence.output_ids),
                )
            )


def _prompt(arrival: Arrival, number: int) -> tuple[int, ...]:
    """Make token ids by which prompts of one group begin alike, and no others do."""
    return (-1 - arrival.group,) * arrival.shared + (number,) * (arrival.prompt - arrival.shared)


class HasLoad(Protocol):
    """The interface of what routing looks at: the number of requests that a replica has, waiting or running."""

    @property
    def load(self) -> int: ...


Routed = TypeVar("Routed", bound=HasLoad)


class Router(Generic[Routed]):
    """The rule by which a request gets its replica. `prefix` remembers where it has sent each group, as routers do
    that see no pages, and sends it there again unless these replicas have clearly more to do than others."""

    def __init__(self, replicas: Sequence[Routed], routing: Routing, page_size: int, seed: int) -> None:
        self._replicas, self._routing, self._page_size = replicas, routing, page_size
        self._turns = itertools.cycle(replicas)
        self._rng = np.random.default_rng([seed, len(replicas)])
        self._sent: dict[int, list[Routed]] = {}

    def choose(self, arrival: Arrival) -> Routed:
        """Return the replica for a request that arrives now."""
        if self._routing == "round-robin":
            return next(self._turns)
        if self._routing == "random":
            return self._replicas[int(self._rng.integers(len(self._replicas)))]
        least = min(self._replicas, key=lambda replica: replica.load)
        if self._routing == "least-loaded" or arrival.shared < self._page_size:
            return least
        known = self._sent.setdefault(arrival.group, [])
        near = min(known, key=lambda replica: replica.load, default=None)
        if near is not None and near.load <= least.load + SLACK:
            return near
        known.append(least)
        return least
