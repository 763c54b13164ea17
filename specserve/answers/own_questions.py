"""Questions that the target asks itself, for a target without data (`--source self`).

The target writes the user's part of a chat from where its template lets the user speak, at temperature 1 (Magpie,
arXiv 2406.08464). Candidate i is drawn with a seed of its own, so it depends on its number and the settings alone.
Every second one goes on from the first words of some task (`openings`). Candidates are kept or left out in the order
of their numbers, whatever order they end in. So the same seed gives the same questions, and a run that was killed goes
on to the very same ones.
"""

import contextlib
import dataclasses
import json
import math
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from specserve.answers.account import listed
from specserve.answers.questions import CANCEL_SECONDS, digest
from specserve.answers.row_file import RowFile, locked
from specserve.data.conversations import Conversation, Message, split_of
from specserve.data.sources import SELF, SourceRows
from specserve.data.user_turns import UserTurn, next_user_turn
from specserve.errors import CapacityError, DataError
from specserve.host import cache_folder
from specserve.serve.engine.engine import Engine
from specserve.serve.requests.completion import Collector, CompletionOutput
from specserve.serve.requests.request import FinishReason, Request, SamplingParams
from specserve.tokenizer import Tokenizer

QUESTION_TOKENS = 256  # of the longest question
MIN_P = 0.05  # of its likeliest token: what is below is noise in a small model, and rarely drawn in a large one
FEWEST_TOKENS, FEWEST_LETTERS = 4, 10
OPENING_WORDS, OPENING_SHARE, OPENING_FLOOR = 3, 0.05, 8  # so many questions, or this share, may begin alike
REPEATED_LENGTH, REPEATED_SHARE = 4, 0.5  # of runs of so many tokens, at least this share must differ
UNFINISHED_ENDS = (":", ",", ";", "(", "[", "{", "-")  # something was to follow
HOPELESS, HOPELESS_SHARE = 400, 0.02  # candidates after which fewer than this share kept end the asking


def sampling(turn: UserTurn, room: int, seed: int) -> SamplingParams:
    """Return how the words of a user's turn are drawn, where there is `room` for so many tokens."""
    return SamplingParams(
        max_tokens=min(QUESTION_TOKENS, room),
        temperature=1.0,
        min_p=MIN_P,
        seed=seed,
        stop_token_ids=list(turn.end_ids),
        stop=[turn.end_text] if turn.end_text else [],
    )


def read_question(
    tokenizer: Tokenizer, turn: UserTurn, completion: CompletionOutput, opening: str = ""
) -> tuple[str, str]:
    """Return the user's words that were drawn, behind the opening that was given, and why they are no question, which
    is empty where they are one."""
    text, token_ids = (opening + completion.text).strip(), list(completion.token_ids)
    if completion.finish_reason != FinishReason.STOP:
        return text, "does not end"
    if token_ids and token_ids[-1] in turn.end_ids:
        token_ids.pop()
    if tokenizer.special_token_ids.intersection(token_ids) or tokenizer.special_tokens_in(text) or "\ufffd" in text:
        return text, "holds a control token"
    if len(token_ids) < FEWEST_TOKENS or sum(map(str.isalnum, text)) < FEWEST_LETTERS:
        return text, "too short"
    if text.endswith(UNFINISHED_ENDS):
        return text, "announces what does not follow"
    runs = [tuple(token_ids[i : i + REPEATED_LENGTH]) for i in range(len(token_ids) - REPEATED_LENGTH + 1)]
    if len(set(runs)) < REPEATED_SHARE * len(runs):
        return text, "repeats itself"
    return text, ""


@dataclass
class Asked:
    """The candidates so far, in the order of their numbers: those that are kept, and why others are not."""

    kept: list[tuple[int, str]] = field(default_factory=list)  # number and text
    left_out: Counter[str] = field(default_factory=Counter)
    _seen: set[str] = field(default_factory=set)
    _openings: Counter[str] = field(default_factory=Counter)

    @property
    def num_candidates(self) -> int:
        return len(self.kept) + self.left_out.total()

    def add(self, text: str, fault: str) -> None:
        """Keep the next candidate, or leave it out."""
        words = text.casefold().split()
        plain, opening = "".join(filter(str.isalnum, text.casefold())), " ".join(words[:OPENING_WORDS])
        most = max(OPENING_FLOOR, int(OPENING_SHARE * len(self.kept)))
        if not fault and plain in self._seen:
            fault = "asked before"
        if not fault and self._openings[opening] >= most:
            fault = "begins as many others do"
        if fault:
            self.left_out[fault] += 1
            return
        self._seen.add(plain)
        self._openings[opening] += 1
        self.kept.append((self.num_candidates, text))

    def describe(self) -> str:
        """The account of the candidates as text for people."""
        left_out = f"; left out: {listed(self.left_out)}" if self.left_out else ""
        return f"{len(self.kept)} questions of {self.num_candidates} that the target asked itself{left_out}"

    @property
    def is_hopeless(self) -> bool:
        number = self.num_candidates
        return number >= HOPELESS and len(self.kept) < HOPELESS_SHARE * number


@dataclass(frozen=True)
class QuestionSettings:
    """Everything that the questions depend on, beside their number."""

    target: str  # its fingerprint
    weights: str  # how they are quantised
    seed: int
    max_model_len: int
    template_kwargs: Mapping[str, Any]
    openings: str = ""  # a line each
    max_tokens: int = QUESTION_TOKENS
    min_p: float = MIN_P

    @property
    def lines(self) -> list[str]:
        """The openings, each by itself."""
        return self.openings.splitlines()

    def opening(self, number: int) -> str:
        """Return the first words of the candidate of this number: every second one has an opening, in turns."""
        lines = self.lines
        if not lines or number % 2 == 0:
            return ""
        return lines[number // 2 % len(lines)]


class OwnQuestions:
    """The questions of one target and seed, in a file of the user's cache that grows as more of them are wanted."""

    def __init__(self, settings: QuestionSettings) -> None:
        self._settings, self._stated = settings, dataclasses.asdict(settings)
        self.path = cache_folder() / "questions" / f"{settings.target}-{digest(self._stated)}" / "questions.jsonl"

    def fill(self, source: SourceRows, number: int, turns: int) -> SourceRows:
        """Return the source with the first `number` questions, of conversations in which the user speaks `turns` times.
        There are fewer where fewer were asked so far."""
        rows = [
            Conversation((Message("user", text),), "", f"{SELF}:{i}", more_turns=turns - 1)
            for i, text in self._read().kept[:number]
        ]
        held_out = tuple(row for row in rows if split_of(row) == "held-out")
        return dataclasses.replace(source, train=tuple(row for row in rows if row not in held_out), held_out=held_out)

    def fill_in(self, mixture: Iterable[SourceRows], number: int, turns: int) -> tuple[SourceRows, ...]:
        """Return the mixture with these questions where it names them."""
        return tuple(self.fill(source, number, turns) if source.name == SELF else source for source in mixture)

    def has(self, number: int) -> bool:
        """Return whether so many questions were asked and kept."""
        return len(self._read().kept) >= number

    def _read(self) -> Asked:
        asked, found = Asked(), _texts(self.path)
        while asked.num_candidates in found:
            asked.add(*found[asked.num_candidates])
        return asked

    def ask(
        self,
        engine: Engine,
        number: int,
        on_question: Callable[[Asked], None] = lambda _asked: None,
        seconds: float = math.inf,
    ) -> Asked:
        """Have the target ask until `number` questions are kept, or a first one and so many seconds have passed. Those
        that are there already are not asked again. Raises DataError where the chat template shows no place for the
        user's words or next to nothing of what the target writes there can be used; CapacityError when the engine
        stops."""
        turn = next_user_turn(engine.tokenizer, template_kwargs=self._settings.template_kwargs)
        openings = [engine.tokenizer.encode(line, add_special_tokens=False) for line in self._settings.lines]
        room = engine.max_model_len - len(turn.prompt) - max(map(len, openings), default=0)
        if room < QUESTION_TOKENS // 2:
            raise DataError(f"sequences of {engine.max_model_len} tokens have no room for a question and its answer")
        with locked(self.path.parent), RowFile(self.path, self._stated) as file:
            asked, found, end = self._read(), _texts(self.path), time.monotonic() + seconds
            if len(asked.kept) >= number:
                return asked
            for i, text, fault in _drawn(engine, turn, room, self._settings, set(found)):
                file.write({"id": str(i), "text": text, "fault": fault})
                found[i] = text, fault
                while asked.num_candidates in found:
                    asked.add(*found[asked.num_candidates])
                on_question(asked)
                if len(asked.kept) >= number or (asked.kept and time.monotonic() > end):
                    break
                if asked.is_hopeless:
                    raise DataError(
                        f"of {asked.num_candidates} questions that the target asked itself {len(asked.kept)} can be "
                        f"used ({listed(asked.left_out)}); it may not be a chat model: give data (--source)"
                    )
        return asked


def _texts(path: Path) -> dict[int, tuple[str, str]]:
    """Read the candidates of a file by their number: text and fault. Half a line at its end is left out."""
    if not path.is_file():
        return {}
    rows = map(json.loads, path.read_bytes().split(b"\n")[:-1])
    return {int(row["id"]): (row["text"], row["fault"]) for row in rows}


def _drawn(
    engine: Engine, turn: UserTurn, room: int, settings: QuestionSettings, there: set[int]
) -> Iterator[tuple[int, str, str]]:  # number, text and fault of each candidate that is not there, without an end
    """Keep the engine's slots filled with candidates, by ascending numbers, and yield each as it ends."""
    finished: queue.SimpleQueue[tuple[int, CompletionOutput]] = queue.SimpleQueue()
    waiting, running = (i for i in count() if i not in there), dict[int, Request]()
    tokenizer = engine.tokenizer
    try:
        while True:
            while len(running) < 2 * engine.runner.shapes.num_slots:
                i = next(waiting)
                given = tokenizer.encode(settings.opening(i), add_special_tokens=False)
                params = sampling(turn, room, int(digest(settings.seed, i), 16) % 2**63)
                done = Collector(1, lambda _i, completion, i=i: finished.put((i, completion)))
                running[i] = engine.submit([*turn.prompt, *given], params, done.listener(0))
            i, completion = finished.get()
            del running[i]
            if completion.finish_reason in (FinishReason.CANCELLED, FinishReason.ABORTED, FinishReason.ERROR):
                raise CapacityError(f"the engine stopped: {completion.error}; run the same command again to go on")
            yield (i, *read_question(tokenizer, turn, completion, settings.opening(i)))
    finally:
        for request in running.values():
            request.cancel()
        with contextlib.suppress(queue.Empty):  # the engine is stuck, which its next caller notices
            while running:
                del running[finished.get(timeout=CANCEL_SECONDS)[0]]
