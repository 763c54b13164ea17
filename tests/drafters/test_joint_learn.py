"""Heads whose slots depend on each other learn the scores that they serve with, and every part of them learns."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_case import selected
from rounding import assert_same, tolerance
from scipy.special import log_softmax, logsumexp
from tiny_run import tiny_trainer

from specserve.checkpoints.load import Target
from specserve.drafters.dflash import joint, start
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.dflash.model import DFlashParams, block_logits, head_spec
from specserve.drafters.interface import Head
from specserve.drafters.learning import Rollout, Rows
from specserve.drafters.registry import DraftSettings, KindName
from specserve.interop.head import load_head
from specserve.kernels.rowwise import rms_norm
from specserve.models.params import init_params
from specserve.models.target import TargetParams
from specserve.train.step import LossConfig, teach

SETTINGS: dict[str, Any] = {"block_size": 4, "num_layers": 1, "aux_layers": (0, 1), "rank": 6}
KINDS: dict[str, tuple[KindName, dict[str, Any]]] = {
    "dspark": ("dspark", {}),
    "gated": ("dspark", {"markov": "gated"}),
    "rnn": ("dspark", {"markov": "rnn"}),
    "dflash2": ("dflash2", {}),
    "domino": ("domino", {}),
}


def _drafter(name: str, target: Target) -> DFlash:
    kind, more = KINDS[name]
    return DFlash(start.new_config(kind, DraftSettings(**SETTINGS, **more), target.config, target.config.vocab_size))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_learned_is_what_is_served(shallow_target: Target, rng: np.random.Generator, kind: str) -> None:
    """Logits, and what is learned beside them, of every slot after the row's own tokens, by what trees ask for."""
    drafter, seq = _drafter(kind, shallow_target), 16
    config = drafter.config
    draft: DFlashParams = init_params(head_spec(config), jax.random.key(1), "float32")
    draft = jax.tree.map(lambda x: x + 0.3 * jnp.asarray(rng.standard_normal(x.shape), jnp.float32), draft)
    token_ids = jnp.asarray(rng.integers(0, 64, (1, seq)), jnp.int32)
    ones = jnp.ones((1, seq), jnp.int32)
    rows = Rows(token_ids, ones > 0, ones, jnp.arange(seq, dtype=jnp.int32)[None], seeds=jnp.ones(1, jnp.uint32))
    rollout = Rollout(config.num_slots, remat=False)
    target_probs = rng.dirichlet(np.full(64, 0.2), seq).astype(np.float32)

    @jax.jit
    def train(target: TargetParams, draft: DFlashParams) -> tuple[jax.Array, ...]:
        aux = teach(target, LossConfig(shallow_target.config, drafter, rollout, 0.8), rows).aux_hidden_states
        states = jnp.stack(drafter.learn(draft, target, rows, aux, rollout))
        output, p = drafter.output(draft), target_probs[targets.positions]
        logits = drafter.logits(output, target, states)
        also = drafter.auxiliary_loss(output, target, states, logits, jnp.asarray(p))
        also = jnp.zeros(logits.shape[:-1]) if also is None else also
        return states[:, 0, :, : config.backbone.d_model], logits[:, 0], also[:, 0, :, None]

    @jax.jit
    def serve(target: TargetParams, draft: DFlashParams, states: jax.Array, tokens: jax.Array) -> tuple[jax.Array, ...]:
        """The scores of the last of some slots after the tokens of a path, and the logit of being accepted."""
        heads, width = draft.heads, joint.memory_width(config)
        normed = rms_norm(states, draft.norm, config.backbone.norm_eps)[:, None, None]
        logits = block_logits(draft.output, config, target, states[-1:, None])
        if isinstance(heads, joint.Selector):
            return logits[0, 0], selected(heads, config, logits, normed[-1], tokens[-1:, None])[0, 0]
        assert heads is not None
        table = joint.of_previous(heads, target.embedding)
        assert table is not None
        memory, features = jnp.zeros((1, 1, width)) if width else None, jnp.zeros(())
        for token, state in zip(tokens, normed, strict=True):
            memory, features = joint.read_token(heads, memory, table[token][None, None], state)
        if isinstance(heads, joint.Domino):
            after = joint.corrected(heads.up, heads.down, logits, features, normed[-1])
            return (after if len(tokens) > config.num_uncorrected else logits)[0, 0], jnp.zeros(())
        assert heads.confidence is not None
        sure = joint.confidences(heads.confidence, config, normed[-1], table[tokens[-1]][None, None])
        return joint.corrected(heads.bias, None, logits, features, normed[-1])[0, 0], sure[0, 0]

    targets = drafter.draft_targets(rows, rollout)
    assert targets.positions is not None
    args = shallow_target.params, draft
    (states, logits, also), (_, off, off_also) = train(*args), tolerance(train, *args)
    num_tested = 0
    for slot, column in np.argwhere(np.asarray(targets.weights)[:, 0] > 0):
        position = int(targets.positions[slot, 0, column])
        path = token_ids[0, targets.positions[: slot + 1, 0, column]]
        scores, extra = serve(*args, states[: slot + 1, column], path)
        assert_same(logits[slot, column], scores, off[slot, column], f"slot {slot}")
        p = target_probs[position].astype(np.float64)
        if config.name == "domino":
            expected = 0.0
        elif config.name == "dspark":
            alpha = np.minimum(p, np.exp(log_softmax(np.asarray(scores, np.float64)))).sum()
            sure = float(extra)
            expected = alpha * np.logaddexp(0, -sure) + (1 - alpha) * np.logaddexp(0, sure)
        else:
            chosen = np.isfinite(np.asarray(extra))
            assert chosen.sum() == config.selector_top_k
            share = p[chosen] / p[chosen].sum()
            kept = np.asarray(extra, np.float64)[chosen]
            expected = logsumexp(kept) - (share * kept).sum()
        assert_same(also[slot, column], np.float32([expected]), off_also[slot, column], f"slot {slot}")
        num_tested += 1
    assert num_tested > config.num_slots, "little was tested"


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_a_joint_head_learns(tmp_path: Path, shallow_target: Target, kind: str) -> None:
    """It begins as a head without: nothing depends on the token before. What is exported is of its kind."""
    drafter, target_ids = _drafter(kind, shallow_target), np.arange(64, dtype=np.int32)
    first = drafter.init_params(shallow_target, target_ids, seed=0)
    if first.markov is not None:
        assert not np.any(first.markov.bias)
    head, before = Head(drafter, first, target_ids), jax.tree.map(np.array, first)
    trainer = tiny_trainer(tmp_path / "run", shallow_target, head=head, drafter=KINDS[kind][0])
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        trainer.train()
    assert load_head(tmp_path / "run", shallow_target, dtype="float32").drafter == drafter
    after = jax.tree.map(np.array, trainer.learner.state.params)
    for (path, old), new in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        assert not np.array_equal(old, new), jax.tree_util.keystr(path)
