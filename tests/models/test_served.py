"""Parameters take the form that steps multiply by while they are read: it is the one that they would take afterwards,
no matrix is there twice, and what is wrong with them is still named."""

import dataclasses
import functools
import gc
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import seeded
import tiny
from engines import make_runner
from parity import ONE_OF_EACH, RAWS

from specserve.checkpoints import load
from specserve.checkpoints.load import Quantization, Target, load_target
from specserve.checkpoints.tensors import TensorFolder, write_tensors
from specserve.drafters.interface import Head
from specserve.errors import CheckpointError, ConfigError
from specserve.kernels import native
from specserve.kernels.matmul import Rounded
from specserve.models import sharding
from specserve.models.families.table import model_config
from specserve.models.params import specs
from specserve.models.served import served
from specserve.models.target import target_spec
from specserve.serve.launch import load_models
from specserve.serve.programs.program_list import list_programs
from specserve.serve.startup import check_numbers
from specserve.speculative.slot_state import init_state

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not native.is_available(), reason="parameters are packed for native kernels"
)


def _bytes(params: Any) -> Any:
    leaves, structure = jax.tree.flatten(params)
    return structure, [(leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for leaf in leaves]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_what_is_arranged_while_it_is_read_is_what_is_arranged_afterwards(
    case: str, quantization: Quantization, tmp_path: Path
) -> None:
    """Of every family, in floats and in few bits; and what has its form keeps it, array by array."""
    (tmp_path / "config.json").write_text(json.dumps(RAWS[case]))
    of_target = specs(target_spec(model_config(RAWS[case], dtype="float32")))
    seeded.write_weights(
        tmp_path, {name: spec.stored_shape for spec in of_target for name in spec.names}, 0, "bfloat16"
    )
    read = functools.partial(load_target, tmp_path, dtype="float32", quantization=quantization, is_served=True)
    found = read(is_arranged=True).params
    assert _bytes(found) == _bytes(served(read().params))
    again = served(found)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, found, again)))
    assert found.embedding.dtype == jnp.bfloat16


@pytest.mark.parametrize("to", ["int8", "fp8", "int4"])
def test_a_large_matrix_that_is_rounded_in_parts_has_the_same_numbers(
    to: Rounded, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    matrix = jnp.asarray(rng.standard_normal((70, 101)), jnp.float32)
    whole = load.rounded(matrix, to)
    monkeypatch.setattr(load, "MOST_ROUNDED", 70 * 40)
    assert _bytes(load.rounded(matrix, to)) == _bytes(whole)


def test_embeddings_that_bfloat16_does_not_hold_keep_all_their_bits(tmp_path: Path) -> None:
    tiny.write_target(tmp_path, tiny.TARGET, seed=0)
    target = load_target(tmp_path, dtype="float32", is_served=True, is_arranged=True)
    stored = TensorFolder(tmp_path).read("model.embed_tokens.weight")
    assert (stored.astype(ml_dtypes.bfloat16) != stored).any(), "or this shows nothing"
    np.testing.assert_array_equal(target.params.embedding, stored)


def test_no_step_widens_a_table_of_embeddings(tmp_path: Path) -> None:
    """XLA's CPU backend would, to take rows of bfloat16: for each call of a program all of it, which is what a small
    model's step takes several times over. So steps need no more memory than beside a table of float32."""
    temporary: list[list[int]] = []
    for dtype in (np.float32, ml_dtypes.bfloat16):
        tiny.write_target(tmp_path, tiny.TARGET | {"vocab_size": 2**16, "tie_word_embeddings": False}, seed=0)
        tensors = TensorFolder(tmp_path)
        arrays = {name: tensors.read(name).astype(dtype) for name in tensors.names()}
        write_tensors(tmp_path / "model.safetensors", arrays)
        target = load_target(tmp_path, dtype="float32", is_served=True, is_arranged=True)
        assert target.params.embedding.dtype == dtype
        runner = make_runner(target, tiny.random_head(target.config, seed=0), "chain:2", num_slots=2)
        of_each_kind = {program.kind: program for program in list_programs(runner)}
        temporary.append([runner.temporary_bytes(program) for program in of_each_kind.values()])
    widened = target.params.embedding.size * 4
    assert all(of_few_bits < of_many + widened / 2 for of_many, of_few_bits in zip(*temporary, strict=True))


def test_a_layer_is_let_go_of_before_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the memory of a start is that of what serves, and of one layer as it is stored."""
    tiny.write_target(tmp_path, tiny.TARGET | {"num_hidden_layers": 6}, seed=0)
    width = tiny.TARGET["intermediate_size"], tiny.TARGET["hidden_size"]
    most, put = 0, jax.device_put

    def counted(x: Any, *args: Any, **how: Any) -> Any:
        nonlocal most
        gc.collect()
        most = max(most, sum(array.shape in (width, width[::-1]) for array in jax.live_arrays()))
        return put(x, *args, **how)

    gc.collect()
    before = sum(array.shape in (width, width[::-1]) for array in jax.live_arrays())
    monkeypatch.setattr(jax, "device_put", counted)
    gc.freeze()  # what other tests have left is not looked through again and again
    try:
        load_target(tmp_path, dtype="float32", is_served=True, is_arranged=True)
    finally:
        gc.unfreeze()
    assert 0 < most - before <= 3, "gate, up and down of one layer"


def test_a_target_is_held_against_the_memory_that_it_takes_as_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bytes of a weight that is stored in bfloat16, and not the four of what it is computed in."""
    tiny.write_target(tmp_path, tiny.TARGET, seed=0)
    tensors = TensorFolder(tmp_path)
    names = tensors.names()
    write_tensors(tmp_path / "model.safetensors", {n: tensors.read(n).astype(ml_dtypes.bfloat16) for n in names})
    read = functools.partial(load_target, tmp_path, dtype="float32", is_served=True)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(read().params))
    monkeypatch.setattr(sharding, "free_memory", lambda _mesh: 0.8 * whole)
    with pytest.raises(ConfigError, match="GB are free"):
        read()
    read(is_arranged=True)
    monkeypatch.setattr(sharding, "free_memory", lambda _mesh: 0.3 * whole)
    with pytest.raises(ConfigError, match=r"or take 8-bit weights \(--quantization int8\)"):
        read(is_arranged=True)


def test_weights_that_are_no_numbers_are_named_as_they_are_stored(tmp_path: Path) -> None:
    """At once where they are checked, and by the server's own look at its logits where they were not."""
    tiny.write_target(tmp_path, tiny.TARGET, seed=0)
    tensors = TensorFolder(tmp_path)
    arrays = {name: tensors.read(name) for name in tensors.names()}
    name = "model.layers.1.mlp.up_proj.weight"  # one half of a matrix of the server
    arrays[name][3, 5] = np.nan
    write_tensors(tmp_path / "model.safetensors", arrays)
    read = functools.partial(load_target, tmp_path, dtype="float32", is_served=True, is_arranged=True)
    with pytest.raises(CheckpointError, match=rf"not a number or infinite: {re.escape(name)};"):
        read(is_checked=True)
    target = load_models(str(tmp_path), "", has_tokenizer=False).target
    with pytest.raises(CheckpointError, match=rf"not a number or infinite: {re.escape(name)};"):
        check_numbers(make_runner(target, None, "off", num_slots=1), target)


@pytest.mark.parametrize("speculation", ["off", "chain:2"])
def test_an_empty_state_is_the_same_however_it_is_made(tiny_target: Target, tiny_head: Head, speculation: str) -> None:
    runner = make_runner(tiny_target, tiny_head, speculation, num_slots=2)
    sizes: dict[str, Any] = dict(runner._calls._always["empty state"])
    assert _bytes(runner.state) == _bytes(init_state(runner.config, **sizes))
    grown = dataclasses.replace(runner.state, seq_lens=runner.state.seq_lens + 1)
    runner.state = grown
    runner.reset()
    assert not np.asarray(runner.state.seq_lens).any()
