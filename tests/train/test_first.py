"""The first values of a new head (`train.first`)."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import parity
import pytest
from tiny_run import make_learner, tiny_run

from specserve.checkpoints.load import Target
from specserve.data.documents import Document
from specserve.data.loader import Loader
from specserve.data.packing import pack
from specserve.drafters.registry import DraftSettings, KindName
from specserve.train.learner import Learner, TrainingData

KINDS: dict[str, tuple[KindName, str, dict[str, Any]]] = {  # its kind, the target's family, and its settings
    "eagle3": ("eagle3", "gemma2", {}),
    "two layers, wide": ("eagle3", "llama-longrope", {"d_model": 48, "num_layers": 2}),
    "narrow, normed taps": ("eagle3", "gpt-oss", {"d_model": 24, "fc_norm": True}),
    "normed states": ("eagle3", "deepseek-v3", {"fc_norm": True, "norm_output": True}),
    "p-eagle": ("p-eagle", "qwen3-moe", {"block_size": 3}),
    "mtp": ("mtp", "gemma2", {}),
    "mtp, latents": ("mtp", "deepseek-v3", {"vocab_size": 48}),
    "mtp, biases": ("mtp", "gpt-oss", {}),
    "dflash": ("dflash", "gemma2", {}),
    "dspark": ("dspark", "llama-longrope", {}),
    "dflash2": ("dflash2", "qwen3-moe", {}),
}
SIZES = {"num_heads": 2, "num_kv_heads": 1, "d_ff": 32, "aux_layers": (0, 2)}  # but of a layer like the target's
VOCAB = 96
ROUNDING = 1e-5  # as a share of a guess's loss, of the logarithm of a sum of exponentials in float32


def _learner(case: str, target: Target, **changes: Any) -> Learner:
    """What learns on rows of random text."""
    kind, _, settings = KINDS[case]
    rng, run = np.random.default_rng(0), tiny_run(Path("none"), drafter=kind, batch_size=2, **changes)
    documents = [Document(rng.integers(0, VOCAB, 30).astype(np.int32), np.ones(30, bool)) for _ in range(4)]
    loader = Loader(pack(documents, run.train.seq_len), run.train.batch_size, 0)
    is_whole = kind == "dflash2" or (kind == "mtp" and not settings)
    target_ids = np.arange(VOCAB if is_whole else 48, dtype=np.int32)
    draft = DraftSettings(**{} if kind == "mtp" else SIZES, **settings)
    data = TrainingData(loader, target_ids, coverage=1.0)
    return make_learner(dataclasses.replace(run, draft=draft), target, data)


def _target(case: str, folder: Path) -> Target:
    return parity.golden_case(KINDS[case][1], folder).target


def _louder(target: Target, scale: float) -> Target:
    """The target with logits so many times as large."""
    offset = 1.0 if target.config.norm_offset else 0.0
    norm = (target.params.norm + offset) * scale - offset
    return dataclasses.replace(target, params=dataclasses.replace(target.params, norm=norm))


def _first_losses(learner: Learner) -> np.ndarray:  # [rollout]
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        return np.asarray(learner.step(1.0).rollout.loss)


@pytest.mark.parametrize("case", KINDS)
def test_a_new_head_is_at_worst_a_guess(tmp_path: Path, case: str) -> None:
    """In each step of its rollout, beside random targets of several families, whose logits are small or far too
    large. The second step is a real one: every parameter is a number still."""
    target = _target(case, tmp_path)
    learner = _learner(case, target)  # one for all, so that its programs are compiled once
    for scale in (0.1, 1.0, 30.0):
        learner.target = _louder(target, scale)
        learner.restore(learner._first_state())
        learner._is_fresh = True
        losses, guess = _first_losses(learner), math.log(learner.drafter.draft_vocab_size)
        assert np.all(losses > 0), "nothing was learnt"
        assert np.all(losses <= guess * (1 + ROUNDING)), (scale, losses, guess)
        assert np.all(np.isfinite(_first_losses(learner)))
