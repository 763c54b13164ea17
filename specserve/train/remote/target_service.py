"""The target in processes of its own (`--target-service N`), which run it over rows that training has not reached yet,
and send what a step needs of it through Ray's object store.

A lease is a batch that one of them has been asked for. There are so many leases at most, in the loader's order, and a
batch is handed out once, when it is the loader's next. Of several training processes each leases its own rows of every
batch, from target processes of its own. A process that dies is started again by Ray, which asks it again for what it
had not sent; one that does not answer is given up, and its leases are given to the others. So no fault changes what a
step sees: it is late, or it is an error.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from specserve import cluster, log, provenance
from specserve.checkpoints.load import Quantization
from specserve.checkpoints.source import TargetSource
from specserve.data.loader import Batch, Loader
from specserve.drafters.interface import TrainedDrafter
from specserve.errors import ConfigError, DataError, SpecServeError, as_line
from specserve.mesh import num_devices
from specserve.models.config import ModelConfig
from specserve.processes import ProcessError
from specserve.train.features import States
from specserve.train.remote.messages import LIFE, PrefillSpec, Sample
from specserve.train.remote.prefill import expected_states, from_bytes
from specserve.train.remote.target_actor import TargetActor
from specserve.train.run.checks import targets_of_each
from specserve.train.settings import ServiceSettings

logger = logging.getLogger(__name__)

ASK_SECONDS = 5  # to wait for an answer before the process is probed
SILENCE_SECONDS = 20  # to wait for an answer to the probe
RETRIES = 3  # of a batch whose process died
AGAIN = "go on with --resume"


@dataclass
class Lease:
    """A batch that was asked for."""

    position: int  # of the loader
    batch: Batch
    actor: int  # its number
    answer: Any  # Ray's reference to a Sample


class TargetService:
    """The buffer: a source of features (`features.FeatureSource`)."""

    needs_head = True

    def __init__(self, ray: Any, actors: Sequence[Any], expected: States, num_ahead: int, first: int = 0) -> None:
        """`actors` are Ray's handles of `TargetActor`s, numbered from `first`, `expected` the shapes of the states of a
        batch, or of this process's rows of it. `num_ahead` batches are asked for beside the one that is waited for."""
        self._ray, self._expected, self._num_leases = ray, expected, num_ahead + 1
        self._actors = dict(enumerate(actors, first))  # those that were not given up
        self._leases: deque[Lease] = deque()
        self._processes: dict[int, int] = {}

    def next_features(self, loader: Loader) -> States:
        """Return the target's outputs on the rows that the loader hands out next. Raises ProcessError where no target
        process is left, DataError where the outputs are wrong, and ConfigError or CheckpointError where the target
        cannot be loaded."""
        if self._leases and self._leases[0].position != loader.position:  # the loader went elsewhere
            self._leases.clear()
        while len(self._leases) < self._num_leases:
            self._lease(loader, len(self._leases))
        lease = self._leases[0]
        while not self._wait(lease):
            self._give_up(lease.actor)
        found = self._checked(lease, self._get(lease))
        self._leases.popleft()
        return found

    def close(self) -> None:
        """Forget the leases, and end the processes."""
        self._leases.clear()
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()

    def _lease(self, loader: Loader, ahead: int) -> None:
        """Ask for the batch that is so many after the next one. The processes that are left are asked in turn."""
        batch = loader.peek(ahead)
        position = loader.position + ahead * loader.batch_size
        left = list(self._actors)
        actor = left[position // loader.batch_size % len(left)]
        self._leases.append(Lease(position, batch, actor, self._ask(actor, batch)))

    def _ask(self, actor: int, batch: Batch) -> Any:
        return self._actors[actor].prefill.remote(batch.token_ids, batch.document_ids, batch.position_ids)

    def _wait(self, lease: Lease) -> bool:
        """Wait for an answer, good or bad, as long as the process that was asked gives signs of life."""
        while not self._ray.wait([lease.answer], timeout=ASK_SECONDS)[0]:
            beat = self._actors[lease.actor].beat.options(concurrency_group=LIFE).remote()
            seconds = self._patience(lease.actor)
            with log.waiting(logger.info, f"target process {lease.actor}", seconds):
                if not self._ray.wait([beat, lease.answer], timeout=seconds)[0]:
                    return False
        return True

    def _patience(self, actor: int) -> int:
        """Return the seconds to wait for a sign of life, which are more for a process that may still be starting."""
        return SILENCE_SECONDS if actor in self._processes else cluster.START_SECONDS

    def _give_up(self, silent: int) -> None:
        """Give the leases of a process that does not answer to the others. Raises ProcessError where there are none."""
        self._ray.kill(self._actors.pop(silent))
        what = f"target process {silent} does not answer for {ASK_SECONDS + self._patience(silent)} seconds"
        if not self._actors:
            raise ProcessError(f"{what}, and none is left: look for its host and its memory, then {AGAIN}")
        logger.warning("%s: given up, %d left", what, len(self._actors))
        for lease in self._leases:
            if lease.actor == silent:
                lease.actor = next(iter(self._actors))
                lease.answer = self._ask(lease.actor, lease.batch)

    def _get(self, lease: Lease) -> Sample:
        """Get the answer that is there. Where it is an error, raises a SpecServeError that names the process."""
        errors, name = self._ray.exceptions, f"target process {lease.actor}"
        try:
            sample: Sample = self._ray.get(lease.answer, timeout=SILENCE_SECONDS)
        except errors.RayTaskError as error:  # raised over there
            cause = error.cause
            if isinstance(cause, SpecServeError):
                raise type(cause)(f"{name}: {cause}") from None
            raise ProcessError(f"{name} failed ({as_line(cause)}); repair that, then {AGAIN}") from error
        except (errors.ObjectStoreFullError, errors.OutOfDiskError) as error:
            raise ProcessError(
                f"{name}: Ray's object store is full, and its disk too ({as_line(error)}); give Ray more of either, or "
                f"lower --target-ahead, then {AGAIN}"
            ) from error
        except errors.RayActorError as error:
            raise ProcessError(
                f"{name} died {RETRIES + 1} times over {_rows(lease.batch)} ({as_line(error)}); look for its memory, "
                f"then {AGAIN}"
            ) from error
        except errors.RayError as error:
            raise ProcessError(f"{name}: its states are lost ({as_line(error)}); {AGAIN}") from error
        if self._processes.setdefault(lease.actor, sample.process) != sample.process:
            logger.warning("%s died and was started again", name)
            self._processes[lease.actor] = sample.process
        return sample

    def _checked(self, lease: Lease, sample: Sample) -> States:
        """The states of a sample. Raises DataError unless they are of the rows that were asked for, of the right
        shapes, and numbers."""

        def wrong(row: int, what: str) -> DataError:
            number = int(lease.batch.row_ids[row])
            return DataError(f"target process {lease.actor}, row {number} of the data: {what}; {AGAIN}")

        asked = lease.batch.token_ids
        if sample.token_ids.shape != asked.shape:
            raise wrong(0, f"the tokens have shape {sample.token_ids.shape}, {asked.shape} were asked for")
        for row in range(len(asked)):
            if different := np.flatnonzero(sample.token_ids[row] != asked[row]).tolist():
                at = different[0]
                got, expected = int(sample.token_ids[row, at]), int(asked[row, at])
                raise wrong(row, f"token {at} is {got}, asked for was {expected}")
        for name, like in vars(self._expected).items():
            if not hasattr(like, "shape"):
                continue
            got = sample.states.get(name)
            if got is None or got.shape != like.shape or got.dtype.itemsize != like.dtype.itemsize:
                found = "missing" if got is None else f"{got.dtype} {got.shape}"
                raise wrong(0, f"{name} is {found}, expected is {like.dtype} {like.shape}")
        states = from_bytes(sample.states, self._expected)
        for name, leaf in vars(states).items():
            if isinstance(leaf, np.ndarray) and leaf.dtype != np.int8:
                is_finite = np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
                if not is_finite.all():
                    raise wrong(int(np.argmin(is_finite)), f"{name} has values that are not numbers, or infinite")
        return states


def prefill_spec(
    settings: ServiceSettings,
    source: TargetSource,
    config: ModelConfig,
    drafter: TrainedDrafter,
    *,
    quantization: Quantization,  # of the target's weights
    is_checked: bool,  # every weight must be a number
    accumulate: int,  # parts of a batch
) -> PrefillSpec:
    """Describe what the target processes of a run load, and what they send."""
    return PrefillSpec(
        target=source.name,
        fingerprint=provenance.fingerprint(source.folder),
        dtype=config.dtype,
        quantization=quantization,
        mesh=settings.target_mesh,
        is_checked=is_checked,
        aux_layers=drafter.aux_layers,
        accumulate=accumulate,
        transport=settings.target_transport,
    )


def open_service(
    ray: Any, settings: ServiceSettings, spec: PrefillSpec, config: ModelConfig, loader: Loader
) -> TargetService:
    """Start the processes that work for this training process, which load the target when rows are asked for. Raises
    ConfigError where the cluster cannot hold those of all training processes, or what they send."""
    num_trainers = jax.process_count()
    count = targets_of_each(settings, num_trainers)
    shape = loader.peek().token_ids.shape
    if shape[0] * num_trainers != loader.batch_size:
        raise ConfigError(
            f"--mesh: the {num_trainers} training processes do not have rows of their own, which --target-service "
            "needs; give a mesh such as data=N over all of them"
        )
    expected = expected_states(config, spec, shape)
    num_ahead = settings.target_ahead or 2 * count
    _check_room(ray, expected, num_ahead, num_trainers)
    resources = reserve_targets(ray, settings)
    kind = ray.remote(
        max_restarts=-1,
        max_task_retries=RETRIES,
        concurrency_groups={LIFE: 1},
        scheduling_strategy="DEFAULT",  # not within what Ray keeps for a worker that starts it
        num_cpus=resources.pop("CPU"),
        num_gpus=resources.pop("GPU", 0),
        resources=resources,
        runtime_env=cluster.environment(),
    )(TargetActor)
    actors = [kind.remote(spec, cluster.Driver.here()) for _ in range(count)]
    logger.info("%s runs in %d processes of its own", spec.target, settings.target_service)
    return TargetService(ray, actors, expected, num_ahead, count * jax.process_index())


def reserve_targets(
    ray: Any, settings: ServiceSettings, taken: Mapping[str, float] = MappingProxyType({})
) -> dict[str, float]:
    """Reserve the devices of each target process. Returns what Ray keeps for it (see `cluster.reserve`)."""
    fewer = "--target-service or --target-mesh"
    return cluster.reserve(ray, num_devices(settings.target_mesh), settings.target_service, fewer, taken)


def _check_room(ray: Any, expected: States, num_ahead: int, num_trainers: int) -> None:
    """Log how much the batches that are on their way take of Ray's object store. Raises ConfigError where that is
    more than there is."""
    batch = num_trainers * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(expected))
    rows = num_trainers * expected.taps.shape[0]
    num_bytes = (num_ahead + 1) * batch
    there = ray.cluster_resources().get("object_store_memory", 0.0)
    what = f"{num_ahead + 1} batches of {rows} rows of {batch / rows / 1e6:.3g} MB: {num_bytes / 1e6:.3g} MB"
    if num_bytes > there:
        raise ConfigError(
            f"the target's states on their way are {what}, and Ray's object store has {there / 1e6:.3g} MB; lower "
            "--target-ahead or --batch-size, send 8 bits (--target-transport int8), or give Ray more memory "
            "(ray start --object-store-memory)"
        )
    logger.info("states on their way to training: %s of Ray's object store (%.3g MB)", what, there / 1e6)


def _rows(batch: Batch) -> str:
    return f"rows {', '.join(map(str, batch.row_ids[:4].tolist()))}{', ...' if len(batch.row_ids) > 4 else ''}"
