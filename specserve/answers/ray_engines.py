"""`specserve data regenerate --ray`: many engines answer the questions of a data set, as actors of Ray Data.

The command hands out questions in small batches and writes the rows of each batch as it comes back, so a run that is
killed goes on as one of a single engine does. Where a worker dies, Ray starts it again and its batches are answered
anew. A row depends on its question and the settings alone, so the file is that of a single engine.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specserve import cluster, host
from specserve.answers.account import Account
from specserve.answers.cache import answer_slots
from specserve.answers.questions import Job
from specserve.answers.regenerate import AnswerSettings, AnswerSource, Write, answer, regenerate_by
from specserve.answers.settings import RegenerateRun
from specserve.checkpoints.configs import find_config
from specserve.checkpoints.source import resolve_target
from specserve.data.conversations import Row
from specserve.errors import ConfigError
from specserve.mesh import LOGICAL_TO_MESH, SERVING_AXES, mesh_sizes, num_devices
from specserve.provenance import fingerprint
from specserve.serve.engines import answering_engine, load
from specserve.serve.sizes import longest_sequence
from specserve.tokenizer import Tokenizer
from specserve.train.run.recipe import usual_answer_slots

CALLS = 2  # batches at once in an engine: one fills the slots that the other's last answers leave


def regenerate(
    run: RegenerateRun, rows: Sequence[Row], settings: AnswerSettings, on_answer: Callable[[Account], None]
) -> Account:
    """Do what `regenerate.regenerate` does, with `run.num_workers` engines. Raises ConfigError where the cluster is
    missing or too small, and CapacityError where its workers die again and again."""
    if not run.target:
        raise ConfigError("--ray needs to know who answers: give --target")
    folder = resolve_target(run.target).folder
    config, _ = find_config(str(folder))
    target = fingerprint(folder)
    source = AnswerSource(target, longest_sequence(config, run.max_model_len), Tokenizer.load(folder))

    def ask(jobs: Sequence[Job], write: Write, account: Account) -> None:
        if not jobs:
            return
        ray = cluster.connect(run.ray_address)
        account.start = time.monotonic()  # workers report late
        try:
            each = cluster.reserve(ray, num_devices(run.mesh, SERVING_AXES), run.num_workers)
            size = batch_size(run, len(jobs), cluster.platform_of(each))
            pool = cluster.Pool(run.num_workers, each, size, CALLS)
            for found, answered in cluster.map_over(ray, jobs, _make_answerer, (run, settings, target), pool):
                for row in found:
                    write(row)
                account.add(answered)
                on_answer(account)
        finally:
            ray.shutdown()

    return regenerate_by(ask, source, rows, Path(run.output), settings, samples=run.samples)


def batch_size(run: RegenerateRun, num_jobs: int, platform: str) -> int:
    """Return how many of the questions a batch has, for engines on such a platform. As many are in an engine as one
    alone would have there, or all of its share; beyond that batches are as small as shares them out evenly."""
    ranks = math.prod(mesh_sizes(run.mesh, SERVING_AXES).get(axis, 1) for axis in LOGICAL_TO_MESH["batch"])
    num_slots, share = run.max_slots or ranks * usual_answer_slots(platform), -(-num_jobs // run.num_workers)
    filling, even = -(-min(num_slots, share) // CALLS), -(-share // (2 * CALLS))
    return max(1, filling, min(num_slots, even))


Answered = tuple[list[dict[str, Any]], Account]  # the rows of a batch of questions, and the account of them


def _make_answerer(run: RegenerateRun, settings: AnswerSettings, target: str) -> Callable[[list[Job]], Answered]:
    """Start an engine in a worker, for the target of this fingerprint. Returns the function that has it answer."""
    host.keep_freed_memory()
    models = load(run, run.draft)
    if models.fingerprint != target:
        raise ConfigError(
            f"{run.target} is another target in {models.target.folder} of this worker than where the command was "
            "started; give all hosts the same files"
        )
    engine = answering_engine(
        models,
        run.speculation,
        num_slots=answer_slots(models, run.max_slots, longest_sequence(models.target.config, run.max_model_len)),
        max_model_len=run.max_model_len,
        on_warmup=lambda _done, _total, _name: None,
    )
    engine.start()

    def answer_all(jobs: list[Job]) -> Answered:
        rows, account = list[dict[str, Any]](), Account()
        answer(engine, jobs, settings, rows.append, account)
        return rows, account

    return answer_all
