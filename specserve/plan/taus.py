"""Published taus (tokens per forward of the target, the bonus token included), and what follows for chains of another
length if each depth accepts alike."""

import json
import math
from dataclasses import dataclass

from specserve.checkpoints.source import BUNDLED
from specserve.drafters.registry import DEFAULT_KIND, KindName
from specserve.models.presets import PRESETS, PRESETS_FILE, target_size
from specserve.plan.steady_state import root_between

TAUS_FILE = PRESETS_FILE.with_name("taus.json")


@dataclass(frozen=True)
class Reached:
    """A measured tau."""

    target: str  # a preset's name, or the bundled target's
    tau: float
    bench: str
    how: str  # the speculation, as far as the source states it
    source: str
    drafter: KindName = DEFAULT_KIND


def expected(target: str, num_params: int) -> Reached:
    """Return what heads have reached for this target, or else for the published one whose size is nearest."""
    table = [Reached(**row) for row in json.loads(TAUS_FILE.read_text(encoding="utf-8"))]
    same = [row for row in table if row.target == target]
    if same:
        return same[0]
    others = [row for row in table if row.target != BUNDLED]
    return min(others, key=lambda row: abs(math.log(target_size(PRESETS[row.target].config()).total / num_params)))


def tau_of(tau: float, depth: int, other: int) -> float:
    """Return the tau of chains of `other` draft tokens of a head that reached `tau` with chains of `depth`."""
    return _tau_of_chain(acceptance(tau, depth), other)


def acceptance(tau: float, depth: int) -> float:
    """Return the acceptance p at each depth with which 1 + p + ... + p^depth = tau."""
    return root_between(0.0, 1.0, lambda p: _tau_of_chain(p, depth) - tau)


def _tau_of_chain(p: float, depth: int) -> float:
    return 1 + sum(p ** (i + 1) for i in range(depth))
