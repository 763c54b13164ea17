"""The pages of layers with a sliding window. Integers only, no arrays.

A token is seen in such a layer by those alone that follow it by less than the window, so a sequence needs no pages
there that lie further back. Such layers have pages of their own, fewer than there are of the others: a page of a
sequence has a window page while one of its tokens can still be seen, and is then without one. There are always enough
of them (`window_sizes`), so nobody ever waits for one, and admission goes by the other layers' pages alone.

A page in the tree of cached prefixes may keep its window page, to be hit or given to another one. A prefix can be hit
where the pages of a window before its end have theirs.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

from specserve.models.cache import DRAFT_REACH, WindowSizes

LEAST_CACHED, CACHED_PART = 8, 4  # windows of cached prefixes: at least so many, or one for so many slots


def window_sizes(
    windows: Iterable[int],
    *,
    num_slots: int,
    num_pages: int,
    page_size: int,
    ahead: int,
    chunks: Sequence[int],
    num_cached: int | None = None,
) -> WindowSizes:
    """Return the window pages that a data rank of so many slots and pages has, for each of these windows, in tokens;
    windows that need no fewer pages than there are have none of their own.

    They are enough for each slot's sequence, whose window begins up to a page before what of it could be cached, and
    which ends up to `ahead` tokens behind that, with the steps in flight and the next ones; for one prefill, whose
    prompts have as many tokens together as the largest of `chunks`; and for the windows of `num_cached` cached
    prefixes; None: of a quarter as many as there are slots, and of some at least."""
    if num_cached is None:
        num_cached = max(LEAST_CACHED, num_slots // CACHED_PART)
    prefill = -(-chunks[-1] // page_size) + min(num_slots, chunks[-1] // chunks[0])
    found = []
    for window in sorted(set(windows) - {0}):
        seen = window + DRAFT_REACH
        cached = num_cached * (-(-seen // page_size) + 1)
        number = num_slots * (-(-(seen + ahead) // page_size) + 2) + cached + prefill
        if number < num_pages:
            found.append((window, number))
    return tuple(found)


class Windows:
    """The window pages of every length of window. Those of data rank r are the r-th part of all, as pages are."""

    def __init__(self, sizes: WindowSizes, page_size: int, num_ranks: int = 1) -> None:
        self.page_size = page_size
        self.groups = tuple(_Group(window, number, page_size, num_ranks) for window, number in sizes)

    def reach(self, pages: Sequence[int], end: int) -> int:
        """Return the most of the first `end` cached pages behind which a sequence can go on in every window."""
        at = end + 1
        while at != end:
            at = end
            for group in self.groups:
                end = group.reach(pages, end)
        return end

    def hold(self, cached: Sequence[int], rank: int) -> "HeldWindows":
        """Take the window pages that a sequence needs which goes on behind these cached pages of its data rank."""
        return HeldWindows(self, cached, rank)

    def forget(self, page: int) -> None:
        """Note that a page is in the tree no more."""
        for group in self.groups:
            group.forget(page)

    def clear(self) -> None:
        """Note that no page is in the tree, and that the held ones are never to be found there."""
        for group in self.groups:
            for page in list(group.of_page):
                group.forget(page)
            group.private = set(group.references)

    def check(self, cached: Collection[int], held: Sequence["HeldWindows"] | None = None) -> None:
        """Asserts that the books balance, with the pages that are in the tree and what all sequences hold. Reads
        everything: for tests."""
        for i, group in enumerate(self.groups):
            group.check(cached)
            if held is not None:
                counted = Counter(own for each in held for own in each.own[i])
                assert counted == group.references, "what nobody holds is not held"


class HeldWindows:
    """The window pages that a sequence holds: in each window, those of consecutive pages of the sequence, of which
    `end` is the number of the last one and one more."""

    def __init__(self, windows: Windows, cached: Sequence[int], rank: int) -> None:
        self._groups, self.page_size, self._rank = windows.groups, windows.page_size, rank
        self.end = len(cached)
        self.firsts = [group.first(self.end * self.page_size) for group in self._groups]
        self.own = [
            deque(group.acquire(page) for page in cached[first:])
            for group, first in zip(self._groups, self.firsts, strict=True)
        ]

    def extend(self, end: int) -> None:
        """Take window pages for the sequence's pages up to `end`."""
        for group, own in zip(self._groups, self.own, strict=True):
            own.extend(group.allocate(self._rank) for _ in range(self.end, end))
        self.end = max(self.end, end)

    def row(self, column: int) -> tuple[int, ...]:
        """Return the window pages of a page of the sequence, by its number; -1 where it has none any more."""
        return tuple(
            own[column - first] if column >= first else -1 for own, first in zip(self.own, self.firsts, strict=True)
        )

    def leave_behind(self, position: int, kept_ends: Collection[int]) -> None:
        """Give back what no token from this position on can see. The windows before `kept_ends`, numbers of pages, are
        worth keeping for others."""
        for i, (group, own) in enumerate(zip(self._groups, self.own, strict=True)):
            for column in range(self.firsts[i], group.first(position)):
                is_worth = any(group.first(end * self.page_size) <= column < end for end in kept_ends)
                group.release(own.popleft(), is_worth=is_worth)
                self.firsts[i] += 1

    def release(self) -> None:
        """Give back everything; the end of a sequence is worth keeping."""
        for group, own in zip(self._groups, self.own, strict=True):
            while own:
                group.release(own.popleft(), is_worth=True)

    def lend(self, column: int, page: int) -> tuple[int, ...]:
        """Give a page of the tree the window pages of a page of the sequence, by its number, which has the same tokens,
        where it has none: then a prefix is hit with them. Returns those that it got; -1 for the others."""
        return tuple(
            own[column - first] if column >= first and group.attach(page, own[column - first]) else -1
            for group, own, first in zip(self._groups, self.own, self.firsts, strict=True)
        )


class _Group:
    """The window pages of one length of window."""

    def __init__(self, window: int, number: int, page_size: int, num_ranks: int) -> None:
        self.window, self._number, self.page_size = window, number, page_size
        self._free = [list(reversed(range(rank * number, (rank + 1) * number))) for rank in range(num_ranks)]
        # by data rank, without a holder, with a page in the tree; the next one to be given away first
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_ranks)]
        self.references: Counter[int] = Counter()  # of the held ones
        self.of_page: dict[int, int] = {}  # of pages in the tree
        self._page_of: dict[int, int] = {}
        self.private: set[int] = set()  # held since before the tree was cleared

    def first(self, position: int) -> int:
        """Return the number of the first of a sequence's pages that the token at a position sees, or a draft for it."""
        return max(0, position - self.window + 1 - DRAFT_REACH) // self.page_size

    def reach(self, pages: Sequence[int], end: int) -> int:
        """See `Windows.reach`."""
        column = end
        while column > self.first(end * self.page_size):
            column -= 1
            if pages[column] not in self.of_page:
                end = column  # and no further one: a longer beginning needs this page too
        return end

    def acquire(self, page: int) -> int:
        own = self.of_page[page]
        self._idle[self._rank(own)].pop(own, None)
        self.references[own] += 1
        return own

    def allocate(self, rank: int) -> int:
        if not self._free[rank]:
            assert self._idle[rank], "there are fewer window pages than sequences may hold"
            own = next(iter(self._idle[rank]))
            self.forget(self._page_of[own])
        own = self._free[rank].pop()
        self.references[own] = 1
        return own

    def release(self, own: int, *, is_worth: bool) -> None:
        self.references[own] -= 1
        if self.references[own]:
            return
        del self.references[own]
        self.private.discard(own)
        idle, rank = self._idle, self._rank(own)
        if own not in self._page_of:
            self._free[rank].append(own)
            return
        idle[rank][own] = None
        if not is_worth:
            idle[rank].move_to_end(own, last=False)

    def attach(self, page: int, own: int) -> bool:
        """Give a page of the tree a held window page, unless it has one, or another page has that."""
        if page in self.of_page or own in self._page_of or own in self.private:
            return False
        self.of_page[page], self._page_of[own] = own, page
        return True

    def forget(self, page: int) -> None:
        own = self.of_page.pop(page, None)
        if own is None:
            return
        del self._page_of[own]
        rank = self._rank(own)
        if own in self._idle[rank]:
            del self._idle[rank][own]
            self._free[rank].append(own)

    def check(self, cached: Collection[int]) -> None:
        free, idle = ([own for part in parts for own in part] for parts in (self._free, self._idle))
        assert sorted([*free, *idle, *self.references]) == list(range(self._number * len(self._free))), "one state each"
        for rank, parts in enumerate(zip(self._free, self._idle, strict=True)):
            assert {self._rank(own) for part in parts for own in part} <= {rank}, "they stay with their data rank"
        assert {page: own for own, page in self._page_of.items()} == self.of_page
        assert set(self.of_page) <= set(cached), "a page that keeps one is in the tree"
        assert set(idle) <= self._page_of.keys() <= {*idle, *self.references}
        assert self.private <= self.references.keys() - self._page_of.keys()

    def _rank(self, own: int) -> int:
        return own // self._number
