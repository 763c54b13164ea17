"""A plan is what the compiler counts: operations within a few percent, arguments to the byte. Every recipe has one."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh
from spread import mesh_of, spread_target

from specserve import config
from specserve.checkpoints.configs import find_config
from specserve.checkpoints.load import Target
from specserve.checkpoints.source import BUNDLED
from specserve.checkpoints.tensors import write_json
from specserve.devices import DEVICES
from specserve.drafters.dflash import rollout as training
from specserve.drafters.dflash import start
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.learning import Rollout, Rows
from specserve.drafters.registry import KindName
from specserve.errors import ConfigError
from specserve.kernels import rows
from specserve.mesh import whole
from specserve.models.families.table import model_config
from specserve.models.params import abstract
from specserve.models.presets import PRESETS
from specserve.models.sharding import place_target
from specserve.models.target import TargetParams, forward, target_spec
from specserve.plan.collectives import span, step_collectives
from specserve.plan.training import RunPlan, make_plan
from specserve.plan.work import Replica
from specserve.speculative.vocab import DraftVocab
from specserve.train import chunked_loss
from specserve.train.flops import StepShape, step_flops
from specserve.train.optimizer import make_optimizer
from specserve.train.run.recipe import recipe
from specserve.train.settings import CaptureSettings, DraftSettings, TrainRun, TrainSettings
from specserve.train.step import LossConfig, TrainState, make_step, place_rows, place_state

WIDE = tiny.TARGET | {
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 768,
}
OWN_INPUTS = {"model_type": "gemma4_text", "hidden_act": None, "global_head_dim": 128, "sliding_window": 1024}
OWN_INPUTS |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 768, "num_hidden_layers": 3}
BATCH, SEQ = 1, 512


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes() -> Iterator[None]:
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def _whole_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA counts the body of a loop once, so nothing is cut into chunks."""
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", {"cpu": 1 << 40})
    monkeypatch.setattr(rows, "SCORES_AT_ONCE", 1 << 40)


def _lowered(
    raw: dict[str, Any],
    rollout: Rollout,
    *,
    blocks: DraftSettings | None = None,
    mesh: Mesh | None = None,
    shape: tuple[int, int] = (BATCH, SEQ),
    **flags: Any,
) -> tuple[Any, LossConfig]:
    """The step of an EAGLE-3 head, or of one that fills blocks, which has the rest of the flags for its losses."""
    target = model_config(raw, dtype="float32")
    if blocks is None:
        loss = LossConfig(target, Eagle3(tiny.draft_config(target, draft_vocab_size=2048, **flags)), rollout, 0.8)
    else:
        drafter = DFlash(start.new_config("dflash", blocks, target, blocks.vocab_size))
        loss = LossConfig(target, drafter, rollout, 0.8, **flags)
    draft = loss.drafter
    optimizer = make_optimizer(TrainSettings())
    params = abstract(draft.spec(), "float32")

    def array(shape: tuple[int, ...], dtype: Any, place: Any = None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place or whole(mesh))

    def placed(tree: Any, places: Any) -> Any:
        return jax.tree.map(lambda x, place: array(x.shape, x.dtype, place), tree, places) if places else tree

    state = TrainState(params, jax.eval_shape(optimizer.init, params), array((), jnp.int32))
    spec, types = target_spec(target), (jnp.int32, jnp.bool_, jnp.int32, jnp.int32)
    batch = Rows(*(array(shape, dtype, place_rows(mesh, shape)) for dtype in types))
    step: Any = make_step(loss, optimizer, mesh)
    arguments = (
        placed(state, place_state(draft, optimizer, mesh)),
        placed(abstract(spec, "float32"), mesh and place_target(target, spec, mesh)),
        DraftVocab(array((draft.draft_vocab_size,), jnp.int32)),
        batch,
        array((), jnp.float32),
    )
    return step.lower(*arguments), loss


@pytest.mark.usefixtures("_whole_loops")
@pytest.mark.parametrize(
    ("changes", "length", "remat", "flags"),
    [
        ({}, 3, True, {}),
        ({"tie_word_embeddings": True, "num_attention_heads": 4}, 2, False, {}),
        ({"num_hidden_layers": 2}, 2, True, {"norm_output": True, "fc_norm": True, "num_layers": 2}),
        (OWN_INPUTS, 1, True, {}),
    ],
)
def test_operations_are_those_of_the_program(
    changes: dict[str, Any], length: int, remat: bool, flags: dict[str, Any]
) -> None:
    """Within 3%: what is element-wise is not counted here."""
    lowered, loss = _lowered(WIDE | changes, Rollout(length, remat), **flags)
    ours = step_flops(StepShape(loss.target, loss.drafter, loss.rollout, BATCH, SEQ), "cpu").total
    assert lowered.cost_analysis()["flops"] == pytest.approx(ours.executed, rel=0.03)
    assert ours.useful < ours.executed * 0.99


@pytest.mark.usefixtures("_whole_loops")
@pytest.mark.parametrize(
    ("blocks", "rollout", "flags"),
    [
        (DraftSettings(vocab_size=4096, num_layers=2, window=128), Rollout(7, remat=True), {"weighting": "d-pace"}),
        pytest.param(
            DraftSettings(vocab_size=2048, num_layers=1, block_size=4),
            Rollout(3, remat=False, anchors=60),
            {"teacher": "data"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_operations_of_blocks_are_those_of_the_program(
    monkeypatch: pytest.MonkeyPatch, blocks: DraftSettings, rollout: Rollout, flags: dict[str, Any]
) -> None:
    """Of a head that shares the target's output head, and of one that has its own and learns from the data."""
    monkeypatch.setattr(training, "SLOTS_AT_ONCE", 1 << 40)
    blocks = dataclasses.replace(blocks, aux_layers=(0, 2, 4))
    lowered, loss = _lowered(WIDE, rollout, blocks=blocks, **flags)
    step = StepShape(loss.target, loss.drafter, rollout, BATCH, SEQ, teacher=loss.teacher)
    ours = step_flops(step, "cpu").total
    assert lowered.cost_analysis()["flops"] == pytest.approx(ours.executed, rel=0.03)
    assert ours.useful < ours.executed * 0.99


@pytest.mark.usefixtures("_whole_loops")
@pytest.mark.parametrize("kind", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_operations_and_arguments_are_those_that_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: KindName
) -> None:
    """Operations within 3%, as above, and what a step needs besides its arguments within 40%."""
    monkeypatch.setattr(training, "SLOTS_AT_ONCE", 1 << 40)
    draft = DraftSettings(vocab_size=2048)
    if kind == "dflash":
        draft = DraftSettings(vocab_size=2048, num_layers=2, aux_layers=(0, 2, 4))
    rollout = Rollout(2, remat=True) if kind == "eagle3" else Rollout(7, remat=False)
    lowered, loss = _lowered(WIDE, rollout, blocks=None if kind == "eagle3" else draft)
    compiled = lowered.compile()
    write_json(tmp_path / "config.json", WIDE)
    settings = TrainSettings(batch_size=BATCH, seq_len=SEQ, rollout=2, remat=rollout.remat)
    plan = make_plan(TrainRun(target=str(tmp_path), drafter=kind, draft=draft, train=settings), "cpu")
    assert compiled.cost_analysis()["flops"] == pytest.approx(plan.flops.total.executed, rel=0.03)
    stays = sum(part.num_bytes for part in plan.memory if part.name in ("target's weights", "head", "moments"))
    step_count, lr_scale, vocab, batch = 4, 4, 4 * 2048, BATCH * SEQ * 13
    assert compiled.memory_analysis().argument_size_in_bytes == stays + step_count + lr_scale + vocab + batch
    others = ("process", "programs", "held-out answers")  # of the whole run
    besides = sum(part.num_bytes for part in plan.memory if part.name not in others) - stays
    assert 0.7 < besides / compiled.memory_analysis().temp_size_in_bytes < 1.4
    assert loss.drafter == plan.drafter.with_dtype("float32")


MIXED = WIDE | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 4,  # half of them, which a CPU computes by having every expert compute all
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


@pytest.mark.usefixtures("_whole_loops")
@pytest.mark.parametrize(
    ("text", "smallest"),
    [
        ("expert=4", 4),
        ("data=2,tensor=2,expert=2", 7),
        ("data=2,fsdp=4", 8),
        pytest.param("data=8", 8, marks=pytest.mark.slow),
        pytest.param("tensor=2,expert=4", 7, marks=pytest.mark.slow),
        pytest.param("data=2,sequence=2,expert=2", 7, marks=pytest.mark.slow),
        pytest.param("sequence=2,tensor=2,expert=2", 6, marks=pytest.mark.slow),
    ],
)
def test_each_device_does_its_share(text: str, smallest: float) -> None:
    """Within 3% of the operations that the compiled program has for a device, and of the bytes that it sends along
    `data` and `expert`; and it is a share: with four devices along `expert` a quarter, which was once all. What is
    added up along `tensor`, XLA's compiler for CPUs does not join into as few sums as others do, and of rows that are
    cut it sends its own choice."""
    mesh, shape = mesh_of(text), (8, 128)
    lowered, loss = _lowered(MIXED, Rollout(1, remat=True), mesh=mesh, shape=shape)
    compiled, step = lowered.compile(), StepShape(loss.target, loss.drafter, loss.rollout, *shape)
    alone, spread = (step_flops(step, "cpu", each).total for each in (None, mesh))
    flops = compiled.cost_analysis()["flops"]
    assert flops == pytest.approx(spread.executed / mesh.size, rel=0.03)
    assert spread.useful == alone.useful
    assert flops < 1.03 * alone.executed / smallest

    params = abstract(loss.drafter.spec(), "float32")
    places = jax.tree.leaves(loss.drafter.place(mesh))
    gradient = [4 * math.prod(p.shard_shape(x.shape)) for x, p in zip(jax.tree.leaves(params), places, strict=True)]
    counted: Counter[tuple[str, ...]] = Counter()
    for each in step_collectives(step, mesh, sum(gradient)):
        is_gradient = each.what == "the head's gradient"  # XLA's compiler for CPUs sends it whole along `fsdp` too
        along = ("data", "fsdp") if is_gradient and mesh.shape["fsdp"] > 1 else each.axes
        counted[tuple(axis for axis in along if mesh.shape[axis] > 1)] += each.num_bytes
    sent = _sent(compiled.as_text(), mesh)
    for axes, size in counted.items() if mesh.shape["sequence"] == 1 else ():
        assert size < 1.03 * sent[axes], axes
        assert sent[axes] < (2.5 if "tensor" in axes or axes == ("data", "fsdp") else 1.03) * size, axes


@pytest.mark.parametrize("model", ["dense", "Mamba"])
def test_layers_are_summed_as_often_as_in_the_program(model: str) -> None:
    """A forward over `tensor`, where a layer of some families is a mixer, an MLP or experts alone."""
    mesh, token_ids = mesh_of("tensor=2"), jnp.zeros((1, 16), jnp.int32)
    target = spread_target(model, mesh)
    config, size = target.config, 16 * target.config.d_model

    @jax.jit
    def run(params: TargetParams) -> jax.Array:
        return forward(params, config, token_ids, token_ids, tiny.causal(16)).hidden_states

    text = run.lower(target.params).compile().as_text()
    arrays = re.findall(r"f32\[([\d,]*)\]", " ".join(re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)))
    found = sum(math.prod(map(int, sizes.split(","))) == size for sizes in arrays) - 1  # the embedding's
    work = Replica(config, None, mesh).forward(1, 16, 1)
    assert (work.sums, work.sent) == (found, found * size * 4)
    step = StepShape(config, Eagle3(tiny.draft_config(config)), Rollout(1, remat=True), 1, 16)
    [layers] = [each for each in step_collectives(step, mesh, 0) if each.what == "sums of the target's layers"]
    assert layers.num_bytes == (found + 1) * size * 4


def _sent(program: str, mesh: Mesh) -> Counter[tuple[str, ...]]:
    """The bytes that each device sends where collectives run in rings, by the axes along which it sends them."""
    found: Counter[tuple[str, ...]] = Counter()
    for line in program.splitlines():
        match = re.search(r"= (.*?) (all-reduce|all-gather|reduce-scatter|collective-permute)(-start)?\(", line)
        if match is None:
            continue
        arrays = re.findall(r"(f32|s32|u32|pred)\[([\d,]*)\]", match[1])
        size = sum((1 if kind == "pred" else 4) * math.prod(map(int, filter(None, n.split(",")))) for kind, n in arrays)
        group = _group(line, mesh.size)
        strides = np.argwhere(np.isin(np.arange(mesh.size).reshape(mesh.devices.shape), group))
        axes = tuple(axis for axis, index in zip(mesh.axis_names, strides.T, strict=True) if len(set(index)) > 1)
        n = len(group)
        times = {"all-reduce": 2 * (n - 1) / n, "all-gather": (n - 1) / n, "reduce-scatter": n - 1}
        found[axes] += times.get(match[2], 1) * size
    return found


def _group(line: str, number: int) -> list[int]:
    """The devices of a collective's first group."""
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
        return [int(pairs[1]), int(pairs[2])]
    if named := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((\S+)\))? \{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        ids = _ids(named[2], number) if named[2] else np.arange(number)
        ids = ids.reshape(tuple(sizes.values()))
        return ids[tuple(slice(None) if f"'{name}'" in named[3] else 0 for name in sizes)].flatten().tolist()
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(each) for each in listed[1].split(",")]
    tiled = re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line)
    if tiled is None:
        return list(range(number))
    return _ids(tiled[3], number).reshape(int(tiled[1]), int(tiled[2]))[0].tolist()


def _ids(order: str, number: int) -> np.ndarray:
    """The devices in an order that XLA writes as `[2,4]T(1,0)`: an array of these sizes, transposed."""
    sizes, _, axes = order.partition("T")
    ids = np.arange(number).reshape([int(each) for each in sizes.strip("[]").split(",")])
    return ids.transpose([int(each) for each in axes.strip("()").split(",")]) if axes else ids


def test_a_group_that_fits_no_host_goes_over_the_network() -> None:
    """Devices along the last axis are neighbours."""
    run = TrainRun(target="deepseek-v3", draft=DraftSettings(vocab_size=32000), mesh="tensor=8,expert=8")
    plan = make_plan(run)
    by_axis = {each.axes: each for each in plan.collectives}
    inner, outer = by_axis["expert",], by_axis["tensor",]
    h100, v5p = (next(device for device in DEVICES if device.name.startswith(name)) for name in ("H100", "TPU v5p"))
    assert (span(plan.mesh, inner.axes), span(plan.mesh, outer.axes)) == (8, 57)
    near = sum(each.num_bytes for each in plan.collectives if each.axes != outer.axes)
    far = sum(each.num_bytes for each in plan.collectives if each.axes == outer.axes)
    assert plan.sending_seconds(h100) == pytest.approx(near / h100.link + far / h100.network)
    assert plan.sending_seconds(v5p) == pytest.approx((near + far) / v5p.link)
    whole = _plan(run, mesh="")
    assert not whole.collectives
    assert whole.sending_seconds(h100) == 0
    computing = plan.flops.total.executed / 64 / h100.peak
    assert plan.positions / plan.positions_per_second(h100) == pytest.approx(computing + plan.sending_seconds(h100))
    assert whole.positions_per_second(h100) < plan.positions_per_second(h100) < 64 * whole.positions_per_second(h100)


def test_every_recipe_has_a_plan_that_fits(tmp_path: Path) -> None:
    """On devices of 80 GB with a fifth left, as many as its mesh has, which is one where that is enough."""
    for name in (BUNDLED, *PRESETS):
        file = tmp_path / f"{name}.yaml"
        file.write_text(recipe(name))
        run = config.resolve(TrainRun, file=file)
        plan = make_plan(run)
        alone = make_plan(dataclasses.replace(run, mesh="")) if run.mesh else plan
        assert plan.device_bytes < 64e9, name
        assert (plan.num_devices > 1) == (alone.device_bytes > 64e9 or plan.target_size.bf16_bytes > 60e9), name
        assert plan.flops.total.useful > 6 * plan.head_size * 0.1 * plan.positions, name
        assert 2 * plan.target_size.active * plan.positions < plan.flops.total.executed * 1.5, name


def _plan(run: TrainRun, **changes: Any) -> RunPlan:
    return make_plan(dataclasses.replace(run, **changes))


def _part(plan: RunPlan, name: str) -> int:
    return next(part.num_bytes for part in plan.memory if part.name == name)


def test_a_plan_follows_the_settings() -> None:
    train = TrainSettings(seq_len=2048, rollout=7, remat=True)
    run = TrainRun(target="qwen3-8b", draft=DraftSettings(vocab_size=32000), train=train)
    plain = make_plan(run)
    assert plain.head_size == sum(math.prod(s.shape) for s in jax.tree.leaves(plain.drafter.spec()))
    assert _part(plain, "target's weights") == 2 * plain.target_size.total
    assert _part(plain, "moments") == pytest.approx(8 * plain.head_size, rel=1e-6)  # and a count of steps

    spread = _plan(run, mesh="data=2,tensor=8")
    assert spread.num_devices == 16
    assert _part(spread, "target's weights") == pytest.approx(
        2 * plain.target_size.total / 8,
        rel=0.01,  # norms are whole on every device
    )
    assert _part(spread, "moments") == pytest.approx(2 * _part(spread, "head"), rel=1e-6)  # and a count of steps
    assert _part(spread, "head") < _part(plain, "head") / 4
    assert _part(spread, "rollout") == _part(plain, "rollout") / 2

    quantized = _plan(run, quantization="int8")
    assert _part(quantized, "target's weights") < 0.6 * _part(plain, "target's weights")
    small = _plan(run, train=dataclasses.replace(train, moments="int8"))
    assert _part(small, "moments") == pytest.approx(_part(plain, "moments") / 4, rel=0.03)  # and scales
    host = _plan(run, train=dataclasses.replace(train, moments="host"))
    assert host.host_bytes + _part(host, "moments") == _part(plain, "moments")
    assert _part(host, "moments") < 1e6
    stored = _plan(run, train=dataclasses.replace(train, remat=False))
    assert stored.device_bytes == plain.device_bytes + plain.without_remat
    assert stored.flops.total.executed < plain.flops.total.executed
    halved = _plan(run, train=dataclasses.replace(train, accumulate=2))
    assert _part(halved, "rollout") == _part(plain, "rollout") / 2
    cached = _plan(run, features=CaptureSettings(capture="features"))
    assert cached.flops.target.executed == 0
    assert _part(cached, "target's weights") == 2 * 151_936 * 4096


def test_a_config_is_found_without_weights_and_without_a_network(tmp_path: Path, tiny_target: Target) -> None:
    write_json(tmp_path / "config.json", tiny.TARGET)
    assert find_config(str(tmp_path))[0].num_layers == tiny_target.config.num_layers
    assert find_config("pydoc")[0].family == "qwen3"
    for name in ("nobody/nothing", "./nothing", "../nothing", "nobody/.git"):
        with pytest.raises(ConfigError, match="a dry run asks no hub"):
            find_config(name)
    with pytest.raises(ConfigError, match="tensor may be"):
        make_plan(TrainRun(target="qwen3-8b", mesh="tensor=3"))
