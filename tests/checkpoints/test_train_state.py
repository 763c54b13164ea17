"""The state of a run on disk: exact, bounded in number, refused where it does not fit."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from specserve.checkpoints.train_state import StateStore
from specserve.errors import CheckpointError


def test_the_newest_state_comes_back_exactly(tmp_path: Path, rng: np.random.Generator) -> None:
    store = StateStore(tmp_path / "state", keep=2)
    assert store.latest_step is None
    with pytest.raises(CheckpointError, match="--resume"):
        store.restore({"a": jnp.zeros(3)})
    states = {step: {"a": jnp.asarray(rng.standard_normal(3), jnp.float32), "b": jnp.int32(step)} for step in (1, 5, 9)}
    for step, state in states.items():
        store.save(step, state, {"position": step * 10})
    store.close()
    again = StateStore(tmp_path / "state")
    restored, position = again.restore({"a": jnp.zeros(3), "b": jnp.int32(0)})
    np.testing.assert_array_equal(restored["a"], states[9]["a"])
    assert (int(restored["b"]), position, again.latest_step) == (9, {"position": 90}, 9)
    assert sorted(path.name for path in (tmp_path / "state").iterdir() if path.name.isdigit()) == ["5", "9"]
    with pytest.raises(CheckpointError, match="settings it was started with"):
        again.restore({"a": jnp.zeros(3), "c": jnp.int32(0)})
    again.close()
