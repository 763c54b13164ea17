"""A budget of time for a whole run. Questions are answered until their share of it is used (`answers.cache`); then what
a step and a measurement of tau cost decides how many of both there are.

The decisions stand in the run folder (`budget.json`), and a resumed run follows them instead of measuring again, so on
the same devices it ends with the same head. A budget is an aim. The limit that ends a run in the middle is
`train.max_minutes`.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specserve.errors import CheckpointError, ConfigError
from specserve.host import whole_file
from specserve.train.settings import TrainRun
from specserve.train.speed import StepSeconds

logger = logging.getLogger(__name__)

FILE = "budget.json"
UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(" + "|".join(UNITS) + ")")
ANSWERS_SHARE = 0.5  # of the budget is for the target's answers, where there are any to give
QUESTIONS_SHARE = 0.15  # of these answers' share is for questions that the target asks itself
ENDING_SHARE = 0.1  # is for measuring and saving along the way and at the end
PROBE_SHARE, PROBE_SECONDS = 0.02, 20.0  # how long steps are measured, at most: so long, or less of a short budget
MEASUREMENTS = 10  # of tau, where there is time for so many
TIMED_FROM = 180.0  # seconds for measuring: with fewer tau is measured at the end alone, and that is not timed before


def seconds_of(text: str) -> float:
    """Return the seconds in a budget such as `2h`, `90m` or `1h 30min`. Raises ConfigError."""
    parts = _TEXT.findall(text)
    total = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not total or _TEXT.sub("", text).strip():
        raise ConfigError(f"--budget {text!r}: expected a time such as 2h, 90m or 1h 30m")
    return total


@dataclass(frozen=True)
class Budget:
    """The time that a run may take, the time that it took so far, and the decisions that follow. A value of zero is
    not known yet."""

    seconds: float
    spent: float = 0.0  # before the steps begin
    conversations: Mapping[str, int] = field(default_factory=dict)  # of each source, in the order of the draw
    steps: int = 0
    seconds_per_step: float = 0.0
    measurements: int = 0  # of tau, the last one included
    questions: int = 0  # of the target to itself

    @property
    def probe_seconds(self) -> float:
        """The seconds for which steps are measured before their number is decided."""
        return min(PROBE_SECONDS, PROBE_SHARE * self.seconds)

    @property
    def question_seconds(self) -> float:
        """The seconds that are for questions which the target asks itself, of those for its answers."""
        return QUESTIONS_SHARE * self.answer_seconds

    @property
    def answer_seconds(self) -> float:
        """The seconds that are left for the target's answers."""
        return max(0.0, ANSWERS_SHARE * self.seconds - self.spent)

    @property
    def ending_seconds(self) -> float:
        """The seconds that are for measuring and saving."""
        return ENDING_SHARE * self.seconds

    def after(self, seconds: float) -> "Budget":
        """Return the budget when so many more seconds are over."""
        return dataclasses.replace(self, spent=self.spent + seconds)

    def with_steps(self, *, most: int, step: StepSeconds, measuring: float = 0.0) -> "Budget":
        """Decide how many steps are trained, by the time that they take, and how often tau is measured, which
        takes `measuring` (0: not known): as often as the ending's share has time for, and at the end in any case; and
        as many steps as fit into the rest of the budget. It is at least one step, and `most` at most where that is not
        0."""
        measurements = 1
        if measuring:
            measurements = max(1, min(MEASUREMENTS, int(self.ending_seconds / measuring)))
        ending = max(self.ending_seconds, measurements * measuring)
        number = max(1, step.number_in(self.seconds - self.spent - ending))
        number = min(number, most or number)
        return dataclasses.replace(self, steps=number, seconds_per_step=step.new, measurements=measurements)

    def apply(self, run: TrainRun) -> TrainRun:
        """Return the run with the decisions so far. It is measured and saved often enough for its new length."""
        if number := sum(self.conversations.values()):
            run = dataclasses.replace(run, data=dataclasses.replace(run.data, max_conversations=number))
        if not self.steps:
            return run
        eval_every = min(run.train.eval_every, -(-self.steps // self.measurements))
        save_every = min(run.train.save_every, max(1, self.steps // MEASUREMENTS))
        train = dataclasses.replace(run.train, max_steps=self.steps, eval_every=eval_every, save_every=save_every)
        return dataclasses.replace(run, train=train)


def begin(text: str, folder: Path, *, is_resumed: bool) -> Budget | None:
    """Return the budget of a run in this folder, which is there, with the earlier decisions where the run is resumed,
    or None where it has no budget. Raises ConfigError, and CheckpointError for a file that cannot be read."""
    if not text:
        return None
    budget = Budget(seconds_of(text))
    if is_resumed and (earlier := _read(folder)):
        return earlier
    (folder / FILE).unlink(missing_ok=True)
    return budget


def decided(run: TrainRun) -> TrainRun:
    """Return the run with the decisions of the budget in its folder. Raises CheckpointError."""
    if run.budget and (budget := _read(Path(run.output))):
        return budget.apply(run)
    return run


def _read(folder: Path) -> Budget | None:
    """Read the decisions in the folder of a run; None where there are none. Raises CheckpointError."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return Budget(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: not what a run wrote ({error}); begin another run") from error


def record(folder: Path, budget: Budget) -> None:
    """Write the decisions into the run's folder, for a run that resumes this one. Raises CheckpointError."""
    path = folder / FILE
    try:
        with whole_file(path) as partial:
            partial.write_text(json.dumps(dataclasses.asdict(budget), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from error
