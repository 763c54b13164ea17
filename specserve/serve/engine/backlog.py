"""The tokens that the draft has still to read.

While speculation is far from paying, the target runs alone, so that a draft that is not used costs nothing. Its pages
then lack entries of these tokens. It reads them before it proposes for such a sequence (`speculative.step.read`).
"""

import dataclasses
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from specserve.serve.engine.sequence import Chunk, PageRow, Sequence
from specserve.serve.engine.step_choice import StepChoice
from specserve.serve.programs.runner import PromptPart, Runner
from specserve.speculative.program import StepProgram


class Backlog:
    """Notes how far the draft has read each running sequence, and which pages lack its entries. A cached page may be of
    many sequences; the first one that the draft reads fills it for all."""

    def __init__(self, runner: Runner, num_read: int = 0) -> None:
        self._runner, self._page_size = runner, runner.shapes.page_size
        self._most = runner.shapes.chunks[-1]  # tokens that it reads in one round, where it can read in several
        self.num_read = num_read  # tokens, of all sequences so far, and by the drafts before this one
        self._unread: set[int] = set()  # pages
        self._behind: set[int] = set()  # slots of the sequences that it has not read to their end

    def begin(self, sequence: Sequence, num_cached: int) -> None:
        """Note that a sequence has its slot and its pages, of which the first hold so many cached tokens."""
        number = num_cached // self._page_size
        self._unread.difference_update(sequence.pages[number:])
        self._behind.discard(sequence.slot)
        sequence.unread_from = None
        column = next((i for i, page in enumerate(sequence.pages[:number]) if page in self._unread), None)
        if column is not None:
            self._leave_out(sequence, column * self._page_size)

    def grown(self, new_pages: Iterable[PageRow]) -> None:
        """Note that sequences have new pages, which hold nothing yet."""
        for slot, _, page, *_ in new_pages:
            if slot in self._behind:
                self._unread.add(page)
            else:
                self._unread.discard(page)

    def num_unread(self, sequences: Seq[Sequence]) -> int:
        """Return how many tokens the draft has to read before it can propose for all of these sequences."""
        number = 0
        for each in sequences if self._behind else ():
            if each.unread_from is not None:
                number += len(each.request.prompt_ids) + len(each.output_ids) + each.num_in_flight - each.unread_from
        return number

    def leaves_out(self, chunks: Seq[Chunk], parts: Seq[PromptPart], choice: StepChoice) -> bool:
        """Return whether the target is to run these chunks, of such parts, without a draft that is not used, or that is
        far behind them, and note it. A draft that is a little behind reads that first."""
        is_unused = choice.leaves_draft
        for chunk in chunks if choice.reads else ():
            start, end = chunk.sequence.unread_from, chunk.num_cached
            if start is not None and end - start <= self._most and self._can_read():
                self._read(chunk.sequence, end, end - start, choice.promise(chunk.sequence))
        is_behind = any(chunk.sequence.unread_from is not None for chunk in chunks)
        if not (is_unused or is_behind) or not self._runner.can_prefill_alone(parts):
            return False
        for chunk in chunks:
            if chunk.sequence.unread_from is None:
                self._leave_out(chunk.sequence, chunk.num_cached)
        return True

    def before_step(self, sequences: Seq[Sequence], program: StepProgram, choice: StepChoice) -> StepProgram:
        """Have the draft read what it must before such a step, or note that the step leaves it out. Returns the step to
        make: where there is more to read than a chunk of a prompt, streams do not wait for all of it, and a plain step
        comes first."""
        if program.is_alone:
            for sequence in sequences:
                if sequence.unread_from is None:
                    self._leave_out(sequence, sequence.entries_after(0) - self._runner.config.max_pending)
        if program.tree is None or not self._behind:
            return program
        plain = dataclasses.replace(program, tree=None)  # the draft keeps up where it has read
        room = float(self._most) if plain in self._runner.compiled else math.inf
        for sequence in sequences:
            if sequence.unread_from is not None and room > 0:
                end = sequence.entries_after(sequence.most_in_flight)  # no step in flight has a tree
                room -= self._read(sequence, end, room, choice.promise(sequence))
        return plain if any(sequence.unread_from is not None for sequence in sequences) else program

    def _can_read(self) -> bool:
        return any(program in self._runner.compiled for program in self._runner.shapes.readings())

    def _read(self, sequence: Sequence, end: int, room: float, promise: float) -> int:
        """Have the draft read what it has not of a sequence's first `end` tokens, or as many as there is room for.
        Returns how many."""
        start = sequence.unread_from
        assert start is not None
        last = end
        if end - start > room:  # whole pages
            last = min(end, start + max(1, int(room) // self._page_size) * self._page_size)
        self._runner.read(sequence.slot, start, last, promise)
        self.num_read += last - start
        self._unread.difference_update(sequence.pages[: -(-last // self._page_size)])
        sequence.unread_from = last
        if last == end:
            self._behind.discard(sequence.slot)
            sequence.unread_from = None
        return last - start

    def _leave_out(self, sequence: Sequence, num_read: int) -> None:
        """Note that the draft has read so many tokens at least, and is not to read the next ones."""
        number = max(0, num_read) // self._page_size
        sequence.unread_from = number * self._page_size
        self._behind.add(sequence.slot)
        self._unread.update(sequence.pages[number:])
