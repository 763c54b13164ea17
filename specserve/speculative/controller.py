"""The controller chooses the tree of the next step: the one that promises the most tokens per second for the whole
batch.

The promise is (expected tokens) / (cost). Costs are measured when the server starts, and corrected by what steps take
in service (`costs`). Now and then one step looks at another way than the best: soon after a change from plain decoding
to speculation or back, since that may have been a mistake, and then more and more rarely.

A chain of length K is expected to emit 1 + sum over d <= K of p_1 ... p_d tokens, where p_d is the sequence's
acceptance at depth d, estimated while serving. A tree's acceptance at each depth is 1 - (1 - p)^lift, with a lift of
its own that is estimated as well. Where the draft says how sure it is of a sequence, that moves p as far as it has
proved right (`confidence`). Plain decoding is one of the choices, so a head that does not pay costs nothing but the
looks.

The controller is host code. It knows nothing of requests or devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specserve.speculative.confidence import Calibration, Surety
from specserve.speculative.costs import ServedCosts, Shape
from specserve.speculative.tree import StaticTree, Tree

MAX_DEPTH = 16  # acceptance beyond is taken for that at this depth
UNKNOWN_PRIOR = 0.5  # acceptance where a head says nothing of its own
SLOT_RATE, PRIOR_RATE, LIFT_RATE = 0.08, 0.01, 0.02  # how fast estimates follow what is seen
LOOK_STEPS = 64  # after so many steps, one looks whether another way would pay more by now
FIRST_LOOK_STEPS = 8  # the same after speculation has begun or ended; then twice as many, up to that
NEAR = 0.95  # speculation that promises less than this much of what plain decoding does is far from paying
LOYALTY = 1.02  # another way must promise more than this much of what the current one does


@dataclass(eq=False)
class Estimate:
    """The conditional acceptance of one sequence's draft tokens, by depth."""

    accept_rate: np.ndarray  # [MAX_DEPTH] float64
    max_depth: int = MAX_DEPTH  # draft tokens that its request lets a step accept
    surety: Surety | None = None  # how sure the draft is of it; None where it says nothing


@dataclass(eq=False)
class _Way:
    """The way that steps of one kind go at present, and when they look at another."""

    tree: Tree | None
    num_looks: int = 0
    num_steps: int = 0  # since the last look
    patience: int = FIRST_LOOK_STEPS  # steps from one look to the next


@dataclass(eq=False)
class Controller:
    """Chooses trees by measured costs and estimated acceptance.

    `costs` are seconds per step; a shape that has none is never chosen. `prior` is the head's own acceptance by depth,
    from its evaluation.
    """

    costs: Mapping[Shape, float]
    prior: Sequence[float] = ()
    calibration: Calibration = field(default_factory=Calibration)
    is_following: bool = True  # whether speculation may pay soon, so that the draft should keep up with plain steps
    _lift: dict[Tree, float] = field(default_factory=dict)
    # By batch size and the ways that there are: steps with a token mask have fewer, and a schedule of their own.
    _ways: dict[tuple[int, frozenset[Tree | None]], _Way] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._served = ServedCosts(self.costs)
        self.expect(self.prior)

    def expect(self, prior: Sequence[float]) -> None:
        """Begin anew with a head of this acceptance by depth. Estimates that were started before belong to the old
        head."""
        self._lift.clear()
        self.calibration.forget()
        rates = [*prior] or [UNKNOWN_PRIOR]
        rates += [rates[-1]] * (MAX_DEPTH - len(rates))
        self._prior = np.clip(np.array(rates[:MAX_DEPTH]), 0.02, 0.98)

    def start(self, max_depth: int | None) -> Estimate:
        """The estimate for a new sequence, which is what is known of the head so far. `max_depth` is the request's
        bound, None for none."""
        return Estimate(self._prior.copy(), MAX_DEPTH if max_depth is None else max_depth)

    def expected_tokens(self, estimate: Estimate, tree: Tree | None) -> float:
        """Return how many tokens a step over this tree is expected to emit for the sequence, the bonus
        token included."""
        if tree is None or estimate.max_depth == 0:
            return 1.0
        reach = np.cumprod(self._rates(self._foreseen(estimate, tree), tree))
        return 1.0 + float(reach[: estimate.max_depth].sum())

    def choose(
        self, estimates: Sequence[Estimate], trees: Sequence[Tree | None], batch_size: int, width: int
    ) -> Tree | None:
        """The tree for the next step of these sequences, out of `trees`, which are those compiled for the batch bucket.
        None stands for plain decoding."""
        known = [tree for tree in trees if (batch_size, width, tree) in self.costs]
        if not known:
            return trees[0]
        speculative = [tree for tree in known if tree is not None]
        kind = batch_size, frozenset(known)
        is_wanted = any(estimate.max_depth for estimate in estimates)  # else it says nothing of whether drafts pay
        way = self._ways.get(kind) if is_wanted else None
        promises = {tree: self._promise(estimates, batch_size, width, tree) for tree in known}
        if way is not None:
            promises[way.tree] *= LOYALTY
        best = max(known, key=promises.__getitem__)
        self.is_following = any(promises[tree] > NEAR * promises[best] for tree in speculative)
        if not is_wanted:
            return best
        way = self._ways.setdefault(kind, _Way(best))
        if (best is None) != (way.tree is None):
            way.num_steps, way.patience = 0, FIRST_LOOK_STEPS
        way.tree = best
        way.num_steps += bool(speculative)
        if way.num_steps >= way.patience:
            way.num_steps, way.patience = 0, min(2 * way.patience, LOOK_STEPS)
            way.num_looks += 1
            look = self._look(estimates, known, way, batch_size, width)
            if look != best:
                return look
        for estimate in estimates if best is None else ():
            if estimate.surety is not None:
                estimate.surety.fade()
        return best

    def _look(
        self,
        estimates: Sequence[Estimate],
        known: Sequence[Tree | None],
        way: _Way,
        batch_size: int,
        width: int,
    ) -> Tree | None:
        """Return a way to try once. It is the one that would promise most, of those that speculate, if it were off its
        measured cost no more than others are, whatever its own steps seemed to take. Every second time, and where there
        is no such way, it is plain decoding."""
        others = [tree for tree in known if tree not in (None, way.tree)]
        if way.tree is not None and None in known and (way.num_looks % 2 or not others):
            return None

        def hope(tree: Tree) -> float:
            tokens = sum(self.expected_tokens(estimate, tree) for estimate in estimates)
            return tokens / self._served.hoped_seconds(batch_size, width, tree)

        return max(others, key=hope, default=way.tree)

    def speedup(self, estimates: Sequence[Estimate], batch_size: int, width: int, tree: Tree | None) -> float:
        """The tokens per second that the step promises, over those of a plain step. 1 where either cost is unknown."""
        known = {(batch_size, width, None), (batch_size, width, tree)} <= self.costs.keys()
        if not known or not estimates:
            return 1.0
        tokens = sum(self.expected_tokens(estimate, tree) for estimate in estimates)
        plain, seconds = (self._served.seconds(batch_size, width, each) for each in (None, tree))
        return tokens / len(estimates) * plain / seconds

    def observe(self, estimate: Estimate, tree: Tree, n_accepted: int, confidence: np.ndarray | None = None) -> None:
        """Learn that a step of this tree accepted `n_accepted` draft tokens of the sequence, of which the draft was so
        sure, [depth]."""
        rates = self._rates(estimate.accept_rate[: tree.depth], tree)
        last = min(len(rates), estimate.max_depth)
        num_seen = min(n_accepted + 1, last)  # the first rejection is the last thing seen
        if not num_seen:
            return
        is_accepted = np.arange(num_seen) < n_accepted
        if confidence is not None:
            foreseen = self._rates(self._foreseen(estimate, tree), tree)[:num_seen]
            estimate.surety = self.calibration.observe(
                estimate.surety, confidence[:MAX_DEPTH], is_accepted - foreseen, int(is_accepted.sum()), MAX_DEPTH
            )
        surprise = is_accepted - rates[:num_seen]
        lift = self._lift_of(tree) * (1 + LIFT_RATE * surprise.sum())
        if num_seen == last:  # what is deeper than anybody looks goes with it, else a longer chain is never tried
            surprise = np.pad(surprise, (0, MAX_DEPTH - last), mode="edge")
        seen = slice(0, len(surprise))
        estimate.accept_rate[seen] = np.clip(estimate.accept_rate[seen] + SLOT_RATE * surprise, 0.02, 0.98)
        self._prior[seen] = np.clip(self._prior[seen] + PRIOR_RATE * surprise, 0.02, 0.98)
        if not _is_chain(tree):
            self._lift[tree] = float(np.clip(lift, 1.0, 8.0))

    def observe_seconds(self, batch_size: int, width: int, tree: Tree | None, seconds: float) -> None:
        """Learn that a step of this shape took so many seconds in service."""
        self._served.observe(batch_size, width, tree, seconds)

    def _promise(self, estimates: Sequence[Estimate], batch_size: int, width: int, tree: Tree | None) -> float:
        tokens = sum(self.expected_tokens(estimate, tree) for estimate in estimates)
        return tokens / self._served.seconds(batch_size, width, tree)

    def _foreseen(self, estimate: Estimate, tree: Tree) -> np.ndarray:  # [depth]
        return self.calibration.moved(estimate.accept_rate[: tree.depth], estimate.surety)

    def _rates(self, rates: np.ndarray, tree: Tree) -> np.ndarray:  # [depth] -> [depth]
        """Return the acceptance by depth of a tree, for a sequence in which a chain accepts at these rates."""
        return rates if _is_chain(tree) else 1.0 - (1.0 - rates) ** self._lift_of(tree)

    def _lift_of(self, tree: Tree) -> float:
        """The lift of a tree. Before anything is observed, more children help, each less than the one before."""
        return self._lift.get(tree, 1.0 + 0.35 * (tree.top_k - 1))


def _is_chain(tree: Tree) -> bool:
    return not isinstance(tree, StaticTree) and tree.top_k == 1
