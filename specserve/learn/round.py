"""One round of learning: train on the latest traffic from the head that serves, by the trainer's own code, then judge
the result in the shadow, on held-out prompts of that traffic, by the step that serves."""

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
from specserve.drafters.registry import load_kind
from specserve.drafters.settings import DraftQuantization
from specserve.errors import CheckpointError, DataError
from specserve.host import whole_file
from specserve.interop.head import load_head
from specserve.learn.selection import Selection, select
from specserve.learn.task import HEAD, ROUND, TRAFFIC, Contender, RoundResult, RoundTask
from specserve.learn.traffic import ServedAnswer, read_traffic
from specserve.mesh import default_dtype
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.intervals import tau_difference
from specserve.train.acceptance import AcceptanceMeter, Arm
from specserve.train.run.folder import RunFolder
from specserve.train.run.prepare import prepare
from specserve.train.run.recipe import HIGHEST_RATE, LEARNING_RATE, WIDTH
from specserve.train.settings import TrainRun

logger = logging.getLogger(__name__)

FIRST = "first.jsonl"  # of the folder
TOKENS_OF_STEP = 2048  # in rows that most documents fit
ROW_LENGTHS = (256, 512, 1024, 2048)
MOST_HELD_OUT, ANSWER_TOKENS = 64, 128  # prompts that are judged on, and the longest answer to each
FEWEST_TRAIN, FEWEST_HELD_OUT = 16, 8  # answers; with fewer there is no round
FIRST_SHARE, MOST_FIRST = 0.25, 4096  # of a round's rows are the head's first data; and its conversations that are kept


def learn(task: RoundTask) -> RoundResult:
    """Make a round. Its candidate is in the folder's ROUND/HEAD then. Raises DataError where there is too little
    traffic, and what training raises."""
    begin, folder = time.monotonic(), Path(task.folder)
    shutil.rmtree(folder / ROUND, ignore_errors=True)  # of a round that was killed
    (folder / ROUND).mkdir(mode=0o700, parents=True)
    answers = read_traffic(folder / TRAFFIC, task.steps * TOKENS_OF_STEP)
    chosen = select(answers, MOST_HELD_OUT)
    if len(chosen.train) < FEWEST_TRAIN or len(chosen.held_out) < FEWEST_HELD_OUT:
        raise DataError(
            f"{folder}: {len(chosen.train)} answers to train on and {len(chosen.held_out)} held out; a round needs "
            f"{FEWEST_TRAIN} and {FEWEST_HELD_OUT}"
        )
    target = _train(task, chosen)
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
    where it is not below the static head, over all prompts and over those without any one client's: so no client
    outweighs what a head loses for the others. Nor does it hide that: where the served head is shown to be below the
    static one without some client's prompts, the static one is chosen."""
    everyone = range(len(clients))
    groups = [[i for i in everyone if clients[i] != client] for client in dict.fromkeys(clients)]
    groups = [[*everyone], *(group for group in groups if len(group) >= FEWEST_HELD_OUT)]

    def of(name: Contender, group: Sequence[int]) -> list[Acceptance]:
        return [measured[name][i] for i in group]

    def is_better(name: Contender, group: Sequence[int]) -> bool:
        gain = tau_difference(of(name, group), of("served", group))
        return gain is not None and gain.low > 0

    def tau(name: Contender, group: Sequence[int]) -> float:
        return sum(of(name, group), Acceptance()).tau

    if is_better("candidate", everyone) and all(tau("candidate", each) >= tau("static", each) for each in groups):
        return "candidate"
    return "static" if any(is_better("static", each) for each in groups) else "served"


def _train(task: RoundTask, chosen: Selection) -> Target:
    """Train the candidate, and return the target that it was trained with."""
    folder, lengths = Path(task.folder) / ROUND, [len(each.prompt_ids) + len(each.answer_ids) for each in chosen.train]
    source = resolve_target(task.target)
    model, _ = find_config(str(source.folder))
    usual = float(np.quantile(lengths, 0.9))
    seq_len = min(next((each for each in ROW_LENGTHS if each >= usual), ROW_LENGTHS[-1]), model.max_len)
    rows = folder / "traffic.jsonl"
    _write_rows(rows, chosen.train)
    data = [str(rows)]
    if number := _keep_first_data(task, model.vocab_size):
        weight = FIRST_SHARE / (1 - FIRST_SHARE) * len(chosen.train) / number
        data.append(f"{Path(task.folder) / FIRST}={max(weight, 1e-4):.4f}")
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
    rows.unlink()  # tokens stay in the traffic alone, where they have an end
    return trainer.learner.target


def _write_rows(path: Path, answers: Sequence[ServedAnswer]) -> None:
    """Write answers as token rows, which `data.sources` reads; what is predicted is the answer."""
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for answer in answers:
            ids = np.array((*answer.prompt_ids, *answer.answer_ids), np.int32)
            mask = np.arange(len(ids)) >= len(answer.prompt_ids)
            row = TokenRow(ids, mask, "", "traffic", answer.key, "train")
            file.write(json.dumps(row.as_row()) + "\n")


def _keep_first_data(task: RoundTask, vocab_size: int) -> int:
    """Keep a part of the head's first data in the folder, once, and return the number of its conversations."""
    path = Path(task.folder) / FIRST
    if not task.first_data:
        return 0
    if not path.is_file():
        mixture = sources.load_mixture(task.first_data, vocab_size=vocab_size)
        dataset.write_conversations(dataset.draw(mixture, MOST_FIRST, 0), path)
    return path.read_bytes().count(b"\n")


def _measure(
    task: RoundTask, target: Target, held_out: Sequence[ServedAnswer]
) -> dict[Contender, Sequence[Acceptance]]:
    """Answer the held-out prompts with each contender by speculative steps, greedily, and count what is accepted."""
    folders: dict[Contender, str] = {
        "static": task.static,
        "served": task.served,
        "candidate": str(Path(task.folder) / ROUND / HEAD),
    }
    arm, bits = Arm(task.speculation), cast(DraftQuantization, task.draft_quantization)
    prompts = [Prompt("traffic", list(answer.prompt_ids)) for answer in held_out]
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
        found[name] = meter.measure(params, head.target_ids, arm).by_prompt
    return found
