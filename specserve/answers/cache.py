"""The first stage of a training run: the target's own answers to the questions that the run draws.

They are kept in the user's cache: in a folder for each target (its fingerprint) and settings, with a file for each
source, whose rows are known by their question. So a run that was killed goes on with the first question that is
not answered, and another run over the same questions asks none of them again. A run reads the answers to its own
questions in the order in which it drew them, whatever else is in the file: the same run trains on the same rows.

A run with a budget begins conversations in the order of the draw until those that are open are expected to end with the
answers' share of it. How many that were is its decision, which a resumed run follows.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specserve.answers.account import Account
from specserve.answers.openings import read_openings
from specserve.answers.own_questions import Asked, OwnQuestions, QuestionSettings
from specserve.answers.pace import Pace
from specserve.answers.questions import Job, row_id
from specserve.answers.regenerate import FINAL_CHANNEL, AnswerSettings, regenerate
from specserve.answers.row_file import locked
from specserve.checkpoints.lora import adapter_fingerprint
from specserve.checkpoints.source import TargetSource
from specserve.data import dataset
from specserve.data.conversations import Conversation, Row, parse_row, parse_template_kwargs
from specserve.data.sources import SELF, SourceRows, with_held_out
from specserve.errors import DataError
from specserve.host import cache_folder
from specserve.mesh import (
    SERVING_AXES,
    free_memory,
    in_equal_parts,
    mesh_sizes,
    num_parts,
    parse_mesh,
    program_platform,
)
from specserve.provenance import fingerprint
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import answering_engine
from specserve.serve.launch import Models, load_models
from specserve.serve.programs.placement import bytes_per_token
from specserve.tokenizer import Tokenizer
from specserve.train.run import budget as budgets
from specserve.train.run.budget import Budget
from specserve.train.run.prepare import Mixture, read_merging
from specserve.train.run.recipe import usual_answer_slots
from specserve.train.settings import DataSettings, TrainRun, TrainSettings

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.4  # of the memory that is free beside the weights, which are packed anew meanwhile
RECORD_SECONDS = 5.0  # between two records of the time that a budget has spent


@dataclass(frozen=True)
class AnswerProgress:
    """The progress of the stage: the number of questions that are settled, the number of all that are expected to be,
    and the account of the source that is being asked."""

    done: int
    total: int
    account: Account


@dataclass(frozen=True)
class Watch:
    """The callbacks that follow the stage: one for each program that is compiled, one for each question that the target
    asks itself, and one for each answer, or a second without any."""

    on_warmup: Callable[[int, int, str], None] = lambda _done, _total, _name: None
    on_question: Callable[[Asked, int], None] = lambda _asked, _number: None
    on_answer: Callable[[AnswerProgress], None] = lambda _answering: None


def answer(
    run: TrainRun, target: TargetSource, mixture: Mixture, budget: Budget | None, watch: Watch
) -> tuple[Mixture, Budget | None]:
    """Have the target answer as many conversations as the run draws. Returns the mixture with the target's answers in
    place of its own, and the budget with what was decided. Held-out questions stay as they are. Raises DataError where
    nothing can be asked, ConfigError or CheckpointError where the target cannot be run."""
    cache = _AnswerCache(target, run.data, run.train, run.quantization, run.lora)
    with locked(cache.folder), contextlib.ExitStack() as stack:
        engine = functools.cache(lambda: stack.enter_context(_engine(run, watch)))
        spending = budget and _Spending(budget, Path(run.output))
        mixture = _with_own_questions(mixture, run, cache.own_questions, engine, spending, watch)
        if run.data_only:
            mixture = with_held_out(mixture)
        drawn = dataset.draw(mixture, run.data.max_conversations, run.train.seed)
        order = dataset.shuffled(mixture, run.data.max_conversations, run.train.seed)
        numbers = {source.name: len(source.train) for source in order}
        if budget and budget.conversations:
            drawn = _asked(drawn, order, budget.conversations)
        if not cache.is_settled(drawn):
            if spending and not spending.budget.conversations:
                numbers = _in_time(cache, engine(), order, spending, watch.on_answer)
                drawn = _asked(drawn, order, numbers)
            else:
                cache.ask(engine(), drawn, watch.on_answer)
            cache.settle(drawn)
            engine.cache_clear()
            stack.close()
            gc.collect()  # the engine's arrays, before training needs the memory
        if spending:
            budget = spending.decide(numbers)
        return cache.read(drawn, mixture), budget


def _with_own_questions(
    mixture: Mixture,
    run: TrainRun,
    questions: OwnQuestions,
    engine: Callable[[], Engine],
    spending: "_Spending | None",
    watch: Watch,
) -> Mixture:
    """Return the mixture with the questions that the target asks itself, where it names them: as many as the settings
    ask for, or fewer where a budget has time for fewer."""
    number, seconds = run.data.self_questions, math.inf
    if all(source.name != SELF for source in mixture):
        return mixture
    if spending and spending.budget.questions:
        number = spending.budget.questions
    elif spending:
        engine()  # compiled before its time begins
        seconds = spending.budget.question_seconds
    if not questions.has(number):
        asked = questions.ask(engine(), number, lambda so_far: watch.on_question(so_far, number), seconds)
        logger.info("%s", asked.describe())
        number = min(number, len(asked.kept))
    if spending:
        spending.decide_questions(number)
    return questions.fill_in(mixture, number, run.data.self_turns)


@contextlib.contextmanager
def _engine(run: TrainRun, watch: Watch) -> Iterator[Engine]:
    sizes = mesh_sizes(run.mesh)
    # an engine's sequences are not cut, so what trains on parts of rows answers different questions
    sizes["data"] = sizes.get("data", 1) * sizes.pop("sequence", 1)
    sizes["tensor"] = sizes.get("tensor", 1) * sizes.pop("fsdp", 1)  # a step of few rows would wait for each layer
    mesh = parse_mesh(",".join(f"{axis}={size}" for axis, size in sizes.items()), SERVING_AXES)
    models = load_models(
        run.target,
        "",
        quantization=run.quantization,
        is_checked=run.check_weights or bool(run.lora),  # no matrix is sound whose pair is not
        mesh=mesh,
        merging=read_merging(run.lora),
    )
    engine = answering_engine(
        models,
        "",
        num_slots=answer_slots(models, run.data.answer_slots, run.train.seq_len),
        max_model_len=run.train.seq_len,
        on_warmup=watch.on_warmup,
    )
    del models  # the engine holds what it needs of them
    with engine:
        yield engine


def answer_slots(models: Models, most: int, seq_len: int) -> int:
    """Return how many answers of at most `seq_len` tokens are made at once: as many as the devices have room for, at
    most `most`, as a multiple of the parts that they are spread over. 0: at most as many as a step of such devices
    makes faster than fewer."""
    most = most or num_parts(models.mesh, "batch") * usual_answer_slots(program_platform())
    drafter = models.head.drafter if models.head else None
    each = bytes_per_token(models.target.config, drafter, models.mesh) * seq_len
    room = num_parts(models.mesh, "batch") * int(CACHE_SHARE * free_memory(models.mesh) / max(each, 1))
    if room < most:
        logger.info("%d answers at once, for which there is memory, in place of %d", room, most)
    return in_equal_parts(models.mesh, "batch", max(1, min(room, most)))


class _Spending:
    """The time of a budget that passes while the target answers. It is recorded on the way, so a run that is killed
    has not all of it again."""

    def __init__(self, budget: Budget, folder: Path) -> None:
        self._before, self._folder = budget, folder
        self._begin = self._recorded = time.monotonic()

    @property
    def budget(self) -> Budget:
        """The budget as it is now."""
        return self._before.after(time.monotonic() - self._begin)

    def pass_by(self) -> None:
        """Record the time that has passed, once in a while."""
        if time.monotonic() > self._recorded + RECORD_SECONDS:
            budgets.record(self._folder, self.budget)
            self._recorded = time.monotonic()

    def decide_questions(self, number: int) -> None:
        """Record how many questions the target has asked itself."""
        self._before = dataclasses.replace(self._before, questions=number)
        budgets.record(self._folder, self.budget)

    def decide(self, conversations: dict[str, int]) -> Budget:
        """Record how many conversations of each source were answered. Returns the budget with that decision."""
        decided = dataclasses.replace(self.budget, conversations=self.budget.conversations or conversations)
        budgets.record(self._folder, decided)
        return decided


def _in_time(
    cache: "_AnswerCache",
    engine: Engine,
    order: Mixture,
    spending: _Spending,
    on_answer: Callable[[AnswerProgress], None],
) -> dict[str, int]:
    """Have the target answer the questions of all sources, in this order, until the answers' share of the budget is
    used: each source in its part of it, by the number of its questions. Returns how many of each were asked."""
    asked, left = dict[str, int](), sum(len(source.train) for source in order)
    for source in order:
        number = len(source.train)
        end = time.monotonic() + spending.budget.answer_seconds * number / left
        pace = Pace(engine.runner.shapes.num_slots, cache.most_tokens, end)

        def report(so_far: AnswerProgress, pace: Pace = pace, before: int = sum(asked.values())) -> None:
            spending.pass_by()
            account = so_far.account
            total = before + max(so_far.done, min(so_far.total, account.num_settled - pace.num_ended + pace.expected()))
            on_answer(AnswerProgress(before + so_far.done, total, account))

        cache.ask(engine, (source,), report, pace.begin)
        left -= number
        if first_left := pace.first_left:
            number = next(i for i, row in enumerate(source.train) if row is first_left.row)
        asked[source.name] = number
    return asked


def _asked(drawn: Mixture, order: Mixture, numbers: Mapping[str, int]) -> Mixture:
    """Return those of the drawn rows that are the first so many of their source in this order."""
    chosen = {id(row) for source in order for row in source.train[: numbers.get(source.name, 0)]}
    kept = (dataclasses.replace(each, train=tuple(row for row in each.train if id(row) in chosen)) for each in drawn)
    return tuple(source for source in kept if source.train)


class _AnswerCache:
    """A cache of the answers that one target gave in one settings."""

    def __init__(
        self, target: TargetSource, data: DataSettings, train: TrainSettings, quantization: str, lora: str
    ) -> None:
        template_kwargs = parse_template_kwargs(data.template_kwargs)
        tokenizer = Tokenizer.load(target.folder, template_kwargs)
        self._settings = AnswerSettings(
            max_tokens=data.answer_tokens or train.seq_len,
            temperature=data.answer_temperature,
            seed=train.seed,
            thinking="drop" if tokenizer.template.mentions(FINAL_CHANNEL) else "keep",
            template_kwargs=template_kwargs,
        )
        self._settings.check(tokenizer)
        self._fingerprint = fingerprint(target.folder)
        if lora:
            self._fingerprint += f"-{adapter_fingerprint(Path(lora))}"
        self.own_questions = OwnQuestions(
            QuestionSettings(
                *(self._fingerprint, quantization, train.seed, train.seq_len, template_kwargs),
                openings=read_openings(data.self_openings),
            )
        )
        settings = {**dataclasses.asdict(self._settings), "max_model_len": train.seq_len, "weights": quantization}
        self.folder = (
            cache_folder() / "answers" / f"{self._fingerprint}-{_digest(json.dumps(settings, sort_keys=True))}"
        )

    def path(self, source: SourceRows) -> Path:
        """Return the file of a source's answers. Its name holds the source's name, without the characters that a file
        name may not have."""
        words = re.sub(r"[^\w.-]+", "-", Path(source.name).name)[:60]
        return self.folder / f"{words}-{_digest(source.name)[:8]}.jsonl"

    @property
    def most_tokens(self) -> int:
        """The length of the longest answer."""
        return self._settings.max_tokens

    def ask(
        self,
        engine: Engine,
        drawn: Mixture,
        on_answer: Callable[[AnswerProgress], None],
        choose: Callable[[Sequence[Job], Account], Iterable[Job]] = lambda jobs, _account: jobs,
    ) -> None:
        """Have the target answer the questions that have no answer yet, or those of them that are chosen."""
        total, before = sum(len(source.train) for source in drawn), 0
        for source in drawn:

            def report(account: Account, before: int = before) -> None:
                on_answer(AnswerProgress(before + account.num_settled, total, account))

            account = regenerate(
                engine,
                source.train,
                self.path(source),
                self._settings,
                target=self._fingerprint,
                on_answer=report,
                choose=choose,
            )
            logger.info("%s: %s", source.name, account.describe().replace("\n", "; "))
            before += account.num_settled

    def is_settled(self, drawn: Mixture) -> bool:
        """Return whether all of these questions were asked before. Some of them may have no answer that can be
        used."""
        return self._mark(drawn).is_file() and all(self.path(source).is_file() for source in drawn)

    def settle(self, drawn: Mixture) -> None:
        """Remember that all of these questions were asked."""
        self._mark(drawn).touch()

    def _mark(self, drawn: Mixture) -> Path:
        ids = sorted(f"{source.name} {each}" for source in drawn for each in _ids(source))
        return self.folder / f".asked-{_digest(' '.join(ids))}"

    def read(self, drawn: Mixture, mixture: Mixture) -> Mixture:
        """Read the drawn conversations with the target's answers, in the order of the draw. A conversation is left out
        where it has no answer, or where its question, as it was asked, is among the held-out ones of the mixture.
        Raises DataError where none is left."""
        kept_out = {row.key for source in mixture for row in source.held_out}
        answered = []
        for source in drawn:
            rows = _read_rows(self.path(source))
            ids = dict.fromkeys(_ids(source))
            train = tuple(rows[each] for each in ids if each in rows and rows[each].key not in kept_out)
            if train:
                answered.append(dataclasses.replace(source, train=train))
            else:
                logger.warning("%s: the target has answered none of its %d questions", source.name, len(ids))
        if not answered:
            number = sum(len(source.train) for source in drawn)
            raise DataError(
                f"the target has given no answer that can be trained on to {number} questions (in {self.folder}); give "
                "other data (--source), or --no-regenerate for the answers that are there"
            )
        return tuple(answered)


def _ids(source: SourceRows) -> list[str]:
    """The ids of the rows that answer a source's questions."""
    return [row_id(row) for row in source.train if isinstance(row, Conversation)]


def _read_rows(path: Path) -> dict[str, Row]:
    """Read the rows of the answers' file by their id. Text after the last end of a line is half a row, and is left
    out."""
    rows = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        raw = json.loads(line)
        rows[raw["id"]] = parse_row(raw, f"{path.name}:{number}")
    return rows


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
