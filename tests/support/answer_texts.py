"""What models of each family write when they call tools, as their chat templates have it."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specserve.serve.http.formats.reader import Part, Reader, joined
from specserve.serve.http.formats.reasoning import THINK_MARKS, answer_format
from specserve.serve.http.formats.tools import NO_CALLS, TOOL_FORMATS

COHERE = '{"tool_name": "%s", "parameters": %s}'
NAMED = '{"name": "%s", "arguments": %s}'
Calls = Sequence[tuple[str, Mapping[str, Any]]]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "text": {"type": "string"},
        "mode": {"type": "string", "enum": ["r", "w"]},
        "deep": {"anyOf": [{"$ref": "#/$defs/Deep"}, {"type": "null"}]},
    },
    "required": ["a", "text"],
    "additionalProperties": False,
    "$defs": {"Deep": {"type": "array", "items": {"type": "boolean"}}},
}
TOOLS: dict[str, Mapping[str, Any]] = {"add": SCHEMA, "no_args": {"type": "object", "properties": {}}}


def _tagged(calls: Calls, begin: str, value: str, end: str, between: str = "\n") -> str:
    def call(name: str, arguments: Mapping[str, Any]) -> str:
        spelled = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        return begin % name + "".join(value % item for item in spelled.items()) + end

    return between.join(call(*each) for each in calls)


def _each(calls: Calls, template: str, between: str = "\n") -> str:
    return between.join(template % (name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls)


def _dsml(calls: Calls, block: str) -> str:
    def value(key: str, item: Any) -> str:
        text = item if isinstance(item, str) else json.dumps(item)
        is_text = json.dumps(isinstance(item, str))
        return f'<｜DSML｜parameter name="{key}" string="{is_text}">{text}</｜DSML｜parameter>\n'

    invokes = "".join(
        f'<｜DSML｜invoke name="{name}">\n{"".join(value(*item) for item in arguments.items())}</｜DSML｜invoke>\n'
        for name, arguments in calls
    )
    return f"<｜DSML｜{block}>\n{invokes}</｜DSML｜{block}>"


def _gemma(calls: Calls) -> str:
    def value(item: Any) -> str:
        return f'<|"|>{item}<|"|>' if isinstance(item, str) else json.dumps(item, separators=(",", ":"))

    return "".join(
        f"<|tool_call>call:{name}{{{','.join(f'{k}:{value(v)}' for k, v in arguments.items())}}}<tool_call|>"
        for name, arguments in calls
    )


def _lfm(calls: Calls, value: Callable[[Any], str]) -> str:
    spelled = (f"{name}({', '.join(f'{k}={value(v)}' for k, v in given.items())})" for name, given in calls)
    return f"<|tool_call_start|>[{', '.join(spelled)}]<|tool_call_end|>"


def _command(calls: Calls) -> str:
    spelled = enumerate(_each([call], '"tool_name": "%s", "parameters": %s') for call in calls)
    return ",\n    ".join(f'{{"tool_call_id": "{i}", {call}}}' for i, call in spelled)


def _kimi(calls: Calls) -> str:
    spelled = (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(given, ensure_ascii=False)}"
        "<|tool_call_end|>"
        for i, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(spelled)}<|tool_calls_section_end|>"


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": lambda calls: _each(calls, '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'),
    "llama3": lambda calls: "<|python_tag|>" + _each(calls, '{"name": "%s", "parameters": %s}', "; "),
    "mistral": lambda calls: _each(calls, "[TOOL_CALLS]%s[ARGS]%s", ""),
    "glm": lambda calls: _tagged(
        calls, "<tool_call>%s\n", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n", "</tool_call>"
    ),
    "qwen3-coder": lambda calls: _tagged(
        calls,
        "<tool_call>\n<function=%s>\n",
        "<parameter=%s>\n%s\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "minimax-m2": lambda calls: (
        "<minimax:tool_call>\n"
        + _tagged(calls, '<invoke name="%s">\n', '<parameter name="%s">%s</parameter>\n', "</invoke>", "\n")
        + "\n</minimax:tool_call>"
    ),
    "functionary": lambda calls: _each(calls, "<function=%s>%s</function>", ""),
    "gemma4": _gemma,
    "kimi-k2": _kimi,
    "lfm2": lambda calls: _lfm(calls, lambda item: json.dumps(item, ensure_ascii=False)),
    "phi4": lambda calls: "<|tool_call|>[" + _each(calls, NAMED, ", ") + "]<|/tool_call|>",
    "command": lambda calls: f"<|START_ACTION|>[\n    {_command(calls)}\n]<|END_ACTION|>",
    "nemotron": lambda calls: "<TOOLCALL>[" + _each(calls, NAMED, ", ") + "]</TOOLCALL>",
    "seed": lambda calls: _tagged(
        calls,
        "<seed:tool_call>\n<function=%s>\n",
        "<parameter=%s>%s</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    "deepseek-dsml": lambda calls: _dsml(calls, "function_calls"),
    "deepseek": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + _each(calls, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>"
    ),
    "harmony": lambda calls: (
        "<|end|><|start|>assistant".join(
            _each([call], "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s") for call in calls
        )
        + "<|call|>"
    ),
}
# (format, what it writes too)
VARIANTS: list[tuple[str, Callable[[Calls], str]]] = [
    *WRITERS.items(),
    # without the mark that opens them, which some models forget
    ("hermes", lambda calls: _each(calls, '{"name": "%s", "arguments": %s}\n</tool_call>')),
    ("qwen3-coder", lambda calls: WRITERS["qwen3-coder"](calls).replace("<tool_call>\n", "")),
    ("minimax-m2", lambda calls: WRITERS["minimax-m2"](calls).replace("<minimax:tool_call>\n", "")),
    ("kimi-k2", lambda calls: _kimi(calls).replace("<|tool_calls_section_begin|>", "")),
    ("deepseek-dsml", lambda calls: _dsml(calls, "tool_calls").replace("<｜DSML｜tool_calls>\n", "")),
    ("deepseek-dsml", lambda calls: _dsml(calls, "tool_calls")),
    ("lfm2", lambda calls: _lfm(calls, repr)),
    ("lfm2", lambda calls: "<|tool_call_start|>[" + _each(calls, NAMED, ", ") + "]<|tool_call_end|>"),
    ("phi4", lambda calls: "functools[" + _each(calls, NAMED, ", ") + "]"),
    ("phi4", lambda calls: _each(calls, f"<|tool_call|>{NAMED}<|/tool_call|>", "")),
    ("llama3", lambda calls: _each(calls, '{"name": "%s", "parameters": %s}', "; ")),
    ("llama3", lambda calls: _each(calls, '{"type": "function", "name": "%s", "parameters": %s}')),
    ("mistral", lambda calls: "[TOOL_CALLS] [" + _each(calls, '{"name": "%s", "arguments": %s}', ", ") + "]"),
    (
        "mistral",
        lambda calls: "[TOOL_CALLS][" + _each(calls, '{"name": "%s", "arguments": %s, "id": "x12345678"}', ", ") + "]",
    ),
    ("mistral", lambda calls: _each(calls, "[TOOL_CALLS]%s[CALL_ID]x12345678[ARGS]%s", "")),
    (
        "deepseek",
        lambda calls: (
            "<｜tool▁calls▁begin｜>"
            + _each(calls, "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>", "")
            + "<｜tool▁calls▁end｜>"
        ),
    ),
    ("hermes", lambda calls: _each(calls, '<tool_call>{"name":"%s","arguments":%s}</tool_call>', "")),
    (
        "hermes",
        lambda calls: _each([(n, a) for n, a in calls], '<tool_call>{"name": "%s", "arguments": %s</tool_call>'),
    ),
    (
        "hermes",
        lambda calls: "".join(
            f"<tool_call>{json.dumps({'arguments': json.dumps(a), 'name': n})}</tool_call>" for n, a in calls
        ),
    ),
    # one mark for a list of calls, with or without a fence; or a list without its mark
    ("hermes", lambda calls: f"<tool_call>\n[{_each(calls, NAMED, ', ')}]\n</tool_call>"),
    ("hermes", lambda calls: f"<tool_call>\n```json\n[{_each(calls, NAMED, ', ')}]\n```\n</tool_call>"),
    ("hermes", lambda calls: f"[{_each(calls, NAMED, ', ')}]"),
    ("llama3", lambda calls: _each(calls, '{"type": "function", "function": "%s", "parameters": %s}')),
    ("hermes", lambda calls: _each(calls, '<tool_call>{"tool_name": "%s", "args": %s}</tool_call>')),
    ("kimi-k2", lambda calls: re.sub(r":[0-9]+(?=<.tool_call_arg)", "", _kimi(calls))),
    ("kimi-k2", lambda calls: re.sub(r"functions\.(\w+):[0-9]+(?=<)", r" \1 ", _kimi(calls)).replace(">{}<", "><")),
    ("command", lambda calls: f"Action: ```json\n[{_each(calls, COHERE, ',')}\n]```"),
    ("command", lambda calls: f"Action:\n```json\n[\n{_each(calls, COHERE, ',')}\n]\n```\n"),
    (
        "harmony",
        lambda calls: "<|end|><|start|>assistant".join(
            _each([call], " to=functions.%s<|channel|>commentary json<|message|>%s") for call in calls
        ),
    ),
]
FORMATS = {each.name: each for each in TOOL_FORMATS}


def make_reader(
    name: str,
    *,
    tools: Mapping[str, Mapping[str, Any]] = TOOLS,
    think: str = "",
    is_thinking: bool = False,
    **options: Any,
) -> Reader:
    ids = itertools.count()
    marks = THINK_MARKS[think] if think else None  # type: ignore[index]
    read = answer_format(FORMATS.get(name, NO_CALLS), marks, is_thinking=is_thinking)  # type: ignore[arg-type]
    return Reader(read, lambda: f"id-{next(ids)}", tools=tools, **options)


def parse(parser: Reader, *pieces: str) -> Part:
    return joined([*[parser.push(piece) for piece in pieces], parser.finish()])


def calls_of(part: Part) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in part.tool_calls]
