"""The scheduler decides which sequence runs next. It knows lengths, slots, pages and token ids; it never sees an array.

Requests run by priority, then first come first served. A sequence is admitted when a slot and the pages of its prompt
are free; the prompt's beginning may be in the prefix cache. It prefills in chunks, a bounded number of tokens between
two steps, and then takes pages as it grows. When there are none left, the youngest sequence gives up its own and waits
for its turn again; what it has said so far is prompt then, and most of it is still cached.

Over a mesh that cuts sequences each data rank has slots and pages of its own (`pages.data_rank`). A sequence is bound
to a rank while it has a slot: its pages are the rank's, and so are the sequences that give up pages for it. The ranks
prefill side by side. A prefix draws a prompt to the rank that has it where that saves more tokens than
it costs.

On accelerators several short prompts of a rank run in one program. None of them sees what another one computes there,
so a prompt that begins as another one does waits for the next program, and finds the beginning in the cache.
"""

import bisect
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq

from specserve.models.cache import WindowSizes
from specserve.serve.engine.options import EngineOptions
from specserve.serve.engine.pages import PagePool
from specserve.serve.engine.sequence import Chunk, PageRow, Round, Sequence
from specserve.serve.programs.shapes import tokens_at_once


class Scheduler:
    """The queue, the sequences in slots, and the pages: `schedule` decides what the next round runs."""

    def __init__(
        self,
        num_slots: int,
        pool: PagePool,
        options: EngineOptions | None = None,
        *,
        chunks: Seq[int],  # sizes of the prefill programs
        extra_tokens: int,  # of a prompt, that take as long as one such program takes whatever its size
        most_prompts: Callable[[int], int] = lambda _chunk: 1,  # of a data rank that one of this size takes, at most
        max_step: int,  # tokens that one step emits, at most
        cache_lag: int = 0,  # last entries of a growing sequence, which its drafter may not have written yet
        is_deterministic: bool = False,
    ) -> None:
        """Make an empty scheduler. With `is_deterministic` pages are reserved for the whole answer, so nothing is ever
        computed again in another way, and only prompts are cached, which one program has computed. The data ranks are
        the pool's; their number must divide `num_slots`."""
        assert num_slots % pool.num_ranks == 0, f"{num_slots} slots for {pool.num_ranks} data ranks"
        options = options or EngineOptions()
        self.pool = pool
        self._slots_of_rank = num_slots // pool.num_ranks
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []  # by rank
        self.num_preemptions = self.num_queried = self.num_hits = 0
        self._free_slots = [  # by data rank, the next one last
            list(range(rank * self._slots_of_rank, (rank + 1) * self._slots_of_rank))[::-1]
            for rank in range(pool.num_ranks)
        ]
        self._chunks, self._extra, self._max_step, self._cache_lag = tuple(chunks), extra_tokens, max_step, cache_lag
        self.is_here: Callable[[int], bool] = lambda _chunk: True  # whether a prefill program of this size can run now
        self._most_prompts = most_prompts
        self._prefill_tokens = max(options.prefill_tokens or chunks[-1], chunks[0])
        self.is_caching, self._prefers_cached = options.is_caching, options.prefers_cached
        self._is_deterministic = is_deterministic
        self._num_added = 0
        self._begins = True  # see `schedule`

    def set_step(self, *, max_step: int, cache_lag: int, windows: WindowSizes) -> None:
        """Steps are other ones from now on, as for `__init__`, with so many window pages. No sequence may be running,
        and none may be cached."""
        self._max_step, self._cache_lag = max_step, cache_lag
        self.pool.use_windows(windows)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue: behind those of its priority, before those of a higher number."""
        sequence.order = self._num_added
        bisect.insort(self.waiting, sequence, key=lambda other: other.rank)
        self._num_added += 1

    def schedule(self, most_steps: int = 1, *, side_by_side: bool = True, begins: bool = True) -> Round:
        """Plan the next round, and take what it needs: pages for every sequence that decodes (from younger ones, if
        there are no others), and slots and pages for those that leave the queue. They are pages for `most_steps` steps
        of the way that emits most, or for fewer where more would be in somebody's way. Several prompts of a data rank
        run `side_by_side` where there are programs for that. Unless it `begins` sequences, those alone that had a slot
        before leave the queue."""
        self._begins = begins
        preempted: list[Sequence] = []
        decode: list[Sequence] = []
        new_pages: list[PageRow] = []
        ready = [each for each in self.running if not each.is_prefilling and each.num_left > 0]
        most_steps, most_tokens = self._most(ready, most_steps)
        for sequence in ready:  # the oldest takes pages first
            rows = self._grow(sequence, max(most_tokens, self._max_step), preempted) if sequence.is_running else None
            if rows is not None:
                new_pages += rows
                decode.append(sequence)
        prefills = self._prefills_of_round(not preempted, side_by_side)
        return Round(preempted, decode, new_pages, prefills, most_steps, most_tokens)

    def _most(self, ready: Seq[Sequence], most: int) -> tuple[int, int]:
        """Return how many steps these sequences may take in one round, and how many tokens these may emit for each: one
        step where a prompt runs or may be admitted next, or where a token mask must see each token, and no more tokens
        than end before any answer can, or than there are free pages for. How many steps that are depends on the way
        that is chosen: a plain one emits a token, whatever the deepest tree does."""
        one = 1, self._max_step
        if any(each.is_prefilling for each in self.running) or (self._candidates and any(self._free_slots)):
            return one
        if any(each.request.token_mask is not None for each in ready):
            return one
        num_tokens = min([tokens_at_once(most, self._max_step), *(each.num_left for each in ready)])
        while not self._has_pages(ready, max(num_tokens, self._max_step)):
            if num_tokens <= self._max_step:
                return one
            num_tokens = max(num_tokens // 2, self._max_step)
        return most, num_tokens

    def _has_pages(self, ready: Seq[Sequence], num_tokens: int) -> bool:
        """Return whether there are free pages for so many more tokens of each of these sequences."""
        missing: Counter[int] = Counter()
        for each in ready:
            missing[each.data_rank] += self._num_missing(each, num_tokens)
        return all(number <= self.pool.available(rank) for rank, number in missing.items())

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that a sequence lacks for so many more tokens."""
        return max(0, self._num_needed(sequence, num_tokens) - len(sequence.pages))

    def _num_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that a sequence needs for so many more tokens, with those that it has."""
        return self.pool.pages_for(sequence.entries_after(sequence.most_in_flight + num_tokens))

    def _grow(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> list[PageRow] | None:
        """Pages for so many more tokens, taken from younger sequences of its data rank if it must; None when it had to
        give up its own."""
        missing, rank = self._num_missing(sequence, num_tokens), sequence.data_rank
        while missing > self.pool.available(rank):
            beside = (other for other in self.running if other.data_rank == rank)
            victim = max(beside, key=lambda other: other.rank)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return None
        begin = len(sequence.pages)
        sequence.pages += self.pool.allocate(missing, rank=rank)
        # no later step has a query before the least that those in flight leave; and what could be cached by then is to
        # be hit together with a window before its end
        committed = max(0, sequence.entries_after(sequence.num_in_flight) - self._cache_lag)
        self._leave_behind(sequence, committed // self.pool.page_size * self.pool.page_size)
        return self._rows(sequence, begin, self._num_needed(sequence, num_tokens))

    def _rows(self, sequence: Sequence, begin: int, end: int) -> list[PageRow]:
        """The pages of a sequence from `begin` on that are new, and those up to `end` that get window pages now."""
        assert sequence.held is not None
        if self.pool.windows.groups:
            begin = min(begin, sequence.held.end)
            sequence.held.extend(end)
        return [
            (sequence.slot, column, sequence.pages[column], *sequence.held.row(column)) for column in range(begin, end)
        ]

    def _leave_behind(self, sequence: Sequence, position: int) -> None:
        """Give back the window pages that no token of a sequence from this position on can see."""
        if self.pool.windows.groups:
            assert sequence.held is not None
            sequence.held.leave_behind(position, [border // self.pool.page_size for border in sequence.borders])

    def _lend(self, sequence: Sequence, known: Seq[int]) -> Iterator[PageRow]:
        """Give the pages of the tree that hold a sequence's beginning the window pages that it has computed again,
        where they have none."""
        assert sequence.held is not None
        nowhere = self._slots_of_rank * self.pool.num_ranks
        for column in range(min(sequence.held.firsts, default=len(known)), len(known)):
            own = sequence.held.lend(column, known[column])
            if max(own) >= 0:
                yield nowhere, 0, known[column], *own

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.num_preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda other: other.rank)

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue: what its pages hold is not to be read any more."""
        for sequence in list(self.running):
            self._preempt(sequence)

    def _prefills_of_round(self, can_admit: bool, side_by_side: bool) -> list[tuple[Chunk, ...]]:
        prefills: list[tuple[Chunk, ...]] = []
        room = self._prefill_tokens  # of each data rank
        while room >= self._chunks[0]:
            prompts = self._first_prompts(can_admit)
            if not prompts:
                break
            size = max(self._size(sequence, room) for sequence in prompts)
            most, alone = self._most_prompts(size), len(prompts)
            if side_by_side and 1 < most <= room // size and not any(each.is_scored for each in prompts):
                self._fill_up(prompts, most, can_admit)
            room -= size * (most if len(prompts) > alone else 1)
            prefills.append(tuple(self._chunk(sequence, size) for sequence in prompts))
            for sequence in prompts:  # the next one reads from there on
                self._leave_behind(sequence, sequence.num_prefilled)
        return prefills

    def _size(self, sequence: Sequence, room: int) -> int:
        """Return the size of a prompt's next chunk, of the programs that can run now where that of all cannot."""
        sizes, number = [size for size in self._chunks if size <= room], sequence.num_start - sequence.num_prefilled
        if sequence.is_scored:  # by one program, of the largest size
            return sizes[-1]
        size = chunk_size(sizes, number, self._extra)
        if self.is_here(size):
            return size
        return chunk_size([*filter(self.is_here, sizes)] or sizes, number, self._extra)

    def _first_prompts(self, can_admit: bool) -> list[Sequence]:
        """Return what prefills next: the first prompt of each data rank, which may have just been admitted."""
        prompts: dict[int, Sequence] = {}
        for each in self.running:
            if each.is_prefilling:
                prompts.setdefault(each.data_rank, each)
        while can_admit and len(prompts) < self.pool.num_ranks:
            sequence = self._admit({rank: each.num_start - each.num_prefilled for rank, each in prompts.items()})
            if sequence is None:
                break
            prompts[sequence.data_rank] = sequence
        return list(prompts.values())

    def _fill_up(self, prompts: list[Sequence], most: int, can_admit: bool) -> None:
        """Put further prompts beside the first ones of their data ranks, up to so many for each: those that have begun,
        then those that wait, as long as the next of them shares no page with any that is to be computed here."""
        number = Counter(each.data_rank for each in prompts)
        for each in self.running:
            if each.is_prefilling and not each.is_scored and each not in prompts and number[each.data_rank] < most:
                prompts.append(each)
                number[each.data_rank] += 1
        while can_admit and self._candidates and any(number[rank] < most for rank in range(self.pool.num_ranks)):
            waiting = self._next_waiting()
            if waiting.is_scored or any(self._shares(waiting, each) for each in prompts):
                return
            full = {rank: self._prefill_tokens for rank in range(self.pool.num_ranks) if number[rank] >= most}
            sequence = self._admit(full)
            if sequence is None:
                return
            prompts.append(sequence)
            number[sequence.data_rank] += 1

    def _shares(self, sequence: Sequence, other: Sequence) -> bool:
        """Return whether the other one is about to compute a page that this one would find in the cache a moment
        later."""
        if not self.is_caching or sequence.request.cache_salt != other.request.cache_salt:
            return False
        unit = self.pool.kept.border if self.pool.kept else self.pool.page_size
        end = (other.num_prefilled // unit + 1) * unit
        return end <= other.num_start and sequence.token_ids[:end] == other.token_ids[:end]

    def _chunk(self, sequence: Sequence, size: int) -> Chunk:
        """The next tokens of a prompt, `size` at most."""
        num_cached, is_first = sequence.num_prefilled, sequence.is_new
        num_tokens, sequence.is_new = min(sequence.num_start - num_cached, size), False
        if self.pool.kept:  # chunks end at borders, whatever room the ones before had
            num_tokens = min(num_tokens, self.pool.kept.border - num_cached % self.pool.kept.border)
        sequence.num_prefilled += num_tokens
        new_pages: list[PageRow] = []
        if self.pool.windows.groups:
            end = self.pool.pages_for(sequence.num_prefilled)
            new_pages = self._rows(sequence, end, end)
        self._cache(sequence, sequence.num_prefilled)  # computed before anybody can read it
        keep, token_ids, salt = None, sequence.token_ids, sequence.request.cache_salt
        for border in sequence.borders:
            if num_cached < border <= sequence.num_prefilled:
                known = self.pool.known(token_ids[:border], salt, rank=sequence.data_rank)
                new_pages += self._lend(sequence, known)
                if self.pool.kept and len(known) * self.pool.page_size == border:
                    keep = self.pool.kept.keep(known[-1])
        return Chunk(sequence, num_cached, num_tokens, is_first, not sequence.is_prefilling, keep, tuple(new_pages))

    def _admit(self, busy: Mapping[int, int]) -> Sequence | None:
        """Give the next waiting sequence a slot and pages of the best data rank that has them, unless that one is to be
        waited for: nobody overtakes it. `busy` has the tokens that ranks have still to prefill of another prompt."""
        if not self._candidates or not any(self._free_slots):
            return None
        sequence = self._next_waiting()
        token_ids = sequence.token_ids
        entries = len(token_ids)
        if self._is_deterministic:
            entries = sequence.entries_after(sequence.request.max_new_tokens)
        # the last token is always run: its logits are wanted
        is_reading = self.is_caching and not sequence.is_scored  # cached tokens have no logits
        prompt, salt = token_ids[:-1] if is_reading else [], sequence.request.cache_salt
        for rank in self._ranks_for(prompt, salt, busy):
            if rank in busy:
                return None
            cached = self.pool.acquire(prompt, salt, rank=rank)
            missing = self.pool.pages_for(entries) - len(cached)
            if missing + self._num_reserved(rank) <= self.pool.available(rank):
                break
            self.pool.release(cached)
        else:
            assert self.running, "a request larger than the cache was let in"
            return None
        self.waiting.remove(sequence)
        sequence.held = self.pool.windows.hold(cached, rank)
        if (self.pool.kept or self.pool.windows.groups) and self.is_caching:
            num_known = len(self.pool.known(prompt, salt, rank=rank)) * self.pool.page_size
            sequence.borders = self._borders(token_ids[:-1], num_known)
        if self.pool.kept and self.is_caching:
            sequence.kept = self.pool.kept.use(cached[-1]) if cached else -1
        sequence.pages = cached + self.pool.allocate(missing, rank=rank)
        sequence.num_shared = len(cached)
        sequence.num_prefilled = len(cached) * self.pool.page_size
        sequence.num_start, sequence.is_new = len(token_ids), True
        sequence.slot, sequence.data_rank = self._free_slots[rank].pop(), rank
        bisect.insort(self.running, sequence, key=lambda other: other.rank)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_prefilled
            self.num_queried += len(token_ids)
            self.num_hits += sequence.num_cached
        return sequence

    def _borders(self, prompt: Seq[int], num_known: int) -> frozenset[int]:
        """Return the numbers of tokens of a prompt behind which states and windows are worth keeping: as many as a
        longer prompt of the same conversation can begin with, and as many as another prompt began with before."""
        border = self.pool.kept.border if self.pool.kept else self.pool.page_size
        return frozenset(number // border * border for number in (len(prompt), num_known)) - {0}

    def _ranks_for(self, prompt: Seq[int], salt: str, busy: Mapping[int, int]) -> list[int]:
        """The data ranks with a free slot that a prompt may go to, or wait for, the best first: those that are worth
        something to it, then the others that are not `busy`, the one with the most free pages first.

        A rank is worth the tokens of the prompt that it has cached, less what going there costs. While a busy one is
        waited for, idle ranks have no prompt: that costs as many tokens as it has left, for each idle rank that there
        is a waiting prompt for. And a step takes as long as its fullest rank: one that has more sequences than the
        emptiest by over half of its slots is worth nothing and comes last, and each that it has more costs as large a
        part of the prompt as it is of that bound."""
        if self.pool.num_ranks == 1:
            return [0]
        num_free = {rank: len(slots) for rank, slots in enumerate(self._free_slots) if slots}
        most, beyond = max(num_free.values()), self._slots_of_rank // 2 + 1
        num_idle = min(len(self.waiting), len(num_free.keys() - busy.keys()))

        def worth(rank: int) -> float:
            waiting = busy.get(rank, 0) * num_idle
            return self.pool.match(prompt, salt, rank=rank) - waiting - len(prompt) * (most - num_free[rank]) / beyond

        worths = {rank: max(0.0, worth(rank)) for rank in num_free}
        return sorted(
            (rank for rank in worths if worths[rank] or rank not in busy),
            key=lambda rank: (most - num_free[rank] >= beyond, -worths[rank], -self.pool.available(rank)),
        )

    def _num_reserved(self, rank: int) -> int:
        """Pages that the sequences of a data rank will soon grow by, one each."""
        if self._is_deterministic:
            return 0
        return sum(not other.is_prefilling and other.data_rank == rank for other in self.running)

    @property
    def _candidates(self) -> Seq[Sequence]:
        """The waiting sequences that may have a slot, by rank."""
        return self.waiting if self._begins else [each for each in self.waiting if each.has_begun]

    def _next_waiting(self) -> Sequence:
        waiting = self._candidates
        if not self._prefers_cached:
            return waiting[0]
        first = [s for s in waiting if s.request.priority == waiting[0].request.priority]

        def longest_hit(sequence: Sequence) -> int:
            prompt, salt = sequence.token_ids, sequence.request.cache_salt
            return max(self.pool.match(prompt, salt, rank=rank) for rank in range(self.pool.num_ranks))

        return max(first, key=lambda s: (longest_hit(s), -s.order))

    def _cache(self, sequence: Sequence, num_entries: int) -> None:
        """The sequence's first entries are committed: let others find the full pages."""
        num_full = num_entries // self.pool.page_size
        if self.is_caching and num_full > sequence.num_shared:
            token_ids = sequence.token_ids[: num_full * self.pool.page_size]
            self.pool.insert(token_ids, sequence.pages, sequence.request.cache_salt, num_known=sequence.num_shared)
            assert sequence.held is not None
            for column in range(max(sequence.num_shared, min(sequence.held.firsts, default=num_full)), num_full):
                if self.pool.is_cached(sequence.pages[column]):
                    sequence.held.lend(column, sequence.pages[column])
            sequence.num_shared = num_full

    def _leave(self, sequence: Sequence) -> None:
        """Free slot and pages; the answer is cached with the prompt."""
        if not self._is_deterministic and not sequence.is_prefilling:
            self._cache(sequence, len(sequence.token_ids) - 1 - self._cache_lag)
        self.running.remove(sequence)
        self._free_slots[sequence.data_rank].append(sequence.slot)
        self.pool.release(sequence.pages)
        assert sequence.held is not None
        sequence.held.release()
        sequence.held = None
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


def chunk_size(sizes: Seq[int], remaining: int, extra: int) -> int:
    """Return the size of the program for the next tokens of a prompt: the first of those that take all of them in the
    least time, where each takes the time of its own tokens, padding included, and of so many `extra` ones. The sizes
    are those that there are, the smallest first."""
    return _cheapest(tuple(sizes), remaining, extra)[1] if remaining < 2 * sizes[-1] else sizes[-1]


@functools.lru_cache(maxsize=1 << 14)
def _cheapest(sizes: tuple[int, ...], remaining: int, extra: int) -> tuple[int, int]:
    """Return how many tokens' time the rest of a prompt takes, and the first program for it: the largest that will
    do."""
    if remaining <= 0:
        return 0, 0
    return min(
        ((size + extra + _cheapest(sizes, remaining - size, extra)[0], size) for size in sizes[::-1]),
        key=operator.itemgetter(0),
    )
