"""What the tool that runs speculators and the test that does not have in common: the heads, their input, our logits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.eagle3.model import draft_logits
from specserve.drafters.eagle3.rollout import rollout_states
from specserve.drafters.interface import Head
from specserve.drafters.layers import windowed
from specserve.drafters.learning import Rollout, Rows

STEPS = 3
WIDTH = 16
TARGET = tiny.TARGET | {"hidden_size": WIDTH, "architectures": ["Qwen3ForCausalLM"]}
TAPS = (0, 2, 4)  # outputs of layers
CASES: dict[str, dict[str, Any]] = {  # of the heads that we write; "theirs" is made by speculators
    "plain": {"aux_layers": TAPS},
    "flags": {"aux_layers": TAPS, "norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "layers": {"aux_layers": TAPS, "num_layers": 3, "norm_before_fc": True},
    # speculators' rollouts count windows from where they began: one that is longer than the documents is none to both
    "qwen3": {"aux_layers": TAPS, "num_layers": 2, "qk_norm": "head", "layers": windowed((0, 14))}
    | {"activation": "gelu_tanh", "qkv_bias": True, "o_bias": True},
}
DOCUMENTS = np.array([1] * 9 + [2] * 7)  # of a packed row


@dataclass(frozen=True)
class Case:
    """A packed row and what a target would have said about it."""

    token_ids: np.ndarray  # [seq] int32
    position_ids: np.ndarray  # [seq] int32
    aux_hidden_states: np.ndarray  # [seq, taps * target_d_model] float32

    @classmethod
    def random(cls, seed: int) -> "Case":
        rng, seq = np.random.default_rng(seed), len(DOCUMENTS)
        starts = np.flatnonzero(np.diff(DOCUMENTS, prepend=0))
        position_ids = np.arange(seq) - np.repeat(starts, np.bincount(DOCUMENTS)[1:])
        token_ids = rng.integers(0, TARGET["vocab_size"], seq)
        taps = rng.standard_normal((seq, 3 * WIDTH)).astype(np.float32)
        return cls(token_ids.astype(np.int32), position_ids.astype(np.int32), taps)

    @classmethod
    def load(cls, path: Path) -> tuple["Case", np.ndarray]:  # and the logits [step, seq, draft_vocab]
        with np.load(path) as arrays:
            return cls(arrays["token_ids"], arrays["position_ids"], arrays["aux_hidden_states"]), arrays["logits"]

    def save(self, path: Path, logits: np.ndarray) -> None:
        np.savez_compressed(
            path,
            token_ids=self.token_ids,
            position_ids=self.position_ids,
            aux_hidden_states=self.aux_hidden_states,
            logits=logits.astype(np.float32),
        )


def our_logits(head: Head, case: Case) -> np.ndarray:  # [step, seq, draft_vocab]
    """By the rollout that trains, which another law holds equal to serving."""
    assert isinstance(head.drafter, Eagle3)
    assert head.params.embedding is not None
    rows = Rows(
        token_ids=jnp.asarray(case.token_ids)[None],
        loss_mask=jnp.ones((1, len(DOCUMENTS)), bool),
        document_ids=jnp.asarray(DOCUMENTS, jnp.int32)[None],
        position_ids=jnp.asarray(case.position_ids)[None],
    )
    states = rollout_states(
        head.params,
        head.drafter.config,
        head.params.embedding,
        rows,
        jnp.asarray(case.aux_hidden_states)[None],
        Rollout(STEPS, remat=False),
    )
    config = head.drafter.config
    return np.stack([jax.device_get(draft_logits(head.params.output, config, state))[0] for state in states])
