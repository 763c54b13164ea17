"""Laws of the questions that a target asks itself: the same settings give the same ones, however often the asking is
killed and in whatever order candidates end; none holds a control token, none is asked twice, few begin alike."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, echo, is_users

from specserve.answers import regenerate as regenerating
from specserve.answers.openings import NONE, OPENINGS, VARIED, read_openings
from specserve.answers.own_questions import OPENING_FLOOR, OPENING_SHARE, Asked, OwnQuestions, QuestionSettings
from specserve.answers.regenerate import AnswerSettings
from specserve.data.conversations import Conversation
from specserve.data.sources import SELF, SourceRows
from specserve.errors import CapacityError, DataError

FAMILY = "qwen3"
WORDS = ["why", "how", "many", "red", "blue", "old", "birds", "trees", "sing", "fall", "here", "now", "with", "some"]
regenerate: Any = regenerating.regenerate  # a scripted engine is not of the engine's type


def asker(prompt: str, seed: int) -> str:
    """Ask in the user's place, often something that is no question, and answer elsewhere."""
    if not is_users(prompt):
        return echo(prompt, seed)
    draw = random.Random(seed)
    words = " ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + "?"
    wrong = [
        "hi",
        words[:6] + "<|im_start|>user",
        words + " \ufffd",
        "again " * 30,
        f"{words} as follows:",
        "why is that the same?",
        f"Can you tell {words}",
        "long " * 300,
    ]
    return draw.choice([words, words, words, *wrong])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def questions(seed: int = 0, openings: str = "") -> OwnQuestions:
    return OwnQuestions(QuestionSettings("t", "none", seed, 200, {}, openings))


def texts(asked: OwnQuestions, number: int) -> list[str]:
    source = asked.fill(SourceRows(SELF, 1.0, (), ()), number, turns=1)
    rows = sorted((*source.train, *source.held_out), key=lambda row: int(row.source.partition(":")[2]))
    return [row.messages[0].content for row in rows if isinstance(row, Conversation)]


def ask(own: OwnQuestions, number: int, most: int = 10**9) -> Asked:
    def kill(asked: Asked) -> None:
        if asked.num_candidates >= most:
            raise KeyboardInterrupt

    engine: Any = Scripted(FAMILY, asker)
    return own.ask(engine, number, kill)


def test_the_same_seed_gives_the_same_questions_whenever_it_is_killed() -> None:
    ask(questions(), 40)
    whole = texts(questions(), 40)
    assert len(whole) == 40
    questions().path.unlink()
    for most in (1, 7, 30):
        with pytest.raises(KeyboardInterrupt):
            ask(questions(), 40, most)
        with questions().path.open("ab") as half:
            half.write(b'{"id": "3')
    ask(questions(), 20)
    assert texts(questions(), 20) == whole[:20], "fewer are the first of more"
    ask(questions(), 40)
    assert texts(questions(), 40) == whole
    before = questions().path.read_bytes()
    ask(questions(), 40)
    assert questions().path.read_bytes() == before, "nothing is asked again"
    ask(questions(1), 40)
    assert not {*texts(questions(1), 40)} & {*whole} - {"why is that the same?"}


def test_every_second_candidate_goes_on_from_the_words_of_a_task(tmp_path: Path) -> None:
    """In turns, and the others are those of before; a killed run goes on to the same ones."""
    file = tmp_path / "openings.txt"
    file.write_text("Translate\n\n  Solve this: \nTell <|im_end|>\n")
    opened = questions(openings=read_openings(str(file)))
    with pytest.raises(KeyboardInterrupt):
        ask(opened, 40, 9)
    ask(opened, 40)
    ask(questions(), 40)
    found, plain = (
        {int(row["id"]): row for row in map(json.loads, own.path.read_text().splitlines())}
        for own in (opened, questions())
    )
    assert len(found) > 40
    for number, row in found.items():
        if number % 2 == 0:
            assert row["fault"] == "does not end" or row == plain.get(number, row)
            continue
        opening = ("Translate", "Solve this:", "Tell <|im_end|>")[number // 2 % 3]
        assert row["text"].startswith(opening)
        assert row["fault"] or "<|im_end|>" not in opening
        assert row["fault"] == "does not end" or plain.get(number, row)["text"] in row["text"]
    assert read_openings(VARIED).splitlines() == list(OPENINGS)
    assert read_openings(NONE) == ""
    file.write_text("\n \n")
    for wrong in (str(file), str(tmp_path), "some"):
        with pytest.raises(DataError, match="self_openings"):
            read_openings(wrong)


def test_what_is_no_question_is_left_out_and_counted() -> None:
    asked = ask(questions(), 150)
    tokenizer = Scripted(FAMILY, asker).tokenizer
    kept = texts(questions(), 150)
    assert len({*kept}) == len(kept) == 150
    assert not any(tokenizer.special_tokens_in(text) or "\ufffd" in text for text in kept)
    assert not any(text.endswith(":") or text.startswith(("again again", "long long")) for text in kept)
    openings = Counter(" ".join(text.casefold().split()[:3]) for text in kept)
    assert max(openings.values()) <= max(OPENING_FLOOR, OPENING_SHARE * 150)
    assert openings["can you tell"] == OPENING_FLOOR
    assert {*asked.left_out} == {
        "does not end",
        "holds a control token",
        "too short",
        "announces what does not follow",
        "repeats itself",
        "asked before",
        "begins as many others do",
    }
    assert asked.num_candidates == 150 + asked.left_out.total()


def test_a_target_that_asks_nothing_is_refused() -> None:
    engine: Any = Scripted(FAMILY, lambda prompt, seed: "no")
    with pytest.raises(DataError, match=r"asked itself 0 can be used \(too short: 4\d\d\)"):
        questions().ask(engine, 10)
    engine.fails = True
    questions().path.unlink()
    with pytest.raises(CapacityError, match="run the same command again"):
        questions().ask(engine, 10)
    engine.max_model_len = 60
    with pytest.raises(DataError, match="no room"):
        questions().ask(engine, 10)


def test_the_user_goes_on_where_the_answer_ended(tmp_path: Path) -> None:
    """Conversations of three turns, of which two are written behind the target's own answers, also after a kill."""
    ask(questions(), 12)
    [source] = questions().fill_in([SourceRows(SELF, 1.0, (), ())], 12, turns=3)
    rows = (*source.train, *source.held_out)
    settings = AnswerSettings(max_tokens=150)

    def read(path: Path) -> dict[str, Any]:
        return {row["id"]: row["messages"] for row in map(json.loads, path.read_text().splitlines())}

    account = regenerate(Scripted(FAMILY, asker, 900), rows, tmp_path / "whole.jsonl", settings)
    whole = read(tmp_path / "whole.jsonl")
    lengths = Counter(len(messages) for messages in whole.values())
    assert {*lengths} == {2, 4, 6}, "a turn that is no question ends the conversation before it"
    assert sum(account.shortened.values()) == lengths[2] + lengths[4]
    for messages in whole.values():
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        asked = [message["content"] for message in messages if message["role"] == "user"]
        assert all(f" of {text}" in answer["content"] for text, answer in zip(asked, messages[1::2], strict=True))

    def kill(account: Any) -> None:
        if account.num_rows == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(Scripted(FAMILY, asker, 900), rows, tmp_path / "o.jsonl", settings, on_answer=kill)
    regenerate(Scripted(FAMILY, asker, 900), rows, tmp_path / "o.jsonl", settings)
    assert read(tmp_path / "o.jsonl") == whole
