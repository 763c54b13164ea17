"""LoRA adapters of the target: their answers are those of a server whose weights are merged, whatever runs beside them,
speculates, was cached or had their place before; and the target's own answers stay the same to the bit."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    Ask,
    Fixed,
    Reference,
    compile_programs,
    greedy,
    make_engine,
    make_runner,
    run,
    serving,
    submit,
    wait_until,
    waiting,
)
from spread import mesh_of, spread_head, spread_target, target_of

from specserve.checkpoints.load import Quantization, Target, in_few_bits, to_numpy
from specserve.checkpoints.lora import LoraPair
from specserve.checkpoints.update import other_target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import CheckpointError, ConfigError, RequestError
from specserve.kernels import native
from specserve.kernels.matmul import PackedMatrix, QuantizedMatrix, dequantize
from specserve.models.adapters import Adapter, adaptable, check_adapter, side_by_side
from specserve.models.target import target_spec
from specserve.serve import launch
from specserve.serve.engine.adapters import Loras, ServedLoras
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.engine.swap import LoadedHead, ServedWeights
from specserve.serve.launch import Models
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams

WAYS = ("off", "chain:3", "tree:3x3x8")
PROMPT = tuple(int(i) for i in np.random.default_rng(2).integers(3, 64, 40))


def _adapter(target: Target, seed: int, rank: int, matrices: Sequence[str] = ()) -> Adapter:
    """Random pairs for these matrices, or for all, strong enough to change what is said."""
    rng, found = np.random.default_rng(seed), {}
    for name, (d_out, d_in) in adaptable(target.config).items():
        if not matrices or name.split(".")[-2] in matrices:
            a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((rank, d_in), (d_out, rank)))
            found[name] = LoraPair(a, b, float(0.4 / np.sqrt(d_in * rank)))
    return found


def _merged(target: Target, adapter: Adapter) -> Target:
    tensors = dict(to_numpy(target.params, target_spec(target.config), "float32"))
    for name, pair in adapter.items():
        change = pair.scale * pair.b.astype(np.float64) @ pair.a
        tensors[name] = tensors[name] + change.astype(np.float32)
    return other_target(target, tensors, quantization="none", mesh=None)


@pytest.fixture(scope="module")
def adapters(tiny_target: Target) -> dict[str, Adapter]:
    """Of other ranks, and one of some matrices alone."""
    return {
        "a": _adapter(tiny_target, 1, 4),
        "b": _adapter(tiny_target, 2, 1, ("q_proj", "v_proj", "up_proj")),
        "c": _adapter(tiny_target, 3, 3),
    }


@pytest.fixture(scope="module")
def references(tiny_target: Target, adapters: dict[str, Adapter]) -> Iterator[dict[str, Reference]]:
    """Plain decoding by merged weights, by the adapter's name."""
    merged = {"": tiny_target} | {name: _merged(tiny_target, own) for name, own in adapters.items()}
    made = {name: Reference(target) for name, target in merged.items()}
    for reference in made.values():
        compile_programs(reference.runner)
        reference.engine.start()
    yield made
    for reference in made.values():
        reference.engine.stop()


@pytest.fixture(scope="module")
def runner(tiny_target: Target, tiny_head: Head) -> Runner:
    runner = make_runner(tiny_target, tiny_head, *WAYS, max_loras=2, has_constrained=False)
    compile_programs(runner)
    return runner


def _engine(runner: Runner, target: Target, adapters: Mapping[str, Adapter], way: str, *names: str) -> Engine:
    """An engine that begins with these, and may load the others."""

    def read(folder: str) -> Adapter:
        own = adapters[folder]
        check_adapter(target.config, own, runner.shapes.max_lora_rank, folder)
        return own

    own = [adapters[name] for name in names]
    runner.use(runner.with_adapters([*own, *[None] * (runner.shapes.max_loras - len(own))]))
    served = ServedLoras({name: name for name in names}, own, read, str)
    engine = make_engine(runner, Fixed(parse_speculation(way)), served)
    engine._swaps.weights = ServedWeights(read=launch._weights_reader(Models("tiny", target, None, None)))
    return engine


def _asks(references: Mapping[str, Reference], *names: str, number: int = 3, max_tokens: int = 40) -> list[Ask]:
    """Ragged prompts that begin alike, greedy and sampled, of firm answers by each of these, in turns."""
    each: list[list[Ask]] = []
    for name in names:
        found: list[Ask] = []
        for seed in itertools.count():
            own = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=seed, ignore_eos=True, logprobs=2)
            own = own if seed % 2 else greedy(max_tokens, ignore_eos=True, logprobs=2)
            ask = Ask(PROMPT[: 20 + seed % 20], own)
            found += [dataclasses.replace(ask, lora=name)] if references[name].is_firm(ask) else []
            if len(found) == number:
                break
        each.append(found)
    return [ask for asks in zip(*each, strict=True) for ask in asks]


def _check(references: Mapping[str, Reference], engine: Engine, asks: Sequence[Ask]) -> None:
    for ask, inbox in zip(asks, run(engine, asks), strict=True):
        references[ask.lora].check(dataclasses.replace(ask, lora=""), inbox)


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_merged_weights_beside_others_and_from_the_prefix_cache(
    runner: Runner, tiny_target: Target, adapters: Any, references: Any, way: str
) -> None:
    """Prompts begin alike, so that a page of another adapter would be hit. Nothing compiles."""
    asks = _asks(references, "", "a", "b")
    assert len({references[ask.lora].answer(dataclasses.replace(ask, lora="")).text for ask in asks}) == len(asks)
    with serving(_engine(runner, tiny_target, adapters, way, "a", "b")) as engine:
        for _ in range(2):  # the second time from the prefix cache
            before = engine.stats().num_prefix_hits
            _check(references, engine, asks)
        assert engine.stats().num_prefix_hits > before


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_target_in_few_bits_has_adapters(
    tiny_target: Target, tiny_head: Head, adapters: Any, bits: Quantization
) -> None:
    """Its answers are those of the rounded matrices with the adapter merged into them."""
    rounded = dataclasses.replace(tiny_target, params=in_few_bits(tiny_target.params, bits))

    def wide(leaf: Any) -> Any:
        return dequantize(leaf, jnp.float32) if isinstance(leaf, QuantizedMatrix) else leaf

    params = jax.tree.map(wide, rounded.params, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix))
    plain = Reference(_merged(dataclasses.replace(tiny_target, params=params), adapters["a"]))
    own = make_runner(rounded, tiny_head, "chain:3", max_loras=2, has_constrained=False)
    for runner in (plain.runner, own):
        compile_programs(runner)
    with serving(plain.engine), serving(_engine(own, rounded, adapters, "chain:3", "a", "b")) as engine:
        asks = _asks({"a": plain}, "a")
        _check({"a": plain}, engine, asks)


def test_the_targets_own_answers_are_the_same_bits_as_without_adapters(
    runner: Runner, tiny_target: Target, tiny_head: Head, adapters: Any, references: Any
) -> None:
    """Tokens, log-probabilities and what was accepted, beside sequences of adapters and beside none."""
    asks = [ask for ask in _asks(references, "", "a", number=2) if not ask.lora]
    others = [ask for ask in _asks(references, "", "a", number=2) if ask.lora]
    bare = make_runner(tiny_target, tiny_head, "tree:3x3x8", has_constrained=False)
    compile_programs(bare)

    def said(engine: Engine, asked: Sequence[Ask]) -> list[Any]:
        with serving(engine):
            found = [(inbox.wait(), inbox) for inbox in run(engine, asked)]
        ends = [(end.stats, inbox) for end, inbox in found][: len(asks)]
        return [(box.token_ids, box.logprobs, stats and stats.accepted_per_depth) for stats, box in ends]

    expected = said(make_engine(bare, is_caching=False), asks)
    for names, beside in (((), []), (("a", "b"), others)):
        engine = _engine(runner, tiny_target, adapters, "tree:3x3x8", *names)
        assert said(engine, [*asks, *beside]) == expected


def test_an_adapters_answer_depends_on_no_neighbour(
    runner: Runner, tiny_target: Target, adapters: Any, references: Any
) -> None:
    """To the bit of its log-probabilities: alone, and beside others."""
    asks = _asks(references, "", "a", "b", number=1)
    with serving(_engine(runner, tiny_target, adapters, "chain:3", "a", "b")) as engine:
        together = run(engine, asks)
        for ask, inbox in zip(asks, together, strict=True):
            engine.flush_cache()
            [alone] = run(engine, [ask])
            assert (alone.token_ids, alone.logprobs) == (inbox.token_ids, inbox.logprobs)


def test_preempted_answers_are_computed_anew_by_their_adapter(
    tiny_target: Target, tiny_head: Head, adapters: Any, references: Any
) -> None:
    small = make_runner(tiny_target, tiny_head, "chain:3", num_pages=18, has_constrained=False, max_loras=2)
    compile_programs(small)
    with serving(_engine(small, tiny_target, adapters, "chain:3", "a", "b")) as engine:
        _check(references, engine, _asks(references, "", "a", "b"))
        assert engine.stats().num_preemptions > 0


def test_another_adapter_in_the_place_of_one_that_was_unloaded(
    runner: Runner, tiny_target: Target, adapters: Any, references: Any
) -> None:
    """What has begun with the old one goes on with it, and its place is nobody else's until then. Its pages are hit by
    no request of the new one, whatever its name; and nothing compiles."""
    asks = {name: _asks(references, name) for name in ("", "a", "b", "c")}
    with serving(_engine(runner, tiny_target, adapters, "chain:3", "a", "b")) as engine:
        may_go_on = threading.Event()
        begun = [submit(engine, ask, partial(waiting, may_go_on))[1] for ask in asks["a"]]
        begun[0].wait_for_first()
        engine.unload_lora("a")
        assert list(engine.loras) == ["b"]
        with pytest.raises(ConfigError, match=r"all 2 places .* are taken, by b, requests that go on"):
            engine.load_lora("c", "c")
        with pytest.raises(RequestError, match="no LoRA adapter 'a'; loaded are: b"):
            submit(engine, asks["a"][0])
        may_go_on.set()
        for ask, inbox in zip(asks["a"], begun, strict=True):
            references["a"].check(dataclasses.replace(ask, lora=""), inbox)
        wait_until(lambda: not engine.stats().num_running)
        engine.load_lora("a", "c")  # of the same name
        renamed = [dataclasses.replace(ask, lora="a") for ask in asks["c"]]
        for _ in range(2):
            for ask, inbox in zip(renamed, run(engine, renamed), strict=True):
                references["c"].check(dataclasses.replace(ask, lora=""), inbox)
            _check(references, engine, [*asks[""], *asks["b"]])


def test_other_weights_of_the_target_keep_the_adapters(
    runner: Runner, tiny_target: Target, adapters: Any, references: Any
) -> None:
    """An update of the weights replaces what they are beside: here by those of "a", so that "a" is what the target was
    with its change twice, and none of it is what it was with it once."""
    asks = [dataclasses.replace(ask, lora="") for ask in _asks(references, "a")]
    with serving(_engine(runner, tiny_target, adapters, "chain:3", "b", "a")) as engine:
        _check(references, engine, _asks(references, "b"))
        engine.update_weights(adapters["a"])
        for ask, inbox in zip(asks, run(engine, asks), strict=True):
            references["a"].check(ask, inbox)
        twice = [inbox.token_ids for inbox in run(engine, [dataclasses.replace(ask, lora="a") for ask in asks])]
        assert twice != [references["a"].answer(ask).token_ids for ask in asks]
        engine.update_weights(tiny_target.params)
        _check(references, engine, _asks(references, "", "a", "b", number=1))


def test_what_cannot_be_loaded_changes_nothing(
    runner: Runner, tiny_target: Target, adapters: Any, references: Any
) -> None:
    wrong = {"large": _adapter(tiny_target, 5, 5), "other": {"lm_head.weight": next(iter(adapters["a"].values()))}}
    with serving(_engine(runner, tiny_target, {**adapters, **wrong}, "chain:3", "a")) as engine:
        for name, folder, error, message in (
            ("a", "b", ConfigError, "'a' is loaded already"),
            ("tiny", "b", ConfigError, "cannot be named 'tiny'"),
            ("", "b", ConfigError, "cannot be named ''"),
            ("x", "large", CheckpointError, "rank 5, over --max-lora-rank 4"),
            ("x", "other", CheckpointError, "lm_head.weight, which this server cannot"),
        ):
            with pytest.raises(error, match=message):
                engine.load_lora(name, folder)
        with pytest.raises(ConfigError, match="no LoRA adapter 'x'; loaded are: a"):
            engine.unload_lora("x")
        assert list(engine.loras) == ["a"]
        engine.load_lora("b", "b")  # nobody has taken its place
        _check(references, engine, _asks(references, "", "a", "b", number=1))


@pytest.mark.parametrize("salt", ["lora 0\n", "lora 0\nx", "lora -1\nlora 0\n", "lora "])
def test_no_salt_of_a_client_reaches_the_prefixes_of_an_adapter(
    runner: Runner, tiny_target: Target, adapters: Any, salt: str
) -> None:
    """Nor the other way round; requests of one salt still share theirs."""
    with serving(_engine(runner, tiny_target, adapters, "off", "a")) as engine:

        def hits(ask: Ask) -> int:
            before = engine.stats().num_prefix_hits
            [inbox] = run(engine, [ask])
            assert inbox.text is not None
            return engine.stats().num_prefix_hits - before

        plain = Ask(PROMPT, greedy(4, ignore_eos=True), salt=salt)
        adapted = [dataclasses.replace(plain, salt=own, lora="a") for own in ("", "x", salt)]
        assert hits(plain) == 0 < hits(plain)
        for ask in adapted:
            assert hits(ask) == 0 < hits(ask)
        assert hits(plain) > 0


def test_an_engine_without_room_has_no_adapters(tiny_target: Target) -> None:
    bare = make_runner(tiny_target, None, "off", has_constrained=False)
    engine = make_engine(bare)
    assert not bare.config.has_adapters
    assert bare.state.adapter_ids is None
    assert engine.loras == {}
    with pytest.raises(RequestError, match="no LoRA adapters"):
        submit(engine, Ask(PROMPT, greedy(4), lora="a"))
    with pytest.raises(ConfigError, match="start it with max_loras"):
        engine.load_lora("a", "a")


def test_answers_by_xlas_own_products_in_steps_beside_prompts(
    tiny_target: Target, tiny_head: Head, adapters: Any, references: Any
) -> None:
    """As accelerators make them, which multiply by the pairs of all adapters at once."""
    with native.left_out():
        mixing = make_runner(
            tiny_target, tiny_head, "chain:3", has_constrained=False, max_loras=2, is_mixing=True, num_slots=3
        )
        compile_programs(mixing)
        with serving(_engine(mixing, tiny_target, adapters, "chain:3", "a", "b")) as engine:
            assert not isinstance(mixing.inputs.layouts.many.adapters[0]["attention.q"].a, PackedMatrix)
            _check(references, engine, _asks(references, "", "a", "b"))


def test_a_mesh_changes_no_token_of_an_adapter(rng: np.random.Generator) -> None:
    mesh, target = mesh_of("data=2,tensor=4"), target_of("dense")
    spread, head = spread_target("dense", mesh), spread_head("dense", mesh, "eagle3")
    adapters = {"a": _adapter(target, 1, 4)}
    layers = list(target.params.layers)
    for i, name, a, b in side_by_side(target.params, target.config, [adapters["a"]], 4):
        block, matrix = name.split(".")
        own = getattr(layers[i], block)
        own = dataclasses.replace(own, **{matrix: getattr(own, matrix) + a[0] @ b[0]})
        layers[i] = dataclasses.replace(layers[i], **{block: own})
    merged = dataclasses.replace(target, params=dataclasses.replace(target.params, layers=tuple(layers)))
    runner = make_runner(spread, head, "chain:2", has_constrained=False, mesh=mesh, max_loras=2)
    compile_programs(runner)
    references = {"": Reference(target), "a": Reference(merged)}
    engine = _engine(runner, spread, adapters, "chain:2", "a")
    with serving(engine), references[""].engine, references["a"].engine:
        asks = [
            dataclasses.replace(references[name].any_ask(rng, length, i % 2 == 1), lora=name)
            for i, (name, length) in enumerate((("", 16), ("a", 20), ("a", 9), ("", 37)))
        ]
        _check(references, engine, asks)


def test_a_head_beside_another_adapter_than_its_own_is_warned_of(
    runner: Runner, tiny_target: Target, tiny_head: Head, adapters: dict[str, Adapter], caplog: Any
) -> None:
    """Once, with both fingerprints, whichever came first: the adapter, the head, or both with the engine. An adapter is
    the head's own by its name or its folder; here the fingerprint of one is its folder."""
    by_folder = dict.fromkeys(("x/a", "y/a", "y/b"), adapters["a"])
    engine = _engine(runner, tiny_target, by_folder, "off")
    heads: dict[str, DraftInfo] = {}
    engine._swaps.weights = dataclasses.replace(
        engine._swaps.weights,
        load_head=lambda name: LoadedHead(tiny_head, (), heads[name]),
        read=lambda _form, _target, name: (None, tiny_head, heads[cast(str, name)]),
    )

    def warned(act: Callable[[], object]) -> list[str]:
        caplog.clear()
        act()
        return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]

    with serving(engine):
        for number, (name, folder, lora, fingerprint, is_other) in enumerate(
            (
                ("a", "y/b", "x/a", "old", True),
                ("a", "y/b", "x/a", "y/b", False),
                ("of/b", "x/a", "x/a", "old", True),
                ("b", "y/a", "x/a", "old", False),
                ("b", "y/a", "", "", False),
            )
        ):
            key = f"head {number}"
            heads[key] = info = DraftInfo(key, None, lora, fingerprint)
            engine.load_draft(key)
            first = ServedLoras({name: folder}, [], by_folder.__getitem__, str)
            swaps: Any = SimpleNamespace(weights=ServedWeights(info=info))
            found = [
                warned(lambda name=name, folder=folder: engine.load_lora(name, folder)),
                warned(lambda key=key: engine.load_draft(key)),
                warned(lambda key=key: engine.update_weights(draft=key)),
                warned(lambda first=first, swaps=swaps: Loras(first, "tiny", engine.rounds, engine._changes, swaps)),
            ]
            for each in found:
                assert len(each) == is_other, (name, folder, lora, each)
                assert all(f"{lora} ({fingerprint})" in text and f"{folder} ({folder})" in text for text in each)
            assert engine.draft == info
            engine.unload_lora(name)
