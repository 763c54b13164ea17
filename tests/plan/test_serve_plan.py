"""A plan for a fleet: its memory is what an engine takes, its work is counted as the benchmarks count it, what it
promises follows from its costs, and what cannot be is one error with the fix."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny
from jax.sharding import Mesh
from spread import head_of, target_of
from typer.testing import CliRunner

from specserve.checkpoints.load import Target, load_target
from specserve.cli.main import app
from specserve.devices import DEVICES, SHARE_OF_BANDWIDTH, SHARE_OF_PEAK, Device, parse_devices
from specserve.drafters.interface import Head
from specserve.errors import ConfigError
from specserve.eval.bench.roofline import step_work
from specserve.mesh import made_for, make_mesh, parse_mesh
from specserve.plan.serving import fit_into, make_serve_plan, step_costs
from specserve.plan.settings import PlanServeRun
from specserve.plan.work import Replica, abstract_mesh, total_bytes
from specserve.serve.programs.layouts import make_layouts
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import DEVICE_CHUNKS, make_shapes
from specserve.speculative.drafter import Weights
from specserve.speculative.tree import DynamicTree, Tree, chain

QWEN = PlanServeRun(target="qwen3-8b", devices="h100-4", qps=2.0, prompt=600, answer=200)
LONGEST, PAGE = 96, 16
# sizes that whole panels of the native kernels, and whole blocks of each device, make up
ROUND: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 2}
UNEVEN: dict[str, Any] = {"intermediate_size": 80}  # 8 bits on a GPU; over two devices parts end within a block
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    tiny.write_target(folder, tiny.TARGET, 0)
    return load_target(folder, dtype="float32")


def _on_first(tree: object) -> int:
    """Bytes of a tree's arrays on the first device."""
    first = jax.devices()[0]
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards if shard.device == first)


@pytest.mark.parametrize(
    ("tensor", "make"), [(1, tiny.random_head), (2, tiny.random_head), (2, tiny.random_language_model)]
)
def test_the_memory_is_that_of_an_engines_arrays(target: Target, tensor: int, make: Callable[..., Head]) -> None:
    """Weights, head, slots and pages of a runner that is really there, byte for byte; the pages are all that fit."""
    mesh: Mesh | None = make_mesh(tensor=tensor) if tensor > 1 else None
    target = load_target(target.folder, dtype="float32", mesh=mesh)
    head = make(target.config, 1)
    if mesh is not None:
        head = dataclasses.replace(head, params=jax.device_put(head.params, head.drafter.place(mesh)))
    sizes = {"num_slots": 4, "max_model_len": LONGEST, "page_size": PAGE, "num_pages": 40}
    runner = Runner(
        target, head, make_shapes([chain(3)], target.config, mesh, **sizes), mesh=mesh, has_constrained=False
    )
    room = _on_first(target.params) + _on_first(head.params) + _on_first(runner.state)
    sizes = {"slots": 4, "longest": LONGEST, "own": LONGEST, "page_size": PAGE}
    replica = Replica(target.config, head.drafter, mesh or abstract_mesh({}))
    for spare in (0, -1):
        fit = fit_into(runner.config, replica, room + spare, **sizes)
        assert fit is not None
        held = {part.name: part.num_bytes for part in fit.memory}
        assert held["target's weights"] == _on_first(target.params)
        assert held["head"] == _on_first(head.params)
        assert fit.num_pages == (40 if spare == 0 else 39)
        if spare == 0:
            assert held["pages"] + held["slots"] == _on_first(runner.state)
    assert fit_into(runner.config, replica, 1000.0, **sizes) is None


@pytest.mark.parametrize("changes", [ROUND, ROUND | MIXTURE, UNEVEN], ids=["dense", "experts", "uneven"])
@pytest.mark.parametrize(("platform", "text"), [("cpu", ""), ("gpu", ""), ("gpu", "tensor=2"), ("tpu", "")])
def test_int4_is_counted_as_it_is_held(tmp_path: Path, platform: str, text: str, changes: dict[str, Any]) -> None:
    """Byte for byte, and a step reads what is held but for the embedding. CPUs fill the panels of odd sizes up."""
    tiny.write_target(tmp_path, tiny.TARGET | changes, 0)
    mesh = parse_mesh(text)
    with made_for(platform):
        target = load_target(tmp_path, dtype="float32", quantization="int4", mesh=mesh, is_served=True)
        params = make_layouts(target, None, mesh).many.target
    replica = Replica(target.config, None, mesh or abstract_mesh({}), quantization="int4", platform=platform)
    held, of_all_experts = total_bytes(replica.target_held), replica.forward(1, 4096, 1).weights
    if platform == "cpu" and changes is UNEVEN:
        assert held < _on_first(params)
        return
    assert held == _on_first(params)
    assert of_all_experts == pytest.approx(held - _on_first(params.embedding))


def test_window_pages_are_those_of_an_engine() -> None:
    """Beside all other pages, which are as many as then fit."""
    target, page = target_of("windows"), 4
    sizes = {"num_slots": 4, "max_model_len": 512, "page_size": page, "num_pages": 480}
    shapes = make_shapes([chain(3)], target.config, **sizes)
    head = head_of("windows")
    shapes = dataclasses.replace(shapes, chunks=DEVICE_CHUNKS, most_steps=1).with_windows(target.config, head.drafter)
    assert shapes.windows
    runner = Runner(target, head, shapes, has_constrained=False)
    room = _on_first(target.params) + _on_first(head.params) + _on_first(runner.state)
    replica = Replica(target.config, head.drafter, abstract_mesh({}))
    fit = fit_into(runner.config, replica, room, slots=4, longest=512, own=400, page_size=page)
    assert fit is not None
    assert fit.num_pages == 480
    held = {part.name: part for part in fit.memory}
    assert held["pages"].num_bytes + held["slots"].num_bytes == _on_first(runner.state)
    [(window, number)] = shapes.windows
    assert held["pages"].what == f"480 of 4 tokens, {number} for the window of {window}"


@pytest.mark.parametrize("tree", [None, chain(3), DynamicTree(3, 2, 6)], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_on_one_device_the_work_is_that_of_the_benchmarks(
    target: Target, tree: Tree | None, is_tied: bool, tmp_path: Path
) -> None:
    """Bytes and operations are counted from shapes here, and from arrays there."""
    if is_tied:
        tiny.write_target(tmp_path, tiny.TARGET | {"tie_word_embeddings": True}, 0)
        target = load_target(tmp_path, dtype="float32")
    random = tiny.random_head(target.config, 1)
    head, weights = random.drafter, Weights(target.params, random.weights(None))
    mesh, never = abstract_mesh({}), 1e60
    fast = Device(
        "x", "x", "x", peak=never, peak_8bit=never, memory=1, bandwidth=1.0, link=1, linked=1, network=1, source=""
    )
    wide = dataclasses.replace(fast, peak=1.0, bandwidth=never)
    for batch, context in ((1, 7), (4, 64)):
        work = step_work(target.config, weights, head, tree, batch=batch, context=context)
        replica = Replica(target.config, head, mesh)
        read, computed = (
            step_costs(replica, device, tree, (batch,), context=context).step[0] for device in (fast, wide)
        )
        assert read * SHARE_OF_BANDWIDTH == pytest.approx(work.read)
        assert computed * SHARE_OF_PEAK == pytest.approx(work.flops)


def test_better_devices_and_more_sequences_follow_the_obvious_order() -> None:
    plan = make_serve_plan(QWEN)
    twice = make_serve_plan(dataclasses.replace(QWEN, qps=4.0))
    faster = make_serve_plan(dataclasses.replace(QWEN, devices="b200-4"))
    assert twice.fleet.best.batch > plan.fleet.best.batch
    assert faster.fleet.best.token_seconds < plan.fleet.best.token_seconds
    for fleet in (plan.fleet, *plan.others):
        assert fleet.replicas * fleet.devices == 4
        for costs in (fleet.costs.plain, fleet.costs.step, fleet.costs.prefill):
            assert sorted(costs) == list(costs)
        assert all(step > plain for step, plain in zip(fleet.costs.step, fleet.costs.plain, strict=True))
        assert fleet.break_even_tau > 1


def test_too_much_load_is_an_error_whose_fix_works() -> None:
    with pytest.raises(ConfigError, match=r"--qps 5000: h100-4 carries .* requests per second") as raised:
        make_serve_plan(dataclasses.replace(QWEN, qps=5000.0))
    found = re.search(r"--devices (h100-\d+) would do", str(raised.value))
    assert found is not None
    plan = make_serve_plan(dataclasses.replace(QWEN, qps=5000.0, devices=found[1]))
    assert not plan.fleet.best.is_full


def test_the_load_that_the_documents_call_too_much_is() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "scale.md").read_text().split())
    run = PlanServeRun(target="deepseek-v3", devices="tpu-v7x-64", qps=200.0, prompt=2000, answer=500)
    assert "--target deepseek-v3 --devices tpu-v7x-64 --qps 200 --prompt 2000 --answer 500 ```" in text
    with pytest.raises(ConfigError) as raised:
        make_serve_plan(run)
    assert f"`error: {raised.value}`" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"devices": "h900-4"}, r"'h900' is not in the table, expected one of a100, .*plan devices"),
        ({"devices": "h100"}, r"expected a name and a number of chips, such as h100-8"),
        ({"devices": "h100-0"}, r"expected a name and a number of chips"),
        ({"target": "deepseek-v3"}, r"takes 1,342.3 GB, and 4 x H100 80 GB hold .* more --devices, or 8-bit weights"),
        ({"mesh": "tensor=3"}, r"--mesh tensor=3: .* does not divide"),
        ({"mesh": "tensor=8"}, r"it takes 8 devices, and --devices h100-4 has 4"),
        ({"mesh": "sequence=2"}, r"expected data=N"),
        ({"tau": 5.0}, r"--tau 5: a step of chain:3 emits 1 to 4 tokens"),
        ({"speculation": "ngram:3"}, r"published taus are those of heads"),
        ({"draft": "qwen3-0.6b"}, r"published taus are those of heads"),
        ({"draft": "qwen3-0.6b", "speculation": "off"}, r"--draft qwen3-0.6b: --speculation off asks for none"),
        ({"draft": "qwen3-0.6b", "drafter": "mtp", "tau": 2.0}, r"mtp is a kind of head, and .* a language model"),
        ({"drafter": "language-model", "tau": 2.0}, r"--drafter language-model: that is a language model"),
        ({"speculation": "chain:0"}, r"describes no tree"),
        ({"target": "no-such"}, r"no such folder or preset"),
        ({"prompt": 40_900}, r"the context of qwen3-8b is 40960 tokens"),
        ({"shared_prompt": 600}, r"must be shorter than --prompt 600"),
    ],
)
def test_what_cannot_be_planned_has_a_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_serve_plan(dataclasses.replace(QWEN, **changes))


def test_the_command_writes_the_same_in_json_as_in_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    flags = "plan serve --target qwen3-8b --devices tpu-v6e-8 --qps 3 --prompt 500 --answer 60 --shared-prompt 256"
    shown = CliRunner().invoke(app, flags.split())
    found = CliRunner().invoke(app, [*flags.split(), "--json"])
    assert (shown.exit_code, found.exit_code) == (0, 0)
    written = json.loads(found.stdout)
    fleet = written["fleet"]
    assert f"{fleet['replicas']} on {fleet['devices_per_replica']} x TPU v6e each" in shown.stdout
    assert f"{fleet['break_even_tau']:.2f} at " in shown.stdout
    assert written["speculation"] == "chain:3"
    assert all(f"{each['ms_per_token']:.2f}" in shown.stdout for each in fleet["ways"].values())
    assert CliRunner().invoke(app, [*flags.split(), "--json"]).stdout == found.stdout


def test_the_table_of_devices_is_sound() -> None:
    shown = CliRunner().invoke(app, ["plan", "devices", "--json"])
    rows = json.loads(shown.stdout)
    assert [row["id"] for row in rows] == [device.id for device in DEVICES]
    for device in DEVICES:
        assert parse_devices(f"{device.id.upper()}-3") == (device, 3 * device.per_chip)
        assert device.peak < device.peak_8bit
        assert device.network < device.link < device.bandwidth < device.peak
        assert device.source
        # one kind of device of JAX's is one row
        assert sum(re.search(other.kind, device.name) is not None for other in DEVICES) == 1
