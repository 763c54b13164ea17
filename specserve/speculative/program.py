"""The identity of a compiled program: its key among the compiled ones, the key of what it costs, what its label is made
of, and what one process of a server sends to the others to have it run.

The facts that are the same for all programs of a server (the models' config, the state's sizes, the steps that one call
may make) are not in it.
"""

from dataclasses import dataclass
from typing import Literal

from specserve.speculative.tree import Tree

Kind = Literal[
    "step",
    "prefill",
    "mixed",
    "catch-up",
    "reading",
    "proposal",
    "verification",
    "admission",
    "page table",
    "recall",
    "kept state",
    "empty state",
]


@dataclass(frozen=True)
class StepProgram:
    """A compiled program of a server. A step (`speculative.step.decode` or `speculate`) is the kind that costs are
    measured of; a field that a kind does not have keeps its default."""

    batch: int = 0  # rows: the sequences, and padding
    width: int = 0  # pages of each sequence that attention reads
    tree: Tree | None = None  # None is plain decoding
    kind: Kind = "step"
    chunk: int = 0  # tokens of each prompt, of a prefill
    prompts: int = 0  # rows of prompts that a prefill has beside a step's (`speculative.step.mixed`)
    is_alone: bool = False  # a plain step or a prefill of the target alone, of which the draft beside it takes no note
    is_scored: bool = False  # a prefill that returns the log-probabilities of its prompts' tokens
    layout: int = 0  # the number of the layout of the weights that a catch-up takes (`layouts.Layouts.number`)

    @property
    def is_for_masks(self) -> bool:
        """Return whether requests with token masks alone need it."""
        return self.kind in ("proposal", "verification")
