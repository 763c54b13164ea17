"""What the tool that runs speculators' layer of multi-token prediction and the test that does not have in common: the
layer, its input, our logits."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carried
import jax
import jax.numpy as jnp
import numpy as np
import tiny

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.learning import Rollout, Rows
from specserve.models.target import TargetParams

WIDTH, SEQ = 16, 16
_SIZES = {"hidden_size": WIDTH, "intermediate_size": 24}
TARGETS: dict[str, dict[str, Any]] = {
    "plain": tiny.TARGET | _SIZES | {"architectures": ["Qwen3ForCausalLM"]},
    "experts": carried.NEXT | _SIZES | {"architectures": ["Qwen3NextForCausalLM"]},
}


@dataclass(frozen=True)
class Case:
    """A row of one document, what a target would have said about it, and the tables that its layer shares."""

    token_ids: np.ndarray  # [SEQ] int32
    states: np.ndarray  # [SEQ, WIDTH] float32, of the target's last layer, before its final norm
    embedding: np.ndarray  # [vocab, WIDTH]
    head: np.ndarray  # [vocab, WIDTH]

    @classmethod
    def random(cls, seed: int, embedding: np.ndarray, head: np.ndarray) -> "Case":
        rng = np.random.default_rng(seed)
        token_ids = rng.integers(0, len(embedding), SEQ).astype(np.int32)
        return cls(token_ids, rng.standard_normal((SEQ, WIDTH)).astype(np.float32), embedding, head)

    @classmethod
    def load(cls, path: Path) -> tuple["Case", np.ndarray]:  # and the logits [position, vocab]
        with np.load(path) as arrays:
            return cls(*(arrays[field.name] for field in dataclasses.fields(cls))), arrays["logits"]

    def save(self, path: Path, logits: np.ndarray) -> None:
        np.savez_compressed(path, **vars(self), logits=logits.astype(np.float32))

    @property
    def normed(self) -> np.ndarray:  # [SEQ, WIDTH] float32, what the target's output head would take
        squares = np.square(self.states.astype(np.float64)).mean(-1, keepdims=True)
        return (self.states / np.sqrt(squares + 1e-6)).astype(np.float32)


def random_layer(target: Target) -> Head:
    """A layer whose every part matters, norms too."""
    head, rng = tiny.random_carried_layer(target.config, seed=1), np.random.default_rng(7)

    def stir(x: jax.Array) -> jax.Array:
        return jnp.asarray(x + 0.15 * rng.standard_normal(x.shape), x.dtype)

    return dataclasses.replace(head, params=jax.tree.map(stir, head.params))


def our_logits(head: Head, case: Case) -> np.ndarray:  # [SEQ - 1, vocab]
    """Of the first step after every position but the last, by the rollout that trains, which another law holds equal to
    serving."""
    return np.asarray(_logits(head.drafter, head.params, *map(jnp.asarray, vars(case).values())))


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    drafter: Any, params: Any, token_ids: jax.Array, states: jax.Array, embedding: jax.Array, head: jax.Array
) -> jax.Array:
    ones, index = jnp.ones((1, SEQ), jnp.int32), jnp.arange(SEQ, dtype=jnp.int32)[None]
    norm = jnp.full(WIDTH, 0.0 if drafter.config.layer.norm_offset else 1.0)
    target, rows = TargetParams(embedding, (), norm, head.T), Rows(token_ids[None], ones > 0, ones, index)
    [first] = drafter.learn(params, target, rows, states[None], Rollout(1, remat=False))
    return drafter.logits(drafter.output(params), target, first[:, 1:])[0]  # each stands at the token that it follows
