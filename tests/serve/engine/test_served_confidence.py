"""How sure a head is of each row reaches the choice of trees, as the row's own; and no token depends on it."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import MAX_LEN, Ask, Reference, compile_programs, make_engine, make_runner, run, serving
from rounding import UNIT, assert_within

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.controller import Controller, Estimate
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree

MARKOV = {"markov_rank": 4, "confidence": "state and token", "has_confidence_bias": True, "foresees_anchor": True}
SURE, UNSURE = 2.0, -2.0  # log-odds after even tokens, and after odd ones
TREES = parse_speculation("chain:1"), parse_speculation("chain:3")


class Listener(Controller):
    """One that trusts what is reported to it, and remembers it."""

    def __init__(self) -> None:
        super().__init__({StepProgram(2, width, tree): 1 + 0.25 * tree.depth for tree in TREES for width in range(99)})
        self.said: dict[int, list[tuple[float, int]]] = {}  # by sequence: how sure of the first draft; accepted
        self.chosen: list[tuple[float, int]] = []  # by how much rows are surer than usual, together; depth

    def choose(
        self, estimates: Sequence[Estimate], choices: Sequence[StepProgram], num_unread: int = 0, num_unseen: int = 0
    ) -> StepProgram:
        self.calibration.trust = 1.0
        program = super().choose(estimates, choices, num_unread, num_unseen)
        assert program.tree is not None
        self.chosen.append((sum(each.surety.off[0] for each in estimates if each.surety), program.tree.depth))
        return program

    def observe(
        self, estimates: Sequence[Estimate], tree: Tree, n_accepted: np.ndarray, confidence: np.ndarray | None = None
    ) -> None:
        assert confidence is not None
        assert confidence.shape == (len(estimates), tree.depth)
        for estimate, sure, number in zip(estimates, confidence[:, 0].tolist(), n_accepted.tolist(), strict=True):
            self.said.setdefault(id(estimate), []).append((sure, number))
        super().observe(estimates, tree, n_accepted, confidence)


@pytest.fixture
def scripted_head(tiny_target: Target) -> Head:
    """Its confidence is a function of the token before alone."""
    shape = {"num_layers": 1, "block_size": 4, "aux_layers": (0, 2, 4)}
    head = tiny.random_joint_head(tiny_target.config, seed=1, changes=MARKOV, **shape)
    markov = head.params.markov
    side = jnp.where(jnp.arange(len(markov.previous)) % 2, UNSURE, SURE)
    weight = jnp.zeros_like(markov.confidence.weight).at[-MARKOV["markov_rank"]].set(1.0)
    confidence = dataclasses.replace(markov.confidence, weight=weight, bias=jnp.zeros(1))
    markov = dataclasses.replace(markov, previous=markov.previous.at[:, 0].set(side), confidence=confidence)
    return dataclasses.replace(head, params=dataclasses.replace(head.params, markov=markov))


def test_each_row_is_heard_and_no_token_changes(tiny_target: Target, scripted_head: Head, kept: Path | None) -> None:
    ways = "chain:1", "chain:3"
    runner = make_runner(tiny_target, scripted_head, *ways, num_slots=2, has_constrained=False, folder=kept)
    compile_programs(runner)
    reference, rng, controller = Reference(tiny_target, kept), np.random.default_rng(0), Listener()
    # hot, where the shared noise decides, so that a random head is accepted often
    hot = [SamplingParams(seed=i, temperature=4.0, max_tokens=MAX_LEN // 2, ignore_eos=True) for i in range(20)]
    asks = [Ask(tuple(rng.integers(3, 60, 9).tolist()), params) for params in hot]
    with reference.engine, serving(make_engine(runner, controller)) as engine:
        asks = list(itertools.islice(reference.firm(asks), 3))
        inboxes = run(engine, asks)
        stats = engine.stats()
        for ask, inbox in zip(asks, inboxes, strict=True):
            reference.check(ask, inbox)
    reported = [*controller.said.values()]
    assert len(reported) == len(asks)
    for inbox, said in zip(inboxes, reported, strict=True):
        roots = np.cumsum([0, *[1 + n_accepted for _, n_accepted in said[:-1]]])
        log_odds = np.where(np.array(inbox.token_ids)[roots] % 2, UNSURE, SURE)
        log_share = -np.log1p(np.exp(-log_odds))
        # an exponential and a logarithm are off by a unit in the last place (2 UNIT), their sum by half of one; then
        # the share is another exponential, whose argument was off by that
        bound = (5 * np.abs(log_share) + 2) * UNIT * np.exp(log_share)
        assert_within([sure for sure, _ in said], np.exp(log_share), bound)
    deep, shallow = ([off for off, depth in controller.chosen if depth == each] for each in (3, 1))
    assert np.mean(deep) > np.mean(shallow)
    assert stats.num_promised > 0
    assert stats.num_kept == sum(n_accepted for said in reported for _, n_accepted in said)
