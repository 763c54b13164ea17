"""The first stage of a training run: the target's own answers to the questions that the run draws.

They are kept in the user's cache: in a folder for each target (its fingerprint) and settings, with a file for each
source, whose rows are known by their question. So a run that was killed goes on with the first question that is
not answered, and another run over the same questions asks none of them again. A run reads the answers to its own
questions in the order in which it drew them, whatever else is in the file: the same run trains on the same rows.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specserve.answers.account import Account
from specserve.answers.own_questions import Asked, OwnQuestions, QuestionSettings
from specserve.answers.questions import row_id
from specserve.answers.regenerate import FINAL_CHANNEL, AnswerSettings, regenerate
from specserve.answers.row_file import locked
from specserve.checkpoints.source import TargetSource
from specserve.data import dataset
from specserve.data.conversations import Conversation, Row, parse_row, parse_template_kwargs
from specserve.data.sources import SELF, SourceRows, with_held_out
from specserve.errors import DataError
from specserve.host import cache_folder
from specserve.mesh import SERVING_AXES, free_memory, in_equal_parts, mesh_sizes, num_parts, parse_mesh
from specserve.provenance import fingerprint
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import answering_engine
from specserve.serve.launch import Models, load_models
from specserve.serve.programs.placement import bytes_per_token
from specserve.tokenizer import Tokenizer
from specserve.train.run import budget as budgets
from specserve.train.run.budget import Budget
from specserve.train.run.prepare import Mixture
from specserve.train.settings import DataSettings, TrainRun, TrainSettings

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.4  # of the memory that is free beside the weights, which are packed anew meanwhile


@dataclass(frozen=True)
class AnswerProgress:
    """The progress of the stage: the number of questions that are settled, the number of all, and the account of the
    source that is being asked."""

    done: int
    total: int
    account: Account


@dataclass(frozen=True)
class Watch:
    """The callbacks that follow the stage: one for each program that is compiled, each question that the target asks
    itself, and each answer."""

    on_warmup: Callable[[int, int, str], None] = lambda _done, _total, _name: None
    on_question: Callable[[Asked, int], None] = lambda _asked, _number: None
    on_answer: Callable[[AnswerProgress], None] = lambda _answering: None


def answer(
    run: TrainRun, target: TargetSource, mixture: Mixture, budget: Budget | None, watch: Watch
) -> tuple[Mixture, Budget | None]:
    """Have the target answer as many conversations as the run draws. Returns the mixture with the target's answers in
    place of its own, and the budget with what was decided. Held-out questions stay as they are. Raises DataError where
    nothing can be asked, ConfigError or CheckpointError where the target cannot be run."""
    cache = _AnswerCache(target, run.data, run.train, run.quantization)
    with locked(cache.folder), contextlib.ExitStack() as stack:
        begin = time.monotonic()
        engine = functools.cache(lambda: stack.enter_context(_engine(run, watch)))
        mixture = _with_own_questions(mixture, run, cache.own_questions, engine, watch)
        if run.data_only:
            mixture = with_held_out(mixture)
        drawn = dataset.draw(mixture, run.data.max_conversations, run.train.seed)
        if budget and budget.conversations:
            drawn = dataset.draw(mixture, budget.conversations, run.train.seed)
        if not cache.is_settled(drawn):
            if budget and not budget.conversations:
                budget = _measured(cache, engine(), drawn, budget)
                budgets.record(Path(run.output), budget)
                drawn = dataset.draw(mixture, budget.conversations, run.train.seed)
            cache.ask(engine(), drawn, watch.on_answer)
            cache.settle(drawn)
            engine.cache_clear()
            stack.close()
            gc.collect()  # the engine's arrays, before training needs the memory
        if budget:
            count = budget.conversations or sum(len(source.train) for source in drawn)
            budget = dataclasses.replace(budget, conversations=count, spent=budget.spent + time.monotonic() - begin)
            budgets.record(Path(run.output), budget)
        return cache.read(drawn, mixture), budget


def _with_own_questions(
    mixture: Mixture, run: TrainRun, questions: OwnQuestions, engine: Callable[[], Engine], watch: Watch
) -> Mixture:
    """Return the mixture with the questions that the target asks itself, where it names them."""
    number = run.data.self_questions
    if all(source.name != SELF for source in mixture):
        return mixture
    if not questions.has(number):
        asked = questions.ask(engine(), number, lambda so_far: watch.on_question(so_far, number))
        logger.info("%s", asked.describe())
    return questions.fill_in(mixture, number, run.data.self_turns)


@contextlib.contextmanager
def _engine(run: TrainRun, watch: Watch) -> Iterator[Engine]:
    sizes = mesh_sizes(run.mesh)
    # an engine's sequences are not cut, so what trains on parts of rows answers different questions
    sizes["data"] = sizes.get("data", 1) * sizes.pop("sequence", 1)
    mesh = parse_mesh(",".join(f"{axis}={size}" for axis, size in sizes.items()), SERVING_AXES)
    models = load_models(run.target, "", quantization=run.quantization, is_checked=run.check_weights, mesh=mesh)
    engine = answering_engine(
        models,
        "",
        num_slots=_num_slots(models, run.data.answer_slots, run.train.seq_len),
        max_model_len=run.train.seq_len,
        on_warmup=watch.on_warmup,
    )
    del models  # the engine has packed them anew
    with engine:
        yield engine


def _num_slots(models: Models, most: int, seq_len: int) -> int:
    """Return how many answers of at most `seq_len` tokens are made at once: as many as the devices have room for, at
    most `most`, as a multiple of the parts that they are spread over."""
    drafter = models.head.drafter if models.head else None
    each = bytes_per_token(models.target.config, drafter, models.mesh) * seq_len
    room = num_parts(models.mesh, "batch") * int(CACHE_SHARE * free_memory(models.mesh) / max(each, 1))
    if room < most:
        logger.info("%d answers at once, for which there is memory, in place of %d", room, most)
    return in_equal_parts(models.mesh, "batch", max(1, min(room, most)))


class _Enough(Exception):
    """Raised where a stage has been measured for long enough."""


def _measured(cache: "_AnswerCache", engine: Engine, drawn: Mixture, budget: Budget) -> Budget:
    """Answer for as long as a stage is measured, all sources in turn, and decide how many conversations there is time
    for. The answers that were made stay."""
    most = sum(len(source.train) for source in drawn)
    new, there, spent = 0, 0, 0.0
    for source in drawn:
        begin = time.monotonic()

        def stop(so_far: AnswerProgress, begin: float = begin) -> None:
            if time.monotonic() - begin > budget.probe_seconds / len(drawn):
                raise _Enough(so_far.account)

        try:
            accounts = cache.ask(engine, (source,), stop)
        except _Enough as enough:
            accounts = list(enough.args)
        spent += time.monotonic() - begin
        there += sum(account.num_there for account in accounts)
        new += sum(account.num_settled - account.num_there for account in accounts)
    return budget.with_conversations(
        most=most, there=there + new, seconds_each=spent / new if new else 0.0, spent=spent
    )


class _AnswerCache:
    """A cache of the answers that one target gave in one settings."""

    def __init__(self, target: TargetSource, data: DataSettings, train: TrainSettings, quantization: str) -> None:
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
        self.own_questions = OwnQuestions(
            QuestionSettings(self._fingerprint, quantization, train.seed, train.seq_len, template_kwargs)
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

    def ask(self, engine: Engine, drawn: Mixture, on_answer: Callable[[AnswerProgress], None]) -> list[Account]:
        """Have the target answer the questions that have no answer yet. Returns an account of each source."""
        total, before, accounts = sum(len(source.train) for source in drawn), 0, []
        for source in drawn:

            def report(account: Account, before: int = before) -> None:
                on_answer(AnswerProgress(before + account.num_settled, total, account))

            account = regenerate(
                engine, source.train, self.path(source), self._settings, target=self._fingerprint, on_answer=report
            )
            logger.info("%s: %s", source.name, account.describe().replace("\n", "; "))
            accounts.append(account)
            before += account.num_settled
        return accounts

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
