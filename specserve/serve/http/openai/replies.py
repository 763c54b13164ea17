"""The material of every reply: answers, token counts, and the base of the formats that spell them. Knows nothing
of HTTP or of the engine."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired

import numpy as np

from specserve.serve.http.formats.reader import Part
from specserve.serve.http.transport.errors import Error
from specserve.serve.http.transport.json_codec import ReplyObject, encoded, write_json
from specserve.serve.requests.request import DraftTree, PromptToken, SpeculationStats, TokenLogprobs

# the last two: it ends by itself and calls tools, and the operator has ended it
Ending = Literal["stop", "length", "tool_calls", "abort"]
TokenOrigin = tuple[int, int]  # a token id, and its depth as `Delta.draft_depths` has it


def event(payload: Any, name: str | None = None, *, is_long: bool = False) -> bytes:
    """Return the bytes of a server-sent event. JSON has no line breaks, so it is one line of data. `is_long`: it may
    have many values, so a thread spells it that others must not wait for."""
    text = payload if isinstance(payload, str) else encoded(payload, is_long=is_long)
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()


@dataclass(frozen=True)
class Answer:
    """The part of a reply about one sequence: all of it, or in a stream the part since the last piece."""

    index: int
    part: Part
    finish_reason: Ending | None  # None while it goes on
    logprobs: Sequence[TokenLogprobs] = ()  # of the tokens at hand, none unless they were asked for
    prompt: Sequence[PromptToken] = ()  # with the first piece, where log-probabilities of the prompt were asked for
    hidden_states: np.ndarray | None = None  # of the prompt, as `Delta` has them, where they were asked for
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    token_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    stats: SpeculationStats | None = None  # when it has ended
    version: str = ""  # of the weights that its last token is of, when it has ended and the server names it
    origins: Sequence[TokenOrigin] = ()  # of the tokens at hand, none unless they were asked for
    tree: DraftTree | None = None  # of the last step, None unless it was asked for

    @property
    def is_text(self) -> bool:
        """Return whether it goes on and has content alone, without reasoning, calls, scores, origins or trees."""
        part, others = self.part, (self.finish_reason, self.logprobs, self.prompt, self.origins, self.tree)
        return bool(part.content) and not (part.reasoning or part.tool_calls or any(others))


class ReplyVersion(ReplyObject):
    """The version of the weights that the last token is of, on a server whose weights may change."""

    system_fingerprint: NotRequired[str]


def version_of(answers: Sequence[Answer]) -> ReplyVersion:
    """Return the version of the weights of some answers; where they differ, all of them, joined by commas."""
    names = dict.fromkeys(answer.version for answer in answers if answer.version)
    return {"system_fingerprint": ", ".join(names)} if names else {}


# --- token counts, times and speculation ----------------------------------------------------------------------------


class PromptDetails(ReplyObject):
    """Tokens of prompts."""

    cached_tokens: int


class CompletionDetails(ReplyObject):
    """Tokens of answers, and draft tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenCounts(ReplyObject):
    """Token counts so far, in the middle of a stream."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenUsage(TokenCounts):
    """The tokens of a whole reply."""

    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class SpeculationMetrics(ReplyObject):
    """The speculation of one sequence, as vLLM reports it."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: NotRequired[list[int]]
    per_step_drafted: NotRequired[list[int]]


class ReplyMetrics(ReplyObject):
    """Times of the one sequence of a reply, where the server reports them."""

    queue_time_ms: NotRequired[float]
    time_to_first_token_ms: NotRequired[float]
    generation_time_ms: NotRequired[float]
    mean_itl_ms: NotRequired[float | None]
    tokens_per_second: NotRequired[float | None]
    speculative_decoding: NotRequired[SpeculationMetrics | None]


@dataclass(frozen=True)
class Usage:
    """The token counts of a reply: every prompt once, all its sequences, and how many draft tokens were accepted and
    rejected."""

    num_prompt: int
    num_cached: int
    num_completion: int
    num_accepted: int  # draft tokens
    num_rejected: int
    num_reasoning: int = 0  # of the completion
    metrics: ReplyMetrics | None = None  # of the one sequence of the reply, where the server reports them

    def counts(self) -> TokenCounts:
        """Return the counts that are also true in the middle of a stream."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
        }

    def as_json(self) -> TokenUsage:
        return {
            **self.counts(),
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": self.completion_details(),
        }

    def completion_details(self) -> CompletionDetails:
        return {
            "reasoning_tokens": self.num_reasoning,
            "accepted_prediction_tokens": self.num_accepted,
            "rejected_prediction_tokens": self.num_rejected,
        }


@dataclass(frozen=True)
class RequestMetrics:
    """The settings of the `metrics` object of replies, which has vLLM's words: whether it has times, and in how much
    detail it describes speculation."""

    has_times: bool = False
    speculation: Literal["none", "summary", "detailed"] = "none"

    def spell(self, stats: SpeculationStats, num_tokens: int) -> ReplyMetrics | None:
        """Return the object for a sequence that has ended, of so many new tokens, or None where it would be empty."""
        spelled: ReplyMetrics = _times(stats, num_tokens) if self.has_times else {}
        if self.speculation != "none":
            spelled["speculative_decoding"] = self._speculation(stats) if stats.max_accepted else None
        return spelled or None

    def _speculation(self, stats: SpeculationStats) -> SpeculationMetrics:
        accepted = Counter(num_accepted for _, num_accepted in stats.drafts)
        spelled: SpeculationMetrics = {
            "mean_acceptance_length": stats.of_drafts.tau,
            "draft_acceptance_rate": stats.num_accepted / max(1, stats.num_draft_tokens),
            "acceptance_histogram": [accepted[n] for n in range(stats.max_accepted + 1)],
            "num_spec_steps": stats.num_drafts,
            "num_accepted_draft_tokens": stats.num_accepted,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_spec_tokens": stats.max_accepted,
        }
        if self.speculation == "detailed":
            spelled["per_step_accepted"] = [num_accepted for _, num_accepted in stats.drafts]
            spelled["per_step_drafted"] = [num_drafted for num_drafted, _ in stats.drafts]
        return spelled


def _times(stats: SpeculationStats, num_tokens: int) -> ReplyMetrics:
    """Return the times in milliseconds. As in vLLM, the time to the first token begins where the time in the queue
    ends."""
    inference = stats.prefill_seconds + stats.decode_seconds
    return {
        "queue_time_ms": 1e3 * stats.queue_seconds,
        "time_to_first_token_ms": 1e3 * stats.prefill_seconds,
        "generation_time_ms": 1e3 * stats.decode_seconds,
        "mean_itl_ms": 1e3 * stats.decode_seconds / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / inference if inference else None,
    }


# --- formats --------------------------------------------------------------------------------------------------------


class ReplyFormat:
    """The base of the formats, each of which spells the replies of one endpoint to one request. Its streams end with
    [DONE]."""

    media_type = "application/json"  # of a whole reply
    can_abort = False  # it has a word for an answer that the operator has ended; elsewhere that is an error
    is_long = False
    """Pieces of a stream may have all log-probabilities of a prompt or of an answer, so a thread spells them, as it
    does the beginning and the end."""

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole body of a reply that is no stream, as JSON has it."""
        raise NotImplementedError

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the same as it is sent."""
        return write_json(self.reply(answers, usage)).encode()

    def begin(self, start: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        """Yield the events of a stream before the first piece of an answer; `start` is the answer without any text
        yet."""
        return ()

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        """Yield the events for the text of an answer since the last piece; `usage()` counts all tokens so far."""
        raise NotImplementedError

    def end(self, usage: Usage) -> Iterable[bytes]:  # noqa: ARG002
        """Yield the events after the last piece of all answers."""
        yield event("[DONE]")

    def failure(self, error: Error) -> Iterable[bytes]:
        """Yield the events that end a stream after an error, whose body is `error`."""
        return event(error), event("[DONE]")
