"""One round of learning: train on the latest traffic from the head that serves, by the trainer's own code, then judge
the result in the shadow, on held-out prompts of that traffic, by the step that serves."""

import dataclasses
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import jax
import numpy as np

from specserve import config
from specserve.checkpoints.configs import find_config
from specserve.checkpoints.load import Target, in_few_bits
from specserve.checkpoints.source import resolve_target
from specserve.data import dataset, sources
from specserve.data.conversations import TokenRow
from specserve.data.dataset import Prompt
from specserve.data.packing import pack
from specserve.drafters.interface import Head
from specserve.drafters.registry import add_module, load_kind
from specserve.drafters.settings import DraftQuantization
from specserve.errors import CheckpointError, DataError
from specserve.host import take_place, whole_file
from specserve.interop.head import load_head, save_head
from specserve.interop.notes import read_notes
from specserve.learn.selection import Selection, select
from specserve.learn.task import HEAD, ROUND, TRAFFIC, Contender, RoundResult, RoundTask
from specserve.learn.traffic import ServedAnswer, read_traffic
from specserve.mesh import default_dtype
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.intervals import median_difference, tau_difference
from specserve.tokenizer import Tokenizer
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
# the share of what training made in a candidate, whose rest is the static head (WiSE-FT, arXiv 2109.01903): so it keeps
# what that knows of other traffic, and what rounds change cannot add up; with a half it loses some (docs/log)
LEARNT = 0.25
WHOLE = "whole"  # beside HEAD in the round: what training made, with nothing of the static head
# they serve only where they are shown to be better than what does
LEARNT_HEADS: frozenset[Contender] = frozenset({"candidate", "returned"})
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
    whole = measured.pop("whole")
    if is_whole := is_better(whole, measured["candidate"]):
        measured["candidate"] = whole
        shutil.rmtree(folder / ROUND / HEAD)
        take_place(folder / ROUND / WHOLE, folder / ROUND / HEAD)
    gain = tau_difference(measured["candidate"], measured["served"])
    return RoundResult(
        choose(measured, [answer.client for answer in chosen.held_out]),
        {name: sum(found, Acceptance()).tau for name, found in measured.items()},
        gain and (gain.low, gain.high),
        1.0 if is_whole else LEARNT,
        len(chosen.train),
        len(chosen.held_out),
        time.monotonic() - begin,
    )


def choose(measured: Mapping[Contender, Sequence[Acceptance]], clients: Sequence[str]) -> Contender:
    """Choose the head to serve by the acceptance of each contender on the same prompts, and whose prompts these are.
    Another one than the served head is chosen only where its tau is higher with 95% confidence, and one that was learnt
    only where it is not below the static head, over all prompts and for the median client: so a few clients do not
    outweigh what a head loses for most. Nor do they hide that: where the median client's tau is shown to be higher by
    the static head, that is chosen too."""
    static, served = measured["static"], measured["served"]
    learnt: dict[Contender, float] = {}
    for name in LEARNT_HEADS & measured.keys():
        median, tau = median_difference(measured[name], static, clients), sum(measured[name], Acceptance()).tau
        if is_better(measured[name], served) and tau >= sum(static, Acceptance()).tau and median.value >= 0:
            learnt[name] = tau
    if learnt:
        return max(sorted(learnt), key=learnt.__getitem__)
    median = median_difference(static, served, clients).interval
    return "static" if is_better(static, served) or (median is not None and median.low > 0) else "served"


def is_better(measured: Sequence[Acceptance], others: Sequence[Acceptance]) -> bool:
    """Return whether the first tau is shown to be above the second, on the same prompts, with 95% confidence."""
    gain = tau_difference(measured, others)
    return gain is not None and gain.low > 0


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
        tokenizer = Tokenizer.load(source.folder)
        parts = sources.load_mixture((data[0], str(first)), vocab_size=model.vocab_size)
        found = [dataset.tokenize_source(part, tokenizer, source.folder, max_len=seq_len) for part in parts]
        own, others = (len(pack(part.tokenized.documents, seq_len)) for part in found)  # rows, which weights count
        data.append(f"{first}={max(FIRST_SHARE / (1 - FIRST_SHARE) * own / others, 1e-4):.4f}")
    rate = min(max(LEARNING_RATE * WIDTH / model.d_model, LEARNING_RATE), HIGHEST_RATE)
    suited = load_kind(task.kind).suits({})
    settings = {name: value for name, value in suited.items() if name.startswith("train.")}
    settings |= {
        "target": task.target,
        "drafter_module": task.drafter_module,
        "quantization": task.quantization,
        "draft_quantization": task.draft_quantization,
        "init_from": task.served,
        "output": str(folder / WHOLE),
        "data.source": tuple(data),
        "data.eval_prompts": 0,  # the candidate is judged below, beside the others
        "features.keep_states": "false",
        "train.max_steps": task.steps,
        "train.max_minutes": 0.0,
        "train.seq_len": seq_len,
        "train.batch_size": max(1, TOKENS_OF_STEP // seq_len),
        "train.lr": task.learning_rate or suited.get("train.lr", rate),
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
    target = trainer.learner.target
    _hold_back(task, trainer.learner.head(), target, run.draft.export_dtype)
    return target


def _hold_back(task: RoundTask, trained: Head, target: Target, dtype: str) -> None:
    """Write the mean of what training made and of the static head, weighed by LEARNT."""
    static, folder = load_head(Path(task.static), target, dtype="float32"), Path(task.folder) / ROUND
    if static.drafter != trained.drafter or not np.array_equal(static.target_ids, trained.target_ids):
        raise CheckpointError(
            f"{task.served}: a head of another kind, shape or draft vocabulary than {task.static}; begin with an empty "
            "--learn folder"
        )
    params = jax.tree.map(lambda own, first: LEARNT * own + (1 - LEARNT) * first, trained.params, static.params)
    head = dataclasses.replace(trained, params=params)
    save_head(folder / HEAD, head, target, dtype=dtype, notes=read_notes(folder / WHOLE))


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
    own = Path(task.folder) / ROUND
    folders: dict[Contender, str] = {
        "static": task.static,
        "served": task.served,
        "candidate": str(own / HEAD),
        "whole": str(own / WHOLE),
    }
    if task.returned:
        folders["returned"] = task.returned
    arm, bits = Arm(task.speculation), cast(DraftQuantization, task.draft_quantization)
    options = [answer.options for answer in held_out]
    meter = None
    found: dict[Contender, Sequence[Acceptance]] = {}
    for name, folder in folders.items():
        if name == "served" and folder == task.static:
            found[name] = found["static"]
            continue
        head = load_head(Path(folder), target, dtype=default_dtype())
        if meter is None:
            most = min(target.config.max_len, head.drafter.max_len, MAX_CONTEXT) - ANSWER_TOKENS  # of a prompt, its end
            prompts = [Prompt("traffic", list(answer.prompt_ids[-max(1, most) :])) for answer in held_out]
            meter = AcceptanceMeter(target, head.drafter, [arm], prompts, max_new_tokens=ANSWER_TOKENS)
        params = head.params if bits == "none" else in_few_bits(head.params, bits)
        found[name] = meter.measure(params, head.target_ids, arm, options).by_prompt
    return found
