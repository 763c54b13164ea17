"""Which pages are free. Integers only."""

from specserve.errors import CapacityError


class PageAllocator:
    """Hands out page ids. Every page is either free or held by exactly one owner; `num_free` says how many are left."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Raises CapacityError, and takes nothing, when fewer than `count` are free."""
        if count > len(self._free):
            raise CapacityError(f"{count} cache pages needed, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Give pages back; giving back a page that is not held is a bug in the engine."""
        for page in pages:
            assert page in self._held, f"page {page} is not held"
            self._held.remove(page)
            self._free.append(page)
