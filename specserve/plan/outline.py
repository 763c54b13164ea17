"""An outline of a whole run, made before anything is downloaded or computed: samples, hours, disk, memory, and the
acceptance that others have reached."""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from specserve import config
from specserve.checkpoints.source import BUNDLED, find_folder
from specserve.devices import REFERENCE, Device
from specserve.plan.taus import Reached, expected
from specserve.plan.training import RunPlan, make_plan
from specserve.plan.work import Replica, abstract_mesh
from specserve.train.run.budget import ANSWERS_SHARE, seconds_of
from specserve.train.run.fit import (
    ENOUGH_STEPS,
    LEAST_STEPS,
    fit,
    largest_target,
    time_for_training,
    training_seconds,
    weight_bytes,
)
from specserve.train.settings import TrainRun

ANSWER_TOKENS = 700  # of a conversation, where nothing is known of the data
BYTES_PER_TOKEN = 4.5  # of text
SIZES = "train.batch_size", "train.seq_len", "train.rollout", "draft.vocab_size"


@dataclass(frozen=True)
class Outline:
    """The stages of a run in numbers. Hours are estimates from a device's data sheet, or from what it was measured to
    do; disk is in bytes."""

    plan: RunPlan
    device: Device  # of this machine, or such as the run needs where it makes no sense here
    advice: str  # why it makes no sense here, and what would; empty where it does
    conversations: int  # 0: all of the data
    answer_hours: float  # 0: the target answers nothing
    steps: int  # 0: as many as there is time for
    step_seconds: float
    train_hours: float
    disk: tuple[tuple[str, float], ...]
    expected: Reached  # of this target, or of the one nearest in size


def outline(plan: RunPlan, here: Device) -> Outline:
    """Work the numbers out for such devices as are found here, by a plan for them. A dry run that makes no sense here
    is outlined for others."""
    run, train = plan.run, plan.run.train
    advice, device = "", here
    here_plan = make_plan(run, here.kind) if here.kind == "cpu" else plan
    if here.is_measured:
        advice, is_elsewhere = _advice(here_plan, here)
        device = REFERENCE if is_elsewhere and run.dry_run else here
    if device is here:
        plan = here_plan
    step = _step_seconds(plan, device)
    answering, conversations = _answer_seconds(plan, device), run.data.max_conversations
    bounds = [train.max_steps * step or math.inf, train.max_minutes * 60 or math.inf]
    if run.budget:
        budget = seconds_of(run.budget)
        bounds.append(training_seconds(budget, is_answered=run.data.regenerate))
        fitting = max(1, int(ANSWERS_SHARE * budget * max(1, conversations) / answering)) if answering else 0
        if fitting < (conversations or math.inf):
            answering, conversations = ANSWERS_SHARE * budget, fitting
    return Outline(
        plan,
        device,
        advice,
        conversations,
        answering / 3600,
        train.max_steps if bounds[0] == min(bounds) else max(1, int(min(bounds) / step)),
        step,
        min(bounds) / 3600,
        _disk(plan, conversations),
        expected(run.target, plan.target_size.total),
    )


def _step_seconds(plan: RunPlan, device: Device) -> float:
    return plan.positions / plan.positions_per_second(device, device.share_of_peak)


def _advice(plan: RunPlan, here: Device) -> tuple[str, bool]:
    """Return what is to be said of a run that makes no sense here, and whether none of its target would; empty where it
    makes sense."""
    run, target, step = plan.run, plan.target, _step_seconds(plan, here)
    seconds, own = time_for_training(config.values(run)), {"target": run.target, "drafter": run.drafter}
    best = fit(here, target, own, seconds=seconds)
    if best.has_room and seconds / step >= LEAST_STEPS:
        return "", False
    if best.makes_sense:
        flags = config.values(config.resolve(TrainRun, arguments=own | best.sizes.settings(target)))
        listed = " ".join(f"--{name.rpartition('.')[2].replace('_', '-')} {flags[name]}" for name in SIZES)
        return f"a step of {plan.positions:,} positions takes about {step:,.0f} s; what fits: {listed}", False
    needed = best.step_seconds * ENOUGH_STEPS
    found = [
        f"{ENOUGH_STEPS} steps of {best.sizes.positions:,} positions take about {needed / 3600:,.1f} h of training"
    ]
    if not best.has_room:
        found.append(f"the weights {weight_bytes(target, here) / 1e9:,.0f} of {here.memory / 1e9:,.0f} GB")
    fixes = [f"a target of at most {largest_target(target, best, here) / 1e9:.2f}B parameters", "an accelerator"]
    if best.is_possible and run.budget:
        fixes.insert(0, f"--budget {math.ceil(seconds_of(run.budget) / best.num_steps * ENOUGH_STEPS / 3600)}h")
    return f"{', and '.join(found)}; what fits: {', or '.join(fixes)}", not best.is_possible


def answer_tokens(plan: RunPlan, conversations: int) -> int:
    """Estimate how many tokens the target will have written, in all or in one conversation where the number of
    conversations is not known yet."""
    longest = plan.run.data.answer_tokens or plan.run.train.seq_len
    return max(1, conversations) * min(ANSWER_TOKENS, longest)


def _answer_seconds(plan: RunPlan, device: Device) -> float:
    """Estimate how long it takes to answer all conversations, or one where their number is not known: each step brings
    a token of each of the sequences. It is 0 where the target answers nothing."""
    run = plan.run
    if not run.data.regenerate:
        return 0.0
    mesh = abstract_mesh(plan.mesh)
    target = Replica(plan.target, None, mesh, quantization=run.quantization, platform=device.platform)
    step = target.forward(run.data.answer_slots, 1, run.train.seq_len // 2).seconds(device, mesh.size)
    return answer_tokens(plan, run.data.max_conversations) / run.data.answer_slots * step


def _disk(plan: RunPlan, conversations: int) -> tuple[tuple[str, float], ...]:
    run, parts = plan.run, list[tuple[str, float]]()
    if run.target != BUNDLED and find_folder(run.target, "--target") is None:
        parts.append(("the target's download", plan.target_size.bf16_bytes))
    if run.data.regenerate:
        parts.append(("answers", answer_tokens(plan, conversations) * BYTES_PER_TOKEN))
    sizes = {part.name: part.num_bytes for part in plan.memory}  # of one device's share
    state = plan.head_size * 4 * (1 + (sizes["moments"] + plan.host_bytes) / sizes["head"])
    parts.append(("states of the run", state * (run.train.keep + 1)))
    parts.append(("the head", plan.head_size * jnp.dtype(run.draft.export_dtype).itemsize))
    return tuple(parts)
