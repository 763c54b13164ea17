"""Laws of answering a data set anew: every turn is answered to what was said before, a killed run goes on to the same
rows, nothing that could not be answered goes unsaid, and what is written trains as what was generated."""

import itertools
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import PATIENCE
from fakes import wait_for
from scripted import Scripted, ask, echo
from typer.testing import CliRunner

from specserve.answers import regenerate as module
from specserve.answers.account import Account
from specserve.answers.regenerate import AnswerSettings, split_reasoning
from specserve.answers.row_file import locked
from specserve.cli.main import app
from specserve.data.conversations import Conversation, Message, TokenRow
from specserve.data.documents import tokenize
from specserve.data.sources import load_mixture
from specserve.errors import CapacityError, ConfigError, DataError
from specserve.serve.http.formats.reasoning import THINK_MARKS
from specserve.serve.requests.request import Delta
from specserve.tokenizer import Tokenizer

EXACT = AnswerSettings(max_tokens=40)
regenerate: Any = module.regenerate  # a scripted engine is not of the engine's type


def read(output: Path) -> dict[str, list[dict[str, str]]]:
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["messages"] for row in rows}


def test_every_turn_is_answered_to_the_answers_before_it(tmp_path):
    engine = Scripted("qwen3", echo)
    account = regenerate(engine, [ask("one", "old", "two", "old", first="system")], tmp_path / "o.jsonl", EXACT)
    [messages] = read(tmp_path / "o.jsonl").values()
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"].endswith("</think>\n\n3 of one")
    assert messages[4]["content"].endswith("</think>\n\n5 of two")
    assert "assistant\n3 of one<|im_end|>" in engine.prompts[1]  # the new answer, and its reasoning is gone
    assert (account.num_rows, account.num_answers, account.acceptance.tau) == (1, 2, 2.0)


@pytest.mark.parametrize("num_before", [0, 1, 4])
@pytest.mark.parametrize("half", [b"", b'{"id": "00', b"\xff"])
def test_a_killed_run_goes_on_to_the_same_rows(tmp_path, num_before, half):
    asked = [ask(f"q{i}", "old", "more?", "old") for i in range(6)]
    settings = AnswerSettings(max_tokens=40, temperature=1.0)
    regenerate(Scripted("qwen3", echo), asked, tmp_path / "whole.jsonl", settings, samples=2)
    whole = read(tmp_path / "whole.jsonl")
    assert len(whole) == 12
    assert len({str(messages) for messages in whole.values()}) == 12  # each sample has a seed of its own
    output = tmp_path / "o.jsonl"

    def kill(account: Account) -> None:
        if account.num_rows == num_before:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(Scripted("qwen3", echo), asked, output, settings, samples=2, on_answer=kill)
    assert len(read(output)) == num_before
    with output.open("ab") as file:
        file.write(half)
    account = regenerate(Scripted("qwen3", echo), asked[::-1], output, settings, samples=2)
    assert read(output) == whole
    assert (account.num_there, account.num_rows, account.num_settled) == (num_before, 12 - num_before, 12)
    again = Scripted("qwen3", echo)
    regenerate(again, asked, output, settings, samples=2)
    assert not again.prompts
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()  # in the order of the questions
    row = json.loads(output.read_text().splitlines()[0])
    assert [message["content"] for message in row["messages"]][::2] == ["q0", "more?"]


def test_a_second_run_says_that_it_waits_for_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, is_in = tmp_path / "rows", threading.Event()

    def second() -> None:
        with locked(folder):
            is_in.set()

    thread = threading.Thread(target=second, daemon=True)
    with locked(folder):
        thread.start()
        wait_for(lambda: f"write in {folder}; waiting for it" in caplog.text)
        assert not is_in.is_set()
    thread.join(PATIENCE)
    assert is_in.is_set()


def test_answers_of_other_settings_are_not_mixed(tmp_path):
    output = tmp_path / "o.jsonl"
    regenerate(Scripted("qwen3", echo), [ask("one", "old")], output, EXACT, target="t")
    for settings, target in (
        (AnswerSettings(max_tokens=41), "t"),
        (EXACT, "u"),
        (AnswerSettings(max_tokens=40, thinking="drop"), "t"),
    ):
        with pytest.raises(DataError, match=r"max_tokens 40, now 41|target 't', now 'u'|thinking 'keep', now 'drop'"):
            regenerate(Scripted("qwen3", echo), [ask("two", "old")], output, settings, target=target)
    (tmp_path / "p.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(DataError, match="how its rows were made"):
        regenerate(Scripted("qwen3", echo), [ask("two", "old")], tmp_path / "p.jsonl", EXACT)
    output.write_text('{"messages": []}\n')
    with pytest.raises(DataError, match=r"line 1, is no row"):
        regenerate(Scripted("qwen3", echo), [ask("two", "old")], output, EXACT, target="t")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="cannot write"):
        regenerate(Scripted("qwen3", echo), [ask("two", "old")], tmp_path / "p.jsonl" / "o.jsonl", EXACT)


FAMILIES = {  # the target's text after its prompt; the content of a row that keeps reasoning, and that drops it
    "qwen3": ("<think>\nhm\n</think>\n\nyo", "<think>\nhm\n</think>\n\nyo", "yo"),
    "glm-4.5": ("\n<think>hm</think>\nyo", "<think>hm</think>\nyo", "yo"),
    "glm-4": ("\nyo", "yo", "yo"),
    "deepseek-r1": ("hm\n</think>\n\nyo", "<think>\nhm\n</think>\n\nyo", "yo"),
    "gemma-3": ("yo", "yo", "yo"),
    "gpt-oss": ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yo", None, "yo"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("thinking", ["keep", "drop"])
def test_rows_train_as_what_was_generated(tmp_path, family, thinking):
    said, kept, dropped = FAMILIES[family]
    engine, output = Scripted(family, lambda prompt, seed: said), tmp_path / "o.jsonl"
    settings = AnswerSettings(max_tokens=40, thinking=thinking)
    if thinking == "keep" and kept is None:
        with pytest.raises(ConfigError, match="--thinking drop"):
            regenerate(engine, [ask("hi", "old")], output, settings)
        return
    account = regenerate(engine, [ask("hi", "old")], output, settings)
    [[_, answer]] = read(output).values()
    assert answer["content"] == (kept if thinking == "keep" else dropped)
    assert account.num_exact == account.num_compared == (thinking == "keep" or said == dropped or family == "glm-4")
    rows = [row for source in load_mixture([str(output)]) for row in (*source.train, *source.held_out)]
    [document] = tokenize([row for row in rows if isinstance(row, Conversation)], engine.tokenizer, 100).documents
    text = engine.tokenizer.decode(document.token_ids[document.loss_mask].tolist(), skip_special_tokens=True)
    assert text.strip().endswith("yo")
    if account.num_exact:
        prompt = engine.vocabulary.encode(engine.prompts[0], add_special_tokens=False).ids
        generated = engine.vocabulary.encode(said, add_special_tokens=False).ids
        np.testing.assert_array_equal(document.token_ids[: len(prompt) + len(generated)], prompt + generated)
        assert document.loss_mask.tolist()[len(prompt) :][: len(generated)] == [True] * len(generated)


def test_what_cannot_be_answered_is_counted(tmp_path):
    tool = Conversation((Message("user", "q"), Message("tool", "2"), Message("assistant", "a")), "", "here:2")
    text = Conversation((Message("text", "t"),), "", "here:3")
    long, later = ask("long " * 99, "old"), ask("one", "old", "long " * 99, "old")
    greeting = Conversation(
        (Message("assistant", "hello"), Message("user", "hi"), Message("assistant", "a")), "", "h:4"
    )
    asked = [tool, text, long, later, greeting, greeting]
    account = regenerate(Scripted("qwen3", echo), asked, tmp_path / "o.jsonl", EXACT)
    assert account.left_out == {
        "holds results of tools that no answer calls": 1,
        "asks nothing": 1,
        "longer than max_model_len": 1,
        "asked before": 1,
    }
    assert account.shortened == {"longer than max_model_len": 1}
    roles = sorted([message["role"] for message in messages] for messages in read(tmp_path / "o.jsonl").values())
    assert roles == [["user", "assistant"]] * 2
    assert all(reason in account.describe() for reason in account.left_out)
    with pytest.raises(DataError, match="nothing can be asked: asks nothing: 1"):
        regenerate(Scripted("qwen3", echo), [text], tmp_path / "p.jsonl", EXACT)
    tokens = TokenRow(np.zeros(1, np.int32), np.ones(1, bool), "", "here:5", "00")
    with pytest.raises(DataError, match="here:5 holds token ids"):
        regenerate(Scripted("qwen3", echo), [tokens], tmp_path / "p.jsonl", EXACT)


def test_a_row_is_trained_on_under_the_variables_it_was_answered_under(tmp_path):
    """GLM's switch marks every question, so an answer without it would be to another prompt."""
    engine, output = Scripted("glm-4.5", lambda prompt, seed: "\nyo"), tmp_path / "o.jsonl"
    quiet = AnswerSettings(max_tokens=40, template_kwargs={"enable_thinking": False})
    own = '{"enable_thinking": true}'
    account = regenerate(engine, [ask("hi", "old"), replace(ask("hi", "old"), template_kwargs=own)], output, quiet)
    assert sorted("/nothink" in prompt for prompt in engine.prompts) == [False, True]
    assert account.num_exact == 1  # the one that was asked to reason has not
    [source] = load_mixture([str(output)])
    rows = [row for row in (*source.train, *source.held_out) if isinstance(row, Conversation)]
    assert sorted(row.variables()["enable_thinking"] for row in rows) == [False, True]
    for row in rows:
        [document] = tokenize([row], engine.tokenizer, 100).documents
        text = engine.tokenizer.decode(document.token_ids.tolist(), skip_special_tokens=False)
        assert any(text.startswith(prompt.partition("<|assistant|>")[0]) for prompt in engine.prompts)
        assert ("/nothink" in text) != row.variables()["enable_thinking"]


@pytest.mark.parametrize("cut", ["keep", "drop"])
def test_answers_cut_by_max_tokens(tmp_path, cut):
    def reply(prompt: str, seed: int) -> str:
        return "a b c d e f" if "cut" in prompt.rpartition("user")[2] else "yo"

    asked = [ask("one", "old", "cut", "old", "more?", "old"), ask("cut", "old"), ask("one", "old")]
    settings = AnswerSettings(max_tokens=4, cut=cut)
    account = regenerate(Scripted("qwen3", reply), asked, tmp_path / "o.jsonl", settings)
    sizes = sorted(len(messages) for messages in read(tmp_path / "o.jsonl").values())
    assert sizes == ([2, 2, 4] if cut == "keep" else [2, 2])  # nobody goes on from half an answer
    assert account.shortened == {"cut by max_tokens": 1}
    assert account.left_out == ({} if cut == "keep" else {"cut by max_tokens": 1})


def test_questions_need_no_answers(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}]} for i in range(30)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="no assistant message"):
        load_mixture([str(tmp_path / "prompts.jsonl")])
    [source] = load_mixture([str(tmp_path / "prompts.jsonl")], needs_answers=False)
    account = regenerate(Scripted("qwen3", echo), source.train, tmp_path / "o.jsonl", EXACT)
    assert account.num_rows == len(source.train) > 20


@pytest.mark.parametrize("thinking", ["keep", "drop"])
def test_reasoning_that_is_cut_is_kept_as_the_tokens_it_was(tmp_path, thinking):
    """No message can hold it. It is learned from its question to the cut."""
    engine, output = Scripted("qwen3", lambda prompt, seed: "<think>\nhm hm hm hm hm"), tmp_path / "o.jsonl"
    settings = AnswerSettings(max_tokens=5, thinking=thinking)
    account = regenerate(engine, [ask("one", "old"), ask("two", "old", "more?", "old")], output, settings)
    if thinking == "drop":
        assert (account.num_rows, account.left_out.total()) == (0, 2)
        return
    assert (account.num_rows, account.shortened) == (2, {"reasoning does not end within max_tokens": 2})
    [source] = load_mixture([str(output)])
    found = {row.key: row for row in (*source.train, *source.held_out)}
    assert set(found) == {ask("one", "old").key, ask("two", "old").key}
    for row in found.values():
        assert isinstance(row, TokenRow)
        prompt = engine.tokenizer.decode(row.token_ids[~row.loss_mask].tolist(), skip_special_tokens=False)
        assert prompt in engine.prompts
        assert engine.tokenizer.decode(row.token_ids[row.loss_mask].tolist()).startswith("<think>")
        assert row.loss_mask.sum() == 5
    assert regenerate(engine, [ask("one", "old")], output, settings).num_there == 1


def test_reasoning_that_does_not_end_makes_no_row(tmp_path):
    reply = lambda prompt, seed: "<think>\nhm hm" if "one" in prompt else echo(prompt, seed)  # noqa: E731
    account = regenerate(Scripted("qwen3", reply), [ask("one", "old"), ask("two", "old")], tmp_path / "o.jsonl", EXACT)
    assert account.left_out == {"reasoning does not end within max_tokens": 1}
    assert len(read(tmp_path / "o.jsonl")) == account.num_rows == 1


def test_the_template_gets_the_switch_of_reasoning(tmp_path):
    engine = Scripted("qwen3", lambda prompt, seed: "yo")
    quiet = AnswerSettings(max_tokens=40, template_kwargs={"enable_thinking": False})
    account = regenerate(engine, [ask("hi", "old")], tmp_path / "o.jsonl", quiet)
    assert engine.prompts[0].endswith("<think>\n\n</think>\n\n")
    assert account.num_exact == 1
    with pytest.raises(ConfigError, match="does not read"):
        regenerate(Scripted("gemma-3", echo), [ask("hi", "old")], tmp_path / "p.jsonl", quiet)
    with pytest.raises(ConfigError, match="the same answer 2 times"):
        regenerate(engine, [ask("hi", "old")], tmp_path / "p.jsonl", EXACT, samples=2)


def test_what_was_asked_in_vain_has_ended_when_another_asks(tmp_path):
    """The engine's queue is as long as one run's window: what the run before has left would fill it."""
    engine, num_open = Scripted("qwen3", echo), []
    delays = itertools.chain([0], itertools.repeat(30))  # hundredths of a second: only the first is quick
    engine._delays = SimpleNamespace(random=lambda: next(delays))

    class Enough(Exception):
        pass

    def stop(account: Account) -> None:
        raise Enough

    submit = engine.submit

    def counted(prompt_ids: Any, params: Any, on_delta: Any) -> Any:
        num_open.append(1)

        def heard(delta: Delta) -> None:
            num_open.pop()
            on_delta(delta)

        return submit(prompt_ids, params, heard)

    engine.submit = counted
    with pytest.raises(Enough):
        regenerate(engine, [ask(f"q{i}", "old") for i in range(9)], tmp_path / "o.jsonl", EXACT, on_answer=stop)
    assert not num_open


def test_an_engine_that_stops_is_an_error_and_no_row(tmp_path):
    engine = Scripted("qwen3", echo)
    engine.fails = True
    begin = time.monotonic()
    with pytest.raises(CapacityError, match="run the same command again"):
        regenerate(engine, [ask("hi", "old"), ask("more?", "old")], tmp_path / "o.jsonl", EXACT)
    assert time.monotonic() - begin < 5
    assert not (tmp_path / "o.jsonl").read_text()


def test_an_answer_without_reasoning_holds_no_marks_of_its_channel(tmp_path):
    engine = Scripted("gpt-oss", lambda prompt, seed: "<|channel|>final<|message|>yo")
    dropped = AnswerSettings(max_tokens=40, thinking="drop")
    regenerate(engine, [ask("hi", "old")], tmp_path / "o.jsonl", dropped)
    [[_, answer]] = read(tmp_path / "o.jsonl").values()
    assert answer["content"] == "yo"


MARKS = {"special": True, "plain": False}


@pytest.mark.parametrize("is_special", MARKS.values(), ids=MARKS)
@pytest.mark.parametrize("begin", ["[THINK]", "<seed:think>", "<|START_THINKING|>", "<think>"])
def test_reasoning_between_any_marks_is_no_part_of_the_answer(tmp_path, begin, is_special):
    """Whichever marks the template shows, and whether or not they are special tokens, which texts leave out."""
    end = dict(THINK_MARKS.values())[begin]
    engine = Scripted("mistral-nemo", lambda prompt, seed: f"{begin}hm{end}yo")
    for vocabulary in (engine.vocabulary, engine.tokenizer._backend.backend_tokenizer) if is_special else ():
        vocabulary.add_special_tokens([begin, end])
    engine.tokenizer._backend.chat_template += f"{{#- {end} -#}}"
    engine.tokenizer = Tokenizer(engine.tokenizer._backend, sorted(engine.eos_ids))
    for thinking, content in (("keep", f"{begin}hm{end}yo"), ("drop", "yo")):
        output = tmp_path / f"{thinking}.jsonl"
        account = regenerate(engine, [ask("one")], output, AnswerSettings(max_tokens=60, thinking=thinking))
        [row] = [json.loads(line) for line in output.read_text().splitlines()]
        assert row["messages"][-1] == {"role": "assistant", "content": content}
        assert account.num_exact == account.num_compared == (thinking == "keep")


def test_split_reasoning():
    assert split_reasoning("a </think> b") == ("a", "b"), "nothing has opened it"
    assert split_reasoning("a <think> b </think>") == ("", "a <think> b </think>"), "it speaks of the marks"
    assert split_reasoning("a</think>b</think>c", is_begun=True) == ("a", "b</think>c")
    assert split_reasoning("<think></think>") == ("", "")


@pytest.mark.parametrize(("family", "content", "num_exact"), [("qwen2.5", " yo ", 1), ("gemma-3", "yo", 0)])
def test_spaces_are_kept_where_the_template_keeps_them(tmp_path, family, content, num_exact):
    account = regenerate(Scripted(family, lambda prompt, seed: " yo "), [ask("hi", "old")], tmp_path / "o.jsonl", EXACT)
    [[_, answer]] = read(tmp_path / "o.jsonl").values()
    assert answer["content"] == content
    assert (account.num_exact, account.num_compared) == (num_exact, 1)


@pytest.mark.slow
def test_rows_depend_neither_on_speculation_nor_on_slots(tmp_path: Path) -> None:
    """The bundled pair by the command: sixteen at once without the head, as a CPU does by itself, and two with it."""
    files = {}
    for name, how in {"plain": [], "head": ["--speculation", "chain:3", "--max-slots", "2"]}.items():
        files[name] = tmp_path / f"{name}.jsonl"
        line = ["data", "regenerate", "--count", "6", "--max-tokens", "24", "--temperature", "0.8", *how]
        result = CliRunner().invoke(app, [*line, "--max-model-len", "512", "--output", str(files[name])])
        assert result.exit_code == 0, (result.output, result.exception)
    assert files["plain"].read_bytes() == files["head"].read_bytes()
    assert files["plain"].stat().st_size
