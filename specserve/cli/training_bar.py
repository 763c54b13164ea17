"""Progress of a training run, for the watch over its command: a line per logged moment where there is no terminal."""

import time
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from specserve.cli.progress import console
from specserve.cli.watch import StageState, StageWatch
from specserve.train.evaluation import Measurement
from specserve.train.run.report import REPORT_FILE, duration, gigabytes
from specserve.train.speed import Speed
from specserve.train.trainer import Progress as Moment
from specserve.train.trainer import Trainer


class TrainingBar:
    """Shows how far a training run is, its loss, tau and speed."""

    def __init__(self, trainer: Trainer, watch: StageWatch, *, is_brief: bool = False) -> None:
        """Begin the stage. With `is_brief` it is a single line on a terminal: no speeds, and no line for each
        measurement of tau."""
        self._trainer, self._watch, self._is_brief = trainer, watch, is_brief
        self._share, self._note = 0.0, ""
        self._evaluation: Measurement | None = None
        self._loss: float | None = None
        self._speed: Speed | None = None
        self._first: tuple[float, float] | None = None  # seconds and share of the first moment: what compiled is past
        watch.begin("training", self._state)

    def update(self, moment: Moment) -> None:
        if moment.ending:
            return
        self._evaluation = moment.evaluation or self._evaluation
        if moment.loss is not None:
            self._loss = moment.loss
        self._speed = moment.speed or self._speed
        note = duration(moment.seconds) + self._left(moment)
        self._share, self._note = moment.share, self._learning(moment) + self._left(moment)
        if not console.is_terminal:
            text = "  ".join(filter(None, (self._learning(moment), self._speeding())))
            self._watch.say(f"{note}  {self._measured(moment) if moment.evaluation else text}")
        elif moment.evaluation and not self._is_brief:
            self._watch.say(self._measured(moment))

    def _state(self) -> StageState:
        doing = self._trainer.doing
        here = time.monotonic() - doing.since
        at = f"{doing.what}, for {duration(here)}" if here >= 1 else doing.what
        if not console.is_terminal:
            return StageState(at)
        more = () if self._is_brief else tuple(filter(None, (self._speeding(), f"at {at}")))
        return StageState(self._note or "compiling", self._share, more)

    def _left(self, moment: Moment) -> str:
        if self._first is None:
            self._first = moment.seconds, moment.share
        seconds, share = moment.seconds - self._first[0], moment.share - self._first[1]
        if share <= 0:
            return ""
        return f", {duration(seconds / share * max(0.0, 1 - moment.share))} left"

    def _learning(self, moment: Moment) -> str:
        tau = loss = "-"
        if self._evaluation:
            tau = f"{self._evaluation.tau:.3f}"
        if self._loss is not None:
            loss = f"{self._loss:.3f}"
        return f"step {moment.step:,}  loss {loss}  tau {tau}"

    def _speeding(self) -> str:
        if self._speed is None:
            return ""
        speed = self._speed
        parts = [f"{speed.tokens_per_second:,.0f} tokens/s", f"{speed.positions_per_second:,.0f} positions/s"]
        if speed.mfu is not None:
            parts.append(f"MFU {speed.mfu:.0%}")
        if speed.device_bytes is not None:
            parts.append(f"device {gigabytes(speed.device_bytes)}")
        return "  ".join([*parts, f"host {gigabytes(speed.host_bytes)}"])

    def _measured(self, moment: Moment) -> str:
        assert moment.evaluation
        rates = " ".join(f"{rate:.2f}" for rate in moment.evaluation.arms[0].total.accept_rate)
        best = f"best {self._trainer.best.tau:.3f} at {self._trainer.best.step:,}"
        if moment.evaluation.tau > self._trainer.best.tau:
            best = "the best so far"
        return f"step {moment.step:,}  tau {moment.evaluation.tau:.3f} ({best})  by depth {rates}"

    def summary(self, next_command: str) -> None:
        """Print the last measurement, the best one, and the command to go on with."""
        trainer = self._trainer
        if self._evaluation:
            console.print(_arms_table(self._evaluation.to_json()))
            if trainer.best.step != trainer.step:
                console.print(
                    f"the best was tau {trainer.best.tau:.3f} at step {trainer.best.step:,}; that head is kept"
                )
        output = escape(str(trainer.output))
        console.print(f"the head is in {output}, the report in {output}/{REPORT_FILE}", highlight=False, soft_wrap=True)
        console.print(f"next: [bold]{escape(next_command)}[/]", highlight=False, soft_wrap=True)


def _arms_table(found: dict[str, Any]) -> Table:
    """A table of every arm that was measured, with a line for each source of those that have several."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("held-out prompts")
    table.add_column("tau", justify="right")
    table.add_column("acceptance by depth")
    for name, arm in found["arms"].items():
        table.add_row(escape(name), *_row(arm))
        if len(arm["by_source"]) > 1:
            for source, own in arm["by_source"].items():
                table.add_row(f"  {escape(source)}", *_row(own), style="dim")
    return table


def _row(found: dict[str, Any]) -> tuple[str, str]:
    return f"{found['tau']:.3f}", " ".join(f"{rate:.2f}" for rate in found["accept_rate"])
