"""The formats of calls and of reasoning are chosen by what a chat template writes, and not by words that it holds."""

from typing import Any

import pytest
from chats import with_template
from fakes import MODEL, USER
from fixed_text import ARGUMENTS, WEATHER

from specserve.serve.http.formats.reasoning import THINK_MARKS, AnswerSyntax
from specserve.serve.http.openai.bodies import ChatBody
from specserve.serve.http.openai.fields import check_body
from specserve.serve.requests.request import SamplingParams

ASK: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [WEATHER]}
HAS_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
ROLES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH = "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
ITEMS = "{% for k, v in c.function.arguments.items() %}ITEM{% endfor %}"
NAME, ARGS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
QUOTED = "{{ ',' if not loop.first }}{{ k }}:{{ '<|\"|>' ~ v ~ '<|\"|>' if v is string else v }}"
TEMPLATES = {  # the way of a call, and words that stand elsewhere
    "hermes": ('<tool_call>\n{"name": "' + NAME + '", "arguments": ' + ARGS + "}\n</tool_call>", "<function="),
    "llama3": ('{"name": "' + NAME + '", "parameters": ' + ARGS + "}", "<tool_call>"),
    "functionary": ("<function=" + NAME + ">" + ARGS + "</function>", "<|python_tag|> <tool_call> <parameter="),
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        + ARGS
        + "<|tool_call_end|><|tool_calls_section_end|>",
        "<tool_call>",
    ),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="'
        + NAME
        + '">\n'
        + ITEMS.replace("ITEM", '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n')
        + "</invoke>\n</minimax:tool_call>",
        "</think>",
    ),
    "gemma4": (
        "<|tool_call>call:{{ c.function.name ~ '{' }}" + ITEMS.replace("ITEM", QUOTED) + "}<tool_call|>",
        "<tool_call>",
    ),
    "lfm2": (
        "<|tool_call_start|>["
        + NAME
        + "("
        + ITEMS.replace("ITEM", "{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}")
        + ")]<|tool_call_end|>",
        "<tool_call>",
    ),
    "command": (
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "'
        + NAME
        + '", "parameters": '
        + ARGS
        + "}\n]<|END_ACTION|>",
        '"parameters": <|python_tag|> <tool_call> <function=',
    ),
    "command fence": (
        '\nAction:\n```json\n[\n    {\n        "tool_name": "'
        + NAME
        + '",\n        "parameters": {{ c.function.arguments | tojson(indent=4) }}\n    }\n]```\n',
        '"parameters": <tool_call>',
    ),
    "seed": (
        "<seed:tool_call>\n<function="
        + NAME
        + ">\n"
        + ITEMS.replace("ITEM", "<parameter={{ k }}>{{ v | string }}</parameter>\n")
        + "</function>\n</seed:tool_call>",
        "<tool_call>",
    ),
    "generic": ("@" + NAME + "@" + ARGS + "@", '"parameters": <|python_tag|> <tool_call> <function= [TOOL_CALLS]'),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_chosen_by_what_the_template_writes_and_not_by_its_words(name: str) -> None:
    call, words = TEMPLATES[name]
    source = "{# " + words + " #}" + HAS_TOOLS + ROLES.replace("CALLS", EACH.replace("CALL", call)) + ASKS
    tokenizer = with_template(source)
    found = AnswerSyntax(tokenizer, "auto", "auto").tool_format
    assert name in (found.name, found.wording_for(tokenizer.template))


def test_a_template_that_writes_no_calls_shows_its_format_by_its_words() -> None:
    """As LFM2's and Phi 4 mini's do. Then calls of the history stand in the content, as the model writes them; and
    tools stand where the template has a place for them, which is the system message of Phi's."""
    of_phi = "{% for m in messages %}{{ m.content }}"
    of_phi += "{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}{% endfor %}"
    of_lfm = "<|tool_list_start|>" + HAS_TOOLS + ROLES.replace("CALLS", "") + ASKS
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    body = check_body(ChatBody, ASK | {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]})
    for source, name, said in [
        (of_phi, "phi4", 'functools[{"name": "weather", "arguments": {"city": "Genève", "days": 2}}]'),
        (of_lfm, "lfm2", '<|tool_call_start|>[weather(city="Genève", days=2)]<|tool_call_end|>'),
    ]:
        tokenizer = with_template(source)
        syntax = AnswerSyntax(tokenizer, "auto", "auto")
        assert syntax.tool_format.name == name
        turns, given = syntax.written(body.messages, body.tools)
        text = tokenizer.template.render(turns, tools=given, add_generation_prompt=False)
        assert said in text
        assert text.count('"name": "weather"') == 1 + said.count('"name"')


@pytest.mark.parametrize("arguments", ["no JSON", "[1, 2]", '{"city": "Ro'])
def test_arguments_of_a_history_that_are_no_object_stay_as_they_were(arguments: str) -> None:
    """Also where the server writes the calls itself: a model that was cut short must see what it wrote."""
    tokenizer = with_template(ROLES.replace("CALLS", "") + ASKS)
    syntax = AnswerSyntax(tokenizer, "auto", "auto")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    body = check_body(ChatBody, ASK | {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]})
    turns, _ = syntax.written(body.messages, body.tools)
    assert f'"arguments": {arguments}}}' in tokenizer.template.render(turns, add_generation_prompt=False)


@pytest.mark.parametrize("takes_system", [True, False])
def test_a_template_that_refuses_roles_gets_chats_with_tools_in_those_that_it_has(takes_system: bool) -> None:
    """As Gemma 2's does: no system, and the user and the assistant in turns."""
    roles = "['user', 'assistant', 'system']" if takes_system else "['user', 'assistant']"
    refuses = "{% if m.role not in " + roles + " %}{{ raise_exception('a role') }}{% endif %}"
    tokenizer = with_template(ROLES.replace("CALLS", refuses) + ASKS)
    syntax = AnswerSyntax(tokenizer, "auto", "auto")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    results = [{"role": "tool", "content": each, "tool_call_id": "1"} for each in ("rain", "snow")]
    body = check_body(ChatBody, ASK | {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}, *results]})
    turns, given = syntax.written(body.messages, body.tools)
    assert not given
    assert [turn["role"] for turn in turns] == ["system"] * takes_system + ["user", "assistant", "user"]
    text = tokenizer.template.render(turns)
    assert all(each in text for each in ("You can call these tools", USER[0]["content"], "rain", "snow"))
    assert text.count('"name": "weather"') == 2, "the tool, and the call of it"


NAMELESS = {
    "kimi-vl": ("◁think▷", "◁/think▷"),
    "pangu": ("[unused16]", "[unused17]"),
    "exaone": ("<thought>", "</thought>"),
}


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", [*THINK_MARKS, *NAMELESS])
def test_reasoning_is_known_by_what_the_template_writes(name: str, is_open: bool) -> None:
    """Also behind marks that nobody here has named. A prompt may have begun it."""
    begin, end = (THINK_MARKS | NAMELESS)[name]  # type: ignore[operator]
    thought = f"{{% if m.reasoning_content %}}{begin}\n{{{{ m.reasoning_content }}}}\n{end}{{% endif %}}"
    words = " ".join(mark for other, pair in THINK_MARKS.items() if other != name for mark in pair)
    asks = ASKS.replace("assistant\n", f"assistant\n{begin}\n") if is_open and "/" in end else ASKS
    source = "{# " + words + " #}" + ROLES.replace("{{ m.content }}CALLS", thought + "{{ m.content }}") + asks
    tokenizer = with_template(source)
    syntax = AnswerSyntax(tokenizer, "auto", "auto")
    assert syntax.reasoning == (name if name in THINK_MARKS else "template")
    body = check_body(ChatBody, {"model": MODEL, "messages": USER})
    question = syntax.question(body)
    prompt_ids = tokenizer.render_chat(question.messages)
    _, make_parser = syntax.reading(body, question, prompt_ids, SamplingParams())
    parser = make_parser()
    text = ("" if asks is not ASKS else begin) + f"\nhm\n{end}\n\nyes"
    part = parser.push(text) + parser.finish()
    assert (part.reasoning, part.content) == ("hm", "yes")
