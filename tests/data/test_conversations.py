"""Every dialect reads to the same conversations; no bad row goes unreported."""

import json

import pytest

from specserve.data.conversations import Message, RowProblem, load, read_jsonl, report
from specserve.errors import DataError

EXPECTED = (Message("system", "s"), Message("user", "q"), Message("assistant", "a"))
DIALECTS = [
    {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"},
        ]
    },
    {"messages": [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "q"), ("assistant", "a"))]},
    {"conversations": [{"role": r, "content": c} for r, c in (("developer", "s"), ("User", "q"), ("model", "a"))]},
]
BAD_ROWS = [
    ("not json", "not JSON"),
    ("[1]", "not a JSON object"),
    ("{}", "none of the fields conversations, messages, text"),
    ('{"messages": []}', "no list of messages"),
    ('{"messages": [3]}', "a message is not an object"),
    ('{"messages": [{"role": "user", "content": "q"}]}', "no assistant message"),
    ('{"messages": [{"role": "wizard", "content": "q"}]}', "unknown role 'wizard'"),
    ('{"messages": [{"role": "assistant", "content": null}]}', "a message's content is not text"),
    ('{"messages": [{"role": "assistant", "content": " "}]}', "a message's content is empty"),
    ('{"text": "\\ud800"}', "text has a lone surrogate"),
    ("[" * 100_000, "not JSON"),
]


def write(path, rows):
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows),
        encoding="utf-8",
    )
    return path


def test_every_dialect_reads_to_the_same_conversation(tmp_path):
    rows = read_jsonl(write(tmp_path / "d.jsonl", [*DIALECTS, {"text": "é\u2028plain", "category": "prose"}]))
    assert [c.messages for c in rows.conversations[:3]] == [EXPECTED] * 3
    document = rows.conversations[3]
    assert (document.is_document, document.messages[0].content) == (True, "é\u2028plain")
    assert (document.category, document.source) == ("prose", "d.jsonl:4")
    assert rows.problems == ()


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_is_reported_with_its_line(tmp_path, row, reason, caplog):
    rows = read_jsonl(write(tmp_path / "d.jsonl", [DIALECTS[0], "", row, DIALECTS[1]]))
    assert rows.problems == (RowProblem(3, reason),)
    assert len(rows.conversations) == 2
    assert reason in caplog.text
    with pytest.raises(DataError, match="no usable row"):
        read_jsonl(write(tmp_path / "bad.jsonl", [row]))


def test_report_counts_by_reason_and_shows_five_lines():
    problems = [*(RowProblem(n, "empty") for n in range(1, 8)), RowProblem(9, "odd")]
    assert report(problems) == "8 rows left out: empty: 7 (line 1, 2, 3, 4, 5, ...); odd: 1 (line 9)"


def test_load_splits_a_file_by_content_and_names_its_choices(tmp_path):
    rows = [{"text": f"document {i}"} for i in range(200)]
    path = write(tmp_path / "d.jsonl", rows)
    train, held_out, everything = (
        {c.messages[0].content for c in load(str(path), split=split).conversations}
        for split in ("train", "held-out", "all")
    )
    assert train | held_out == everything
    assert not train & held_out
    assert 0 < len(held_out) < 20
    shuffled = write(tmp_path / "e.jsonl", rows[::-1])
    assert {c.messages[0].content for c in load(str(shuffled), split="held-out").conversations} == held_out
    with pytest.raises(DataError, match=r"'pydoc' or the path of a \.jsonl file"):
        load("sharegpt", split="train")
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot read"):
        load(str(tmp_path / "gone.jsonl"), split="train")
