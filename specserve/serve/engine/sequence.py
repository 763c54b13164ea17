"""A request in the engine, and the parts of a round that concern it: what the scheduler plans and the rounds do."""

import time
from dataclasses import dataclass, field
from typing import Any

from specserve.serve.engine.windows import HeldWindows
from specserve.serve.requests.output import OutputStream
from specserve.serve.requests.request import Delta, PromptToken, Request
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.controller import Estimate
from specserve.speculative.tree import Tree


@dataclass(eq=False)
class Sequence:
    """A request in the engine, from its arrival to its end: the only object that scheduler and rounds share."""

    request: Request
    # The part of the rounds. The scheduler only counts the emitted tokens.
    output: OutputStream
    output_ids: list[int] = field(default_factory=list)  # emitted and read
    prompt: list[PromptToken] = field(default_factory=list)  # the scored tokens so far of a prompt that is scored
    hidden_states: list[Any] = field(default_factory=list)  # the same, of its chunks
    estimate: Estimate | None = None  # how many draft tokens it accepts; None before its first admission
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafts: list[tuple[int, int]] = field(default_factory=list)  # see `SpeculationStats`
    admit_time: float = 0.0  # of the first admission, as all times by time.monotonic; 0: not yet
    first_time: float = 0.0  # of the first token
    last_time: float = 0.0  # of the last one so far
    versions: list[tuple[int, str]] = field(default_factory=list)  # see `SpeculationStats`
    unread_from: int | None = None  # the first token that the draft has still to read, see `backlog`; None: it keeps up
    # The part of the scheduler.
    order: int = -1  # of arrival
    slot: int = -1
    data_rank: int = 0  # the one that has its slot
    epoch: int = 0  # steps dispatched in an earlier one no longer count
    pages: list[int] = field(default_factory=list)
    kept: int = -1  # the place of the state behind its cached prefix; -1: none
    held: HeldWindows | None = None  # its window pages, while it has a slot
    borders: frozenset[int] = frozenset()  # of its prompt, behind which states and windows are to be kept
    num_shared: int = 0  # of the pages, those that the prefix cache knows already
    num_prefilled: int = 0  # tokens whose keys and values are, or are about to be, committed
    num_start: int = 0  # tokens to prefill: the prompt, and after a preemption the answer so far
    num_cached: int | None = None  # prompt tokens that were cached at the first admission
    is_new: bool = False  # it has a slot, and nothing of it has been dispatched there
    num_in_flight: int = 0  # tokens that steps dispatched and not read emit, at least
    most_in_flight: int = 0  # the same, at most
    has_ended: bool = False

    def dispatched(self, least: int, most: int) -> None:
        """Note that a program was dispatched which emits so many tokens of this sequence."""
        self.num_in_flight += least
        self.most_in_flight += most

    def landed(self, least: int, most: int) -> None:
        """Note that the result of such a program has been read."""
        self.num_in_flight -= least
        self.most_in_flight -= most

    def count_step(self, tree: Tree | None, delta: Delta) -> None:
        """Count a step over that tree, of which the delta has what belongs to the answer."""
        # 0: the request wants no draft tokens
        num_draft_tokens = tree.num_nodes if tree and self.estimate and self.estimate.max_depth else 0
        if num_draft_tokens:
            self.drafts.append((num_draft_tokens, delta.num_accepted))
        self.acceptance = self.acceptance.after_step(
            delta.num_accepted,
            depth=tree.depth if tree else 0,
            num_draft_tokens=num_draft_tokens,
            num_emitted=len(delta.token_ids),
        )

    def admitted(self, version: str) -> None:
        """Note that it has a slot, where its prompt is run, by this version of the weights."""
        self.prompt.clear()
        self.hidden_states.clear()
        self.admit_time = self.admit_time or time.monotonic()
        self.note_version(version)

    def note_version(self, version: str) -> None:
        """Note that the tokens from here on are of this version of the weights."""
        start = len(self.output_ids)
        if self.versions and self.versions[-1][0] == start:  # the version before has given it no token
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((start, version))

    @property
    def has_begun(self) -> bool:
        """Return whether it has had a slot."""
        return bool(self.versions)

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.prompt_ids, *self.output_ids]

    @property
    def is_running(self) -> bool:
        return self.slot >= 0

    def is_of(self, epoch: int) -> bool:
        """Return whether steps of this epoch count: it has neither ended since, nor will it do them again."""
        return self.is_running and self.epoch == epoch

    @property
    def is_scored(self) -> bool:
        """Return whether log-probabilities or hidden states of its prompt are still to be returned."""
        params = self.request.params
        return (params.prompt_logprobs is not None or params.hidden_states) and not self.output_ids

    @property
    def is_prefilling(self) -> bool:
        return self.num_prefilled < self.num_start

    @property
    def num_left(self) -> int:
        """Tokens that it may still emit, if what is in flight brings the least."""
        return self.request.max_new_tokens - len(self.output_ids) - self.num_in_flight

    def entries_after(self, num_new: int) -> int:
        """Committed entries after `num_new` more tokens: all but the last token, which is never read."""
        most = min(len(self.output_ids) + num_new, self.request.max_new_tokens)
        return len(self.request.prompt_ids) + most - 1

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.order


PageRow = tuple[int, ...]  # slot, which page of the sequence, page, and its window pages, as `Runner.extend` takes it


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt that is to run next."""

    sequence: Sequence
    num_cached: int  # tokens that its pages held when it was admitted
    num_tokens: int
    is_first: bool  # the sequence has just been admitted
    is_last: bool
    keep: int | None = None  # the place that the recurrent state behind it is copied to
    new_pages: tuple[PageRow, ...] = ()  # with the window pages that it fills


@dataclass(frozen=True)
class Round:
    """The work that the engine does next, in this order."""

    preempted: list[Sequence]
    decode: list[Sequence]
    new_pages: list[PageRow]  # for `decode`
    prefills: list[tuple[Chunk, ...]]  # of each prefill program: chunks of prompts of the data ranks that have some
    most_steps: int = 1  # of `decode`, at once
    most_tokens: int = 1  # that they may emit for a sequence; `decode` has pages for these

    def num_steps(self, size: int) -> int:
        """Return how many steps, each of which emits so many tokens for a sequence at most, `decode` may make at
        once."""
        return max(1, min(self.most_steps, self.most_tokens // size))

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks of all prefill programs."""
        return [chunk for chunks in self.prefills for chunk in chunks]

    @property
    def is_empty(self) -> bool:
        return not (self.decode or self.prefills)
