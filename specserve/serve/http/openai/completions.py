"""The replies of POST /v1/completions and /v1/chat/completions, whole and as chunks of a stream."""

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, NotRequired

from specserve.serve.http.formats.reader import Part, ToolCallPart
from specserve.serve.http.openai.bodies import CompletionBody, SamplingBody, StreamOptions
from specserve.serve.http.openai.logprobs import (
    ChatLogprobLists,
    CompletionLogprobs,
    PromptLogprobs,
    TextPieces,
    TokenLists,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
)
from specserve.serve.http.openai.replies import (
    Answer,
    Ending,
    ReplyFormat,
    ReplyMetrics,
    ReplyVersion,
    TokenCounts,
    TokenUsage,
    Usage,
    event,
    version_of,
)
from specserve.serve.http.transport.json_codec import ENCODER, ReplyObject, encoded

_MARK = "<text>"  # stands for the text of a piece


class DraftDepths(ReplyObject):
    """The origin of each token: the depth at which it was drafted, or 0 for the target's own."""

    tokens: list[str]
    depths: list[int]


class LastTree(ReplyObject):
    """The tree of the last step: nodes with their parents, and the accepted ones."""

    tokens: list[str]
    parents: Sequence[int]
    accepted: Sequence[int]


class ChoiceEnd(ReplyObject):
    """The members that every choice has when it has ended, and in a stream also before."""

    finish_reason: Ending | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    draft_depths: NotRequired[DraftDepths]
    tree: NotRequired[LastTree]


class NamedVersion(ReplyObject):
    """The version of the weights in SGLang's words."""

    weight_version: str


class ReplyVersions(ReplyVersion):
    """The same also under SGLang's name."""

    metadata: NotRequired[NamedVersion]


class ReplyHead(ReplyVersions):
    """The head of a reply, or of a chunk."""

    id: str
    created: int
    model: str


class ReplyUsage(ReplyObject):
    """The counts of a whole reply."""

    usage: TokenUsage
    metrics: NotRequired[ReplyMetrics]


class ChunkUsage(ReplyObject):
    """The counts of a chunk, where they were asked for."""

    usage: NotRequired[TokenUsage | TokenCounts | None]
    metrics: NotRequired[ReplyMetrics]


class CompletionChoice(ChoiceEnd):
    """One completion, or in a stream its text since the last chunk."""

    index: int
    text: str
    logprobs: TokenLists | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class Completion(ReplyHead, ReplyUsage):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(ReplyHead, ChunkUsage):
    """One event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class SaidFunction(ReplyObject):
    """`arguments` are JSON."""

    name: str
    arguments: str


class SaidCall(ReplyObject):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: SaidFunction


class FunctionDelta(ReplyObject):
    """The name comes first; `arguments` are the next piece of the JSON."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(ReplyObject):
    """A piece of a call; the first has its id, type and name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Reasoning(ReplyObject):
    """The reasoning of a message, under DeepSeek's name for it and under the one that vLLM has now."""

    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class SaidMessage(Reasoning):
    """The message of the model: content is null where it is calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[SaidCall]]


class ChatDelta(Reasoning):
    """The next part of a message; the first has its role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChoice(ChoiceEnd):
    """One answer."""

    index: int
    message: SaidMessage
    logprobs: ChatLogprobLists | None


class ChatChunkChoice(ChoiceEnd):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobLists | None


class ChatPrompt(ReplyObject):
    """The fields about the prompt, which all choices share."""

    prompt_token_ids: NotRequired[list[int]]


class ChatCompletion(ReplyHead, ReplyUsage, ChatPrompt):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatChunk(ReplyHead, ChunkUsage, ChatPrompt):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class OpenAIFormat(ReplyFormat):
    """The common part of the formats of completions and chat."""

    can_abort = True
    ID_PREFIX: ClassVar[str]
    CHUNK_KIND: ClassVar[str]

    def __init__(self, model_name: str, body: SamplingBody, texts: TokenTexts) -> None:
        self._body, self._texts = body, texts
        self._stream_options = body.stream_options or StreamOptions()
        name = body.request_id or uuid.uuid4().hex
        self._head: ReplyHead = {"id": f"{self.ID_PREFIX}-{name}", "created": int(time.time()), "model": model_name}
        # the beginning of all chunks of a stream, encoded once
        self._chunk_head = ENCODER.encode({**self._head, "object": self.CHUNK_KIND}).removesuffix("}")
        self._pieces = defaultdict[int, TextPieces](lambda: TextPieces(self._texts))  # by choice
        # chunks that have text alone differ in it alone: what stands around it is spelled once for each choice
        self._has_frames = not (body.return_token_ids or self._stream_options.continuous_usage_stats)
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        if not (self._has_frames and answer.is_text):
            return (self._piece(answer, usage),)
        if answer.index not in self._frames:
            chunk = self._piece(replace(answer, part=Part(_MARK)), usage)
            before, _, after = chunk.rpartition(_MARK.encode())  # the last, for a client can name its request so
            self._frames[answer.index] = before, after
        before, after = self._frames[answer.index]
        return (before + ENCODER.encode(answer.part.content)[1:-1].encode() + after,)

    def _piece(self, answer: Answer, usage: Callable[[], Usage]) -> bytes:
        """Return the chunk of a piece."""
        raise NotImplementedError

    def end(self, usage: Usage) -> Iterable[bytes]:
        if self._stream_options.include_usage:
            yield event({**self._head, "object": self.CHUNK_KIND, "choices": [], **_counted(usage)})
        yield event("[DONE]")

    def _chunk(
        self,
        answer: Answer,
        choice: CompletionChoice | ChatChunkChoice,
        usage: Callable[[], Usage],
        prompt: ChatPrompt | None = None,
    ) -> bytes:
        """Return a chunk about one choice. The first one of a stream has the fields about the prompt."""
        counts: ChunkUsage = {}
        if self._stream_options.include_usage:
            counts["usage"] = usage().counts() if self._stream_options.continuous_usage_stats else None
        tail = {"choices": [choice], **counts, **(prompt or {}), **_versions([answer])}
        return event(
            f"{self._chunk_head},{encoded(tail, is_long=self.is_long or prompt is not None).removeprefix('{')}"
        )

    def _end_of(self, answer: Answer) -> ChoiceEnd:
        end: ChoiceEnd = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        if self._body.return_token_ids:
            end["token_ids"] = list(answer.token_ids)
        if answer.origins:
            tokens = [self._pieces[answer.index].push(token_id) for token_id, _ in answer.origins]
            end["draft_depths"] = {"tokens": tokens, "depths": [depth for _, depth in answer.origins]}
        if (tree := answer.tree) is not None:
            tokens = [self._texts[token_id] for token_id in tree.token_ids]
            end["tree"] = {"tokens": tokens, "parents": tree.parents, "accepted": tree.accepted}
        return end


def _versions(answers: Sequence[Answer]) -> ReplyVersions:
    name = version_of(answers).get("system_fingerprint")
    return {"system_fingerprint": name, "metadata": {"weight_version": name}} if name else {}


def _counted(usage: Usage) -> ReplyUsage:
    counted: ReplyUsage = {"usage": usage.as_json()}
    if usage.metrics is not None:
        counted["metrics"] = usage.metrics
    return counted


class CompletionFormat(OpenAIFormat):
    """The format of POST /v1/completions. With `echoes`, the text of each choice's prompt, every answer begins with
    it: the prompt comes with the first piece, which has its log-probabilities."""

    ID_PREFIX, CHUNK_KIND = "cmpl", "text_completion"

    def __init__(self, model_name: str, body: CompletionBody, texts: TokenTexts, echoes: Sequence[str] = ()) -> None:
        super().__init__(model_name, body, texts)
        self._echoes, self._has_logprobs, self._is_prompt_only = echoes, body.logprobs is not None, body.is_prompt_only
        self._spell_logprobs = CompletionLogprobs(
            texts,
            as_token_ids=body.return_tokens_as_token_ids,
            skip_special_tokens=body.skip_special_tokens,
            echoes=echoes,
        )
        self.is_long = bool(echoes) and self._has_logprobs
        self._has_frames = self._has_frames and not echoes and not self._is_prompt_only
        self._begun: set[int] = set()

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Completion:
        choices = [self._choice(answer) for answer in answers]
        counted = _counted(self._shown(usage))
        return {**self._head, "object": "text_completion", "choices": choices, **counted, **_versions(answers)}

    def _piece(self, answer: Answer, usage: Callable[[], Usage]) -> bytes:
        return self._chunk(answer, self._choice(answer), lambda: self._shown(usage()))

    def end(self, usage: Usage) -> Iterable[bytes]:
        return super().end(self._shown(usage))

    def _shown(self, usage: Usage) -> Usage:
        """Return the counts of what the client gets: nothing is generated for one that asks for the prompt alone."""
        return replace(usage, num_completion=0) if self._is_prompt_only else usage

    def _choice(self, answer: Answer) -> CompletionChoice:
        if self._is_prompt_only:
            answer = replace(answer, part=Part(), logprobs=(), token_ids=(), origins=(), tree=None, stop_reason=None)
            if answer.finish_reason not in (None, "abort"):
                answer = replace(answer, finish_reason="length")
        is_first = answer.index not in self._begun
        self._begun.add(answer.index)
        echo = self._echoes[answer.index] if self._echoes and is_first else ""
        prompt = answer.prompt if echo and self._has_logprobs else ()
        logprobs = None
        if prompt or answer.logprobs:
            logprobs = self._spell_logprobs(answer.index, answer.logprobs, prompt)
        choice: CompletionChoice = {
            "index": answer.index,
            "text": echo + answer.part.content,
            "logprobs": logprobs,
            **self._end_of(answer),
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._texts, answer.prompt)
        if self._body.return_token_ids and is_first:
            choice["prompt_token_ids"] = list(answer.prompt_ids)
        return choice


class ChatFormat(OpenAIFormat):
    """The format of POST /v1/chat/completions."""

    ID_PREFIX, CHUNK_KIND = "chatcmpl", "chat.completion.chunk"

    def reply(self, answers: Sequence[Answer], usage: Usage) -> ChatCompletion:
        whole: ChatCompletion = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(answer) for answer in answers],
            **_counted(usage),
            **self._prompt(answers[0]),
            **_versions(answers),
        }
        if self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self._texts, answers[0].prompt)
        return whole

    def begin(self, start: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:
        choice = self._delta(start, {"role": "assistant", "content": ""})
        return (self._chunk(start, choice, usage, self._prompt(start) if start.index == 0 else {}),)

    def _piece(self, answer: Answer, usage: Callable[[], Usage]) -> bytes:
        part = answer.part
        delta: ChatDelta = {}
        # tokens whose text is still held back are content too, of no length yet
        if part.content or ((answer.logprobs or answer.origins) and not part):
            delta["content"] = part.content
        delta = {**delta, **_reasoning(part)}
        if part.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in part.tool_calls]
        return self._chunk(answer, self._delta(answer, delta), usage)

    def _prompt(self, answer: Answer) -> ChatPrompt:
        return {"prompt_token_ids": list(answer.prompt_ids)} if self._body.return_token_ids else {}

    def _choice(self, answer: Answer) -> ChatChoice:
        part = answer.part
        content = None if part.tool_calls and not part.content else part.content
        message: SaidMessage = {"role": "assistant", "content": content, "refusal": None, **_reasoning(part)}
        if part.tool_calls:
            message["tool_calls"] = [_call(call) for call in part.tool_calls]
        return {"index": answer.index, "message": message, "logprobs": self._logprobs(answer), **self._end_of(answer)}

    def _delta(self, answer: Answer, delta: ChatDelta) -> ChatChunkChoice:
        return {"index": answer.index, "delta": delta, "logprobs": self._logprobs(answer), **self._end_of(answer)}

    def _logprobs(self, answer: Answer) -> ChatLogprobLists | None:
        if not answer.logprobs:
            return None
        as_token_ids = self._body.return_tokens_as_token_ids
        return {"content": chat_logprobs(self._texts, answer.logprobs, as_token_ids=as_token_ids), "refusal": None}


def _reasoning(part: Part) -> Reasoning:
    return {"reasoning_content": part.reasoning, "reasoning": part.reasoning} if part.reasoning else {}


def _call(call: ToolCallPart) -> SaidCall:
    function: SaidFunction = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _call_delta(call: ToolCallPart) -> ToolCallDelta:
    """Return a piece of a call. The first piece has id, type and name."""
    if call.call_id:
        function: FunctionDelta = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.call_id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}
