"""Every format of a row reads to the same conversation; a row that cannot be used says why."""

import json
from typing import Any

import numpy as np
import pytest

from specserve.data.conversations import (
    NO_COLUMNS,
    BadRowError,
    Columns,
    Conversation,
    Message,
    RowProblem,
    TokenRow,
    parse_row,
    parse_template_kwargs,
    report,
    split_of,
    unread_fields,
)
from specserve.errors import ConfigError

EXPECTED = (Message("system", "s"), Message("user", "q"), Message("assistant", "a"))
DIALECTS = [
    {
        "conversations": [
            {"from": "system", "value": "s", "markdown": None},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"},
        ]
    },
    {"messages": [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "q"), ("assistant", "a"))]},
    {"conversations": [{"role": r, "content": c} for r, c in (("developer", "s"), ("User", "q"), ("model", "a"))]},
    {
        "messages": None,
        "text": None,
        "conversations": [{"role": None, "from": m.role, "value": m.content} for m in EXPECTED],
    },
]
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}


def _calls(*calls: Any) -> dict[str, Any]:
    return {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": list(calls)}]}


BAD_ROWS = [
    ([1], "not a JSON object"),
    ({}, "none of the fields conversations, messages, text, input_ids"),
    ({"messages": []}, "no list of messages"),
    ({"messages": [3]}, "a message is not an object"),
    ({"messages": [{"role": "user", "content": "q"}]}, "no assistant message"),
    ({"messages": [{"role": "wizard", "content": "q"}]}, "unknown role 'wizard'"),
    ({"messages": [{"role": "assistant", "content": None}]}, "a message's content is not text"),
    ({"messages": [{"role": "assistant", "content": " "}]}, "a message's content is empty"),
    ({"messages": [{"role": "user", "content": []}]}, "a message's content is empty"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "a message's content has parts that are not text",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a part of a message is not text"),
    ({"messages": [{"role": "tool", "content": None}]}, "a message's content is not text"),
    ({"messages": [{"role": "tool", "content": "2", "tool_call_id": 7}]}, "a message's tool_call_id is not text"),
    ({"messages": [{"role": "user", "content": "q", "thinking": "hm"}]}, "a message of the user has reasoning"),
    (
        {"messages": [{"role": "assistant", "content": "a", "thinking": "hm", "reasoning": "so"}]},
        "a message has several reasonings, in reasoning_content and reasoning and thinking",
    ),
    ({"messages": [{"role": "assistant", "content": "a", "reasoning": 3}]}, "a message's reasoning is not text"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}, "tool_calls": [{"name": "f"}]}]},
        "a message has a function_call beside tool_calls",
    ),
    ({"messages": [{"role": "function", "content": None}]}, "a message's content is not text"),
    (
        {"messages": CHAT, "functions": [{"name": "f"}], "tools": [{"name": "g"}]},
        "tools and functions are not the same",
    ),
    ({"messages": CHAT, "system": "\ud800"}, "system has a lone surrogate"),
    (_calls({"function": "f"}), "a tool call has no function name"),
    (_calls({"arguments": {}}), "a tool call has no function name"),
    (_calls({"function": {"name": "f", "arguments": "{"}}), "a tool call's arguments is not JSON"),
    (_calls({"function": {"name": "f", "arguments": "[1]"}}), "a tool call's arguments is not an object"),
    (_calls("f"), "tool_calls is not a list of objects"),
    (_calls({"name": "f", "arguments": {"a": "\ud800"}}), "a tool or its call has a lone surrogate"),
    (_calls({"name": "f", "arguments": {"a": float("nan")}}), "a value is not JSON: .*"),
    ({"messages": CHAT, "tools": {"name": "f"}}, "tools is not a list of objects"),
    ({"messages": CHAT, "tools": "f"}, "tools is not JSON"),
    ({"messages": CHAT, "tools": [{"name": b"f"}]}, "a value is not JSON: .*"),
    ({"messages": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs is not an object"),
    ({"text": "\ud800"}, "text has a lone surrogate"),
    ({"text": "t", "category": 3}, "category is not text"),
    ({"input_ids": [1, 2.0], "loss_mask": [0, 1]}, "input_ids is not a list of integers"),
    ({"input_ids": [1, True], "loss_mask": [0, 1]}, "input_ids is not a list of integers"),
    ({"input_ids": []}, "input_ids is not a list of integers"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask is not a list as long as input_ids"),
    ({"input_ids": [1, 2]}, "loss_mask is not a list as long as input_ids"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask has values other than 0 and 1"),
    ({"input_ids": [1, 64], "loss_mask": [0, 1]}, "input_ids are not all in the vocabulary of 64"),
    ({"input_ids": [-1, 6], "loss_mask": [0, 1]}, "input_ids are not all in the vocabulary of 64"),
    ({"input_ids": [1, 6], "loss_mask": [0, 1], "split": "test"}, "split is not train or held-out"),
    ({"input_ids": [1, 6], "loss_mask": [0, 1], "key": "zz"}, "key is not a hexadecimal number"),
]


@pytest.mark.parametrize("row", DIALECTS)
def test_every_dialect_reads_to_the_same_conversation(row):
    assert parse_row(row | {"category": "prose"}, "d:1") == Conversation(EXPECTED, "prose", "d:1")


def test_a_plain_document_is_one_message():
    document = parse_row({"text": "é\u2028plain"}, "d:4")
    assert isinstance(document, Conversation)
    assert (document.is_document, document.messages[0].content, document.category) == (True, "é\u2028plain", "")


def test_token_ids_stay_as_they_are():
    row = parse_row({"input_ids": [5, 0, 63], "loss_mask": [0, 1, True], "key": "2a"}, "d:1", vocab_size=64)
    assert isinstance(row, TokenRow)
    assert row.token_ids.tolist() == [5, 0, 63]
    assert row.token_ids.dtype == np.int32
    assert row.loss_mask.tolist() == [False, True, True]
    assert row.key == "2a"


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS, ids=[str(i) for i in range(len(BAD_ROWS))])
def test_a_bad_row_says_why(row, reason):
    with pytest.raises(BadRowError, match=f"^{reason}$"):
        parse_row(row, "d:1", vocab_size=64)


def test_report_counts_by_reason_and_shows_five_lines():
    problems = [*(RowProblem(n, "empty") for n in range(1, 8)), RowProblem(9, "odd")]
    assert report(problems) == "8 rows left out: empty: 7 (line 1, 2, 3, 4, 5, ...); odd: 1 (line 9)"


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "default": None}}}]
WITH_TOOLS = {
    "messages": [
        {"role": "user", "content": "one\ntwo", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "so"},
    ],
    "tools": TOOLS,
    "chat_template_kwargs": {"enable_thinking": False},
}


def _with(turn: int, **fields: Any) -> dict[str, Any]:
    messages = [{**message, **(fields if i == turn else {})} for i, message in enumerate(WITH_TOOLS["messages"])]
    return WITH_TOOLS | {"messages": messages}


@pytest.mark.parametrize(
    "row",
    [
        WITH_TOOLS,
        WITH_TOOLS | {"tools": json.dumps(TOOLS), "chat_template_kwargs": '{"enable_thinking": false}'},
        _with(0, content=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]),
        _with(1, content=None, tool_calls=json.dumps([CALL])),
        _with(1, tool_calls=[{**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}]),
        _with(1, tool_calls=[{"id": "c1", "name": "add", "arguments": {"a": 1, "b": "é"}}]),
        _with(1, reasoning_content=None, thinking="hm", reasoning=""),
        _with(3, tool_calls=[], reasoning="", name=None, tool_call_id=None),
        WITH_TOOLS | {"tools": [TOOLS[0]["function"]]},
        WITH_TOOLS | {"tools": None, "functions": json.dumps([TOOLS[0]["function"]])},
        WITH_TOOLS | {"functions": [TOOLS[0]["function"]]},
        WITH_TOOLS | {"tools": [{"type": "function", **TOOLS[0]["function"]}]},
        WITH_TOOLS | {"tools": [{"type": None, **TOOLS[0]["function"]}]},
        _with(2, role="function"),
    ],
)
def test_what_a_row_says_reaches_the_template_in_every_dialect(row):
    conversation = parse_row(row, "d:1")
    assert isinstance(conversation, Conversation)
    thought = {"reasoning_content": "hm", "reasoning": "hm", "thinking": "hm"}
    user, call, result, answer = WITH_TOOLS["messages"]
    assert conversation.as_dicts() == [user, call | thought, result, answer]
    assert conversation.tool_dicts() == TOOLS
    assert conversation.variables() == {"enable_thinking": False}
    assert conversation == parse_row(WITH_TOOLS, "d:1")
    assert len({conversation, parse_row(WITH_TOOLS, "d:1")}) == 1
    question = conversation.question
    assert (question.as_dicts(), question.tools, question.template_kwargs) == (
        [user],
        conversation.tools,
        conversation.template_kwargs,
    )
    plain = parse_row({"messages": [{"role": "user", "content": "one\ntwo"}, answer]}, "d:1")
    assert conversation.key == plain.key


def test_former_words_and_a_column_of_the_system_say_the_same():
    call = {"name": "f", "arguments": '{"a": 1}'}
    said, system = {"role": "assistant", "content": None}, {"role": "system", "content": "s"}
    former = parse_row({"messages": [CHAT[0], said | {"function_call": call}], "system": "s"}, "d:1")
    messages = [system, CHAT[0], said | {"tool_calls": [call]}]
    assert former == parse_row({"messages": messages}, "d:1") == parse_row({"messages": messages, "system": "s"}, "d:1")
    columns = Columns.parse(["messages=chat"])
    assert parse_row(columns.rename({"chat": messages[1:], "system": "s"}), "d:1") == former


def test_tools_of_other_kinds_stay_as_they_are():
    tools = [{"type": "custom", "name": "f"}, {"type": "web_search"}, FUNCTION | {"name": "f"}]
    row = parse_row({"messages": CHAT, "tools": tools}, "d:1")
    assert isinstance(row, Conversation)
    assert row.tool_dicts() == tools


@pytest.mark.parametrize(
    ("beside", "unread"),
    [
        ({"system": 3}, {"system"}),
        ({"system": {"prompt": "s"}}, {"system"}),
        ({"system": " \n"}, set()),
        ({"functions": "f"}, {"functions"}),
        ({"functions": ["f"]}, {"functions"}),
        ({"functions": {"f": 1}}, {"functions"}),
        ({"functions": '[{"na'}, {"functions"}),
    ],
)
def test_columns_of_another_use_drop_no_row_and_are_named(beside, unread):
    row = {"messages": CHAT}
    assert parse_row(row | beside, "d:1") == parse_row(row, "d:1")
    assert unread_fields(row | beside) == unread


@pytest.mark.parametrize(("system", "unread"), [("s", set()), (" s\n", set()), ("other", {"system"}), (" ", set())])
@pytest.mark.parametrize("place", [0, 1])
def test_the_messages_own_system_message_wins(system, unread, place):
    said = {"from": "Developer", "value": [{"type": "text", "text": "s "}]}
    row = {"messages": [*CHAT[:place], said, *CHAT[place:]]}
    assert parse_row(row | {"system": system}, "d:1") == parse_row(row, "d:1")
    assert unread_fields(row | {"system": system}) == unread


def test_a_call_without_arguments_has_none():
    for arguments in (None, "", {}, "{}"):
        row = parse_row(_calls({"function": {"name": "f", "arguments": arguments}}), "d:1")
        assert isinstance(row, Conversation)
        assert row.as_dicts()[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {}}, "type": "function"}]


def test_fields_that_say_something_and_are_not_read_are_named():
    row = _with(1, weight=0, markdown=None, annotations=[], refusal="")
    assert unread_fields(row | {"id": 3}) == {"weight"}
    assert unread_fields({"conversations": [{"from": "human", "value": "q", "lang": "en"}, 3]}) == {"lang"}
    assert unread_fields({"text": "t"}) == unread_fields({"messages": 3}) == unread_fields(WITH_TOOLS) == set()


def test_template_kwargs_are_json_or_text():
    entries = ["enable_thinking=false", "reasoning_effort=high", "n=2", "empty=", "equation=a=b"]
    expected = {"enable_thinking": False, "reasoning_effort": "high", "n": 2, "empty": "", "equation": "a=b"}
    assert parse_template_kwargs(entries) == expected
    assert parse_template_kwargs(()) == {}
    for bad in (["enable_thinking"], ["=1"], ["a b=1"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match=r"data\.template_kwargs"):
            parse_template_kwargs(bad)


@pytest.mark.parametrize(
    ("entries", "row", "expected"),
    [
        (["messages=chat"], {"chat": DIALECTS[0]["conversations"], "category": "x"}, Conversation(EXPECTED, "", "d:1")),
        (
            ["response=a", "prompt=q", "category=topic"],
            {"q": "q", "a": "a", "topic": "t"},
            Conversation(EXPECTED[1:], "t", "d:1"),
        ),
        (
            ["messages=chat", "tools=functions"],
            {"chat": CHAT, "functions": '[{"name": "f"}]', "chat_template_kwargs": {"n": 2}},
            Conversation(EXPECTED[1:], "", "d:1", json.dumps([FUNCTION]), '{"n": 2}'),
        ),
        (["messages=chat"], {"chat": CHAT, "tools": []}, Conversation(EXPECTED[1:], "", "d:1")),
        (["text=body", "category=topic"], {"body": "b"}, Conversation((Message("text", "b"),), "", "d:1")),
    ],
)
def test_columns_are_renamed(entries, row, expected):
    columns = Columns.parse(entries)
    assert columns.fit(row)
    assert not columns.fit({"other": 1})
    assert parse_row(columns.rename(row), "d:1") == expected


@pytest.mark.parametrize(
    "entries",
    [["prompt=q"], ["messages=m", "text=t"], ["category=c"], ["question=q"], ["text"], ["text="], ["text=a", "text=b"]],
)
def test_columns_that_make_no_row_are_refused(entries):
    with pytest.raises(ConfigError, match=r"data\.columns"):
        Columns.parse(entries)


def test_no_columns_fit_nothing():
    assert Columns.parse(()) == NO_COLUMNS
    assert not NO_COLUMNS.fit({"messages": []})


def test_the_key_is_of_the_question_alone():
    def ask(question: str, answer: str, system: str = "s") -> Conversation:
        return Conversation(
            (Message("system", system), Message("user", question), Message("assistant", answer)), "", ""
        )

    assert ask("q", "a").key == ask("q ", "other", system="another").key != ask("p", "a").key
    followed = Conversation((*ask("q", "a").messages, Message("user", "more")), "", "")
    assert followed.key == ask("q", "a").key
    assert followed.question == Conversation(ask("q", "a").messages[:2], "", "")
    unasked = [Conversation((Message("assistant", answer),), "", "") for answer in ("a", "b")]
    assert unasked[0].key != unasked[1].key
    share = np.mean([split_of(ask(f"question {i}", "a")) == "held-out" for i in range(5000)])
    assert 0.03 < share < 0.05
