"""`specserve data regenerate --ray`: many engines answer the questions of a data set, as actors of Ray Data.

The command hands out questions in small batches and writes the rows of each batch as it comes back, so a run that is
killed goes on as one of a single engine does. Where a worker dies, Ray starts it again and its batches are answered
anew. A row depends on its question and the settings alone, so the file is that of a single engine.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specserve import cluster, host, log
from specserve.answers.regenerate import Account, AnswerSource, Job, Manner, Write, answer, regenerate_by
from specserve.answers.settings import RegenerateRun
from specserve.checkpoints.configs import find_config
from specserve.checkpoints.source import resolve_target
from specserve.data.conversations import Row
from specserve.errors import ConfigError, SpecServeError
from specserve.mesh import SERVING_AXES, num_devices
from specserve.provenance import fingerprint
from specserve.serve.engines import answering_engine, load
from specserve.serve.launch import longest_sequence
from specserve.tokenizer import Tokenizer

CALLS = 2  # batches at once in an engine: one fills the slots that the other's last answers leave


@dataclass(frozen=True)
class EngineTask:
    """The message that every worker gets."""

    run: RegenerateRun
    manner: Manner
    driver: cluster.Driver
    target: str  # its fingerprint


def regenerate(
    run: RegenerateRun, rows: Sequence[Row], manner: Manner, on_answer: Callable[[Account], None]
) -> Account:
    """Do what `regenerate.regenerate` does, with `run.num_workers` engines. Raises ConfigError where the cluster is
    missing or too small, and CapacityError where its workers die again and again."""
    if not run.target:
        raise ConfigError("--ray needs to know who answers: give --target")
    folder = resolve_target(run.target).folder
    config, _ = find_config(str(folder))
    told = EngineTask(run, manner, cluster.Driver.here(), fingerprint(folder))
    asked = AnswerSource(told.target, longest_sequence(config, run.max_model_len), Tokenizer.load(folder))

    def ask(jobs: Sequence[Job], write: Write, account: Account) -> None:
        if not jobs:
            return
        ray = cluster.connect(run.ray_address)
        try:
            for found in _answers(ray, told, jobs):
                for row in found.rows:
                    write(row)
                account.add(found.account)
                on_answer(account)
        finally:
            ray.shutdown()

    return regenerate_by(ask, asked, rows, Path(run.output), manner, samples=run.samples)


@dataclass(frozen=True)
class AnsweredRows:
    """The rows of a batch of questions, and the account of them."""

    rows: list[dict[str, Any]]
    account: Account


class Answerer:
    """A worker with one engine, as an actor of Ray Data. An error is returned as a result, because Ray would try again
    if it were raised."""

    def __init__(self, told: EngineTask) -> None:
        self._manner, self._error = told.manner, None
        try:
            told.driver.enter()
            log.setup("warning")
            host.keep_freed_memory()
            models = load(told.run, told.run.draft)
            if models.fingerprint != told.target:
                raise ConfigError(
                    f"{told.run.target} is another target in {models.target.folder} of this worker than where the "
                    "command was started; give all hosts the same files"
                )
            self._engine = answering_engine(
                models,
                told.run.speculation,
                num_slots=told.run.max_slots,
                max_model_len=told.run.max_model_len,
                on_warmup=lambda _done, _total, _name: None,
            )
            self._engine.start()
        except SpecServeError as error:
            self._error = error

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"found": np.array([pickle.dumps(self._error or self._answer(batch))], object)}

    def _answer(self, batch: dict[str, np.ndarray]) -> AnsweredRows | SpecServeError:
        found = AnsweredRows([], Account())
        try:
            jobs = [pickle.loads(job) for job in batch["item"]]
            answer(self._engine, jobs, self._manner, found.rows.append, found.account)
        except SpecServeError as error:
            return error
        return found


def _answers(ray: Any, told: EngineTask, jobs: Sequence[Job]) -> Iterator[AnsweredRows]:
    """Yield the answers of all jobs, batch by batch, as they come."""
    run = told.run
    size = max(1, min(run.max_slots, -(-len(jobs) // (2 * CALLS * run.num_workers))))
    each = cluster.reserve(ray, num_devices(run.mesh, SERVING_AXES), run.num_workers)
    items = [pickle.dumps(job) for job in jobs]
    for raw in cluster.map_over(ray, items, Answerer, (told,), run.num_workers, size=size, calls=CALLS, each=each):
        found = pickle.loads(raw)
        if isinstance(found, Exception):
            raise found
        yield found
