"""From settings to an engine: which ways to step, how large a cache, what is refused, and what steps cost here."""

import contextlib
import dataclasses
import gc
import logging
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import carried
import engines
import jax
import pytest
import tiny

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import write_json
from specserve.drafters.interface import Head
from specserve.drafters.speculation import describe, parse_speculation
from specserve.errors import ConfigError
from specserve.eval.trial import noted_rates
from specserve.interop.head import save_head
from specserve.interop.notes import read_notes
from specserve.serve import launch
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.engines import with_draft
from specserve.serve.launch import (
    AUTO_CHAINS,
    Models,
    choose_trees,
    load_beside,
    load_models,
    make_engine,
    make_runner,
)
from specserve.serve.programs import program_list
from specserve.serve.programs.shapes import DETERMINISTIC_DEPTH, Shapes
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import chain


@pytest.mark.parametrize(
    ("trained_on", "bits", "served"),
    [
        ("these", "none", "none"),
        ("others", "int8", "int8"),
        ("these", "int8", "none"),
        ("", "", "int8"),
        ("", "", "none"),
    ],
)
def test_a_head_of_other_weights_or_bits_is_warned_of(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture, trained_on: str, bits: str, served: str
) -> None:
    """However it comes beside the target: at the start, in an evaluation, or in another head's place."""
    assert models.head is not None
    notes = {"target_fingerprint": trained_on, "acceptance": {"accept_rate": [0.5], "tau": 1.5}, "quantization": bits}
    save_head(tmp_path / "head", models.head, models.target, dtype="float32", notes=notes if trained_on else {})
    own = dataclasses.replace(models, fingerprint="these", quantization=served)
    found = (
        load_beside(own, "", tmp_path / "head").head_acceptance,
        with_draft(own, str(tmp_path / "head")).head_acceptance,
        launch._head_loader(own, ServeRun(speculation="chain:1"))(str(tmp_path / "head")).acceptance,
    )
    assert [tuple(each) for each in found] == [(0.5,) if trained_on else ()] * 3
    assert caplog.text.count("was trained on other weights") == 3 * (trained_on == "others")
    said = f"against a target with quantization {bits or 'none'} and is served with {served}"
    assert caplog.text.count(said) == caplog.text.count("quantization") == 3 * ((bits or "none") != served)


def test_what_a_head_that_follows_an_adapter_promises_is_of_that_adapter(models: Models, tmp_path: Path) -> None:
    """Beside the plain target neither `auto` begins with it, nor does the doctor expect it. An engine with adapters
    knows whose head it has."""
    assert models.head is not None
    promise = {"speculation": "chain:1", "accept_rate": [0.9], "tau": 1.9}
    plain = {"target_fingerprint": models.fingerprint, "acceptance": promise}
    for name, more in (("plain", {}), ("follows", {"lora": "here/sql", "lora_fingerprint": "0" * 16})):
        save_head(tmp_path / name, models.head, models.target, dtype="float32", notes=plain | more)
        found = load_beside(models, "", tmp_path / name)
        swapped = launch._head_loader(models, ServeRun(speculation="chain:1"))(str(tmp_path / name))
        expected = () if more else (0.9,)
        assert tuple(found.head_acceptance) == tuple(swapped.acceptance) == expected
        assert noted_rates(read_notes(tmp_path / name)) == expected
        _, _, updated = launch._weights_reader(models)(models.head_form, None, str(tmp_path / name))
        assert found.draft == swapped.info == updated == DraftInfo(name, 1.9, *more.values())


@pytest.mark.parametrize(("max_model_len", "page_size"), [(96, 16), (97, 16), (50, 32), (7, 32)])
def test_every_slot_has_room_for_the_longest_sequence(models: Models, max_model_len: int, page_size: int) -> None:
    """By default, wherever its last page begins: filling all slots beforehand takes whole pages for each."""
    run = ServeRun(max_slots=3, max_model_len=max_model_len, page_size=page_size, constrained=False)
    shapes = make_runner(models, run, (None,)).shapes
    pool = shapes.page_pool()
    pages = [page for _ in range(3) for page in pool.allocate(shapes.max_pages)]
    assert len(set(pages)) == 3 * shapes.max_pages
    assert shapes.max_pages * page_size >= max_model_len


def test_auto_may_choose_every_way_there_is(models: Models, headless: Models) -> None:
    """Plain decoding first: it is compiled for every batch. Without a head, lookups; they need none."""
    chains = [chain(depth, "head+suffix") for depth in AUTO_CHAINS]
    trees = launch.AUTO_TREES_CPU if jax.default_backend() == "cpu" else launch.AUTO_TREES
    assert choose_trees(models, ServeRun(speculation="auto")) == (None, *chains, *trees)
    block_head = tiny.random_block_head(models.target.config, seed=0, block_size=4)
    chosen = choose_trees(dataclasses.replace(models, head=block_head), ServeRun(speculation="auto"))
    assert chosen == (None, *chains[:3]), "no way is deeper than a head can look"
    lookups = [chain(depth, "suffix") for depth in AUTO_CHAINS]
    assert choose_trees(headless, ServeRun(speculation="auto")) == (None, *lookups)


@pytest.mark.parametrize("text", ["off", "chain:3", "tree:3x2x6", "static:3x2x1", "suffix:4", "head+ngram:2"])
def test_what_is_asked_for_is_what_runs(models: Models, text: str) -> None:
    tree = parse_speculation(text)
    assert choose_trees(models, ServeRun(speculation=text, early_ready=False)) == (tree,)
    early = choose_trees(models, ServeRun(speculation=text))
    assert early == ((None,) if tree is None else (tree, None)), "plain decoding serves while the tree compiles"


def test_without_a_head_decoding_is_plain_and_said_to_be(headless: Models, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("chain:3", "static:2x1", "head+suffix:3"):
        with caplog.at_level(logging.WARNING):
            assert choose_trees(headless, ServeRun(speculation=text)) == (None,)
        assert "no draft head for tiny" in caplog.text
        caplog.clear()
    for text in ("ngram:3", "suffix:3", "off"):
        run = ServeRun(speculation=text, early_ready=False)
        assert choose_trees(headless, run) == (parse_speculation(text),)
    assert not caplog.text


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (ServeRun(speculation="eagle"), "'eagle' is not understood"),
        (ServeRun(speculation="chain:0"), "describes no tree"),
        (ServeRun(speculation="auto", deterministic=True), "give --speculation chain:K, or off"),
        (ServeRun(speculation="tree:3x2x6", deterministic=True), "chains of at most 7"),
        (ServeRun(speculation="static:2x1", deterministic=True), "chains of at most 7"),
        (ServeRun(speculation="chain:8", deterministic=True), "chains of at most 7"),
        (ServeRun(speculation="off", max_model_len=513), "--max-model-len 513: the target's context is 512"),
        (ServeRun(speculation="off", max_model_len=1), "at least 2: one token to ask, one to answer"),
        (ServeRun(speculation="off", cache_gb=1e-6), "1,000 bytes.*32 tokens takes 29,056.*--cache-gb"),
    ],
    ids=lambda value: None if isinstance(value, ServeRun) else value[:30],
)
def test_a_server_that_cannot_be_is_refused(models: Models, run: ServeRun, message: str) -> None:
    """Before anything is compiled."""
    with pytest.raises(ConfigError, match=message):
        make_engine(models, run, lambda *_: pytest.fail("something was compiled"))


def test_deterministic_chains_of_every_source_are_taken(models: Models) -> None:
    for text in ("off", "chain:1", f"chain:{DETERMINISTIC_DEPTH}", "ngram:7", "head+suffix:3"):
        assert choose_trees(models, ServeRun(speculation=text, deterministic=True)) == (parse_speculation(text),)


@pytest.mark.parametrize(
    ("run", "late", "has_controller"),
    [
        (ServeRun(speculation="chain:3", max_slots=2, early_ready=False), [], False),
        (ServeRun(speculation="chain:3", max_slots=2, deterministic=True), [], False),
        (ServeRun(speculation="chain:3", max_slots=2), ["step", "constrained"], False),
        (ServeRun(speculation="auto", max_slots=2), ["step", "constrained"], True),
    ],
    ids=["whole", "deterministic", "early", "early auto"],
)
def test_what_is_compiled_before_serving_and_what_later(
    models: Models, monkeypatch: pytest.MonkeyPatch, run: ServeRun, late: list[str], has_controller: bool
) -> None:
    ran: list[str] = []
    programs = [
        SimpleNamespace(name=name, is_plain=is_plain, is_for_masks=name == "constrained")
        for name, is_plain in (("admission", True), ("plain step", True), ("step", False), ("constrained", False))
    ]
    asked: list[Shapes] = []
    begun: list[str] = []  # to be compiled in a process of its own

    def make_fake(_target: Target, _head: Head, shapes: Shapes, **_settings: Any) -> SimpleNamespace:
        asked.append(shapes)
        names = SimpleNamespace(is_plain=lambda program: program.is_plain, label=lambda program: program.name)
        return SimpleNamespace(shapes=names, compile=lambda program: ran.append(program.name))

    monkeypatch.setattr(launch.host, "num_cores", lambda: 1)
    monkeypatch.setattr(launch, "Runner", make_fake)
    process = SimpleNamespace()

    def begin(_runner: object, programs: list[Any]) -> Any:
        begun.extend(program.name for program in programs)
        return contextlib.nullcontext(process)

    monkeypatch.setattr(launch, "CompilingProcess", SimpleNamespace(begun=begin))
    monkeypatch.setattr(program_list, "list_programs", lambda _runner, **_settings: programs)
    monkeypatch.setattr(program_list, "first_programs", lambda _runner, programs: programs[:2])
    monkeypatch.setattr(launch, "Engine", lambda _runner, _tokenizer, **settings: SimpleNamespace(**settings))
    reported: list[tuple[int, int, str]] = []
    monkeypatch.setattr(launch, "check_numbers", lambda *_models: None)
    engine: Any = make_engine(models, run, lambda *report: reported.append(report))
    early = [program.name for program in programs if program.name not in late]
    assert ran == early
    assert reported[: len(early)] == [(i + 1, 4, name) for i, name in enumerate(early)]
    assert [program.name for program in (*engine.late.programs, *engine.late.mask_programs)] == late
    assert [program.name for program in engine.late.mask_programs] == late[1:], "nobody has asked for them yet"
    assert (begun, engine.late.process) == (late[:1], process)
    assert (engine.controller is not None) == has_controller, "one that knows no costs yet, and takes the first way"
    [shapes] = asked
    assert shapes.trees == choose_trees(models, run) or shapes.is_deterministic
    assert (shapes.max_model_len, shapes.num_pages, shapes.num_slots) == (512, 2 * 512 // 32, 2)


def test_what_the_process_has_no_room_for_is_left_out(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of choices alone; and the list of programs has it no more."""
    runner = engines.make_runner(tiny_target, None, "off", "ngram:2", "ngram:3", has_constrained=False)
    monkeypatch.setattr(launch.host, "free_memory_maps", lambda: 1)
    plain, *more = runner.shapes.step_programs[runner.shapes.num_slots, runner.shapes.widths[-1]]
    for program in (plain, *more):
        runner.compile(program)
    assert [program in runner.compiled for program in (plain, *more)] == [True, False, False]
    assert not set(more) & set(program_list.list_programs(runner))
    assert caplog.text.count("no more ways to speculate are compiled") == 1


def test_another_head_speculates_as_the_settings_say(tmp_path: Path) -> None:
    """Also where the server began without one; the target's own layer has the name that `--draft` knows it by."""
    target, _ = carried.models(tmp_path, carried.SMALL)
    models = Models("tiny", target, None, None)
    for speculation in ("auto", "chain:3"):
        run = ServeRun(speculation=speculation)
        loaded = launch._head_loader(models, run)("mtp")
        assert loaded.info == DraftInfo("mtp", None)
        assert loaded.head.drafter.name == "mtp"
        assert loaded.trees == choose_trees(dataclasses.replace(models, head=loaded.head), run)
        assert any(tree is not None and tree.uses_head for tree in loaded.trees)
    with pytest.raises(ConfigError, match="no such folder on the server"):
        launch._head_loader(models, run)(str(tmp_path / "missing"))


@pytest.mark.slow
def test_a_server_that_began_without_a_head_goes_on_with_one(tmp_path: Path) -> None:
    """`auto` then knows the costs of steps with it, and a grammar its programs."""
    target, _ = carried.models(tmp_path, carried.SMALL)
    models = Models("tiny", target, None, None)
    run = ServeRun(speculation="auto", max_slots=1, max_model_len=64, early_ready=False)
    with make_engine(models, run, lambda *_: None) as engine:
        params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
        [before] = engine.generate([[5, 6, 7]], params)
        lookups = set(engine.stats().num_steps_by_speculation)
        assert engine.load_draft("mtp").name == "mtp"
        deadline = time.monotonic() + 600
        while not engine.rounds.choice.controller.costs.keys() >= {
            StepProgram(1, 2, tree) for tree in engine.runner.shapes.trees
        }:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for way in engine.runner.shapes.trees:
            engine.set_speculation(describe(way))
            [after] = engine.generate([[5, 6, 7]], params)
            assert after.token_ids == before.token_ids
        assert not any(way.startswith("head") for way in lookups)
        assert any(way.startswith("head") for way in engine.stats().num_steps_by_speculation)
        assert engine.stats().num_late_compiles == 0


def test_heads_are_found_or_missed_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no folder here.*; train a head first"):
        load_models("", str(tmp_path / "missing"))
    folder = tmp_path / "head"
    folder.mkdir()
    write_json(folder / "config.json", {})
    with pytest.raises(ConfigError, match="does not say which target"):
        load_models("", str(folder))
    for draft, name, kind in (("", "pydoc-mtp", "mtp"), ("pydoc-eagle3", "pydoc-eagle3", "eagle3")):
        bundled = load_models("", draft, has_tokenizer=False)
        assert bundled.draft is not None
        assert bundled.head is not None
        assert (bundled.draft.name, bundled.head.drafter.name) == (name, kind)
    (tmp_path / "target").mkdir()
    tiny.write_target(tmp_path / "target", tiny.TARGET, seed=0)
    found = load_models(str(tmp_path / "target"), "", has_tokenizer=False)
    assert found.head is None, "the bundled head is of another target"
    assert found.fingerprint
    assert not found.head_fingerprint


def test_what_was_loaded_is_dropped_once_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a caller that makes one engine alone. A layout takes over what it does not change, as norms and embeddings."""
    tiny.write_target(tmp_path, tiny.TARGET, seed=0)
    monkeypatch.setattr(launch, "compile_all", lambda *_programs, **_settings: None)
    monkeypatch.setattr(launch, "check_numbers", lambda *_models: None)
    models = load_models(str(tmp_path), "", has_tokenizer=False)
    matrices = [weakref.ref(jax.tree.leaves(layer.attention)[0]) for layer in models.target.params.layers]
    engine = make_engine(models, ServeRun(max_slots=1, max_model_len=64), lambda *_report: None)
    assert all(matrix() is not None for matrix in matrices), "the models are still whole"
    params = weakref.ref(models.target.params)
    del models
    gc.collect()
    assert params() is None
    is_changed = jax.default_backend() == "cpu"  # elsewhere the programs take what was loaded
    assert [matrix() is None for matrix in matrices] == [is_changed] * len(matrices)
    assert engine.runner.inputs.layouts.one.target.embedding.shape == (64, engine.runner.config.target.d_model)


def test_the_tokenizer_is_read_while_programs_are_compiled(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not before: its import takes longer than loading small models."""
    read: list[str] = []
    lazy = dataclasses.replace(models, read_tokenizer=lambda: read.append("read"))  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(
        launch, "compile_all", lambda *_programs, meanwhile, **_settings: [read.append("begin"), meanwhile()]
    )
    monkeypatch.setattr(launch, "check_numbers", lambda *_models: None)
    make_engine(lazy, ServeRun(speculation="off", max_slots=1, max_model_len=64), lambda *_report: None)
    assert read == ["begin", "read"]


def test_a_server_compiles_nothing_when_jax_has_forgotten_what_loading_ran(models: Models) -> None:
    """`serve` empties JAX's caches: whatever requests ask for is in the compiled programs."""
    compiled: list[str] = []
    run = ServeRun(speculation="chain:2", max_slots=1, max_model_len=64, early_ready=False)
    engine = make_engine(models, run, lambda *_report: None)
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _seconds, **facts: compiled.append(str(facts)) if "compile" in name else None
    )
    options = (
        {"logprobs": 2},
        {"presence_penalty": 1.0},
        {"logit_bias": {5: -1.0}},
        {"prompt_logprobs": 1},
        {"seed": 3},
    )
    with engine:
        for each in ({}, *options):
            params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **each})
            assert len(engine.generate([[5, 9, 11, 5], [7]], params)) == 2
        engine.flush_cache()
    assert not compiled
