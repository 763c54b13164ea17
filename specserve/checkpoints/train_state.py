"""The state of a training run on disk (Orbax): saved while training goes on, atomic, the newest and the best kept,
restored exactly onto any devices."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    LatestN,
    PolicyCheckpointInfo,
    PreservationContext,
    PreservationPolicy,
)

from specserve.errors import CheckpointError, as_line


class StateStore:
    """Saved steps under one folder. A save is complete or absent, whenever the process is killed."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """Open the store, which keeps the newest `keep` states and the best. Raises CheckpointError when the folder
        cannot be written."""
        self._best = _Best()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), self._best]),
        )
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_unfinished(folder)
            self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written ({error}); give another --output") from error

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Any, extra: dict[str, Any], *, best_step: int = 0) -> None:
        """Begin to write `state` (a pytree of arrays), which may be donated as soon as this returns, with JSON values.
        The state of `best_step` stays. Raises CheckpointError, also for the save before."""
        self._best.step = best_step
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra))
        try:
            self._manager.save(step, args=args, force=True)
        except Exception as error:  # Orbax passes on what its threads ran into, of whatever kind
            raise self._failed(error) from error

    def wait(self) -> None:
        """Wait until what was begun is written. Raises CheckpointError when it could not be."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """Read the newest state, shaped and placed like `like`. Raises CheckpointError when there is none, it is of
        another run, or it is damaged."""
        step = self.latest_step
        if step is None:
            raise CheckpointError(f"{self._folder}: no saved state to resume from; run without --resume")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), extra=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=args)
        except Exception as error:  # Orbax raises ValueError, KeyError and its own types for a state of another shape
            if self._has_arrays(step, like):
                raise self._damaged(step, error) from error
            raise CheckpointError(
                f"{self._folder}: step {step} does not fit this run ({as_line(error)}); resume with the "
                "settings it was started with"
            ) from error
        return restored["state"], restored["extra"]

    def _has_arrays(self, step: int, like: Any) -> bool:
        """Return whether a saved state is of arrays of these names, shapes and types, or does not even say of what."""
        try:
            return _described(self._manager.item_metadata(step).state.tree) == _described(like)
        except Exception:  # Orbax raises what its readers of a damaged description do
            return True

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        others = sorted(set(self._manager.all_steps()) - {step})
        how = "begin anew, without --resume, in another --output"
        if others:
            how = f"delete {self._folder / str(step)}, and --resume goes on from step {others[-1]:,}"
        return CheckpointError(f"{self._folder}: the state of step {step:,} is damaged ({as_line(error)}); {how}")

    def close(self) -> None:
        """End the last save. Raises CheckpointError when it failed."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> "StateStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or jax.process_count() == 1:  # the others may be gone, and closing would wait for them
            self.close()

    def _failed(self, error: Exception) -> CheckpointError:
        whole = self._manager.all_steps(read=True)
        kept = "none was saved before"
        if whole:
            kept = f"whole are steps {', '.join(map(str, sorted(whole)))}"
        return CheckpointError(
            f"{self._folder}: a state could not be saved ({_reason(error)}); {kept}. Make room or mend the folder, and "
            "go on with --resume"
        )


def _described(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and type of each array by its place, whatever its containers are: Orbax describes them all as
    dicts and lists."""
    places = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(place, simple=True, separator="/"): (tuple(leaf.shape), str(jnp.dtype(leaf.dtype)))
        for place, leaf in places
    }


class _Best(PreservationPolicy):
    """Keeps the state of the best step. Orbax's own policy goes by metrics, which are lost when a folder is closed."""

    step = 0

    def should_preserve(
        self,
        checkpoints: Sequence[PolicyCheckpointInfo],
        *,
        context: PreservationContext,  # noqa: ARG002 -- what Orbax calls it with
    ) -> Sequence[bool]:
        return [checkpoint.step == self.step for checkpoint in checkpoints]


def _remove_unfinished(folder: Path) -> None:
    """Remove saves that a killed process began. Orbax would do it in a thread, which may still be at it when the next
    store of the folder begins."""
    if jax.process_index() == 0:
        for entry in folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(entry)


def _reason(error: BaseException) -> str:
    """The error of the operating system at the bottom, where there is one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return as_line(error)
