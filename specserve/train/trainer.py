"""A training run from settings to a head on disk.

What plugs in:

* An `Evaluator` measures a head: `measure(params, is_last=...)`, called by every process alike, the last one after the
  last step. By the `tau` of the `Measurement` that it returns the best head is chosen and the run ends early
  (`train.patience`); the entries of its `to_json` stand in `metrics.jsonl` and in the notes of the exported head. Only
  taus of one `identity` are compared.
* An `Observer` is called with a `Progress`, on the first process alone: for every logged step (`loss` and its
  companions), for every measurement (`evaluation`), and once when all is written (`ending`). `Progress.row()` is the
  line of `metrics.jsonl`. It sees the run and changes nothing; what it raises ends the run as a crash would.

The order in which things are written makes a run that dies at any moment go on exactly: the metrics of a step stand
in the log, and the best head so far is exported, before the state of that step is saved. So whatever state is found
later, all that belongs to it is there, and what is there beyond it is cut off or written again.
"""

import dataclasses
import hashlib
import logging
import shlex
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from specserve import config, processes, provenance
from specserve.checkpoints.train_state import StateStore
from specserve.errors import CheckpointError, ConfigError, SpecServeError
from specserve.interop.head import save_head
from specserve.train.evaluation import Measurement
from specserve.train.learner import Learner
from specserve.train.optimizer import learning_rate_scale
from specserve.train.run.folder import SETTINGS_FILE, MetricsFile, RunFolder
from specserve.train.settings import TrainRun, TrainSettings
from specserve.train.speed import Speed, Stopwatch
from specserve.train.step import StepMetrics
from specserve.train.stopping import Stopped, Stopping

logger = logging.getLogger(__name__)


class Evaluator(Protocol):
    """Measures heads by the code that serves them (`evaluation.HeldOutEvaluator`)."""

    @property
    def identity(self) -> str:
        """The thing that is measured, in words. Measurements whose taus cannot be compared differ in them."""
        ...

    def measure(self, params: Any, *, is_last: bool) -> Measurement:
        """Measure a head's parameters. The last measurement of a run (`is_last`) may take more time than the others."""
        ...


@dataclass(frozen=True)
class Progress:
    """A moment of a run: a logged step, a measurement, or the end."""

    step: int
    seconds: float  # of training so far, earlier sessions of the run included
    share: float  # of the run that is over, 0..1
    tokens: int  # loss-bearing tokens trained on so far
    loss: float | None = None  # of rollout step 0, nats
    rollout_loss: tuple[float, ...] = ()
    rollout_accuracy: tuple[float, ...] = ()
    rollout_acceptance: tuple[float, ...] = ()
    gradient_norm: float | None = None
    learning_rate: float | None = None  # of AdamW's parameters
    speed: Speed | None = None  # where the last logged step was training too
    evaluation: Measurement | None = None
    is_last: bool = False  # the measurement after the last step
    ending: str = ""  # why the run ended

    def row(self) -> dict[str, Any]:
        """Return this moment as a line of `metrics.jsonl`."""
        row: dict[str, Any] = {
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "loss": self.loss,
            "tau": None,
        }
        if self.evaluation:
            row |= self.evaluation.to_json()
            if self.is_last:
                row["is_last"] = True
            return row
        row |= {
            "rollout_loss": list(self.rollout_loss),
            "rollout_accuracy": list(self.rollout_accuracy),
            "rollout_acceptance": list(self.rollout_acceptance),
            "gradient_norm": self.gradient_norm,
            "learning_rate": self.learning_rate,
        }
        if self.speed:
            row |= dataclasses.asdict(self.speed)
        return row


Observer = Callable[[Progress], None]


@dataclass(frozen=True)
class Best:
    """The best head so far by measured tau, and the number of measurements since then that found no better tau.
    Patience ends a run after so many.

    The measurement at the end of a run can make a head the best, but does not count for patience. So a run that is
    resumed with a later end stops where it would have stopped if it had had that end from the beginning.
    """

    step: int = 0
    tau: float = 0.0  # 0: nothing was measured
    on_the_way: float = 0.0  # the best tau before the end
    num_worse: int = 0  # measurements in a row since then

    def after(self, step: int, tau: float, *, is_last: bool) -> "Best":
        best = self
        if tau > self.tau or step == self.step:
            best = dataclasses.replace(self, step=step, tau=tau)
        if is_last:
            return best
        if tau > self.on_the_way:
            return dataclasses.replace(best, on_the_way=tau, num_worse=0)
        return dataclasses.replace(best, num_worse=self.num_worse + 1)


SAVING = "saving the state"


@dataclass(frozen=True)
class Doing:
    """The present work of a run, and its beginning."""

    what: str
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Unread:
    """A step whose metrics are not read yet."""

    step: int
    scale: float  # of the learning rate
    metrics: StepMetrics
    end: float | None  # the monotonic clock, where the device was done when the step returned


class Trainer:
    """Runs the steps, has the head measured, saves the state, exports the head."""

    def __init__(
        self,
        run: TrainRun,
        learner: Learner,
        notes: dict[str, Any],
        folder: RunFolder,
        *,
        evaluator: Evaluator | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.run, self.learner, self.notes, self.folder = run, learner, notes, folder
        self.settings: TrainSettings = run.train
        self.evaluator = evaluator
        self._store = StateStore(folder.state, keep=self.settings.keep)
        self._metrics = MetricsFile(folder)
        self._observers: Sequence[Observer] = ()
        # metrics are read a step late, so the device never waits
        self._unread: deque[_Unread] = deque()
        self._stopwatch = stopwatch or Stopwatch(positions=self.settings.batch_size * self.settings.seq_len)
        self._tokens = 0
        self._start, self._seconds, self._share = time.monotonic(), 0.0, 0.0
        self._stopping, self._signal = Stopping(), 0
        self._agree = processes.Agreement()
        self.best = Best()
        self.step, self._measured = 0, 0  # the last step that was trained, and that was measured
        self.doing = Doing("beginning")

    @property
    def output(self) -> Path:
        return self.folder.path

    def rebound(self, settings: TrainSettings) -> None:
        """Take other bounds, and other intervals of measuring and saving, before the run begins."""
        assert self.step == 0
        self.run, self.settings = dataclasses.replace(self.run, train=settings), settings

    def train(self, observers: Sequence[Observer] = ()) -> Progress:
        """Run to the bound, or until patience ends or a signal comes; save, export, and return the last moment."""
        self._observers, self.doing = observers if self.folder.is_first else (), Doing("beginning")
        try:
            source = closing(self.learner.features) if self.learner.features else nullcontext()
            with self.folder, self._stopping, self._store, closing(self._metrics), source:
                ending = self._run()
        except Exception as error:
            if lost := processes.as_lost(error):
                raise lost from error
            raise
        last = dataclasses.replace(self._now(), ending=ending)
        self._report(last)
        return last

    def stop(self, number: int) -> None:
        """Ask the run to stop after its present step, as this signal would. May be called from another thread, and
        before the run begins."""
        self._stopping.number = number

    def _run(self) -> str:
        shared = config.to_yaml(self.run.shared), self.learner.data.loader.state(), self._identity()
        processes.check_same("settings or data", shared)
        self._restore()
        self._metrics.open(self.step, is_measured=self._measured == self.step)
        ending = self._loop()
        if not self._signal:
            self._measure(is_last=True)
            ending = self._ending() or ending
        self._save()
        if self.evaluator and not self.best.step:  # stopped before anything was measured
            self._export(None)
        self.doing = Doing(SAVING)
        self._store.wait()
        return ending

    def _restore(self) -> None:
        self._start = time.monotonic()
        if self.folder.has_state:
            state, extra = self._store.restore(self.learner.state)
            self.learner.restore(state)
            for key, value in self._identity().items():
                if extra["identity"][key] != value:
                    raise CheckpointError(
                        f"{self.output}: the saved state belongs to another {key}; give the same --{key}"
                    )
            self.folder.keep_settings()
            self.learner.data.loader.restore(extra["data"])
            self.step = int(self.learner.state.step)
            self._tokens = extra["tokens"]
            if extra["measurement"] == self._measurement:
                self.best, self._measured = Best(**extra["best"]), extra["measured"]
            else:
                logger.warning(
                    "what is measured now is %s, before it was %s: the best head is chosen anew",
                    *(self._measurement or "nothing", extra["measurement"] or "nothing"),
                )
            self._start -= extra["milliseconds"] / 1000
            logger.info("going on from step %d", self.step)
        elif self.settings.resume:
            self.folder.keep_settings()
            logger.warning("the run in %s ended before its first saved state; starting it anew", self.output)
        self._look_around()

    def _identity(self) -> dict[str, str]:
        """Return hashes of the files that the settings only name, by which a saved state is recognised."""
        vocabulary = hashlib.sha256(self.learner.data.target_ids.tobytes()).hexdigest()[:16]
        target = [self.notes[name] for name in ("target_fingerprint", "lora_fingerprint") if name in self.notes]
        return {"target": " with ".join(target), "source": vocabulary}

    @property
    def _measurement(self) -> str:
        return self.evaluator.identity if self.evaluator else ""

    def _look_around(self) -> None:
        """Look at the clock and for signals, once per step, so that all processes decide alike."""
        milliseconds, number = self._agree(round((time.monotonic() - self._start) * 1000), self._stopping.number)
        self._seconds, self._signal = milliseconds / 1000, number
        bounds = (self.step, self.settings.max_steps), (self._seconds / 60, self.settings.max_minutes)
        self._share = max((done / most for done, most in bounds if most), default=0.0)

    def _ending(self) -> str:
        """Return the reason why the run is over, or an empty string while it is not."""
        if self._signal:
            return f"stopped by {signal.Signals(self._signal).name}"
        if self._share >= 1:
            return "finished"
        if self.settings.patience and self.best.num_worse >= self.settings.patience:
            return f"no better tau in {self.best.num_worse} measurements"
        return ""

    def _loop(self) -> str:
        while not (ending := self._ending()):
            # a run that was stopped on a step comes back to what is due after it
            if self.evaluator and self._is_due(self.settings.eval_every) and self._measured != self.step:
                if self._measure():
                    self._save()
                continue
            if self._is_due(self.settings.save_every):
                self._save()
            self._train_step()
            self._look_around()
        return ending

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step > 0 and self.step % every == 0

    def _train_step(self) -> None:
        self.doing = Doing(f"step {self.step + 1:,}")
        scale = learning_rate_scale(self._share, self.settings.warmup_share, self.settings.schedule)
        try:
            metrics = self.learner.step(scale)
        except SpecServeError:  # the target's outputs cannot be had
            if jax.process_count() == 1 and self.step:  # of several, which captured states may have, others are needed
                self._save()
            raise
        self.step += 1
        self._read_metrics()
        loss: Any = metrics.loss  # `is_ready` is not among the attributes that JAX declares
        self._unread.append(_Unread(self.step, scale, metrics, time.monotonic() if loss.is_ready() else None))

    def _read_metrics(self) -> None:
        """Wait for the steps whose metrics are not read yet, and log those that are due."""
        while self._unread:
            unread = self._unread.popleft()
            step, metrics = unread.step, unread.metrics
            loss, rollout, norm, n_tokens = jax.device_get(
                (metrics.loss, metrics.rollout, metrics.gradient_norm, metrics.n_tokens)
            )
            end = time.monotonic() if unread.end is None else unread.end
            self._tokens += int(n_tokens)
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not np.isfinite(value):
                    self.learner.check_target()
                    what = f"the {name} is {value} at step {step}"
                    if step == 1:
                        raise CheckpointError(_not_learnt(what, self.learner.target.folder))
                    raise ConfigError(_diverged(what, self.settings, str(self.output), self.best))
            if step % self.settings.log_every and step != 1:
                continue
            self._report(
                dataclasses.replace(
                    self._now(),
                    step=step,
                    loss=float(rollout.loss[0]),
                    rollout_loss=tuple(rollout.loss.tolist()),
                    rollout_accuracy=tuple(rollout.accuracy.tolist()),
                    rollout_acceptance=tuple(rollout.acceptance.tolist()),
                    gradient_norm=float(norm),
                    learning_rate=self.settings.lr * unread.scale,
                    speed=self._stopwatch.lap(step, self._tokens, end),
                )
            )

    def _now(self) -> Progress:
        return Progress(self.step, time.monotonic() - self._start, self._share, self._tokens)

    def _report(self, progress: Progress) -> None:
        if not progress.ending:
            self._metrics.write(progress.row())
        for observer in self._observers:
            observer(progress)

    def _measure(self, *, is_last: bool = False) -> bool:
        """Measure the head, and export it where it is the best so far."""
        self._read_metrics()
        if self.evaluator is None:
            return False
        self.doing = Doing("measuring tau")
        try:
            with self._stopping.at_once():
                evaluation = self.evaluator.measure(self.learner.state.params, is_last=is_last)
        except Stopped:  # a run that goes on from here measures it
            self._signal = self._stopping.number
            return False
        self._stopwatch.skip(self.step, self._tokens)
        self._report(dataclasses.replace(self._now(), evaluation=evaluation, is_last=is_last))
        if not is_last:
            self._measured = self.step
        self.best = self.best.after(self.step, evaluation.tau, is_last=is_last)
        is_best = self.best.step == self.step
        if is_best:
            self._export(evaluation)
        return is_best

    def _save(self) -> None:
        """Begin to save the state, after all that belongs to it; training goes on meanwhile."""
        self._read_metrics()
        if self._store.latest_step == self.step:
            return
        self.doing = Doing(SAVING)
        if self.evaluator is None:
            self._export(None)
        extra = {
            "data": self.learner.data.loader.state(),
            "tokens": self._tokens,
            "milliseconds": round((time.monotonic() - self._start) * 1000),
            "best": dataclasses.asdict(self.best),
            "measured": self._measured,
            "measurement": self._measurement,
            "identity": self._identity(),
        }
        self._store.save(self.step, self.learner.state, extra, best_step=self.best.step)
        self._stopwatch.skip(self.step, self._tokens)

    def _export(self, evaluation: Measurement | None) -> None:
        """Write the head in the SGLang layout, with its notes."""
        head = self.learner.head()
        if not self.folder.is_first:
            return
        notes = {
            **self.notes,
            "steps": self.step,
            "tokens": self._tokens,
            "draft_vocab_coverage": round(self.learner.data.coverage, 5),
            "provenance": provenance.collect(),
        }
        if evaluation:
            notes["acceptance"] = {"speculation": self.run.eval.speculation[0], **evaluation.to_json()}
        save_head(self.output, head, self.learner.target, dtype=self.run.draft.export_dtype, notes=notes)


def _not_learnt(what: str, folder: Path) -> str:
    """Return the error message for a loss that is no number before anything was learnt."""
    return (
        f"{what}, before anything was learnt: what the target in {folder} gives is not a number, though its weights in "
        "memory are. Is its config.json the config of another model, or are captured states those of a damaged target?"
    )


def _diverged(what: str, settings: TrainSettings, output: str, best: Best) -> str:
    """Return the error message for a loss that is no number, with what to do. A resumed run would keep its learning
    rate, and the newest state may be past repair, so it names a new run."""
    rates, flags = f"train.lr ({settings.lr:g})", "--lr LOWER"
    if settings.optimizer == "muon":
        rates, flags = f"{rates} or train.muon_lr ({settings.muon_lr:g})", f"{flags} --muon-lr LOWER"
    begin = ""
    if best.step:
        begin = (
            f"; with --init-from {shlex.quote(output)} it begins from the head in there, of step {best.step}, whose "
            f"tau is {best.tau:.2f}"
        )
    return (
        f"{what}: {rates} is too high. Begin another run with a lower one, `specserve train --config "
        f"{shlex.quote(f'{output}/{SETTINGS_FILE}')} {flags} --output {shlex.quote(f'{output}-2')}`{begin}"
    )
