"""Grammars of answers: they allow what `tool_formats` reads as right calls, and nothing else."""

from typing import Any

import httpx
import pytest
from answer_texts import TOOLS, WRITERS, calls_of, make_reader, parse
from chats import load
from fakes import MODEL, USER, assert_refused
from fixed_text import HERMES, WEATHER, serving

from specserve.serve.http.formats.grammars import answer_grammar, write_calls
from specserve.serve.http.formats.reasoning import AnswerSyntax
from specserve.serve.http.formats.tools import TOOL_FORMATS
from specserve.serve.http.openai.bodies import ChatBody
from specserve.serve.http.openai.chat import FunctionDefinition
from specserve.serve.http.openai.fields import check_body
from specserve.serve.requests.grammars import Grammars
from specserve.serve.requests.request import GrammarSpec, SamplingParams
from specserve.tokenizer import Tokenizer

TOKENIZER = load("qwen3")
END = min(TOKENIZER.end_ids)
HAVE = [*(mark for each in TOOL_FORMATS for mark in each.marks), "<think>", "</think>"]
IDS = {mark: i for mark in HAVE if (i := TOKENIZER.token_id(mark)) is not None}
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size, sorted(TOKENIZER.end_ids))
FUNCTIONS = [FunctionDefinition(name=name, parameters=dict(schema)) for name, schema in TOOLS.items()]
ONE_CALL = ("harmony", "llama3")  # formats whose answers have one call
RIGHT = [("add", {"a": -7, "text": 'two\nlines, "é" </x>'}), ("no_args", {})]
RIGHT_FULL = [("add", {"a": 1, "text": "", "mode": "w", "deep": [True, False]})]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("add", {"a": 1}),  # incomplete
    ("add", {"a": "1x", "text": ""}),
    ("add", {"a": 1, "text": "", "mode": "x"}),
    ("add", {"a": 1, "text": "", "more": 1}),
    ("mul", {}),
]


def allows(spec: GrammarSpec, text: str, end: int = END, grammars: Grammars = GRAMMARS) -> bool:
    """Whether the mask lets each token come, and then the end."""
    mask = grammars.compile(spec)()
    for token_id in [*TOKENIZER.encode(text, add_special_tokens=False), end]:
        row = mask.masks([0], [0])[0]
        if not row[token_id // 8] >> token_id % 8 & 1:
            return False
        mask.accept([token_id])
    return True


@pytest.mark.parametrize("name", WRITERS)
def test_a_grammar_allows_right_calls_alone(name):
    both = answer_grammar(name, FUNCTIONS, None, IDS)
    write = WRITERS[name]
    if name == "llama3":
        write = lambda calls: WRITERS["llama3"](calls[:1]).removeprefix("<|python_tag|>")  # noqa: E731
    if name == "harmony":
        write = lambda calls: WRITERS["harmony"](calls[:1]).removesuffix("<|call|>")  # noqa: E731
    for calls in (RIGHT, RIGHT[:1], RIGHT[1:], RIGHT_FULL):
        assert allows(both, write(calls)), calls
        found = calls_of(parse(make_reader(name), write(calls)))
        assert found == (calls[:1] if name in ONE_CALL else calls)
    for call in WRONG:
        assert not allows(both, write([call])), call
    assert not allows(both, "Hello.")
    assert not allows(both, "")
    one = answer_grammar(name, FUNCTIONS, None, IDS, is_parallel=False)
    assert allows(one, write(RIGHT[:1]))
    assert name in ONE_CALL or not allows(one, write(RIGHT))

    thoughts = (
        "<|channel|>analysis<|message|>hm\nhm<|end|><|start|>assistant" if name == "harmony" else "hm\nhm</think>\n\n"
    )
    is_thinking = name != "harmony"
    think = answer_grammar(name, FUNCTIONS, None, IDS, think_marks=("<think>", "</think>"), is_thinking=is_thinking)
    assert allows(think, thoughts + write(RIGHT[:1]))
    assert not allows(think, thoughts + "Hello.")


def test_other_wordings_of_a_format():
    for wording, text in [
        ("mistral list", '[TOOL_CALLS][{"name": "no_args", "arguments": {}}, {"name": "no_args", "arguments": {}}]'),
        (
            "deepseek bare",
            WRITERS["deepseek"]([("no_args", {})])
            .replace("function<｜tool▁sep｜>no_args\n```json\n", "no_args<｜tool▁sep｜>")
            .replace("\n```", ""),
        ),
    ]:
        name = wording.split()[0]
        assert allows(answer_grammar(wording, FUNCTIONS, None, IDS), text)
        assert [name for name, _ in calls_of(parse(make_reader(name), text))][:1] == ["no_args"]


def test_calls_as_python_has_them_say_true_as_python_does():
    schema = {"type": "object", "properties": {"b": {"type": ["boolean", "null"]}, "n": {"type": "integer"}}}
    grammar = answer_grammar("lfm2", [FunctionDefinition(name="f", parameters=schema)], None, IDS)
    for given in ({"b": True}, {"b": None, "n": 2}, {"n": 2}, {}):
        text = write_calls("lfm2", [("f", given)])
        assert allows(grammar, text), text
        assert calls_of(parse(make_reader("lfm2", tools={"f": schema}), text)) == [("f", given)]
    assert not allows(grammar, "<|tool_call_start|>[f(b=true)]<|tool_call_end|>")


@pytest.mark.parametrize("name", WRITERS)
def test_a_name_may_be_any_word(name):
    """Also one that the wording has a place for."""
    given = {"KEY": 1, "IS_TEXT": 2, "NAME": 3}
    tools = {"REBUILD_INDEX": {"type": "object", "properties": {key: {"type": "integer"} for key in given}}}
    calls = [("REBUILD_INDEX", given)]
    assert calls_of(parse(make_reader(name, tools=tools), write_calls(name, calls))) == calls


@pytest.mark.parametrize("name", WRITERS)
def test_calls_in_the_content_of_a_history_are_those_that_the_model_writes(name):
    for calls in (RIGHT[:1], RIGHT_FULL):
        text = write_calls(name, calls)
        assert calls_of(parse(make_reader(name), text)) == calls
        if name in ONE_CALL or (name == "lfm2" and calls is RIGHT_FULL):  # the grammar spells lists as JSON
            continue
        assert allows(answer_grammar(name, FUNCTIONS, None, IDS), text)


SIGNS = "<｜tool▁calls▁begin｜>", "[TOOL_CALLS]", "<tool_call>", '{"name": "weather", "parameters"'
FAMILIES = "deepseek-r1", "deepseek-v3.1", "glm-4.5", "llama-3", "mistral", "mistral-nemo", "qwen3", "qwen3-coder"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_grammar_for_a_template_allows_what_that_template_writes(name):
    """So the wording that is asked of a model is the one that it was taught."""
    tokenizer = load(name)
    arguments = {"city": "Genève", "days": 2}
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    asked = {"messages": USER, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    body, syntax = check_body(ChatBody, asked), AnswerSyntax(tokenizer, "auto", "auto")
    params, _ = syntax.reading(body, syntax.question(body), tokenizer.encode("x"), SamplingParams())
    text = tokenizer.template.render(turns, add_generation_prompt=False).rstrip()
    end = next((i for i in tokenizer.end_ids if text.endswith(spelled(tokenizer, i))), min(tokenizer.end_ids))
    text = text.removesuffix(spelled(tokenizer, end)).replace(', "id": "call00001"', "")  # only histories have ids
    said = text[max(text.find(sign) for sign in SIGNS) :]
    assert allows(params.grammar, said, end, Grammars(tokenizer, tokenizer.vocab_size, sorted(tokenizer.end_ids))), said


def spelled(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


CONTENTS = [
    (GrammarSpec("json_schema", '{"type": "object",\n "required": ["x"]}'), '{"x": 1}', "[]"),
    (GrammarSpec("choice", '["yes", "a \\"b\\""]'), 'a "b"', "no"),
    (GrammarSpec("regex", r"a/b\n[0-9]{2}"), "a/b\n12", "a/b\n1"),
]


@pytest.mark.parametrize(("content", "right", "wrong"), CONTENTS)
def test_content_that_must_follow_a_grammar_goes_with_reasoning_and_calls(content, right, wrong):
    think = ("<think>", "</think>")
    calls = WRITERS["hermes"](RIGHT)
    both = answer_grammar("hermes", FUNCTIONS, content, IDS, think_marks=think)
    for text in (right, f"<think>\nhm\n</think>\n\n{right}", calls, f"<think></think>{calls}"):
        assert allows(both, text), text
    for text in (wrong, f"<think>hm</think>{wrong}", right + calls, f"<think>{right}"):
        assert not allows(both, text), text
    alone = answer_grammar("none", [], content, IDS, think_marks=think, is_thinking=True)
    assert allows(alone, f"hm</think>\n\n{right}")
    assert not allows(alone, calls)
    harmony = answer_grammar("harmony", [], content, IDS)
    assert allows(harmony, f"<|channel|>final<|message|>{right}")
    assert not allows(harmony, right)


def test_a_reasoning_model_thinks_before_it_follows_a_format():
    """As a prompt that has opened the reasoning is continued."""
    tokenizer = load("deepseek-r1")
    syntax = AnswerSyntax(tokenizer, "auto", "auto")
    body = check_body(ChatBody, {"messages": USER, "response_format": {"type": "json_object"}})
    prompt = tokenizer.render_chat(USER)
    params, make_parser = syntax.reading(body, syntax.question(body), prompt, SamplingParams(grammar=body.grammar))
    assert params.grammar is not None
    assert allows(params.grammar, 'hm</think>\n{"a": 1}')
    part = parse(make_parser(), 'hm</think>\n{"a": 1}')  # type: ignore[arg-type]
    assert (part.reasoning, part.content) == ("hm", '{"a": 1}')
    lark = check_body(ChatBody, {"messages": USER, "guided_grammar": 'start: "x"'})
    params, make_parser = syntax.reading(lark, syntax.question(lark), prompt, SamplingParams(grammar=lark.grammar))
    assert (params.grammar, make_parser().push("x").content) == (lark.grammar, "x")


def test_an_answer_that_begins_as_a_call_is_one_where_our_own_prompt_shows_them():
    """With tool_choice auto too, since no training has taught the model to write calls."""
    tokenizer = load("gemma-3")
    ends = sorted(tokenizer.end_ids)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, ends)
    body = check_body(ChatBody, {"messages": USER, "tools": [WEATHER]})
    syntax = AnswerSyntax(tokenizer, "auto", "auto")
    question = syntax.question(body)
    prompt = tokenizer.render_chat(question.messages)
    assert syntax.reading(body, question, prompt, SamplingParams(ignore_eos=True))[0].grammar is None
    grammar = syntax.reading(body, question, prompt, SamplingParams())[0].grammar
    assert grammar is not None
    assert not grammar.is_needed, "a server without grammars answers too"
    call = WRITERS["hermes"]([("weather", {"city": "Genève", "days": 2})])
    for text in ("Hello.", "", "a <b> c\n", call, f"{call}\n{call}", f"I look.\n{call}"):
        assert allows(grammar, text, ends[0], grammars), text
    for text in ('<tool_call>{"name"', "<b>", call + "x", WRITERS["hermes"]([("now", {})])):
        assert not allows(grammar, text, ends[0], grammars), text


def test_what_cannot_become_a_grammar_is_refused():
    parameters = {"type": "object", "properties": {"forbidden": {"type": "string"}}}  # the fake engine's word
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"model": MODEL, "messages": USER, "tools": [tool], "tool_choice": "required"}
    with serving(HERMES) as (_, url), httpx.Client(base_url=url, timeout=10) as http:
        assert assert_refused(http.post("/chat/completions", json=body))["param"] == "tools"
        body = {"messages": USER, "tools": [WEATHER], "guided_json": "{"}
        assert assert_refused(http.post("/chat/completions", json=body))["param"] == "guided_json"
    with pytest.raises(ValueError, match="whole answer"):
        answer_grammar("none", [], GrammarSpec("lark", "start: 'x'"), {})
