"""Checks of a run's settings, which refuse what cannot work before anything is loaded. The run and its dry run make
the same checks."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp

from specserve import cluster
from specserve.checkpoints.lora import ADAPTER_CONFIG, is_adapter
from specserve.data.conversations import Columns, parse_template_kwargs
from specserve.data.sources import parse_entry
from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.learning import Rows
from specserve.drafters.settings import draft_vocab_size
from specserve.errors import ConfigError
from specserve.interop.bundled import resolve_head
from specserve.mesh import LOGICAL_TO_MESH, mesh_sizes
from specserve.models.config import ModelConfig
from specserve.train.acceptance import arms
from specserve.train.head import earlier_drafter, new_drafter
from specserve.train.run.budget import seconds_of
from specserve.train.settings import (
    CaptureSettings,
    DataSettings,
    DraftSettings,
    ServiceSettings,
    StatesFrom,
    TrainRun,
    TrainSettings,
)
from specserve.train.step import rollout_of


def check_settings(run: TrainRun) -> None:
    """Check what is wrong with any target and on any device. Raises ConfigError."""
    train = run.train
    if not train.max_steps and not train.max_minutes:
        raise ConfigError("train.max_steps and train.max_minutes are both 0; give one of them")
    if train.batch_size % train.accumulate:
        raise ConfigError(
            f"train.batch_size is {train.batch_size}, which train.accumulate {train.accumulate} does not divide"
        )
    _check_shares(train, run.mesh)
    _check_patience(train, run.data, run.features, run.service)
    _check_stages(run.budget, run.states_from, is_answered=run.data.regenerate, is_of_several=run.is_of_several)
    has_own_clusters = bool(run.coordinator) and not run.ray_address
    _check_service(run.service, run.features, run.num_trainers, has_own_clusters=has_own_clusters)
    if run.features.keep_states == "true" and (run.states_from != "layers" or run.is_of_several):
        raise ConfigError(
            "--keep-states is for one process that runs the target itself; leave it out, or leave out --capture, "
            "--target-service and other processes"
        )
    if run.lora:
        _check_adapter(Path(run.lora), run)
    if run.ray and (run.coordinator or run.num_processes > 1 or run.process_id):
        raise ConfigError(
            "--ray starts the processes of a run itself: give --num-workers, and no --coordinator, --num-processes or "
            "--process-id"
        )
    address = run.ray_address
    if run.service.target_service:  # its processes are on a cluster, whether training is or not
        address = ""
    cluster.check(run.ray, address, run.num_workers)
    arms(run.eval.speculation, run.eval.temperature)
    Columns.parse(run.data.columns)
    parse_template_kwargs(run.data.template_kwargs)
    weighted = [entry for entry in run.data.source if parse_entry(entry)[1] != 1]
    if run.data_only and weighted:
        raise ConfigError(
            f"--data-only writes every conversation once: leave the weight of {weighted[0]} out, and give it where the "
            "file is trained on"
        )
    if run.data_only and run.is_of_several:
        raise ConfigError("--data-only is for one process: leave --ray and --coordinator out")


def _check_adapter(folder: Path, run: TrainRun) -> None:
    if not is_adapter(folder):
        raise ConfigError(f"--lora {folder}: expected PEFT's folder of an adapter, with its {ADAPTER_CONFIG}")
    if run.quantization == "stored" or run.states_from != "layers":
        raise ConfigError(
            "--lora merges the adapter into the target that trains: leave out --quantization stored, --capture and "
            "--target-service"
        )


def check_target(train: TrainSettings, draft: DraftSettings, target: ModelConfig) -> None:
    """Raises ConfigError where rows are longer than what the target can read, or the draft vocabulary is larger than
    the target's."""
    if train.seq_len > target.max_len:
        raise ConfigError(
            f"train.seq_len is {train.seq_len}, more than the positions of the target, {target.max_len}; lower "
            "--seq-len to that"
        )
    if draft.vocab_size > target.vocab_size:
        raise ConfigError(
            f"draft.vocab_size is {draft.vocab_size}, the target has {target.vocab_size} tokens; lower --vocab-size to "
            "that"
        )


def check_drafter(train: TrainSettings, drafter: TrainedDrafter) -> None:
    """Raises ConfigError where the settings ask for what only a drafter of another kind can learn by."""
    shape = 1, train.seq_len
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_, jnp.int32, jnp.int32)]
    rows = Rows(*arrays, seeds=jax.ShapeDtypeStruct((1,), jnp.uint32))  # type: ignore[arg-type]
    draft_targets = jax.eval_shape(lambda rows: drafter.draft_targets(rows, rollout_of(train, drafter)), rows)
    if train.anchors > train.seq_len:
        raise ConfigError(
            f"train.anchors is {train.anchors}, more than the {train.seq_len} positions of a row; lower --anchors, or "
            "raise --seq-len"
        )
    is_by_blocks = draft_targets.positions is not None
    for setting, is_unknown, default in (
        (
            f"train.weighting is {train.weighting}, which is for drafters that learn whole blocks",
            train.weighting != "decay" and not is_by_blocks,
            "--weighting decay",
        ),
        (
            f"train.anchors is {train.anchors}, which is for drafters that learn at so many places of a row",
            train.anchors > 0 and not (is_by_blocks and draft_targets.weights.shape[2] == train.anchors),
            "--anchors 0",
        ),
    ):
        if is_unknown:
            raise ConfigError(f"{setting}, and {drafter.name} does not; give {default}, or another --drafter")


def _check_shares(train: TrainSettings, mesh: str) -> None:
    """Check that the mesh cuts batches and rows evenly. Raises ConfigError."""
    sizes = mesh_sizes(mesh)
    for axis, what, size in (
        ("batch", "train.batch_size / train.accumulate", train.batch_size // train.accumulate),
        ("sequence", "train.seq_len", train.seq_len),
    ):
        cuts = {name: sizes[name] for name in LOGICAL_TO_MESH[axis] if sizes.get(name, 1) > 1}
        if size % math.prod(cuts.values()):
            given = " x ".join(f"{name}={parts}" for name, parts in cuts.items())
            raise ConfigError(f"{what} is {size}, no multiple of --mesh {given}; change one of them")


def _check_stages(budget: str, states_from: StatesFrom, *, is_answered: bool, is_of_several: bool) -> None:
    """Check stages that only one process can run, or that need the target in memory. Raises ConfigError."""
    if budget:
        seconds_of(budget)
    if budget and states_from != "layers":
        name = {"capture": "--capture", "service": "--target-service"}[states_from]
        raise ConfigError(f"--budget measures steps with the target in memory; with {name} give --max-steps")
    if is_of_several and (budget or is_answered):
        raise ConfigError(
            "--budget and --regenerate are for one process: have the target answer first (specserve data regenerate), "
            "and give the file as --source, with --max-steps"
        )


def _check_service(
    service: ServiceSettings, features: CaptureSettings, num_trainers: int, *, has_own_clusters: bool
) -> None:
    """Check the settings of a target that runs in processes of its own, which only hold where it does. Each of the
    training processes may have a Ray cluster of its own. Raises ConfigError."""
    if not service.target_service and service != ServiceSettings():
        raise ConfigError(
            "--target-mesh, --target-ahead and --target-transport are for a target in processes of its own; give "
            "--target-service N, or leave them out"
        )
    if service.target_service and features.capture:
        raise ConfigError("--capture and --target-service both give the target's states; leave one of them out")
    if service.target_service and has_own_clusters:
        raise ConfigError(
            "--target-service with several training processes: all of them start their targets on one Ray cluster; "
            "give each its --ray-address, or start the run with --ray --num-workers N in place of --coordinator"
        )
    if service.target_service:
        targets_of_each(service, num_trainers)
    mesh_sizes(service.target_mesh)


def targets_of_each(settings: ServiceSettings, num_trainers: int) -> int:
    """Return the number of target processes that work for each training process. Raises ConfigError where they cannot
    be shared out."""
    if settings.target_service % num_trainers:
        raise ConfigError(
            f"--target-service {settings.target_service}: each of the {num_trainers} training processes has target "
            f"processes of its own; give a multiple of {num_trainers}"
        )
    return settings.target_service // num_trainers


def _check_patience(
    train: TrainSettings, data: DataSettings, features: CaptureSettings, service: ServiceSettings
) -> None:
    """Check that what patience goes by is measured. Raises ConfigError."""
    fixes = {
        "--eval-every above 0": not train.eval_every,
        "--eval-prompts above 0": not data.eval_prompts,
        "no --capture": features.capture,
        "no --target-service": service.target_service,
    }
    unmeasured = [fix for fix, is_needed in fixes.items() if is_needed]
    if train.patience and unmeasured:
        raise ConfigError(
            f"train.patience is {train.patience}, but nothing is measured while this run trains; give "
            f"{' and '.join(unmeasured)}, or --patience 0"
        )


def plan_drafter(run: TrainRun, target: ModelConfig) -> TrainedDrafter:
    """The drafter that the run would train, before there is a vocabulary. Raises ConfigError or CheckpointError where
    there can be none, or where it cannot learn under the settings."""
    check_target(run.train, run.draft, target)
    if run.init_from:
        drafter = earlier_drafter(resolve_head(run.init_from, "--init-from"), run.draft, target, run.target)
    else:
        vocab_size = draft_vocab_size(run.draft.vocab_size, target.vocab_size)
        drafter = new_drafter(run.drafter, run.draft, target, vocab_size)
    check_drafter(run.train, drafter)
    return drafter
