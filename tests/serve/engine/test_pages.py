"""The page pool against a flat model of it, and the promises that a caller leans on."""

import random
from dataclasses import dataclass

import pytest
from mirror import Heard

from specserve.errors import CapacityError
from specserve.serve.engine.pages import PagePool

PAGE_SIZE, NUM_PAGES = 2, 12
Prefix = tuple[str, tuple[int, ...]]  # a salt, and all tokens from the start


@dataclass(eq=False)
class Held:
    """A running sequence, which knows all its tokens beforehand and computes them bit by bit."""

    salt: str
    token_ids: tuple[int, ...]
    pages: list[int]
    num_inserted: int  # pages
    is_private: bool = False  # it was running when the cache was flushed

    def prefix(self, num_pages: int) -> Prefix:
        return self.salt, self.token_ids[: num_pages * PAGE_SIZE]


class Storm:
    """Few tokens and few pages: shared prefixes, duplicates and evictions all the time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.heard = Heard(PAGE_SIZE)
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE, self.heard)
        self.held: list[Held] = []
        self.cached: dict[Prefix, int] = {}
        self.idle: list[int] = []  # longest idle first
        self.content: dict[int, Prefix] = {}  # the prefix that was last written into a page

    def begin(self) -> None:
        salt = self.rng.choice(["", "", "a"])
        token_ids = tuple(self.rng.choices([0, 1], [4, 1], k=self.rng.randrange(10)))
        prefixes = [(salt, token_ids[:end]) for end in range(PAGE_SIZE, len(token_ids) + 1, PAGE_SIZE)]
        hits = [self.cached[prefix] for prefix in prefixes if prefix in self.cached]
        assert self.pool.match(token_ids, salt) == len(hits) * PAGE_SIZE
        pages = self.pool.acquire(token_ids, salt)
        assert pages == hits
        assert [self.content[page] for page in pages] == prefixes[: len(pages)]
        sequence = Held(salt, token_ids, pages, len(pages))
        self.held.append(sequence)
        self.idle = [page for page in self.idle if page not in pages]
        self.allocate(sequence, -(-len(token_ids) // PAGE_SIZE) - len(pages))

    def allocate(self, sequence: Held, count: int) -> None:
        in_use = self.pages_in_use()
        num_evicted = max(0, count - (NUM_PAGES - len(in_use) - len(self.idle)))
        if num_evicted > len(self.idle):
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            self.release(sequence, 0)
            return
        evicted, self.idle = self.idle[:num_evicted], self.idle[num_evicted:]
        self.cached = {prefix: page for prefix, page in self.cached.items() if page not in evicted}
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert set(evicted) <= set(pages)
        assert not set(pages) & (in_use | set(self.idle))
        sequence.pages += pages

    def insert(self, sequence: Held) -> None:
        full = min(len(sequence.pages), len(sequence.token_ids) // PAGE_SIZE)
        done = min(full, sequence.num_inserted + self.rng.randrange(4))
        for i in range(sequence.num_inserted, done):
            self.content[sequence.pages[i]] = sequence.prefix(i + 1)
        token_ids = sequence.token_ids[: (done + 1) * PAGE_SIZE - 1]  # a page that is not full yet changes nothing
        known = self.rng.choice([0, sequence.num_inserted])
        self.pool.insert(token_ids, sequence.pages, sequence.salt, num_known=known)
        sequence.num_inserted = done
        if sequence.is_private or (known and sequence.pages[known - 1] not in self.cached.values()):
            return
        for i in range(known, done):
            if self.cached.setdefault(sequence.prefix(i + 1), sequence.pages[i]) != sequence.pages[i]:
                return

    def release(self, sequence: Held, num_kept: int) -> None:
        dropped, sequence.pages = sequence.pages[num_kept:], sequence.pages[:num_kept]
        sequence.num_inserted = min(sequence.num_inserted, num_kept)
        self.pool.release(dropped)
        if not sequence.pages:
            self.held.remove(sequence)
        in_use, cached = self.pages_in_use(), set(self.cached.values())
        self.idle += [page for page in reversed(dropped) if page in cached and page not in in_use]

    def flush(self) -> None:
        assert self.pool.flush() == len(self.cached)
        self.cached, self.idle = {}, []
        for sequence in self.held:
            sequence.is_private = True

    def pages_in_use(self) -> set[int]:
        return {page for sequence in self.held for page in sequence.pages}

    def check(self) -> None:
        self.pool.check()
        assert self.pool.num_available == NUM_PAGES - len(self.pages_in_use())
        assert self.pool.num_cached == len(self.cached)
        assert set(self.heard.mirror.prefixes.values()) == self.cached.keys(), "events tell exactly what is cached"
        for (salt, token_ids), page in self.cached.items():
            assert self.pool.match(token_ids, salt) == len(token_ids)
            assert self.content[page] == (salt, token_ids)

    def step(self) -> None:
        [act] = self.rng.choices(["begin", "insert", "release", "flush"], [30, 60, 30, 0.5])
        if act == "flush":
            self.flush()
        elif act == "begin" or not self.held:
            self.begin()
        elif act == "insert":
            self.insert(self.rng.choice(self.held))
        else:
            self.release(self.rng.choice(self.held), self.rng.choice([0, 0, 0, 0, 1, 2]))


@pytest.mark.parametrize("seed", range(4))
def test_pool_agrees_with_a_flat_model_in_a_storm(seed: int) -> None:
    storm = Storm(seed)
    for _ in range(10_000):
        storm.step()
        storm.check()
    for sequence in list(storm.held):
        storm.release(sequence, 0)
    assert storm.pool.num_available == NUM_PAGES


def test_data_ranks_share_no_page_and_events_tell_what_any_of_them_has() -> None:
    heard, token_ids = Heard(PAGE_SIZE), [1, 2, 3, 4]
    pool = PagePool(8, PAGE_SIZE, heard, num_ranks=2)
    prefixes = {("", (1, 2)), ("", (1, 2, 3, 4))}
    for rank in (1, 0):
        assert pool.match(token_ids, rank=rank) == 0, "the other rank's is none of its own"
        pages = pool.allocate(2, rank=rank)
        assert all(4 * rank <= page < 4 * rank + 4 for page in pages)
        pool.insert(token_ids, pages)
        assert pool.acquire(token_ids, rank=rank) == pages
        assert set(heard.mirror.prefixes.values()) == prefixes
        pool.release(pages)
        pool.release(pages)
        pool.check()
    with pytest.raises(CapacityError, match="5 cache pages needed, 4 of 4"):
        pool.allocate(5)
    pool.release(pool.allocate(4, rank=1))
    assert [pool.match(token_ids, rank=rank) for rank in (0, 1)] == [4, 0]
    assert set(heard.mirror.prefixes.values()) == prefixes, "the other rank still has them"
    pool.check()
    pool.allocate(4, rank=0)
    assert not heard.mirror.prefixes
    pool.check()


def _run(pool: PagePool, token_ids: list[int], salt: str = "") -> list[int]:
    """Begin a sequence and compute all of it; its pages, still held."""
    pages = pool.acquire(token_ids, salt)
    pages += pool.allocate(len(token_ids) // pool.page_size - len(pages))
    pool.insert(token_ids, pages, salt)
    return pages


def test_longest_unused_is_evicted_first_and_from_its_end() -> None:
    pool = PagePool(6, 2)
    pool.release(_run(pool, [1, 1, 2, 2, 3, 3]))
    pool.release(_run(pool, [7, 7, 8, 8]))
    pool.release(_run(pool, [1, 1, 2, 2]))  # used again
    pool.allocate(2)  # one was free
    assert pool.match([1, 1, 2, 2, 3, 3]) == 4
    assert pool.match([7, 7, 8, 8]) == 4
    pool.allocate(1)
    assert pool.match([7, 7, 8, 8]) == 2
    pool.allocate(2)
    assert pool.match([7, 7]) == 0
    assert pool.match([1, 1, 2, 2]) == 2


def test_a_refusal_takes_nothing_and_held_pages_stay() -> None:
    pool = PagePool(5, 2)
    held = _run(pool, [1, 1, 2, 2])
    pool.release(_run(pool, [1, 1, 3, 3]))
    with pytest.raises(CapacityError, match="4 cache pages needed, 3 of 5 are available"):
        pool.allocate(4)
    assert (pool.num_available, pool.match([1, 1, 3, 3])) == (3, 4)
    assert not set(pool.allocate(3)) & set(held)
    assert pool.acquire([1, 1, 2, 2, 3, 3]) == held


def test_salts_never_share() -> None:
    pool = PagePool(4, 2)
    pages = _run(pool, [1, 2, 3, 4], "alice")
    assert [pool.match([1, 2, 3, 4], salt) for salt in ("alice", "bob", "")] == [4, 0, 0]
    assert not set(_run(pool, [1, 2, 3, 4], "bob")) & set(pages)


def test_a_duplicate_and_what_follows_it_stay_private() -> None:
    pool = PagePool(5, 2)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.insert([1, 1, 2, 2], first)
    pool.insert([1, 1, 2, 2], second)
    pool.insert([1, 1, 2, 2, 3, 3], second, num_known=2)
    assert pool.match([1, 1, 2, 2, 3, 3]) == 4
    pool.release(second)
    assert (pool.num_available, pool.num_cached) == (3, 2)
    assert pool.acquire([1, 1, 2, 2]) == first
    pool.check()


def test_what_ran_during_a_flush_is_never_cached() -> None:
    pool = PagePool(6, 2)
    running = pool.allocate(3)
    pool.insert([1, 1], running)
    pool.release(_run(pool, [5, 5]))
    assert pool.flush() == 2
    for num_known in (0, 1):
        pool.insert([1, 1, 2, 2], running, num_known=num_known)
    assert pool.num_cached == 0
    pool.release(running)
    pool.release(_run(pool, [1, 1, 2, 2]))  # the same pages, computed anew
    assert pool.match([1, 1, 2, 2]) == 4
    pool.check()


def test_giving_back_too_often_is_a_bug() -> None:
    pool = PagePool(2, 2)
    pages = _run(pool, [1, 1])
    pool.release(pages)
    with pytest.raises(AssertionError, match="not held"):
        pool.release(pages)
