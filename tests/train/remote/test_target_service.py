"""Training on states that come from elsewhere is training with the target in the step, and the buffer between them
hands out what was asked for, in order, once, or ends with an error. Ray is played here; `scale/test_target_actors.py`
has it."""

import dataclasses
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_run import curve, tiny_trainer

from specserve.checkpoints.load import Target, load_target
from specserve.data.documents import Document
from specserve.data.loader import Loader
from specserve.data.packing import pack
from specserve.errors import CheckpointError, ConfigError, DataError
from specserve.processes import ProcessError
from specserve.provenance import fingerprint
from specserve.train.features import Transport
from specserve.train.remote.messages import PrefillSpec, Sample
from specserve.train.remote.prefill import Prefill, expected_states, from_bytes
from specserve.train.remote.target_service import TargetService
from specserve.train.run.checks import check_settings
from specserve.train.settings import CaptureSettings, ServiceSettings, TrainRun
from specserve.train.trainer import Trainer

AHEAD = 2


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes() -> Iterator[None]:
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def alone(tiny_target: Target) -> Target:
    """The target as training has it then."""
    return load_target(tiny_target.folder, dtype="float32", has_layers=False)


def _spec(target: Target, transport: Transport = "exact", accumulate: int = 1) -> PrefillSpec:
    return PrefillSpec(
        target=str(target.folder),
        fingerprint=fingerprint(target.folder),
        dtype="float32",
        quantization="none",
        mesh="",
        is_checked=False,
        aux_layers=(1, 2, 3),
        accumulate=accumulate,
        transport=transport,
    )


class Here:
    """A source of features whose target is in this process."""

    needs_head = True

    def __init__(self, target: Target, spec: PrefillSpec) -> None:
        self.prefill, self._config, self._spec = Prefill(spec), target.config, spec

    def next_features(self, loader: Loader) -> Any:
        batch = loader.peek()
        like = expected_states(self._config, self._spec, batch.token_ids.shape)
        return from_bytes(self.prefill(batch.token_ids, batch.document_ids, batch.position_ids), like)

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_exact_states_train_the_same_head(tmp_path: Path, tiny_target: Target, alone: Target) -> None:
    """To the bit, as users' programs are compiled: without LLVM's optimiser XLA adds a head's sums in one order beside
    the target and in another without it. In the same parts, since products of more rows are rounded otherwise."""
    jax.config.update("jax_disable_most_optimizations", False)
    changes: dict[str, Any] = {"max_steps": 4, "accumulate": 2}
    whole = tiny_trainer(tmp_path / "whole", tiny_target, **changes)
    whole.train()
    spec = dataclasses.replace(_spec(tiny_target, accumulate=2), aux_layers=whole.learner.drafter.aux_layers)
    other = tiny_trainer(tmp_path / "other", alone, features=Here(tiny_target, spec), **changes)
    assert other.learner.target.params.layers == ()
    other.train()
    assert curve(tmp_path / "other") == curve(tmp_path / "whole")
    for leaf, same in zip(*map(jax.tree.leaves, (other.learner.state, whole.learner.state)), strict=True):
        np.testing.assert_array_equal(leaf, same)


@pytest.mark.parametrize(("how", "bound"), [("int8", 1e-3), ("fp8", 2e-2)])
def test_states_in_few_bits_change_the_loss_by_what_codes_allow(
    tmp_path: Path, tiny_target: Target, alone: Target, how: Transport, bound: float
) -> None:
    """A state is off by 1/254 of its largest number, or 1/16 of itself, and the curve of the loss by that much at most
    (the bounds are those of captured states)."""
    whole = tiny_trainer(tmp_path / "whole", tiny_target, max_steps=5)
    spec = dataclasses.replace(_spec(tiny_target, how), aux_layers=whole.learner.drafter.aux_layers)
    other = tiny_trainer(tmp_path / "other", alone, features=Here(tiny_target, spec), max_steps=5)
    losses: dict[str, list[float]] = {"whole": [], "other": []}
    for name, trainer in (("whole", whole), ("other", other)):
        seen = losses[name]
        trainer.train([lambda moment, seen=seen: seen.append(moment.loss) if moment.loss is not None else None])
    off = np.abs(np.array(losses["other"]) / np.array(losses["whole"]) - 1).max()
    assert 0 < off < bound


class Unset:
    """A source that a test puts another one in place of."""

    needs_head = True


class Broken(Exception):
    pass


class FakeRay:
    """Ray as far as the buffer knows it, with actors that answer at once, or never (`silent`)."""

    def __init__(self, target: Target, loader: Loader, aux_layers: tuple[int, ...] = (1, 2, 3)) -> None:
        spec = dataclasses.replace(_spec(target), aux_layers=aux_layers)
        self.prefill, self.silent, self.killed = Prefill(spec), set[int](), list[int]()
        self.asked: list[tuple[int, np.ndarray]] = []
        self.spoil: Callable[[Sample], Sample] = lambda sample: sample
        names = ("RayTaskError", "ObjectStoreFullError", "OutOfDiskError", "RayActorError", "RayError")
        self.exceptions = types.SimpleNamespace(**{name: type(name, (Broken,), {"cause": None}) for name in names})
        expected = expected_states(target.config, spec, loader.peek().token_ids.shape)
        self.service = TargetService(self, [self._actor(i) for i in range(2)], expected, AHEAD)

    def _actor(self, number: int) -> Any:
        def ask(*arrays: np.ndarray) -> Any:
            self.asked.append((number, arrays[0]))
            return number, lambda: self.spoil(Sample(1, arrays[0], self.prefill(*arrays)))

        beat = types.SimpleNamespace(remote=lambda: (number, lambda: None))
        beat.options = lambda **_: beat
        return types.SimpleNamespace(number=number, prefill=types.SimpleNamespace(remote=ask), beat=beat)

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [ref for ref in refs if ref[0] not in self.silent]
        return ready[:1], ready[1:]

    def get(self, ref: Any, timeout: float) -> Any:
        return ref[1]()

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.number)


@pytest.fixture
def loader(rng: np.random.Generator) -> Loader:
    documents = [Document(rng.integers(0, 64, 30).astype(np.int32), np.ones(30, bool)) for _ in range(16)]
    return Loader(pack(documents, 32), 4, 0)


def test_batches_come_in_order_once_and_no_more_than_so_many_are_under_way(tiny_target: Target, loader: Loader) -> None:
    """Also where one that was asked never answers, and after the loader is set back."""
    ray = FakeRay(tiny_target, loader)
    begin = loader.state()
    seen = []
    for step in range(6):
        if step == 3:
            ray.silent.add(1)
        expected = loader.peek().token_ids
        states = ray.service.next_features(loader)
        own = Here(tiny_target, _spec(tiny_target))
        np.testing.assert_array_equal(states.taps, own.next_features(loader).taps) if step in (0, 3) else None
        np.testing.assert_array_equal(loader.next_batch().token_ids, expected)
        seen.append(states.taps)
        assert len(ray.asked) <= step + 1 + AHEAD + (AHEAD + 1 if step >= 3 else 0)
    assert ray.killed == [1]
    assert {number for number, _ in ray.asked[:3]} == {0, 1}
    loader.restore(begin)
    for step in range(2):
        np.testing.assert_array_equal(ray.service.next_features(loader).taps, seen[step])
        loader.next_batch()
    ray.silent.add(0)
    loader.restore(begin)
    with pytest.raises(ProcessError, match=r"target process 0 does not answer for 25 seconds, and none is left"):
        ray.service.next_features(loader)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda s: {"taps": s["taps"][:, :-1]},
            r"row {row} of the data: taps is float32 \(4, 31, 3, 32\)",
        ),
        (lambda s: {"taps": s["taps"].astype(np.float16)}, "taps is float16"),
        (
            lambda s: {"hidden_states": s["hidden_states"] * np.array([1, 1, np.nan, 1], "f4")[:, None, None]},
            "{third}",
        ),
        (lambda s: {"hidden_states": None}, "hidden_states is missing"),
    ],
)
def test_a_wrong_sample_is_an_error_that_names_it(
    tiny_target: Target, loader: Loader, spoil: Callable[[Any], Any], message: str
) -> None:
    ray = FakeRay(tiny_target, loader)
    ids = loader.peek().row_ids
    ray.spoil = lambda sample: dataclasses.replace(sample, states=sample.states | spoil(sample.states))
    third = f"target process 0, row {ids[2]} of the data: hidden_states has values that are not numbers"
    with pytest.raises(DataError, match=message.format(row=ids[0], third=third)):
        ray.service.next_features(loader)


def test_states_of_other_tokens_are_refused_and_the_steps_before_are_saved(
    tmp_path: Path, tiny_target: Target, alone: Target
) -> None:
    """And the run goes on from them as if nothing had been."""

    def run(name: str, spoil: Callable[[Sample], Sample] = lambda sample: sample, **changes: Any) -> Trainer:
        trainer = tiny_trainer(tmp_path / name, alone, save_every=0, features=Unset(), **changes)
        ray = FakeRay(alone, trainer.learner.data.loader, trainer.learner.drafter.aux_layers)
        ray.spoil, trainer.learner.features = spoil, ray.service
        return trainer

    run("whole").train()
    number = iter(range(100))

    def spoil(sample: Sample) -> Sample:
        other = sample.token_ids + (np.arange(32) == 5)
        return sample if next(number) < 4 else dataclasses.replace(sample, token_ids=other)

    cut = run("cut", spoil)
    with pytest.raises(DataError, match=r"target process 0, row \d+ of the data: token 5 is \d+, asked for was \d+"):
        cut.train()
    assert cut.step == 4
    assert run("cut", resume=True).train().step == 10
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    ("kind", "cause", "error", "message"),
    [
        ("RayTaskError", CheckpointError("no such file"), CheckpointError, "target process 0: no such file"),
        ("RayTaskError", MemoryError("much"), ProcessError, r"target process 0 failed \(much\); repair that, then"),
        ("OutOfDiskError", None, ProcessError, "object store is full, and its disk too .* or lower --target-ahead"),
        ("RayActorError", None, ProcessError, r"target process 0 died 4 times over rows \d+, \d+, \d+, \d+ "),
        ("RayError", None, ProcessError, "target process 0: its states are lost"),
    ],
)
def test_what_goes_wrong_over_there_is_one_error(
    tiny_target: Target, loader: Loader, kind: str, cause: Exception | None, error: type[Exception], message: str
) -> None:
    ray = FakeRay(tiny_target, loader)
    raised = getattr(ray.exceptions, kind)("as Ray has it")
    raised.cause = cause

    def fail(_: Sample) -> Sample:
        raise raised

    ray.spoil = fail
    with pytest.raises(error, match=message):
        ray.service.next_features(loader)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"service": ServiceSettings(target_mesh="tensor=2")}, "give --target-service N, or leave them out"),
        ({"service": ServiceSettings(target_transport="int8")}, "give --target-service N, or leave them out"),
        ({"features": CaptureSettings(capture="x")}, "--capture and --target-service both"),
        ({"budget": "1h"}, "with --target-service give --max-steps"),
        ({"coordinator": "host:1", "num_processes": 2}, "give each its --ray-address"),
        ({"coordinator": "host:1", "ray_address": "auto", "num_processes": 2}, "give a multiple of 2"),
        ({"ray": True, "num_workers": 2}, "give a multiple of 2"),
        ({"service": ServiceSettings(target_service=1, target_mesh="tensor")}, "expected data=N"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    run = TrainRun(**{"service": ServiceSettings(target_service=1)} | changes)
    with pytest.raises(ConfigError, match=message):
        check_settings(run)
