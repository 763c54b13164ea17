"""An outline of a whole run, made before anything is downloaded or computed: samples, hours, disk, memory, and the
acceptance that others have reached."""

import re
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from specserve.checkpoints.source import BUNDLED
from specserve.devices import DEVICES, Device
from specserve.plan.taus import Reached, expected
from specserve.plan.training import RunPlan
from specserve.plan.work import SHARE_OF_BANDWIDTH, SHARE_OF_PEAK

ANSWER_TOKENS = 700  # of a conversation, where nothing is known of the data
BYTES_PER_TOKEN = 4.5  # of text
REFERENCE = "H100 80 GB"  # hours are for it where the device found is not in the table


@dataclass(frozen=True)
class Outline:
    """The stages of a run in numbers. Hours are estimates from a device's data sheet; disk is in bytes."""

    plan: RunPlan
    device: Device
    is_found: bool  # the device is that of this machine
    answer_hours: float  # 0: the target answers nothing
    train_hours: float
    disk: tuple[tuple[str, float], ...]
    expected: Reached  # of this target, or of the one nearest in size


def outline(plan: RunPlan, device_kind: str) -> Outline:
    """Work the numbers out for the devices that JAX calls `device_kind`."""
    found = next((device for device in DEVICES if re.search(device.kind, device_kind)), None)
    device = found or next(device for device in DEVICES if device.name == REFERENCE)
    run, train = plan.run, plan.run.train
    rate = plan.positions_per_second(device, SHARE_OF_PEAK)
    hours = train.max_steps * plan.positions / rate / 3600, train.max_minutes / 60  # 0 is no bound
    return Outline(
        plan,
        device,
        found is not None,
        _answer_hours(plan, device),
        min(bound for bound in hours if bound),
        _disk(plan),
        expected(run.target, plan.target_size.total),
    )


def answer_tokens(plan: RunPlan) -> int:
    """Estimate how many tokens the target will have written, in all or in one conversation where the number of
    conversations is not known yet."""
    longest = plan.run.data.answer_tokens or plan.run.train.seq_len
    return max(1, plan.run.data.max_conversations) * min(ANSWER_TOKENS, longest)


def _answer_hours(plan: RunPlan, device: Device) -> float:
    """Estimate the hours of answering: a step reads the weights once and brings one token for each of the sequences.
    They are 0 where the target answers nothing."""
    if not plan.run.data.regenerate:
        return 0.0
    weights = plan.memory[0].num_bytes
    steps = answer_tokens(plan) / plan.run.data.answer_slots
    return steps * weights / (device.bandwidth * SHARE_OF_BANDWIDTH) / 3600


def _disk(plan: RunPlan) -> tuple[tuple[str, float], ...]:
    run, parts = plan.run, list[tuple[str, float]]()
    if run.target != BUNDLED and not Path(run.target).expanduser().is_dir():
        parts.append(("the target's download", plan.target_size.bf16_bytes))
    if run.data.regenerate:
        parts.append(("answers", answer_tokens(plan) * BYTES_PER_TOKEN))
    sizes = {part.name: part.num_bytes for part in plan.memory}  # of one device's share
    state = plan.head_size * 4 * (1 + (sizes["moments"] + plan.host_bytes) / sizes["head"])
    parts.append(("states of the run", state * (run.train.keep + 1)))
    parts.append(("the head", plan.head_size * jnp.dtype(run.draft.export_dtype).itemsize))
    return tuple(parts)
