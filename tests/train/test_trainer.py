"""Whole training runs on a tiny target: the loss falls, a stopped run goes on as if nothing had happened, the best head
is what is left, and that can be served."""

import dataclasses
import logging
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import assert_same
from tiny_run import SETTINGS, NormEvaluator, curve, metrics, noise_of, numbers, resolved, tiny_evaluator, tiny_trainer

from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.tensors import SINGLE_FILE
from specserve.drafters.eagle3.config import default_taps
from specserve.drafters.interface import Head
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.head import load_head
from specserve.interop.notes import read_notes
from specserve.mesh import make_mesh
from specserve.models.stacked import stack_layers
from specserve.train.evaluation import Measurement
from specserve.train.optimizer import Schedule, learning_rate_scale
from specserve.train.trainer import Progress


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes() -> Iterator[None]:
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Killed(Exception):
    """What stands for a lost machine."""


def _at(step: int, act: Callable[[], None]) -> Callable[[Progress], None]:
    """An observer that acts when it sees the step."""

    def observe(progress: Progress) -> None:
        if progress.step == step and progress.loss is not None:
            act()

    return observe


def _die() -> None:
    raise Killed


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> tuple[Path, list[Progress]]:
    """A run of 10 steps that nobody disturbs, measured at its end."""
    output = tmp_path_factory.mktemp("run") / "ckpt"
    seen: list[Progress] = []
    tiny_trainer(output, tiny_target, evaluator=NormEvaluator()).train([seen.append])
    return output, seen


def test_a_run_lowers_the_loss_and_logs_it(finished: tuple[Path, list[Progress]]) -> None:
    output, seen = finished
    rows = metrics(output)
    assert [row["step"] for row in rows] == [*range(1, 11), 10]
    losses = [row["loss"] for row in rows[:-1]]
    assert losses == [progress.loss for progress in seen[:-2]]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.05
    for row in rows[:-1]:
        assert row["tau"] is None
        assert len(row["rollout_loss"]) == len(row["rollout_accuracy"]) == 2
        assert row["rollout_loss"][0] == row["loss"]
        assert row["gradient_norm"] > 0
        assert row["tokens"] == row["step"] * 4 * 30
    assert (rows[-1]["loss"], rows[-1]["is_last"]) == (None, True)
    assert [(moment.is_last, moment.ending) for moment in seen[-2:]] == [(True, ""), (False, "finished")]
    assert (seen[-1].share, seen[-1].tokens) == (1.0, 1200)


def test_what_a_run_leaves_can_be_loaded(finished: tuple[Path, list[Progress]], tiny_target: Target) -> None:
    output, seen = finished
    head = load_head(output, tiny_target, dtype="float32")
    assert (head.drafter.config.num_heads, head.drafter.config.num_kv_heads, head.drafter.config.d_ff) == (2, 1, 32)
    assert head.drafter.config.aux_layers == default_taps(tiny_target.config)
    notes = read_notes(output)
    assert notes["target"] == "tiny"
    assert (notes["steps"], notes["tokens"]) == (10, 1200)
    assert seen[-2].evaluation is not None
    assert notes["acceptance"]["tau"] == seen[-2].evaluation.tau
    assert "python" in notes["provenance"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_well(
    finished: tuple[Path, list[Progress]], tmp_path: Path, tiny_target: Target, number: signal.Signals
) -> None:
    output, _ = finished
    before = signal.getsignal(number)
    stopped = tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator())
    last = stopped.train([_at(5, lambda: signal.raise_signal(number))])
    assert signal.getsignal(number) is before
    assert (last.ending, stopped.step) == (f"stopped by {number.name}", 6)  # step 5 is seen when 6 is running
    assert [row["step"] for row in metrics(tmp_path)] == [*range(1, 7)]
    assert read_notes(tmp_path)["steps"] == 6
    assert tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator(), resume=True).train().ending == "finished"
    assert curve(tmp_path) == curve(output)


@pytest.mark.parametrize("which", [1, 3])
def test_a_signal_ends_a_measurement_and_loses_no_step(tmp_path: Path, tiny_target: Target, which: int) -> None:
    """Also the last one. A run that goes on measures what it ended in, and is the run that nobody disturbs."""

    class Disturbed(NormEvaluator):
        calls = 0

        def measure(self, params: Any, *, is_last: bool) -> Measurement:
            self.calls += 1
            if self.calls == which:
                signal.raise_signal(signal.SIGINT)
                raise AssertionError("a measurement goes on after a signal")
            return super().measure(params, is_last=is_last)

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    tiny_trainer(whole, tiny_target, evaluator=NormEvaluator(), eval_every=4).train()
    trainer = tiny_trainer(stopped, tiny_target, evaluator=Disturbed(), eval_every=4)
    assert trainer.train().ending == "stopped by SIGINT"
    assert trainer.folder.saved_step == trainer.step == {1: 4, 3: 10}[which]
    last = tiny_trainer(stopped, tiny_target, evaluator=NormEvaluator(), eval_every=4, resume=True).train()
    assert last.ending == "finished"
    assert curve(stopped) == curve(whole)
    assert (stopped / SINGLE_FILE).read_bytes() == (whole / SINGLE_FILE).read_bytes()


def test_the_best_head_is_what_is_left(tmp_path: Path, tiny_target: Target) -> None:
    """Of taus 2.0, 2.5, 2.4 and less at steps 2, 4, .. the second is the best, also for a run that died between."""
    heads: dict[int, Head] = {}

    def keep(moment: Progress) -> None:
        if moment.evaluation:
            params = jax.tree.map(np.array, trainer.learner.state.params)
            heads[moment.step] = Head(trainer.learner.drafter, params, trainer.learner.data.target_ids)

    trainer = tiny_trainer(
        tmp_path, tiny_target, evaluator=NormEvaluator([2.0, 2.5, 2.4]), eval_every=2, save_every=0, keep=1
    )
    with pytest.raises(Killed):
        trainer.train([keep, _at(7, _die)])
    assert [entry.name for entry in sorted((tmp_path / "state").iterdir()) if entry.name.isdecimal()] == ["4"]
    trainer = tiny_trainer(
        tmp_path, tiny_target, evaluator=NormEvaluator([2.4, 2.4, 2.3]), eval_every=2, save_every=0, keep=1, resume=True
    )
    last = trainer.train([keep])
    assert (last.step, trainer.best.step, trainer.best.tau, trainer.best.num_worse) == (10, 4, 2.5, 2)
    notes = read_notes(tmp_path)
    assert (notes["steps"], notes["acceptance"]["tau"]) == (4, 2.5)
    _assert_same(load_head(tmp_path, tiny_target, dtype="float32"), heads[4])
    assert [row["step"] for row in metrics(tmp_path) if row["tau"]] == [2, 4, 6, 8, 10]
    assert [entry.name for entry in sorted((tmp_path / "state").iterdir()) if entry.name.isdecimal()] == ["10", "4"]


def test_patience_ends_a_run(tmp_path: Path, tiny_target: Target) -> None:
    taus = NormEvaluator([2.0, 1.9, 1.9, 1.8])
    trainer = tiny_trainer(tmp_path, tiny_target, evaluator=taus, eval_every=2, patience=2)
    last = trainer.train()
    assert (last.step, last.ending) == (6, "no better tau in 2 measurements")
    assert read_notes(tmp_path)["steps"] == 2


@pytest.mark.parametrize(
    ("until", "taus", "later", "last", "best"),
    [(4, [2.0, 1.9], [1.9, 1.8, 1.8], 6, (2, 2.0)), (5, [2.0, 1.9, 2.6], [2.1, 2.0, 1.9, 1.9], 10, (5, 2.6))],
)
def test_a_prolonged_run_is_as_patient_as_one_without_an_end_between(
    tmp_path: Path,
    tiny_target: Target,
    until: int,
    taus: list[float],
    later: list[float],
    last: int,
    best: tuple[int, float],
) -> None:
    """Measured every second step; what the first end measures may be the best head, but is no measurement more."""
    settings: dict[str, Any] = {"eval_every": 2, "save_every": 0, "patience": 2}
    tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator(taus), max_steps=until, **settings).train()
    trainer = tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator(later), max_steps=12, resume=True, **settings)
    found = trainer.train()
    assert (found.step, found.ending) == (last, "no better tau in 2 measurements")
    assert (trainer.best.step, trainer.best.tau) == best


def test_another_measurement_has_a_best_of_its_own(
    tmp_path: Path, tiny_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Its taus may all be lower; a head is exported all the same, and the change is said."""
    settings: dict[str, Any] = {"eval_every": 2, "save_every": 0}
    tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator([2.9, 2.8]), max_steps=3, **settings).train()
    other = NormEvaluator([1.5, 1.4], "shorter answers")
    with caplog.at_level(logging.WARNING):
        trainer = tiny_trainer(tmp_path, tiny_target, evaluator=other, max_steps=5, resume=True, **settings)
        trainer.train()
    assert (trainer.best.step, trainer.best.tau) == (4, 1.5)
    assert read_notes(tmp_path)["steps"] == 4
    assert "measured now is shorter answers, before it was norm" in caplog.text


@pytest.mark.slow
def test_in_bfloat16_a_run_follows_the_one_in_float32(
    finished: tuple[Path, list[Progress]], tmp_path: Path, tiny_target: Target
) -> None:
    """Target and head computed in bfloat16, masters in float32. The losses are as close as those of runs in float32
    whose weights are off by as much as bfloat16 rounds."""

    def losses(output: Path) -> np.ndarray:  # [step, rollout step]
        return np.array([row["rollout_loss"] for row in metrics(output) if row["loss"]])

    trainer = tiny_trainer(tmp_path / "bfloat16", load_target(tiny_target.folder, dtype="bfloat16"))
    trainer.train()
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.learner.state.params)} == {np.dtype(np.float32)}
    alone = losses(finished[0])
    off = losses(tmp_path / "bfloat16") - alone
    assert off.any()
    spread = []
    for seed in range(2):
        moved = dataclasses.replace(tiny_target, params=_rounded(tiny_target.params, seed))
        other = tiny_trainer(tmp_path / str(seed), moved)
        other.learner.state = dataclasses.replace(
            other.learner.state, params=_rounded(other.learner.state.params, seed)
        )
        other.train()
        spread.append(losses(tmp_path / str(seed)) - alone)
    # losses of one run move together, so there are few independent numbers to compare
    assert np.sqrt(np.mean(np.square(off))) < 2 * np.sqrt(np.mean(np.square(spread)))
    assert np.abs(off).max() < 2 * np.abs(spread).max()


def _rounded(params: Any, seed: int) -> Any:
    """Move each number by what a product in bfloat16 rounds of it: the weight, what it is multiplied with, and the
    result, each by up to a unit of 2^-9, independently. Sums are float32's."""
    rng = np.random.default_rng(seed)

    def move(x: jax.Array) -> jax.Array:
        noise = 2.0**-9 * rng.uniform(-1, 1, (3, *x.shape)).sum(axis=0)
        return jax.device_put((np.asarray(x) * (1 + noise)).astype(x.dtype), x.sharding)

    return jax.tree.map(move, params)


def _numbers(target: Target, output: Path) -> dict[str, np.ndarray]:
    tiny_trainer(output, target, evaluator=NormEvaluator(), save_every=0).train()
    return numbers(output)


@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_a_target_over_a_mesh_teaches_the_same(
    finished: tuple[Path, list[Progress]], tmp_path: Path, tiny_target: Target, axes: dict[str, int]
) -> None:
    """Along `fsdp` each device holds a part of every matrix: of the target, whose layers are looped over there, of the
    head and of its moments."""
    mesh = make_mesh(**axes)
    target = load_target(tiny_target.folder, dtype="float32", mesh=mesh)
    if "fsdp" in axes:
        target = dataclasses.replace(target, params=stack_layers(target.params, target.config))
    trainer = tiny_trainer(tmp_path, target, evaluator=NormEvaluator(), mesh=mesh)
    trainer.train()
    for leaf in jax.tree.leaves(trainer.learner.state):
        assert leaf.sharding.num_devices == 8
    learned = jax.tree.leaves(trainer.learner.state)
    for leaf in [*(x for x in learned if x.ndim > 1), *(x for x in jax.tree.leaves(target.params) if x.size > 1000)]:
        assert leaf.addressable_shards[0].data.nbytes <= leaf.nbytes / axes.get("fsdp", 1)
    assert [row["step"] for row in metrics(tmp_path)] == [row["step"] for row in metrics(finished[0])]
    assert_same(numbers(tmp_path), numbers(finished[0]), noise_of(_numbers, tiny_target, tmp_path))


def test_a_stacked_target_begins_a_head_and_measures_it_as_a_separate_one_does(
    tmp_path: Path, tiny_target: Target
) -> None:
    """A head that is a copy of the target's last layer, to the bit; and the answers, whose steps cut each layer out of
    the stack."""
    params = jax.tree.map(jnp.array, tiny_target.params)
    stacked = dataclasses.replace(tiny_target, params=stack_layers(params, tiny_target.config))
    both = [tiny_trainer(tmp_path / str(i), target, drafter="mtp") for i, target in enumerate((tiny_target, stacked))]
    for each in both:
        with each.folder:  # nothing is trained
            pass
    jax.tree.map(np.testing.assert_array_equal, *(each.learner.state.params for each in both))
    found = [tiny_evaluator(each, None).measure(each.learner.state.params, is_last=False) for each in both]
    assert found[0] == found[1]
    assert any(found[0].arms[0].answers)


def _assert_same(head: Head, other: Head) -> None:
    for leaf, same in zip(jax.tree.leaves(head.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(leaf, same)


def test_a_run_that_cannot_end_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(ConfigError, match=r"max_steps and train\.max_minutes"):
        tiny_trainer(tmp_path / "a", tiny_target, max_steps=0)


@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
def test_what_is_no_number_stops_the_run_and_says_how_to_go_on(tmp_path: Path, tiny_target: Target, name: str) -> None:
    trainer = tiny_trainer(tmp_path / "high", tiny_target, save_every=1)
    step = trainer.learner._step

    def diverge(*arguments: Any) -> Any:
        state, found = step(*arguments)
        return state, dataclasses.replace(found, **{name: jnp.float32(np.inf)}) if trainer.step == 2 else found

    trainer.learner._step = diverge
    with pytest.raises(ConfigError, match=rf"the {name.replace('_', ' ')} is inf at step 3") as raised:
        trainer.train()
    assert [row["step"] for row in metrics(tmp_path / "high")] == [1, 2]
    (command,) = re.findall(r"`(.*)`", str(raised.value))
    run = resolved(command.replace("LOWER", str(SETTINGS.lr)))  # a step that is compiled
    assert (run.train.lr, run.train.resume, run.init_from) == (SETTINGS.lr, False, "")
    assert tiny_trainer(Path(run.output), tiny_target, lr=run.train.lr, max_steps=1).train().ending == "finished"


@pytest.mark.parametrize("where", ["layer", "head", "norm", "nowhere"])
def test_a_damaged_target_is_not_blamed_on_the_rate(tmp_path: Path, tiny_target: Target, where: str) -> None:
    """One weight that is not a number is named; where all are numbers and what comes of them is none, that is said."""
    params = tiny_target.params
    first = params.layers[0]
    damaged = {
        "layer": lambda: dataclasses.replace(
            params, layers=(dataclasses.replace(first, mlp_norm=first.mlp_norm.at[3].set(np.nan)), *params.layers[1:])
        ),
        "head": lambda: dataclasses.replace(params, head=params.head.at[5, 7].set(np.nan)),  # type: ignore[union-attr]
        "norm": lambda: dataclasses.replace(params, norm=params.norm.at[0].set(np.nan)),
        "nowhere": lambda: dataclasses.replace(params, norm=params.norm * 3e38),
    }[where]()
    named = {
        "layer": r"not a number or infinite: model\.layers\.0\.post_attention_layernorm\.weight; copy or download",
        "head": r"not a number or infinite: lm_head\.weight; copy or download",
        "norm": r"not a number or infinite: model\.norm\.weight; copy or download",
        "nowhere": r"at step 1, before anything was learnt: what the target in .* gives is not a number, though",
    }[where]
    with pytest.raises(CheckpointError, match=named):
        tiny_trainer(tmp_path, dataclasses.replace(tiny_target, params=damaged)).train()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_learning_rate_warms_up_and_falls(schedule: Schedule) -> None:
    scales = [learning_rate_scale(progress, 0.1, schedule) for progress in np.linspace(0, 1.2, 121)]
    assert scales[0] == 0.02
    assert max(scales) == scales[10] == 1.0
    assert scales[:11] == sorted(scales[:11])
    assert scales[10:] == sorted(scales[10:], reverse=True)
    assert scales[-1] == pytest.approx(1.0 if schedule == "constant" else 0.05)
    middle = {"cosine": 0.525, "linear": 0.525, "constant": 1.0}[schedule]
    assert scales[55] == pytest.approx(middle, abs=0.01)  # the steepest schedule falls by 0.017 from one to the next


def test_a_run_whose_steps_were_timed_is_the_same_run(
    tmp_path: Path, tiny_target: Target, finished: tuple[Path, list[Progress]]
) -> None:
    timed = tiny_trainer(tmp_path, tiny_target, evaluator=NormEvaluator(), max_steps=20)
    assert timed.learner.time_steps(0.0).new > 0
    timed.rebound(dataclasses.replace(timed.settings, max_steps=10))
    timed.train()
    assert curve(tmp_path) == curve(finished[0])
