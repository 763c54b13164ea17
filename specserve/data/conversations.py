"""Conversations from JSONL files, in the dialects people have them in, or from the built-in `pydoc` data set.

A row that cannot be used is counted and reported with its line number; nothing is dropped silently.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specserve.errors import DataError

log = logging.getLogger(__name__)

Split = Literal["train", "held-out", "all"]
HELD_OUT_SHARE = 25  # one conversation in 25 is held out

# The role names of ShareGPT and OpenAI dumps, in the words of chat templates.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
}
TEXT_ROLE = "text"  # the one message of a plain document, which no template touches


@dataclass(frozen=True)
class Message:
    role: str  # system, user, assistant, tool; or text, for a plain document
    content: str


@dataclass(frozen=True)
class Conversation:
    """A chat whose assistant messages are to be learned, or a plain document that is learned as a whole."""

    messages: tuple[Message, ...]
    category: str  # the data set's own label ("source", "writing", ...); "" when it has none
    source: str  # where it came from: a file and line, or a module name

    @property
    def is_document(self) -> bool:
        return self.messages[0].role == TEXT_ROLE

    def as_dicts(self) -> list[dict[str, str]]:
        """The messages as chat templates want them."""
        return [{"role": message.role, "content": message.content} for message in self.messages]


@dataclass(frozen=True)
class RowProblem:
    """Why a row was left out."""

    line: int  # 1-based
    reason: str


@dataclass(frozen=True)
class ConversationSet:
    conversations: tuple[Conversation, ...]
    problems: tuple[RowProblem, ...] = ()


def load(source: str, *, split: Split) -> ConversationSet:
    """The conversations of `source`: `pydoc`, or the path of a `.jsonl` file.

    A conversation of a file is held out by the hash of its text, so the split survives reordering. Raises DataError.
    """
    if source == "pydoc":
        from specserve.data import pydoc  # it builds Conversations, so it imports this module

        parts = ("train", "held-out") if split == "all" else (split,)
        return ConversationSet(tuple(c for part in parts for c in pydoc.build(part)))
    if not source.endswith(".jsonl"):
        raise DataError(f"data {source!r} is not known; choose 'pydoc' or the path of a .jsonl file")
    rows = read_jsonl(Path(source))
    if split == "all":
        return rows
    chosen = tuple(c for c in rows.conversations if _is_held_out(c) == (split == "held-out"))
    if not chosen:
        raise DataError(
            f"{source}: none of its {len(rows.conversations)} conversations is in the {split!r} split "
            f"(1 in {HELD_OUT_SHARE} is held out); give a larger file, or a held-out file of its own"
        )
    return ConversationSet(chosen, rows.problems)


def read_jsonl(path: Path) -> ConversationSet:
    """Read one conversation per line: ShareGPT (`conversations` of from/value), OpenAI (`messages` or
    `conversations` of role/content) or a plain document (`text`). Raises DataError when the file is missing or has
    no usable row; other bad rows become `problems`, which are also logged.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot read the data: {error.strerror}") from error
    conversations: list[Conversation] = []
    problems: list[RowProblem] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            conversations.append(_parse_row(line, f"{path.name}:{number}"))
        except _BadRowError as error:
            problems.append(RowProblem(number, str(error)))
    if problems:
        log.warning("%s: %s", path, report(problems))
    if not conversations:
        raise DataError(f"{path}: no usable row; {report(problems) if problems else 'the file is empty'}")
    return ConversationSet(tuple(conversations), tuple(problems))


def report(problems: Sequence[RowProblem]) -> str:
    """One line: how many rows were left out, and for each reason its count and first five line numbers."""
    by_reason: dict[str, list[int]] = {}
    for problem in problems:
        by_reason.setdefault(problem.reason, []).append(problem.line)
    parts = [
        f"{reason}: {len(at)} (line {', '.join(map(str, at[:5]))}{', ...' if len(at) > 5 else ''})"
        for reason, at in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[1][0]))
    ]
    return f"{len(problems)} rows left out: " + "; ".join(parts)


class _BadRowError(Exception):
    """A row that cannot be used, and why; never leaves this module."""


def _parse_row(line: bytes, source: str) -> Conversation:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError covers bad JSON and bad UTF-8
        raise _BadRowError("not JSON") from error
    if not isinstance(row, dict):
        raise _BadRowError("not a JSON object")
    category = row.get("category", "")
    if not isinstance(category, str):
        raise _BadRowError("category is not text")
    if "messages" in row or "conversations" in row:
        return Conversation(_parse_turns(row.get("messages", row.get("conversations"))), category, source)
    if "text" in row:
        return Conversation((Message(TEXT_ROLE, _text(row["text"], "text")),), category, source)
    raise _BadRowError("none of the fields conversations, messages, text")


def _parse_turns(turns: object) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise _BadRowError("no list of messages")
    messages = tuple(_parse_turn(turn) for turn in turns)
    if not any(message.role == "assistant" for message in messages):
        raise _BadRowError("no assistant message")
    return messages


def _parse_turn(turn: object) -> Message:
    if not isinstance(turn, Mapping):
        raise _BadRowError("a message is not an object")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise _BadRowError(f"unknown role {role!r:.40}")
    return Message(ROLES[role.lower()], _text(content, "a message's content"))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _BadRowError(f"{what} is not text")
    if not value.strip():
        raise _BadRowError(f"{what} is empty")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise _BadRowError(f"{what} has a lone surrogate")
    return value


def _is_held_out(conversation: Conversation) -> bool:
    digest = hashlib.md5(usedforsecurity=False)
    for message in conversation.messages:
        digest.update(message.content.encode() + b"\0")
    return int(digest.hexdigest(), 16) % HELD_OUT_SHARE == 0
