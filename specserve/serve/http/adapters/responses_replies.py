"""The replies of POST /v1/responses: a response object, or the events by which it grows."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, with_config

from specserve.serve.http.adapters.responses_bodies import ResponsesBody
from specserve.serve.http.adapters.translation import Block, BlockEvent, Blocks
from specserve.serve.http.openai.logprobs import ChosenLogprob, TokenTexts, chat_logprobs
from specserve.serve.http.openai.replies import (
    Answer,
    CompletionDetails,
    PromptDetails,
    ReplyFormat,
    ReplyVersion,
    Usage,
    event,
    version_of,
)
from specserve.serve.http.transport.errors import Error
from specserve.serve.http.transport.json_codec import Json, ReplyObject

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
_ID_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}
_DELTA = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class OutputText(ReplyObject):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[ChosenLogprob]


class ReasoningText(ReplyObject):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputItem(ReplyObject):
    """The members that all items have."""

    id: str
    status: ItemStatus


class OutputMessage(OutputItem):
    """A message of the model."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(OutputItem):
    """The reasoning of the model."""

    type: Literal["reasoning"]
    summary: list[Json]
    content: list[ReasoningText]


class OutputCall(OutputItem):
    """A tool that it calls; `arguments` are JSON."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResponseUsage(ReplyObject):
    """Token counts."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ResponseError(ReplyObject):
    """The reason why a response failed."""

    code: str
    message: str


class ResponseHead(ReplyVersion):
    """The members of a response that never change, and the version of the weights at its end."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str


class Response(ResponseHead):
    """POST /v1/responses: the answer, and what the body asked for."""

    status: ResponseStatus
    error: ResponseError | None
    incomplete_details: Json | None
    output: list[Annotated[OutputMessage | OutputReasoning | OutputCall, Discriminator("type")]]
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: Json
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: Json
    service_tier: str
    store: Literal[False]
    temperature: float | None
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | None


@with_config(ConfigDict(extra="allow", strict=True))
class ResponseEvent(ReplyObject):
    """One event of a streamed response; its other members depend on its type, as in OpenAI's API."""

    type: str
    sequence_number: int
    response: NotRequired[Response]


class ResponsesFormat(ReplyFormat):
    """Spells the one answer to a body of /v1/responses as output items."""

    def __init__(self, model_name: str, body: ResponsesBody, texts: TokenTexts) -> None:
        self._body, self._texts = body, texts
        self._blocks = Blocks()
        self._ids: list[str] = []  # of the items
        self._logprobs: list[ChosenLogprob] = []  # of the text
        self._status: Literal["completed", "incomplete"] = "completed"  # of the answer at its end
        self._num_events = 0
        self.is_long = body.has_logprobs  # the events of the end have all of them
        self._head: ResponseHead = {
            "id": f"resp_{body.request_id or uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model_name,
        }

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Response:
        for _ in self._grow(answers[0]):
            pass
        return self._response(self._status, usage)

    def begin(self, start: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        for kind, block, text in self._grow(answer):
            if kind == "start":
                yield from self._start(block)
            elif kind == "delta":
                where = self._where(block)
                if block.kind == "text":
                    where["logprobs"] = self._tokens(answer)
                yield self._event(f"{_DELTA[block.kind]}.delta", **where, delta=text)
            else:
                yield from self._stop(block)

    def end(self, usage: Usage) -> Iterable[bytes]:
        yield self._event(f"response.{self._status}", response=self._response(self._status, usage))

    def failure(self, error: Error) -> Iterable[bytes]:
        details = error["error"]
        response = self._response("failed")
        response["error"] = {"code": details["code"] or details["type"], "message": details["message"]}
        yield self._event("response.failed", response=response)

    def _grow(self, answer: Answer) -> Iterator[BlockEvent]:
        self._logprobs += self._tokens(answer)
        for kind, block, text in self._blocks.push(answer.part):
            if kind == "start":
                self._ids.append(f"{_ID_PREFIX[block.kind]}_{uuid.uuid4().hex}")
            yield kind, block, text
        if answer.finish_reason is not None:
            self._head = {**self._head, **version_of([answer])}
            if answer.finish_reason == "length":
                self._status = "incomplete"
            yield from self._blocks.finish()

    def _tokens(self, answer: Answer) -> list[ChosenLogprob]:
        return chat_logprobs(self._texts, answer.logprobs)

    def _start(self, block: Block) -> Iterator[bytes]:
        item = self._item(block, "in_progress")
        if item["type"] != "function_call":
            item["content"] = []
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._event("response.content_part.added", **self._where(block), part=self._part(block))

    def _stop(self, block: Block) -> Iterator[bytes]:
        where = self._where(block)
        done: Json = {"text": block.text}
        if block.kind == "call":
            done = {"arguments": block.text, "name": block.name}
        elif block.kind == "text":
            done["logprobs"] = self._logprobs
        yield self._event(f"{_DELTA[block.kind]}.done", **where, **done)
        if block.kind != "call":
            yield self._event("response.content_part.done", **where, part=self._part(block))
        item = self._item(block, self._item_status(block))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _where(self, block: Block) -> Json:
        where: Json = {"item_id": self._ids[block.index], "output_index": block.index}
        if block.kind != "call":
            where["content_index"] = 0
        return where

    def _event(self, name: str, /, **members: Any) -> bytes:
        payload = {"type": name, "sequence_number": self._num_events, **members}
        self._num_events += 1
        return event(payload, name, is_long=self.is_long or "response" in members)  # such events repeat the request

    def _part(self, block: Block) -> Any:  # as the content of the item has it
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs if block.text else []
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _item(self, block: Block, status: ItemStatus) -> OutputMessage | OutputReasoning | OutputCall:
        head: OutputItem = {"id": self._ids[block.index], "status": status}
        if block.kind == "call":
            call_id, name, arguments = block.call_id, block.name, block.text
            return {**head, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": [self._part(block)]}
        return {**head, "type": "message", "role": "assistant", "content": [self._part(block)]}

    def _item_status(self, block: Block) -> ItemStatus:
        return self._status if block is self._blocks.blocks[-1] else "completed"

    def _response(self, status: ResponseStatus, usage: Usage | None = None) -> Response:
        body = self._body
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(block, self._item_status(block)) for block in self._blocks.blocks],
            "usage": None if usage is None else self._usage(usage),
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": body.service_tier or "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def _usage(self, usage: Usage) -> ResponseUsage:
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached},
            "output_tokens": usage.num_completion,
            "output_tokens_details": usage.completion_details(),
            "total_tokens": usage.num_prompt + usage.num_completion,
        }
