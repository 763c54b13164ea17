"""What the tool that runs speculators' P-EAGLE and the test that does not have in common: the heads, their input, our
logits."""

import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from specserve.drafters.interface import Head
from specserve.drafters.layers import windowed
from specserve.drafters.learning import Rollout, Rows
from specserve.drafters.peagle.rollout import in_order, num_anchors

SLOTS, WIDTH, SEQ = 4, 16, 16
TARGET = tiny.TARGET | {"hidden_size": WIDTH, "architectures": ["Qwen3ForCausalLM"]}
CASES: dict[str, dict[str, Any]] = {  # of the heads that we write
    "plain": {"aux_layers": (0, 2, 4)},
    "flags": {"aux_layers": (1, 3), "norm_before_residual": True, "fc_norm": True, "num_layers": 2},
    "layers": {"aux_layers": (0, 2, 4), "num_layers": 3, "norm_before_fc": True},
    "windows": {"aux_layers": (0, 2, 4), "num_layers": 2, "qk_norm": "head", "layers": windowed((5, 0))},
}
ROLLOUT = Rollout(SLOTS, remat=False)


@dataclass(frozen=True)
class Case:
    """A row of one document and what a target would have said about it."""

    token_ids: np.ndarray  # [SEQ] int32
    aux_hidden_states: np.ndarray  # [SEQ, taps * WIDTH] float32

    @classmethod
    def random(cls, seed: int, num_taps: int) -> "Case":
        rng = np.random.default_rng(seed)
        token_ids = rng.integers(0, TARGET["vocab_size"], SEQ).astype(np.int32)
        return cls(token_ids, rng.standard_normal((SEQ, num_taps * WIDTH)).astype(np.float32))

    @classmethod
    def load(cls, path: Path) -> tuple["Case", np.ndarray]:  # and the logits [element, draft_vocab]
        with np.load(path) as arrays:
            return cls(arrays["token_ids"], arrays["aux_hidden_states"]), arrays["logits"]

    def save(self, path: Path, logits: np.ndarray) -> None:
        arrays = {"token_ids": self.token_ids, "aux_hidden_states": self.aux_hidden_states}
        np.savez_compressed(path, **arrays, logits=logits.astype(np.float32))

    @property
    def rows(self) -> Rows:
        return Rows(
            jnp.asarray(self.token_ids)[None],
            jnp.ones((1, SEQ), bool),
            jnp.ones((1, SEQ), jnp.int32),
            jnp.arange(SEQ, dtype=jnp.int32)[None],
            seeds=jnp.array([1], jnp.uint32),
        )


def elements(config: Any, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """The anchor and the slot of each state, slot by slot. Every slot but the last of a row is one of speculators
    too."""
    order, numbers = np.asarray(in_order(rows))[0], num_anchors(config, SEQ)
    return np.concatenate([order[:n] for n in numbers]), np.repeat(np.arange(SLOTS), numbers)


def our_logits(head: Head, case: Case) -> np.ndarray:  # [element, draft_vocab]
    """By the pass that trains, which another law holds equal to serving."""
    return np.asarray(_logits(head.drafter, head.params, case.rows, jnp.asarray(case.aux_hidden_states)[None]))


@functools.partial(jax.jit, static_argnums=0)
def _logits(drafter: Any, params: Any, rows: Rows, aux_hidden_states: jax.Array) -> jax.Array:
    target: Any = SimpleNamespace(embedding=params.network.embedding)
    states = drafter.learn(params, target, rows, aux_hidden_states, ROLLOUT)
    return drafter.logits(params.output, target, jnp.concatenate(states, axis=1))[0]
