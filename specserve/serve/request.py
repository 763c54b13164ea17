"""The nouns of serving: what a client asks for, what the engine answers. Host data only, no arrays.

`SamplingParams` is validated when it is made (`SamplingParams.create`), so the engine never meets a bad value.
"""

import enum
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specserve.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
SMALLEST_TEMPERATURE = 1e-5  # below it, as in vLLM, sampling is greedy: logits over less would overflow


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words plus our own two for sequences that were ended from outside."""

    STOP = "stop"  # an EOS id, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    CANCELLED = "cancelled"  # the client went away
    ERROR = "error"  # the engine failed; `Delta.error` says how


@dataclass(frozen=True)
class SamplingParams:
    """How to draw one sequence. Make it with `create`, which checks every value."""

    max_tokens: int | None = None  # None: up to the context length
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None  # None: the engine draws one and reports it
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @classmethod
    def create(
        cls,
        *,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> "SamplingParams":
        """Raises RequestError that names the field and the range."""
        if max_tokens is not None:
            _check("max_tokens", max_tokens, 1, 2**31 - 1)
        _check("temperature", temperature, 0.0, 100.0)
        _check("top_p", top_p, 0.0, 1.0, exclusive_low=True)
        _check("top_k", top_k, -1, 2**31 - 1)
        _check("min_p", min_p, 0.0, 1.0)
        if seed is not None:
            _check("seed", seed, -MAX_SEED - 1, MAX_SEED)
        if len(stop) > MAX_STOP_STRINGS or any(not s or len(s) > MAX_STOP_CHARS for s in stop):
            raise RequestError(
                f"stop must be at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters", param="stop"
            )
        for token_id in stop_token_ids:
            _check("stop_token_ids", token_id, 0, 2**31 - 1)
        return cls(
            max_tokens=max_tokens,
            temperature=float(temperature) if temperature >= SMALLEST_TEMPERATURE else 0.0,
            top_p=float(top_p),
            top_k=max(0, top_k),
            min_p=float(min_p),
            seed=seed,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
        )


def _check(name: str, value: float, low: float, high: float, *, exclusive_low: bool = False) -> None:
    is_inside = math.isfinite(value) and (low < value if exclusive_low else low <= value) and value <= high
    if not is_inside:
        bracket = "(" if exclusive_low else "["
        raise RequestError(f"{name} must be in {bracket}{low}, {high}], got {value}", param=name)


@dataclass(frozen=True)
class SpeculationStats:
    """What speculation did for one sequence (all zero under plain decoding).

    `accepted_per_depth[d]` counts the steps that accepted a draft token at depth d+1; `num_steps` counts target
    forwards after prefill, so tau = emitted tokens per step = 1 + sum(accepted_per_depth) / num_steps.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    accepted_per_depth: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_depth)

    @property
    def tau(self) -> float:
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 1.0


@dataclass(frozen=True)
class Delta:
    """What one engine step added to a sequence. The last one of a sequence has a `finish_reason`."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: SpeculationStats | None = None  # set on the last delta


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine. The engine thread owns the mutable part."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int  # params.max_tokens, bounded by the context length
    seed: int
    on_delta: Callable[[Delta], None]  # called on the engine's thread; must not block
    arrival_time: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False  # set from any thread

    def cancel(self) -> None:
        """Ask the engine to stop this sequence at its next step. Safe from any thread, any number of times."""
        self.is_cancelled = True
