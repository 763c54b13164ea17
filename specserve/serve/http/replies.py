"""The reply bodies that the server sends, in OpenAI's shapes. Knows nothing of HTTP or of the engine."""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fastapi.sse import format_sse_event

from specserve.serve.http.logprobs import LogprobsFormat
from specserve.serve.http.parts import Part
from specserve.serve.request import TokenLogprobs

Json = dict[str, Any]


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """The body of an error reply, in OpenAI's shape. `param` is the field that was wrong."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(payload: Json | str, name: str | None = None) -> bytes:
    """One server-sent event."""
    text = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return format_sse_event(data_str=text, event=name)


@dataclass(frozen=True)
class Answer:
    """What a reply says of one sequence: all of it, or in a stream what has come since the last time."""

    index: int
    part: Part
    finish_reason: str | None  # None while it goes on
    logprobs: Sequence[TokenLogprobs] = ()  # of the tokens at hand, none unless they were asked for


@dataclass(frozen=True)
class Usage:
    """Token counts of a reply: every prompt once, all its sequences, and what speculation did for them."""

    num_prompt: int
    num_cached: int
    num_completion: int
    num_accepted: int  # draft tokens
    num_rejected: int
    metrics: Json | None = None  # how the one sequence of the reply fared, where the server tells (`request_metrics`)

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.num_accepted,
                "rejected_prediction_tokens": self.num_rejected,
            },
        }


class ReplyFormat(Protocol):
    """Spells the replies of one endpoint to one request."""

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Json:
        """The whole body of a reply that is no stream."""
        ...

    def begin(self, index: int) -> Iterable[bytes]:
        """The events of a stream before the first piece of an answer."""
        ...

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        """The events that say what has come of an answer since the last time; `usage()` counts what has come
        so far."""
        ...

    def end(self, usage: Usage) -> Iterable[bytes]:
        """The events after the last piece of all answers."""
        ...

    def failure(self, error: Json) -> Iterable[bytes]:
        """The events that end a stream after an error, whose body is `error`."""
        ...


class OpenAIFormat:
    """What the formats of completions and chat share."""

    ID_PREFIX: ClassVar[str]
    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]

    def __init__(self, model_name: str, logprobs: LogprobsFormat, *, include_usage: bool) -> None:
        """`include_usage`: streams end with a chunk of token counts."""
        self._include_usage = include_usage
        self._head = {"id": f"{self.ID_PREFIX}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model_name}
        self._logprobs_format = logprobs

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Json:
        choices = [self._choice(answer) for answer in answers]
        return self._head | {"object": self.KIND, "choices": choices} | _with_metrics(usage)

    def begin(self, index: int) -> Iterable[bytes]:
        raise NotImplementedError

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        raise NotImplementedError

    def end(self, usage: Usage) -> Iterable[bytes]:
        if self._include_usage:
            yield event(self._head | {"object": self.CHUNK_KIND, "choices": []} | _with_metrics(usage))
        yield event("[DONE]")

    def failure(self, error: Json) -> Iterable[bytes]:
        return event(error), event("[DONE]")

    def _choice(self, answer: Answer) -> Json:
        raise NotImplementedError

    def _chunk(self, choice: Json) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return event(self._head | {"object": self.CHUNK_KIND, "choices": [choice]} | usage)

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> Json | None:
        return self._logprobs_format(index, logprobs) if logprobs else None


def _with_metrics(usage: Usage) -> Json:
    beside = {} if usage.metrics is None else {"metrics": usage.metrics}
    return {"usage": usage.as_json()} | beside


class CompletionFormat(OpenAIFormat):
    """POST /v1/completions. With `echoes`, the text of each choice's prompt, every answer begins with it."""

    ID_PREFIX, KIND, CHUNK_KIND = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, model_name: str, logprobs: LogprobsFormat, *, include_usage: bool = False, echoes: Sequence[str] = ()
    ) -> None:
        super().__init__(model_name, logprobs, include_usage=include_usage)
        self._echoes = echoes

    def begin(self, index: int) -> Iterable[bytes]:
        echo = self._echo(index)
        return (self._chunk(self._spell(Answer(index, Part(echo), None))),) if echo else ()

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        return (self._chunk(self._spell(answer)),)

    def _choice(self, answer: Answer) -> Json:
        return self._spell(answer, self._echo(answer.index))

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""

    def _spell(self, answer: Answer, echo: str = "") -> Json:
        return {
            "index": answer.index,
            "text": echo + answer.part.content,
            "logprobs": self._logprobs(answer.index, answer.logprobs),
            "finish_reason": answer.finish_reason,
        }


class ChatFormat(OpenAIFormat):
    """POST /v1/chat/completions."""

    ID_PREFIX, KIND, CHUNK_KIND = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self, index: int) -> Iterable[bytes]:
        return (self._delta(Answer(index, Part(), None), {"role": "assistant", "content": ""}),)

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        # tokens whose text is still held back are content too, of no length yet
        said = {"content": answer.part.content} if answer.part.content or answer.logprobs else {}
        return (self._delta(answer, said),)

    def _choice(self, answer: Answer) -> Json:
        message = {"role": "assistant", "content": answer.part.content, "refusal": None}
        return self._with_end({"index": answer.index, "message": message}, answer)

    def _delta(self, answer: Answer, delta: Json) -> bytes:
        return self._chunk(self._with_end({"index": answer.index, "delta": delta}, answer))

    def _with_end(self, choice: Json, answer: Answer) -> Json:
        logprobs = self._logprobs(answer.index, answer.logprobs)
        return choice | {"logprobs": logprobs, "finish_reason": answer.finish_reason}
