"""Training data in the target's own words: every question of a data set, answered by the target through the engine.

A head learns to predict the target's words, not those of a data set's authors. A row depends on its question and
the settings alone, never on batch mates, order or speculation; so a run that was killed goes on where it stopped and
ends with the same rows.
"""

import dataclasses
import hashlib
import json
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specserve.answers.row_file import RowFile
from specserve.chat_template import END_THINK, THINK
from specserve.data.chat_masks import encode_chat
from specserve.data.conversations import Conversation, Row, TokenRow
from specserve.errors import CapacityError, ConfigError, DataError, RequestError
from specserve.serve.engine.engine import Engine
from specserve.serve.requests.completion import Collector, CompletionOutput
from specserve.serve.requests.request import FinishReason, Request, SamplingParams
from specserve.speculative.acceptance import Acceptance
from specserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Keep = Literal["keep", "drop"]
FINAL_CHANNEL = "<|channel|>final<|message|>"  # of harmony, where an answer follows its analysis
FINAL_ENDS = ("<|return|>", "<|end|>")
ASKED_TOO_LONG = "longer than max_model_len"
CUT = "cut by max_tokens"
UNFINISHED = "reasoning does not end within max_tokens"
FAILED = "the engine failed"
CANCEL_SECONDS = 60.0  # for a step to end, so that what is cancelled does


@dataclass(frozen=True)
class Manner:
    """The settings of an answer: everything that a row depends on beside its question and the target."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    thinking: Keep = "keep"  # in the rows; whether there is any is up to the target and its template's variables
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # a row's own win
    cut: Keep = "keep"  # answers that end at max_tokens

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for settings that this target's chat template does not know."""
        tokenizer.template.check_kwargs(self.template_kwargs)
        if self.thinking == "keep" and tokenizer.template.mentions(FINAL_CHANNEL):
            raise ConfigError(
                f"the target reasons in channels and rows hold reasoning in {THINK} tags, which its chat template does "
                "not know: give --thinking drop"
            )


@dataclass
class Account:
    """The number of questions that were answered so far, and the reasons why others were not."""

    num_rows: int = 0  # written by this run
    num_there: int = 0  # found in the file, not made again
    num_answers: int = 0
    num_tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    num_compared: int = 0  # answers whose row was rendered as training will render it
    num_exact: int = 0  # of them, those that come back as the very tokens that were generated
    left_out: Counter[str] = field(default_factory=Counter)  # why there is no row
    shortened: Counter[str] = field(default_factory=Counter)  # why a row has fewer answers than it was asked for
    start: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(time.monotonic() - self.start, 1e-9)

    def add(self, other: "Account") -> None:
        """Take over what another engine has answered meanwhile. Its time and what it found there do not count."""
        for name in ("num_rows", "num_answers", "num_tokens", "acceptance", "num_compared", "num_exact"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.left_out += other.left_out
        self.shortened += other.shortened

    @property
    def num_settled(self) -> int:
        """The number of rows that are finished: written now or earlier, or left out for good."""
        return self.num_there + self.num_rows + self.left_out.total()

    def describe(self) -> str:
        """The account as text for people, one line per subject."""
        lines = [
            f"{self.num_rows} rows written, {self.num_there} there already; {self.num_answers} answers of "
            f"{self.num_tokens:,} tokens at {self.tokens_per_second:,.0f} tokens/s, tau {self.acceptance.tau:.2f}"
        ]
        if self.num_compared:
            lines.append(f"{self.num_exact} of {self.num_compared} come back in training as the tokens they were")
        for what, counts in (("left out", self.left_out), ("shortened", self.shortened)):
            if counts:
                lines.append(f"{what}: {_list(counts)}")
        return "\n".join(lines)


@dataclass
class Job:
    """A conversation on its way: the messages so far, and the questions that are still to be asked."""

    key: str
    row: Row
    asked: list[list[dict[str, Any]]]  # for each answer to come, the messages before it
    template_kwargs: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)


class _Refused(Exception):
    """Raised where a conversation cannot go on; the message is the reason."""


def regenerate(
    engine: Engine,
    rows: Iterable[Row],
    output: Path,
    manner: Manner,
    *,
    samples: int = 1,  # rows per conversation, each drawn with its own seed
    target: str = "",  # the name or fingerprint of the target, kept with the settings
    on_answer: Callable[[Account], None] = lambda _account: None,
) -> Account:
    """Append one row per conversation to `output` as it is done: `messages` with every answer given anew, each to the
    answers before it, the `chat_template_kwargs` that they were given under, and `id`, `category`, `source`, `sample`,
    `finish_reasons`. A first answer that is cut within its reasoning is kept as token ids. The settings stand beside
    it, in `<output>.settings.json`. At the end the rows are put into the order of their questions.

    Rows that are there already are not made again. Raises ConfigError for settings that make no sense, DataError when
    the file holds rows of other settings or nothing can be asked; CapacityError when the engine stops.
    """

    def ask(jobs: Sequence[Job], write: Write, account: Account) -> None:
        answer(engine, jobs, manner, write, account, on_answer)

    source = AnswerSource(target, engine.max_model_len, engine.tokenizer)
    return regenerate_by(ask, source, rows, output, manner, samples=samples)


@dataclass(frozen=True)
class AnswerSource:
    """The properties of the answering target in which the rows of different targets differ."""

    target: str  # a name or fingerprint, kept with the settings
    max_model_len: int
    tokenizer: Tokenizer


Write = Callable[[dict[str, Any]], None]


def regenerate_by(
    ask: Callable[[Sequence[Job], Write, Account], None],  # has all of them answered, by one engine or by many
    asked: AnswerSource,
    rows: Iterable[Row],
    output: Path,
    manner: Manner,
    *,
    samples: int = 1,
) -> Account:
    """Do all of `regenerate` but the answering: find the questions that are left, and keep the file of rows."""
    if samples > 1 and manner.temperature == 0:
        raise ConfigError(f"--samples {samples} at temperature 0 would give the same answer {samples} times")
    manner.check(asked.tokenizer)
    settings = dataclasses.asdict(manner) | {"target": asked.target, "max_model_len": asked.max_model_len}
    account = Account()
    with RowFile(output, settings) as file:
        jobs, order = _jobs(rows, manner, samples, file.done, account)
        if not jobs and not account.num_there:
            raise DataError(f"nothing can be asked: {_list(account.left_out) or 'there are no rows'}")
        ask(jobs, file.write, account)
    file.arrange(order)
    return account


def answer(
    engine: Engine,
    jobs: Sequence[Job],
    manner: Manner,
    write: Write,
    account: Account,
    on_answer: Callable[[Account], None] = lambda _account: None,
) -> None:
    """Have the engine answer these questions, and write each row when it is done. Raises CapacityError when the engine
    stops."""
    _Run(engine, manner, write, account, on_answer).answer(jobs)


class _Run:
    """A run that keeps the engine's slots filled. It works on the caller's thread; the engine's own thread only hands
    finished answers over."""

    def __init__(
        self,
        engine: Engine,
        manner: Manner,
        write: Write,
        account: Account,
        on_answer: Callable[[Account], None],
    ) -> None:
        self._engine, self._tokenizer, self._manner = engine, engine.tokenizer, manner
        self._put, self._account, self._on_answer = write, account, on_answer
        self._finished: queue.SimpleQueue[tuple[Job, CompletionOutput]] = queue.SimpleQueue()
        self._open: dict[str, Request] = {}

    def answer(self, jobs: Sequence[Job]) -> None:
        waiting = iter(jobs)
        # A slot never waits for work, and the next turn of a conversation comes soon, while its prefix is cached.
        window = 2 * self._engine.runner.shapes.num_slots
        try:
            while True:
                while len(self._open) < window and (job := next(waiting, None)) is not None:
                    self._advance(job, self._ask)
                if not self._open:
                    return
                job, completion = self._finished.get()
                del self._open[job.key]
                self._advance(job, lambda job, completion=completion: self._take(job, completion))
                self._on_answer(self._account)
        finally:
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the requests that are still running, and wait until the engine has heard of it, because the next
        caller needs its slots."""
        for request in self._open.values():
            request.cancel()
        try:
            while self._open:
                job, _ = self._finished.get(timeout=CANCEL_SECONDS)
                self._open.pop(job.key, None)
        except queue.Empty:  # the engine is stuck, which its next caller notices
            log.warning("%d answers that were asked for do not end", len(self._open))

    def _advance(self, job: Job, step: Callable[[Job], None]) -> None:
        """Take the job's next step. Where it can go no further, the row keeps the answers that it has."""
        try:
            step(job)
        except _Refused as reason:
            while job.messages and job.messages[-1]["role"] != "assistant":
                job.messages.pop()
            is_row = bool(job.messages) and str(reason) != FAILED  # the next run may succeed
            (self._account.shortened if is_row else self._account.left_out)[str(reason)] += 1
            if is_row:
                self._write(job)

    def _ask(self, job: Job) -> None:
        job.messages += job.asked.pop(0)
        manner = self._manner
        try:
            job.prompt = self._tokenizer.render_chat(job.messages, template_kwargs=job.template_kwargs)
            room = self._engine.max_model_len - len(job.prompt)
            if room < 1:
                raise _Refused(ASKED_TOO_LONG)
            params = SamplingParams(
                max_tokens=min(manner.max_tokens, room),
                temperature=manner.temperature,
                top_p=manner.top_p,
                top_k=manner.top_k,
                seed=int(_digest(manner.seed, job.key, len(job.finish_reasons)), 16) % 2**63,
            )
            done = Collector(1, lambda _i, completion: self._finished.put((job, completion)))
            self._open[job.key] = self._engine.submit(job.prompt, params, done.listener(0))
        except RequestError as error:
            log.debug("%s: %s", job.row.source, error)
            raise _Refused("refused by the chat template or the engine") from error

    def _take(self, job: Job, completion: CompletionOutput) -> None:
        if completion.finish_reason == FinishReason.CANCELLED:
            raise CapacityError(f"the engine stopped: {completion.error}; run the same command again to go on")
        if completion.finish_reason == FinishReason.ERROR:
            log.warning("%s: %s", job.row.source, completion.error)
            raise _Refused(FAILED)
        account = self._account
        account.num_answers += 1
        account.num_tokens += len(completion.token_ids)
        account.acceptance += completion.stats
        is_cut = completion.finish_reason == FinishReason.LENGTH
        try:
            content = self._content(job, completion)
        except _Refused as reason:
            may_keep = self._manner.cut == self._manner.thinking == "keep"
            if str(reason) != UNFINISHED or not is_cut or not may_keep or job.finish_reasons:
                raise
            account.shortened[UNFINISHED] += 1
            self._write_tokens(job, completion)
            return
        if is_cut and self._manner.cut == "drop":
            raise _Refused(CUT)
        job.messages.append({"role": "assistant", "content": content})
        job.finish_reasons.append(str(completion.finish_reason))
        if is_cut and job.asked:
            raise _Refused(CUT)  # half an answer is not gone on from
        if job.asked:
            self._ask(job)
        else:
            self._write(job)

    def _content(self, job: Job, completion: CompletionOutput) -> str:
        """Return the content that the row holds for an answer."""
        tokenizer, manner = self._tokenizer, self._manner
        text, is_begun = completion.text, False
        if tokenizer.template.mentions(FINAL_CHANNEL):
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        else:
            is_begun = tokenizer.decode(job.prompt[-8:], skip_special_tokens=False).rstrip().endswith(THINK)
        reasoning, answer = split_reasoning(text, is_begun=is_begun)
        if not answer.strip():
            raise _Refused("empty answer")
        if manner.thinking == "drop" and reasoning:
            return answer.strip()
        whole = f"{THINK}\n{text}" if is_begun else text
        account = self._account
        account.num_compared += 1
        for content in dict.fromkeys((whole.strip(), whole.strip("\n"), whole)):
            if self._is_exact(job, content, completion.token_ids):
                account.num_exact += 1
                return content
        return whole.strip()

    def _is_exact(self, job: Job, content: str, token_ids: Sequence[int]) -> bool:
        """Return whether training on this row sees the very tokens that were generated, behind the very prompt."""
        said = [*job.prompt, *token_ids]
        if said[-1] in self._engine.eos_ids:
            said.pop()  # the template writes its own
        try:
            answered = [*job.messages, {"role": "assistant", "content": content}]
            found, _ = encode_chat(self._tokenizer, answered, template_kwargs=job.template_kwargs)
        except DataError:
            return False
        return found[: len(said)] == said

    def _write_tokens(self, job: Job, completion: CompletionOutput) -> None:
        """Write a first answer that ends within its reasoning, as token ids, because no message can hold half of a
        reasoning."""
        said = list(completion.token_ids)
        row = {
            "id": job.key,
            "input_ids": [*job.prompt, *said],
            "loss_mask": [0] * len(job.prompt) + [1] * len(said),
            "key": job.row.key,
            "category": job.row.category,
            "source": job.row.source,
            "sample": int(job.key.partition("-")[2]),
            "finish_reasons": [str(completion.finish_reason)],
        }
        self._put(row)
        self._account.num_rows += 1

    def _write(self, job: Job) -> None:
        sample = int(job.key.partition("-")[2])
        row: dict[str, Any] = {"id": job.key, "messages": job.messages}
        if job.template_kwargs:  # training renders the row as its answers were asked for
            row["chat_template_kwargs"] = job.template_kwargs
        row |= {"category": job.row.category, "source": job.row.source}
        self._put(row | {"sample": sample, "finish_reasons": job.finish_reasons})
        self._account.num_rows += 1


def split_reasoning(text: str, *, is_begun: bool = False) -> tuple[str, str]:
    """Split what a target wrote into (reasoning, answer): before and after `</think>`, or harmony's final channel.

    `is_begun`: the prompt has written `<think>`. Raises when the reasoning does not end.
    """
    if "<|channel|>" in text:
        reasoning, tag, answer = text.rpartition(FINAL_CHANNEL)
        for end in FINAL_ENDS:
            answer = answer.removesuffix(end)
    elif is_begun or text.lstrip().startswith(THINK):
        reasoning, tag, answer = text.partition(END_THINK)
        reasoning = reasoning.rpartition(THINK)[2]
    else:
        return "", text
    if not tag:
        raise _Refused(UNFINISHED)
    return reasoning, answer


def _jobs(
    rows: Iterable[Row], manner: Manner, samples: int, done: set[str], account: Account
) -> tuple[list[Job], dict[str, int]]:
    """Return the questions that are still to be asked, each once, and the place of each question among all. Questions
    that cannot be asked are counted."""
    jobs: dict[str, Job] = {}
    order: dict[str, int] = {}
    for row in rows:
        if isinstance(row, TokenRow):
            raise DataError(f"{row.source} holds token ids, of which no question can be made; give what they came of")
        asked, reason = _asked(row)
        if reason:
            account.left_out[reason] += 1
            continue
        kwargs = {**manner.template_kwargs, **row.variables()}
        for sample in range(samples):
            key = _row_id(row, asked, sample)
            order.setdefault(key, len(order))
            if key in done:
                account.num_there += 1
            elif key in jobs:
                account.left_out["asked before"] += 1
            else:
                jobs[key] = Job(key, row, [list(turn) for turn in asked], kwargs)
    return list(jobs.values()), order


def row_id(row: Conversation) -> str:
    """The `id` of the row that holds the (first) answers to a conversation's questions: the same for the same questions
    under the same variables of the template, wherever they stand."""
    return _row_id(row, _asked(row)[0], 0)


def _row_id(row: Conversation, asked: list[list[dict[str, Any]]], sample: int) -> str:
    question = [asked, row.variables()] if row.template_kwargs else [asked]
    return f"{_digest(*question)}-{sample}"


def _asked(row: Conversation) -> tuple[list[list[dict[str, Any]]], str]:
    """Return the messages before each answer, or the reason why nothing can be asked."""
    if any(message.role == "tool" for message in row.messages):
        return [], "holds results of tools, which another answer might not call"
    if any(message.tool_calls for message in row.messages):
        return [], "calls tools, which the text of an answer cannot hold"
    if row.tools:
        return [], "offers tools, which the text of an answer cannot call"
    turns: list[list[dict[str, Any]]] = [[]]
    for message in row.as_dicts():
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif any(asked["role"] == "user" for asked in turns[-1]):
            turns.append([])
        # An answer to nothing, such as a greeting, was not the target's: it is left out.
    asked = [turn for turn in turns if any(message["role"] == "user" for message in turn)]
    return (asked, "") if asked else ([], "asks nothing")


def _digest(*parts: object) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in counts.most_common())
