"""The pages of the KV cache, and which tokens they hold: a radix tree over token ids. Integers only, no arrays.

Every page is in exactly one state: free; held (one reference or more); idle (no reference, but its tokens are in the
tree, so that it can be hit, or evicted when room is needed). One node of the tree is one full page.

A holder of a node's page also holds the pages of all its ancestors: `acquire` takes whole prefixes, and `insert` puts a
page only under the caller's own. So nothing below an idle page is held. `release` goes from a sequence's last page to
its first, so children become idle before their parents, and the page that has been idle longest is always a leaf.

Over a mesh that cuts sequences each data rank has pages of its own, an equal part of them all, and a sequence has pages
of one rank alone. So the same tokens may be cached on several ranks, and a hit is one of the rank that is asked.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Protocol

from specserve.errors import CapacityError
from specserve.models.cache import WindowSizes
from specserve.serve.engine.state_places import StatePlaces
from specserve.serve.engine.windows import Windows

# data rank, salt and one page of token ids: neither ranks nor salts ever meet, and one tree has them all
_Key = tuple[int, str, tuple[int, ...]]
_Children = dict[_Key, "_Node"]


@dataclass(eq=False, slots=True)
class _Node:
    """A cached page. Its content depends only on its own tokens and those of its ancestors."""

    page: int
    key: _Key
    siblings: _Children  # where it stands: its parent's children
    digest: bytes  # of its tokens and all before them
    children: _Children = field(default_factory=dict)


def data_rank(index: int, number: int, num_ranks: int) -> int:
    """The data rank that has the `index`-th of so many slots, pages or rows of a batch: each has an equal part of them,
    one rank after the other, as a mesh cuts an array."""
    return index * num_ranks // number


def prefix_digests(token_ids: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """Return a digest for each full page of a prompt, of all its tokens up to that page's end and of the salt. Digests
    are equal where pages hold the same, in every process."""
    digests, digest = [], _root(salt)
    for end in range(page_size, len(token_ids) + 1, page_size):
        digest = _digest(digest, token_ids[end - page_size : end])
        digests.append(digest)
    return digests


def _root(salt: str) -> bytes:
    """Return the digest that comes before a first page. It is longer than a page's digest, so that no salt can be
    taken for one."""
    return blake2b(salt.encode(), digest_size=16).digest()


def _digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(before + array("q", token_ids).tobytes(), digest_size=8).digest()


class Watcher(Protocol):
    """Hears what the tree of cached pages gains and loses, in order, on the thread that calls the pool."""

    def stored(self, before: bytes | None, digests: Sequence[bytes], token_ids: Sequence[int], salt: str) -> None:
        """Pages of these digests (`prefix_digests`) can be hit, which hold these tokens and follow one another and the
        page of digest `before`; None: they begin a prompt."""
        ...

    def removed(self, digests: Sequence[bytes]) -> None:
        """Pages of these digests are in the tree no more, nor is anything below them."""
        ...

    def cleared(self) -> None:
        """The tree is empty."""
        ...


class PagePool:
    """Hands out page ids, and finds the pages that already hold the beginning of a prompt.

    Only sequences of the same salt hit each other's pages. The pages of data rank r are the r-th part of all
    (`data_rank`).
    """

    def __init__(
        self,
        num_pages: int,  # the number of data ranks must divide it
        page_size: int,
        watcher: Watcher | None = None,
        *,
        num_ranks: int = 1,
        most: int | None = None,  # pages of each data rank that are handed out, the first ones; None: all
        kept: StatePlaces | None = None,  # without a state of these behind it no prefix can be hit
        windows: Windows | None = None,  # nor without these window pages before its end
    ) -> None:
        assert num_pages % num_ranks == 0, f"{num_pages} pages for {num_ranks} data ranks"
        self._num_stored, self.num_ranks, self.page_size, self._watcher = num_pages, num_ranks, page_size, watcher
        self.kept, self.windows = kept, windows or Windows((), page_size)
        each = num_pages // num_ranks
        most = each if most is None else min(most, each)
        self.num_pages = most * num_ranks
        self._free = [list(reversed(range(rank * each, rank * each + most))) for rank in range(num_ranks)]
        self._num_references: dict[int, int] = {}  # of the held pages
        # by data rank, longest idle first; a dict is slow to pop its first item
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_ranks)]
        self._tree: _Children = {}
        self._nodes: dict[int, _Node] = {}  # by page
        self._private: set[int] = set()  # held since before a flush: never cached
        self._num_copies: Counter[bytes] = Counter()  # cached pages by digest: several where ranks hold the same

    @property
    def num_available(self) -> int:
        """The number of pages that `allocate` can give, of all data ranks together."""
        return sum(map(self.available, range(self.num_ranks)))

    def available(self, rank: int) -> int:
        """Return how many pages of a data rank `allocate` can give."""
        return len(self._free[rank]) + len(self._idle[rank])

    def pages_for(self, num_entries: int) -> int:
        """Return how many pages hold so many entries of a sequence."""
        return -(-num_entries // self.page_size)

    @property
    def num_cached(self) -> int:
        """Pages whose tokens are in the tree, held or idle."""
        return len(self._nodes)

    def newest_digests(self, most: int) -> list[bytes]:
        """The `prefix_digests` of cached pages, of those that were cached last. May be called from any thread."""
        nodes = list(self._nodes.values())  # in one piece
        return [node.digest for node in islice(reversed(nodes), most)]

    def known(self, token_ids: Sequence[int], salt: str = "", *, rank: int = 0) -> list[int]:
        """The pages that a data rank has cached of a prompt's beginning, whether or not they can be hit."""
        pages, children = [], self._tree
        for key in self._keys(token_ids, salt, rank):
            node = children.get(key)
            if node is None:
                break
            pages.append(node.page)
            children = node.children
        return pages

    def use_windows(self, sizes: WindowSizes) -> None:
        """Go on with other window pages. Nothing may be held or cached."""
        assert not self._num_references, "held pages have window pages"
        assert not self._nodes, "cached pages have window pages"
        self.windows = Windows(sizes, self.page_size, self.num_ranks)

    def is_cached(self, page: int) -> bool:
        """Return whether a page's tokens are in the tree."""
        return page in self._nodes

    def match(self, token_ids: Sequence[int], salt: str = "", *, rank: int = 0) -> int:
        """Return how many tokens `acquire` would find, in whole pages from the start. It changes nothing."""
        return len(self._find(token_ids, salt, rank)) * self.page_size

    def acquire(self, token_ids: Sequence[int], salt: str = "", *, rank: int = 0) -> list[int]:
        """The pages of the longest prefix that a data rank has cached, each with one more reference."""
        pages = self._find(token_ids, salt, rank)
        for page in pages:
            self._idle[rank].pop(page, None)
            self._num_references[page] = self._num_references.get(page, 0) + 1
        return pages

    def allocate(self, count: int, *, rank: int = 0) -> list[int]:
        """New pages of a data rank with one reference each; evicts the longest idle if it must.

        Raises CapacityError, and takes nothing, when fewer than `count` are available.
        """
        free, idle = self._free[rank], self._idle[rank]
        if count > self.available(rank):
            of_all = self.num_pages // self.num_ranks
            raise CapacityError(f"{count} cache pages needed, {self.available(rank)} of {of_all} are available")
        evicted = []
        while len(free) < count:
            page, _ = idle.popitem(last=False)
            node = self._nodes.pop(page)
            assert not node.children, f"page {page} is evicted before the pages that continue it"
            del node.siblings[node.key]
            free.append(page)
            self.windows.forget(page)
            if self.kept is not None:
                self.kept.forget(page)
            evicted.append(node.digest)
        self._num_copies.subtract(evicted)
        gone = [digest for digest in evicted if not self._num_copies[digest]]  # from every data rank
        for digest in gone:
            del self._num_copies[digest]
        if gone and self._watcher is not None:
            self._watcher.removed(gone)
        pages = [free.pop() for _ in range(count)]
        self._num_references.update(dict.fromkeys(pages, 1))
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int], salt: str = "", *, num_known: int = 0) -> None:
        """Note that `pages`, a sequence's from its start and held by the caller, now hold `token_ids`, so that the
        full ones can be hit.

        As a sequence grows, `num_known` pages that were acquired or passed here before are not looked at again. Stops
        at a page whose place is taken (the same tokens computed at the same time) or that was held when the cache was
        flushed: that page and what follows stay private.
        """
        children, digest, new, first = self._tree, _root(salt), list[_Node](), 0
        rank = self._rank_of(pages[0]) if pages else 0
        if num_known:
            last_known = self._nodes.get(pages[num_known - 1])
            if last_known is None:
                return  # private, so what continues it is too
            children, digest = last_known.children, last_known.digest
        for index, key in enumerate(self._keys(token_ids, salt, rank, num_known), num_known):
            page = pages[index]
            assert page in self._num_references, f"page {page} is not held"
            node = children.get(key)
            if node is None and page not in self._private:
                assert page not in self._nodes, f"page {page} holds other tokens"
                node = children[key] = self._nodes[page] = _Node(page, key, children, _digest(digest, key[-1]))
                self._num_copies[node.digest] += 1
                if self._num_copies[node.digest] == 1:  # else another data rank has it too
                    first = first if new else index
                    new.append(node)
            if node is None or node.page != page:
                break
            children, digest = node.children, node.digest
        if new and self._watcher is not None:  # they are the last ones, as nothing is below a new node
            before = self._nodes[pages[first - 1]].digest if first else None
            self._watcher.stored(
                before,
                [node.digest for node in new],
                [token_id for node in new for token_id in node.key[-1]],
                salt,
            )

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference on each: a sequence's pages in its order, all of them or those at its end."""
        for page in reversed(pages):
            assert page in self._num_references, f"page {page} is not held"
            self._num_references[page] -= 1
            if self._num_references[page]:
                continue
            del self._num_references[page]
            self._private.discard(page)
            rank = self._rank_of(page)
            if page in self._nodes:
                self._idle[rank][page] = None
            else:
                self._free[rank].append(page)

    def flush(self) -> int:
        """Forget every cached prefix, and never cache a page that is held now; returns how many were forgotten."""
        num_forgotten = len(self._nodes)
        self._tree, self._nodes = {}, {}
        self._num_copies.clear()
        self.windows.clear()
        if self.kept is not None:
            self.kept.clear()
        for free, idle in zip(self._free, self._idle, strict=True):
            free.extend(idle)
            idle.clear()
        self._private = set(self._num_references)
        if self._watcher is not None:
            self._watcher.cleared()
        return num_forgotten

    def check(self) -> None:
        """Asserts that the books balance. Reads everything: for tests."""
        free, idle = ([page for part in parts for page in part] for parts in (self._free, self._idle))
        states = sorted([*free, *idle, *self._num_references])
        each, most = self._num_stored // self.num_ranks, self.num_pages // self.num_ranks
        assert states == [rank * each + i for rank in range(self.num_ranks) for i in range(most)], "each has one state"
        for rank, parts in enumerate(zip(self._free, self._idle, strict=True)):
            assert {self._rank_of(page) for part in parts for page in part} <= {rank}, "pages stay with their data rank"
        assert Counter(node.digest for node in self._nodes.values()) == self._num_copies
        assert all(count > 0 for count in self._num_references.values())
        self.windows.check(self._nodes)
        if self.kept is not None:
            self.kept.check(set(self._nodes))
        assert self._private <= self._num_references.keys() - self._nodes.keys()
        assert set(idle) <= self._nodes.keys() <= {*idle, *self._num_references}
        idle_order = {page: order for order, page in enumerate(idle)}
        levels = [(-1, self._tree)] + [(node.page, node.children) for node in self._nodes.values()]
        assert sum(len(children) for _, children in levels) == len(self._nodes), "every node is in the tree"
        for parent, children in levels:
            for key, node in children.items():
                assert self._nodes[node.page] is node
                assert node.siblings is children
                assert node.key == key
                assert len(key[-1]) == self.page_size
                assert key[0] == self._rank_of(node.page)
                if parent in idle_order:
                    order = idle_order.get(node.page, self.num_pages)
                    assert order < idle_order[parent], "below an idle page all are idle, and longer"
            if parent in self._num_references:
                held_below = sum(self._num_references.get(node.page, 0) for node in children.values())
                assert held_below <= self._num_references[parent], "who holds a page holds its ancestors"

    def _rank_of(self, page: int) -> int:
        return data_rank(page, self._num_stored, self.num_ranks)

    def _keys(self, token_ids: Sequence[int], salt: str, rank: int, start: int = 0) -> Iterator[_Key]:
        """The keys of the full pages, from page `start` on."""
        for end in range((start + 1) * self.page_size, len(token_ids) + 1, self.page_size):
            yield rank, salt, tuple(token_ids[end - self.page_size : end])

    def _find(self, token_ids: Sequence[int], salt: str, rank: int) -> list[int]:
        """The pages of the longest cached prefix that can be hit."""
        pages = self.known(token_ids, salt, rank=rank)
        end, at = len(pages), -1
        while at != end:
            at = end
            while self.kept is not None and end and pages[end - 1] not in self.kept:
                end -= 1
            end = self.windows.reach(pages, end)
        return pages[:end]
