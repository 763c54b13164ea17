"""What `data prepare` and `data inspect` show: the text of a row as it is, coloured by what training does with it."""

import io
import json
import shutil

import numpy as np
import pytest
from rich.console import Console

from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.cli.data_view import (
    GIVEN,
    LEARNED,
    OUTSIDE,
    Prepared,
    PrepareRun,
    coloured,
    histogram,
    load,
    prepare,
    summary,
)
from specserve.data.conversations import Conversation, Message, RowProblem
from specserve.data.dataset import build, tokenize_source, write_rows
from specserve.data.sources import SourceRows
from specserve.errors import ConfigError, DataError


@pytest.fixture
def prepared(pydoc_tokenizer, tmp_path, monkeypatch) -> Prepared:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chats = tuple(
        Conversation((Message("user", f"what is {i}?"), Message("assistant", f"it is {'🙂' * i} return")), "c", "here")
        for i in range(1, 11)
    )
    parts = [
        SourceRows("a.jsonl", 1.0, chats[:6], chats[6:7], (RowProblem(3, "not JSON"),), num_withheld=2),
        SourceRows("gsm8k", 2.0, chats[7:], ()),
    ]
    tokens = [tokenize_source(part, pydoc_tokenizer, BUNDLED_FOLDER, max_len=64) for part in parts]
    vocab_size = pydoc_tokenizer.vocab_size
    draft_ids = np.array([i for i in range(vocab_size) if i != pydoc_tokenizer.encode(" return")[0]], np.int32)
    return Prepared(build(tokens, seq_len=64, vocab_size=vocab_size), pydoc_tokenizer, BUNDLED_FOLDER, draft_ids)


def shown(renderable) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=78)
    console.print(renderable)
    return [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_row_is_shown_whole_and_coloured_by_its_mask(prepared):
    document = prepared.dataset.reports[0].tokens.tokenized.documents[2]
    text = coloured(document, prepared, 1000, has_colours=True)
    assert text.plain == prepared.tokenizer.decode(document.token_ids.tolist(), skip_special_tokens=False)
    by_style = dict.fromkeys((GIVEN, LEARNED, OUTSIDE), "")
    for span in text.spans:
        by_style[str(span.style)] += text.plain[span.start : span.end]
    assert by_style[OUTSIDE] == " return"
    assert by_style[LEARNED] == "it is 🙂🙂🙂<|im_end|>"
    assert "what is 3?" in by_style[GIVEN]


def test_without_colours_brackets_mark_what_bears_loss_and_the_rest_is_counted(prepared):
    document = prepared.dataset.reports[0].tokens.tokenized.documents[0]
    text = coloured(document, prepared, 1000, has_colours=False).plain
    assert "⟦it is 🙂 return<|im_end|>⟧" in text
    assert coloured(document, prepared, 4, has_colours=True).plain.endswith(f" … {len(document) - 4} more tokens")


def test_the_summary_has_a_column_per_source_and_one_for_the_mixture(prepared):
    lines = {" ".join(line[:-3]): line[-3:] for line in shown(summary(prepared))}
    reports = prepared.dataset.reports
    assert lines["conversations"] == ["6", "3", "9"]
    assert lines["held out"] == ["1", "0", "1"]
    assert lines["held out elsewhere, not used"] == ["2", "0", "2"]
    assert lines["bad rows, left out"] == ["1", "0", "1"]
    assert lines["packed rows"] == [*(str(report.num_rows) for report in reports), str(len(prepared.dataset.rows))]
    covered = [1 - report.counts[prepared.tokenizer.encode(" return")[0]] / report.counts.sum() for report in reports]
    (coverage,) = (line for name, line in lines.items() if name.startswith("in a draft vocabulary"))
    assert coverage[:2] == [f"{share:.2%}" for share in covered]


def test_the_histogram_counts_every_document(prepared):
    counts = [int(line[-1]) for line in shown(histogram(prepared.dataset.reports[0])) if "to" in line]
    assert sum(counts) == 6


@pytest.mark.parametrize(("output", "message"), [("rows.txt", "ending in .jsonl"), ("a.jsonl", "one of the sources")])
def test_an_output_that_cannot_be_a_source_or_is_one_is_refused_at_once(output, message):
    with pytest.raises(ConfigError, match=message):
        prepare(PrepareRun(source=("a.jsonl=2",), output=output))


@pytest.mark.parametrize(("entry", "message"), [("odd=1", "sets odd, which .* does not read"), ("tools=1", "reserved")])
def test_variables_that_the_template_does_not_read_are_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        load(PrepareRun(template_kwargs=(entry,)))


def test_variables_reach_the_template(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, chats = tmp_path / "target", tmp_path / "chats.jsonl"
    shutil.copytree(BUNDLED_FOLDER, folder)
    template = folder / "chat_template.jinja"
    template.write_text("{{ greeting }}" + template.read_text())
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}]} for i in range(9)
    ]
    rows[0]["chat_template_kwargs"] = {"greeting": "own"}  # type: ignore[assignment]
    chats.write_text("\n".join(map(json.dumps, rows)))
    prepared = load(PrepareRun(target=str(folder), source=(str(chats),), template_kwargs=("greeting=hello",)))
    documents = prepared.dataset.reports[0].tokens.tokenized.documents
    begins = [prepared.tokenizer.decode(document.token_ids.tolist()).partition("user")[0] for document in documents]
    assert [begin.strip() for begin in begins] == ["own", *["hello"] * (len(documents) - 1)]


def test_rows_that_cannot_be_written_are_an_error(prepared, tmp_path):
    parts = [("train", report.tokens) for report in prepared.dataset.reports]
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot write the rows: No such file or directory"):
        write_rows(parts, tmp_path / "gone" / "rows.jsonl")
