"""Grammars by which an answer must call tools, or be what a response format says, and may reason before. A call is
written in the way of its format in `tools`, with each tool's own arguments. The grammars are in llguidance's
dialect of Lark, where <[7]> is the token of id 7. `write_calls` writes calls in the same words."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specserve.errors import RequestError
from specserve.serve.http.formats.schemas import argument_types
from specserve.serve.http.openai.chat import FunctionDefinition
from specserve.serve.requests.request import GrammarSpec


@dataclass(frozen=True)
class _Wording:
    """The text around calls and their arguments. NAME and KEY are replaced by those of the tool and of the argument,
    INDEX by the number of the call, and IS_TEXT by whether the argument is text."""

    begin: str
    end: str
    between: str = "\n"
    first: str = ""  # before all calls
    last: str = ""  # after them
    begin_value: str = ""  # of an argument; empty where all arguments are one JSON object
    end_value: str = ""
    between_values: str = ""
    quote: str = ""  # around arguments that are text; empty: they are as they are, or JSON where no tag ends them
    is_python: bool = False  # arguments are Python's literals
    is_alone: bool = False  # an answer has one call

    @property
    def separators(self) -> tuple[str, str]:
        """The marks between the values of lists and objects: those of arguments, and else those of JSON in
        templates."""
        return (",", ":") if self.between_values == "," else (", ", ": ")


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
    "minimax-m2": _Wording(
        '<invoke name="NAME">\n',
        "</invoke>\n",
        between="",
        first="<minimax:tool_call>\n",
        last="</minimax:tool_call>",
        begin_value='<parameter name="KEY">',
        end_value="</parameter>\n",
    ),
    "functionary": _Wording("<function=NAME>", "</function>", between=""),
    "gemma4": _Wording(
        "<|tool_call>call:NAME{",
        "}<tool_call|>",
        between="",
        begin_value="KEY:",
        between_values=",",
        quote='<|"|>',
    ),
    "kimi-k2": _Wording(
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        between="",
        first="<|tool_calls_section_begin|>",
        last="<|tool_calls_section_end|>",
    ),
    "lfm2": _Wording(
        "NAME(",
        ")",
        ", ",
        first="<|tool_call_start|>[",
        last="]<|tool_call_end|>",
        begin_value="KEY=",
        between_values=", ",
        is_python=True,
    ),
    "phi4": _Wording('{"name": "NAME", "arguments": ', "}", ", ", first="<|tool_call|>[", last="]<|/tool_call|>"),
    "phi4 functools": _Wording('{"name": "NAME", "arguments": ', "}", ", ", first="functools[", last="]"),
    "command": _Wording(
        '{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": ',
        "}",
        ",\n    ",
        first="<|START_ACTION|>[\n    ",
        last="\n]<|END_ACTION|>",
    ),
    "command fence": _Wording(
        '{"tool_name": "NAME", "parameters": ', "}", ",\n    ", first="Action: ```json\n[\n    ", last="\n]```"
    ),
    "nemotron": _Wording('{"name": "NAME", "arguments": ', "}", ", ", first="<TOOLCALL>[", last="]</TOOLCALL>"),
    "seed": _Wording(
        "<seed:tool_call>\n<function=NAME>\n",
        "</function>\n</seed:tool_call>",
        begin_value="<parameter=KEY>",
        end_value="</parameter>\n",
    ),
}
_WORDINGS["generic"] = _WORDINGS["hermes"]
_WORDINGS |= {
    f"deepseek-dsml{version}": _Wording(
        '<｜DSML｜invoke name="NAME">\n',
        "</｜DSML｜invoke>\n",
        between="",
        first=f"<｜DSML｜{block}>\n",
        last=f"</｜DSML｜{block}>",
        begin_value='<｜DSML｜parameter name="KEY" string="IS_TEXT">',
        end_value="</｜DSML｜parameter>\n",
    )
    for version, block in (("", "function_calls"), (" v4", "tool_calls"))
}
_PYTHON = {"boolean": '"True" | "False"', "null": '"None"'}  # words that JSON spells otherwise
_HARMONY_THINKING = "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"
_HARMONY_CONTENT = "<|channel|>final<|message|>"


def write_calls(wording: str, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
    """Return the text of calls, each a name and arguments, as a model writes them. Arguments that are text, because a
    model wrote no sound JSON, stand as they are."""
    own = _WORDINGS[wording]

    def value(key: str, argument: Any) -> str:
        is_text = isinstance(argument, str)
        spelled = json.dumps(argument, ensure_ascii=False, separators=own.separators)
        if is_text and (own.quote or own.end_value):
            spelled = own.quote + argument + own.quote
        elif own.is_python and not isinstance(argument, str | Mapping):
            spelled = repr(argument)
        begin = own.begin_value.replace("IS_TEXT", json.dumps(is_text)).replace("KEY", key)
        return begin + spelled + own.end_value

    def call(index: int, name: str, arguments: Mapping[str, Any] | str) -> str:
        if isinstance(arguments, str):
            spelled = arguments
        elif not own.begin_value:
            spelled = json.dumps(arguments, ensure_ascii=False)
        else:
            spelled = own.between_values.join(value(*each) for each in arguments.items())
        return own.begin.replace("INDEX", str(index)).replace("NAME", name) + spelled + own.end

    return own.first + own.between.join(call(i, *each) for i, each in enumerate(calls)) + own.last


def answer_grammar(
    wording: str,
    tools: Sequence[FunctionDefinition],
    content: GrammarSpec | None,
    mark_ids: Mapping[str, int],
    *,
    is_parallel: bool = True,
    think_marks: tuple[str, str] | None = None,
    is_thinking: bool = False,
    has_both: bool = False,
) -> GrammarSpec:
    """Return the grammar of answers that call one of the tools, or more where that is allowed, or have such content
    (any kind but Lark). Raises RequestError for a schema that is no JSON.

    `wording` is that of `ToolFormat.wording_for`, "none" where there is no format of calls. `mark_ids` are those marks
    of the format that are tokens of their own. With `has_both` calls may follow content. Between `think_marks` the
    answer may reason before; `is_thinking` says that the prompt has begun to.
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
        more = "calls?" if has_both else ""
        ways.append(f"{before} {rules.add('content', _content(content))} {more}")
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
        parts = self._wording.begin.split("INDEX")
        begin = " /[0-9]{1,4}/ ".join(self.spell(part.replace("NAME", tool.name)) for part in parts)
        return self.add(f"call_{i}", f"{begin} {self._arguments(i, tool)} {self.spell(self._wording.end)}")

    def _arguments(self, i: int, tool: FunctionDefinition) -> str:
        schema = tool.schema_of_arguments
        if not self._wording.begin_value:
            return self.add(f"arguments_{i}", _json(schema))
        required = schema.get("required")
        names: list[tuple[str, bool]] = []
        for k, key in enumerate(schema.get("properties", {})):
            own = self._wording.begin_value.replace("KEY", key)
            begin = self.spell(own.replace("IS_TEXT", json.dumps("string" in argument_types(schema, key))))
            rule = f"{begin} {self._value(f'value_{i}_{k}', schema, key)}"
            is_optional = not (isinstance(required, list) and key in required)
            names.append((self.add(f"argument_{i}_{k}", rule), is_optional))
        if self._wording.between_values:
            return self._listed(f"arguments_{i}", names)
        return " ".join(name + "?" * is_optional for name, is_optional in names)

    def _listed(self, name: str, arguments: Sequence[tuple[str, bool]]) -> str:
        """Add rules for a list of arguments, of which some are optional, with a text between each two that come."""
        between = self.spell(self._wording.between_values)
        first = more = ""  # of the rest of the list, where none has come before, or one has
        for k, (argument, is_optional) in reversed([*enumerate(arguments)]):
            ways = [f"{argument} {more}", *([first or '""'] if is_optional else [])]
            following = [f"{between} {argument} {more}", *([more or '""'] if is_optional else [])]
            first = self.add(f"{name}_first_{k}", " | ".join(ways))
            more = self.add(f"{name}_more_{k}", " | ".join(following))
        return first

    def _value(self, name: str, schema: Mapping[str, Any], key: str) -> str:
        """Return the rule for a tagged argument, with the tag behind it: text where that is allowed, else JSON."""
        own, end, quote = schema["properties"][key], self._wording.end_value, self._wording.quote
        words = own.get("enum") if isinstance(own, dict) else None
        types = argument_types(schema, key)
        if self._wording.is_python and types and types <= _PYTHON.keys():
            return f"({' | '.join(_PYTHON[each] for each in sorted(types))})"
        is_raw = bool(end or quote)
        if is_raw and isinstance(words, list) and words and all(isinstance(word, str) for word in words):
            return f"{self.spell(quote)} ({' | '.join(map(_quoted, words))}) {self.spell(quote)} {self.spell(end)}"
        if quote and "string" in types:
            return f"{self.spell(quote)} {self.text_until(name, quote)}"
        if end and "string" in types:
            mark = end.strip()
            before, _, after = end.partition(mark)
            held = self.text_until(name, mark) if mark in self._mark_ids else self.text_until(name, before + mark)
            return f"{held} {self.spell(after)}"
        definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        schema = (own if isinstance(own, dict) else {}) | definitions
        return f"{self.add(name, _json(schema, self._wording.separators))} {self.spell(end)}"


def _json(schema: Mapping[str, Any], separators: tuple[str, str] = (", ", ": ")) -> str:
    # without a place where a model could write spaces for ever
    spacing = {"whitespace_flexible": False, "item_separator": separators[0], "key_separator": separators[1]}
    return "%json " + json.dumps({**schema, "x-guidance": spacing})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
