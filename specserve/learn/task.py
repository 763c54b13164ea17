"""The task of a round of learning and its result, as the server and the process that makes the round exchange them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TRAFFIC, ROUND, HEAD = "traffic", "round", "head"  # in the folder of --learn; the last one is in the second

# "whole": in the candidate's place, if better; "returned": a version that was given up while it served
Contender = Literal["static", "served", "candidate", "whole", "returned"]


@dataclass(frozen=True)
class RoundTask:
    """The task of a round."""

    folder: str  # of --learn
    target: str  # as `resolve_target` takes it
    static: str  # folder of the head that the server was started with
    served: str  # and of the one that serves
    kind: str  # of both
    speculation: str  # the way that they are judged by, a chain or a tree of the head alone
    steps: int
    seed: int
    first_data: tuple[str, ...] = ()  # as data.source of train; empty: none
    quantization: str = "none"
    draft_quantization: str = "none"
    drafter_module: str = ""
    learning_rate: float = 0.0  # 0: that of a new head
    returned: str = ""  # folder of a version that was given up while it served; empty: there is none


@dataclass(frozen=True)
class RoundResult:
    """The judgement at the end of a round."""

    choice: Contender
    taus: Mapping[str, float]  # of each contender on the held-out prompts
    gain: tuple[float, float] | None  # 95% interval of the candidate's tau less that of the served head
    learnt: float  # share of what training made in the candidate; the rest is the static head
    num_train: int  # answers
    num_held_out: int
    seconds: float

    @property
    def text(self) -> str:
        """The judgement in one line."""
        taus = ", ".join(f"{name} {tau:.3f}" for name, tau in self.taus.items())
        gain = "" if self.gain is None else f", candidate less served {self.gain[0]:+.3f} to {self.gain[1]:+.3f}"
        return (
            f"{self.num_train} answers, {self.seconds:.0f} s; tau over {self.num_held_out} held-out prompts: "
            f"{taus}{gain}, {self.learnt:.0%} of it learnt: {self.choice}"
        )
