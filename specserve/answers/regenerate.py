"""Training data in the target's own words: every question of a data set, answered by the target through the engine.

A head learns to predict the target's words, not those of a data set's authors. A row depends on its question and
the settings alone, never on batch mates, order or speculation; so a run that was killed goes on where it stopped and
ends with the same rows.
"""

import dataclasses
import functools
import logging
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specserve.answers.account import Account, listed
from specserve.answers.own_questions import read_question, sampling
from specserve.answers.questions import CANCEL_SECONDS, Job, Stuck, digest, find_questions
from specserve.answers.row_file import RowFile
from specserve.answers.tool_turns import UNFINISHED_CALL, ToolTurns
from specserve.chat_template import THINK
from specserve.data.chat_masks import encode_chat
from specserve.data.conversations import Row
from specserve.data.user_turns import next_user_turn
from specserve.errors import CapacityError, ConfigError, DataError, RequestError
from specserve.serve.engine.engine import Engine
from specserve.serve.http.formats.named import read_harmony
from specserve.serve.http.formats.reader import Reader
from specserve.serve.http.formats.reasoning import THINK_MARKS, answer_format, choose_reasoning, opens_reasoning
from specserve.serve.http.formats.tools import NO_CALLS, new_call_id
from specserve.serve.requests.completion import Collector, CompletionOutput
from specserve.serve.requests.request import Delta, FinishReason, Request, SamplingParams
from specserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Keep = Literal["keep", "drop"]
CHANNEL = "<|channel|>"  # of harmony
FINAL_CHANNEL = f"{CHANNEL}final<|message|>"  # where an answer follows its analysis
ASKED_TOO_LONG = "longer than max_model_len"
CUT = "cut by max_tokens"
UNFINISHED = "reasoning does not end within max_tokens"
FAILED = "the engine failed"
EMPTY = "empty answer"
TICK_SECONDS = 1.0  # between two calls of `on_answer`, at most


@dataclass(frozen=True)
class AnswerSettings:
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


def regenerate(
    engine: Engine,
    rows: Iterable[Row],
    output: Path,
    settings: AnswerSettings,
    *,
    samples: int = 1,  # rows per conversation, each drawn with its own seed
    target: str = "",  # the name or fingerprint of the target, kept with the settings
    on_answer: Callable[[Account], None] = lambda _account: None,
    choose: Callable[[Sequence[Job], Account], Iterable[Job]] = lambda jobs, _account: jobs,
) -> Account:
    """Append one row per conversation to `output` as it is done: `messages` with every answer given anew, each to the
    answers before it, the `chat_template_kwargs` that they were given under, and `id`, `category`, `source`, `sample`,
    `finish_reasons`. A first answer that is cut within its reasoning is kept as token ids. The settings stand beside
    it, in `<output>.settings.json`. At the end the rows are put into the order of their questions.

    `on_answer` is called after each answer, and at least every second. `choose` says which of the questions are asked,
    each when its turn comes. Rows that are there already are not made again. Raises ConfigError for settings that make
    no sense, DataError when the file holds rows of other settings or nothing can be asked; CapacityError when the
    engine stops.
    """

    def ask(jobs: Sequence[Job], write: Write, account: Account) -> None:
        answer(engine, choose(jobs, account), settings, write, account, on_answer)

    source = AnswerSource(target, engine.max_model_len, engine.tokenizer)
    return regenerate_by(ask, source, rows, output, settings, samples=samples)


@dataclass(frozen=True)
class AnswerSource:
    """The properties of the answering target in which the rows of different targets differ."""

    target: str  # a name or fingerprint, kept with the settings
    max_model_len: int
    tokenizer: Tokenizer

    def stated(self, settings: AnswerSettings) -> dict[str, Any]:
        """Return the settings that stand beside a file of rows, which rows made with others do not go into."""
        return dataclasses.asdict(settings) | {"target": self.target, "max_model_len": self.max_model_len}


Write = Callable[[dict[str, Any]], None]


def regenerate_by(
    ask: Callable[[Sequence[Job], Write, Account], None],  # has all of them answered, by one engine or by many
    source: AnswerSource,
    rows: Iterable[Row],
    output: Path,
    settings: AnswerSettings,
    *,
    samples: int = 1,
) -> Account:
    """Do all of `regenerate` but the answering: find the questions that are left, and keep the file of rows."""
    if samples > 1 and settings.temperature == 0:
        raise ConfigError(f"--samples {samples} at temperature 0 would give the same answer {samples} times")
    settings.check(source.tokenizer)
    with RowFile(output, source.stated(settings)) as file:
        questions = find_questions(rows, settings.template_kwargs, samples=samples, done=file.done)
        if not questions.jobs and not questions.num_there:
            raise DataError(f"nothing can be asked: {listed(questions.left_out) or 'there are no rows'}")
        account = Account(num_there=questions.num_there, left_out=questions.left_out)
        ask(questions.jobs, file.write, account)
    file.arrange(questions.order)
    return account


def answer(
    engine: Engine,
    jobs: Iterable[Job],
    settings: AnswerSettings,
    write: Write,
    account: Account,
    on_answer: Callable[[Account], None] = lambda _account: None,
) -> None:
    """Have the engine answer these questions, and write each row when it is done. Raises CapacityError when the engine
    stops."""
    _Run(engine, settings, write, account, on_answer).answer(jobs)


def num_open(num_slots: int) -> int:
    """Return how many conversations are open at once: a quarter more than there are slots, so that no slot waits."""
    return num_slots + max(1, num_slots // 4)


class _Run:
    """A run that keeps the engine's slots filled. It works on the caller's thread; the engine's own thread only hands
    finished answers over."""

    def __init__(
        self,
        engine: Engine,
        settings: AnswerSettings,
        write: Write,
        account: Account,
        on_answer: Callable[[Account], None],
    ) -> None:
        self._engine, self._tokenizer, self._settings = engine, engine.tokenizer, settings
        self._marks = reasoning_marks(engine.tokenizer)
        self._put, self._account, self._on_answer = write, account, on_answer
        self._finished: queue.SimpleQueue[tuple[Job, CompletionOutput]] = queue.SimpleQueue()
        self._open: dict[str, Request] = {}

    @functools.cached_property
    def _tools(self) -> ToolTurns:
        return ToolTurns(self._tokenizer)

    def answer(self, jobs: Iterable[Job]) -> None:
        waiting = iter(jobs)
        # A slot never waits for work, and the next turn of a conversation comes soon, while its prefix is cached.
        window = num_open(self._engine.runner.shapes.num_slots)
        try:
            while True:
                while len(self._open) < window and (job := next(waiting, None)) is not None:
                    self._advance(job, self._ask)
                if not self._open:
                    return
                try:
                    job, completion = self._finished.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    self._on_answer(self._account)
                    continue
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
        except Stuck as reason:
            while job.messages and job.messages[-1]["role"] != "assistant":
                job.messages.pop()
            is_row = bool(job.messages) and str(reason) != FAILED  # the next run may succeed
            (self._account.shortened if is_row else self._account.left_out)[str(reason)] += 1
            if is_row:
                self._write(job)

    def _ask(self, job: Job) -> None:
        job.messages += job.asked.pop(0)
        settings = self._settings
        try:
            if job.row.tools:
                job.prompt = self._tools.render(job)
            else:
                job.prompt = self._tokenizer.render_chat(job.messages, template_kwargs=job.template_kwargs)
            room = self._engine.max_model_len - len(job.prompt)
            if room < 1:
                raise Stuck(ASKED_TOO_LONG)
            params = SamplingParams(
                max_tokens=min(settings.max_tokens, room),
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                seed=self._seed(job),
            )
            if job.row.tools:
                params = self._tools.reading(job, params)
            self._submit(job, job.prompt, params)
        except RequestError as error:
            log.debug("%s: %s", job.row.source, error)
            raise Stuck("refused by the chat template or the engine") from error

    def _ask_for_question(self, job: Job) -> None:
        """Have the target write what the user says next."""
        job.more_turns -= 1
        try:
            turn = next_user_turn(self._tokenizer, job.messages, template_kwargs=job.template_kwargs)
            room = (self._engine.max_model_len - len(turn.prompt)) // 2  # the other half is for the answer
            if room < 1:
                raise Stuck(ASKED_TOO_LONG)
            self._submit(job, turn.prompt, sampling(turn, room, self._seed(job, "user")))
        except (RequestError, DataError) as error:
            log.debug("%s: %s", job.row.source, error)
            raise Stuck("refused by the chat template or the engine") from error
        job.user_turn = turn

    def _seed(self, job: Job, *who: str) -> int:
        return int(digest(self._settings.seed, job.key, len(job.finish_reasons), *who), 16) % 2**63

    def _submit(self, job: Job, prompt: Sequence[int], params: SamplingParams) -> None:
        listen = Collector(1, lambda _i, completion: self._finished.put((job, completion))).listener(0)

        def on_delta(delta: Delta) -> None:  # on the engine's thread alone, which counts
            self._account.count(len(delta.token_ids))
            listen(delta)

        self._open[job.key] = self._engine.submit(prompt, params, on_delta)

    def _take(self, job: Job, completion: CompletionOutput) -> None:
        if completion.finish_reason in (FinishReason.CANCELLED, FinishReason.ABORTED):
            raise CapacityError(f"the engine stopped: {completion.error}; run the same command again to go on")
        if completion.finish_reason == FinishReason.ERROR:
            log.warning("%s: %s", job.row.source, completion.error)
            raise Stuck(FAILED)
        if job.user_turn:
            text, fault = read_question(self._tokenizer, job.user_turn, completion)
            job.user_turn = None
            if fault:
                raise Stuck(f"its next question {fault}")
            job.asked.append([{"role": "user", "content": text}])
            self._ask(job)
            return
        account = self._account
        account.num_answers += 1
        account.num_tokens += len(completion.token_ids)
        account.acceptance += completion.stats
        is_cut = completion.finish_reason == FinishReason.LENGTH
        try:
            answered = self._with_tools(job, completion) if job.row.tools else self._content(job, completion)
        except Stuck as reason:
            may_keep = self._settings.cut == self._settings.thinking == "keep"
            is_unfinished = is_cut and str(reason) in (UNFINISHED, UNFINISHED_CALL)
            if not is_unfinished or not may_keep or job.finish_reasons:
                raise
            account.shortened[str(reason)] += 1
            self._write_tokens(job, completion)
            return
        if is_cut and self._settings.cut == "drop":
            raise Stuck(CUT)
        job.messages.append(answered)
        job.finish_reasons.append(str(completion.finish_reason))
        if is_cut and (job.asked or job.more_turns):
            raise Stuck(CUT)  # half an answer is not gone on from
        if job.asked:
            if job.row.tools:
                self._tools.go_on(job)
            self._ask(job)
        elif job.more_turns:
            self._ask_for_question(job)
        else:
            self._write(job)

    def _with_tools(self, job: Job, completion: CompletionOutput) -> dict[str, Any]:
        """Return the message that the row holds for an answer that may call tools."""
        is_cut = completion.finish_reason == FinishReason.LENGTH
        part, is_thinking = self._tools.read(job, completion.text, is_cut=is_cut)
        if is_thinking:
            raise Stuck(UNFINISHED)
        if not part.content.strip() and not part.tool_calls:
            raise Stuck(EMPTY)
        keeps = self._settings.thinking == "keep"
        found = list(self._tools.messages(job, part, completion.text, keeps_reasoning=keeps))
        if part.reasoning and not keeps:
            return found[0]
        return self._exact_one(job, found, completion.token_ids)

    def _content(self, job: Job, completion: CompletionOutput) -> dict[str, Any]:
        """Return the message that the row holds for an answer."""
        tokenizer, settings, marks = self._tokenizer, self._settings, self._marks
        text, is_begun = completion.text, False
        if tokenizer.template.mentions(FINAL_CHANNEL):
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        else:
            is_begun = opens_reasoning(tokenizer, job.prompt, marks[0])
        shown = {tokenizer.token_id(mark) for mark in marks} & tokenizer.special_token_ids
        if shown.intersection(completion.token_ids):  # the text leaves out all special tokens
            hidden = tokenizer.special_token_ids - shown
            said = [token_id for token_id in completion.token_ids if token_id not in hidden]
            text = tokenizer.decode(said, skip_special_tokens=False)
        _, answer = split_reasoning(text, marks, is_begun=is_begun)
        if not answer.strip():
            raise Stuck(EMPTY)
        if settings.thinking == "drop" and answer.strip() != text.strip():
            return {"role": "assistant", "content": answer.strip()}
        whole = text
        if is_begun:
            whole = f"{marks[0]}\n{text}" if marks[0] == THINK else marks[0] + text
        contents = dict.fromkeys((whole.strip(), whole.strip("\n"), whole))
        found = [{"role": "assistant", "content": content} for content in contents]
        return self._exact_one(job, found, completion.token_ids)

    def _exact_one(self, job: Job, found: Sequence[dict[str, Any]], token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the first of these messages that comes back in training as the tokens that were generated, and else
        the first."""
        self._account.num_compared += 1
        for answered in found:
            if self._is_exact(job, answered, token_ids):
                self._account.num_exact += 1
                return answered
        return found[0]

    def _is_exact(self, job: Job, answered: dict[str, Any], token_ids: Sequence[int]) -> bool:
        """Return whether training on this row sees the very tokens that were generated, behind the very prompt."""
        said = [*job.prompt, *token_ids]
        if said[-1] in self._engine.eos_ids:
            said.pop()  # the template writes its own
        try:
            row = self._row(job, [*job.messages, answered])
            found, _ = encode_chat(
                self._tokenizer, row["messages"], tools=row.get("tools"), template_kwargs=job.template_kwargs
            )
        except (DataError, RequestError):
            return False
        return found[: len(said)] == said

    def _row(self, job: Job, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return self._tools.written(messages, job) if job.row.tools else {"messages": messages}

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
        row: dict[str, Any] = {"id": job.key, **self._row(job, job.messages)}
        if job.template_kwargs:  # training renders the row as its answers were asked for
            row["chat_template_kwargs"] = job.template_kwargs
        row |= {"category": job.row.category, "source": job.row.source}
        self._put(row | {"sample": sample, "finish_reasons": job.finish_reasons})
        self._account.num_rows += 1


def reasoning_marks(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the marks around a target's reasoning, those that most models write where its template shows none."""
    return choose_reasoning("auto", tokenizer)[1] or THINK_MARKS["think"]


def split_reasoning(
    text: str, marks: tuple[str, str] = THINK_MARKS["think"], *, is_begun: bool = False
) -> tuple[str, str]:
    """Split what a target wrote into (reasoning, answer), as the server does: by its marks, or by harmony's channels.
    The answer is whole, so what stands before an end mark that nothing has opened is reasoning.

    `is_begun`: the prompt has written the first mark. Raises when the reasoning does not end.
    """
    before, end, _ = text.partition(marks[1])
    is_begun = is_begun or (bool(end) and marks[0] not in before)
    read = answer_format(NO_CALLS, marks, is_thinking=is_begun)
    is_harmony = CHANNEL in text
    if is_harmony:
        read = read_harmony
    reader = Reader(read, new_call_id, tools={})
    part = reader.push(text) + reader.finish()
    if reader.is_thinking or (is_harmony and FINAL_CHANNEL not in text):
        raise Stuck(UNFINISHED)
    return part.reasoning, part.content
