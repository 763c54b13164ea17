"""The frozen target's outputs on the rows that it has run over, kept in a file while a run lasts
(`features.keep_states`). From the second epoch on a step then costs the head alone.

What is kept is exact: the tapped and the last hidden states as they were, and of the target's distribution what its
whole vocabulary is needed for, so that the logits of the draft vocabulary are all that is left to compute. The file has
no name. It goes with the process, however that ends; a run that is resumed runs the target once more over each row.
"""

import dataclasses
import math
import shutil
import tempfile
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.data.loader import Batch, Loader
from specserve.data.packing import PackedRows
from specserve.drafters.learning import Rows
from specserve.errors import CheckpointError, ConfigError
from specserve.mesh import on_mesh, whole
from specserve.models import target as target_model
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams, head_columns
from specserve.pytree import pytree
from specserve.speculative.vocab import DraftVocab
from specserve.train.chunked_loss import HiddenStates, Teacher
from specserve.train.features import by_chunk, states_of_rows
from specserve.train.step import place_rows


@pytree
class Normalised:
    """A teacher of which the draft vocabulary's logits are computed alone, because what the others say is known."""

    hidden_states: jax.Array  # [batch, seq, d_model], after the final norm
    log_total: jax.Array  # [batch, seq] float32, the log-sum-exp of all logits
    best: jax.Array  # [batch, seq] int32, the best token as a draft row, -1 when it is none

    def distribution(
        self, target: TargetParams, config: ModelConfig, vocab: DraftVocab
    ) -> tuple[jax.Array, jax.Array]:  # see `chunked_loss.Teacher`
        drafted = dataclasses.replace(target, head=head_columns(target, vocab.target_ids))
        logits = target_model.logits(drafted, config, self.hidden_states)
        return jnp.exp(logits - self.log_total[..., None]), self.best


@pytree
class Outputs:
    """The target's outputs on a batch of rows."""

    taps: jax.Array  # [batch, seq, taps * d_model], in the target's dtype
    teacher: Teacher

    def aux_hidden_states(self) -> jax.Array:
        return self.taps


class KeptStates:
    """A source of the target's outputs that runs the target over rows which it has not seen, see
    `features.FeatureSource`."""

    needs_head = True

    def __init__(
        self,
        folder: Path,
        target: Target,
        aux_layers: tuple[int, ...],
        target_ids: np.ndarray,  # [draft_vocab]
        rows: PackedRows,
        mesh: Mesh | None,
    ) -> None:
        """Take the folder of the run, on whose disk the file is. Raises ConfigError where it has no room."""
        self._folder, self._params, self._mesh = folder, target.params, mesh
        self._vocab = jax.device_put(DraftVocab(jnp.asarray(target_ids)), whole(mesh))
        self._run = make_run(target.config, aux_layers, mesh)
        ids = jax.ShapeDtypeStruct((1, rows.token_ids.shape[1]), jnp.int32)
        mask = jax.ShapeDtypeStruct(ids.shape, jnp.bool_)
        found = jax.eval_shape(self._run, target.params, self._vocab, Rows(ids, mask, ids, ids))  # type: ignore[arg-type]
        self._leaves, self._structure = jax.tree.flatten(found)
        self._row_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self._leaves)
        self._is_kept = np.zeros(len(rows), bool)
        self._file: IO[bytes] | None = None
        needed, free = len(rows) * self._row_bytes, shutil.disk_usage(_existing(folder)).free
        if needed > free:
            raise ConfigError(
                f"features.keep_states: the target's states take {needed / 1e9:.1f} GB, the disk of {folder} has "
                f"{free / 1e9:.1f} GB; give another --output, or --keep-states false"
            )

    def next_features(self, loader: Loader) -> Outputs:
        """Return the target's outputs on the rows that the loader hands out next, as NumPy arrays. Raises
        CheckpointError where the file cannot be written or read."""
        batch = loader.peek()
        try:
            if self._is_kept[batch.row_ids].all():
                return self._read(batch.row_ids)
            return self._compute(batch)
        except OSError as error:
            raise CheckpointError(
                f"{self._folder}: the target's states cannot be kept there ({error.strerror}); make room, or give "
                "--keep-states false, and go on with --resume"
            ) from error

    def close(self) -> None:
        """Give the file up."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._is_kept[:] = False

    def _compute(self, batch: Batch) -> Outputs:
        """Run the target over a batch, and keep its outputs on the rows that are new."""
        arrays = batch.token_ids, batch.loss_mask, batch.document_ids, batch.position_ids
        rows = Rows(*jax.device_put(arrays, place_rows(self._mesh, batch.token_ids.shape)))
        outputs = jax.device_get(self._run(self._params, self._vocab, rows))
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  closed by `close`
        leaves = jax.tree.leaves(outputs)
        for i, row in enumerate(batch.row_ids):
            if not self._is_kept[row]:
                self._file.seek(int(row) * self._row_bytes)
                for leaf in leaves:
                    self._file.write(leaf[i].tobytes())
                self._is_kept[row] = True
        return outputs

    def _read(self, row_ids: np.ndarray) -> Outputs:
        assert self._file is not None
        found = [np.empty((len(row_ids), *leaf.shape[1:]), leaf.dtype) for leaf in self._leaves]
        for i, row in enumerate(row_ids):
            self._file.seek(int(row) * self._row_bytes)
            for array in found:
                part = self._file.read(array[i].nbytes)
                array[i] = np.frombuffer(part, array.dtype).reshape(array.shape[1:])
        return jax.tree.unflatten(self._structure, found)


def make_run(config: ModelConfig, aux_layers: tuple[int, ...], mesh: Mesh | None) -> Any:
    """Return the jitted program of the target alone: (its parameters, draft vocabulary, rows) -> Outputs."""

    def run(params: TargetParams, vocab: DraftVocab, rows: Rows) -> Outputs:
        taps, hidden_states = states_of_rows(params, config, rows, aux_layers)

        def summarise(hidden_states: jax.Array) -> tuple[jax.Array, jax.Array]:  # [position, d_model]
            _, log_total, best = HiddenStates(hidden_states).compared(params, config, vocab)
            return log_total, best

        log_total, best = by_chunk(summarise, hidden_states, config.vocab_size)
        return Outputs(taps, Normalised(hidden_states, log_total, best))

    return jax.jit(on_mesh(mesh, run), out_shardings=whole(mesh))


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
