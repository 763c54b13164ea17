"""Teachers that give one right token for a position, in place of the target's whole distribution (`train.teacher`).

Each is a teacher like the target itself (`chunked_loss.Teacher`), whose distribution has all its mass on one token. So
loss, accuracy and acceptance are those of this token: acceptance is then the draft's own probability of it.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from specserve.drafters.learning import Rows, shift
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.pytree import pytree
from specserve.speculative.vocab import DraftVocab
from specserve.train.chunked_loss import Teacher

TeacherName = Literal["soft", "greedy", "data"]


@pytree
class BestTokens:
    """The target's best token at each position: what a greedy step emits."""

    of: Teacher

    def distribution(self, target: TargetParams, config: ModelConfig, vocab: DraftVocab) -> tuple[jax.Array, jax.Array]:
        _, best = self.of.distribution(target, config, vocab)
        return jax.nn.one_hot(best, len(vocab.target_ids), dtype=jnp.float32), best


@pytree
class Written:
    """The tokens that the rows themselves go on with, written by the target or not."""

    token_ids: jax.Array  # [batch, seq] int32, the next token of each position

    def distribution(self, target: TargetParams, config: ModelConfig, vocab: DraftVocab) -> tuple[jax.Array, jax.Array]:
        del target, config
        size = len(vocab.target_ids)
        row = jnp.minimum(jnp.searchsorted(vocab.target_ids, self.token_ids), size - 1)
        best = jnp.where(vocab.target_ids[row] == self.token_ids, row, -1)
        return jax.nn.one_hot(best, size, dtype=jnp.float32), best


def make_teacher(name: TeacherName, target: Teacher, rows: Rows) -> Teacher:
    """The teacher that the setting names. `target` is the target's whole distribution."""
    if name == "data":
        return Written(shift(rows.token_ids, 1))
    if name == "greedy":
        return BestTokens(target)
    return target
