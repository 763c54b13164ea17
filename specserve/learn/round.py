"""One round of learning: train on the latest traffic from the head that serves, by the trainer's own code, then judge
the result in the shadow, on held-out prompts of that traffic, by the step that serves."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from specserve import config
from specserve.checkpoints.configs import find_config
from specserve.checkpoints.load import Target, in_few_bits
from specserve.checkpoints.source import resolve_target
from specserve.data import dataset, sources
from specserve.data.conversations import TokenRow
from specserve.data.dataset import Prompt
from specserve.drafters.registry import add_module, load_kind
from specserve.drafters.settings import DraftQuantization
from specserve.errors import CheckpointError, DataError
from specserve.host import whole_file
from specserve.interop.head import load_head
from specserve.learn.selection import Selection, select
from specserve.learn.task import HEAD, ROUND, TRAFFIC, Contender, RoundResult, RoundTask
from specserve.learn.traffic import ServedAnswer, read_traffic
from specserve.mesh import default_dtype
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.intervals import median_difference, tau_difference
from specserve.train.acceptance import MAX_CONTEXT, AcceptanceMeter, Arm
from specserve.train.run.folder import RunFolder
from specserve.train.run.prepare import prepare
from specserve.train.run.recipe import HIGHEST_RATE, LEARNING_RATE, WIDTH
from specserve.train.settings import TrainRun

logger = logging.getLogger(__name__)

FIRST, ROWS = "first-{}.jsonl", "traffic.jsonl"  # of the folder, and of the round
TOKENS_OF_STEP = 2048  # in rows that most documents fit
ROW_LENGTHS = (256, 512, 1024, 2048)
MOST_HELD_OUT, ANSWER_TOKENS = 64, 128  # prompts that are judged on, and the longest answer to each
FEWEST_TRAIN, FEWEST_HELD_OUT = 16, 8  # answers; with fewer there is no round
# of the rate of a new head: with all of it a round gains little more of its own traffic, and what the head knows of
# other traffic gets lost (docs/log)
CONTINUED = 0.3
FIRST_SHARE, MOST_FIRST = 0.25, 4096  # of a round's rows are the head's first data; and its conversations that are kept


def learn(task: RoundTask) -> RoundResult:
    """Make a round. Its candidate is in the folder's ROUND/HEAD then. Raises DataError where there is too little
    traffic, and what training raises."""
    begin, folder = time.monotonic(), Path(task.folder)
    if task.drafter_module:
        add_module(task.drafter_module)
    shutil.rmtree(folder / ROUND, ignore_errors=True)  # of a round that was killed
    (folder / ROUND).mkdir(mode=0o700, parents=True)
    answers = read_traffic(folder / TRAFFIC, task.steps * TOKENS_OF_STEP)
    chosen = select(answers, MOST_HELD_OUT)
    if len(chosen.train) < FEWEST_TRAIN or len(chosen.held_out) < FEWEST_HELD_OUT:
        raise DataError(
            f"{folder}: {len(chosen.train)} answers to train on and {len(chosen.held_out)} held out; a round needs "
            f"{FEWEST_TRAIN} and {FEWEST_HELD_OUT}"
        )
    try:
        target = _train(task, chosen)
    finally:
        (folder / ROUND / ROWS).unlink(missing_ok=True)  # tokens stay in the traffic alone, where they have an end
    measured = _measure(task, target, chosen.held_out)
    gain = tau_difference(measured["candidate"], measured["served"])
    return RoundResult(
        choose(measured, [answer.client for answer in chosen.held_out]),
        {name: sum(found, Acceptance()).tau for name, found in measured.items()},
        gain and (gain.low, gain.high),
        len(chosen.train),
        len(chosen.held_out),
        time.monotonic() - begin,
    )


def choose(measured: Mapping[Contender, Sequence[Acceptance]], clients: Sequence[str]) -> Contender:
    """Choose the head to serve by the acceptance of each contender on the same prompts, and whose prompts these are.
    Another one than the served head is chosen only where its tau is higher with 95% confidence, and a candidate only
    where it is not below the static head, over all prompts and for the median client: so a few clients do not outweigh
    what a head loses for most. Nor do they hide that: where the median client's tau is shown to be higher by the static
    head, that is chosen too."""
    static, served, candidate = (measured[name] for name in ("static", "served", "candidate"))
    gain = tau_difference(candidate, served)
    if gain is not None and gain.low > 0:
        median = median_difference(candidate, static, clients)
        if sum(candidate, Acceptance()).tau >= sum(static, Acceptance()).tau and median.value >= 0:
            return "candidate"
    returns = tau_difference(static, served), median_difference(static, served, clients).interval
    return "static" if any(each is not None and each.low > 0 for each in returns) else "served"


def _train(task: RoundTask, chosen: Selection) -> Target:
    """Train the candidate, and return the target that it was trained with."""
    folder, lengths = Path(task.folder) / ROUND, [len(each.prompt_ids) + len(each.answer_ids) for each in chosen.train]
    source = resolve_target(task.target)
    model, _ = find_config(str(source.folder))
    usual = float(np.quantile(lengths, 0.9))
    seq_len = min(next((each for each in ROW_LENGTHS if each >= usual), ROW_LENGTHS[-1]), model.max_len)
    _write_rows(folder / ROWS, chosen.train, seq_len)
    data = [str(folder / ROWS)]
    if first := _keep_first_data(task, model.vocab_size):
        weight = FIRST_SHARE / (1 - FIRST_SHARE) * len(chosen.train) / first.read_bytes().count(b"\n")
        data.append(f"{first}={max(weight, 1e-4):.4f}")
    rate = min(max(LEARNING_RATE * WIDTH / model.d_model, LEARNING_RATE), HIGHEST_RATE)
    suited = load_kind(task.kind).suits({})
    settings = {name: value for name, value in suited.items() if name.startswith("train.")}
    settings |= {
        "target": task.target,
        "drafter_module": task.drafter_module,
        "quantization": task.quantization,
        "draft_quantization": task.draft_quantization,
        "init_from": task.served,
        "output": str(folder / HEAD),
        "data.source": tuple(data),
        "data.eval_prompts": 0,  # the candidate is judged below, beside the others
        "features.keep_states": "false",
        "train.max_steps": task.steps,
        "train.max_minutes": 0.0,
        "train.seq_len": seq_len,
        "train.batch_size": max(1, TOKENS_OF_STEP // seq_len),
        "train.lr": task.learning_rate or CONTINUED * suited.get("train.lr", rate),
        "train.eval_every": 0,
        "train.save_every": 0,
        "train.seed": task.seed,
    }
    run = config.resolve(TrainRun, arguments=settings)
    with RunFolder(run) as own:
        trainer = prepare(run, own)
        last = trainer.train()
    if last.ending != "finished":
        raise DataError(f"the round was {last.ending}")
    shutil.rmtree(own.state, ignore_errors=True)  # no round goes on with the optimiser of another
    return trainer.learner.target


def _write_rows(path: Path, answers: Sequence[ServedAnswer], seq_len: int) -> None:
    """Write answers as token rows, which `data.sources` reads; what is predicted is the answer. Of what is longer than
    a row the beginning is left out."""
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for answer in answers:
            ids = np.array((*answer.prompt_ids, *answer.answer_ids), np.int32)
            mask = np.arange(len(ids)) >= len(answer.prompt_ids)
            row = TokenRow(ids[-seq_len:], mask[-seq_len:], "", "traffic", answer.key, "train")
            file.write(json.dumps(row.as_row()) + "\n")


def _keep_first_data(task: RoundTask, vocab_size: int) -> Path | None:
    """Keep a part of the head's first data in the folder, once for what the setting names, and return its file."""
    path = Path(task.folder) / FIRST.format(hashlib.sha256(repr(task.first_data).encode()).hexdigest()[:8])
    if not task.first_data:
        return None
    if not path.is_file():
        mixture = sources.load_mixture(task.first_data, vocab_size=vocab_size)
        dataset.write_conversations(dataset.draw(mixture, MOST_FIRST, 0), path)
    return path


def _measure(
    task: RoundTask, target: Target, held_out: Sequence[ServedAnswer]
) -> dict[Contender, Sequence[Acceptance]]:
    """Answer the held-out prompts with each contender by speculative steps, each with the options of its request, and
    count what is accepted."""
    folders: dict[Contender, str] = {
        "static": task.static,
        "served": task.served,
        "candidate": str(Path(task.folder) / ROUND / HEAD),
    }
    arm, bits = Arm(task.speculation), cast(DraftQuantization, task.draft_quantization)
    most = min(target.config.max_len, MAX_CONTEXT) - ANSWER_TOKENS  # of a longer prompt the end
    prompts = [Prompt("traffic", list(answer.prompt_ids[-max(1, most) :])) for answer in held_out]
    options = [answer.options for answer in held_out]
    meter = drafter = None
    found: dict[Contender, Sequence[Acceptance]] = {}
    for name, folder in folders.items():
        if name == "served" and folder == task.static:
            found[name] = found["static"]
            continue
        head = load_head(Path(folder), target, dtype=default_dtype())
        if meter is None:
            meter = AcceptanceMeter(target, head.drafter, [arm], prompts, max_new_tokens=ANSWER_TOKENS)
            drafter = head.drafter
        if head.drafter != drafter:
            raise CheckpointError(f"{folder}: another kind or shape of head than {task.static}")
        params = head.params if bits == "none" else in_few_bits(head.params, bits)
        found[name] = meter.measure(params, head.target_ids, arm, options).by_prompt
    return found
