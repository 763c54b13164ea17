"""The replies of POST /v1/responses: a response object, or the events by which it grows."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from specserve.serve.http.adapters.blocks import Block, BlockEvent, Blocks
from specserve.serve.http.adapters.responses_bodies import ResponsesBody
from specserve.serve.http.openai.logprobs import ChatLogprobs
from specserve.serve.http.openai.replies import Answer, Json, Usage, event

_ID_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}
_DELTA = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class ResponsesFormat:
    """Spells the one answer to a body of /v1/responses as output items."""

    def __init__(self, model_name: str, body: ResponsesBody, logprobs: ChatLogprobs) -> None:
        self._body = body
        self._spell_logprobs = logprobs
        self._blocks = Blocks()
        self._ids: list[str] = []  # of the items
        self._logprobs: list[Any] = []  # of the text
        self._is_cut = False  # by a length
        self._num_events = 0
        self.is_long = body.has_logprobs  # the events of the end tell all of them
        self._head = {
            "id": f"resp_{body.request_id or uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model_name,
        }

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Json:
        for _ in self._grow(answers[0]):
            pass
        return self._response(self._final_status(), usage)

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
        status = self._final_status()
        yield self._event(f"response.{status}", response=self._response(status, usage))

    def failure(self, error: Json) -> Iterable[bytes]:
        told = error["error"]
        what = {"code": told["code"] or told["type"], "message": told["message"]}
        yield self._event("response.failed", response=self._response("failed") | {"error": what})

    def _grow(self, answer: Answer) -> Iterator[BlockEvent]:
        self._logprobs += self._tokens(answer)
        for kind, block, text in self._blocks.push(answer.part):
            if kind == "start":
                self._ids.append(f"{_ID_PREFIX[block.kind]}_{uuid.uuid4().hex}")
            yield kind, block, text
        if answer.finish_reason is not None:
            self._is_cut = answer.finish_reason == "length"
            yield from self._blocks.finish()

    def _tokens(self, answer: Answer) -> list[Json]:
        return self._spell_logprobs(0, answer.logprobs)["content"] if answer.logprobs else []

    def _start(self, block: Block) -> Iterator[bytes]:
        item = self._item(block, "in_progress")
        item |= {"content": []} if "content" in item else {}
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._event("response.content_part.added", **self._where(block), part=self._part(block))

    def _stop(self, block: Block) -> Iterator[bytes]:
        where = self._where(block)
        if block.kind == "call":
            done = {"arguments": block.text, "name": block.name}
        else:
            done = {"text": block.text} | ({"logprobs": self._logprobs} if block.kind == "text" else {})
        yield self._event(f"{_DELTA[block.kind]}.done", **where, **done)
        if block.kind != "call":
            yield self._event("response.content_part.done", **where, part=self._part(block))
        item = self._item(block, self._item_status(block))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _where(self, block: Block) -> Json:
        where: Json = {"item_id": self._ids[block.index], "output_index": block.index}
        return where if block.kind == "call" else where | {"content_index": 0}

    def _event(self, name: str, /, **members: Any) -> bytes:
        payload = {"type": name, "sequence_number": self._num_events} | members
        self._num_events += 1
        return event(payload, name, is_long=self.is_long or "response" in members)  # which tells the request back

    def _part(self, block: Block) -> Json:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs if block.text else []
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _item(self, block: Block, status: str) -> Json:
        head = {"id": self._ids[block.index], "status": status}
        if block.kind == "call":
            said = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return head | {"type": "function_call"} | said
        content = [self._part(block)]
        if block.kind == "reasoning":
            return head | {"type": "reasoning", "summary": [], "content": content}
        return head | {"type": "message", "role": "assistant", "content": content}

    def _item_status(self, block: Block) -> str:
        return "incomplete" if self._is_cut and block is self._blocks.blocks[-1] else "completed"

    def _final_status(self) -> str:
        return "incomplete" if self._is_cut else "completed"

    def _response(self, status: str, usage: Usage | None = None) -> Json:
        body = self._body
        return self._head | {
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

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached},
            "output_tokens": usage.num_completion,
            "output_tokens_details": usage.as_json()["completion_tokens_details"],
            "total_tokens": usage.num_prompt + usage.num_completion,
        }
