"""Grammars by which an answer must call tools, or be what a response format says, and may reason before. A call is
written in the way of its format in `tools`, with each tool's own arguments. The grammars are in llguidance's
dialect of Lark, where <[7]> is the token of id 7."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specserve.errors import RequestError
from specserve.serve.http.formats.tools import argument_types
from specserve.serve.http.openai.chat import FunctionDefinition
from specserve.serve.requests.request import GrammarSpec

# How JSON is spaced: as chat templates write it, and without a place where a model could write spaces for ever.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class _Wording:
    """The text around calls and their arguments. NAME and KEY are replaced by those of the tool and of the
    argument."""

    begin: str
    end: str
    between: str = "\n"
    first: str = ""  # before all calls
    last: str = ""  # after them
    begin_value: str = ""  # of an argument; empty where all arguments are one JSON object
    end_value: str = ""
    is_alone: bool = False  # an answer has one call


_WORDINGS: dict[str, _Wording] = {
    "none": _Wording("", ""),
    "hermes": _Wording('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    "llama3": _Wording('{"name": "NAME", "parameters": ', "}", is_alone=True),  # its templates take no second call
    "mistral": _Wording("[TOOL_CALLS]NAME[ARGS]", "", between=""),
    "mistral list": _Wording('{"name": "NAME", "arguments": ', "}", ", ", first="[TOOL_CALLS][", last="]"),
    "deepseek": _Wording(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        first="<｜tool▁calls▁begin｜>",
        last="<｜tool▁calls▁end｜>",
    ),
    "deepseek bare": _Wording(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        between="",
        first="<｜tool▁calls▁begin｜>",
        last="<｜tool▁calls▁end｜>",
    ),
    "harmony": _Wording("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", is_alone=True),
    "glm": _Wording(
        "<tool_call>NAME\n",
        "</tool_call>",
        begin_value="<arg_key>KEY</arg_key>\n<arg_value>",
        end_value="</arg_value>\n",
    ),
    "qwen3-coder": _Wording(
        "<tool_call>\n<function=NAME>\n",
        "</function>\n</tool_call>",
        begin_value="<parameter=KEY>\n",
        end_value="\n</parameter>\n",
    ),
}
_HARMONY_THINKING = "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"
_HARMONY_CONTENT = "<|channel|>final<|message|>"


def answer_grammar(
    wording: str,
    tools: Sequence[FunctionDefinition],
    content: GrammarSpec | None,
    mark_ids: Mapping[str, int],
    *,
    is_parallel: bool = True,
    think_marks: tuple[str, str] | None = None,
    is_thinking: bool = False,
) -> GrammarSpec:
    """Return the grammar of answers that call one of the tools, or more where that is allowed, or have such content
    (any kind but Lark). Raises RequestError for a schema that is no JSON.

    `wording` is that of `ToolFormat.wording_for`, "none" where there is no format of calls. `mark_ids` are those marks
    of the format that are tokens of their own. Between `think_marks` the answer may reason before; `is_thinking` says
    that the prompt has begun to.
    """
    own = _WORDINGS[wording]
    rules = _Rules(own, mark_ids)
    is_harmony = wording == "harmony"
    thinking = rules.thinking(is_harmony, think_marks, is_thinking)
    ways = []
    if tools:
        rules.add("call", " | ".join(rules.call(i, tool) for i, tool in enumerate(tools)))
        more = f"({rules.spell(own.between)} call)*" if is_parallel and not own.is_alone else ""
        ways.append(rules.add("calls", f"{rules.spell(own.first)} call {more} {rules.spell(own.last)}"))
    if content is not None:
        before = rules.spell(_HARMONY_CONTENT) if is_harmony else ""
        ways.append(f"{before} {rules.add('content', _content(content))}")
    return GrammarSpec("lark", "\n".join([f"start: {thinking} ({' | '.join(ways)})", *rules.lines]))


def _content(spec: GrammarSpec) -> str:
    match spec.kind:
        case "json_schema":
            try:
                return "%json " + json.dumps(json.loads(spec.text))
            except (ValueError, RecursionError) as error:
                raise RequestError(f"the grammar cannot be used: {error}", param="grammar") from None
        case "choice":
            return " | ".join(map(_quoted, json.loads(spec.text)))
        case "regex":
            return "/" + spec.text.replace("\n", "\\n").replace("\\/", "/").replace("/", "\\/") + "/"
        case "lark":
            raise ValueError("a Lark grammar stands for a whole answer")


class _Rules:
    """The rules of one grammar."""

    def __init__(self, wording: _Wording, mark_ids: Mapping[str, int]) -> None:
        self._wording = wording
        self._mark_ids = mark_ids
        marks = sorted(mark_ids, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, marks)) or '(?!)'})")
        self.lines: list[str] = []

    def add(self, name: str, rule: str) -> str:
        self.lines.append(f"{name}: {rule}")
        return name

    def spell(self, text: str) -> str:
        """Return the text as grammars have it: strings, and special tokens by their ids."""
        pieces = (piece for piece in self._marks.split(text) if piece)
        return " ".join(f"<[{self._mark_ids[each]}]>" if each in self._mark_ids else _quoted(each) for each in pieces)

    def text_until(self, name: str, mark: str) -> str:
        """Add a rule for any text up to the mark, and the mark itself."""
        if mark in self._mark_ids:
            return self.add(name, f"/(?s:.*)/ {self.spell(mark)}")
        return self.add(f"{name}[suffix={_quoted(mark)}]", "/(?s:.*)/").partition("[")[0]

    def thinking(self, is_harmony: bool, marks: tuple[str, str] | None, is_thinking: bool) -> str:
        """Return the rule for the reasoning that may come before calls and content."""
        if is_harmony:
            begin, end, then = _HARMONY_THINKING
            return f"({self.spell(begin)} {self.text_until('thoughts', end)} {self.spell(then)})?"
        if not marks:
            return ""
        begin, end = marks
        thoughts = f"{self.text_until('thoughts', end)} /[ \\n]{{0,4}}/"
        return thoughts if is_thinking else f"({self.spell(begin)} {thoughts})?"

    def call(self, i: int, tool: FunctionDefinition) -> str:
        begin = self.spell(self._wording.begin.replace("NAME", tool.name))
        return self.add(f"call_{i}", f"{begin} {self._arguments(i, tool)} {self.spell(self._wording.end)}")

    def _arguments(self, i: int, tool: FunctionDefinition) -> str:
        schema = tool.schema_of_arguments
        if not self._wording.begin_value:
            return self.add(f"arguments_{i}", _json(schema))
        required = schema.get("required")
        names: list[str] = []
        for k, key in enumerate(schema.get("properties", {})):
            begin = self.spell(self._wording.begin_value.replace("KEY", key))
            rule = f"{begin} {self._value(f'value_{i}_{k}', schema, key)}"
            is_optional = not (isinstance(required, list) and key in required)
            names.append(self.add(f"argument_{i}_{k}", rule) + "?" * is_optional)
        return " ".join(names)

    def _value(self, name: str, schema: Mapping[str, Any], key: str) -> str:
        """Return the rule for a tagged argument, with the tag behind it: text where that is allowed, else JSON."""
        own, end = schema["properties"][key], self._wording.end_value
        words = own.get("enum") if isinstance(own, dict) else None
        if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
            return f"({' | '.join(map(_quoted, words))}) {self.spell(end)}"
        if "string" in argument_types(schema, key):
            mark = end.strip()
            before, _, after = end.partition(mark)
            held = self.text_until(name, mark) if mark in self._mark_ids else self.text_until(name, before + mark)
            return f"{held} {self.spell(after)}"
        definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        return f"{self.add(name, _json((own if isinstance(own, dict) else {}) | definitions))} {self.spell(end)}"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPACING})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
