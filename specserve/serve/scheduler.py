"""The scheduler: it decides which sequences run next. It knows lengths, slots, pages and token ids; it never sees an
array.

Requests run by priority, then first come first served. A sequence is admitted when a slot and the pages of its prompt
are free; the prompt's beginning may be in the prefix cache. It prefills in chunks, a bounded number of tokens between
two steps, and then takes pages as it grows. When there are none left, the youngest sequence gives up its own and waits
for its turn again. Its answer so far is then part of its prompt, and most of it is still cached.
"""

import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specserve.serve.output import OutputStream
from specserve.serve.pages import PagePool
from specserve.serve.request import PromptToken, Request
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.controller import Estimate


@dataclass(eq=False)
class Sequence:
    """A request in the engine, from its arrival to its end: the only object that scheduler and rounds share."""

    request: Request
    # What the rounds keep. The scheduler only counts the emitted tokens.
    output: OutputStream
    output_ids: list[int] = field(default_factory=list)  # emitted and read
    prompt: list[PromptToken] = field(default_factory=list)  # what is known by now of a prompt that is scored
    estimate: Estimate | None = None  # how many draft tokens it accepts; None before its first admission
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafts: list[tuple[int, int]] = field(default_factory=list)  # see `SpeculationStats`
    admit_time: float = 0.0  # of the first admission, as all times by time.monotonic; 0: not yet
    first_time: float = 0.0  # of the first token
    last_time: float = 0.0  # of the last one so far
    # What the scheduler keeps.
    order: int = -1  # of arrival
    slot: int = -1
    epoch: int = 0  # steps dispatched in an earlier one no longer count
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0  # of the pages, those that the prefix cache knows already
    num_prefilled: int = 0  # tokens whose keys and values are, or are about to be, committed
    num_start: int = 0  # tokens to prefill: the prompt, and after a preemption the answer so far
    num_cached: int | None = None  # prompt tokens that were cached at the first admission
    num_in_flight: int = 0  # steps dispatched and not read
    most_in_flight: int = 0  # tokens they may emit, at most
    has_ended: bool = False

    def dispatched(self, most: int) -> None:
        """Note that a program was dispatched which emits one to `most` tokens of this sequence."""
        self.num_in_flight += 1
        self.most_in_flight += most

    def landed(self, most: int) -> None:
        """Note that the result of such a program has been read."""
        self.num_in_flight -= 1
        self.most_in_flight -= most

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.prompt_ids, *self.output_ids]

    @property
    def is_running(self) -> bool:
        return self.slot >= 0

    @property
    def is_scored(self) -> bool:
        """Return whether the log-probabilities of its prompt are still to be returned."""
        return self.request.params.prompt_logprobs is not None and not self.output_ids

    @property
    def is_prefilling(self) -> bool:
        return self.num_prefilled < self.num_start

    @property
    def num_left(self) -> int:
        """Tokens that it may still emit, if what is in flight brings one each."""
        return self.request.max_new_tokens - len(self.output_ids) - self.num_in_flight

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.order


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt that is to run next, in one prefill program."""

    sequence: Sequence
    num_cached: int  # tokens that its pages held when it was admitted
    num_tokens: int
    is_first: bool  # the sequence has just been admitted
    is_last: bool


@dataclass(frozen=True)
class Round:
    """The work that the engine does next, in this order."""

    preempted: list[Sequence]
    decode: list[Sequence]
    new_pages: list[tuple[int, int, int]]  # for `decode`: slot, which page of the sequence, page
    chunks: list[Chunk]

    @property
    def is_empty(self) -> bool:
        return not (self.decode or self.chunks)


class Scheduler:
    """The queue, the sequences in slots, and the pages: `schedule` decides what the next round runs."""

    def __init__(
        self,
        num_slots: int,
        pool: PagePool,
        *,
        chunks: Seq[int],  # sizes of the prefill programs
        max_step: int,  # tokens that one step emits, at most
        cache_lag: int = 0,  # last entries of a growing sequence that must not be cached yet
        prefill_tokens: int = 0,  # per round; 0: one largest chunk
        is_caching: bool = True,
        prefers_cached: bool = False,  # among equal priorities, the longest cached prefix first
        is_deterministic: bool = False,
    ) -> None:
        """Make an empty scheduler. With `is_deterministic` pages are reserved for the whole answer, so nothing is ever
        computed again in another way, and only prompts are cached, which one program has computed."""
        self.pool = pool
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []  # by rank
        self.num_preemptions = self.num_queried = self.num_hits = 0
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._chunks, self._max_step, self._cache_lag = tuple(chunks), max_step, cache_lag
        self._prefill_tokens = max(prefill_tokens, chunks[0]) if prefill_tokens else chunks[-1]
        self.is_caching, self._prefers_cached, self._is_deterministic = is_caching, prefers_cached, is_deterministic
        self._num_added = 0

    def set_step(self, *, max_step: int, cache_lag: int) -> None:
        """Steps are other ones from now on; both as for `__init__`. No sequence may be running."""
        self._max_step, self._cache_lag = max_step, cache_lag

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue: behind those of its priority, before those of a higher number."""
        sequence.order = self._num_added
        bisect.insort(self.waiting, sequence, key=lambda other: other.rank)
        self._num_added += 1

    def schedule(self) -> Round:
        """Plan the next round, and take what it needs: pages for every sequence that decodes (from younger ones, if
        there are no others), and slots and pages for those that leave the queue."""
        preempted: list[Sequence] = []
        decode: list[Sequence] = []
        new_pages: list[tuple[int, int, int]] = []
        for sequence in list(self.running):  # the oldest takes pages first
            if not sequence.is_running or sequence.is_prefilling or sequence.num_left <= 0:
                continue
            pages = self._grow(sequence, preempted)
            if pages is not None:
                new_pages += [(sequence.slot, len(sequence.pages) - len(pages) + i, p) for i, p in enumerate(pages)]
                decode.append(sequence)
        return Round(preempted, decode, new_pages, self._chunks_of_round(can_admit=not preempted))

    def _entries(self, sequence: Sequence, num_new: int) -> int:
        """Committed entries after `num_new` more tokens: all but the last token, which is never read."""
        request = sequence.request
        most = min(len(sequence.output_ids) + num_new, request.max_new_tokens)
        return len(request.prompt_ids) + most - 1

    def _pages_for(self, entries: int) -> int:
        return -(-entries // self.pool.page_size)

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> list[int] | None:
        """Pages for one more step, taken from younger sequences if it must; None when it had to give up its own."""
        wanted = self._pages_for(self._entries(sequence, sequence.most_in_flight + self._max_step))
        missing = max(0, wanted - len(sequence.pages))
        while missing > self.pool.num_available:
            victim = max(self.running, key=lambda other: other.rank)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return None
        pages = self.pool.allocate(missing)
        sequence.pages += pages
        return pages

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.num_preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda other: other.rank)

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue: what its pages hold is not to be read any more."""
        for sequence in list(self.running):
            self._preempt(sequence)

    def _chunks_of_round(self, *, can_admit: bool) -> list[Chunk]:
        chunks: list[Chunk] = []
        room = self._prefill_tokens
        while room >= self._chunks[0]:
            # One prompt at a time: the next one finds in the cache what this one computes.
            sequence = next((sequence for sequence in self.running if sequence.is_prefilling), None)
            is_first = sequence is None
            if sequence is None:
                sequence = self._admit() if can_admit else None
            if sequence is None:
                break
            num_cached = sequence.num_prefilled
            remaining = sequence.num_start - sequence.num_prefilled
            size = chunk_size(self._chunks, remaining, room)
            num_tokens = min(remaining, size)
            room -= size
            sequence.num_prefilled += num_tokens
            self._cache(sequence, sequence.num_prefilled)  # computed before anybody can read it
            chunks.append(Chunk(sequence, num_cached, num_tokens, is_first, not sequence.is_prefilling))
        return chunks

    def _admit(self) -> Sequence | None:
        """Give the next waiting sequence a slot and pages, if both are to be had: nobody overtakes it."""
        if not self.waiting or not self._free_slots:
            return None
        sequence = self._next_waiting()
        token_ids = sequence.token_ids
        salt = sequence.request.cache_salt
        entries = len(token_ids)
        if self._is_deterministic:
            entries = self._entries(sequence, sequence.request.max_new_tokens)
        # the last token is always run: its logits are wanted
        is_reading = self.is_caching and not sequence.is_scored  # what is cached has no logits
        cached = self.pool.acquire(token_ids[:-1], salt) if is_reading else []
        missing = self._pages_for(entries) - len(cached)
        reserve = 0 if self._is_deterministic else sum(not other.is_prefilling for other in self.running)
        if missing + reserve > self.pool.num_available:
            self.pool.release(cached)
            assert self.running, "a request larger than the cache was let in"
            return None
        self.waiting.remove(sequence)
        sequence.pages = cached + self.pool.allocate(missing)
        sequence.num_shared = len(cached)
        sequence.num_prefilled = len(cached) * self.pool.page_size
        sequence.num_start = len(token_ids)
        sequence.slot = self._free_slots.pop()
        bisect.insort(self.running, sequence, key=lambda other: other.rank)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_prefilled
            self.num_queried += len(token_ids)
            self.num_hits += sequence.num_cached
        return sequence

    def _next_waiting(self) -> Sequence:
        if not self._prefers_cached:
            return self.waiting[0]
        first = [s for s in self.waiting if s.request.priority == self.waiting[0].request.priority]
        return max(first, key=lambda s: (self.pool.match(s.token_ids, s.request.cache_salt), -s.order))

    def _cache(self, sequence: Sequence, num_entries: int) -> None:
        """The sequence's first entries are committed: let others find the full pages."""
        num_full = num_entries // self.pool.page_size
        if self.is_caching and num_full > sequence.num_shared:
            token_ids = sequence.token_ids[: num_full * self.pool.page_size]
            self.pool.insert(token_ids, sequence.pages, sequence.request.cache_salt, num_known=sequence.num_shared)
            sequence.num_shared = num_full

    def _leave(self, sequence: Sequence) -> None:
        """Free slot and pages; the answer is cached with the prompt."""
        if not self._is_deterministic and not sequence.is_prefilling:
            self._cache(sequence, len(sequence.token_ids) - 1 - self._cache_lag)
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self.pool.release(sequence.pages)
        sequence.slot, sequence.pages, sequence.num_shared = -1, [], 0
        sequence.num_prefilled = sequence.num_start = 0
        sequence.num_in_flight = sequence.most_in_flight = 0
        sequence.epoch += 1

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended, wherever it stands: its slot and its pages are free, or it waits no more."""
        sequence.has_ended = True
        if sequence.is_running:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)


def chunk_size(chunks: Seq[int], remaining: int, room: int) -> int:
    """The program for the next tokens of a prompt: the smallest that takes them all, unless most of it would be
    padding. `chunks` are the sizes that there are, the smallest first, of which at least that fits into `room`."""
    sizes = [size for size in chunks if size <= room]
    size = next((size for size in sizes if size >= remaining), sizes[-1])
    filled = [size for size in sizes if size <= remaining]
    return filled[-1] if filled and remaining <= size // 2 else size
