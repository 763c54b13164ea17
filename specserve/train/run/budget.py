"""A budget of time for a whole run. It decides how many questions are answered and how many steps are trained, by what
each of them costs.

The decisions stand in the run folder (`budget.json`), and a resumed run follows them instead of measuring again, so on
the same devices it ends with the same head. A budget is an aim. The limit that ends a run in the middle is
`train.max_minutes`.
"""

import dataclasses
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from specserve.errors import CheckpointError, ConfigError
from specserve.host import whole_file
from specserve.train.settings import TrainRun

logger = logging.getLogger(__name__)

FILE = "budget.json"
UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(" + "|".join(UNITS) + ")")
ANSWERS_SHARE = 0.5  # of the budget is for the target's answers, where there are any to give
ENDING_SHARE = 0.1  # is for measuring and saving along the way and at the end
PROBE_SHARE, PROBE_SECONDS = 0.05, 60.0  # how long each of both is measured: a minute, or less of a short budget
MEASUREMENTS = 10  # along the way, at least


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
    spent: float = 0.0  # in stages that are over
    conversations: int = 0
    seconds_per_conversation: float = 0.0
    steps: int = 0
    seconds_per_step: float = 0.0

    @property
    def probe_seconds(self) -> float:
        """The seconds for which a stage is measured before its length is decided."""
        return min(PROBE_SECONDS, PROBE_SHARE * self.seconds)

    def with_conversations(self, *, most: int, there: int, seconds_each: float, spent: float) -> "Budget":
        """Decide how many conversations are answered: those that are there already, and as many more as the answers'
        share of the budget has time for; at least one, and `most` at most."""
        left = max(0.0, ANSWERS_SHARE * self.seconds - spent)
        number = most
        if seconds_each:
            number = min(max(there + int(left / seconds_each), 1), most)
        return dataclasses.replace(self, conversations=number, seconds_per_conversation=seconds_each)

    def with_steps(self, *, most: int, seconds_each: float, spent: float) -> "Budget":
        """Decide how many steps are trained, after `spent` seconds are over: as many as fit into the rest of the
        budget without the share that measuring and saving need. It is at least one step, and `most` at most where
        that is not 0."""
        left = max(0.0, (1 - ENDING_SHARE) * self.seconds - spent)
        number = max(1, int(left / seconds_each))
        number = min(number, most or number)
        return dataclasses.replace(self, steps=number, seconds_per_step=seconds_each, spent=spent)

    def apply(self, run: TrainRun) -> TrainRun:
        """Return the run with the decisions so far. It is measured and saved often enough for its new length."""
        if self.conversations:
            run = dataclasses.replace(run, data=dataclasses.replace(run.data, max_conversations=self.conversations))
        if not self.steps:
            return run
        often = max(1, self.steps // MEASUREMENTS)
        eval_every, save_every = (min(every, often) for every in (run.train.eval_every, run.train.save_every))
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
