"""Answers in conversations with tools, asked for and read as the server does.

The target may call other tools than the data set's author did. The results that were recorded are given to it as long
as it calls what was called then, with the same arguments. Where it does not, the conversation ends with its own calls:
nobody has run those.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from specserve.answers.questions import Job, Stuck, digest
from specserve.errors import RequestError
from specserve.serve.engine.interface import TokenizerLike
from specserve.serve.http.formats.reader import Part, Reader
from specserve.serve.http.formats.reasoning import AnswerSyntax
from specserve.serve.http.openai.bodies import ChatBody
from specserve.serve.requests.request import SamplingParams

OTHER_CALLS = "calls that were not recorded"
BROKEN_CALLS = "calls whose arguments are no JSON object"
UNFINISHED_CALL = "a call does not end within max_tokens"
IN_SYSTEM = "the chat template has tools in its system message, which rows cannot hold"


class ToolTurns:
    """The way in which a target is offered tools and calls them."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer, self._syntax = tokenizer, AnswerSyntax(tokenizer, "auto", "auto")

    def render(self, job: Job) -> list[int]:
        """Return the token ids of the prompt for a job's next answer. Raises RequestError for what a server would
        refuse."""
        body = self._body(job)
        question = self._syntax.question(body)
        return self._tokenizer.render_chat(question.messages, tools=question.tools, template_kwargs=question.variables)

    def reading(self, job: Job, params: SamplingParams) -> SamplingParams:
        """Return the options under which the answer to a job's prompt can be read by `read`. Raises RequestError."""
        body = self._body(job)
        params, job.make_parser = self._syntax.reading(body, self._syntax.question(body), job.prompt, params)
        return params

    def read(self, job: Job, text: str, *, is_cut: bool) -> tuple[Part, bool]:
        """Return what an answer's text means, and whether it breaks off in reasoning. Raises Stuck where it breaks off
        in a call, or its calls cannot be kept."""
        assert job.make_parser is not None
        parser = job.make_parser()
        part = parser.push(text) + parser.finish()
        if is_cut and part.tool_calls:
            raise Stuck(UNFINISHED_CALL)
        if any(arguments is None for _, arguments in _called(part)):
            raise Stuck(BROKEN_CALLS)
        return part, isinstance(parser, Reader) and parser.is_thinking

    def messages(self, job: Job, part: Part, text: str, *, keeps_reasoning: bool) -> Iterator[dict[str, Any]]:
        """Yield the messages that may stand for an answer: with its content as it was read, and where nothing stands
        behind it with the space that it was written with."""
        own = dict[str, Any]()
        if keeps_reasoning and part.reasoning:
            own["reasoning_content"] = part.reasoning
        if part.tool_calls:
            own["tool_calls"] = [
                {
                    "id": _call_id(job, i, call.call_id, text),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments or "{}"},
                }
                for i, call in enumerate(part.tool_calls)
            ]
        written = part.content
        if written and not part.tool_calls:
            written = text[text.rindex(written) :] if written in text else written
        for content in dict.fromkeys((part.content, written)):
            yield {"role": "assistant", "content": content, **own}

    def go_on(self, job: Job) -> None:
        """Have the results in the next messages of a job answer the calls in its last one. Raises Stuck where these are
        not the calls that were recorded."""
        recorded, calls = job.calls.pop(0), job.messages[-1].get("tool_calls", [])
        if [_meaning(call) for call in recorded] != [_meaning(call) for call in calls]:
            raise Stuck(OTHER_CALLS)
        ids = {was["id"]: now["id"] for was, now in zip(recorded, calls, strict=True) if "id" in was}
        in_turn = iter(calls)
        for message in job.asked[0]:
            if message["role"] == "tool":
                now = next(in_turn, calls[-1])
                message["tool_call_id"] = ids.get(message.get("tool_call_id", ""), now["id"])

    def written(self, messages: Sequence[Mapping[str, Any]], job: Job) -> dict[str, Any]:
        """Return messages, and the tools of a job, as fields of a row that training renders as the server does. Raises
        Stuck where no row can hold them."""
        body = self._body(job, messages)
        turns, tools = self._syntax.written(body.messages, body.tools)
        if any("tools" in turn for turn in turns):
            raise Stuck(IN_SYSTEM)
        kept = [{name: turn[name] for name in turn if name not in ("reasoning", "thinking")} for turn in turns]
        return {"messages": kept} | ({"tools": list(tools)} if tools else {})

    def _body(self, job: Job, messages: Sequence[Mapping[str, Any]] = ()) -> ChatBody:
        tools = [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in job.row.tool_dicts()
        ]
        fields = {"messages": list(messages or job.messages), "tools": tools}
        if job.template_kwargs:
            fields["chat_template_kwargs"] = job.template_kwargs
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise RequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _called(part: Part) -> Iterator[tuple[str, dict[str, Any] | None]]:
    for call in part.tool_calls:
        yield call.name, _loaded(call.arguments or "{}")


def _meaning(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Return what a call asks for: the tool, and the values of its arguments in whatever order and spacing."""
    function = call["function"]
    arguments = function["arguments"]
    return function["name"], _loaded(arguments) if isinstance(arguments, str) else arguments


def _loaded(arguments: str) -> dict[str, Any] | None:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _call_id(job: Job, i: int, call_id: str, text: str) -> str:
    """Return the id of an answer's call: as the target wrote it, or else one that is the same in every run, as long as
    the server's."""
    if call_id in text:
        return call_id
    return digest(job.key, len(job.finish_reasons), i)[: len(call_id)]
