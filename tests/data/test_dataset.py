"""From a mixture to rows: what the cache gives is what is made afresh, and every source is accounted for."""

import shutil
from dataclasses import replace
from pathlib import Path

import chats as chat_families
import numpy as np
import pytest

from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.data import dataset, pydoc, token_cache
from specserve.data.conversations import Conversation, Message, Row, TokenRow, parse_row
from specserve.data.dataset import build, draw, held_out_prompts, tokenize_source, write_rows
from specserve.data.documents import TokenizedDocuments, tokenize_part
from specserve.data.sources import SourceRows, load_mixture
from specserve.data.token_cache import tokenize_cached
from specserve.errors import DataError
from specserve.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specserve" / "tokens"


def chats(count: int) -> list[Row]:
    return [
        Conversation(
            (Message("user", f"what is {i}?"), Message("assistant", f"a number, {'very ' * (i % 7)}odd")),
            "odd" if i % 2 else "even",
            f"{i}",
        )
        for i in range(count)
    ]


def source(rows: list[Row], weight: float = 1.0, name: str = "chats") -> SourceRows:
    return SourceRows(name, weight, tuple(rows), ())


def same(left: TokenizedDocuments, right: TokenizedDocuments) -> bool:
    counts = [{name: value for name, value in vars(side).items() if name != "documents"} for side in (left, right)]
    pairs = zip(left.documents, right.documents, strict=True)
    return counts[0] == counts[1] and all(
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.loss_mask, b.loss_mask)
        and (a.token_ids.dtype, a.loss_mask.dtype) == (b.token_ids.dtype, b.loss_mask.dtype)
        for a, b in pairs
    )


def test_a_hit_is_what_is_made_afresh(pydoc_tokenizer, cache, monkeypatch):
    rows = [*chats(20), Conversation((Message("user", "long " * 90), Message("assistant", "a")), "", "long")]
    fresh = tokenize_part(rows, pydoc_tokenizer, 64)
    assert (len(fresh.documents), fresh.counts["dropped"]) == (20, 1)
    first = tokenize_cached(rows, pydoc_tokenizer, BUNDLED_FOLDER, 64)
    monkeypatch.setattr(token_cache, "tokenize_part", None)  # a hit makes nothing
    assert same(first, fresh)
    assert same(tokenize_cached(rows, pydoc_tokenizer, BUNDLED_FOLDER, 64), fresh)
    assert len(list(cache.iterdir())) == 1


def test_whatever_the_ids_depend_on_is_in_the_key(pydoc_tokenizer, cache, tmp_path):
    rows = chats(4)

    def files_after(conversations: list[Row], folder: Path = BUNDLED_FOLDER, max_len: int = 64) -> int:
        tokenizer = pydoc_tokenizer if folder == BUNDLED_FOLDER else Tokenizer.load(folder)
        tokenize_cached(conversations, tokenizer, folder, max_len)
        return len(list(cache.iterdir()))

    assert files_after(rows) == 1
    assert files_after(rows) == 1
    assert files_after(rows, max_len=63) == 2
    assert files_after(rows[:3]) == 3
    assert files_after([*rows[1:], rows[0]]) == 4
    # the same text, cut into messages in another way
    chat = [Message("user", "q"), Message("assistant", "a"), Message("user", "assistantb")]
    assert files_after([Conversation(tuple(chat), "", "")]) == 5
    chat[1:] = [Message("assistant", "auser"), Message("assistant", "b")]
    assert files_after([Conversation(tuple(chat), "", "")]) == 6
    copy = tmp_path / "copy"
    shutil.copytree(BUNDLED_FOLDER, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    assert files_after(rows, copy) == 6  # where the tokenizer lies says nothing
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> "))
    assert files_after(rows, copy) == 7
    [first] = (row for row in rows[:1] if isinstance(row, Conversation))
    said = [{"tools": '[{"name": "f"}]'}, {"template_kwargs": '{"n": 1}'}, {"template_kwargs": '{"n": 2}'}]
    assert [files_after([replace(first, **fields)]) for fields in said] == [8, 9, 10]
    call = '[{"type": "function", "function": {"name": "is", "arguments": {}}}]'
    fields = ({"reasoning": "r"}, {"tool_calls": call}, {"tool_call_id": "r"}, {"name": "r"})
    for number, own in enumerate(fields, start=11):
        answer = replace(first.messages[1], **own)
        assert files_after([replace(first, messages=(first.messages[0], answer))]) == number
    quiet = Tokenizer(pydoc_tokenizer._backend, template_kwargs={"enable_thinking": False})
    tokenize_cached(rows, quiet, BUNDLED_FOLDER, 64)
    assert len(list(cache.iterdir())) == 15


def test_a_damaged_file_is_made_again(pydoc_tokenizer, cache, caplog):
    rows = chats(5)
    fresh = tokenize_cached(rows, pydoc_tokenizer, BUNDLED_FOLDER, 64)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    damaged = [whole[: len(whole) * i // 8] for i in range(8)]
    middles = [len(whole) * i // 40 for i in range(1, 20)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in middles]
    for content in damaged:
        file.write_bytes(content)
        assert same(tokenize_cached(rows, pydoc_tokenizer, BUNDLED_FOLDER, 64), fresh)
    assert "is damaged" in caplog.text


def test_a_cache_that_cannot_be_written_costs_only_time(pydoc_tokenizer, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(tokenize_cached(chats(3), pydoc_tokenizer, BUNDLED_FOLDER, 64).documents) == 3
    assert "made again next time" in caplog.text


def test_a_write_that_fails_leaves_nothing_behind(pydoc_tokenizer, cache, monkeypatch):
    def fail(file, **_arrays):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(token_cache.np, "savez", fail)
    assert len(tokenize_cached(chats(3), pydoc_tokenizer, BUNDLED_FOLDER, 64).documents) == 3
    assert list(cache.iterdir()) == []


def test_workers_make_what_one_process_makes_and_say_nothing_on_the_terminal(pydoc_tokenizer, monkeypatch, capfd):
    monkeypatch.setattr(token_cache, "PART", 3)
    rows = [*chats(30), Conversation((Message("user", "long " * 90), Message("assistant", "a")), "", "long")]
    alone = tokenize_part(rows, pydoc_tokenizer, 64)
    assert same(token_cache._tokenize(rows, pydoc_tokenizer, 64, workers=2), alone)
    assert capfd.readouterr() == ("", "")  # transformers gives advice where it finds no torch
    assert alone.counts["dropped"] == 1


def test_prepared_rows_are_a_source_like_the_one_they_came_of(pydoc_tokenizer, tmp_path):
    mixture = [replace(source(chats(80)[:60]), held_out=tuple(chats(80)[60:]))]  # a split that is not by key

    def parts(part: SourceRows) -> list:
        both = (("train", part), ("held-out", replace(part, train=part.held_out)))
        return [(split, tokenize_source(rows, pydoc_tokenizer, BUNDLED_FOLDER, max_len=64)) for split, rows in both]

    assert write_rows(parts(mixture[0]), tmp_path / "rows.jsonl") == 80
    (again,) = load_mixture([str(tmp_path / "rows.jsonl")], vocab_size=pydoc_tokenizer.vocab_size)
    assert [row.key for row in again.train] == [row.key for row in mixture[0].train]
    assert [row.key for row in again.held_out] == [row.key for row in mixture[0].held_out]
    assert {row.category for row in again.train} == {"odd", "even"}
    for (_, old), (_, new) in zip(parts(mixture[0]), parts(again), strict=True):
        assert same(old.tokenized, new.tokenized)
    prompts = [held_out_prompts(sources, pydoc_tokenizer, 2, max_len=64) for sources in (mixture, [again])]
    assert [p.token_ids for p in prompts[0]] == [p.token_ids for p in prompts[1]]
    short = tokenize_source(again, pydoc_tokenizer, BUNDLED_FOLDER, max_len=20)
    assert {len(document) for document in short.tokenized.documents} == {20}
    lengths = [len(row.token_ids) for row in again.train]
    assert short.tokenized.counts["truncated"] == sum(length > 20 for length in lengths)
    assert short.tokenized.counts["truncated tokens"] == sum(max(0, length - 20) for length in lengths)


def test_a_row_of_token_ids_is_cut_behind_the_last_answer_that_fits(pydoc_tokenizer):
    loss_mask = np.array([0, 1, 1, 0, 0, 1, 1, 1, 1, 1], bool)
    row = TokenRow(np.arange(10, dtype=np.int32), loss_mask, "", "", "1")
    cut = tokenize_source(source([row]), pydoc_tokenizer, BUNDLED_FOLDER, max_len=8).tokenized
    assert [document.token_ids.tolist() for document in cut.documents] == [[0, 1, 2]]
    assert (cut.counts["truncated"], cut.counts["truncated tokens"]) == (1, 7)


def test_every_source_is_accounted_for(pydoc_tokenizer):
    vocab_size = pydoc_tokenizer.vocab_size
    parts = [source(chats(30), name="a"), source(chats(50)[30:], weight=2.0, name="b")]
    tokens = [tokenize_source(part, pydoc_tokenizer, BUNDLED_FOLDER, max_len=32) for part in parts]
    built = build(tokens, seq_len=32, vocab_size=vocab_size)
    assert built.rows.weights == (1.0, 2.0)
    assert built.rows.source_starts == (0, built.reports[0].num_rows)
    first, second = built.reports
    for report, part in zip(built.reports, tokens, strict=True):
        assert report.counts.sum() == part.tokenized.num_loss_tokens > 0
    assert np.array_equal(built.counts, first.counts + 2 * second.counts)
    assert first.num_rows + second.num_rows == len(built.rows)
    ids = built.rows.token_ids[built.rows.loss_mask]
    assert np.array_equal(np.bincount(ids, minlength=vocab_size), first.counts + second.counts)


def test_a_source_with_nothing_to_learn_names_itself(pydoc_tokenizer):
    with pytest.raises(DataError, match=r"chats: none of 2 .* within 8 tokens; give a longer --seq-len"):
        tokenize_source(source(chats(2)), pydoc_tokenizer, BUNDLED_FOLDER, max_len=8)


def test_draw_takes_exactly_so_many_rows_of_the_mixture(caplog):
    mixture = [source(chats(30), name="a"), source(chats(10), name="b"), source(chats(1), name="c")]
    drawn = draw(mixture, 12, seed=0)
    assert sum(len(part.train) for part in drawn) == 12
    assert [len(set(part.train)) for part in drawn] == [len(part.train) for part in drawn]
    assert draw(mixture, 12, seed=0) == drawn != draw(mixture, 12, seed=1)
    assert draw(mixture, 0, seed=0) == draw(mixture, 41, seed=0) == tuple(mixture)
    assert "c: none of its 1 rows is among the 12" in caplog.text


def test_held_out_prompts_take_turns_and_ask_only_what_can_be_asked(pydoc_tokenizer):
    text = Conversation((Message("text", "t"),), "", "")
    long = Conversation((Message("user", "long " * 90), Message("assistant", "a")), "", "")
    first = replace(source([], name="a"), held_out=tuple(chats(5)))
    second = replace(source([], name="b"), held_out=(text, long, *chats(9)[5:7]))
    prompts = held_out_prompts([first, second], pydoc_tokenizer, 6, max_len=40)
    assert [prompt.source for prompt in prompts] == ["a", "b", "a", "b", "a", "a"]
    asked = [pydoc_tokenizer.decode(prompt.token_ids) for prompt in prompts]
    assert len({text for text in asked if "what is" in text}) == 6
    assert (
        held_out_prompts([replace(first, held_out=first.held_out[::-1]), second], pydoc_tokenizer, 6, max_len=40)
        == prompts
    )


def test_prompts_and_documents_are_rendered_with_the_rows_tools_and_variables(caplog):
    """Those of the run fill in what a row does not say, and what the template does not read is counted."""
    qwen = chat_families.load("qwen2.5")
    quiet = Tokenizer(chat_families.load("qwen3")._backend, template_kwargs={"enable_thinking": False})
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "thinking": "hm"}]
    row = parse_row({"messages": turns, "tools": [{"name": "add"}]}, "d:1")
    loud = parse_row({"messages": turns, "chat_template_kwargs": {"enable_thinking": True, "odd": 1}}, "d:2")

    def asked(row: Row, tokenizer: Tokenizer) -> str:
        [prompt] = held_out_prompts([replace(source([]), held_out=(row,))], tokenizer, 1, max_len=99)
        return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in asked(row, qwen)
    assert asked(row, quiet).endswith("assistant\n<think>\n\n</think>\n\n")
    assert asked(loud, quiet).endswith("assistant\n")
    [document] = tokenize_part([row], qwen, 99).documents
    assert '{"name": "add"}' in qwen.decode(document.token_ids.tolist())
    [document] = tokenize_part([loud], quiet, 99).documents
    assert "hm" in quiet.decode(document.token_ids[document.loss_mask].tolist())
    tokenize_source(source([row, loud]), quiet, BUNDLED_FOLDER, max_len=99)
    assert "does not read: tools (of 1), odd (of 1)" in caplog.text
    tokenize_source(source([row, loud]), qwen, BUNDLED_FOLDER, max_len=99)
    assert "does not read: reasoning (of 2), enable_thinking (of 1), odd (of 1)" in caplog.text


def test_pydocs_prompts_are_the_ones_it_spreads_over_modules(pydoc_tokenizer, monkeypatch):
    monkeypatch.setattr(dataset.pydoc, "held_out_prompts", lambda count: [c.question for c in chats(count)])
    prompts = held_out_prompts([source([], name="pydoc")], pydoc_tokenizer, 3, max_len=40)
    assert prompts[2].token_ids == pydoc_tokenizer.render_chat(chats(3)[2].question.as_dicts())
    assert pydoc is dataset.pydoc
