"""The nouns of serving: what a client asks for, what the engine answers. Host data only, no arrays.

`SamplingParams` is validated when it is made, so the engine never meets a bad value.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np

from specserve.errors import RequestError
from specserve.speculative.sampling import MAX_LOGPROBS

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_TOKEN_IDS = 1024  # of one list of token ids in the options, logit_bias included
MAX_BAD_WORDS = 64
MAX_CHOICES = 128
SMALLEST_TEMPERATURE = 1e-5  # below it, as in vLLM, sampling is greedy: logits over less would overflow


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words plus our own two for sequences that were ended from outside."""

    STOP = "stop"  # an EOS id, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    CANCELLED = "cancelled"  # the client went away
    ERROR = "error"  # the engine failed; `Delta.error` says how


@dataclass(frozen=True)
class Range:
    """The values from `low` to `high`, both among them; the lowest is not where the range `is_open`."""

    low: float
    high: float
    is_open: bool = False

    def check(self, name: str, value: float) -> None:
        """Raises RequestError, which names the field, for a value outside."""
        is_inside = (self.low < value if self.is_open else self.low <= value) and value <= self.high  # false for NaN
        if not is_inside:
            bracket = "(" if self.is_open else "["
            raise RequestError(f"{name} must be in {bracket}{self.low}, {self.high}], got {value}", param=name)


RANGES: Mapping[str, Range] = {  # of every field of SamplingParams that is a number
    "n": Range(1, MAX_CHOICES),
    "max_tokens": Range(1, 2**31 - 1),
    "min_tokens": Range(0, 2**31 - 1),
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, is_open=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.0, 100.0, is_open=True),
    "seed": Range(-MAX_SEED - 1, MAX_SEED),
    "logprobs": Range(0, MAX_LOGPROBS),
    "speculation": Range(0, 2**31 - 1),
}


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the answers to one prompt, under vLLM's names. The constructor checks every value: RequestError
    names the field and the range. Token ids are checked against the vocabulary when the request is submitted."""

    n: int = 1  # answers; answer i is drawn with seed + i
    max_tokens: int | None = None  # None: up to the context length
    min_tokens: int = 0  # no end-of-sequence or stop token id before
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # taken from the logit of every token the answer holds
    frequency_penalty: float = 0.0  # the same, times how often it holds it
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens in prompt or answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of token ids
    allowed_token_ids: Sequence[int] | None = None  # None: all
    bad_words: Sequence[str] = ()  # never produced, nor with a space in front
    seed: int | None = None  # None: the engine draws one
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # of each token, and of this many most likely ones; None: none
    speculation: int | None = None  # draft tokens that a step may accept; 0: decode plainly; None: the server's choice

    def __post_init__(self) -> None:
        self._check_ranges()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stop) > MAX_STOP_STRINGS or any(not s or len(s) > MAX_STOP_CHARS for s in stop):
            raise RequestError(
                f"stop must be at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters", param="stop"
            )
        if len(self.bad_words) > MAX_BAD_WORDS or any(not w or len(w) > MAX_STOP_CHARS for w in self.bad_words):
            raise RequestError(
                f"bad_words must be at most {MAX_BAD_WORDS} strings of 1 to {MAX_STOP_CHARS} characters",
                param="bad_words",
            )
        # the one spelling of each value, so that nobody downstream meets another
        plain = {
            "temperature": float(self.temperature) if self.temperature >= SMALLEST_TEMPERATURE else 0.0,
            "top_k": max(0, self.top_k),
            "logit_bias": dict(self.logit_bias),
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "bad_words": tuple(self.bad_words),
            "stop": stop,
            "stop_token_ids": tuple(self.stop_token_ids),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        for name, allowed in RANGES.items():
            is_left_out = getattr(self, name) is None and getattr(SamplingParams, name) is None  # the default
            if not is_left_out:
                allowed.check(name, getattr(self, name))
        if self.max_tokens is not None:
            Range(0, self.max_tokens).check("min_tokens", self.min_tokens)
        for name, token_ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", self.logit_bias),
        ):
            if len(token_ids) > MAX_TOKEN_IDS:
                raise RequestError(f"{name} holds {len(token_ids)} token ids, at most {MAX_TOKEN_IDS}", param=name)
            for token_id in token_ids:
                Range(0, 2**31 - 1).check(name, token_id)
        for bias in self.logit_bias.values():
            Range(-100.0, 100.0).check("logit_bias", bias)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids must hold at least one token id, or be left out", param="allowed_token_ids"
            )

    def choices(self) -> list[Self]:
        """One SamplingParams for each of the n answers."""
        return [
            dataclasses.replace(self, n=1, seed=None if self.seed is None else _wrap_seed(self.seed + i))
            for i in range(self.n)
        ]


def _wrap_seed(seed: int) -> int:
    return (seed + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1


@dataclass(frozen=True)
class SpeculationStats:
    """What speculation did for one sequence (all zero under plain decoding).

    `accepted_per_depth[d]` counts the steps that accepted a draft token at depth d+1; `num_steps` counts target
    forwards after prefill, so tau = emitted tokens per step = 1 + sum(accepted_per_depth) / num_steps.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    accepted_per_depth: tuple[int, ...] = ()
    num_cached_tokens: int = 0  # prompt tokens whose keys and values were in the prefix cache

    def with_step(self, num_nodes: int, depth: int, n_accepted: int) -> "SpeculationStats":
        """The same and one more step, which proposed `num_nodes` draft tokens in a tree of this depth (both 0: plain
        decoding) and accepted `n_accepted` of them."""
        accepted = [*self.accepted_per_depth, *[0] * (depth - len(self.accepted_per_depth))]
        accepted[:n_accepted] = [count + 1 for count in accepted[:n_accepted]]
        return dataclasses.replace(
            self,
            num_steps=self.num_steps + 1,
            num_draft_tokens=self.num_draft_tokens + num_nodes,
            accepted_per_depth=tuple(accepted),
        )

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_depth)

    @property
    def tau(self) -> float:
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    @property
    def accept_rate(self) -> tuple[float, ...]:
        """Conditional acceptance at each depth."""
        above = (self.num_steps, *self.accepted_per_depth[:-1])
        return tuple(n / max(1, m) for n, m in zip(self.accepted_per_depth, above, strict=False))


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the target's own distribution: before bias, penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most likely token ids with theirs, best first


class TokenMask(Protocol):
    """Which tokens may come next in one sequence: a grammar, a schema, a list of choices. Called on the engine's
    thread, in turn; an exception ends that request alone."""

    def masks(self, parents: Sequence[int], token_ids: Sequence[int]) -> np.ndarray:  # [node, vocab] bool
        """True where a token may follow a node of a proposed tree. Node 0 is the end of what was accepted (its token
        id means nothing); a node behind a token that may not come there may have any row with a True in it."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens have been added to the sequence."""
        ...


@dataclass(frozen=True)
class Delta:
    """What one engine step added to a sequence. The last one of a sequence has a `finish_reason`."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: SpeculationStats | None = None  # set on the last delta
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token id, when the request asked for them


@dataclass(eq=False)
class Request:
    """One sequence as it was asked for, checked, and with all that follows from its options and the model."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams  # with n = 1
    max_new_tokens: int  # params.max_tokens, bounded by the context length
    seed: int
    on_delta: Callable[[Delta], None]  # called on the engine's thread; must not block
    priority: int = 0  # lower runs first, as in vLLM
    cache_salt: str = ""  # prefixes are shared only between requests of one salt
    token_mask: TokenMask | None = None
    stop_ids: frozenset[int] = frozenset()  # any of them ends it: its stop token ids, and the model's EOS ids
    bad_sequences: Sequence[tuple[int, ...]] = ()  # token ids that spell its bad words
    is_cancelled: bool = False  # set from any thread

    def cancel(self) -> None:
        """Ask the engine to stop this sequence at its next step. Safe from any thread, any number of times."""
        self.is_cancelled = True
