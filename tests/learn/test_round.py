"""A round of learning: what it makes, and which head it chooses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import served
import tiny
from hypothesis import example, given
from hypothesis import strategies as st

from specserve.checkpoints.load import Target, load_target
from specserve.data.dataset import Prompt
from specserve.data.sources import load_mixture
from specserve.drafters.interface import Head
from specserve.errors import CheckpointError, DataError
from specserve.interop.head import load_head, save_head
from specserve.interop.notes import read_notes
from specserve.learn import round as round_
from specserve.learn.learner import LearnerProcess
from specserve.learn.round import ANSWER_TOKENS, FIRST_SHARE, LEARNT, WHOLE, _hold_back, _measure, choose, learn
from specserve.learn.selection import Selection
from specserve.learn.task import HEAD, ROUND, TRAFFIC, Contender, RoundTask
from specserve.learn.traffic import ServedAnswer, Traffic
from specserve.mesh import default_dtype
from specserve.serve.llm import LLM
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.intervals import tau_difference
from specserve.speculative.sampling import DrawOptions
from specserve.tokenizer import Tokenizer
from specserve.train.acceptance import AcceptanceMeter, Arm
from specserve.train.run.prepare import load_data

NUM_ANSWERS = 160


def _tau(found: list[Acceptance]) -> float:
    return sum(found, Acceptance()).tau


_accepted = st.lists(st.integers(0, 3), min_size=12, max_size=12)
_contenders = st.fixed_dictionaries(
    {"static": _accepted, "served": _accepted, "candidate": _accepted}, optional={"returned": _accepted}
)


# better than the served head for sure, and not above a static one of which that is not sure
_BELOW_STATIC: dict[Contender, list[int]] = {
    "static": [3] * 7 + [0] * 5,
    "served": [1] * 12,
    "candidate": [2] * 8 + [1] * 4,
}


@example(_BELOW_STATIC, 0, False)
@given(_contenders, st.integers(-3, 3), st.booleans())
def test_a_round_never_leaves_a_head_that_it_shows_to_be_below_the_static_one(
    given_counts: dict[Contender, list[int]], gain: int, is_static: bool
) -> None:
    """The rollback law: whatever was learnt, and from whatever stream. And nothing new serves that is not shown to be
    better than what serves; of two that are, the better one, also where it was given up before."""
    counts = dict(given_counts)
    if gain:  # one contender far from another, as chance alone seldom brings
        counts["candidate"] = [min(3, max(0, number + gain)) for number in counts["served"]]
    if is_static:
        counts["served"] = counts["static"]
    found: dict[Contender, list[Acceptance]] = {
        name: [Acceptance(9, 27, (3 * each, 2 * each, each)) for each in own] for name, own in counts.items()
    }
    choice = choose(found, ["a"] * 12)
    learnt: tuple[Contender, ...] = ("candidate", "returned") if "returned" in found else ("candidate",)
    for name in ("static", *learnt):
        above = tau_difference(found[name], found[choice])
        assert above is not None
        is_better_than_served = tau_difference(found[name], found["served"])
        assert is_better_than_served is not None
        if name == "static":
            assert above.low <= 0 or choice != "served"
            assert choice == "served" or _tau(found[choice]) >= _tau(found["static"])
        if choice == name:
            assert is_better_than_served.low > 0
        if choice in learnt and name in learnt and is_better_than_served.low > 0 and choice != name:
            assert _tau(found[choice]) >= _tau(found[name]) or _tau(found[name]) < _tau(found["static"])


def test_no_client_outweighs_what_a_head_loses_for_the_others() -> None:
    """Nor do two of them; nor hide it once such a head serves. And none keeps back what most gain from."""

    def measured(garbage: int, others: int) -> list[Acceptance]:
        return [Acceptance(9, 27, (each, each, each)) for each in [garbage] * 16 + [others] * 16]

    clients = [f"bad {i % 2}" for i in range(16)] + [f"client {i % 4}" for i in range(16)]
    worse: dict[Contender, list[Acceptance]] = {
        "static": measured(1, 5), "served": measured(1, 5), "candidate": measured(9, 4)
    }  # fmt: skip
    assert _tau(worse["candidate"]) > _tau(worse["static"])
    assert choose(worse, clients) == "served"
    assert choose(worse | {"served": worse["candidate"]}, clients) == "static"
    better = worse | {"candidate": measured(9, 6)}
    assert choose(better, clients) == "candidate"
    assert choose(better | {"served": better["candidate"]}, clients) == "served"
    clients = ["one"] * 16 + ["other"] * 8 + ["third"] * 8
    most: dict[Contender, list[Acceptance]] = {
        "static": measured(5, 5), "served": measured(5, 5), "candidate": measured(4, 8)
    }  # fmt: skip
    assert choose(most, clients) == "candidate"
    assert choose(most | {"served": most["candidate"]}, clients) == "served"


def test_a_version_that_was_given_up_serves_again_where_it_is_better() -> None:
    """It fell when the traffic became harder for each head, and not it alone: so on the same prompts it is better."""

    def measured(accepted: int) -> list[Acceptance]:
        return [Acceptance(9, 27, (accepted, accepted, accepted))] * 16

    three: dict[Contender, list[Acceptance]] = {
        "static": measured(3), "served": measured(3), "candidate": measured(4), "returned": measured(5)
    }  # fmt: skip
    assert choose(three, ["a"] * 16) == "returned"
    assert choose(three | {"candidate": measured(6)}, ["a"] * 16) == "candidate"
    assert choose(three | {"returned": measured(3), "candidate": measured(3)}, ["a"] * 16) == "served"
    assert choose(three | {"served": measured(5)}, ["a"] * 16) == "served"
    assert choose(three | {"static": measured(6)}, ["a"] * 16) == "static"


@pytest.fixture(scope="module")
def task(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> RoundTask:
    """Of a server whose traffic is greedy answers to some prompts, with a random head."""
    folder = tmp_path_factory.mktemp("learning")
    model = served.write_folder(tiny_target, folder / "model")
    target = load_target(model, dtype="float32")
    save_head(folder / "static", tiny.random_head(target.config, 1), target, dtype="float32", notes={})
    rng = np.random.default_rng(0)
    prompts = [tuple(int(i) for i in rng.integers(3, 64, rng.integers(4, 20))) for _ in range(NUM_ANSWERS)]
    options: dict[str, Any] = {"speculation": "off", "max_slots": 4, "max_model_len": 64, "constrained": False}
    with LLM(model, **options) as llm:
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        answers = [found.outputs[0].token_ids for found in llm.generate(prompts, params)]
    traffic = Traffic(folder / TRAFFIC, most_bytes=10**9, most_seconds=1e9)
    for prompt, answer in zip(prompts, answers, strict=True):
        traffic.keep(ServedAnswer(prompt, tuple(answer), "a", "0"))
    traffic.close()
    static = str(folder / "static")
    return RoundTask(str(folder), str(model), static, static, "eagle3", "chain:2", 40, 0, learning_rate=5e-3)


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # optax raises a Python float to an int32 power
def test_a_round_learns_the_traffic_and_undoes_what_is_poisoned(task: RoundTask, tmp_path: Path) -> None:
    """The candidate is better on prompts that it has not seen, and is chosen; it is a head like the served one. Where a
    poisoned head serves, whose candidate is no better than the static head, the round goes back to that. A static head
    that is poor does not hold the candidate back, and one that is good does."""
    found = learn(task)
    assert (found.choice, found.num_train + found.num_held_out) == ("candidate", NUM_ANSWERS), found.text
    assert found.learnt == 1.0
    assert found.gain is not None
    assert found.gain[0] > 0
    assert found.taus["static"] == found.taus["served"] < found.taus["candidate"]
    target = load_target(Path(task.target), dtype="float32")
    static, candidate = Path(task.static), Path(task.folder) / ROUND / HEAD
    heads = [load_head(each, target, dtype="float32") for each in (static, candidate)]
    assert heads[0].drafter == heads[1].drafter
    np.testing.assert_array_equal(heads[0].target_ids, heads[1].target_ids)
    learnt = candidate.rename(tmp_path / "learnt")
    poisoned = dataclasses.replace(task, static=str(learnt), learning_rate=1e-9)
    undone = learn(poisoned)
    assert (undone.choice, undone.learnt) == ("static", LEARNT), undone.text
    assert undone.taus["static"] == found.taus["candidate"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_candidate_is_the_mean_of_what_training_made_and_the_static_head(
    tiny_target: Target, tmp_path: Path, dtype: str
) -> None:
    """In every leaf, whatever dtype its file has. A head of another shape has no mean with the static one, and is
    refused."""
    static, trained = (tiny.random_head(tiny_target.config, seed) for seed in (1, 2))
    trained = dataclasses.replace(trained, target_ids=static.target_ids)
    save_head(tmp_path / "static", static, tiny_target, dtype=dtype, notes={})
    save_head(tmp_path / ROUND / WHOLE, trained, tiny_target, dtype=dtype, notes={"steps": 3})
    task = RoundTask(str(tmp_path), "target", str(tmp_path / "static"), "served", "eagle3", "chain:2", 1, 0)
    _hold_back(task, trained, tiny_target, dtype)
    candidate = load_head(tmp_path / ROUND / HEAD, tiny_target, dtype="float32")
    leaves = [jax.tree.leaves(load_head(tmp_path / "static", tiny_target, dtype="float32").params)]
    leaves += [jax.tree.leaves(each.params) for each in (trained, candidate)]
    for first, learnt, mean in zip(*leaves, strict=True):
        np.testing.assert_allclose(
            mean, LEARNT * learnt + (1 - LEARNT) * first, rtol=1e-6 if dtype == "float32" else 8e-3
        )
    assert read_notes(tmp_path / ROUND / HEAD)["steps"] == 3
    other = dataclasses.replace(trained, target_ids=trained.target_ids[::-1])
    with pytest.raises(CheckpointError, match="served: a head of another kind"):
        _hold_back(task, other, tiny_target, dtype)


def test_contenders_are_judged_by_the_options_of_the_traffic(
    tiny_target: Target, tiny_head: Head, tmp_path: Path
) -> None:
    """The judge's tau is the one that such requests see."""
    for folder in (tmp_path / "static", tmp_path / ROUND / HEAD, tmp_path / ROUND / WHOLE):
        save_head(folder, tiny_head, tiny_target, dtype="float32", notes={})
    static, rng = str(tmp_path / "static"), np.random.default_rng(0)
    prompts = [tuple(int(i) for i in rng.integers(3, 64, 9)) for _ in range(8)]
    both = DrawOptions(), DrawOptions(1.5, top_k=9, presence_penalty=1.0)
    held_out = [ServedAnswer(prompt, (5, 6), "a", "0", both[i % 2]) for i, prompt in enumerate(prompts)]
    task = RoundTask(str(tmp_path), "target", static, static, "eagle3", "chain:2", 1, 0, returned=static)
    found = _measure(task, tiny_target, held_out)
    head, arm = load_head(Path(static), tiny_target, dtype=default_dtype()), Arm("chain:2")
    asked = [Prompt("traffic", list(prompt)) for prompt in prompts]
    meter = AcceptanceMeter(tiny_target, head.drafter, [arm], asked, max_new_tokens=ANSWER_TOKENS)
    alike = [meter.measure(head.params, head.target_ids, arm, [own] * len(asked)).by_prompt for own in both]
    expected = [alike[i % 2][i] for i in range(len(prompts))]
    assert expected != [*alike[0]]
    assert [*found["static"]] == [*found["candidate"]] == [*found["whole"]] == [*found["returned"]] == expected


def test_a_quarter_of_what_a_round_trains_on_is_the_heads_first_data(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows, whatever the lengths: what `--learn-data` names, which is read once, as later rounds take the part of it
    that the folder keeps."""
    model = served.write_folder(tiny_target, tmp_path / "model")
    first, own = tmp_path / "first.jsonl", tmp_path / "learn"
    (own / ROUND).mkdir(parents=True)
    rows = [{"input_ids": [7, i] * 60, "loss_mask": [0, 1] * 60, "split": "train"} for i in range(3, 13)]
    first.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = RoundTask(str(own), str(model), "head", "head", "eagle3", "chain:2", 1, 0, first_data=(str(first),))
    answers = [ServedAnswer((5, 6, i), (7, 8), "a", "0") for i in range(3, 33)]
    runs: list[Any] = []

    def stop(run: Any, _own: Any) -> None:
        runs.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(round_, "prepare", stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            round_._train(task, Selection(tuple(answers), ()))
        first.unlink(missing_ok=True)
    for run in runs:
        traffic, kept = load_mixture(run.data.source, vocab_size=tiny_target.config.vocab_size)
        assert (len(traffic.train), len(kept.train)) == (30, 10)
        tokenizer = Tokenizer.load(model)
        size = tiny_target.config.vocab_size
        packed = load_data(run.target, run.data, run.train, (traffic, kept), tokenizer, model, size)[0].rows
        numbers = np.diff([*packed.source_starts, len(packed)]) * packed.weights
        assert numbers[1] / sum(numbers) == pytest.approx(FIRST_SHARE, rel=1e-3)


def test_too_little_traffic_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 answers to train on and 0 held out; a round needs"):
        learn(RoundTask(str(tmp_path), "target", "head", "head", "kind", "chain:3", 1, 0))


def test_a_round_that_fails_says_why(tmp_path: Path) -> None:
    """Whatever it is that fails: here the folder of its round cannot be made."""
    (tmp_path / "file").write_text("")
    task = RoundTask(str(tmp_path / "file"), "target", "head", "head", "eagle3", "chain:2", 1, 0)
    found = LearnerProcess(task, lambda: False).result()
    assert isinstance(found, str)
    assert "status 1: " in found
    assert str(tmp_path / "file") in found
