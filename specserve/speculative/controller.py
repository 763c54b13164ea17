"""Which tree when: the way to make the next step that promises the most tokens per second for the batch as a whole.

The promise is (expected tokens) / (measured cost). Costs come from the start of the server, and follow what steps take
in service, where the host works beside the device. What a chain of length K is
expected to emit follows from each sequence's acceptance by depth, 1 + sum over d of p_1 ... p_d, which is estimated
while serving; a tree's acceptance at each depth is 1 - (1 - p)^lift, with a lift of its own that is estimated as well.
Plain decoding is one of the ways, so a head that does not pay costs nothing but a look now and then. Host only; knows
nothing of requests or devices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specserve.speculative.tree import StaticTree, Tree

MAX_DEPTH = 16  # acceptance beyond is taken for that at this depth
UNKNOWN_PRIOR = 0.5  # acceptance where a head says nothing of its own
SLOT_RATE, PRIOR_RATE, LIFT_RATE = 0.08, 0.01, 0.02  # how fast estimates follow what is seen
PROBE_STEPS = 64  # after so many plain steps, one step looks whether speculation would pay by now
COST_RATE, WORST_RATIO = 0.1, 2.0  # how fast costs follow what is seen, of which no more than this is believed
NEAR = 0.95  # speculation that promises less than this much of what plain decoding does is far from paying
LOYALTY = 1.02  # another way must promise more than this much of what the current one does

Shape = tuple[int, int, Tree | None]  # batch size, page-table width, tree: what a step's cost depends on


@dataclass(eq=False)
class Estimate:
    """How one sequence accepts: conditional acceptance by depth."""

    accept_rate: np.ndarray  # [MAX_DEPTH] float64
    max_depth: int = MAX_DEPTH  # draft tokens that its request lets a step accept


@dataclass(eq=False)
class Controller:
    """`costs` are seconds per step; a way to step that has none is never chosen. `prior` is the head's own acceptance
    by depth, from its evaluation."""

    costs: Mapping[Shape, float]
    prior: Sequence[float] = ()
    is_following: bool = True  # whether speculation may pay soon, so that the draft should keep up with plain steps
    _lift: dict[Tree, float] = field(default_factory=dict)
    _overhead: dict[tuple[int, Tree | None], float] = field(default_factory=dict)  # log(seconds in service / cost)
    _current: Tree | None = None
    _num_plain: int = 0  # plain steps since the last look

    def __post_init__(self) -> None:
        rates = [*self.prior] or [UNKNOWN_PRIOR]
        rates += [rates[-1]] * (MAX_DEPTH - len(rates))
        self._prior = np.clip(np.array(rates[:MAX_DEPTH]), 0.02, 0.98)

    def start(self, max_depth: int | None) -> Estimate:
        """The estimate for a new sequence: what is known of the head so far."""
        return Estimate(self._prior.copy(), MAX_DEPTH if max_depth is None else max_depth)

    def expected_tokens(self, estimate: Estimate, tree: Tree | None) -> float:
        """How many tokens a step over this tree is expected to emit for the sequence, the bonus token included."""
        if tree is None or estimate.max_depth == 0:
            return 1.0
        reach = np.cumprod(self._rates(estimate, tree))
        return 1.0 + float(reach[: estimate.max_depth].sum())

    def choose(
        self, estimates: Sequence[Estimate], trees: Sequence[Tree | None], batch_size: int, width: int
    ) -> Tree | None:
        """Choose the tree for the next step of these sequences, out of those compiled for the batch bucket."""
        known = [tree for tree in trees if (batch_size, width, tree) in self.costs]
        if not known:
            return trees[0]
        speculative = [tree for tree in known if tree is not None]
        promises = {tree: self._promise(estimates, batch_size, width, tree) for tree in known}
        best = max(known, key=promises.__getitem__)
        self.is_following = any(promises[tree] > NEAR * promises[best] for tree in speculative)
        if best is None and speculative:
            self._num_plain += 1
            if self._num_plain >= PROBE_STEPS and any(estimate.max_depth for estimate in estimates):
                self._num_plain = 0
                return min(speculative, key=lambda tree: self._cost(batch_size, width, tree))
        else:
            self._num_plain = 0
        self._current = best
        return best

    def speedup(self, estimates: Sequence[Estimate], batch_size: int, width: int, tree: Tree | None) -> float:
        """The tokens per second of a step over this tree, over those of a plain step; 1.0 where a cost is unknown."""
        known = {(batch_size, width, None), (batch_size, width, tree)} <= self.costs.keys()
        if not known or not estimates:
            return 1.0
        tokens = sum(self.expected_tokens(estimate, tree) for estimate in estimates)
        return tokens / len(estimates) * self._cost(batch_size, width, None) / self._cost(batch_size, width, tree)

    def observe(self, estimate: Estimate, tree: Tree, n_accepted: int) -> None:
        """A step of this tree accepted so many tokens of the sequence."""
        rates = self._rates(estimate, tree)
        last = min(len(rates), estimate.max_depth)
        num_seen = min(n_accepted + 1, last)  # the first rejection is the last thing seen
        if not num_seen:
            return
        surprise = (np.arange(num_seen) < n_accepted) - rates[:num_seen]
        lift = self._lift_of(tree) * (1 + LIFT_RATE * surprise.sum())
        if num_seen == last:  # what is deeper than anybody looks goes with it, else a longer chain is never tried
            surprise = np.pad(surprise, (0, MAX_DEPTH - last), mode="edge")
        seen = slice(0, len(surprise))
        estimate.accept_rate[seen] = np.clip(estimate.accept_rate[seen] + SLOT_RATE * surprise, 0.02, 0.98)
        self._prior[seen] = np.clip(self._prior[seen] + PRIOR_RATE * surprise, 0.02, 0.98)
        if not _is_chain(tree):
            self._lift[tree] = float(np.clip(lift, 1.0, 8.0))

    def observe_seconds(self, batch_size: int, width: int, tree: Tree | None, seconds: float) -> None:
        """A step of this shape took so long in service."""
        cost = self.costs.get((batch_size, width, tree))
        if cost is None or seconds <= 0:
            return
        bound = math.log(WORST_RATIO)
        seen = min(max(math.log(seconds / cost), -bound), bound)
        known = self._overhead.get((batch_size, tree), seen)
        self._overhead[batch_size, tree] = known + COST_RATE * (seen - known)

    def _cost(self, batch_size: int, width: int, tree: Tree | None) -> float:
        """Seconds of a step in service. One that has not been seen there is taken to be half as far from its cost as
        those of its kind that have: so it is tried before one that has proved dear."""
        overhead = self._overhead.get((batch_size, tree))
        if overhead is None:
            alike = [value for (size, other), value in self._overhead.items() if size == batch_size and other and tree]
            alike = alike or [value for (size, _), value in self._overhead.items() if size == batch_size] or [0.0]
            overhead = 0.5 * sum(alike) / len(alike)
        return self.costs[batch_size, width, tree] * math.exp(overhead)

    def _promise(self, estimates: Sequence[Estimate], batch_size: int, width: int, tree: Tree | None) -> float:
        tokens = sum(self.expected_tokens(estimate, tree) for estimate in estimates)
        loyalty = LOYALTY if tree == self._current else 1.0
        return loyalty * tokens / self._cost(batch_size, width, tree)

    def _rates(self, estimate: Estimate, tree: Tree) -> np.ndarray:  # [depth]
        rates = estimate.accept_rate[: tree.depth]
        return rates if _is_chain(tree) else 1.0 - (1.0 - rates) ** self._lift_of(tree)

    def _lift_of(self, tree: Tree) -> float:
        """Before anything is seen: more children help, each less than the one before."""
        return self._lift.get(tree, 1.0 + 0.35 * (tree.top_k - 1))


def _is_chain(tree: Tree) -> bool:
    return not isinstance(tree, StaticTree) and tree.top_k == 1
