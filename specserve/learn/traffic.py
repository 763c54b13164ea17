"""The kept traffic of a server: the token ids of prompts and answers, in segments that are there whole or not at all.
The oldest go beyond a size or an age. Hidden states are not kept: a round of training runs the target over the tokens,
so they are never of older weights, and serving pays nothing for them."""

import dataclasses
import hashlib
import importlib
import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from specserve.errors import ConfigError, first_line
from specserve.host import write_whole
from specserve.speculative.sampling import DrawOptions

logger = logging.getLogger(__name__)

SEGMENT_BYTES, SEGMENT_SECONDS = 1 << 20, 30.0  # a segment is written when it has these
MOST_WAITING = 5_000_000  # tokens of answers that the writing thread has not come to; more are left out
CLOSE_SECONDS = 5.0  # for the answers that wait when the server ends
SUFFIX = ".jsonl"
READ_AT_MOST = 8  # times what a round takes


@dataclass(frozen=True)
class ServedAnswer:
    """One answer, with its prompt."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    client: str = ""  # a digest, by which the answers of one client are recognised and no more
    version: str = ""  # of the head that proposed its last tokens
    options: DrawOptions = field(default_factory=DrawOptions)  # that it was drawn by

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    @property
    def key(self) -> str:
        """Return 16 hex digits that are the same for every answer to this prompt."""
        return hashlib.sha256(str(self.prompt_ids).encode()).hexdigest()[:16]


Redact = Callable[[ServedAnswer, Any], ServedAnswer | None]  # with the tokenizer; None: nothing may be kept


def load_redact(path: str) -> Redact | None:
    """Import the function that the setting names, if it names one. Raises ConfigError."""
    if not path:
        return None
    module, _, name = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # other people's code may raise anything
        raise ConfigError(
            f"--learn-redact {path!r}: expected MODULE:FUNCTION on PYTHONPATH, got {first_line(error)}"
        ) from error
    if not callable(found):
        raise ConfigError(f"--learn-redact {path!r}: expected a function, got {type(found).__name__}")
    return cast(Redact, found)


class Traffic:
    """Writes answers into the segments of a folder, on a thread of its own, until it is closed."""

    def __init__(
        self, folder: Path, *, most_bytes: int, most_seconds: float, redact: Redact | None = None, tokenizer: Any = None
    ) -> None:
        self._folder, self._most_bytes, self._most_seconds = folder, most_bytes, most_seconds
        self._redact, self._tokenizer = redact, tokenizer
        self._waiting: queue.SimpleQueue[ServedAnswer | None] = queue.SimpleQueue()
        self._num_put = self._num_taken = 0  # tokens, each counted by one thread
        self._end = float("inf")  # no answer is taken later
        self.num_kept = self.num_dropped = 0  # answers; the latter by the hook, or because the disk is full or slow
        self._has_warned = False
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(f"*{SUFFIX}.*"):  # half of one, by a server that was killed
            path.unlink()
        self._forget_old()
        self._thread = threading.Thread(target=self._write_all, name="learn-traffic", daemon=True)
        self._thread.start()

    def keep(self, answer: ServedAnswer) -> None:
        """Have an answer written. It never waits."""
        if self._num_put - self._num_taken < MOST_WAITING:
            self._num_put += answer.num_tokens
            self._waiting.put(answer)
        else:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what is left, as far as some seconds go, and end the thread."""
        self._end = time.monotonic() + CLOSE_SECONDS
        self._waiting.put(None)
        self._thread.join(2 * CLOSE_SECONDS)  # a hook that does not return is left behind

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            lines, num_bytes, end = [], 0, time.monotonic() + SEGMENT_SECONDS
            while num_bytes < SEGMENT_BYTES and (seconds := end - time.monotonic()) > 0:
                try:
                    answer = self._waiting.get(timeout=seconds)
                except queue.Empty:
                    break
                if answer is None:
                    is_open = False
                    break
                self._num_taken += answer.num_tokens
                if time.monotonic() > self._end:
                    self.num_dropped += 1
                elif line := self._line(answer):
                    lines.append(line)
                    num_bytes += len(line)
            self._write(lines)

    def _line(self, answer: ServedAnswer) -> bytes:
        """Return the line of an answer, which is empty where nothing of it may be kept."""
        row: dict[str, Any] = {"client": answer.client, "version": answer.version}
        row |= dataclasses.asdict(answer.options)
        try:
            found = answer if self._redact is None else self._redact(answer, self._tokenizer)
            if found is not None:
                row |= {name: [int(i) for i in getattr(found, name)] for name in ("prompt_ids", "answer_ids")}
                return json.dumps(row).encode() + b"\n"
        except Exception as error:  # other people's code: nothing is kept that it has not passed
            self._warn(f"--learn-redact failed ({first_line(error)})")
        self.num_dropped += 1
        return b""

    def _write(self, lines: Sequence[bytes]) -> None:
        try:
            if lines:
                newest = max((int(path.stem) for path in segments(self._folder)[-1:]), default=0)
                name = max(time.time_ns(), newest + 1)  # the clock may go back
                write_whole(self._folder / f"{name:020d}{SUFFIX}", b"".join(lines))
                self.num_kept += len(lines)
            self._forget_old()
        except OSError as error:
            self.num_dropped += len(lines)
            self._warn(f"{self._folder}: traffic cannot be kept ({error.strerror})")

    def _forget_old(self) -> None:
        left, oldest = self._most_bytes, time.time_ns() - int(self._most_seconds * 1e9)
        for path in reversed(segments(self._folder)):
            left -= path.stat().st_size
            if left < 0 or int(path.stem) < oldest:
                path.unlink()

    def _warn(self, what: str) -> None:
        """Say what goes wrong, once."""
        if not self._has_warned:
            logger.warning("%s; those answers are left out", what)
        self._has_warned = True


def segments(folder: Path) -> list[Path]:
    """List the segments, the oldest first."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal())


def newest_segment(folder: Path) -> str:
    """Return the name of the newest segment; empty where there is none."""
    return next((path.stem for path in segments(folder)[-1:]), "")


def count_after(folder: Path, name: str) -> int:
    """Count the answers of all segments that are newer than this one."""
    newer = [path for path in segments(folder) if path.stem > name]
    return sum(path.read_bytes().count(b"\n") for path in newer)


def read_traffic(folder: Path, most_tokens: int) -> list[ServedAnswer]:
    """Read the newest answers, of about so many tokens, the oldest first. One client's are at most half of that while
    others have any among the newest READ_AT_MOST times as many. A segment that is damaged, or goes meanwhile, is left
    out."""
    found: list[ServedAnswer] = []
    beyond: list[ServedAnswer] = []  # of clients that have their half
    of_client: Counter[str] = Counter()
    num_read = num_found = 0
    for path in reversed(segments(folder)):
        try:
            own = [_parse(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            logger.warning("%s is left out: %s", path, first_line(error))
            continue
        for answer in reversed(own):
            is_beyond = of_client[answer.client] >= most_tokens / 2
            (beyond if is_beyond else found).append(answer)
            num_found += 0 if is_beyond else answer.num_tokens
            of_client[answer.client] += answer.num_tokens
            num_read += answer.num_tokens
        if num_found >= most_tokens or num_read >= READ_AT_MOST * most_tokens:
            break
    for answer in beyond if len(of_client) == 1 else ():
        if num_found >= most_tokens:
            break
        found.append(answer)
        num_found += answer.num_tokens
    return found[::-1]


def _parse(row: dict[str, Any]) -> ServedAnswer:
    prompt_ids, answer_ids = (tuple(row[name]) for name in ("prompt_ids", "answer_ids"))
    known = dataclasses.asdict(DrawOptions())  # of segments of before an option was kept: it was off
    options = DrawOptions(**{name: type(value)(row.get(name, value)) for name, value in known.items()})
    return ServedAnswer(prompt_ids, answer_ids, row["client"], row["version"], options)
