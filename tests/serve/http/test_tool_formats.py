"""Laws of reading answers: what models write as calls of tools comes out as calls, however the text is cut; and all
else stays the text that it is."""

import json

import pytest
from answer_texts import FORMATS, TOOLS, VARIANTS, WRITERS, calls_of, make_reader, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.serve.http.formats.reader import Part
from specserve.serve.http.formats.written import read_value

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[｜\r"), max_size=8)
arguments = st.fixed_dictionaries(
    {
        "a": st.integers(-(2**40), 2**40),
        "text": texts.map(str.strip) | st.sampled_from(["1", "true", "null", '"x"', "{}"]),
    },
    optional={"mode": st.sampled_from("rw"), "deep": st.none() | st.lists(st.booleans(), max_size=3)},
)
calls = st.lists(st.tuples(st.just("add"), arguments) | st.just(("no_args", {})), min_size=1, max_size=3)


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=200)
@given(st.data(), st.sampled_from(VARIANTS), calls, texts.map(str.strip))
def test_calls_are_read_as_they_were_written_however_the_text_is_cut(data, variant, calls, content):
    name, write = variant
    text = write(calls)
    if name == "harmony" and content:
        text = f"<|channel|>commentary<|message|>{content}<|end|><|start|>assistant{text}"
    elif content and text[0] not in "{[":
        text = f"{content}\n\n{text}"
    else:
        content = ""
    part = parse(make_reader(name), *cut(data, text))
    assert calls_of(part) == calls
    assert (part.content, part.reasoning) == (content, "")
    ids = [f"functions.{tool}:{i}" if name == "kimi-k2" else f"id-{i}" for i, (tool, _) in enumerate(calls)]
    assert [call.call_id for call in part.tool_calls] == ids


pieces = """add¦no_args¦x¦{"name": "add", ¦"arguments": ¦{"name": "add", "parameters": {¦{"a": 1, "text": ""}
{¦}¦"¦\\¦[¦]¦,¦<¦<tool_call>¦</tool_call>¦<|python_tag|>¦[TOOL_CALLS]¦[ARGS]¦[CALL_ID]¦[/THINK]¦</think>¦<think>
<arg_key>¦</arg_key>¦<arg_value>¦</arg_value>¦<function=add>¦<parameter=text>¦</parameter>¦</function>¦<|¦\u00e9
<｜tool▁calls▁begin｜>¦<｜tool▁call▁begin｜>¦function<｜tool▁sep｜>¦```json¦<｜tool▁call▁end｜>¦<｜tool▁calls▁end｜>
analysis¦commentary¦final¦ to=functions.add¦assistant¦ ¦<|channel|>analysis<|message|>"""
pieces = [*pieces.replace("\n", "¦").split("¦"), "\n", *FORMATS["harmony"].marks]
pieces += [write([("add", {"a": 1, "text": "x"})]) for _, write in VARIANTS]


@settings(max_examples=200)
@given(
    st.data(),
    st.sampled_from([*FORMATS, ""]),
    st.lists(st.sampled_from(pieces), max_size=10),
    st.sampled_from(["", "think"]),
)
def test_no_text_fails_and_no_cut_changes_what_it_says(data, name, written, think):
    text = "".join(written)
    hidden = data.draw(st.sampled_from([(), FORMATS[name].marks if name else ()]))
    is_open = bool(think) and data.draw(st.booleans())
    whole = parse(make_reader(name, think=think, is_thinking=is_open, hidden=hidden), text)
    assert parse(make_reader(name, think=think, is_thinking=is_open, hidden=hidden), *cut(data, text)) == whole
    shown = whole.content + whole.reasoning
    assert not any(mark in shown for mark in hidden)
    if not think and name != "harmony":  # text that calls no tool is content, to the letter
        assert parse(make_reader(name, tools={}), *cut(data, text)) == Part(text)


@settings(max_examples=200)
@given(st.data(), st.sampled_from(["think", "mistral"]), texts, texts, st.booleans(), st.sampled_from(["", *WRITERS]))
def test_reasoning_is_split_off_and_goes_with_calls(data, think, thought, content, is_thinking, name):
    if name == "harmony":
        text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        text += f"<|channel|>final<|message|>{content}"
        part = parse(make_reader(name), *cut(data, text))
    else:
        begin, end = {"think": ("<think>\n", "</think>"), "mistral": ("[THINK]", "[/THINK]")}[think]
        called = WRITERS[name]([("no_args", {})]) if name else ""
        text = ("" if is_thinking else begin) + f"{thought}\n{end}\n\n{content.strip()}\n\n{called}"
        part = parse(make_reader(name, think=think, is_thinking=is_thinking), *cut(data, text))
        assert len(part.tool_calls) == bool(name)
    assert part.reasoning == thought.strip()
    assert part.content.strip() == content.strip()
    hides = make_reader(name, think="" if name == "harmony" else think, is_thinking=is_thinking, keeps_reasoning=False)
    assert parse(hides, text) == Part(part.content, "", part.tool_calls)


@given(st.data(), calls)
def test_an_answer_may_begin_with_glms_arguments_behind_a_bare_name(data, calls):
    first = ("add", {"a": 1, "text": "x"})
    text = WRITERS["glm"]([first, *calls]).removeprefix("<tool_call>")
    assert calls_of(parse(make_reader("glm"), *cut(data, text))) == [first, *calls]
    unknown = text.replace("add", "sub", 1)
    assert parse(make_reader("glm", tools={}), *cut(data, unknown)) == Part(unknown)


TAGGED = {"glm": "</arg_value>", "qwen3-coder": "</parameter>", "minimax-m2": "</parameter>"}
TAGGED["deepseek-dsml"] = "</｜DSML｜parameter>"


@settings(max_examples=200)
@given(st.data(), st.sampled_from([*TAGGED]), st.lists(st.sampled_from(["<end>", "x", " \n", "</", "<b>"]), max_size=6))
def test_an_end_tag_within_a_text_does_not_end_it(data, name, written):
    """The one that counts is the last before the next argument, or before the end of the call."""
    text = "".join(written).replace("<end>", TAGGED[name]).strip()
    calls = [("add", {"text": text, "a": 1}), ("add", {"a": 2, "text": text})]
    part = parse(make_reader(name), *cut(data, WRITERS[name](calls)))
    assert calls_of(part) == calls
    cut_short = WRITERS[name](calls[1:]).rpartition(TAGGED[name])[0] + TAGGED[name]
    assert calls_of(parse(make_reader(name), *cut(data, cut_short))) == calls[1:], "its call has no end of its own"


OPENING = {"glm": "<arg_value>", "qwen3-coder": "<parameter=a>", "minimax-m2": '<parameter name="a">'}
OPENING["deepseek-dsml"] = '<｜DSML｜parameter name="a" string="false">'
FIRST_END = {"glm": "\n</tool_call>", "qwen3-coder": "\n</function>", "minimax-m2": "\n</invoke>"}
FIRST_END["deepseek-dsml"] = "\n</｜DSML｜invoke>"


@settings(max_examples=200)
@given(st.data(), st.sampled_from([*TAGGED]))
def test_tags_of_calls_within_a_text_do_not_end_it(data, name):
    """Neither a whole call on lines of its own, as in a text about calls, nor the ends of one between quotes."""
    call = WRITERS[name]([("add", {"text": "y", "a": 2})])
    ends = TAGGED[name] + call.rpartition(TAGGED[name])[2]
    text = "x".join(
        [data.draw(st.sampled_from([f"({ends})", f"\n{ends}\n", call, f"'{TAGGED[name]}'"]))]
        * data.draw(st.integers(1, 3))
    )
    calls = [("add", {"text": f"-{text}-", "a": 1}), ("add", {"a": 2, "text": f"-{text}-"})]
    part = parse(make_reader(name), *cut(data, WRITERS[name](calls)))
    assert (calls_of(part), part.content) == (calls, "")


@pytest.mark.parametrize("name", TAGGED)
def test_a_forgotten_end_tag_of_a_value_costs_no_other_argument(name):
    """Where another of the tool's arguments begins on a line of its own, or the call ends. The opening of a tag alone,
    within a text, is text."""
    calls = [("add", {"text": "x", "a": 1}), ("add", {"a": 2, "text": "y"})]
    written = WRITERS[name](calls[:1]).replace(TAGGED[name], "", 1)
    assert calls_of(parse(make_reader(name), *written)) == calls[:1], "the first"
    before, _, behind = WRITERS[name](calls[:1]).rpartition(TAGGED[name])
    assert calls_of(parse(make_reader(name), *(before + behind))) == calls[:1], "the last"
    several = WRITERS[name](calls).replace(TAGGED[name], "", 2).replace(TAGGED[name], "", 1)
    assert calls_of(parse(make_reader(name), *several)) == calls
    text = f"use {OPENING[name]} here"
    assert calls_of(parse(make_reader(name), *WRITERS[name]([("add", {"text": text, "a": 1})]))) == [
        ("add", {"text": text, "a": 1})
    ]


@pytest.mark.parametrize("name", TAGGED)
def test_text_with_single_tags_of_a_call_is_one_argument_and_no_other_call_is_lost(name):
    """The opening of an argument or its end, in a line or on one of its own, in two calls or before prose."""
    key = OPENING[name] if name != "glm" else "<arg_key>a</arg_key>\n<arg_value>"
    own = key.replace("a", "text", 1) if name == "glm" else key.replace('"a"', '"text"').replace("=a", "=text")
    for shown in (f"inline {key}3 ok", f"doc:\n{key}\nend", f"use {own} here"):
        for first in ({"text": shown}, {"text": shown, "a": 1}, {"a": 1, "text": shown}):
            calls = [("add", first), ("add", {"a": 2, "text": f"and {TAGGED[name]} there"})]
            assert calls_of(parse(make_reader(name), *WRITERS[name](calls))) == calls
    for prose in (f"It ends with {TAGGED[name]}{FIRST_END[name]}, see.", f"{TAGGED[name]}{FIRST_END[name]}"):
        part = parse(make_reader(name), *f"{WRITERS[name](calls[1:])}\n{prose}")
        assert (calls_of(part), part.content) == (calls[1:], f"\n{prose}")


def test_glms_later_calls_may_stand_without_their_mark():
    calls = [("add", {"text": "x", "a": 1}), ("add", {"text": "y </arg_value> z", "a": 2})]
    written = WRITERS["glm"](calls)
    part = parse(make_reader("glm"), *written.replace("\n<tool_call>", "\n"))
    assert (calls_of(part), part.content) == (calls, "")
    rest = written.partition("</tool_call>")[2].replace("<tool_call>add", "sub")
    part = parse(make_reader("glm"), *WRITERS["glm"](calls[:1]), rest)
    assert (calls_of(part), part.content) == (calls[:1], rest)


def test_tagged_arguments_have_the_types_of_the_schema():
    properties = {"yes": {"type": "boolean"}, "no": {"type": ["integer", "null"]}, "text": {"type": ["string", "null"]}}
    tools = {"f": {"properties": properties | {"free": {}}}}
    for written, meant in [
        (["True", "None", "True", "[1]"], {"yes": True, "no": None, "text": "True", "free": [1]}),
        (["false", "3", "null", "word"], {"yes": False, "no": 3, "text": None, "free": "word"}),
        (["NaN", "-Infinity", "", "(1, None)"], {"yes": "NaN", "no": "-Infinity", "text": "", "free": [1, None]}),
    ]:
        for name in ("qwen3-coder", "glm", "minimax-m2"):
            text = WRITERS[name]([("f", dict(zip(meant, written, strict=True)))])
            assert calls_of(parse(make_reader(name, tools=tools), text)) == [("f", meant)]


TEXT, NUMBER, DEFINED = {"type": "string"}, {"type": "integer"}, {"$ref": "#/$defs/T"}


@pytest.mark.parametrize(
    ("schema", "is_text"),
    [
        (TEXT, True),
        ({"allOf": [TEXT]}, True),
        ({"allOf": [{"description": "d"}, {"anyOf": [TEXT, {"type": "null"}]}]}, True),
        ({"oneOf": [NUMBER, TEXT]}, True),
        ({"type": ["string", "integer"], "allOf": [NUMBER]}, False),
        ({"enum": ["1", "2"]}, True),
        ({"enum": [1, 2]}, False),
        ({"const": "1"}, True),
        ({"type": "STRING"}, True),
        ({"type": "str"}, True),
        ({"type": ["Int", "null"]}, False),
        (DEFINED, True),
        ({"$ref": "#/definitions/deep/T"}, True),
        ({"allOf": [{"$ref": "#/definitions/deep/T"}], "default": "x"}, True),
        ({"$ref": "#/$defs/nowhere"}, False),
        ({"type": "number", "anyOf": [NUMBER, TEXT]}, False),
        ({}, False),
    ],
)
def test_a_number_is_text_where_the_schema_says_so(schema, is_text):
    """Wherever it says so: in the argument's own schema, in one it refers to, or in a part of the tool's."""
    found = {"$defs": {"T": TEXT}, "definitions": {"deep": {"T": TEXT}}}
    places = {"properties": {"x": schema}}, {"allOf": [{"properties": {"x": schema}}]}, {"additionalProperties": schema}
    places = *places, {"patternProperties": {"(": TEXT, "^x$": schema, "y": TEXT}}
    args = {"$defs": found["$defs"] | {"Args": {"properties": {"x": schema}}}, "$ref": "#/$defs/Args"}
    for place in (*places, args):
        text = WRITERS["qwen3-coder"]([("f", {"x": "1"})])
        reader = make_reader("qwen3-coder", tools={"f": found | place})
        assert calls_of(parse(reader, text)) == [("f", {"x": "1" if is_text else 1})], place


values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(values)
def test_values_are_read_as_json_and_as_pythons_literals(value):
    assert read_value(json.dumps(value)) == read_value(repr(value)) == value


def test_quotes_within_a_text_may_come_as_they_are():
    """As LFM2's template shows texts to the model."""
    assert read_value("""['it's', "a "b" c", 'x\\'y']""") == ["it's", 'a "b" c', "x'y"]


@pytest.mark.parametrize("text", ["", "word", "{", "[1", "[1 2]", "{'a' 1}", "nan", "1 2", "f(x)", "[" * 10_000, "'x"])
def test_what_is_no_value_is_none(text):
    with pytest.raises(ValueError, match=r"."):
        read_value(text)


@pytest.mark.parametrize("name", [*WRITERS, ""])
def test_the_end_of_a_reasoning_that_has_not_begun_is_not_shown(name):
    """The text before may be sent already, so it stays content; text about the marks is content like any other."""
    if name == "harmony":
        return
    for text, shown in [
        ("a</think>b", "ab"),
        ("a\n</think>\n\nb </think>", "a\n\n\nb </think>"),
        ("a <think> and </think> b", "a <think> and </think> b"),
    ]:
        assert parse(make_reader(name, think="think"), *text) == parse(make_reader(name, think="think"), text)
        assert parse(make_reader(name, think="think"), text).content == shown


def test_arguments_arrive_while_they_are_written():
    long = json.dumps({"a": 1, "text": "word " * 20})
    for name, text in [
        ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {long}}}\n</tool_call>'),
        ("harmony", f"<|channel|>commentary to=functions.add<|message|>{long}<|call|>"),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{long}"),
    ]:
        parser = make_reader(name)
        pieces = [part.tool_calls for char in text if (part := parser.push(char))]
        assert "".join(call.arguments for calls in pieces for call in calls) == long
        assert len(pieces) >= len(long), name  # each character on its own


@given(st.data(), st.sampled_from(["hermes", "llama3", "mistral", "kimi-k2", "deepseek"]), calls)
def test_arguments_may_be_python_objects(data, name, calls):
    """In formats of JSON objects."""
    text = WRITERS[name](calls)
    for _, arguments in calls:
        text = text.replace(json.dumps(arguments, ensure_ascii=False), repr(arguments), 1)
    assert calls_of(parse(make_reader(name), *cut(data, text))) == calls


def test_a_call_may_be_a_python_object():
    for name, before in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]["), ("llama3", "<|python_tag|>")):
        text = before + "{'name': 'add', 'arguments': {'a': 1, 'text': \"it's\"}}"
        assert calls_of(parse(make_reader(name), text)) == [("add", {"a": 1, "text": "it's"})]
        for other in ("{'name': 'mul'}", "{'a' x}", "{'"):
            assert parse(make_reader(name), before + other) == Part(before + other)


def test_a_call_with_a_member_that_is_none_of_a_calls_is_content_and_loses_nothing():
    text = '<tool_call>{"name": "add", "with": {"a": 1}}</tool_call>'
    assert parse(make_reader("hermes"), text) == Part(text)
    for call in (
        {"name": "no_args", "reason": "r", "arguments": {}},
        {"type": "function", "function": {"name": "no_args", "arguments": "{}", "description": "d"}},
    ):
        text = f"<tool_call>{json.dumps(call)}</tool_call>"
        assert calls_of(parse(make_reader("hermes"), text)) == [("no_args", {})]


@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_objects_that_are_no_calls_are_content_to_the_letter(name):
    """At the beginning, in a list or alone, and behind a call."""
    other = '{"name": "Bob", "parameters": {"a": 1}}'
    for text in (f"[{other}]", f" [ {other} , 3] x", f"{other} y", '[{"x": 1}]'):
        assert parse(make_reader(name), *text) == Part(text)
    for text in (f"; {other} x", '; {"x": 1} x', f"\n{other}"):
        part = parse(make_reader(name), *('{"name": "no_args", "arguments": {}}' + text))
        assert (calls_of(part), part.content) == ([("no_args", {})], text)


def test_no_two_calls_of_kimi_have_one_id():
    written = WRITERS["kimi-k2"]([("add", {"a": 1})])
    for ids in (("add:1", "add", "add:2"), ("add:0", "add:0", "add:0")):
        part = parse(make_reader("kimi-k2"), *(written.replace("add:0", each) for each in ids))
        assert len({call.call_id for call in part.tool_calls}) == 3


def test_a_call_that_is_cut_short_is_given_as_far_as_it_goes():
    part = parse(make_reader("hermes"), '<tool_call>{"name": "add", "arguments": {"a": 1, "te')
    assert [(call.name, call.arguments) for call in part.tool_calls] == [("add", '{"a": 1, "te')]
    assert parse(make_reader("hermes"), '<tool_call>{"name": "ad') == Part('<tool_call>{"name": "ad')
    assert parse(make_reader("hermes"), '<tool_call>{"name": "mul", "arguments": {}}</tool_call>') == Part(
        '<tool_call>{"name": "mul", "arguments": {}}</tool_call>'
    )


@pytest.mark.parametrize("name", WRITERS)
def test_only_one_call_is_given_where_they_may_not_be_parallel(name):
    text = WRITERS[name]([("no_args", {}), ("add", {"a": 1, "text": "x"})])
    assert calls_of(parse(make_reader(name, is_parallel=False), text)) == [("no_args", {})]
    assert set(WRITERS) == set(FORMATS)
    assert TOOLS.keys() == {"add", "no_args"}
