"""What a server makes sure of before it serves: memory, tokenizer, names, and models that make numbers."""

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from engines import make_runner

from specserve.checkpoints import load
from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import read_json, write_json
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import CheckpointError, ConfigError
from specserve.models.families.table import model_config
from specserve.models.params import is_spec
from specserve.models.target import target_spec
from specserve.serve import launch, startup
from specserve.serve.launch import Models, load_models, make_engine
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.settings import ServeRun
from specserve.serve.startup import check_numbers, check_state_fits
from specserve.speculative.slot_state import init_state


def _runner_of(target: Target, head: Head | None, **sizes: Any) -> tuple[Any, Any]:
    """The config and shapes of a runner that is refused before anything is allocated."""
    found: list[Any] = []

    class Refused(Exception):
        pass

    def note(*both: Any) -> None:
        found.extend(both)
        raise Refused

    with pytest.raises(Refused):
        Runner(target, head, make_shapes([parse_speculation("chain:3")], target.config, **sizes), check=note)
    config, shapes = found
    return config, shapes


SIZES = {"num_slots": 4, "max_model_len": 96, "page_size": 8, "num_pages": 40}


def _bytes(config: Any, **sizes: int) -> int:
    names = ("num_slots", "num_pages", "page_size")
    state = init_state(config, max_pages=12, **{name: sizes[name] for name in names})
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_what_does_not_fit_is_refused_with_what_would(
    tiny_target: Target, tiny_head: Head, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes are those that the state has then; and what is reported to fit is the most that does."""
    config, shapes = _runner_of(tiny_target, tiny_head, **SIZES)
    total = _bytes(config, **SIZES)

    def check(free: int, **changes: int) -> None:
        monkeypatch.setattr(startup, "free_memory", lambda _mesh: free)
        check_state_fits(config, dataclasses.replace(shapes, **changes), None)

    with caplog.at_level(logging.INFO):
        check(total)
    assert "4 slots of 96 tokens take" in caplog.records[-1].getMessage()
    with pytest.raises(ConfigError, match=r"--cache-tokens \d+ fits") as error:
        check(total - 1)
    fitting = int(re.findall(r"--cache-tokens (\d+)", str(error.value))[0])
    assert fitting == (SIZES["num_pages"] - 1) * SIZES["page_size"]
    check(total - 1, num_pages=fitting // SIZES["page_size"])
    scarce = _bytes(config, **SIZES | {"num_slots": 2, "num_pages": 1})
    with pytest.raises(ConfigError, match="--max-slots 2 --cache-tokens 8 fits"):
        check(scarce)
    check(scarce, num_slots=2, num_pages=1)
    with pytest.raises(ConfigError, match="not even one slot fits"):
        check(1000)
    with pytest.raises(ConfigError, match="GB are free"):
        check(10**12, num_slots=10**9)


def _damaged(params: Any, spec: Any, name: str) -> Any:
    """The parameters with one number of one tensor that is none."""
    specs, structure = jax.tree.flatten(spec, is_leaf=is_spec)
    leaves = structure.flatten_up_to(params)
    at = next(i for i, each in enumerate(specs) if each.name == name)
    leaves[at] = leaves[at].at[(0,) * leaves[at].ndim].set(jnp.nan)
    return jax.tree.unflatten(structure, leaves)


def test_models_that_make_no_numbers_are_refused_by_the_tensor(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_numbers(make_runner(tiny_target, None, "off", num_slots=1), tiny_target)
    name = "model.layers.1.mlp.down_proj.weight"
    broken = dataclasses.replace(
        tiny_target, params=_damaged(tiny_target.params, target_spec(tiny_target.config), name)
    )
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        check_numbers(make_runner(broken, None, "off", num_slots=1), broken)
    monkeypatch.setattr(load, "check_weights", lambda *_args: None)
    with pytest.raises(CheckpointError, match="all weights are finite, and the logits are not"):
        check_numbers(make_runner(broken, None, "off", num_slots=1), broken)


def test_a_target_without_a_tokenizer_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_target(tmp_path, tiny.TARGET, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "load_target", lambda *_args, **_kw: pytest.fail("weights were read"))
        with pytest.raises(CheckpointError, match=r"no tokenizer files; expected one of tokenizer\.json"):
            load_models(str(tmp_path), "")
    assert load_models(str(tmp_path), "", has_tokenizer=False).target.folder == tmp_path


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads"])
def test_sizes_beyond_every_model_are_refused(tmp_path: Path, key: str) -> None:
    tiny.write_target(tmp_path, tiny.TARGET, seed=0)
    raw = read_json(tmp_path / "config.json")
    for value in (2**31, 10**18):
        write_json(tmp_path / "config.json", raw | {key: value})
        with pytest.raises(ConfigError, match=rf"config\.json: {key} must be at most \d+, got {value}"):
            load_models(str(tmp_path), "", has_tokenizer=False)
    assert model_config(raw, dtype="float32").vocab_size == 64


def test_clients_see_no_path(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "compile_all", lambda *_programs, **_settings: None)
    monkeypatch.setattr(launch, "check_numbers", lambda *_models: None)
    run = ServeRun(speculation="off", max_slots=1, max_model_len=64)

    def name(of_target: str, **settings: Any) -> str:
        return make_engine(
            Models(of_target, tiny_target, None, None), dataclasses.replace(run, **settings), lambda *_report: None
        ).model_name

    assert name("/home/someone/models/qwen3-8b") == "qwen3-8b"
    assert name("owner/model") == "owner/model"
    assert name("/home/someone/models/qwen3-8b", served_model_name="gpt-4o") == "gpt-4o"
    assert name("/") == "model"
