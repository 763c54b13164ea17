"""The rows of data sets: chats in the dialects people have them in, plain documents, ready token ids.

Everything in a chat reaches its template: text, reasoning, tools and their calls, and the template's own variables.
Knows nothing of files or hubs (see `sources`). A row that cannot be used raises `BadRowError` with the reason, which
`sources` counts and reports with its line number; nothing is dropped silently.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from specserve.chat_template import REASONING_NAMES
from specserve.errors import ConfigError

Split = Literal["train", "held-out"]
SPLITS: tuple[Split, ...] = get_args(Split)
HELD_OUT_SHARE = 25  # one question in 25 is held out

# The role names of ShareGPT and OpenAI dumps, in the words of chat templates.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_ROLE = "text"  # the one message of a plain document, which no template touches
MESSAGE_FIELDS = frozenset(
    {"role", "from", "content", "value", "tool_calls", "tool_call_id", "name", "function_call", *REASONING_NAMES}
)


@dataclass(frozen=True)
class Message:
    """A turn of a chat, with everything that chat templates read of it."""

    role: str  # system, user, assistant, tool; or text, for a plain document
    content: str  # empty only beside tool calls, or where a tool gave nothing back
    reasoning: str = ""
    tool_calls: str = ""  # JSON of [{"type": "function", "function": {"name": .., "arguments": {..}}, ..}, ..]
    tool_call_id: str = ""
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The turn as chat templates want it, its reasoning under each of the names that they give it."""
        turn: dict[str, Any] = dict.fromkeys(REASONING_NAMES, self.reasoning)
        turn |= {"tool_calls": json.loads(self.tool_calls or "null"), "tool_call_id": self.tool_call_id}
        turn |= {"name": self.name}
        return {"role": self.role, "content": self.content} | {name: value for name, value in turn.items() if value}


@dataclass(frozen=True)
class Conversation:
    """A chat whose assistant messages are to be learned, or a plain document that is learned as a whole.

    What has a structure is kept as JSON text, so that conversations can be compared, hashed and written as they are.
    """

    messages: tuple[Message, ...]
    category: str  # the data set's own label ("source", "writing", ...); "" when it has none
    source: str  # where it came from: a file and line, or a module name
    tools: str = ""  # JSON of the list that the template is given; empty: none
    template_kwargs: str = ""  # JSON of the row's own template variables, which win over those of the run
    more_turns: int = 0  # of the user, behind the messages, which the target that answers them is to write itself

    @property
    def is_document(self) -> bool:
        return self.messages[0].role == TEXT_ROLE

    @property
    def question(self) -> "Conversation":
        """The conversation up to where the assistant first speaks."""
        before = itertools.takewhile(lambda message: message.role != "assistant", self.messages)
        return replace(self, messages=tuple(before))

    @property
    def key(self) -> str:
        """Return 16 hex digits of what is asked: the same for every answer to it, in whatever data set it stands."""
        asked = [message.content for message in self.question.messages if message.role == "user"]
        return _digest(asked or [message.content for message in self.messages])

    def as_dicts(self) -> list[dict[str, Any]]:
        """The messages as chat templates want them."""
        return [message.as_dict() for message in self.messages]

    def tool_dicts(self) -> list[dict[str, Any]]:
        """The tools as chat templates want them."""
        return json.loads(self.tools or "[]")

    def variables(self) -> dict[str, Any]:
        """The row's own template variables."""
        return json.loads(self.template_kwargs or "{}")

    def as_row(self) -> dict[str, Any]:
        """The conversation as a row of a file, which `parse_row` reads again."""
        if self.is_document:
            return {"text": self.messages[0].content, "category": self.category, "source": self.source}
        row = {"messages": self.as_dicts(), "tools": self.tool_dicts(), "chat_template_kwargs": self.variables()}
        return {name: value for name, value in row.items() if value} | {
            "category": self.category,
            "source": self.source,
        }


@dataclass(frozen=True, eq=False)
class TokenRow:
    """A conversation that was tokenised elsewhere, such as by `specserve data prepare`."""

    token_ids: np.ndarray  # int32 [seq]
    loss_mask: np.ndarray  # bool [seq]
    category: str
    source: str
    key: str  # of the conversation it was, where that is known, else of its token ids
    split: Split | None = None  # the part it was in, where that is known

    def as_row(self) -> dict[str, Any]:
        """The row as one of a file, which `parse_row` reads again."""
        return {
            "input_ids": self.token_ids.tolist(),
            "loss_mask": self.loss_mask.astype(int).tolist(),
            "key": self.key,
            "category": self.category,
            "source": self.source,
            **({"split": self.split} if self.split else {}),
        }


Row = Conversation | TokenRow


@dataclass(frozen=True)
class Columns:
    """The names under which a data set keeps the parts of a row: messages, or prompt and response, or text."""

    messages: str = ""
    prompt: str = ""
    response: str = ""
    text: str = ""
    category: str = ""  # used where a row has it, as is the next
    tools: str = ""

    @classmethod
    def parse(cls, entries: Sequence[str]) -> "Columns":
        """Read the entries `messages=conversation`, or `prompt=question` with `response=answer`, or `text=body`;
        `category=topic` and `tools=functions` with any. Raises ConfigError."""
        given: dict[str, str] = {}
        for entry in entries:
            name, _, column = entry.partition("=")
            if name not in cls.__dataclass_fields__ or not column or name in given:
                raise ConfigError(
                    f"data.columns: {entry!r}; expected each of {', '.join(cls.__dataclass_fields__)} at most once, as "
                    "in prompt=question,response=answer"
                )
            given[name] = column
        if entries and given.keys() - {"category", "tools"} not in ({"messages"}, {"prompt", "response"}, {"text"}):
            raise ConfigError(
                f"data.columns: {', '.join(entries)}; expected messages=COLUMN, or prompt=COLUMN and response=COLUMN, "
                "or text=COLUMN, and category=COLUMN and tools=COLUMN with any of these"
            )
        return cls(**given)

    def fit(self, row: Mapping[str, Any]) -> bool:
        """Return whether there is a mapping and the row has its columns."""
        names = [name for name in (self.messages, self.prompt, self.response, self.text) if name]
        return bool(names) and all(name in row for name in names)

    def rename(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Give a row that fits the names that `parse_row` reads."""
        renamed: dict[str, Any] = {
            "category": row.get(self.category) or "",
            "tools": row.get(self.tools or "tools"),
            **{name: row.get(name) for name in ("functions", "system", "chat_template_kwargs") if name != self.tools},
        }
        if self.messages:
            return renamed | {"messages": row[self.messages]}
        if self.text:
            return renamed | {"text": row[self.text]}
        turns = (("user", row[self.prompt]), ("assistant", row[self.response]))
        return renamed | {"messages": [{"role": role, "content": content} for role, content in turns]}


NO_COLUMNS = Columns()


def parse_template_kwargs(entries: Sequence[str]) -> dict[str, Any]:
    """Read template variables from entries such as `enable_thinking=false`: each value is read as JSON, and is text
    where it is none. Raises ConfigError."""
    given: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals or not name.isidentifier() or name in given:
            raise ConfigError(
                f"data.template_kwargs: {entry!r}; expected NAME=VALUE, each name once, as in enable_thinking=false"
            )
        try:
            given[name] = json.loads(text)
        except (ValueError, RecursionError):
            given[name] = text
    return given


@dataclass(frozen=True)
class RowProblem:
    """The reason why a row was left out."""

    line: int  # 1-based
    reason: str


class BadRowError(Exception):
    """A row that cannot be used, and why; `sources` makes a RowProblem of it."""


def report(problems: Sequence[RowProblem]) -> str:
    """Describe in one line how many rows were left out, with each reason, its count and first five line numbers."""
    by_reason: dict[str, list[int]] = {}
    for problem in problems:
        by_reason.setdefault(problem.reason, []).append(problem.line)
    parts = [
        f"{reason}: {len(at)} (line {', '.join(map(str, at[:5]))}{', ...' if len(at) > 5 else ''})"
        for reason, at in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[1][0]))
    ]
    return f"{len(problems)} rows left out: " + "; ".join(parts)


def split_of(row: Row) -> Split:
    """Return whether the row is trained on or held out. Its key decides, hence it is the same in every file, order and
    run."""
    if isinstance(row, TokenRow) and row.split is not None:
        return row.split
    if int(row.key, 16) % HELD_OUT_SHARE == 0:
        return "held-out"
    return "train"


def parse_row(row: Any, source: str, vocab_size: int | None = None, *, needs_answers: bool = True) -> Row:
    """Read one row: ready token ids (`input_ids`, `loss_mask`), ShareGPT (`conversations` of from/value), OpenAI
    (`messages` or `conversations` of role/content) or a plain document (`text`). A chat may have `tools` (or
    `functions`, OpenAI's former word), a `system` message apart, and `chat_template_kwargs`. A column that is null is
    as good as not there, and what has a structure may be JSON text.

    Token ids are checked against `vocab_size` where it is given. A chat must have an answer to learn from, unless only
    its questions are used. Raises BadRowError.
    """
    if not isinstance(row, Mapping):
        raise BadRowError("not a JSON object")
    filled = {name: value for name, value in row.items() if value is not None}
    category = filled.get("category", "")
    if not isinstance(category, str):
        raise BadRowError("category is not text")
    if "input_ids" in filled:
        return _parse_tokens(filled, category, source, vocab_size)
    if "messages" in filled or "conversations" in filled:
        turns = _parse_turns(filled.get("messages", filled.get("conversations")))
        if (system := _system(filled)) and not any(message.role == "system" for message in turns):
            turns = (Message("system", system), *turns)
        if needs_answers and not any(message.role == "assistant" for message in turns):
            raise BadRowError("no assistant message")
        given = (_objects(filled.get("tools"), "tools"), _functions(filled) or [])
        tools, functions = ([*map(_wrapped, each)] for each in given)
        if tools and functions and tools != functions:
            raise BadRowError("tools and functions are not the same")
        kwargs = _object(filled.get("chat_template_kwargs"), "chat_template_kwargs")
        return Conversation(
            turns, category, source, tools=_to_json(tools or functions), template_kwargs=_to_json(kwargs)
        )
    if "text" in filled:
        return Conversation((Message(TEXT_ROLE, _text(filled["text"], "text")),), category, source)
    raise BadRowError("none of the fields conversations, messages, text, input_ids")


def unread_fields(row: Mapping[str, Any]) -> set[str]:
    """Find the names of fields of a chat's messages that are not empty and that no chat template is given; and of its
    `system` and `functions`, where they hold something else, or the messages say another `system` themselves. Raises
    BadRowError where its messages' own cannot be read."""
    turns = row.get("messages") or row.get("conversations")
    if not isinstance(turns, list):
        return set()
    messages = [turn for turn in turns if isinstance(turn, Mapping)]
    fields = ((str(name), value) for turn in messages for name, value in turn.items() if name not in MESSAGE_FIELDS)
    unread = {name for name, value in fields if value not in (None, "", [], {})}
    own = [_parse_turn(turn).content.strip() for turn in messages if _is_system(turn)]
    if (said := _system(row)) is None or (said.strip() and own and said.strip() != own[0]):
        unread.add("system")
    return unread if _functions(row) is not None else unread | {"functions"}


def _is_system(turn: Mapping[Any, Any]) -> bool:
    return ROLES.get(str(_either(turn, "role", "from")).lower()) == "system"


def _system(row: Mapping[str, Any]) -> str | None:
    """The system message in a column of its own, empty where there is none; None: the column holds something else."""
    value = row.get("system") or ""
    if not isinstance(value, str):
        return None
    return _text(value, "system", may_be_empty=True) if value.strip() else ""


def _functions(row: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The tools under their former name, empty where there are none; None: the column holds something else."""
    try:
        return _objects(row.get("functions"), "functions")
    except BadRowError:
        return None


def _parse_tokens(row: Mapping[str, Any], category: str, source: str, vocab_size: int | None) -> TokenRow:
    token_ids, loss_mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(token_ids, list) or not token_ids or not all(type(i) is int for i in token_ids):
        raise BadRowError("input_ids is not a list of integers")
    if not isinstance(loss_mask, list) or len(loss_mask) != len(token_ids):
        raise BadRowError("loss_mask is not a list as long as input_ids")
    if not all(bit in (0, 1) for bit in loss_mask):
        raise BadRowError("loss_mask has values other than 0 and 1")
    if min(token_ids) < 0 or max(token_ids) >= (vocab_size or 2**31):
        raise BadRowError(f"input_ids are not all in the vocabulary of {vocab_size or 2**31}")
    key = row.get("key", "") or _digest([" ".join(map(str, token_ids))])
    if not isinstance(key, str) or not _is_hex(key):
        raise BadRowError("key is not a hexadecimal number")
    split = row.get("split")
    if split not in (None, *SPLITS):
        raise BadRowError(f"split is not {' or '.join(SPLITS)}")
    return TokenRow(np.array(token_ids, np.int32), np.array(loss_mask, bool), category, source, key, split)


def _parse_turns(turns: object) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise BadRowError("no list of messages")
    return tuple(_parse_turn(turn) for turn in turns)


def _parse_turn(turn: object) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRowError("a message is not an object")
    role, content = _either(turn, "role", "from"), _either(turn, "content", "value")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise BadRowError(f"unknown role {role!r:.40}")
    role = ROLES[role.lower()]
    reasoning = _reasoning(turn)
    calls = [_parse_call(call) for call in _objects(turn.get("tool_calls"), "tool_calls")]
    if former := _object(turn.get("function_call"), "function_call"):
        if calls:
            raise BadRowError("a message has a function_call beside tool_calls")
        calls = [_parse_call(former)]
    if role != "assistant" and (calls or reasoning):
        raise BadRowError(f"a message of the {role} has {'tool_calls' if calls else 'reasoning'}")
    content = _content(content, may_be_null=bool(calls), may_be_empty=bool(calls) or role == "tool")
    return Message(role, content, reasoning, _to_json(calls), _label(turn, "tool_call_id"), _label(turn, "name"))


def _label(turn: Mapping[Any, Any], name: str) -> str:
    if turn.get(name) is None:
        return ""
    return _text(turn[name], f"a message's {name}", may_be_empty=True)


def _content(value: Any, *, may_be_null: bool, may_be_empty: bool) -> str:
    """The text of a message. Parts are joined as the server joins them."""
    if value is None and may_be_null:
        return ""
    if isinstance(value, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
            raise BadRowError("a message's content has parts that are not text")
        value = "\n".join(_text(part.get("text"), "a part of a message", may_be_empty=True) for part in value)
    return _text(value, "a message's content", may_be_empty=may_be_empty)


def _reasoning(turn: Mapping[Any, Any]) -> str:
    given = [turn[name] for name in REASONING_NAMES if turn.get(name) is not None]
    texts = {_text(value, "a message's reasoning", may_be_empty=True) for value in given} - {""}
    if len(texts) > 1:
        raise BadRowError(f"a message has several reasonings, in {' and '.join(REASONING_NAMES)}")
    return next(iter(texts), "")


def _wrapped(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool in the form in which the server gives it to templates, where it is a bare function, perhaps with
    its `type` beside its name (as the Responses API has it)."""
    if "name" not in tool or "function" in tool or tool.get("type") not in (None, "function"):
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _parse_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's form of a call, its arguments as the mapping that templates iterate over, whatever else it has kept.
    A call without the wrapping, of a name and arguments alone, is wrapped."""
    own = {name: value for name, value in call.items() if value is not None}
    if "function" not in own:
        bare = {name: own.pop(name, None) for name in ("name", "arguments")}
        own |= {"type": "function", "function": bare}
    function = own["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRowError("a tool call has no function name")
    own["function"] = {**function, "arguments": _object(function.get("arguments"), "a tool call's arguments")}
    own.setdefault("type", "function")
    return own


def _objects(value: Any, what: str) -> list[Mapping[str, Any]]:
    """A list of objects, given as such or as JSON text; null and empty text are the empty list."""
    value = _structure(value, what, [])
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise BadRowError(f"{what} is not a list of objects")
    return value


def _object(value: Any, what: str) -> Mapping[str, Any]:
    """An object, given as such or as JSON text; null and empty text are the empty one."""
    value = _structure(value, what, {})
    if not isinstance(value, Mapping):
        raise BadRowError(f"{what} is not an object")
    return value


def _structure(value: Any, what: str, empty: Any) -> Any:
    """A value, given as such or as JSON text; null and empty text are the empty one."""
    if not isinstance(value, str) or not value:
        return value or empty
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{what} is not JSON") from error


def _to_json(value: Any) -> str:
    """Write a value as JSON text; an empty value becomes an empty text."""
    if not value:
        return ""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # dates and bytes of a table, NaN
        raise BadRowError(f"a value is not JSON: {error}") from error
    return _text(text, "a tool or its call")


def _either(turn: Mapping[Any, Any], name: str, other: str) -> Any:
    return next((turn[each] for each in (name, other) if turn.get(each) is not None), None)


def _text(value: Any, what: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{what} is not text")
    if not value.strip() and not may_be_empty:
        raise BadRowError(f"{what} is empty")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise BadRowError(f"{what} has a lone surrogate")
    return value


def _digest(texts: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.strip().encode() + b"\0")
    return digest.hexdigest()


def _is_hex(text: str) -> bool:
    try:
        return int(text, 16) >= 0
    except ValueError:
        return False
