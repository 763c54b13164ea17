"""The example of reinforcement learning: its trainer has the distribution of the versions that its engine samples from,
on one device and on meshes, and its head follows."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import grpo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_folder

from specserve import LLM
from specserve.checkpoints.load import load_target
from specserve.drafters.learning import Rows
from specserve.interop.head import load_head, save_head
from specserve.mesh import COMPILE_EVENT
from specserve.models.target import TargetParams
from specserve.train.settings import TrainSettings
from specserve.train.target_states import Outputs

SMALL = {"steps": 3, "questions": 4, "group": 4, "max_tokens": 12, "head_rows": 8, "slots": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target that chats, with random weights, and a head for it."""
    folder = tmp_path_factory.mktemp("rl")
    target = load_target(tiny_folder.write_folder(folder / "target"), dtype="float32")
    head = tiny.random_head(target.config, seed=3)
    save_head(folder / "head", head, target, dtype="float32", notes={})
    return {"target": str(folder / "target"), "draft": str(folder / "head")}


def _run(folders: dict[str, str], output: Path, **changes: Any) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):  # as optax's Adam needs it
        patch.setattr(grpo, "reward", lambda text: float(len(text)))  # of nonsense, which has few words
        grpo.main(**folders, **{**SMALL, "compare_every": 1, "save_every": 1, **changes}, output=output)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


Batch = tuple[TargetParams, Rows, Outputs]


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    """What the head of `rows` is given to learn from."""
    return []


@pytest.fixture(scope="module")
def compiled() -> list[list[str]]:
    """The functions that each step of the head of `rows` compiled."""
    return []


@pytest.fixture(scope="module")
def rows(
    folders: dict[str, str], batches: list[Batch], compiled: list[list[str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    output, learn, follow = tmp_path_factory.mktemp("rows"), grpo.Follower.learn, grpo.Trainer.follow

    def noted(self: grpo.Follower, *given: Any) -> None:
        batches.append(given)
        learn(self, *given)

    def watched(self: grpo.Trainer, number: int, offset: int) -> Any:
        compiled.append([])
        found = follow(self, number, offset)
        compiled.append([])
        return found

    def hear(event: str, _seconds: float, **facts: Any) -> None:
        if event == COMPILE_EVENT and compiled:
            compiled[-1].append(str(facts["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(hear)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo.Follower, "learn", noted)
        patch.setattr(grpo.Trainer, "follow", watched)
        return output, _run(folders, output, arms="co-trained", inner_steps=2, lr=1e-3)


def test_sampler_and_trainer_have_one_distribution_while_policy_and_head_move(
    rows: tuple[Path, list[dict[str, Any]]], folders: dict[str, str]
) -> None:
    """Each step samples the version that the step before has made, whose head is accepted; and what is saved is that
    version."""
    output, found = rows
    assert [(row["step"], row["version"]) for row in found] == [(0, "0"), (1, "step-1"), (2, "step-2")]
    for row in found:
        assert row["most_apart"] < 1e-4
        assert row["gradient_norm"] > 0
        assert row["arms"]["co-trained"]["tau"] > 1
    places = [(Path(folders["target"]), Path(folders["draft"]))]
    places += [(output / f"step-{i}" / "policy", output / f"step-{i}" / "head") for i in (1, 2, 3)]
    targets = [load_target(policy, dtype="float32") for policy, _ in places]
    heads = [load_head(head, target, dtype="float32") for (_, head), target in zip(places, targets, strict=True)]
    for models in (targets, heads):
        for before, after in itertools.pairwise(models):
            pairs = zip(*(jax.tree.leaves(model.params) for model in (before, after)), strict=True)
            assert all(np.any(a != b) for a, b in pairs if a.ndim == 2)


@pytest.mark.usefixtures("rows")
def test_a_step_of_the_head_compiles_nothing_but_the_first_time(compiled: list[list[str]]) -> None:
    """Whichever answers of the step it learns from: else compiling takes longer than learning."""
    first, *later = compiled[::2]
    assert later == [[], []]
    assert first


@jax.numpy_dtype_promotion("standard")
def test_the_head_learns_the_policy_that_it_follows(
    rows: tuple[Path, list[dict[str, Any]]], folders: dict[str, str], batches: list[Batch]
) -> None:
    """With each step it comes nearer to the policy's distribution: on all answers that it learns from, each under the
    version that gave it, its loss is below that of the head of the step before."""
    output, _ = rows
    places = [Path(folders["draft"]), *(output / f"step-{i}" / "head" for i in (1, 2, 3))]
    target = load_target(Path(folders["target"]), dtype="float32")
    settings, losses = TrainSettings(rollout=3), []
    heads = [load_head(place, target, dtype="float32") for place in places]
    judge = grpo.Follower(heads[0], target, settings, None)
    for head in heads:
        losses.append([])
        for version, answers, states in batches:
            state = grpo.Follower(head, target, settings, None).state  # it is donated
            given = dataclasses.replace(answers, features=states)
            _, metrics = judge._step(state, version, judge._vocab, given, jnp.float32(1.0))
            losses[-1].append(float(metrics.loss))
    assert len(batches) == 3
    for before, after in itertools.pairwise(losses):
        assert all(b > a for b, a in zip(before, after, strict=True))


@jax.numpy_dtype_promotion("standard")
def test_the_rate_of_the_head_that_follows_rises(folders: dict[str, str], batches: list[Batch], rows: Any) -> None:
    """Step k of `warmup` moves it by k parts of what a step without would, and one behind that by all of it."""
    assert rows, "they are in the batches"
    target = load_target(Path(folders["target"]), dtype="float32")
    head = load_head(Path(folders["draft"]), target, dtype="float32")
    version, answers, states = batches[0]

    def moved(warmup: int) -> list[float]:
        follower = grpo.Follower(head, target, TrainSettings(rollout=3), None, warmup)
        found, first = [], jax.device_get(follower.state)
        for _ in range(3):
            follower.state = jax.device_put(first)  # the same step anew, at another place of the warm-up
            follower.learn(version, answers, states)
            pairs = zip(*map(jax.tree.leaves, jax.device_get((follower.state.params, first.params))), strict=True)
            found.append(float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))))
        return found

    [whole, *_] = moved(1)
    np.testing.assert_allclose(moved(2), [whole / 2, whole, whole], rtol=1e-3)


@pytest.mark.slow
def test_all_arms_see_the_answers_of_one_policy(
    rows: tuple[Path, list[dict[str, Any]]], folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their heads have learnt; the stale one is the one that follows, as it was when last sent; and an engine
    that begins with what was saved goes on as this one does."""
    (_, alone), update, sent = rows, LLM.update_weights, dict[int, list[Any]]()

    def noted(self: LLM, target: Any = None, draft: Any = None, **options: Any) -> str:
        sent.setdefault(id(self), []).append(draft)
        return update(self, target, draft, **options)

    monkeypatch.setattr(LLM, "update_weights", noted)
    found = _run(folders, tmp_path, inner_steps=2, lr=1e-3, stale_every=2)
    first, second, third = next(drafts for drafts in sent.values() if len(drafts) == SMALL["steps"])
    assert sorted(map(len, sent.values())) == [2, 2, 2, 3]
    assert all(draft is not None for draft in (first, second, third))
    [stale] = (drafts for drafts in sent.values() if len(drafts) == 2 and drafts != [None, None])
    assert stale[0] is None
    assert stale[1] is second
    for one, row in zip(alone, found, strict=True):
        assert row["arms"].keys() == {"plain", "frozen", "stale", "co-trained"}
        assert {arm["differ"] for arm in row["arms"].values()} == {0}
        assert (one["reward"], one["tokens"]) == (row["reward"], row["tokens"])
    policy, head = (tmp_path / "step-3" / name for name in ("policy", "head"))
    target = load_target(policy, dtype="float32")
    with LLM(policy, head, speculation="chain:3", max_slots=2, max_model_len=128, progress=False) as llm:
        sampled = grpo.sample(llm, ["what?"], 3, 12, seed=5)
    rollouts = grpo.to_rollouts(sampled.outputs, np.array([[0.0, 1.0, 2.0]]), 64)
    own, _ = grpo.token_logprobs(target.params, target.config, rollouts.rows, (0,))
    np.testing.assert_allclose(np.where(rollouts.rows.loss_mask, own, 0), rollouts.logprobs, atol=1e-4)


@pytest.mark.slow
def test_a_trainer_on_a_mesh_and_a_sampler_on_another_give_the_same(
    rows: tuple[Path, list[dict[str, Any]]], folders: dict[str, str], tmp_path: Path
) -> None:
    _, expected = rows
    options = {"inner_steps": 2, "lr": 1e-3, "arms": "co-trained", "save_every": 0, "steps": 2}
    found = _run(folders, tmp_path, mesh="data=2,fsdp=2,tensor=2", sampler_mesh="tensor=2", **options)
    for one, other in zip(expected, found, strict=False):
        assert other["most_apart"] < 1e-4
        assert (one["reward"], one["tokens"]) == (other["reward"], other["tokens"])
        np.testing.assert_allclose(one["gradient_norm"], other["gradient_norm"], rtol=1e-3)


@pytest.mark.slow
def test_log_probabilities_of_another_version_are_refused(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that misses an update."""
    monkeypatch.setattr(LLM, "update_weights", lambda *_args, **_kwargs: "1")
    with pytest.raises(RuntimeError, match="nats from the sampler's"):
        _run(folders, tmp_path, arms="co-trained", save_every=0, lr=1e-2)
