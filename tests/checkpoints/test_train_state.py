"""The state of a run on disk: exact, bounded in number, written while training goes on, refused where it does not
fit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specserve.checkpoints.train_state import StateStore
from specserve.errors import CheckpointError
from specserve.mesh import make_mesh

# Restores the state of each folder, the first one's as if it had another shape, and prints the errors. In a process of
# its own, because Orbax leaves coroutines of a failed read behind, which raise wherever they are collected.
RESTORE = """
import json, sys
from pathlib import Path
import jax.numpy as jnp, numpy as np
from specserve.checkpoints.train_state import StateStore
from specserve.errors import CheckpointError
messages = []
for number, folder in enumerate(sys.argv[1:]):
    state = {"a": jnp.arange(5000.0 if number else 6000.0), "b": jnp.ones((3, 4))}
    try:
        found, _ = StateStore(Path(folder), keep=2).restore(state)
        messages.append("" if all(np.array_equal(found[name], state[name]) for name in state) else "other numbers")
    except CheckpointError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def test_the_newest_state_comes_back_exactly(tmp_path: Path, rng: np.random.Generator) -> None:
    store = StateStore(tmp_path / "state", keep=2)
    assert store.latest_step is None
    with pytest.raises(CheckpointError, match="--resume"):
        store.restore({"a": jnp.zeros(3)})
    states = {step: {"a": jnp.asarray(rng.standard_normal(3), jnp.float32), "b": jnp.int32(step)} for step in (1, 5, 9)}
    for step, state in states.items():
        store.save(step, state, {"position": step * 10, "best": {"tau": 1.5}})
        assert store.latest_step == step  # also while it is being written
    store.close()
    unfinished = tmp_path / "state" / "12.orbax-checkpoint-tmp"
    (unfinished / "state").mkdir(parents=True)
    again = StateStore(tmp_path / "state")
    assert not unfinished.exists(), "a save that a killed process began"
    restored, extra = again.restore({"a": jnp.zeros(3), "b": jnp.int32(0)})
    np.testing.assert_array_equal(restored["a"], states[9]["a"])
    assert (int(restored["b"]), extra, again.latest_step) == (9, {"position": 90, "best": {"tau": 1.5}}, 9)
    assert _steps(tmp_path / "state") == [5, 9]
    with pytest.raises(CheckpointError, match="settings it was started with"):
        again.restore({"a": jnp.zeros(3), "c": jnp.int32(0)})
    again.close()


def test_the_best_state_stays(tmp_path: Path) -> None:
    """Also beyond the process that saved it."""
    for bests, kept in (({1: 1, 2: 1, 3: 3, 4: 3}, [3, 4]), ({5: 3, 6: 3}, [3, 6]), ({7: 7, 8: 7}, [7, 8])):
        store = StateStore(tmp_path, keep=1)
        for step, best in bests.items():
            store.save(step, {"a": jnp.zeros(3)}, {}, best_step=best)
        store.close()
        assert _steps(tmp_path) == kept


def test_a_state_may_be_donated_while_it_is_written(tmp_path: Path) -> None:
    """40 MB, overwritten in place before they can have come to the disk."""
    bump = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = bump({str(i): jnp.full((1024, 1024), i, jnp.float32) for i in range(10)})
    store = StateStore(tmp_path)
    store.save(1, state, {})
    for _ in range(5):
        state = bump(state)
    store.wait()
    assert float(state["3"][0, 0]) == 9.0
    restored, _ = store.restore(state)
    for i in range(10):
        np.testing.assert_array_equal(restored[str(i)], np.full((1024, 1024), i + 1, np.float32))
    store.close()


def test_a_state_comes_back_onto_other_devices(tmp_path: Path, rng: np.random.Generator) -> None:
    """Saved from one device, then from eight, cut in two ways."""
    values = rng.standard_normal((8, 4)).astype(np.float32)
    mesh = make_mesh(data=2, tensor=4)
    places = [None, NamedSharding(mesh, PartitionSpec("data", "tensor")), NamedSharding(mesh, PartitionSpec("tensor"))]
    store = StateStore(tmp_path)
    for step, (before, after) in enumerate(zip(places, [*places[1:], None], strict=True)):
        store.save(step, {"a": jax.device_put(values, before)}, {})
        restored, _ = store.restore({"a": jax.device_put(np.zeros_like(values), after)})
        np.testing.assert_array_equal(restored["a"], values)
        assert restored["a"].sharding.num_devices == (8 if after else 1)
        assert after is None or restored["a"].sharding.is_equivalent_to(after, 2)
    store.close()


def test_a_disk_that_is_full_loses_no_earlier_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes runs into it, and the next call raises it: a wait, or another save."""
    store = StateStore(tmp_path)
    store.save(1, {"a": jnp.zeros(3)}, {})
    store.wait()
    move = os.rename

    def fail(source: object, to: object, **places: object) -> None:
        if Path(str(to)).name in ("2", "3"):
            raise OSError(28, "No space left on device")
        move(source, to, **places)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", fail)
    store.save(2, {"a": jnp.ones(3)}, {})
    with pytest.raises(
        CheckpointError, match=r"could not be saved \(.*No space left.*\); whole are steps 1\. Make room"
    ):
        store.wait()
    store.save(3, {"a": jnp.ones(3)}, {})
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(4, {"a": jnp.ones(3)}, {})
    monkeypatch.undo()
    again = StateStore(tmp_path)
    restored, _ = again.restore({"a": jnp.ones(3)})
    np.testing.assert_array_equal(restored["a"], np.zeros(3))
    again.close()


def test_a_damaged_state_is_not_taken_for_one_of_another_run(tmp_path: Path) -> None:
    """Whichever of its files lost its second half. What to do then leads to the state before."""
    state = {"a": jnp.arange(5000.0), "b": jnp.ones((3, 4))}
    with StateStore(tmp_path / "whole", keep=2) as store:
        store.save(1, state, {"step": 1})
        store.save(2, state, {"step": 2})
        store.wait()
    names = [file.relative_to(tmp_path / "whole") for file in (tmp_path / "whole/2").rglob("*") if file.is_file()]
    for number, name in enumerate(names):
        shutil.copytree(tmp_path / "whole", tmp_path / str(number))
        os.truncate(tmp_path / str(number) / name, (tmp_path / "whole" / name).stat().st_size // 2)
    folders = [str(tmp_path / str(number)) for number in range(len(names))]
    command = [sys.executable, "-c", RESTORE, str(tmp_path / "whole"), *folders]
    other, *messages = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "step 2 does not fit this run" in other
    assert "resume with the settings it was started with" in other
    damaged = [(folder, message) for folder, message in zip(folders, messages, strict=True) if message]
    for folder, message in damaged:
        assert "the state of step 2 is damaged" in message
        assert f"delete {folder}/2, and --resume goes on from step 1" in message
        shutil.rmtree(f"{folder}/2")
        with StateStore(Path(folder)) as store:
            assert store.restore(state)[1] == {"step": 1}
    assert len(damaged) > 1, "not every file is needed for the arrays, those that hold them are"


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="--output"):
        StateStore(tmp_path / "file" / "state")
