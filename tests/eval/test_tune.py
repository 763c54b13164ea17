"""`specserve tune`: what it finds is what wins, what it spares could not win, and a server takes its profile for what
was measured and nothing else."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from specserve.checkpoints.load import Target
from specserve.cli.tune import pays_line, profile_table
from specserve.drafters.speculation import describe, parse_speculation
from specserve.errors import ConfigError
from specserve.eval import tune as tuning
from specserve.eval.bench.cells import TimedAnswer, steady
from specserve.eval.replay import Replayed
from specserve.eval.settings import TuneRun
from specserve.eval.tune import Timed, can_win, is_near, measure_live, parse_trees, sensible_trees, tune, undominated
from specserve.serve.launch import Models, choose_trees, make_engine, profile_facts
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.settings import ServeRun
from specserve.serve.tuned import Entry, Profile, find_profile, profile_file, read_profile
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.tree import Tree, chain

FACTS = {"target": "a", "head": "b"}
ENTRIES = (
    Entry(1, "tree:3x2x5", 2.5, 10.0, 15.0, 1.66, 1.6, 2.4),
    Entry(2, "chain:2", 2.1, 12.0, 20.0, 1.26),
    Entry(4, "off", 1.0, 20.0, 20.0, 1.0),
)


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def models(shallow_target: Target) -> Models:
    head = tiny.random_head(shallow_target.config, seed=1)
    return Models("tiny", shallow_target, head, None, "of the target", "of the head")


def _replayed(tree: Tree, tokens_per_step: float) -> Replayed:
    return Replayed(tree, Acceptance(1000, 0, (0,)), round(1000 * tokens_per_step))


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = Profile(FACTS, ENTRIES, {"names": {"target": "x"}})
    profile.write(tmp_path / "new" / "profile.json")
    assert read_profile(tmp_path / "new" / "profile.json") == profile
    assert profile.pays_at == (1, 2)
    assert [describe(tree) for _, tree in profile.trees] == ["tree:3x2x5", "chain:2", "off"]
    assert find_profile(FACTS, str(tmp_path / "new" / "profile.json")) == profile
    assert profile_table(profile).row_count == 3
    assert "pays at 1, 2 at once" in pays_line(profile)
    assert [is_near(entry) for entry in (*ENTRIES, dataclasses.replace(ENTRIES[0], measured_gain=1.4))] == [
        *[True] * 3,
        False,
    ]


def test_what_was_slower_when_tried_is_not_served(tmp_path: Path) -> None:
    tried = dataclasses.replace(ENTRIES[1], measured_gain=0.9, measured_tau=2.0)
    profile = Profile(FACTS, (ENTRIES[0], tried, ENTRIES[2]))
    assert profile.losses == (tried,)
    profile.without_losses().write(tmp_path / "profile.json")
    kept = read_profile(tmp_path / "profile.json")
    assert [describe(tree) for _, tree in kept.trees] == ["tree:3x2x5", "off", "off"]
    assert (kept.pays_at, kept.losses) == ((1,), ())
    assert kept.details["slower_when_tried"]["2"]["measured_gain"] == 0.9
    assert Profile(FACTS, ENTRIES).without_losses() == Profile(FACTS, ENTRIES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"facts": {"target": "a", "head": "other"}}, "measured for something else .head other instead of b"),
        ({"facts": {"target": "a", "head": "b", "mesh": "2"}}, "mesh 2 instead of none"),
        ({"specserve_profile": 7}, "version is 7, expected 1"),
        ({"batch_sizes": {}}, "not a profile"),
        ({"batch_sizes": {"1": {"speculation": "eagle"}}}, "not a profile"),
        ({"batch_sizes": [1]}, "not a profile"),
    ],
)
def test_a_profile_of_something_else_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**Profile(FACTS, ENTRIES).to_json(), **change}))
    with pytest.raises(ConfigError, match=message):
        find_profile(FACTS, str(file))


def test_a_server_refuses_a_profile_of_another_head(models: Models, tmp_path: Path) -> None:
    """By its file, by the kept one that is not there, and where there is no head at all."""
    Profile(profile_facts(models, ServeRun()), ENTRIES).write(tmp_path / "profile.json")
    other = dataclasses.replace(models, head_fingerprint="of another")
    run = ServeRun(speculation="tuned", tuned_profile=str(tmp_path / "profile.json"))

    def start(models: Models, run: ServeRun) -> None:
        make_engine(models, run, lambda *_report: None)

    with pytest.raises(ConfigError, match="head of the head instead of of another"):
        start(other, run)
    with pytest.raises(ConfigError, match=r"nothing was tuned for this target.*specserve tune"):
        start(models, ServeRun(speculation="tuned"))
    with pytest.raises(ConfigError, match="no draft head for tiny"):
        start(dataclasses.replace(models, head=None), run)
    with pytest.raises(ConfigError, match="--tuned-profile is read with --speculation tuned alone"):
        start(models, dataclasses.replace(run, speculation="auto"))
    with pytest.raises(ConfigError, match="--deterministic"):
        start(models, dataclasses.replace(run, deterministic=True))


def test_a_tuned_server_makes_steps_of_the_profile_s_trees_alone(models: Models) -> None:
    trees = Profile(FACTS, ENTRIES).trees
    ways = choose_trees(models, ServeRun(speculation="tuned"), trees)
    assert ways == (None, parse_speculation("tree:3x2x5"), chain(2))
    shapes = make_shapes(
        ways,
        num_slots=8,
        max_model_len=64,
        page_size=8,
        num_pages=64,
        is_recurrent=False,
        reads_by_page=False,
        is_deterministic=False,
        tuned=trees,
    )
    found = {size: [describe(tree) for tree in shapes.trees_for(size)] for size in shapes.batch_sizes}
    assert found == {1: ["off", "tree:3x2x5"], 2: ["off", "chain:2"], 4: ["off"], 8: ["off"]}
    assert shapes.trees_for(3) == (None,), "a size that was not measured goes by the next larger one"


def test_what_is_spared_could_not_have_won() -> None:
    """Over random costs that obey the two rules the search finds the tree that timing all would have found."""
    rng = np.random.default_rng(3)
    trees = [chain(depth) for depth in (1, 2, 3, 5)] + parse_trees(["tree:3x2x5", "tree:4x2x7", "tree:4x3x12"])
    spared = 0
    for _ in range(200):
        worth = [_replayed(tree, 1 + rng.random() * 2) for tree in trees]
        costs = {}
        for size, tree in itertools.product((1, 2, 4), trees):
            below = [cost for (n, other), cost in costs.items() if n <= size and tuning.is_smaller(other, tree)]
            costs[size, tree] = max(below, default=1.0) * (1 + rng.random())
        plain = {1: 1.0, 2: 1.3, 4: 1.8}
        timed: list[Timed] = []
        for size in (1, 2, 4):
            gains = {each.tree: each.tokens_per_step * plain[size] / costs[size, each.tree] for each in worth}
            best = 1.0
            for each in worth:
                if can_win(each, size, timed, best):
                    timed.append(Timed(size, each.tree, plain[size], costs[size, each.tree]))
                    best = max(best, gains[each.tree])
                else:
                    spared += 1
            assert best == max(1.0, *gains.values())
    assert spared > 500


def test_a_gain_is_not_that_of_the_luckiest_figure() -> None:
    """Over noisy times, what is promised is near what is true of the tree, on average; and it is a good tree."""
    rng = np.random.default_rng(5)
    trees = [chain(depth) for depth in (1, 2, 3, 4)] + parse_trees(["tree:2x2x3", "tree:3x2x5", "tree:4x2x7"])
    worth = [_replayed(tree, 1.3 + 0.1 * tree.num_nodes) for tree in trees]
    cost = {tree: 1.0 + 0.08 * tree.num_nodes for tree in trees}  # all gain about as much
    true = {each.tree: each.tokens_per_step / cost[each.tree] for each in worth}

    def time_tree(tree: Tree, *, batch: int) -> tuple[float, float]:
        assert batch == 2
        moment, plain, step = np.exp([0.5, 0.1, 0.1] * rng.standard_normal(3))
        return moment * plain, moment * cost[tree] * step

    told, naive, good = [], [], []
    for _ in range(400):
        timed = tuning.time_all(time_tree, [2], worth, lambda *_: None)
        lucky = max(timed, key=lambda found: true[found.tree] * cost[found.tree] * found.plain / found.step)
        naive.append(cost[lucky.tree] * lucky.plain / lucky.step)
        again = tuning.time_again(time_tree, 2, worth, timed)
        assert again[-1].tree in {found.tree for found in again[:-1]}
        tree, entry = again[-1].tree, tuning._best(worth, again)
        gain = true[tree] * cost[tree] * again[-1].plain / again[-1].step
        assert entry.predicted_gain == pytest.approx(max(1.0, gain))
        told.append(gain / true[tree])
        good.append(true[tree] / max(true.values()))
    assert np.mean(naive) > 1.15, "what this is against"
    assert abs(np.mean(told) - 1) < 0.05
    assert np.mean(good) > 0.95


def test_trees_that_bring_no_more_than_smaller_ones_are_left_out() -> None:
    brings = {"chain:1": 1.5, "chain:2": 1.9, "chain:3": 1.92, "tree:2x2x3": 1.95, "tree:2x2x4": 2.2}
    found = undominated([_replayed(parse_trees([text])[0], value) for text, value in brings.items()])
    assert [describe(each.tree) for each in found] == ["chain:1", "chain:2", "tree:2x2x3", "tree:2x2x4"]
    with pytest.raises(ConfigError, match="that a head proposes alone"):
        parse_trees(["chain:2", "head+suffix:3"])
    trees = sensible_trees()
    assert len(set(trees)) == len(trees)
    assert all(parse_speculation(describe(tree)) == tree for tree in trees)


def test_the_steady_part_of_answers_is_when_all_of_them_run() -> None:
    early = TimedAnswer(begin=0.0, arrivals=[1.0, 2.0, 3.0], sizes=[1, 2, 2])
    late = TimedAnswer(begin=1.0, arrivals=[0.5, 1.25, 3.0], sizes=[1, 3, 1])  # at 1.5, 2.25 and 4
    assert steady([early, late]) == (2 + 2 + 3, 1.5)
    assert steady([early]) == (4, 2.0)


@pytest.mark.slow
def test_from_recording_to_a_server_that_is_tuned(models: Models, tmp_path: Path) -> None:
    """A random head never pays where its steps cost anything, so the profile is made to say that it does."""
    run = TuneRun(max_slots=1, max_model_len=96, max_tokens=12, repeats=3, trees=("chain:2", "tree:2x2x4"))
    prompts = [[3 + (7 * i + j) % 60 for j in range(4 + i)] for i in range(4)]
    seen: list[str] = []
    found = tune(models, run, prompts, lambda what, _done, _total: seen.append(what))
    assert {"recording answers", "timing chain:2 for 1"} <= set(seen)
    assert [entry.batch_size for entry in found.profile.entries] == [1]
    assert found.num_answers == 4
    taus = {describe(each.tree): each.acceptance.tau for each in found.replayed}
    forced = Entry(1, "chain:2", taus["chain:2"], 1.0, 1.0, 1.5)
    profile = dataclasses.replace(found.profile, entries=(forced,))
    file = profile_file(profile.facts)
    profile.write(file)
    measured = measure_live(models, run, profile, str(file), prompts)
    assert all(entry.measured_gain and entry.measured_tau for entry in measured.entries)
    measured.write(file)
    assert read_profile(file) == dataclasses.replace(measured, details=json.loads(json.dumps(dict(measured.details))))
    with make_engine(
        models,
        ServeRun(speculation="tuned", max_slots=1, max_model_len=96, early_ready=False, constrained=False),
        lambda *_: None,
    ) as engine:
        assert engine.speculation == "tuned"
        engine.set_speculation("chain:2")
        engine.set_speculation("tuned")
        with pytest.raises(ConfigError, match="there are: tuned, off, chain:2"):
            engine.set_speculation("chain:3")
