"""benchmarks/specjax.py: turns are taken, and what a turn had is counted, with a trainer that stands in for SpecJAX."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import pytest
from side_by_side import BenchmarkError
from specjax import Epoch, Facts, Peer, table

TRAINER = """
import sys
from types import SimpleNamespace
import numpy as np
import jax.numpy as jnp

class DataLoader:
    def __init__(self, dataset, batch_sampler):
        self.dataset, self.batch_sampler = dataset, batch_sampler
    def __len__(self):
        return len(self.batch_sampler)
    def __iter__(self):
        for indices in self.batch_sampler:
            ids, masks = zip(*(self.dataset[i] for i in indices))
            yield {"input_ids": np.stack(ids), "attention_mask": np.stack(masks)}

def _eagle3_config_from_target(target, kind):
    return SimpleNamespace(draft_vocab_size=32000)

def save_eagle3_checkpoint(*args, **keywords):
    raise AssertionError("a checkpoint is written while the clock runs")

validate_eagle3_checkpoint = save_eagle3_checkpoint

def main():
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    assert jnp.bfloat16 is jnp.float32
    assert _eagle3_config_from_target(None, "qwen3").draft_vocab_size == 7
    lengths = LENGTHS
    dataset = [(np.ones(8, np.int32), (np.arange(8) < n).astype(np.int32)) for n in lengths]
    for epoch in range(int(flags["--num-epochs"])):
        len(DataLoader(dataset, [[0, 1], [2, 3]]))
        for batch in list(DataLoader(dataset, [[0, 1], [2, 3]])):
            pass
        save_eagle3_checkpoint(jnp.ones(3), None)
    save_eagle3_checkpoint(jnp.ones(3), None)
    validate_eagle3_checkpoint("")
"""


def _peer(folder: Path, lengths: str, rounds: int = 2) -> Peer:
    (folder / "specjax").mkdir()
    (folder / "specjax" / "__init__.py").touch()
    (folder / "specjax" / "train.py").write_text(TRAINER.replace("LENGTHS", lengths))
    facts = [Facts(n, [i >= 2 for i in range(n)]) for n in (3, 8, 12, 5, 1)]
    (folder / "facts.json").write_text(json.dumps([dataclasses.asdict(fact) for fact in facts]))
    options = argparse.Namespace(rounds=rounds, batch_size=2, seq_len=8, rollout=3, draft_vocab_size=7)
    return Peer(options, Path(sys.executable), folder, folder)


@pytest.mark.slow
def test_an_epoch_is_a_turn_and_its_tokens_are_counted(tmp_path: Path) -> None:
    with _peer(tmp_path, "[3, 8, 8, 5]") as peer:
        epochs = [peer.epoch() for _ in range(3)]
        for epoch in epochs:
            assert epoch.seconds > 0
            assert (epoch.useful, epoch.tokens, epoch.positions) == (1 + 6 + 6 + 3, 24, 32)
        with pytest.raises(BenchmarkError, match="SpecJAX ended"):
            peer.epoch()


@pytest.mark.slow
def test_other_tokens_than_ours_are_an_error(tmp_path: Path) -> None:
    with _peer(tmp_path, "[3, 8, 8, 4]") as peer, pytest.raises(BenchmarkError, match="AssertionError"):
        peer.epoch()


def test_ratios_are_of_turns_of_one_round() -> None:
    ours = [Epoch(1.0, 100, 150, 160), Epoch(2.0, 100, 150, 160)]
    theirs = [Epoch(2.0, 90, 150, 300), Epoch(4.0, 90, 150, 300)]
    lines = table({"specserve": ours, "SpecJAX": theirs}).splitlines()
    assert lines[2] == "| specserve | 75 | 112 | 120 | 6.2% | 2.22 (2.22-2.22) |"
    assert lines[3] == "| SpecJAX | 34 | 56 | 112 | 50.0% | 1.00 (1.00-1.00) |"
