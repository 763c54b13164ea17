"""Laws of what a target brings along: which settings win, a resumed run follows its own settings, and every target that
has a name or a config gets settings that a run takes."""

import dataclasses
import json
import math
import random
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import pytest
from machines import LAPTOP
from tiny_folder import write_folder
from tiny_run import tiny_run

from specserve import config, hub
from specserve.checkpoints.load import Target
from specserve.checkpoints.source import BUNDLED
from specserve.data.sources import DATASETS
from specserve.devices import REFERENCE, find_device
from specserve.drafters.interface import Head
from specserve.errors import ConfigError
from specserve.interop.head import save_head
from specserve.mesh import mesh_sizes
from specserve.models.presets import PRESETS
from specserve.plan.outline import outline
from specserve.plan.taus import TAUS_FILE
from specserve.plan.training import make_plan
from specserve.train.run import recipe
from specserve.train.run.checks import check_settings, check_target, plan_drafter
from specserve.train.run.fit import LADDER
from specserve.train.run.folder import RunFolder
from specserve.train.run.recipe import CONVERSATIONS, DEFAULT_BUDGET, MIXTURE, fill
from specserve.train.settings import TrainRun

VALUES: dict[str, Any] = {
    "data.source": ("mine.jsonl",),
    "data.regenerate": False,
    "data.max_conversations": 7,
    "data.answer_slots": 3,
    "draft.vocab_size": 500,
    "draft.d_ff": 96,
    "train.max_steps": 70,
    "train.max_minutes": 3.0,
    "train.seq_len": 64,
    "train.batch_size": 24,
    "train.rollout": 2,
    "train.lr": 0.5,
    "train.eval_every": 5,
    "train.save_every": 6,
    "eval.bench": (),
    "mesh": "data=2",
    "output": "mine",
}
DEFAULTS = {leaf.name: leaf.default for leaf in config.leaves(TrainRun)}


@pytest.fixture(autouse=True)
def _on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is one of the table, unless a test says otherwise."""
    monkeypatch.setattr(recipe, "this_device", lambda: REFERENCE)


@pytest.fixture
def _on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "this_device", lambda: LAPTOP)


def resolved(**given: Any) -> TrainRun:
    return config.resolve(TrainRun, arguments=given, fill=fill)


def values(run: TrainRun) -> dict[str, Any]:
    return {name: attrgetter(name)(run) for name in DEFAULTS}


@pytest.mark.parametrize("target", ["qwen3-8b", "gpt-oss-120b", "deepseek-v3"])
def test_what_is_given_wins_over_the_recipe_and_the_recipe_over_defaults(target: str, tmp_path: Path) -> None:
    """By flag, override or file alike, and whichever other settings are given."""
    chosen = random.Random(target)
    for _ in range(20):
        given = {name: VALUES[name] for name in chosen.sample(sorted(VALUES), chosen.randrange(len(VALUES)))}
        brought = fill({"target": target, **given})
        expected = {**DEFAULTS, **brought, **given, "target": target}
        layers: dict[str, dict[str, Any]] = {"file": {}, "overrides": {}, "flags": {}}
        for name, value in given.items():
            layers[chosen.choice(sorted(layers))][name] = value
        file = tmp_path / "some.yaml"
        file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in layers["file"].items()))
        texts = [f"{n}={','.join(v) if isinstance(v, tuple) else v}" for n, v in layers["overrides"].items()]
        flags = {n: ",".join(v) if isinstance(v, tuple) else v for n, v in layers["flags"].items()}
        run = config.resolve(TrainRun, file=file, overrides=[*texts, f"target={target}"], flags=flags, fill=fill)
        assert values(run) == expected
        assert set(brought) <= set(DEFAULTS)


def test_data_that_is_given_is_answered_anew_where_it_is_published() -> None:
    for source, is_answered in ((("ultrachat",), True), (("me/chats", "mine.jsonl"), True), (("mine.jsonl=2",), False)):
        run = resolved(**{"target": "qwen3-8b", "data.source": source})
        assert run.data.regenerate == is_answered
        assert run.data.max_conversations == 0
    assert resolved(target="qwen3-8b").data.source == (MIXTURE,)
    assert resolved(target="qwen3-8b").data.max_conversations == CONVERSATIONS


def test_a_target_without_a_hub_asks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_folder(tmp_path / "target"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    assert resolved(target=folder).data.source == (MIXTURE,)
    monkeypatch.setattr(hub, "absence", lambda: "no network")
    run = resolved(target=folder)
    assert (run.data.source, run.data.regenerate) == (("self",), True)
    assert resolved(**{"target": folder, "data.source": ("mine.jsonl",)}).data.source == ("mine.jsonl",)
    assert resolved(**{"data.source": ("self=2", "pydoc")}).data.regenerate
    kept = tmp_path / "datasets" / DATASETS[MIXTURE].hub_id.replace("/", "___")
    kept.mkdir(parents=True)
    assert resolved(target=folder).data.source == (MIXTURE,), "it is there without the hub"


@pytest.mark.parametrize("kind", ["eagle3", "dflash2"])
@pytest.mark.parametrize("device", [REFERENCE, LAPTOP], ids=["table", "laptop"])
def test_a_run_that_goes_on_from_a_head_asks_for_no_shape(
    device: Any, kind: str, tiny_target: Target, tiny_head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head has one, of another draft vocabulary than any rung has, whatever `--drafter` would bring for a new one;
    and its steps are as large as those of a new head of its vocabulary."""
    monkeypatch.setattr(recipe, "this_device", lambda: device)
    save_head(tmp_path / "head", tiny_head, tiny_target, dtype="float32", notes={})
    target = {"target": str(tiny_target.folder), "drafter": kind}
    run = resolved(**target, init_from=str(tmp_path / "head"))
    assert plan_drafter(run, tiny_target.config) == tiny_head.drafter
    if kind == "eagle3":
        alike = resolved(**target, **{"draft.vocab_size": len(tiny_head.target_ids)})
        assert run.train == alike.train
    with pytest.raises(ConfigError, match=r"the settings ask for draft\.d_ff 40 \(it has \d+\); leave them out"):
        plan_drafter(resolved(**target, **{"draft.d_ff": 40}, init_from=str(tmp_path / "head")), tiny_target.config)


def test_the_bundled_target_has_the_defaults() -> None:
    assert resolved() == TrainRun() == resolved(target=BUNDLED)


def test_a_resumed_run_takes_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that the target would bring today; what is given still wins."""
    run = tiny_run(tmp_path / "run", target="qwen3-8b", budget="2h")
    RunFolder(run).close()
    monkeypatch.chdir(tmp_path)
    again = resolved(**{"target": "qwen3-8b", "output": "run", "train.resume": True, "train.max_steps": 99})
    train = dataclasses.replace(run.train, resume=True, max_steps=99)
    assert again == dataclasses.replace(run, output="run", train=train)


def test_every_preset_has_settings_that_a_run_takes() -> None:
    for name, preset in PRESETS.items():
        run = resolved(target=name, dry_run=True)
        check_settings(run)
        check_target(run.train, run.draft, preset.config())
        assert (run.mesh, run.train.seq_len, run.train.rollout, run.data.source) == (preset.mesh, 2048, 7, (MIXTURE,))


def test_a_folder_gets_settings_by_its_size_and_those_of_its_preset(tmp_path: Path) -> None:
    for name in ("qwen3-0.6b", "gpt-oss-20b", "deepseek-v3", "llama-3.3-70b"):
        facts = dict(PRESETS[name].facts)
        (tmp_path / "config.json").write_text(json.dumps(facts))
        named, folder = (values(resolved(target=target, dry_run=True)) for target in (name, str(tmp_path)))
        assert folder | {"target": name} == named
        other = facts | {"max_position_embeddings": 1024}  # no preset's
        (tmp_path / "config.json").write_text(json.dumps(other))
        run = resolved(target=str(tmp_path), dry_run=True)
        assert run.train.seq_len == 1024
        assert make_plan(run).device_bytes < 64e9
        assert 1e-4 <= run.train.lr <= 8e-4


@pytest.mark.parametrize("number", [1, 2, 6, 8, 16])
def test_batches_are_cut_over_the_devices_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: number)
    for target, needed in (("qwen3-8b", 1), ("qwen3-32b", 2), ("llama-3.3-70b", 4)):
        for given in ({}, {"train.batch_size": 4}, {"mesh": "data=2"}, {"train.accumulate": 2}):
            run = resolved(target=target, **given)
            check_settings(run)
            sizes = mesh_sizes(run.mesh)
            if not given:
                assert sizes.get("tensor", 1) == needed
                assert sizes.get("data", 1) == max(1, number // needed)
                assert run.train.batch_size >= 8


def test_what_is_expected_is_of_the_target_or_the_nearest() -> None:
    table = json.loads(TAUS_FILE.read_text())
    assert all(row["target"] in (BUNDLED, *PRESETS) and 1 < row["tau"] < 10 and row["source"] for row in table)
    for name, whose in (("qwen3-8b", "qwen3-8b"), ("qwen2.5-72b", "llama-3.3-70b"), (BUNDLED, BUNDLED)):
        assert outline(make_plan(resolved(target=name, dry_run=True)), REFERENCE).expected.target == whose


def test_hours_are_those_of_the_device_that_was_found() -> None:
    plan = make_plan(resolved(target="qwen3-8b", dry_run=True))
    kinds = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "TPU v5", "TPU v5 lite")
    devices = [device for device in map(find_device, kinds) if device]
    found = [outline(plan, device) for device in devices]
    assert not any(each.advice for each in found)
    assert len({each.device.name for each in found}) == len(kinds)
    assert found[0].train_hours > found[1].train_hours > found[3].train_hours
    assert found[1].answer_hours > found[2].answer_hours > found[3].answer_hours
    assert find_device("TPU v4") is None


@pytest.mark.usefixtures("_on_a_laptop")
def test_a_laptop_has_a_run_of_its_size_and_a_bound() -> None:
    """Where a run makes sense. What is given wins, a bound of any kind too."""
    run = resolved(target="qwen3-0.6b", output="here")
    check_settings(run)
    assert (run.budget, run.mesh, run.data.answer_slots) == (DEFAULT_BUDGET, "", 16)
    assert run.train.batch_size * run.train.seq_len <= 1024
    assert 0 < run.data.answer_tokens < run.train.seq_len
    assert run.train.save_every < 100
    for bound in ({"budget": "12h"}, {"train.max_steps": 20}, {"train.max_minutes": 30.0}):
        bounded = resolved(target="qwen3-0.6b", **bound)
        assert bounded.budget == bound.get("budget", "")
        if not bounded.budget:  # no more is answered than is read
            assert bounded.data.max_conversations < 1000
    captured = resolved(**{"target": "qwen3-0.6b", "features.capture": "states"})
    check_settings(captured)
    assert captured.train.max_minutes > 0
    longer = resolved(target="qwen3-0.6b", budget="7d")
    assert longer.train.batch_size * longer.train.seq_len >= run.train.batch_size * run.train.seq_len


@pytest.mark.usefixtures("_on_a_laptop")
def test_a_plan_says_what_would_make_sense_here() -> None:
    """A target that is too large is planned for what it needs, with what fits here; one for which time is short has
    more of it; sizes that are too large get the right ones, and with these nothing is said."""
    large = outline(make_plan(resolved(target="qwen3-8b", dry_run=True)), LAPTOP)
    assert large.device == REFERENCE
    assert LADDER[0].positions == large.plan.positions
    assert re.search(r"of 16 GB; what fits: a target of at most \d\.\d\dB parameters, or an accelerator", large.advice)
    short = outline(make_plan(resolved(target="qwen3-0.6b", budget="10m", dry_run=True)), LAPTOP)
    assert short.device == LAPTOP
    (hours,) = re.findall(r"--budget (\d+)h", short.advice)
    assert not outline(make_plan(resolved(target="qwen3-0.6b", budget=f"{hours}h", dry_run=True)), LAPTOP).advice
    sizes = {"train.batch_size": 8, "train.seq_len": 2048, "train.rollout": 7}
    wide = outline(make_plan(resolved(target="qwen3-0.6b", budget=f"{hours}h", dry_run=True, **sizes)), LAPTOP)
    assert wide.device == LAPTOP
    flags = dict(re.findall(r"--([a-z-]+) (\d+)", wide.advice))
    right = {f"train.{name.replace('-', '_')}": int(flags[name]) for name in ("batch-size", "seq-len", "rollout")}
    right["draft.vocab_size"] = int(flags["vocab-size"])
    assert not outline(
        make_plan(resolved(target="qwen3-0.6b", budget=f"{hours}h", dry_run=True, **right)), LAPTOP
    ).advice


def test_an_outline_of_a_budget_stays_in_it() -> None:
    for device in (REFERENCE, LAPTOP):
        run = fill({"target": "qwen3-0.6b", "budget": "12h", "dry_run": True}, device=device)
        plan = make_plan(config.resolve(TrainRun, arguments=run | {"target": "qwen3-0.6b", "budget": "12h"}))
        found = outline(plan, device)
        assert found.answer_hours + found.train_hours < 12
        assert found.steps * found.step_seconds / 3600 <= found.train_hours * (1 + 1e-9)
        assert found.steps == plan.run.train.max_steps or found.train_hours > 4


@pytest.mark.parametrize(
    ("drafter", "block_size", "gamma"),
    [("dflash", None, 4), ("dflash", 8, 4), ("dflash2", 16, 7), ("dspark", None, 4), ("dspark", 15, 7)],
)
def test_what_a_slot_counts_follows_from_the_block(drafter: str, block_size: int | None, gamma: float) -> None:
    """As published heads of 7 and of 15 slots were trained; what is given wins."""
    given: dict[str, Any] = {"drafter": drafter} | ({"draft.block_size": block_size} if block_size else {})
    assert resolved(**given).train.rollout_decay == pytest.approx(math.exp(-1 / gamma), abs=0.005)
    assert resolved(**given, **{"train.rollout_decay": 0.5}).train.rollout_decay == 0.5
