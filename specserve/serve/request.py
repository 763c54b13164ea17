"""The nouns of serving: what a client asks for, what the engine answers. Host data only, no arrays.

`SamplingParams` is validated when it is made, so the engine never meets a bad value.
"""

import dataclasses
import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specserve.errors import RequestError
from specserve.speculative.acceptance import Acceptance
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
        _check("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check("min_tokens", self.min_tokens, 0, 2**31 - 1 if self.max_tokens is None else self.max_tokens)
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        _check("top_k", self.top_k, -1, 2**31 - 1)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, exclusive_low=True)
        if self.seed is not None:
            _check("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.speculation is not None:
            _check("speculation", self.speculation, 0, 2**31 - 1)
        for name, token_ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", self.logit_bias),
        ):
            if len(token_ids) > MAX_TOKEN_IDS:
                raise RequestError(f"{name} holds {len(token_ids)} token ids, at most {MAX_TOKEN_IDS}", param=name)
            for token_id in token_ids:
                _check(name, token_id, 0, 2**31 - 1)
        for bias in self.logit_bias.values():
            _check("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids must hold at least one token id, or be left out", param="allowed_token_ids"
            )

    def choices(self) -> "list[SamplingParams]":
        """One SamplingParams for each of the n answers."""
        return [
            dataclasses.replace(self, n=1, seed=None if self.seed is None else _wrap_seed(self.seed + i))
            for i in range(self.n)
        ]


def _wrap_seed(seed: int) -> int:
    return (seed + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1


def _check(name: str, value: float, low: float, high: float, *, exclusive_low: bool = False) -> None:
    is_inside = (low < value if exclusive_low else low <= value) and value <= high  # false for NaN
    if not is_inside:
        bracket = "(" if exclusive_low else "["
        raise RequestError(f"{name} must be in {bracket}{low}, {high}], got {value}", param=name)


@dataclass(frozen=True)
class SpeculationStats(Acceptance):
    """What speculation and the prefix cache did for one sequence."""

    num_cached_tokens: int = 0  # prompt tokens whose keys and values were in the prefix cache


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
    """One sequence on its way through the engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams  # with n = 1
    max_new_tokens: int  # params.max_tokens, bounded by the context length
    seed: int
    on_delta: Callable[[Delta], None]  # called on the engine's thread; must not block
    priority: int = 0  # lower runs first, as in vLLM
    cache_salt: str = ""  # prefixes are shared only between requests of one salt
    token_mask: TokenMask | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False  # set from any thread

    def cancel(self) -> None:
        """Ask the engine to stop this sequence at its next step. Safe from any thread, any number of times."""
        self.is_cancelled = True
