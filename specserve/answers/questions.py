"""The questions of a data set: which of its conversations can be asked, each once, and the ids of their rows."""

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specserve.data.conversations import Conversation, Row, TokenRow
from specserve.data.user_turns import UserTurn
from specserve.errors import DataError
from specserve.serve.http.formats.reader import AnswerParser

NO_TOOLS = "calls tools, and offers none"
UNCALLED = "holds results of tools that no answer calls"
CANCEL_SECONDS = 60.0  # for a step of the engine to end, so that what is cancelled does


class Stuck(Exception):
    """Raised where a conversation cannot go on; the message is the reason."""


@dataclass
class Job:
    """A conversation on its way: the messages so far, and the questions that are still to be asked."""

    key: str
    row: Conversation
    asked: list[list[dict[str, Any]]]  # for each answer to come, the messages before it
    calls: list[list[dict[str, Any]]]  # of tools, by each answer to come as it was recorded
    template_kwargs: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    more_turns: int = 0  # of the user, which the target is still to write
    user_turn: UserTurn | None = None  # being written by the target now
    prompt: list[int] = field(default_factory=list)
    make_parser: Callable[[], AnswerParser] | None = None  # of the answer to the prompt, where tools are offered


@dataclass(frozen=True)
class Questions:
    """The questions of a data set."""

    jobs: list[Job]  # still to be asked, each once
    order: dict[str, int]  # the place of each among all, by the id of its row
    num_there: int  # answered before
    left_out: Counter[str]  # those that cannot be asked, by reason


def find_questions(
    rows: Iterable[Row],
    template_kwargs: Mapping[str, Any],
    *,
    samples: int,  # answers of each
    done: Collection[str],  # ids of the rows that are there
) -> Questions:
    """Find the questions of these rows under variables of the chat template, over which a row's own have precedence.
    Raises DataError for rows of token ids."""
    jobs: dict[str, Job] = {}
    order: dict[str, int] = {}
    num_there, left_out = 0, Counter[str]()
    for row in rows:
        if isinstance(row, TokenRow):
            raise DataError(
                f"{row.source} holds token ids, of which no question can be made; give what they came of, "
                "or keep all answers as they are (train --no-regenerate)"
            )
        asked, calls, reason = _asked(row)
        if reason:
            left_out[reason] += 1
            continue
        kwargs = {**template_kwargs, **row.variables()}
        for sample in range(samples):
            key = _row_id(row, sample)
            order.setdefault(key, len(order))
            if key in done:
                num_there += 1
            elif key in jobs:
                left_out["asked before"] += 1
            else:
                jobs[key] = Job(key, row, copy.deepcopy(asked), list(calls), kwargs, more_turns=row.more_turns)
    return Questions(list(jobs.values()), order, num_there, left_out)


def row_id(row: Conversation) -> str:
    """The `id` of the row that holds the (first) answers to a conversation's questions: the same for the same questions
    under the same variables of the template, wherever they stand."""
    return _row_id(row, 0)


def _row_id(row: Conversation, sample: int) -> str:
    asked, calls, _ = _asked(row)
    variables = [row.variables()] if row.template_kwargs else []
    more = [row.more_turns] if row.more_turns else []
    tools = [row.tools, calls] if row.tools else []
    return f"{digest(asked, *variables, *more, *tools)}-{sample}"


def _asked(row: Conversation) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]], str]:
    """Return the messages before each answer and the calls of tools in it, or the reason why nothing can be asked."""
    turns, calls = [list[dict[str, Any]]()], list[list[dict[str, Any]]]()
    for message in row.as_dicts():
        if message["role"] == "tool" and not (calls and calls[-1]):
            return [], [], UNCALLED
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif any(asked["role"] in ("user", "tool") for asked in turns[-1]):
            turns.append([])
            calls.append(message.get("tool_calls", []))
        elif message.get("tool_calls") and calls:  # a second answer to the same
            calls[-1] = [*calls[-1], *message["tool_calls"]]
        # An answer to nothing, such as a greeting, was not the target's: it is left out.
    if not row.tools and any(calls):
        return [], [], NO_TOOLS
    asked = [turn for turn in turns if any(message["role"] in ("user", "tool") for message in turn)]
    return asked, calls, "asks nothing" * (not asked)


def digest(*parts: object) -> str:
    """Return 16 hex digits that stand for these parts, which JSON can hold."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
