"""The syntax of the served model's answers: which text is reasoning, which calls tools, and by which grammar a tool
must be called. It is chosen by what the chat template writes, or by name."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specserve.chat_template import END_THINK, THINK, thinking_switch
from specserve.errors import RequestError
from specserve.serve.engine.interface import TokenizerLike
from specserve.serve.http.formats.grammars import answer_grammar
from specserve.serve.http.formats.probe import find_tool_ways, written_reasoning
from specserve.serve.http.formats.prompted import as_text
from specserve.serve.http.formats.reader import MakeParser, PlainText, Reader, Reading, Shape
from specserve.serve.http.formats.tools import GENERIC, NO_CALLS, TOOL_FORMATS, ToolFormat
from specserve.serve.http.openai.bodies import ChatBody
from specserve.serve.http.openai.chat import ChatMessage, FunctionTool, chosen_tools, template_messages
from specserve.serve.requests.request import GrammarSpec, SamplingParams
from specserve.serve.settings import ReasoningParser, ToolParser

logger = logging.getLogger(__name__)

THINK_MARKS: dict[ReasoningParser, tuple[str, str]] = {
    "think": (THINK, END_THINK),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "command": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
_HARMONY = next(each for each in TOOL_FORMATS if each.name == "harmony")
_NO_CALL = GrammarSpec("regex", "([^<](?s:.)*)?")  # content that begins as no call in the generic format does
_NUM_SPACES = 4  # tokens of space that a prompt may end with behind the mark that opens the reasoning


@dataclass(frozen=True)
class TemplateRequest:
    """The input of the template for a chat's body."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]  # as templates take them; none where the messages name them
    variables: dict[str, Any]
    callable_tools: Sequence[FunctionTool]  # those that the answer may call


class AnswerSyntax:
    """The syntax of one model's answers. Threads may share it."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        tool_parser: ToolParser,
        reasoning_parser: ReasoningParser,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.template
        self._switch = thinking_switch(self._template.mentions)
        self._ways = find_tool_ways(tool_parser, tokenizer)
        self.tool_format = self._ways.format
        self.reasoning, self._marks = choose_reasoning(reasoning_parser, tokenizer)
        logger.info("answers: calls of tools as %s, reasoning as %s", self.tool_format.name, self.reasoning)
        if self.tool_format is not NO_CALLS and self._ways.tools == "prompt":
            logger.info(
                "tools: the chat template writes none, or calls in no known format, so requests with tools get a "
                "prompt of the server's own that shows how to call them (%s); --tool-parser names another format",
                self.tool_format.name,
            )

    def question(self, body: ChatBody, thinks: bool | None = None) -> TemplateRequest:
        """Return the input of the template. `thinks`: whether the model is to reason, by whatever variable the template
        reads; None leaves it to the template. Raises RequestError for messages, tools, efforts or a choice that it does
        not know."""
        chosen = chosen_tools(body.tools, body.tool_choice)
        messages, tools = self.written(body.messages, body.tools if chosen else ())
        return TemplateRequest(messages, tools, self._variables(body, thinks), chosen)

    def written(
        self, messages: Sequence[ChatMessage], tools: Sequence[FunctionTool]
    ) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
        """Return messages and tools as this template takes them. Raises RequestError for messages that lack something,
        and for tools where there may be none."""
        if tools and self.tool_format is NO_CALLS and self._tokenizer.has_chat_template:  # else the prompt is refused
            raise RequestError(
                "this server was started with --tool-parser none, so requests may not have tools", param="tools"
            )
        turns, offered = template_messages(messages), [tool.for_template() for tool in tools]
        if self._ways.are_usual:
            return turns, offered
        shown = [] if self._ways.tools == "variable" else offered
        turns = as_text(turns, shown, self._ways, self.tool_format.wording_for(self._template))
        return turns, [] if shown else offered

    def reading(
        self, body: ChatBody, question: TemplateRequest, prompt_ids: Sequence[int], params: SamplingParams
    ) -> tuple[SamplingParams, MakeParser]:
        """Return the sampling options under which the answer to a rendered prompt can be read, and the parser that
        reads it. Raises RequestError."""
        tools = question.callable_tools
        tool_format = self.tool_format if tools else NO_CALLS
        if self.reasoning == "harmony":
            tool_format = _HARMONY
        marks = self._marks
        must_call = bool(tools) and body.tool_choice != "auto"
        if must_call and params.grammar is not None:
            raise RequestError(
                "tool_choice demands a call, and the answer is to follow another grammar: send one of them",
                param="tool_choice",
            )
        is_free = tool_format is GENERIC and not must_call and params.grammar is None and not params.ignore_eos
        if is_free:
            params = dataclasses.replace(params, grammar=_NO_CALL)
        is_plain = tool_format is NO_CALLS and marks is None
        if is_plain or (params.grammar is not None and params.grammar.kind == "lark"):
            return params, PlainText  # a client's own Lark grammar stands for the whole answer
        names = [*(marks or ()), *(f"{mark.partition('>')[0]}>" for mark in marks or ()), *tool_format.marks]
        ids = {name: i for name in names if (i := self._tokenizer.token_id(name)) is not None}
        hidden = {name: i for name, i in ids.items() if i in self._tokenizer.special_token_ids}
        is_open = marks is not None and opens_reasoning(self._tokenizer, prompt_ids, marks[0])
        if must_call or params.grammar is not None:
            grammar = answer_grammar(
                tool_format.wording_for(self._template),
                [tool.function for tool in tools],
                params.grammar,
                ids,
                is_parallel=body.parallel_tool_calls,
                think_marks=marks,
                is_thinking=is_open,
                has_both=is_free,
            )
            params = dataclasses.replace(params, grammar=dataclasses.replace(grammar, is_needed=not is_free))
        shown = dict.fromkeys((*params.shown_special_ids, *hidden.values()))
        params = dataclasses.replace(params, shown_special_ids=tuple(shown))

        def make_parser() -> Reader:
            return Reader(
                answer_format(tool_format, marks, is_thinking=is_open),
                tool_format.new_id,
                tools={tool.function.name: tool.function.schema_of_arguments for tool in tools},
                hidden=tuple(hidden),
                keeps_reasoning=body.include_reasoning,
                is_parallel=body.parallel_tool_calls,
            )

        return params, make_parser

    def _variables(self, body: ChatBody, thinks: bool | None) -> dict[str, Any]:
        """The variables of the template. Raises RequestError for an effort or a choice that it does not read."""
        given = {} if body.chat_template_kwargs is None else body.chat_template_kwargs.model_dump(exclude_none=True)
        if thinks is not None:
            given |= self._thinking(thinks)
        effort = body.reasoning_effort
        if effort is None:
            return given
        variables = self._effort(effort, "reasoning_effort")
        for name, value in variables.items():
            if given.get(name, value) != value:
                raise RequestError(
                    f"reasoning_effort {json.dumps(effort)} and chat_template_kwargs.{name} "
                    f"{json.dumps(given[name])} contradict each other: send one of them",
                    param="reasoning_effort",
                )
        return given | variables

    def _thinking(self, thinks: bool) -> dict[str, Any]:
        """The variables by which the model reasons, by default as much as it likes, or does not."""
        if thinks:
            return {self._switch: True} if self._switch else {}
        return self._effort("none", "thinking")

    def _effort(self, effort: str, param: str) -> dict[str, Any]:
        """The variables by which the model reasons so much. Raises RequestError, which names the field `param`, where
        there are none and it would reason otherwise."""
        if self._template.reads_variable("reasoning_effort") and not (effort == "none" and self._switch):
            return {"reasoning_effort": effort}
        if self._switch:
            return {self._switch: effort != "none"}
        if effort not in ("none", "medium") or (effort == "none" and self.reasoning != "none"):
            raise RequestError(
                f"the chat template of this model has no switch for reasoning, so {param} would change nothing; leave "
                "it out",
                param=param,
            )
        return {}


def opens_reasoning(tokenizer: TokenizerLike, prompt_ids: Sequence[int], mark: str) -> bool:
    """Return whether a prompt has opened the reasoning by this mark, as the templates of models that always reason
    do."""
    most = _NUM_SPACES + len(mark.encode())  # a token has at least a byte
    end = tokenizer.decode(prompt_ids[-most:], skip_special_tokens=False)
    return end.rstrip().endswith(mark)


Marks = tuple[str, str]  # around reasoning


def choose_reasoning(
    name: ReasoningParser, tokenizer: TokenizerLike
) -> tuple[ReasoningParser | Literal["template"], Marks | None]:
    """The way of marking reasoning that has this name, or that the template writes, with its marks; "template" where
    the marks have no name here. A template that writes none, as those do that leave it out of earlier answers, shows
    it by its own words."""
    if name != "auto" or not tokenizer.has_chat_template:
        name = "none" if name == "auto" else name
        return name, THINK_MARKS.get(name)
    template = tokenizer.template
    if template.mentions(_HARMONY.sign):
        return "harmony", None
    if written := written_reasoning(tokenizer):
        before, behind = written
        for each, marks in THINK_MARKS.items():
            if behind.startswith(marks[1]) and (before.endswith(marks[0]) or not before):
                return each, marks
        end = behind.split()[0]
        begin = before.split()[-1] if before else end.replace("/", "", 1)
        if begin != end and not begin[0].isalnum() and not end[0].isalnum():
            return "template", (begin, end)
    shown: list[ReasoningParser] = [each for each, (_, end) in THINK_MARKS.items() if template.mentions(end)]
    return (shown[0], THINK_MARKS[shown[0]]) if shown else ("none", None)


def answer_format(
    tool_format: ToolFormat, marks: tuple[str, str] | None, *, is_thinking: bool = False
) -> Callable[[Reader], Reading[None]]:
    """The format of answers that may begin with reasoning between two marks (none where there are none), of which the
    prompt may have the first, and go on as the format of calls says."""
    if not marks:
        return tool_format.read
    return functools.partial(_read_thinking, marks, is_thinking, tool_format.read)


def _read_thinking(
    marks: tuple[str, str], is_thinking: bool, then: Callable[[Reader], Reading[None]], reader: Reader
) -> Reading[None]:
    begin, end = marks
    has_begun = is_thinking or (yield from reader.match(_beginning(begin)))
    if not has_begun:
        reader.unopened = marks
    elif (yield from reader.text_until((end,), reader.think)):
        reader.end_thinking()
    yield from then(reader)


@functools.cache
def _beginning(mark: str) -> Shape:
    return Shape(r"\s*" + "".join(char if char.isalnum() else f"\\{char}" for char in mark.strip()))
