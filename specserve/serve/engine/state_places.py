"""The recurrent states that are kept of prefixes, and the cached pages that they stand behind. Integers only.

Layers with a recurrent state cannot be continued from keys and values in pages. So the states of some prefixes are
copied to places of their own on the device, and a prefix can be hit up to its longest beginning that has one. Prefixes
with a state end at multiples of `border` tokens: there a prompt's chunks end whatever has been cached, so a hit goes on
with the chunks that a miss has.
"""

from collections import Counter, OrderedDict


class StatePlaces:
    """A number of places, each empty or with the state behind one cached page, which fills up at a border. Where all
    are full the one that was used longest ago is given up, but for those that an admission is still to read."""

    def __init__(self, number: int, border: int) -> None:
        """`border` is in tokens, a multiple of a page's and of the largest chunk's."""
        self.border, self._number = border, number
        self._free = list(range(number))[::-1]
        self._places: OrderedDict[int, int] = OrderedDict()  # by page, the one used longest ago first
        self._to_be_read: Counter[int] = Counter()  # places

    def __contains__(self, page: int) -> bool:
        return page in self._places

    def keep(self, page: int) -> int | None:
        """Return the place that the state behind a page is to be copied to. None: it is there already, or every place
        is still to be read."""
        if page in self._places:
            self._places.move_to_end(page)
            return None
        if not self._free:
            oldest = next((each for each, place in self._places.items() if not self._to_be_read[place]), None)
            if oldest is None:
                return None
            self.forget(oldest)
        place = self._places[page] = self._free.pop()
        return place

    def use(self, page: int) -> int:
        """Return the place of the state behind a page, which stays until it `was_read`."""
        self._places.move_to_end(page)
        self._to_be_read[self._places[page]] += 1
        return self._places[page]

    def was_read(self, place: int) -> None:
        """Note that the program which reads a place has been dispatched."""
        self._to_be_read[place] -= 1

    def forget(self, page: int) -> None:
        """Empty the place of a page, if it has one: it is evicted, or another state needs the room."""
        if page in self._places:
            self._free.append(self._places.pop(page))

    def clear(self) -> None:
        """Empty all places."""
        self._free += self._places.values()
        self._places.clear()
        self._to_be_read.clear()

    def check(self, cached: set[int]) -> None:
        """Asserts that the books balance, with the pages that are cached. Reads everything: for tests."""
        assert sorted([*self._free, *self._places.values()]) == list(range(self._number)), (
            "each place is one page's, or free"
        )
        assert self._places.keys() <= cached, "a state stands behind a cached page"
