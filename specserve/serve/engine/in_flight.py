"""Programs that are on their way: dispatched to the device, and their results not read."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specserve.serve.engine.sequence import Chunk, Sequence
from specserve.serve.programs.results import StepHandle
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree, depth_of


@dataclass(frozen=True)
class InFlight:
    """A program whose result has not been read: steps, or chunks of prompts."""

    handle: StepHandle
    rows: dict[int, tuple[Sequence, int]]  # of the result: the sequence of their tokens, and the epoch that it was in
    program: StepProgram | None = None  # of steps
    num_steps: int = 1
    has_read: bool = False  # the draft reads before it
    # of scored chunks, by the row: the sequence, its epoch, the number of tokens
    scored: dict[int, tuple[Sequence, int, int]] = field(default_factory=dict)
    num_prompt: int = 0  # prompt tokens that it reads

    @property
    def tree(self) -> Tree | None:
        return self.program and self.program.tree

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens that it emits for a sequence, at least and at most."""
        return self.num_steps, self.num_steps * (1 + depth_of(self.tree))

    def awaited(self) -> dict[int, Sequence]:
        """Return the sequences by row that still count what this brings."""
        return {row: sequence for row, (sequence, epoch) in self.rows.items() if sequence.is_of(epoch)}


def ending(chunks: Seq[Chunk]) -> dict[int, Sequence]:
    """Return the sequences by row whose prompts end with these chunks."""
    return {row: chunk.sequence for row, chunk in enumerate(chunks) if chunk.is_last}


def awaiting(rows: dict[int, Sequence]) -> dict[int, tuple[Sequence, int]]:
    """Return the sequences by row, each with the epoch that it is in."""
    return {row: (sequence, sequence.epoch) for row, sequence in rows.items()}


def prompts_in_flight(handle: StepHandle, chunks: Seq[Chunk]) -> InFlight:
    """Return what is on its way of these chunks of prompts, a row each."""
    scored = {row: chunk for row, chunk in enumerate(chunks) if chunk.sequence.is_scored}
    return InFlight(
        handle,
        awaiting(ending(chunks)),
        scored={row: (chunk.sequence, chunk.sequence.epoch, chunk.num_tokens) for row, chunk in scored.items()},
        num_prompt=sum(chunk.num_tokens for chunk in chunks),
    )
