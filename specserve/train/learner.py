"""A head that learns: its state on the devices, and the step program that runs over one batch after another."""

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve import processes
from specserve.checkpoints.load import Target
from specserve.checkpoints.sound import check_weights
from specserve.data.loader import Loader
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.learning import Rows
from specserve.mesh import whole
from specserve.models.stacked import each_layer
from specserve.models.target import target_spec
from specserve.speculative.vocab import DraftVocab
from specserve.train.features import FeatureSource
from specserve.train.first import first_params, make_begin
from specserve.train.optimizer import make_optimizer
from specserve.train.settings import TrainSettings
from specserve.train.speed import StepSeconds
from specserve.train.step import StepMetrics, TrainState, loss_config, make_step, place_rows, place_state


@dataclass(frozen=True)
class TrainingData:
    """The data of a run, and the head that it starts from."""

    loader: Loader
    target_ids: np.ndarray  # [draft_vocab] int32, the draft vocabulary
    coverage: float  # share of loss-bearing tokens inside it
    head: Head | None = None  # to go on from, with that vocabulary; None: a new one


class Learner:
    """A head with its optimiser, the frozen target, and the data that they go through."""

    def __init__(
        self,
        settings: TrainSettings,
        drafter: TrainedDrafter,
        target: Target,
        data: TrainingData,
        *,
        features: FeatureSource | None = None,  # the source of the target's states, in place of its layers
        mesh: Mesh | None = None,  # the target, the head and the batch are spread over it
    ) -> None:
        self.drafter, self.target, self.data, self.features = drafter, target, data, features
        self._seed, self._mesh = settings.seed, mesh
        loss = loss_config(settings, target.config, drafter)
        self._optimizer = optimizer = make_optimizer(settings)
        shape = settings.batch_size, settings.seq_len
        self._place = place_rows(mesh, shape)
        self._shard = processes.shard_of(self._place, shape)
        self._step = make_step(loss, optimizer, mesh)
        self._place_state = place_state(drafter, optimizer, mesh)
        self._is_fresh = False  # a new head that has seen nothing of the target's states
        self._begin = make_begin(loss, self._place_state and self._place_state.params, mesh)
        self.state = self._first_state()
        costs = drafter.costs(loss.rollout, settings.seq_len)
        if features and not (features.needs_head or costs.shares_output):  # only the embedding is needed from here on
            self.target = dataclasses.replace(target, params=dataclasses.replace(target.params, head=None))
        self._vocab = jax.device_put(DraftVocab(jnp.asarray(data.target_ids)), whole(mesh))

    def step(self, scale: float) -> StepMetrics:
        """Train on the next batch, with the learning rate scaled. Raises a SpecServeError where the target's outputs on
        it cannot be had; the batch is then the next one still."""
        features = self.features and self.features.next_features(self.data.loader)
        batch = self.data.loader.next_batch()
        arrays = batch.token_ids, batch.loss_mask, batch.document_ids, batch.position_ids
        placed = jax.tree.map(lambda x: processes.place_shard(x, self._shard, self._place), (arrays, features))
        rows = Rows(*placed[0], features=placed[1])
        if self._is_fresh:
            self._fit(rows)
        self.state, metrics = self._step(self.state, self.target.params, self._vocab, rows, jnp.float32(scale))
        return metrics

    def check_target(self) -> None:
        """Raises CheckpointError where the part of the target that is in memory has a weight that is not a number."""
        params, spec, where = self.target.params, target_spec(self.target.config), str(self.target.folder)
        for own, layer in zip(spec.layers, each_layer(params.layers), strict=bool(params.layers)):
            check_weights(layer, own, where)
        params, spec = dataclasses.replace(params, layers=()), dataclasses.replace(spec, layers=())
        if params.head is None:
            spec = dataclasses.replace(spec, head=None)
        check_weights(params, spec, where)

    def time_steps(self, seconds: float) -> StepSeconds:
        """Return the seconds that a step takes: the mean of as many steps as fit into `seconds`, after one that
        compiles, and where the target's states are kept, the mean over the same rows again. The head is then the first
        one again, and the next batch the same as before. It needs the target itself, from which a new head begins."""
        assert self.target.params.layers
        loader = self.data.loader
        position = loader.state()
        jax.block_until_ready(self.step(1.0))
        timed, begin, number = loader.state(), time.monotonic(), 0
        while not number or time.monotonic() - begin < seconds:
            jax.block_until_ready(self.step(1.0))
            number += 1
        new = seen = (time.monotonic() - begin) / number
        if self.features:
            loader.restore(timed)
            begin = time.monotonic()
            for _ in range(number):
                jax.block_until_ready(self.step(1.0))
            seen = (time.monotonic() - begin) / number
        loader.restore(position)
        del self.state  # before there is another one
        self.state = self._first_state()
        return StepSeconds(new, seen, loader.num_new_steps)

    def restore(self, state: TrainState) -> None:
        """Go on from a saved state, in place of the present one."""
        self.state, self._is_fresh = state, False

    def head(self) -> Head:
        """Return the head as it is now, whole in every process. All processes call this together."""
        params = self.state.params
        if jax.process_count() > 1:  # parts of it may live where only other processes reach them
            params = jax.device_put(params, whole(self._mesh))
        return Head(self.drafter, params, self.data.target_ids)

    def _first_state(self) -> TrainState:
        # the first step takes the arrays of its state for its own, so an earlier head's are copied
        if self.data.head:
            params: Any = jax.tree.map(jnp.array, self.data.head.params)
        else:
            params = self.drafter.init_params(self.target, self.data.target_ids, self._seed)
        self._is_fresh = not (self.data.head or self.drafter.is_trained(self.target))
        state = TrainState(params, self._optimizer.init(params), jnp.int32(0))
        return jax.device_put(state, self._place_state)

    def _fit(self, rows: Rows) -> None:
        """Give a new head its first values by the first rows (`train.first`)."""
        guess = math.log(self.drafter.draft_vocab_size)
        params = first_params(self._begin, self.state.params, guess, self.target.params, self._vocab, rows)
        self.state, self._is_fresh = dataclasses.replace(self.state, params=params), False
