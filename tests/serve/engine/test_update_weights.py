"""Another version of the weights for an engine that serves: answers are those of an engine that began with it, whatever
ran, was cached or was compiled before, and a version that does not fit changes nothing."""

import dataclasses
import gc
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import (
    PATIENCE,
    Ask,
    Fixed,
    Inbox,
    Reference,
    compile_programs,
    greedy,
    holding,
    make_engine,
    make_runner,
    run,
    serving,
    submit,
    wait_until,
)
from rounding import assert_within

from specserve.checkpoints.load import Target, load_target, to_numpy
from specserve.checkpoints.tensors import write_tensors
from specserve.checkpoints.update import other_target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import CheckpointError, ConfigError
from specserve.mesh import SERVING_AXES, parse_mesh
from specserve.models.target import target_spec
from specserve.serve import launch
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.swap import HeadForm, ServedWeights
from specserve.serve.launch import Models
from specserve.serve.programs.layouts import make_layouts
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.requests.request import FinishReason, SamplingParams

PROMPT = tuple(int(i) for i in np.random.default_rng(2).integers(3, 64, 40))
WAYS = ("off", "chain:3", "tree:3x3x8")


@pytest.fixture(scope="module")
def moved(tiny_target: Target) -> Target:
    """Another version: every weight is another number, of bfloat16 where the old one is."""

    def move(leaf: jax.Array) -> jax.Array:
        other = np.random.default_rng(leaf.size).permutation(np.asarray(leaf).ravel()).reshape(leaf.shape)
        return jnp.asarray(other)

    return dataclasses.replace(tiny_target, params=jax.tree.map(move, tiny_target.params))


@pytest.fixture(scope="module")
def old(tiny_target: Target) -> Any:
    yield from _reference(tiny_target)


@pytest.fixture(scope="module")
def new(moved: Target) -> Any:
    yield from _reference(moved)


def _reference(target: Target) -> Any:
    made = Reference(target)
    compile_programs(made.runner)
    with serving(made.engine):
        yield made


def _engine(runner: Runner, target: Target, head: Head | None, way: str, **options: Any) -> Engine:
    """An engine whose weights may be updated."""
    engine = make_engine(runner, Fixed(parse_speculation(way)), **options)
    form = head and HeadForm(dataclasses.replace(head, params=None), "none")
    engine._swaps.weights = ServedWeights(form=form, read=launch._weights_reader(Models("tiny", target, head, None)))
    engine._swaps._form = form
    return engine


def _asks(old: Reference, new: Reference, *, max_tokens: int = 40) -> list[Ask]:
    """Ragged prompts that begin alike, greedy and sampled, of firm answers by both versions."""
    found: list[Ask] = []
    for seed in range(100):
        own = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=seed, ignore_eos=True)
        ask = Ask(PROMPT[: 20 + seed % 20], own if seed % 2 else greedy(max_tokens, ignore_eos=True))
        found += [ask] if old.is_firm(ask) and new.is_firm(ask) else []
        if len(found) == 7:
            return found
    raise AssertionError("no firm answers")


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
    asks = _asks(old, new)
    with serving(_engine(runner, tiny_target, tiny_head, way)) as engine:
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
    asks = _asks(old, new)
    with serving(_engine(runner, tiny_target, tiny_head, way)) as engine:
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
    asks = _asks(old, new)
    small = make_runner(tiny_target, tiny_head, "chain:3", num_slots=4, num_pages=18, has_constrained=False)
    compile_programs(small)
    with serving(_engine(small, tiny_target, tiny_head, "chain:3")) as engine, ThreadPoolExecutor(1) as pool:
        begun = [submit(engine, ask)[1] for ask in asks[:4]]
        for inbox in begun:
            inbox.wait_for_first()
        updating = pool.submit(engine.update_weights, moved.params, mode="drain")
        wait_until(lambda: engine._changes.holds_back or updating.done())
        late = [submit(engine, ask)[1] for ask in asks[4:]]
        assert updating.result(PATIENCE) == "1"
        for reference, version, inboxes, those in ((old, "0", begun, asks[:4]), (new, "1", late, asks[4:])):
            for ask, inbox in zip(those, inboxes, strict=True):
                reference.check(ask, inbox)
                stats = inbox.wait().stats
                assert stats is not None
                assert stats.version == version
        assert engine.stats().num_preemptions > 0


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
    asks = _asks(old, new)

    def accepted(head: Head, update: Any = None) -> list[object]:
        served = runner.with_head(head)
        with serving(_engine(served, tiny_target, head, "chain:3")) as engine:
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


def test_a_version_that_is_wrong_changes_nothing_and_names_what_is(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference
) -> None:
    asks = _asks(old, new)
    with serving(_engine(runner, tiny_target, tiny_head, "chain:3")) as engine:
        run(engine, asks)
        for make, message in WRONG.values():
            inboxes = [submit(engine, ask)[1] for ask in asks]
            with pytest.raises((ConfigError, CheckpointError), match=message):
                engine.update_weights(make(moved))
            with pytest.raises((ConfigError, CheckpointError)):  # a right half does not help
                engine.update_weights(make(moved), {"no": "head"})
            for ask, inbox in zip(asks, inboxes, strict=True):
                old.check(ask, inbox)
        with pytest.raises(ConfigError, match=r"mode 'abort': expected one of continue, drain"):
            engine.update_weights(moved.params, mode="abort")  # type: ignore[arg-type]
        before = engine.stats()
        assert (engine.weight_version, before.num_rebuilds, before.num_preemptions) == ("0", 0, 0)
        run(engine, asks)
        assert engine.stats().num_prefix_hits > before.num_prefix_hits, "the cache is there as before"


def test_updates_from_several_threads_are_made_one_after_another(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference
) -> None:
    asks = _asks(old, new)
    with serving(_engine(runner, tiny_target, tiny_head, "chain:3")) as engine, ThreadPoolExecutor(4) as pool:
        inboxes = [submit(engine, ask)[1] for ask in asks]
        versions = [pool.submit(engine.update_weights, moved.params, mode=mode) for mode in ("drain", "continue") * 3]
        assert sorted(each.result(PATIENCE) for each in versions) == ["1", "2", "3", "4", "5", "6"]
        assert engine.weight_version == "6"
        for inbox in inboxes:
            inbox.wait()
        for ask, inbox in zip(asks, run(engine, asks), strict=True):
            new.check(ask, inbox)


def _wait_in_vain(inboxes: list[Any]) -> None:
    heard = [len(inbox.deltas) for inbox in inboxes]
    time.sleep(0.3)
    assert [len(inbox.deltas) for inbox in inboxes] == heard, "a paused engine goes on"


@pytest.mark.parametrize("mode", ["keep", "retract", "wait", "abort"])
def test_a_paused_engine_answers_later_as_if_it_had_not_paused(
    runner: Runner, tiny_target: Target, tiny_head: Head, old: Reference, new: Reference, mode: Any
) -> None:
    """What is asked meanwhile is taken, and a client that leaves meanwhile is let go."""
    asks = _asks(old, new)
    with serving(_engine(runner, tiny_target, tiny_head, "chain:3")) as engine:
        inboxes = [submit(engine, ask)[1] for ask in asks]
        for inbox in inboxes[:4]:
            inbox.wait_for_first()
        engine.pause(mode)
        assert engine.is_paused
        engine.pause("keep")  # again
        (request, left), (_, late) = submit(engine, asks[0]), submit(engine, asks[1])
        _wait_in_vain([*inboxes, late])
        request.cancel()
        assert left.wait().finish_reason == FinishReason.CANCELLED
        if mode in ("wait", "abort"):
            assert all(inbox.is_done for inbox in inboxes[:4])
        engine.resume()
        assert not engine.is_paused
        for ask, inbox in zip((*asks, asks[1]), (*inboxes, late), strict=True):
            old.check(ask, inbox, is_cancelled=mode == "abort" and inbox is not late)


@pytest.mark.parametrize("parts", [("kv_cache",), ("weights",), ("weights", "kv_cache")], ids=" ".join)
def test_an_engine_that_sleeps_gives_the_device_back_and_answers_later(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference, parts: Any
) -> None:
    """As RL code does it: the weights are brought back first, and updated, and then the cache."""
    asks = _asks(old, new)
    with serving(_engine(runner, tiny_target, tiny_head, "chain:3")) as engine:
        inboxes = [submit(engine, ask)[1] for ask in asks]
        inboxes[0].wait_for_first()
        served = engine.runner

        def on_device() -> list[bool]:
            weights = jax.tree.leaves(served.inputs.layouts.one)
            return [isinstance(jax.tree.leaves(each)[0], jax.Array) for each in (weights, served.state)]

        engine.sleep(parts)
        assert engine.is_sleeping
        assert on_device() == [True, "kv_cache" not in parts], "a CPU's weights are in the host's memory already"
        with pytest.raises(ConfigError, match=f"off the device: {', '.join(sorted(parts))}; wake it up first"):
            engine.resume()
        _wait_in_vain(inboxes)
        engine.wake(parts)
        assert not engine.is_sleeping
        assert not engine.is_paused
        assert on_device() == [True, True]
        for ask, inbox in zip(asks, inboxes, strict=True):
            old.check(ask, inbox)
        engine.sleep(parts)
        if "weights" in parts:
            with pytest.raises(ConfigError, match="the weights are off the device"):
                engine.update_weights(moved.params)
            engine.wake(["weights"])
        engine.update_weights(moved.params)
        engine.wake(["kv_cache"])
        for ask, inbox in zip(asks, run(engine, asks), strict=True):
            new.check(ask, inbox)
        for wrong in ([], ["gpu"]):
            with pytest.raises(ConfigError, match="expected some of weights, kv_cache"):
                engine.sleep(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_are_those_of_a_training_forward_of_the_same_version(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, way: str
) -> None:
    """Within rounding, as a policy gradient needs it: of every token of sampled answers, before and after an update."""
    own = SamplingParams(max_tokens=30, temperature=1.0, logprobs=0, ignore_eos=True)
    asks = [Ask(PROMPT[: 20 + seed], dataclasses.replace(own, seed=seed)) for seed in range(6)]
    with serving(_engine(runner, tiny_target, tiny_head, way)) as engine:
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


def test_nothing_waits_for_an_end_that_cannot_come(
    runner: Runner, tiny_target: Target, tiny_head: Head, moved: Target, old: Reference, new: Reference
) -> None:
    """Of a paused engine: the change is refused, also where the pause came while it waited, and later ones are made."""
    asks = _asks(old, new)
    with serving(_engine(runner, tiny_target, tiny_head, "chain:3")) as engine, ThreadPoolExecutor(1) as pool:
        inboxes = [submit(engine, ask)[1] for ask in asks]
        inboxes[0].wait_for_first()
        engine.pause("keep")
        for wait in (lambda: engine.update_weights(moved.params, mode="drain"), lambda: engine.pause("wait")):
            with pytest.raises(ConfigError, match="paused, so nothing that has begun will end"):
                pool.submit(wait).result(PATIENCE)
        engine.resume()
        for ask, inbox in zip(asks, inboxes, strict=True):
            old.check(ask, inbox)


def test_the_version_before_is_let_go(tiny_target: Target, tiny_head: Head, moved: Target) -> None:
    """An engine holds one version, whatever it has compiled, read or timed."""
    own = dataclasses.replace(tiny_target, params=jax.tree.map(jnp.copy, tiny_target.params))
    runner = make_runner(own, tiny_head, "chain:3", num_slots=1, has_constrained=False)
    del own
    compile_programs(runner)
    with serving(_engine(runner, tiny_target, tiny_head, "chain:3")) as engine:
        held = weakref.ref(runner.inputs.layouts.one.target.norm)
        del runner
        engine.update_weights(moved.params)
        gc.collect()
        assert held() is None


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
    with serving(_engine(runner, tiny_target, tiny_head, "chain:3")) as engine:
        [expected] = run(engine, [ask])
        _, inbox = submit(engine, ask)
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
