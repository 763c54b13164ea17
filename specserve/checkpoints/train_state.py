"""The state of a training run on disk (Orbax): atomic, keep-n, restored exactly."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from specserve.errors import CheckpointError


class StateStore:
    """Saved steps under one folder. A save is complete or absent, whenever the process is killed."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """Raises CheckpointError when the folder cannot be written."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written ({error}); give another --output") from error
        self._folder = folder
        self._manager = ocp.CheckpointManager(folder.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=keep))

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data_position: dict[str, int]) -> None:
        """Keep `state` (a pytree of arrays) and where the data stands."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_position))
        self._manager.save(step, args=args, force=True)
        self._manager.wait_until_finished()

    def restore(self, like: Any) -> tuple[Any, dict[str, int]]:
        """The newest state, shaped and placed like `like`. Raises CheckpointError when there is none or it differs."""
        step = self.latest_step
        if step is None:
            raise CheckpointError(f"{self._folder}: no saved state to resume from; run without --resume")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=args)
        except Exception as error:  # Orbax raises ValueError, KeyError and its own types for a state of another shape
            raise CheckpointError(
                f"{self._folder}: step {step} does not fit this run ({str(error).splitlines()[0]}); resume with the "
                "settings it was started with"
            ) from error
        return restored["state"], restored["data"]

    def close(self) -> None:
        self._manager.close()
