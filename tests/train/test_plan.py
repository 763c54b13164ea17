"""A plan is what the compiler says: operations within a few percent, arguments to the byte. Every recipe has one."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny

from specserve import config
from specserve.checkpoints.load import Target
from specserve.checkpoints.source import BUNDLED
from specserve.checkpoints.tensors import write_json
from specserve.drafters.dflash import learn, start
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.door import Rollout, Rows
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.words import KindName
from specserve.errors import ConfigError
from specserve.kernels import rows
from specserve.models.families import model_config
from specserve.models.params import abstract
from specserve.models.presets import PRESETS
from specserve.models.target import target_spec
from specserve.speculative.vocab import DraftVocab
from specserve.train import chunked_loss
from specserve.train.flops import step_flops
from specserve.train.optimizer import make_optimizer
from specserve.train.plan import Plan, find_config, make_plan
from specserve.train.recipe import recipe
from specserve.train.settings import CaptureSettings, DraftSettings, TrainRun, TrainSettings
from specserve.train.step import LossConfig, TrainState, make_step

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
    raw: dict[str, Any], rollout: Rollout, *, blocks: DraftSettings | None = None, **flags: Any
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

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    state = TrainState(params, jax.eval_shape(optimizer.init, params), array((), jnp.int32))
    batch = Rows(*(array((BATCH, SEQ), dtype) for dtype in (jnp.int32, jnp.bool_, jnp.int32, jnp.int32)))
    step: Any = make_step(loss, optimizer)
    arguments = abstract(target_spec(target), "float32"), DraftVocab(array((draft.draft_vocab_size,), jnp.int32)), batch
    return step.lower(state, *arguments, array((), jnp.float32)), loss


@pytest.mark.usefixtures("_whole_loops")
@pytest.mark.parametrize(
    ("changes", "length", "remat", "flags"),
    [
        ({}, 3, True, {}),
        ({"tie_word_embeddings": True, "num_attention_heads": 4}, 2, False, {}),
        ({"num_hidden_layers": 2}, 2, True, {"norm_output": True, "fc_norm": True, "num_layers": 2}),
    ],
)
def test_operations_are_those_of_the_program(
    changes: dict[str, Any], length: int, remat: bool, flags: dict[str, Any]
) -> None:
    """Within 3%: what is element-wise is not counted here."""
    lowered, loss = _lowered(WIDE | changes, Rollout(length, remat), **flags)
    ours = step_flops(loss.target, loss.drafter, loss.rollout, batch=BATCH, seq=SEQ, platform="cpu").total
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
    """Of a head that shares the target's output head, and of one that has its own and learns what the data says."""
    monkeypatch.setattr(learn, "SLOTS_AT_ONCE", 1 << 40)
    blocks = dataclasses.replace(blocks, aux_layers=(0, 2, 4))
    lowered, loss = _lowered(WIDE, rollout, blocks=blocks, **flags)
    teacher = loss.teacher
    ours = step_flops(loss.target, loss.drafter, rollout, batch=BATCH, seq=SEQ, platform="cpu", teacher=teacher).total
    assert lowered.cost_analysis()["flops"] == pytest.approx(ours.executed, rel=0.03)
    assert ours.useful < ours.executed * 0.99


@pytest.mark.usefixtures("_whole_loops")
@pytest.mark.parametrize("kind", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_operations_and_arguments_are_those_that_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: KindName
) -> None:
    """Operations within 3%, as above, and what a step needs besides its arguments within 40%."""
    monkeypatch.setattr("specserve.train.plan.DTYPE", "float32")
    monkeypatch.setattr("specserve.train.plan.BACKEND", "cpu")
    monkeypatch.setattr(learn, "SLOTS_AT_ONCE", 1 << 40)
    draft = DraftSettings(vocab_size=2048)
    if kind == "dflash":
        draft = DraftSettings(vocab_size=2048, num_layers=2, aux_layers=(0, 2, 4))
    rollout = Rollout(2, remat=True) if kind == "eagle3" else Rollout(7, remat=False)
    lowered, loss = _lowered(WIDE, rollout, blocks=None if kind == "eagle3" else draft)
    compiled = lowered.compile()
    write_json(tmp_path / "config.json", WIDE)
    settings = TrainSettings(batch_size=BATCH, seq_len=SEQ, rollout=2, remat=rollout.remat)
    plan = make_plan(TrainRun(target=str(tmp_path), drafter=kind, draft=draft, train=settings))
    assert compiled.cost_analysis()["flops"] == pytest.approx(plan.flops.total.executed, rel=0.03)
    stays = sum(part.num_bytes for part in plan.memory if part.name in ("target's weights", "head", "moments"))
    step_count, lr_scale, vocab, batch = 4, 4, 4 * 2048, BATCH * SEQ * 13
    assert compiled.memory_analysis().argument_size_in_bytes == stays + step_count + lr_scale + vocab + batch
    besides = sum(part.num_bytes for part in plan.memory) - stays
    assert 0.7 < besides / compiled.memory_analysis().temp_size_in_bytes < 1.4
    assert loss.drafter == plan.drafter.with_dtype("float32")


def test_every_recipe_has_a_plan_that_fits(tmp_path: Path) -> None:
    """On devices of 80 GB with a fifth left, as many as its mesh says, which is one where that is enough."""
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


def _plan(run: TrainRun, **changes: Any) -> Plan:
    return make_plan(dataclasses.replace(run, **changes))


def _part(plan: Plan, name: str) -> int:
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
    kept = _plan(run, train=dataclasses.replace(train, remat=False))
    assert kept.device_bytes == plain.device_bytes + plain.without_remat
    assert kept.flops.total.executed < plain.flops.total.executed
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
