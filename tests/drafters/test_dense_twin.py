"""Heads as they are published equal a plain NumPy twin that reads their files (tests/support/dense_head.py): windows,
norms of queries and keys, biases, activations and flags mean in training what they mean there. Other laws hold training
equal to serving."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from dense_head import DenseHead, spans
from rounding import assert_same, tolerance

from specserve.checkpoints.load import Target
from specserve.drafters.eagle3.model import Eagle3Params, token_embedding
from specserve.drafters.eagle3.rollout import rollout_states
from specserve.drafters.interface import Head
from specserve.drafters.layers import windowed
from specserve.drafters.learning import Rollout, Rows
from specserve.drafters.peagle.model import PEagleParams
from specserve.drafters.peagle.rollout import in_order, num_anchors
from specserve.interop.findings import Dialect
from specserve.interop.head import head_files

LENGTHS, SEQ, ROLLOUT = (11, 17), 32, Rollout(4, remat=False)
FLAGS = {"norm_output": True, "fc_norm": True, "norm_before_residual": True, "norm_before_fc": True}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, GELU by erf": {"layers": windowed((5,)), "activation": "gelu_erf"},
    "norms, biases and GELU": {
        "num_layers": 2,
        "qk_norm": "head",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    },
    "latents": {"num_layers": 2, "has_embedding": True, "layers": windowed((0, 6)), **tiny.LATENTS},
    "windows": {"num_layers": 3, "layers": windowed((0, 6, 6))} | FLAGS,
    "Gemma 4's": tiny.GEMMA,
}

NARROW: dict[str, dict[str, Any]] = {"narrow": {"layers": windowed((2,))}}  # than the masked slots; no chain trains so


def _stirred(head: Head) -> Head:
    """Every part is to matter, those that begin as nothing too."""
    rng = np.random.default_rng(5)
    params = jax.tree.map(lambda x: jnp.asarray(x + 0.2 * rng.standard_normal(x.shape), x.dtype), head.params)
    return dataclasses.replace(head, params=params)


def _twin(head: Head, target: Target) -> DenseHead:
    shape = head.drafter.shape
    dialect: Dialect = "vllm" if shape.latent or shape.has_value_norm else "speculators"
    tensors, raw = head_files(head, target, dtype="float32", dialect=dialect, target_name="tiny")
    return DenseHead(raw, tensors)


def _rows(rng: np.random.Generator) -> Rows:
    """Two documents of other lengths, and padding."""
    rest = SEQ - sum(LENGTHS)
    document_ids = np.repeat([1, 2, 0], [*LENGTHS, rest])
    position_ids = np.concatenate([np.arange(n) for n in (*LENGTHS, rest)])
    return Rows(
        jnp.asarray(rng.integers(0, 64, (1, SEQ)), jnp.int32),
        jnp.asarray(document_ids > 0)[None],
        jnp.asarray(document_ids, jnp.int32)[None],
        jnp.asarray(position_ids, jnp.int32)[None],
        seeds=jnp.array([7], jnp.uint32),
    )


def _aux(head: Head, rng: np.random.Generator) -> jax.Array:  # [1, SEQ, taps * target_d_model]
    size = len(head.drafter.aux_layers) * head.drafter.shape.target_d_model
    return jnp.asarray(rng.standard_normal((1, SEQ, size)), jnp.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rollout_is_the_chain_of_the_twin(tiny_target: Target, rng: np.random.Generator, shape: str) -> None:
    head = _stirred(tiny.random_head(tiny_target.config, seed=3, **SHAPES[shape]))
    rows, aux, config = _rows(rng), _aux(head, rng), head.drafter.config

    @jax.jit
    def run(params: Eagle3Params) -> list[jax.Array]:
        embedding = token_embedding(params, tiny_target.params.embedding)
        states = rollout_states(params, config, embedding, rows, aux, ROLLOUT)
        return [head.drafter.logits(params.output, tiny_target.params, state)[0] for state in states]

    found, off, twin = run(head.params), tolerance(run, head.params), _twin(head, tiny_target)
    for span in spans(LENGTHS):
        own, tokens = np.asarray(aux)[0, span], np.asarray(rows.token_ids)[0, span]
        for at in (0, 1, 5, len(tokens) - 1 - ROLLOUT.length):
            for step, logits in enumerate(twin.drafts(own, tokens, at, ROLLOUT.length)):
                there = span.start + at
                assert_same(found[step][there], logits, off[step][there], f"{shape}: {there}, step {step}")


@pytest.mark.parametrize("shape", [name for name in (*SHAPES, "narrow") if name not in ("latents", "Gemma 4's")])
def test_masked_slots_are_those_of_the_twin(tiny_target: Target, rng: np.random.Generator, shape: str) -> None:
    slots = ROLLOUT.length
    head = _stirred(tiny.random_masked_head(tiny_target.config, seed=3, num_slots=slots, **(SHAPES | NARROW)[shape]))
    rows, aux, drafter = _rows(rng), _aux(head, rng), head.drafter
    config: Any = drafter.config

    @jax.jit
    def run(params: PEagleParams) -> list[jax.Array]:
        states = drafter.learn(params, tiny_target.params, rows, aux, ROLLOUT)
        return [drafter.logits(params.output, tiny_target.params, state)[0] for state in states]

    found, off, twin = run(head.params), tolerance(run, head.params), _twin(head, tiny_target)
    order, numbers, tried = np.asarray(in_order(rows))[0].tolist(), num_anchors(config, SEQ), 0
    for span in spans(LENGTHS):
        own, tokens = np.asarray(aux)[0, span], np.asarray(rows.token_ids)[0, span]
        for column, anchor in enumerate(order):
            at = anchor - span.start
            if not 0 <= at < len(tokens) - 1 or tried > 15:
                continue
            for slot, logits in enumerate(twin.foreseen(own, tokens, at, slots)):
                if column < numbers[slot]:
                    assert_same(found[slot][column], logits, off[slot][column], f"{shape}: {anchor}, slot {slot}")
            tried += 1
