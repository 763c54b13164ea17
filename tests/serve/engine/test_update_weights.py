"""Another version of the weights for an engine that serves: answers are those of an engine that began with it, whatever
ran, was cached or was compiled before, and a version that does not fit changes nothing."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import (
    PATIENCE,
    Ask,
    Inbox,
    Reference,
    compile_programs,
    greedy,
    holding,
    make_runner,
    run,
    serving,
    submit,
    wait_until,
)
from hypothesis import strategies as st
from rounding import assert_within
from two_versions import PROMPT, firm_asks, updatable_engine

from specserve.checkpoints.load import Target, load_target, to_numpy
from specserve.checkpoints.tensors import write_tensors
from specserve.checkpoints.update import other_target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import CheckpointError, ConfigError
from specserve.kernels import native
from specserve.kernels.matmul import PackedMatrix
from specserve.mesh import SERVING_AXES, parse_mesh
from specserve.models.target import target_spec
from specserve.serve import launch
from specserve.serve.engine.swap import number_after
from specserve.serve.launch import Models
from specserve.serve.programs.layouts import make_layouts
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.requests.request import SamplingParams

WAYS = ("off", "chain:3", "tree:3x3x8")


def _whole(target: Target) -> dict[str, Callable[[Path], Any]]:
    """The ways to give a version of the target."""

    def folder(path: Path) -> Path:
        spec = target_spec(target.config)
        for each in target.folder.iterdir():
            if each.suffix == ".json":
                (path / each.name).write_bytes(each.read_bytes())
        write_tensors(path / "model.safetensors", to_numpy(target.params, spec, "float32"))
        return path

    return {
        "parameters": lambda _: target.params,
        "of NumPy": lambda _: jax.tree.map(np.asarray, target.params),
        "by name": lambda _: to_numpy(target.params, target_spec(target.config), "float32"),
        "folder": folder,
    }


@pytest.mark.parametrize(
    ("way", "given"),
    [*((way, "parameters") for way in WAYS), *(("chain:3", given) for given in ("of NumPy", "by name", "folder"))],
)
def test_what_is_asked_after_an_update_is_answered_as_by_a_fresh_engine(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference,
    way: str, given: str, tmp_path: Path,
) -> None:  # fmt: skip
    """Also where the old version has cached the prompts, and back again; and nothing compiles."""
    asks = firm_asks(old, new)
    with serving(updatable_engine(runner, tiny_target, tiny_head, way)) as engine:
        assert engine.weight_version == "0"
        for target, reference, name in ((tiny_target, old, "0"), (moved, new, "1"), (tiny_target, old, "mine")):
            if name != "0":
                (tmp_path / name).mkdir()
                version = "" if name == "1" else name
                weights = _whole(target)[given](tmp_path / name)
                assert engine.update_weights(weights, version=version) == engine.weight_version == name
            for _ in range(2):  # the second time from the prefix cache
                before = engine.stats().num_prefix_hits
                for ask, inbox in zip(asks, run(engine, asks), strict=True):
                    reference.check(ask, inbox)
                    stats = inbox.wait().stats
                    assert stats is not None
                    assert (stats.versions, stats.version) == (((0, name),), name)
            assert engine.stats().num_prefix_hits > before
        assert engine.runner.compiled is runner.compiled


@pytest.mark.parametrize("way", WAYS)
def test_running_answers_continue_by_the_new_version(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference, way: str
) -> None:
    """Each token is of the version that the answer says, given all tokens before it."""
    asks = firm_asks(old, new)
    with serving(updatable_engine(runner, tiny_target, tiny_head, way)) as engine:
        inboxes = [Inbox() for _ in asks]
        for number, (ask, inbox) in enumerate(zip(asks, inboxes, strict=True)):
            engine.submit(ask.prompt, ask.params, inbox if number else holding(engine, inbox))
        inboxes[0].wait_for_first()
        engine.update_weights(moved.params)
        num_both = 0
        for ask, inbox in zip(asks, inboxes, strict=True):
            stats = inbox.wait().stats
            assert stats is not None
            assert [name for _, name in stats.versions] in (["0"], ["0", "1"], ["1"])
            start = {name: start for start, name in stats.versions}.get("1", len(inbox.token_ids))
            assert inbox.token_ids[:start] == old.answer(ask).token_ids[:start]
            num_both += 0 < start < len(inbox.token_ids)
            if ask.params.temperature == 0.0 and start < len(inbox.token_ids):
                rest = len(inbox.token_ids) - start
                after = Ask((*ask.prompt, *inbox.token_ids[:start]), greedy(rest, ignore_eos=True))
                if new.is_firm(after):
                    assert inbox.token_ids[start:] == new.answer(after).token_ids
        assert num_both, "no answer was under way, so nothing is tested"


def test_running_answers_are_drained_by_the_old_version(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference
) -> None:
    """With too few pages, so that some are preempted meanwhile. What has not begun waits, and is answered by the new
    one."""
    asks = firm_asks(old, new)
    small = make_runner(tiny_target, tiny_head, "chain:3", num_slots=4, num_pages=18, has_constrained=False)
    compile_programs(small)
    with serving(updatable_engine(small, tiny_target, tiny_head, "chain:3")) as engine, ThreadPoolExecutor(1) as pool:
        begun = [submit(engine, ask)[1] for ask in asks[:4]]
        for inbox in begun:
            inbox.wait_for_first()
        updating = pool.submit(engine.update_weights, moved.params, mode="drain")
        wait_until(lambda: engine._changes._next is not None or updating.done())
        late = [submit(engine, ask)[1] for ask in asks[4:]]
        assert updating.result(PATIENCE) == "1"
        for reference, version, inboxes, those in ((old, "0", begun, asks[:4]), (new, "1", late, asks[4:])):
            for ask, inbox in zip(those, inboxes, strict=True):
                reference.check(ask, inbox)
                stats = inbox.wait().stats
                assert stats is not None
                assert stats.version == version
        assert engine.stats().num_preemptions > 0


@hypothesis.given(names=st.lists(st.sampled_from(["", "1", "2", "3", "7", "step-2", "²", "9" * 5000]), max_size=8))
def test_a_version_without_a_name_has_one_that_none_had(names: list[str]) -> None:
    number, seen = number_after("0", 1), {"0"}
    for name in names:
        if not name:
            assert str(number) not in seen
            name = str(number)
        seen.add(name)
        number = number_after(name, number + 1)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_update_has_as_few_bits_as_what_it_replaces(
    tiny_target: Target, moved: Target, quantization: Any, tmp_path: Path
) -> None:
    """Parameters and a folder of the same values become the same arrays, to the last bit."""
    models = Models("tiny", tiny_target, None, None, quantization=quantization)
    read = launch._weights_reader(models)
    folder, *_ = read(None, _whole(moved)["folder"](tmp_path), None)
    for given in ("parameters", "by name"):
        found, *_ = read(None, _whole(moved)[given](tmp_path), None)
        assert found is not None
        assert folder is not None
        jax.tree.map(np.testing.assert_array_equal, found.params, folder.params)


def test_an_update_of_the_head_is_accepted_as_by_an_engine_that_began_with_it(
    runner: Runner, tiny_target: Target, tiny_head: Head, old: Reference, new: Reference
) -> None:
    other = dataclasses.replace(tiny_head, params=tiny.random_head(tiny_target.config, seed=77).params)
    asks = firm_asks(old, new)

    def accepted(head: Head, update: Any = None) -> list[object]:
        served = runner.with_head(head)
        with serving(updatable_engine(served, tiny_target, head, "chain:3")) as engine:
            if update is not None:
                engine.update_weights(draft=update)
            inboxes = run(engine, asks)
            for ask, inbox in zip(asks, inboxes, strict=True):
                old.check(ask, inbox)
            return [inbox.wait().stats.accepted_per_depth for inbox in inboxes]  # type: ignore[union-attr]

    assert accepted(tiny_head, other.params) == accepted(other) != accepted(tiny_head)


def _changed(target: Target, change: Callable[[jax.Array], Any]) -> Any:
    return dataclasses.replace(target.params, norm=change(target.params.norm))


WRONG: dict[str, tuple[Callable[[Target], Any], str]] = {
    "shape": (lambda t: _changed(t, lambda norm: norm[:-1]), r"target: model.norm.weight is float32 \(31,\), expected"),
    "dtype": (lambda t: _changed(t, lambda norm: norm.astype(jnp.int8)), r"model.norm.weight is int8"),
    "nan": (lambda t: _changed(t, lambda norm: norm * jnp.nan), r"not a number or infinite: model.norm.weight"),
    "infinite": (lambda t: _changed(t, lambda norm: norm.at[3].set(jnp.inf)), r"infinite: model.norm.weight"),
    "no array": (lambda t: _changed(t, lambda _: None), r"model.norm.weight is missing"),
    "layer too few": (
        lambda t: dataclasses.replace(t.params, layers=t.params.layers[:-1]),
        r"model.layers.5.input_layernorm.weight is missing, expected \(32,\); .* more",
    ),
    "layer too many": (
        lambda t: dataclasses.replace(t.params, layers=(*t.params.layers, t.params.layers[-1])),
        r"layers\[6\]\S+ is no parameter of this model",
    ),
    "name missing": (
        lambda t: {
            k: v for k, v in to_numpy(t.params, target_spec(t.config), "float32").items() if k != "model.norm.weight"
        },
        r"model.norm.weight is missing",
    ),
    "name too many": (
        lambda t: {**to_numpy(t.params, target_spec(t.config), "float32"), "what": np.zeros(3)},
        r"what is not part of this architecture",
    ),
    "no arrays": (lambda _: {"model.norm.weight": [1.0]}, r"not an array: model.norm.weight"),
    "folder": (lambda _: "/no/such/folder", r"/no/such/folder"),
    "neither": (lambda _: 7, r"expected TargetParams, arrays by name or a folder, got int"),
    "nothing": (lambda _: None, r"needs those of the target, those of the draft, or both"),
}


def _altered(head: Head, change: Callable[[Any], Any]) -> Any:
    return dataclasses.replace(head.params, norm=change(head.params.norm))


WRONG_HEADS: dict[str, tuple[Callable[[Head], Any], str]] = {
    "shape": (lambda h: _altered(h, lambda norm: norm[:-1]), r"draft: norm.weight is float32 \(31,\), expected"),
    "nan": (lambda h: _altered(h, lambda norm: norm * jnp.nan), r"not a number or infinite: norm.weight"),
    "no array": (lambda h: _altered(h, lambda _: None), r"norm.weight is missing"),
    "other layers": (
        lambda h: dataclasses.replace(h.params, layers=()),
        r"midlayer\S+ is missing, .* and 4 more",
    ),
    "folder": (lambda _: "/no/such/folder", r"/no/such/folder"),
    "not a head": (lambda _: 7, r"fc.weight is missing"),
}


def test_a_version_that_is_wrong_changes_nothing_and_names_what_is(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference
) -> None:
    asks = firm_asks(old, new)
    with serving(updatable_engine(runner, tiny_target, tiny_head, "chain:3")) as engine:
        run(engine, asks)
        for make, message in WRONG.values():
            inboxes = [submit(engine, ask)[1] for ask in asks]
            with pytest.raises((ConfigError, CheckpointError), match=message):
                engine.update_weights(make(moved))
            with pytest.raises((ConfigError, CheckpointError)):  # a right half does not help
                engine.update_weights(make(moved), {"no": "head"})
            for ask, inbox in zip(asks, inboxes, strict=True):
                old.check(ask, inbox)
        for of_head, message in WRONG_HEADS.values():
            for target in (None, moved.params):
                with pytest.raises((ConfigError, CheckpointError), match=message):
                    engine.update_weights(target, of_head(tiny_head))
        with pytest.raises(ConfigError, match=r"mode 'abort': expected one of continue, drain"):
            engine.update_weights(moved.params, mode="abort")  # type: ignore[arg-type]
        before = engine.stats()
        assert (engine.weight_version, before.num_rebuilds, before.num_preemptions) == ("0", 0, 0)
        run(engine, asks)
        assert engine.stats().num_prefix_hits > before.num_prefix_hits, "the cache is there as before"


def test_updates_from_several_threads_are_made_one_after_another(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference
) -> None:
    asks = firm_asks(old, new)
    with serving(updatable_engine(runner, tiny_target, tiny_head, "chain:3")) as engine, ThreadPoolExecutor(4) as pool:
        inboxes = [submit(engine, ask)[1] for ask in asks]
        versions = [pool.submit(engine.update_weights, moved.params, mode=mode) for mode in ("drain", "continue") * 3]
        assert sorted(each.result(PATIENCE) for each in versions) == ["1", "2", "3", "4", "5", "6"]
        assert engine.weight_version == "6"
        for inbox in inboxes:
            inbox.wait()
        for ask, inbox in zip(asks, run(engine, asks), strict=True):
            new.check(ask, inbox)


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_are_those_of_a_training_forward_of_the_same_version(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, way: str
) -> None:
    """Within rounding, as a policy gradient needs it: of every token of sampled answers, before and after an update."""
    own = SamplingParams(max_tokens=30, temperature=1.0, logprobs=0, ignore_eos=True)
    asks = [Ask(PROMPT[: 20 + seed], dataclasses.replace(own, seed=seed)) for seed in range(6)]
    with serving(updatable_engine(runner, tiny_target, tiny_head, way)) as engine:
        for target in (tiny_target, moved):
            if target is moved:
                engine.update_weights(moved.params)
            for ask, inbox in zip(asks, run(engine, asks), strict=True):
                ids = [*ask.prompt, *inbox.token_ids]
                logits = tiny.target_logits(target, ids).astype(np.float64)[len(ask.prompt) - 1 : -1]
                expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
                found = np.array([each.logprob for each in inbox.logprobs])
                chosen = np.take_along_axis(expected, np.array(inbox.token_ids)[:, None], axis=-1)[:, 0]
                bound = 2 * tiny.tolerance(target, ids).max()
                assert_within(found, chosen, bound)


def test_weights_of_a_mesh_come_back_where_they_were(tiny_target: Target) -> None:
    mesh = parse_mesh("tensor=2", SERVING_AXES)
    layouts = make_layouts(load_target(tiny_target.folder, dtype="float32", mesh=mesh, is_served=True), None, mesh)
    away = layouts.on_host()
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(away.distinct))
    shapes, others = (jax.tree.leaves(each.described().distinct) for each in (layouts, away))
    assert shapes == others, "programs are compiled for the same shapes"
    for back in (away.on_devices(), away.on_host().on_devices().on_devices()):  # also where some are there already
        for ours, before in zip(*map(jax.tree.leaves, (back.distinct, layouts.distinct)), strict=True):
            assert ours.sharding == before.sharding
            np.testing.assert_array_equal(ours, before)


@pytest.mark.parametrize("tensor", [2, 4])
def test_parameters_of_one_device_are_a_version_on_a_mesh(moved: Target, tiny_target: Target, tensor: int) -> None:
    """Also where the mesh has each of two KV heads twice."""
    mesh = parse_mesh(f"tensor={tensor}", SERVING_AXES)
    served = load_target(tiny_target.folder, dtype="float32", mesh=mesh, is_served=True)
    arrays = to_numpy(moved.params, target_spec(moved.config), "float32")
    expected = other_target(served, arrays, quantization="none", mesh=mesh)
    assert expected.config.kv_repeats == tensor // 2
    for given in (moved.params, expected.params):
        found = other_target(served, given, quantization="none", mesh=mesh)
        for ours, other in zip(*map(jax.tree.leaves, (found.params, expected.params)), strict=True):
            assert ours.sharding == other.sharding
            np.testing.assert_array_equal(ours, other)


def test_a_version_of_bfloat16_numbers_is_packed_in_bfloat16_and_compiles_nothing(
    tiny_target: Target, tiny_head: Head, moved: Target
) -> None:
    """Where native kernels run, as the one before was."""

    def rounded(target: Target) -> Target:
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), target.params)
        return dataclasses.replace(target, params=params)

    first, other = rounded(tiny_target), rounded(moved)
    runner = make_runner(first, tiny_head, "chain:3", num_slots=4, has_constrained=False)
    compile_programs(runner)
    expected = Reference(other)
    compile_programs(expected.runner)
    with serving(expected.engine), serving(updatable_engine(runner, first, tiny_head, "chain:3")) as engine:
        engine.update_weights(other.params)
        asks = firm_asks(expected, expected)
        for ask, inbox in zip(asks, run(engine, asks), strict=True):
            expected.check(ask, inbox)
        both = [each.inputs.layouts.one.target for each in (runner, engine.runner)]
        for target in both:
            leaves = jax.tree.leaves(target, is_leaf=lambda leaf: isinstance(leaf, PackedMatrix))
            formats = {leaf.format for leaf in leaves if isinstance(leaf, PackedMatrix)}
            assert formats == ({"bfloat16"} if native.is_available() else set())


def test_the_version_before_is_let_go(tiny_target: Target, tiny_head: Head, moved: Target) -> None:
    """An engine holds one version, whatever it has compiled, read or timed, and lets the one before go at once, also to
    sleep: a server freezes what it begins with, of which Python's collector then frees no cycle."""
    own = dataclasses.replace(tiny_target, params=jax.tree.map(jnp.copy, tiny_target.params))
    runner = make_runner(own, tiny_head, "chain:3", num_slots=1, has_constrained=False)
    del own
    compile_programs(runner)
    with serving(updatable_engine(runner, tiny_target, tiny_head, "chain:3")) as engine:
        held = weakref.ref(runner.inputs.layouts.one.target.norm)
        del runner
        jax.clear_caches()  # as `specserve serve` does
        gc.freeze()
        gc.disable()
        try:
            engine.update_weights(moved.params)
            assert held() is None
            held = weakref.ref(engine.runner.inputs)
            engine.sleep(("weights",))
            assert held() is None
            engine.wake()
        finally:
            gc.enable()
            gc.unfreeze()


def test_a_deterministic_engine_computes_no_keys_again(tiny_target: Target, tiny_head: Head, moved: Target) -> None:
    shapes = make_shapes(
        (parse_speculation("chain:3"),),
        tiny_target.config,
        num_slots=2,
        max_model_len=96,
        page_size=8,
        num_pages=24,
        is_deterministic=True,
    )
    runner = Runner(tiny_target, tiny_head, shapes, has_constrained=False)
    compile_programs(runner)
    ask = Ask(PROMPT[:20], greedy(40, ignore_eos=True))
    with serving(updatable_engine(runner, tiny_target, tiny_head, "chain:3")) as engine:
        [expected] = run(engine, [ask])
        _, inbox = submit(engine, ask, partial(holding, engine))
        inbox.wait_for_first()
        engine.pause("keep")
        for change in (
            lambda: engine.pause("retract"),
            engine.sleep,
            lambda: engine.update_weights(moved.params, mode="continue"),
        ):
            with pytest.raises(ConfigError, match="never computes an answer's keys again"):
                change()
        engine.resume()
        inbox.wait()
        assert inbox.token_ids == expected.token_ids
        engine.update_weights(moved.params, mode="drain")
        engine.sleep()
        engine.wake()
        assert run(engine, [ask])[0].token_ids != expected.token_ids
