"""The reply bodies that the server sends, in OpenAI's shapes. Knows nothing of HTTP or of the engine."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from specserve.serve.api_logprobs import LogprobsFormat
from specserve.serve.request import TokenLogprobs
from specserve.speculative.acceptance import Acceptance

Json = dict[str, Any]


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage_body(
    num_prompt_tokens: int, num_cached_tokens: int, num_completion_tokens: int, stats: Sequence[Acceptance]
) -> Json:
    """Token counts of one reply: every prompt once, all its sequences, and what speculation did for them."""
    total = sum(stats, Acceptance())
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": total.num_accepted,
            "rejected_prediction_tokens": total.num_draft_tokens - total.num_accepted,
        },
    }


class ReplyFormat(Protocol):
    """How one endpoint spells its replies. `logprobs` are those of the tokens at hand, none unless asked for."""

    def reply(self, choices: list[Json], usage: Json) -> Json: ...

    def choice(self, index: int, text: str, finish_reason: str, logprobs: Sequence[TokenLogprobs]) -> Json: ...

    def first_chunk(self, index: int, prefix: str) -> Json | None:
        """What a stream says about a choice before its first token, if anything. `prefix` is the echoed prompt."""
        ...

    def chunk(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Json: ...

    def usage_chunk(self, usage: Json) -> Json: ...


class _Reply:
    def __init__(
        self,
        model_name: str,
        logprobs: LogprobsFormat,
        prefix: str,
        kind: str,
        chunk_kind: str,
        *,
        include_usage: bool,
    ) -> None:
        head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model_name}
        self._head = head | {"object": kind}
        self._chunk_head = head | {"object": chunk_kind}
        self._include_usage = include_usage
        self._logprobs_format = logprobs

    def reply(self, choices: list[Json], usage: Json) -> Json:
        return self._head | {"choices": choices, "usage": usage}

    def usage_chunk(self, usage: Json) -> Json:
        return self._chunk_head | {"choices": [], "usage": usage}

    def _chunk(self, choice: Json) -> Json:
        return self._chunk_head | {"choices": [choice]} | ({"usage": None} if self._include_usage else {})

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> Json | None:
        return self._logprobs_format(index, logprobs) if logprobs else None


class CompletionFormat(_Reply):
    def __init__(self, model_name: str, logprobs: LogprobsFormat, *, include_usage: bool = False) -> None:
        kind = "text_completion"
        super().__init__(model_name, logprobs, "cmpl", kind, kind, include_usage=include_usage)

    def choice(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Json:
        spelled = self._logprobs(index, logprobs)
        return {"index": index, "text": text, "logprobs": spelled, "finish_reason": finish_reason}

    def first_chunk(self, index: int, prefix: str) -> Json | None:
        return self.chunk(index, prefix, None, ()) if prefix else None

    def chunk(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Json:
        return self._chunk(self.choice(index, text, finish_reason, logprobs))


class ChatFormat(_Reply):
    def __init__(self, model_name: str, logprobs: LogprobsFormat, *, include_usage: bool = False) -> None:
        kind = "chat.completion"
        super().__init__(model_name, logprobs, "chatcmpl", kind, f"{kind}.chunk", include_usage=include_usage)

    def choice(self, index: int, text: str, finish_reason: str, logprobs: Sequence[TokenLogprobs]) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        spelled = self._logprobs(index, logprobs)
        return {"index": index, "message": message, "logprobs": spelled, "finish_reason": finish_reason}

    def first_chunk(self, index: int, prefix: str) -> Json | None:
        return self._delta(index, {"role": "assistant", "content": prefix}, None, ())

    def chunk(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Json:
        # tokens whose text is still held back are content too, of no length yet
        return self._delta(index, {"content": text} if text or logprobs else {}, finish_reason, logprobs)

    def _delta(self, index: int, delta: Json, finish_reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Json:
        spelled = self._logprobs(index, logprobs)
        return self._chunk({"index": index, "delta": delta, "logprobs": spelled, "finish_reason": finish_reason})
