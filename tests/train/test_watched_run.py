"""A whole run with everything that watches it: measured through the serving path, logged, tracked, reported."""

import io
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console
from tiny_run import metrics, tiny_run, tiny_trainer

from specserve.checkpoints.load import Target, load_target
from specserve.cli import training_bar
from specserve.cli.watch import StageWatch
from specserve.data.dataset import Prompt
from specserve.interop.head import load_head
from specserve.interop.notes import read_notes
from specserve.mesh import make_mesh
from specserve.speculative.acceptance import Acceptance
from specserve.train.acceptance import AcceptanceMeter, Arm, ArmAcceptance
from specserve.train.evaluation import HeldOutEvaluator, Measurement
from specserve.train.run.observers import observing, read_metrics
from specserve.train.settings import EvalSettings, TrainRun
from specserve.train.speed import Speed, Stopwatch
from specserve.train.trainer import Best, Doing, Progress, Trainer

PROMPTS = [Prompt("a", [5, 9, 33]), Prompt("b<i>", [7] * 9), Prompt("a", [60, 12, 3, 4])]
EVAL = EvalSettings(speculation=("chain:2", "static:2x1"), temperature=(0.0, 0.7), eval_tokens=12)
PAIRS = [("chain:2", 0.0), ("chain:2", 0.7), ("static:2x1", 0.0), ("static:2x1", 0.7)]
ARMS = [f"{speculation} T={temperature:g}" for speculation, temperature in PAIRS]


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes() -> Iterator[None]:
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def make(tiny_target: Target) -> Callable[..., Trainer]:
    """Makes trainers, which are measured alike and so by one evaluator."""
    evaluators: dict[str, HeldOutEvaluator] = {}

    def trainer_in(output: Path, **changes: Any) -> Trainer:
        trainer = tiny_trainer(output, tiny_target, eval=EVAL, **changes)
        if not evaluators:
            seed, ids = trainer.settings.seed, trainer.learner.data.target_ids
            evaluators["one"] = HeldOutEvaluator(tiny_target, trainer.learner.drafter, ids, PROMPTS, EVAL, seed=seed)
        trainer.evaluator = evaluators["one"]
        return trainer

    return trainer_in


def _watched(trainer: Trainer, *more: Callable[[Progress], None]) -> Progress:
    with observing(trainer.run) as observers:
        return trainer.train([*observers, *more])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, make: Callable[..., Trainer]) -> Path:
    output = tmp_path_factory.mktemp("watched") / "run"
    assert _watched(make(output, eval_every=4, trackers=("tensorboard",))).ending == "finished"
    return output


def test_one_arm_is_measured_on_the_way_and_all_at_the_end(finished: Path) -> None:
    *between, last = [row for row in metrics(finished) if row["tau"]]
    assert [(row["step"], list(row["arms"])) for row in between] == [(4, ARMS[:1]), (8, ARMS[:1])]
    assert (last["step"], list(last["arms"]), last["is_last"]) == (10, ARMS, True)
    assert last["tau"] == last["arms"][ARMS[0]]["tau"]
    assert last["accept_rate"] == last["arms"][ARMS[0]]["accept_rate"]
    for arm in last["arms"].values():
        assert list(arm["by_source"]) == ["a", "b<i>"]
        assert arm["steps"] == sum(found["steps"] for found in arm["by_source"].values())
        tokens = sum(found["tau"] * found["steps"] for found in arm["by_source"].values())
        assert tokens == pytest.approx(arm["tau"] * arm["steps"])


def test_what_is_measured_is_the_exported_head(finished: Path, tiny_target: Target) -> None:
    """Of the best step, whose tau its notes hold."""
    noted = read_notes(finished)
    best = max(row["tau"] for row in metrics(finished) if row["tau"])
    assert noted["acceptance"]["tau"] == best
    head = load_head(finished, tiny_target, dtype="float32")
    arm = Arm("chain:2")
    meter = AcceptanceMeter(tiny_target, head.drafter, [arm], PROMPTS, max_new_tokens=EVAL.eval_tokens)
    assert meter.measure(head.params, head.target_ids, arm).total.tau == best


def test_every_logged_step_says_how_fast_it_was(finished: Path) -> None:
    first, *rows = [row for row in metrics(finished) if row["loss"]]
    assert "tokens_per_second" not in first  # it compiled
    for row in rows:
        assert 0 < row["tokens_per_second"] < row["positions_per_second"]
        assert row["host_bytes"] > 1e8
        assert 0 < row["learning_rate"] <= 5e-3
        assert len(row["rollout_acceptance"]) == len(row["rollout_loss"])


def test_the_report_and_the_trackers_are_there(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    last = metrics(finished)[-1]
    for arm in last["arms"].values():
        assert f"{arm['tau']:.3f}" in page
    assert "b&lt;i&gt;" in page
    assert "b<i>" not in page
    assert len(list((finished / "tensorboard").iterdir())) == 1


def test_a_run_that_is_stopped_has_a_report_too_and_goes_on(tmp_path: Path, make: Callable[..., Trainer]) -> None:
    def stop(moment: Progress) -> None:
        if moment.step == 4 and moment.loss:
            signal.raise_signal(signal.SIGINT)

    last = _watched(make(tmp_path, trackers=("tensorboard",)), stop)
    assert last.ending == "stopped by SIGINT"
    assert "stopped by SIGINT" in (tmp_path / "report.html").read_text()
    assert _watched(make(tmp_path, trackers=("tensorboard",), resume=True)).ending == "finished"
    page = (tmp_path / "report.html").read_text()
    assert "finished" in page
    assert f"{read_metrics(tmp_path)[-1]['tau']:.3f}" in page


@pytest.mark.slow  # tests/models/test_sharding.py and test_trainer.py hold a mesh by default
def test_a_mesh_measures_the_same(finished: Path, tiny_target: Target) -> None:
    alone, over = (
        HeldOutEvaluator(target, head.drafter, head.target_ids, PROMPTS, EVAL, seed=0, mesh=mesh)
        for mesh in (None, make_mesh(data=2, tensor=2))
        for target in [tiny_target if mesh is None else load_target(tiny_target.folder, dtype="float32", mesh=mesh)]
        for head in [load_head(finished, tiny_target, dtype="float32")]
    )
    params = load_head(finished, tiny_target, dtype="float32").params
    assert alone.measure(params, is_last=False) == over.measure(params, is_last=False)


def test_laps_leave_out_what_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("specserve.train.speed.time.monotonic", lambda: now)
    watch = Stopwatch(positions=100, flops=1e6, peak=4e6)
    now = 50.0  # compiles
    watch.skip(0, 0)
    assert watch.lap(1, 80, now) is None
    now = 52.0
    speed = watch.lap(5, 400, now)
    assert speed is not None
    assert (speed.tokens_per_second, speed.positions_per_second, speed.mfu) == (160.0, 200.0, 0.5)
    now = 60.0  # measures
    watch.skip(5, 400)
    now, step = 61.0, 6
    speed = watch.lap(step, 480, now)
    assert speed is not None
    assert (speed.tokens_per_second, speed.positions_per_second, speed.mfu) == (80.0, 100.0, 0.25)
    for seconds, share in ((0.125, 1.0), (0.25, 0.5)):  # eight times the steps of a second: the peak was too low
        now += seconds
        step += 1
        speed = watch.lap(step, 480, now)
        assert speed is not None
        assert speed.mfu == share, "of the most that was reached"


@dataclass
class ShownTrainer:
    """The fields of a trainer that the bar shows."""

    run: TrainRun
    output: Path
    best: Best
    step: int = 10
    doing: Doing = field(default_factory=lambda: Doing("step 11"))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_bar_tells_what_happens(finished: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=120)
    monkeypatch.setattr(training_bar, "console", console)
    found = Acceptance(100, 200, (50, 25))
    measured = Measurement(
        tuple(ArmAcceptance(Arm(*name), found, {"a": found, "b[i]": found}) for name in PAIRS), 0, "chain:2"
    )
    speed = Speed(1234.0, 2345.0, 0.42, 3_200_000_000, 1_500_000_000)
    trainer = ShownTrainer(tiny_run(finished, eval=EVAL), finished, Best(4, 2.5))
    with StageWatch(console) as watch:
        bar = training_bar.TrainingBar(trainer, watch)  # type: ignore[arg-type]
        for moment in (
            Progress(1, 100.0, 0.1, 500, loss=4.5),
            Progress(2, 110.0, 0.2, 900, loss=3.5, speed=speed),
            Progress(3, 130.0, 0.4, 900, evaluation=measured, is_last=True),
            Progress(3, 130.0, 0.4, 900, ending="finished"),
        ):
            bar.update(moment)
            if watch._live:
                watch._live.refresh()
    bar.summary("specserve serve --draft [x]")
    text = screen.getvalue()
    for part in (
        "step 2  loss 3.500",
        "tau 1.750",
        "1,234 tokens/s  2,345 positions/s  MFU 42%",
        "device 3.2 GB",
        "1:20 left",
    ):
        assert part in text
    for part in (*ARMS, "by depth 0.50 0.50", "best 2.500 at 4", "b[i]", "report.html", "--draft [x]"):
        assert part in text
    lines = text.splitlines()
    if not is_terminal:
        assert "\x1b" not in text
        assert [line[:8] for line in lines[:4]] == ["0:00  tr", "1:40  st", "1:50, 1:", "2:10, 1:"]
    else:
        assert "at step 11" in text
