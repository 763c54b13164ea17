"""The reply bodies that the server sends, in OpenAI's shapes. Knows nothing of HTTP or of the engine."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from specserve.serve.api_logprobs import LogprobsFormat
from specserve.serve.request import TokenLogprobs

Json = dict[str, Any]


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """The body of an error reply, in OpenAI's shape. `param` is the field that was wrong."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ReplyFormat:
    """Spells the replies of one endpoint. The log-probabilities it takes are those of the tokens at hand, none
    unless they were asked for."""

    ID_PREFIX: ClassVar[str]
    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]

    def __init__(self, model_name: str, logprobs: LogprobsFormat, *, include_usage: bool) -> None:
        """`include_usage`: streams end with a chunk of token counts."""
        self.include_usage = include_usage
        self._head = {"id": f"{self.ID_PREFIX}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model_name}
        self._logprobs_format = logprobs

    def reply(self, choices: list[Json], usage: Json) -> Json:
        """The whole body of a reply that is no stream."""
        return self._head | {"object": self.KIND, "choices": choices, "usage": usage}

    def choice(self, index: int, text: str, finish_reason: str, logprobs: Sequence[TokenLogprobs]) -> Json:
        """A whole answer, one of `choices` in `reply`."""
        raise NotImplementedError

    def first_chunk(self, index: int) -> Json | None:
        """What a stream says about a choice before its first token, if anything."""
        raise NotImplementedError

    def chunk(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Json:
        """What a stream says when more text of a choice has come, or when the choice ends."""
        raise NotImplementedError

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk of a stream that includes usage."""
        return self._head | {"object": self.CHUNK_KIND, "choices": [], "usage": usage}

    def _chunk(self, choice: Json) -> Json:
        usage = {"usage": None} if self.include_usage else {}
        return self._head | {"object": self.CHUNK_KIND, "choices": [choice]} | usage

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> Json | None:
        return self._logprobs_format(index, logprobs) if logprobs else None


class CompletionFormat(ReplyFormat):
    """POST /v1/completions. With `echoes`, the text of each choice's prompt, every answer begins with it."""

    ID_PREFIX, KIND, CHUNK_KIND = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, model_name: str, logprobs: LogprobsFormat, *, include_usage: bool = False, echoes: Sequence[str] = ()
    ) -> None:
        super().__init__(model_name, logprobs, include_usage=include_usage)
        self._echoes = echoes

    def choice(self, index: int, text: str, finish_reason: str, logprobs: Sequence[TokenLogprobs]) -> Json:
        return self._choice(index, self._echo(index) + text, finish_reason, logprobs)

    def first_chunk(self, index: int) -> Json | None:
        echo = self._echo(index)
        return self.chunk(index, echo, None, ()) if echo else None

    def chunk(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Json:
        return self._chunk(self._choice(index, text, finish_reason, logprobs))

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""

    def _choice(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Json:
        spelled = self._logprobs(index, logprobs)
        return {"index": index, "text": text, "logprobs": spelled, "finish_reason": finish_reason}


class ChatFormat(ReplyFormat):
    """POST /v1/chat/completions."""

    ID_PREFIX, KIND, CHUNK_KIND = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, finish_reason: str, logprobs: Sequence[TokenLogprobs]) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        spelled = self._logprobs(index, logprobs)
        return {"index": index, "message": message, "logprobs": spelled, "finish_reason": finish_reason}

    def first_chunk(self, index: int) -> Json | None:
        return self._delta(index, {"role": "assistant", "content": ""}, None, ())

    def chunk(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Json:
        # tokens whose text is still held back are content too, of no length yet
        return self._delta(index, {"content": text} if text or logprobs else {}, finish_reason, logprobs)

    def _delta(self, index: int, delta: Json, finish_reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Json:
        spelled = self._logprobs(index, logprobs)
        return self._chunk({"index": index, "delta": delta, "logprobs": spelled, "finish_reason": finish_reason})
