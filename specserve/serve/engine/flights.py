"""The programs that are on their way between the host and the device."""

from dataclasses import dataclass, field

from specserve.serve.engine.handles import StepHandle
from specserve.serve.engine.scheduler import Sequence
from specserve.speculative.tree import Tree


@dataclass(frozen=True)
class Flight:
    """A program whose result has not been read: steps, or chunks of prompts."""

    handle: StepHandle
    rows: dict[int, tuple[Sequence, int]]  # of the result, whose tokens they are, and as of which of their epochs
    tree: Tree | None = None
    shape: tuple[int, int] | None = None  # of steps: batch size and width
    num_steps: int = 1
    # of scored chunks, by the row: whose, as of which epoch, how many tokens
    scored: dict[int, tuple[Sequence, int, int]] = field(default_factory=dict)
    num_prompt: int = 0  # prompt tokens that it reads

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens that it emits for a sequence, at least and at most."""
        return self.num_steps, self.num_steps * (1 + (self.tree.depth if self.tree else 0))

    def awaited(self) -> dict[int, Sequence]:
        """Return the sequences by row that still count what this brings."""
        return {row: sequence for row, (sequence, epoch) in self.rows.items() if sequence.is_of(epoch)}
