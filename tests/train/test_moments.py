"""The optimiser's moments in 8 bits or in the host's memory: what a code is off by, that rounding does not hold a
moment where it is, how much smaller the state is, and that training hardly notices or does not notice at all."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding
from tiny_run import metrics, tiny_trainer

from specserve.checkpoints.load import Target
from specserve.errors import ConfigError
from specserve.mesh import fitting, make_mesh, whole
from specserve.train import moments
from specserve.train.moments import BLOCK, Codes, decode, encode
from specserve.train.optimizer import make_optimizer
from specserve.train.settings import TrainSettings
from specserve.train.trainer import Progress


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes() -> Iterator[None]:
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def _heavy_tailed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Magnitudes over ten octaves, as gradients of a head's columns for frequent and rare tokens have."""
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-10, 0, shape)).astype(np.float32)


@pytest.mark.parametrize("is_squared", [False, True])
def test_a_code_is_off_by_less_than_a_step(rng: np.random.Generator, is_squared: bool) -> None:
    values = _heavy_tailed(rng, (6, BLOCK + 40))
    values[2, :BLOCK] = 0.0
    values = values**2 if is_squared else values
    got = np.asarray(decode(encode(jnp.asarray(values), jnp.int32(3), is_squared=is_squared)))
    blocks = np.split(np.abs(values), [BLOCK], axis=1)
    largest = np.concatenate([np.broadcast_to(block.max(1, keepdims=True), block.shape) for block in blocks], axis=1)
    smallest = largest * 2.0 ** (-32 if is_squared else -16)
    is_kept = np.abs(values) > smallest
    step = 2.0 ** ((32 / 255) if is_squared else (16 / 127))
    ratio = got[is_kept] / values[is_kept]
    assert ratio.max() < step * 1.0001
    assert ratio.min() > 1 / step / 1.0001
    assert (got[values == 0] == 0).all()
    assert (np.abs(got[~is_kept]) <= smallest[~is_kept] * step).all()
    if is_squared:
        assert (got[values > 0] > 0).all()  # its root is divided by


def test_rounding_is_even_over_time(rng: np.random.Generator) -> None:
    """A moment that decays by less than half a step each time decays all the same, at its own rate."""
    values = jnp.asarray(np.abs(_heavy_tailed(rng, (4, BLOCK))) + 2.0**-9)
    state = encode(values.at[:, 0].set(8.0), jnp.int32(0), is_squared=True)

    def decayed(step: jax.Array, state: Codes) -> Codes:
        return encode(decode(state).at[:, 1:].multiply(0.99), step + 1, is_squared=True)

    after = decode(jax.lax.fori_loop(0, 300, decayed, state))
    rate = np.log(np.asarray(after / decode(state))[:, 1:]) / math.log(0.99)
    assert rate.mean() == pytest.approx(300, abs=3)  # ten deviations of a mean of so many
    np.testing.assert_allclose(rate, 300, atol=27)  # each within three steps of the code


def _params(rng: np.random.Generator) -> dict[str, jax.Array]:
    shapes = {"matrix": (96, 512), "head": (64, 300), "norm": (512,)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(("optimizer", "bytes_each"), [("adamw", 8), ("muon", 4)])
def test_the_state_is_a_quarter(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, optimizer: str, bytes_each: int
) -> None:
    monkeypatch.setattr("specserve.train.optimizer._muon_labels", lambda params: jax.tree.map(_by_rank, params))
    params = _params(rng)

    def size(kind: str) -> int:
        settings = TrainSettings(optimizer=optimizer, moments=kind)  # type: ignore[arg-type]
        leaves = jax.tree.leaves(jax.eval_shape(make_optimizer(settings).init, params))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    num_entries = sum(leaf.size for leaf in params.values() if leaf.ndim > 1)
    assert size("float32") == pytest.approx(bytes_each * num_entries, rel=0.03)
    assert 0.25 < size("int8") / size("float32") < 0.275


def _by_rank(leaf: jax.Array) -> str:
    return "muon" if leaf.ndim == 2 else "adam"


@pytest.mark.parametrize("spread", [False, True])
def test_moments_on_the_host_change_nothing(rng: np.random.Generator, spread: bool) -> None:
    """The state lies in the host's memory before and after a donated, jitted step, over a mesh too."""
    mesh = make_mesh(data=4, tensor=2) if spread else None
    params, gradient = _params(rng), _params(rng)
    found = {}
    for kind in ("float32", "host"):
        optimizer = make_optimizer(TrainSettings(moments=kind))  # type: ignore[arg-type]
        state: Any = (params, optimizer.init(params))
        rest = whole(mesh) or SingleDeviceSharding(jax.devices()[0])
        of_params = {
            name: fitting(mesh, (None, "mlp")[-x.ndim :], x.shape) if mesh else rest for name, x in params.items()
        }
        place = of_params, moments.place(state[1], params, of_params, rest)

        def step(state: Any, optimizer: optax.GradientTransformation = optimizer) -> Any:
            updates, new = optimizer.update(gradient, state[1], state[0])
            return optax.apply_updates(state[0], updates), new

        state = jax.device_put(jax.tree.map(jnp.copy, state), place)
        run = jax.jit(step, donate_argnums=0, out_shardings=place)
        for _ in range(3):
            state = run(state)
        found[kind] = state[0]
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state[1]) if leaf.ndim == 2}
        assert kinds == {moments.HOST if kind == "host" else "device"}
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state[0])} == {"device"}
    jax.tree.map(np.testing.assert_array_equal, found["host"], found["float32"])


def test_codes_are_spread_as_their_parameters_are(rng: np.random.Generator) -> None:
    params = _params(rng)
    mesh = make_mesh(tensor=2)
    of_params = {name: fitting(mesh, (None, "mlp")[-x.ndim :], x.shape) for name, x in params.items()}
    state = make_optimizer(TrainSettings(moments="int8")).init(params)
    rest = whole(mesh)
    assert rest is not None
    placed = jax.device_put(state, moments.place(state, params, of_params, rest))
    parts = {x.shape: x.addressable_shards[0].data.shape for x in jax.tree.leaves(placed)}
    assert parts == {
        (96, 512): (96, 256),
        (64, 300): (64, 150),
        (96, 2): (96, 2),  # scales
        (64, 2): (64, 2),
        (512,): (256,),
        (): (),
    }


class Killed(Exception):
    """What stands for a lost machine."""


def _curve(output: Path, target: Target, kind: str, *, is_killed: bool = False) -> np.ndarray:
    """The loss of each of ten steps; a run that is killed after step 7 goes on from step 6."""

    def kill(progress: Progress) -> None:
        if progress.step == 7:
            raise Killed

    if is_killed:
        with pytest.raises(Killed):
            tiny_trainer(output, target, moments=kind).train([kill])
    tiny_trainer(output, target, moments=kind, resume=is_killed).train()
    rows = [row for row in metrics(output) if row["loss"] is not None]
    assert [row["step"] for row in rows] == list(range(1, 11))
    return np.array([row["loss"] for row in rows])


@pytest.mark.slow
def test_training_hardly_notices_eight_bits_and_never_the_host(tmp_path: Path, tiny_target: Target) -> None:
    """In 8 bits the curve stays within 1% of what it is in float32, from the host it is the same; after a kill, too."""
    plain = _curve(tmp_path / "float32", tiny_target, "float32")
    assert plain[-1] < plain[0] - 0.05
    np.testing.assert_array_equal(_curve(tmp_path / "host", tiny_target, "host", is_killed=True), plain)
    small = _curve(tmp_path / "int8", tiny_target, "int8")
    assert 0 < np.abs(small / plain - 1).max() < 0.01
    np.testing.assert_array_equal(_curve(tmp_path / "killed", tiny_target, "int8", is_killed=True), small)


def test_a_device_without_host_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "HOST", "pinned_elsewhere")
    with pytest.raises(ConfigError, match=r"train.moments=host needs devices with pinned_elsewhere memory, cpu has"):
        make_optimizer(TrainSettings(moments="host"))
