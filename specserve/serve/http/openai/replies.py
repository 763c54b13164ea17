"""The reply bodies that the server sends, in OpenAI's shapes. Knows nothing of HTTP or of the engine."""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from specserve.serve.http.formats.parts import Part, ToolCallPart
from specserve.serve.http.openai.drafts import DraftFormat, TokenOrigin
from specserve.serve.http.openai.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from specserve.serve.http.transport.patient_json import ENCODER, write_json
from specserve.serve.requests.request import DraftTree, PromptToken, SpeculationStats, TokenLogprobs

Json = dict[str, Any]

TOOL_CALLS = "tool_calls"  # the finish_reason of an answer that ends by itself and calls tools


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """Return the body of an error reply, in OpenAI's shape. `param` is the field that was wrong."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(payload: Json | str, name: str | None = None, *, is_long: bool = False) -> bytes:
    """Return the bytes of a server-sent event. JSON has no line breaks, so it is one line of data. `is_long`: it may
    have many values, so a thread spells it that others must not wait for."""
    text = payload if isinstance(payload, str) else encoded(payload, is_long=is_long)
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()


def encoded(value: Json, *, is_long: bool) -> str:
    """A part of a stream as JSON."""
    return write_json(value) if is_long else ENCODER.encode(value)  # in C, for there are many


@dataclass(frozen=True)
class Answer:
    """The part of a reply about one sequence: all of it, or in a stream the part since the last piece."""

    index: int
    part: Part
    finish_reason: str | None  # None while it goes on
    logprobs: Sequence[TokenLogprobs] = ()  # of the tokens at hand, none unless they were asked for
    prompt: Sequence[PromptToken] = ()  # with the first piece, where log-probabilities of the prompt were asked for
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    token_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    stats: SpeculationStats | None = None  # when it has ended
    origins: Sequence[TokenOrigin] = ()  # of the tokens at hand, none unless they were asked for
    tree: DraftTree | None = None  # of the last step, None unless it was asked for


@dataclass(frozen=True)
class ReplyOptions:
    """The options of a reply in OpenAI's shapes: what it says besides the answers."""

    request_id: str | None = None  # a part of the reply's id; None: drawn
    include_usage: bool = False  # streams end with a chunk of token counts
    continuous_usage: bool = False  # every chunk of a stream has token counts
    token_ids: bool = False  # of prompts and answers
    prompt_logprobs: bool = False


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
    metrics: Json | None = None  # how the one sequence of the reply fared, where the server tells (`request_metrics`)

    def counts(self) -> Json:
        """The counts that are also true in the middle of a stream."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
        }

    def as_json(self) -> Json:
        return self.counts() | {
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.num_reasoning,
                "accepted_prediction_tokens": self.num_accepted,
                "rejected_prediction_tokens": self.num_rejected,
            },
        }


class ReplyFormat(Protocol):
    """The interface of a format, which spells the replies of one endpoint to one request."""

    @property
    def is_long(self) -> bool:
        """Return whether pieces of a stream may tell all log-probabilities of a prompt or of an answer, so that a
        thread is to spell them, as it does the beginning and the end."""
        ...

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Json:
        """Return the whole body of a reply that is no stream."""
        ...

    def begin(self, start: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        """Yield the events of a stream before the first piece of an answer; `start` is the answer without any text
        yet."""
        ...

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        """Yield the events for the text of an answer since the last piece; `usage()` counts all tokens so far."""
        ...

    def end(self, usage: Usage) -> Iterable[bytes]:
        """Yield the events after the last piece of all answers."""
        ...

    def failure(self, error: Json) -> Iterable[bytes]:
        """Yield the events that end a stream after an error, whose body is `error`."""
        ...


class OpenAIFormat:
    """The common part of the formats of completions and chat."""

    ID_PREFIX: ClassVar[str]
    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]
    is_long = False

    def __init__(
        self, model_name: str, logprobs: ChatLogprobs | CompletionLogprobs, options: ReplyOptions | None = None
    ) -> None:
        self._options = options or ReplyOptions()
        name = self._options.request_id or uuid.uuid4().hex
        self._head = {"id": f"{self.ID_PREFIX}-{name}", "created": int(time.time()), "model": model_name}
        # what all chunks of a stream begin with, encoded once
        self._chunk_head = ENCODER.encode(self._head | {"object": self.CHUNK_KIND}).removesuffix("}")
        self._drafts_format = DraftFormat(logprobs.texts)

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Json:
        choices = [self._choice(answer) for answer in answers]
        return self._head | {"object": self.KIND, "choices": choices} | _with_metrics(usage)

    def begin(self, start: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        raise NotImplementedError

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        raise NotImplementedError

    def end(self, usage: Usage) -> Iterable[bytes]:
        if self._options.include_usage:
            yield event(self._head | {"object": self.CHUNK_KIND, "choices": []} | _with_metrics(usage))
        yield event("[DONE]")

    def failure(self, error: Json) -> Iterable[bytes]:
        return event(error), event("[DONE]")

    def _choice(self, answer: Answer) -> Json:
        raise NotImplementedError

    def _chunk(self, choice: Json, usage: Callable[[], Usage], start: Json | None = None) -> bytes:
        """A chunk that tells of one choice, and as the first one of a stream what that begins with."""
        counts: Json = {}
        if self._options.include_usage:
            counts = {"usage": usage().counts() if self._options.continuous_usage else None}
        is_long = self.is_long or start is not None
        told = encoded({"choices": [choice]} | counts | (start or {}), is_long=is_long)
        return event(f"{self._chunk_head},{told.removeprefix('{')}")

    def _end_of(self, answer: Answer, logprobs: Json | None) -> Json:
        """Return the fields that every choice has at its end, and in a stream also before it."""
        said = {
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        said |= {"token_ids": list(answer.token_ids)} if self._options.token_ids else {}
        return said | self._drafts_format(answer.index, answer.origins, answer.tree)


def _with_metrics(usage: Usage) -> Json:
    beside = {} if usage.metrics is None else {"metrics": usage.metrics}
    return {"usage": usage.as_json()} | beside


class CompletionFormat(OpenAIFormat):
    """The format of POST /v1/completions. With `echoes`, the text of each choice's prompt, every answer begins with
    it."""

    ID_PREFIX, KIND, CHUNK_KIND = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model_name: str,
        logprobs: CompletionLogprobs,
        options: ReplyOptions | None = None,
        *,
        echoes: Sequence[str] = (),
        is_prompt_only: bool = False,
    ) -> None:
        """Prepare the format. With `is_prompt_only` the answers themselves are left out."""
        super().__init__(model_name, logprobs, options)
        self._spell_logprobs, self._echoes, self._is_prompt_only = logprobs, echoes, is_prompt_only
        self.is_long = bool(echoes) and logprobs.is_asked
        self._begun: set[int] = set()

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Json:
        return super().reply(answers, replace(usage, num_completion=0) if self._is_prompt_only else usage)

    def begin(self, start: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        return ()  # the prompt comes with the first piece, which has its log-probabilities

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        yield self._chunk(self._choice(answer), usage)

    def _choice(self, answer: Answer) -> Json:
        if self._is_prompt_only:
            answer = replace(answer, part=Part(), logprobs=(), token_ids=())
        is_first = answer.index not in self._begun
        self._begun.add(answer.index)
        echo = self._echoes[answer.index] if self._echoes and is_first else ""
        told = answer.prompt if echo and self._spell_logprobs.is_asked else ()
        logprobs = self._spell_logprobs(answer.index, answer.logprobs, told) if told or answer.logprobs else None
        choice = {"index": answer.index, "text": echo + answer.part.content} | self._end_of(answer, logprobs)
        if self._options.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(self._spell_logprobs.texts, answer.prompt)
        if self._options.token_ids and is_first:
            choice["prompt_token_ids"] = list(answer.prompt_ids)
        return choice


class ChatFormat(OpenAIFormat):
    """The format of POST /v1/chat/completions. With `texts`, replies have the log-probabilities of the prompt."""

    ID_PREFIX, KIND, CHUNK_KIND = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model_name: str, logprobs: ChatLogprobs, options: ReplyOptions | None = None) -> None:
        super().__init__(model_name, logprobs, options)
        self._chat_logprobs = logprobs

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Json:
        told = {}
        if self._options.prompt_logprobs:
            told["prompt_logprobs"] = prompt_logprobs(self._chat_logprobs.texts, answers[0].prompt)
        return super().reply(answers, usage) | self._prompt(answers[0]) | told

    def begin(self, start: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        choice = self._delta(start, {"role": "assistant", "content": ""})
        return (self._chunk(choice, usage, self._prompt(start) if start.index == 0 else {}),)

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        part = answer.part
        # tokens whose text is still held back are content too, of no length yet
        said: Json = (
            {"content": part.content} if part.content or ((answer.logprobs or answer.origins) and not part) else {}
        )
        said |= _reasoning(part)
        if part.tool_calls:
            said["tool_calls"] = [{"index": call.index} | _call(call) for call in part.tool_calls]
        return (self._chunk(self._delta(answer, said), usage),)

    def _prompt(self, answer: Answer) -> Json:
        """Return the fields about the prompt, which all choices share."""
        return {"prompt_token_ids": list(answer.prompt_ids)} if self._options.token_ids else {}

    def _choice(self, answer: Answer) -> Json:
        part = answer.part
        content = None if part.tool_calls and not part.content else part.content
        message: Json = {"role": "assistant", "content": content, "refusal": None} | _reasoning(part)
        if part.tool_calls:
            message["tool_calls"] = [_call(call) for call in part.tool_calls]
        return {"index": answer.index, "message": message} | self._ended(answer)

    def _delta(self, answer: Answer, delta: Json) -> Json:
        return {"index": answer.index, "delta": delta} | self._ended(answer)

    def _ended(self, answer: Answer) -> Json:
        logprobs = self._chat_logprobs(answer.index, answer.logprobs) if answer.logprobs else None
        return self._end_of(answer, logprobs)


def _reasoning(part: Part) -> Json:
    """Return the fields of reasoning, under DeepSeek's name for it and under the one that vLLM has now."""
    return {"reasoning_content": part.reasoning, "reasoning": part.reasoning} if part.reasoning else {}


def _call(call: ToolCallPart) -> Json:
    """Return a call, or in a stream a piece of one. The first piece has id, type and name."""
    if not call.call_id:
        return {"function": {"arguments": call.arguments}}
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
