"""Who runs next. It knows lengths, slots and pages; it never sees a token id or an array.

First come, first served. A sequence is admitted when a slot is free and the pages for its prompt and all the tokens
it may still make are; it then prefills chunk by chunk, one chunk of one sequence per round, so that running streams
wait for at most one chunk.
"""

from collections import deque
from dataclasses import dataclass, field

from specserve.serve.pages import PageAllocator
from specserve.serve.request import Request


@dataclass(eq=False)
class Sequence:
    """One request's place in the engine."""

    request: Request
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0  # prompt tokens whose keys and values are committed

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.num_prefilled < self.num_prompt


@dataclass(frozen=True)
class Round:
    """What the engine does next."""

    admitted: list[Sequence]
    prefill: Sequence | None
    decode: list[Sequence]


class Scheduler:
    def __init__(self, num_slots: int, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # by arrival

    def pages_needed(self, request: Request) -> int:
        """Pages for the prompt and every token but the last, which is never read."""
        entries = len(request.prompt_ids) + request.max_new_tokens - 1
        return -(-entries // self._page_size)

    def add(self, request: Request) -> None:
        self.waiting.append(Sequence(request))

    def schedule(self) -> Round:
        admitted = []
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            needed = self.pages_needed(sequence.request)
            if needed > self._allocator.num_free:
                break  # first come, first served: nobody overtakes the one who waits for pages
            self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            sequence.pages = self._allocator.allocate(needed)
            self.running.append(sequence)
            admitted.append(sequence)
        prefilling = [sequence for sequence in self.running if sequence.is_prefilling]
        decoding = [sequence for sequence in self.running if not sequence.is_prefilling]
        return Round(admitted, prefilling[0] if prefilling else None, decoding)

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a running sequence."""
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._allocator.release(sequence.pages)
        sequence.slot, sequence.pages = -1, []
