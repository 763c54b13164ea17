"""Evaluation prompts: MT-Bench, held-out pydoc, or a file in MT-Bench's format."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.data import pydoc
from specserve.data.conversations import Conversation
from specserve.errors import DataError

MT_BENCH_HUB_ID = "HuggingFaceH4/mt_bench_prompts"


@dataclass(frozen=True)
class Question:
    """A conversation to have with the target: its turns are asked one after the other, each with the answers so far."""

    question_id: str
    category: str
    turns: tuple[str, ...]


def load_questions(bench: str, limit: int) -> list[Question]:
    """`mt-bench` (through `datasets`), `pydoc` (held-out modules), or a `.jsonl` of {"question_id", "category",
    "turns": [..]}; at most `limit`, evenly spread, 0 for all. Raises DataError."""
    if bench == "pydoc":
        held_out = pydoc.held_out_prompts(limit or 80)
        return [Question(str(i), c.category, (c.messages[0].content,)) for i, c in enumerate(held_out)]
    questions = list(_mt_bench() if bench == "mt-bench" else _read(Path(bench)))
    if limit and limit < len(questions):
        questions = [questions[i * len(questions) // limit] for i in range(limit)]
    return questions


def load_chats(bench: str, limit: int, history: int = 2) -> list[list[dict[str, str]]]:
    """At most `limit` chats that end with a question, for measurements of speed. With `pydoc` they bring along none,
    one, up to `history` answered questions about the same module, so prompts are as long as those of real chats; with
    any other bench (see `load_questions`) each is a question's first turn."""
    if bench != "pydoc":
        return [[{"role": "user", "content": question.turns[0]}] for question in load_questions(bench, limit)]
    by_module: dict[str, list[Conversation]] = {}
    for conversation in pydoc.build("held-out"):
        by_module.setdefault(conversation.source, []).append(conversation)
    chats = []
    for i, question in enumerate(pydoc.held_out_prompts(limit)):
        others = [c for c in by_module[question.source] if c.messages[0] != question.messages[0]]
        start = i % max(1, len(others))  # not always the module's first ones
        earlier = [*others[start:], *others[:start]][: i % (history + 1)]
        chats.append([message for c in (*earlier, question) for message in c.as_dicts()])
    return chats


def _mt_bench() -> Iterator[Question]:
    from datasets import load_dataset  # heavy

    try:
        rows: Any = load_dataset(MT_BENCH_HUB_ID, split="train")
    except Exception as error:  # datasets raises many types for "cannot be reached"
        raise DataError(
            f"MT-Bench ({MT_BENCH_HUB_ID}) could not be loaded ({type(error).__name__}). Where there is no hub, give "
            'its question.jsonl as --bench PATH: one {"question_id", "category", "turns": [..]} a line'
        ) from error
    for row in rows:
        yield Question(str(row["prompt_id"]), row["category"], tuple(row["prompt"]))


def _read(path: Path) -> Iterator[Question]:
    if not path.is_file():
        raise DataError(f"--bench {path}: expected mt-bench, pydoc, or the path of a .jsonl of questions")
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns = row["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
                raise TypeError("turns must be a list of strings")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{path}, line {number}: {error!r}; expected {{"question_id": 1, "category": "writing", "turns": [..]}}'
            ) from error
        yield Question(str(row.get("question_id", number)), str(row.get("category", "all")), tuple(turns))
