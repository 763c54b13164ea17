"""What a device would hold in the window pages that a scheduler gives out: which token's entry lies where."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve.models.cache import DRAFT_REACH
from specserve.serve.engine.sequence import PageRow
from specserve.serve.engine.sequence import Sequence as Served


@dataclass
class WindowMemory:
    """Entries by the tokens that they depend on. The token at a position is `follows` of those before it."""

    lens: dict[tuple[Served, int], int] = field(default_factory=dict)  # committed, by sequence and epoch
    window_pages: dict[tuple[int, int], int] = field(default_factory=dict)  # by window and page
    entries: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)  # by window, window page, place

    def extend(self, groups: Iterable[Any], rows: Sequence[PageRow]) -> None:
        """Set the window pages of pages, as the device does before the program that fills them."""
        for _, _, page, *own in rows:
            for group, each in zip(groups, own, strict=True):
                if each >= 0:
                    self.window_pages[group.window, page] = each

    def commit(self, groups: Iterable[Any], sequence: Served, number: int, num_cached: int = 0) -> None:
        """Check the window before a sequence's next token, which a program reads, and write the entries of so many
        tokens. `num_cached` tokens are there when it begins."""
        key, known = (sequence, sequence.epoch), _answered(sequence)
        start = self.lens.setdefault(key, num_cached)
        self.lens[key] += number
        most = len(sequence.request.prompt_ids) + sequence.request.max_new_tokens - 1
        for group in groups if start <= most else ():  # else the answer has ended

            def place(index: int, window: int = group.window, size: int = group.page_size) -> tuple[int, int, int]:
                return window, self.window_pages[window, sequence.pages[index // size]], index % size

            for index in range(max(0, start - group.window + 1 - DRAFT_REACH), start):  # and what a draft may see
                assert self.entries[place(index)] == known[: index + 1], "a query would see another token's entry"
            for index in range(start, min(start + number, most)):
                self.entries[place(index)] = known[: index + 1]


def follows(token_ids: Sequence[int]) -> int:
    """Return the token after these."""
    return sum(token_ids[-3:]) % 5


def _answered(sequence: Served) -> tuple[int, ...]:
    """Return a sequence with its whole answer."""
    token_ids = list(sequence.request.prompt_ids)
    for _ in range(sequence.request.max_new_tokens):
        token_ids.append(follows(token_ids))
    return tuple(token_ids)
