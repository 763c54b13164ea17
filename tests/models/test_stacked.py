"""Stacked layers compute what separate ones do, in targets of every kind, alone and over a mesh."""

import dataclasses
from typing import Any

import bailing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from rounding import assert_same, tolerance
from spread import DELTA_NETS, DENSE, EXPERTS, LATENTS, SHARED_KEYS, mesh_of

from specserve.checkpoints.load import Target, load_target
from specserve.drafters.learning import Rollout, Rows
from specserve.mesh import made_for, on_mesh, whole
from specserve.models.config import LayerKind, ModelConfig
from specserve.models.families.table import model_config
from specserve.models.params import abstract, init_params
from specserve.models.presets import PRESETS
from specserve.models.sharding import place_target
from specserve.models.stacked import Stack, each_layer, last_layer, runs, stack_layers
from specserve.models.target import TargetParams, target_spec
from specserve.speculative.vocab import DraftVocab
from specserve.train.features import states_of_rows
from specserve.train.step import LossConfig, loss_and_gradient, place_rows, teach

WINDOWS = (LayerKind(window=5), LayerKind(window=5), LayerKind())
# by name: the config, the layers' kinds where they are not the family's, and the turns of each pattern and its length
CASES: dict[str, tuple[dict[str, Any], tuple[LayerKind, ...], list[tuple[int, int]]]] = {
    "plain": (DENSE | {"num_hidden_layers": 5}, (), [(1, 5)]),
    "windows": (DENSE | {"num_hidden_layers": 8}, (*WINDOWS, *WINDOWS, *WINDOWS[:2]), [(3, 2), (1, 2)]),
    "latents, dense first": (DENSE | EXPERTS | LATENTS | {"num_hidden_layers": 4}, (), [(1, 1), (1, 3)]),
    "delta nets": (DENSE | EXPERTS | DELTA_NETS | {"num_hidden_layers": 4}, (), [(2, 2)]),
}
INDEXED = {"model_type": "glm_moe_dsa", "index_n_heads": 4, "index_head_dim": 8, "index_topk": 6, "index_topk_freq": 2}
INDEXED |= {"index_skip_topk_offset": 1, "num_hidden_layers": 6}
CASES["choices shared"] = (DENSE | EXPERTS | LATENTS | INDEXED, (), [(1, 1), (2, 2), (1, 1)])
CASES["keys shared"] = (DENSE | SHARED_KEYS | {"num_hidden_layers": 8}, (), [(2, 2), (2, 2)])
CASES["lightning"] = (bailing.CASES["ring-linear"] | {"num_hidden_layers": 7}, (), [(1, 1), (2, 2), (1, 2)])
BATCH, SEQ = 8, 12


def _target(name: str, seed: int = 0) -> tuple[ModelConfig, TargetParams]:
    raw, kinds, _ = CASES[name]
    config = model_config(raw, dtype="float32")
    config = dataclasses.replace(config, layers=kinds or config.layers)
    return config, init_params(target_spec(config), jax.random.key(seed), "float32")


def _rows(rng: np.random.Generator) -> Rows:
    ids = np.sort(rng.integers(1, 3, (BATCH, SEQ)), axis=1)
    positions = np.broadcast_to(np.arange(SEQ), (BATCH, SEQ))
    tokens, mask = rng.integers(0, 64, (BATCH, SEQ)), rng.random((BATCH, SEQ)) < 0.7
    return Rows(*(jnp.asarray(x) for x in (tokens.astype(np.int32), mask, ids.astype(np.int32), positions)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, "") for name in CASES if name != "lightning"),
        pytest.param("lightning", "", marks=pytest.mark.slow),
        ("plain", "data=2,fsdp=4"),
        pytest.param("windows", "fsdp=2,tensor=2", marks=pytest.mark.slow),
        ("latents, dense first", "fsdp=2,tensor=2,expert=2"),
        pytest.param("delta nets", "data=2,fsdp=2,tensor=2", marks=pytest.mark.slow),
        pytest.param("lightning", "fsdp=8", marks=pytest.mark.slow),
    ],
)
def test_rows_and_what_a_head_learns_of_them_are_those_of_separate_layers(
    name: str, text: str, rng: np.random.Generator
) -> None:
    """With taps within a stack, at its ends and twice the same: the taps and the last states, and of targets without a
    recurrence the loss and its gradient."""
    (config, params), rows, mesh = _target(name, seed=2), _rows(rng), mesh_of(text) if text else None
    last = config.num_layers - 1
    aux_layers = (last, 0, 2, 2)
    head = tiny.random_head(config, 1, aux_layers=aux_layers, num_kv_heads=2, head_dim=8, rope=tiny.PLAIN_ROPE)
    loss = LossConfig(config, head.drafter, Rollout(2, remat=True), 0.8)

    def run(target: TargetParams, draft: Any, vocab: DraftVocab, rows: Rows) -> tuple[Any, ...]:
        states = states_of_rows(target, config, rows, aux_layers)
        if config.is_recurrent:
            return states
        seeds = jnp.arange(BATCH, dtype=jnp.uint32)
        own = dataclasses.replace(rows, seeds=seeds)
        return states, loss_and_gradient(draft, loss, target, vocab, own, lambda part: teach(target, loss, part))

    alone, args = jax.jit(run), (params, head.params, DraftVocab(jnp.asarray(head.target_ids)), rows)
    expected, rounding = alone(*args), tolerance(alone, *args)
    own = jax.tree.map(jnp.array, params)
    if mesh is not None:
        own = jax.device_put(own, place_target(config, target_spec(config), mesh))
    stacked = stack_layers(own, config)
    stacks = [(len(part.layers), part.num_turns) if isinstance(part, Stack) else (1, 1) for part in stacked.layers]
    assert stacks == CASES[name][2]
    draft, vocab = head.params, args[2]
    if mesh is not None:
        draft = jax.device_put(draft, head.drafter.place(mesh))
        vocab, rows = jax.device_put((vocab, rows), (whole(mesh), place_rows(mesh, (BATCH, SEQ))))
    assert_same(jax.jit(on_mesh(mesh, run))(stacked, draft, vocab, rows), expected, rounding)


def test_a_stack_takes_the_place_of_its_layers() -> None:
    """Their arrays are gone, and each can be had again, with the same bits."""
    config, params = _target("windows")
    kept = jax.device_get(params)
    stacked = stack_layers(params, config)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params.layers))
    for found, layer in zip(each_layer(stacked.layers), kept.layers, strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, layer)
    jax.tree.map(np.testing.assert_array_equal, last_layer(stacked.layers), kept.layers[-1])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(stacked))


def test_layers_are_stacked_where_a_program_over_rows_runs_on_an_accelerator(tiny_target: Target) -> None:
    def parts(**options: bool) -> list[type]:
        return [type(part) for part in load_target(tiny_target.folder, dtype="float32", **options).params.layers]

    with made_for("gpu"):
        assert parts(is_looped=True) == [Stack]
        assert Stack not in parts()
    assert Stack not in parts(is_looped=True)


@given(st.lists(st.sampled_from("ab"), max_size=12))
def test_patterns_that_repeat_give_the_sequence_again(keys: list[str]) -> None:
    again: list[str] = []
    for period, turns in runs(keys):
        again += keys[len(again) : len(again) + period] * turns
    assert again == keys


def test_most_targets_compile_few_layers() -> None:
    """As many as differ: with and without a window, with experts and without, of a mixer and of another."""

    def number(name: str) -> int:
        config = PRESETS[name].config()
        stacked = stack_layers(abstract(target_spec(config), "bfloat16"), config).layers
        return sum(len(part.layers) if isinstance(part, Stack) else 1 for part in stacked)

    found = {name: number(name) for name in PRESETS}
    assert found["qwen3-8b"] == 1
    # blocks of a mixer or an MLP alone, in patterns of several lengths
    assert (found.pop("nemotron-3-nano"), found.pop("nemotron-3-super")) == (14, 27)
    assert max(found.values()) <= 12, found
